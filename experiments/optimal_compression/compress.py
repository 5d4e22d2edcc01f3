"""The channel: what a worker sends is encoded to bytes, counted, and decoded from those bytes alone.

Algorithms compute in float64. A compressor sees the float32 rounding of a vector, whose error (6e-8 of each coordinate) is
relative and therefore no obstacle to converging to 1e-10: what is sent goes to zero with the distance.
"""

from __future__ import annotations

import numpy as np
import torch

from experiments.optimal_compression.problems import Array
from tersegrad import Context, Message, Spec, parse

SEED = 0


class Channel:
    """Messages of one compressor for vectors of one dimension, and the bytes that they took so far."""

    def __init__(self, text: str, dimension: int, *, shrink: bool = False, seed: int = SEED) -> None:
        self.text = text
        self.compressor = parse(text)
        self.spec = Spec.flat(dimension)
        self.guarantee = self.compressor.guarantee(self.spec)
        self.sent = 0
        self._seed = seed
        # An unbiased compressor divided by 1 + omega is contractive: what error feedback needs.
        self.factor = 1 / (1 + self.guarantee.value) if shrink and self.guarantee.kind == "unbiased" else 1.0

    @property
    def omega(self) -> float:
        """Variance of an unbiased compressor; 0 for an exact one."""
        if self.guarantee.kind == "unbiased" or self.guarantee.value == 0:
            return self.guarantee.value
        raise ValueError(f"{self.text} is biased: {self.guarantee}")

    @property
    def alpha(self) -> float:
        """Error of the contractive operator that the channel applies."""
        g = self.guarantee
        return g.value / (1 + g.value) if g.kind == "unbiased" else g.value

    def send(self, x: Array, step: int, worker: int) -> Array:
        """What arrives."""
        ctx = Context(seed=self._seed, step=step, sender=worker)
        message, _ = self.compressor.encode(
            torch.from_numpy(x.astype(np.float32)), Spec.of(torch.from_numpy(x.astype(np.float32))), None, ctx
        )
        data = message.tobytes()
        self.sent += len(data)
        decoded = self.compressor.decode(Message.frombytes(data), self.spec, ctx)
        return self.factor * decoded.numpy().astype(np.float64)

    def send_all(self, rows: Array, step: int) -> Array:
        """What arrives of each worker's row."""
        return np.stack([self.send(row, step, worker) for worker, row in enumerate(rows)])

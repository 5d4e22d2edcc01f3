"""Ternary (TernGrad): each coordinate becomes -M, 0 or M, without bias.

Maps     x to M times random trits, M = max|x| over the buffer or over each bucket.
Formula  C(x)_i = M sign(x_i) b_i, b_i = 1 with probability |x_i| / M, else 0.
Promise  unbiased with omega = (sqrt(d) - 1) / 2, d the coordinates under one scale: E ||C(x) - x||^2 = M ||x||_1 - ||x||^2, and
         ||x||_inf ||x||_1 / ||x||^2 <= (1 + sqrt(d)) / 2: with one coordinate 1 and the others t <= 1 it is
         (1 + (d-1) t) / (1 + (d-1) t^2), largest at t = 1 / (1 + sqrt(d)) (for a fixed l1 norm equal others make the l2 norm
         least). |x_i| / M carries float32's rounding and is cut to 30 bits: a bias of at
         most 2^-21 |x_i| + 2^-30 M, and M ||x||_1 above grows by at most a factor 1 + 2^-21, which the value includes.
Wire     M as float32 for each bucket (NaN: the buffer held NaN or Inf), then trits + 1, five per byte in base 3, the first the
         least significant, the last byte padded with zeros. 1.6 bits per coordinate.
Source   Wen et al., "TernGrad", NeurIPS 2017, without their clipping. The draw of coordinate i has 32 bits: its own 16 on top,
         those of i ^ 1 below, so that small |x_i| / M keep their probability without a second generator call; each draw is
         uniform, which is all that bias and variance ask for.
"""

from __future__ import annotations

import dataclasses
import math
from typing import ClassVar

from torch import Tensor

from tersegrad import kernels
from tersegrad.core.errors import CorruptMessage
from tersegrad.core.protocol import Context, Guarantee, Spec
from tersegrad.core.stateless import FixedRate
from tersegrad.core.text import require


@dataclasses.dataclass(frozen=True)
class Ternary(FixedRate):
    """Random trits: 1.6 bits per coordinate. ``bucket``: coordinates that share a scale (a multiple of 64; none: all).

    >>> import torch
    >>> x = torch.tensor([4.0, -4.0, 0.0, 1.0])
    >>> message, _ = Ternary().encode(x, Spec.of(x), None, Context(seed=1))
    >>> message.nbytes, Ternary().decode(message, Spec.of(x), Context(seed=1))
    (5, tensor([ 4., -4.,  0.,  0.]))
    """

    name: ClassVar[str] = "ternary"
    wire_id: ClassVar[int] = 8
    examples: ClassVar[tuple[str, ...]] = ("ternary", "ternary(bucket=512)")
    bucket: int | None = None

    def __post_init__(self) -> None:
        good = self.bucket is None or (self.bucket > 0 and self.bucket % 64 == 0)
        require(good, f"ternary buckets are multiples of 64, got bucket={self.bucket}: leave it out for one scale")

    def nbytes(self, numel: int) -> int:
        return self._scales(numel) + -(-numel // 5)

    def pack(self, x: Tensor, data: Tensor, ctx: Context) -> None:
        kernels.get(x.device).ternary_encode(x, data, self._bucket(x.numel()), ctx)

    def unpack(self, data: Tensor, out: Tensor, weight: float | None) -> None:
        run, bucket = kernels.get(data.device), self._bucket(out.numel())
        fine = run.ternary_decode(data, out, bucket, weight)
        if not data.is_cpu:
            # Raising would wait for the device: bad trits decode to NaN, as if the sender had had no number to send.
            run.settle(out, fine)
        elif not fine:
            raise CorruptMessage("a byte of trits is at most 242 and ends in zeros")

    def _bucket(self, numel: int) -> int:
        return self.bucket or max(64, -(-numel // 64) * 64)

    def _scales(self, numel: int) -> int:
        """Bytes of the scales."""
        return 4 * -(-numel // self._bucket(numel))

    def guarantee(self, spec: Spec) -> Guarantee:
        return Guarantee("unbiased", self.wire_omega(spec))

    def wire_omega(self, spec: Spec) -> float:
        d = min(self._bucket(spec.numel), spec.numel)
        return (1 + 2.0**-21) * (math.sqrt(max(d, 1)) + 1) / 2 - 1

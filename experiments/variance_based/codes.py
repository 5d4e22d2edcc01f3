"""What a two-shot exchange of dithered codes gives, without its messages: the codes' errors are drawn and added.

The error of ``subtractive_dithering`` is uniform, whatever the vector is, with a variance that omega and the vector's norm give; that of
``dithered_trellis`` has the same variance, does not depend on the vector either, and its law is close to uniform. Every part of a
worker's vector has a step of its own, as in the package's exchange. Where this is used, the package writes the messages of some steps
(:func:`mean_of`).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from experiments.variance_based.fused import fused
from tersegrad import Context, Spec
from tersegrad.exchange import virtual
from tersegrad.exchange.two_shot import UNIT, borders


def whole(count: int) -> int:
    """Coordinates of a vector that ends with a whole unit."""
    return -(-count // UNIT) * UNIT


def parts(numel: int, workers: int) -> tuple[Tensor, Tensor]:
    """Where the parts of a vector end, in units, from 0 on; and the part of every unit."""
    ends = torch.tensor([-(-at // UNIT) for at in borders(numel, workers)])
    return ends, torch.repeat_interleave(torch.arange(workers), ends.diff())


@fused
def _noised(x: Tensor, u: Tensor, spread: Tensor, weight: float) -> Tensor:
    """The vector with the code's error, times ``weight``: (rows, units, UNIT); u is uniform on [0, 1)."""
    return (x + (u - 0.5) * spread) * weight


def decoded(x: Tensor, ends: Tensor, part: Tensor, omega: float, weight: float = 1.0) -> Tensor:
    """What is decoded of (rows, size) vectors, part by part, times ``weight``."""
    units = x.view(x.shape[0], -1, UNIT)
    sums = F.pad(units.square().sum(-1).double().cumsum(1), (1, 0))[:, ends].diff().clamp_min(0.0)
    # A unit at the end that is not full counts as if it were.
    spread = torch.sqrt((12 * omega / UNIT) * sums / ends.diff().clamp_min(1)).float()
    return _noised(units, torch.rand_like(units), spread[:, part].unsqueeze(-1), weight).view(x.shape)


def both_rounds(
    rows: Tensor, ends: Tensor, part: Tensor, omegas: tuple[float, float], weight: float = 1.0
) -> tuple[Tensor, Tensor]:
    """What is decoded of every worker's vector, times ``weight``, and of the mean of that."""
    sent = decoded(rows, ends, part, omegas[0], weight)
    return sent, decoded(sent.mean(0, keepdim=True), ends, part, omegas[1])[0]


def mean_of(exchange: Any, xs: list[Tensor], ranks: list[Any], spec: Spec, ctx: Context, sent: list[int]) -> Tensor:
    """What every rank decodes, as ``virtual.run`` gives it, but only the first decodes the last round; bytes are added to ``sent``.

    The states that the exchange leaves are dropped: for compressors that keep none.
    """
    running = [exchange.steps(x, state, spec, ctx, rank, len(xs)) for rank, (x, state) in enumerate(zip(xs, ranks))]
    values: list[Tensor | None] = [None] * len(xs)
    inside = [0] * len(xs)
    while True:
        requests = []
        for generator, value in zip(running, values):
            try:
                requests.append(generator.send(value))
            except StopIteration as stop:
                for other in running[1:]:
                    other.close()
                mean: Tensor = stop.value[0]
                return mean
        values = list(virtual.deliver(requests, sent, inside))

"""Levels of a dithered Gaussian coordinate, coded with probabilities that both ends know: no tables and nothing to learn.

Level a is the nearest integer to X + U, where X is normal with standard deviation ``sigma`` and 0 < U < 1/2 is known, given as the 15-bit
``size`` with U = (2 size + 1) / 2^17, of which the upper six bits count. For sigma >= 4 low bits of a are sent as they are. The cost of a
level grows with its square, so that vectors of one norm cost nearly the same whatever their shape.

Wire: ``spec/wire.md``, "Subtractive dithering". The stream begins with the bit 0, where the adaptive code of
:mod:`~tersegrad.codecs.levels` has a 1.

>>> import torch
>>> levels, sizes = torch.tensor([0, 1, 0, -2], dtype=torch.int32), torch.tensor([100, 30000, 5, 9000])
>>> data = encode(levels, sizes, 0.6)
>>> data.numel(), decode(data, sizes, 0.6).tolist()
(2, [0, 1, 0, -2])
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from tersegrad import kernels
from tersegrad.codecs import normal

CLASSES = 64
LEAST = 16  # of 65536: no decision is more certain than that


@functools.lru_cache(maxsize=64)
def model(sigma: float) -> tuple[Tensor, int]:
    """Chances of every decision in 2^16, (64, 1 + 2 reach) int32, and how many low bits are sent as they are."""
    shift = max(0, math.frexp(sigma)[1] - 2) if sigma >= 4 else 0
    reach = int(4 * sigma / (1 << shift)) + 2
    certain = 1 << 48
    rows = []
    for c in range(CLASSES):
        dither = (2 * (c * 512 + 256) + 1) / 131072

        # 2^48 P(a >> shift >= k), for k from -reach to reach + 1
        above = {k: normal.tail((k * (1 << shift) - 0.5 - dither) / sigma) for k in range(-reach, reach + 2)}
        upwards = [_ones(above[k + 1], above[k]) for k in range(1, reach + 1)]
        downwards = [_ones(certain - above[-k], certain - above[1 - k]) for k in range(reach)]
        rows.append([_ones(above[1], certain), *upwards, *downwards])
    return torch.tensor(rows, dtype=torch.int32), shift


def _ones(part: int, whole: int) -> int:
    return min(max((part << 16) // whole, LEAST), 65536 - LEAST) if whole > 0 else 1 << 15


def encode(levels: Tensor, sizes: Tensor, sigma: float) -> Tensor:
    """int32 levels as bytes."""
    table, shift = model(sigma)
    return kernels.get(levels.device).modelled_encode(levels, _classes(sizes), table, shift)


def decode(data: Tensor, sizes: Tensor, sigma: float) -> Tensor:
    """The levels, int32; raises :class:`~tersegrad.core.errors.CorruptMessage`."""
    table, shift = model(sigma)
    return kernels.get(data.device).modelled_decode(data, _classes(sizes), table, shift)


def _classes(sizes: Tensor) -> Tensor:
    return (sizes >> 9).to(torch.uint8)

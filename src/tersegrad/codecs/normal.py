"""The normal distribution in integers, so that every machine agrees on each bit of it.

exp(-z^2/2) follows from its neighbour by two multiplications of 160-bit fixed-point numbers, and Simpson's rule on cells of 2^-12
integrates it to about 2^-70. Nothing here depends on a mathematical library.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

CELLS = 4096  # a unit of z
RANGE = 8  # beyond this |z| the probability counts as zero
_SCALE = 160


@functools.cache
def tails() -> tuple[int, ...]:
    """round(2^48 P(Z > i / 4096)) for i = 0 .. 8 * 4096.

    >>> tails()[0] == 2**47, tails()[4096] / 2**48  # P(Z > 1) = 0.158655...
    (True, 0.158655253931...)
    """
    one = 1 << _SCALE
    half_cell = one // (2 * CELLS)
    exponent = half_cell * half_cell >> _SCALE + 1  # g^2/2 with g half a cell
    term, first = one, 0
    for n in range(1, 12):  # exp(-g^2/2), by its series
        first += term
        term = -(term * exponent >> _SCALE) // n
    # e(j+1)/e(j), and how this ratio falls from j to j+1.
    ratio, shrink = first, first * first >> _SCALE
    value, total = one, 0
    sums = [0]
    for _ in range(CELLS * RANGE):
        middle = value * ratio >> _SCALE
        ratio = ratio * shrink >> _SCALE
        end = middle * ratio >> _SCALE
        ratio = ratio * shrink >> _SCALE
        total += value + 4 * middle + end
        sums.append(total)
        value = end
    return tuple(((total - s << 48) + total) // (2 * total) for s in sums)


@functools.cache
def quantiles() -> Tensor:
    """Normal numbers in units of 2^-13, odd int32, indexed by a 16-bit draw: the centre of the cell that holds the quantile.

    >>> table = quantiles()
    >>> table[[0, 32767, 32768, 65535]].tolist(), round(float((table.double() / 8192).var()), 3)
    ([-35429, -1, 1, 35429], 1.0)
    """
    borders = torch.tensor(tails())
    # The upper tail at the middle of each 15-bit cell.
    wanted = (1 << 47) - (2 * torch.arange(32768) + 1) * (1 << 31)
    cells = torch.searchsorted(-borders, -wanted, right=True) - 1
    upper = (2 * cells + 1).to(torch.int32)
    return torch.cat([-upper.flip(0), upper])


def tail(z: float) -> int:
    """2^48 P(Z > z) at the nearest point of the grid."""
    k = round(min(max(z, -RANGE), RANGE) * CELLS)
    table = tails()
    return table[k] if k >= 0 else (1 << 48) - table[-k]

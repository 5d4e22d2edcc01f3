"""Random points on the sphere in plain torch: norms in notches, the search for the first word that is close enough, and its point.

A word is a vector of integers that a table gives for the draws of its number (``spec/wire.md``, "spherical"). Whether one is close enough
is decided by one float64 operation after another, so that every device finds the same.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import torch
from torch import Tensor

from tersegrad.core import host
from tersegrad.core.numbers import TINY
from tersegrad.core.philox import Purpose
from tersegrad.core.protocol import Context
from tersegrad.kernels.reference.drawn import random_rows, sphere_first
from tersegrad.kernels.reference.rounding import random_u16

# And for others: errors, find, looked_at, lowest, points, power, powers, restore, signs, words.
__all__ = ["sphere_norms", "sphere_points", "sphere_search"]

HUGE = float(torch.finfo(torch.float32).max)
CERTAIN = 40.0  # a search gives up after this many times the expected draws: with probability e^-40
NO_NORM = -(1 << 31)
# Below this alpha float32 products cannot tell words apart.
FINE = 1e-3

Rows = Callable[[Context, int, Tensor, int], Tensor]
Draw = Callable[[Context, int, int, int, torch.device], Tensor]
First = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


@functools.cache
def powers(g: int, device: torch.device = host.CPU) -> Tensor:
    """2^(j/g) for j = 0 .. g - 1, by square roots and products that every machine rounds alike."""
    table, root = [1.0], 2.0
    while len(table) < g:
        root = math.sqrt(root)
        table = [v for p in table for v in (p, p * root)]
    return torch.tensor(table, dtype=torch.float64).to(device)


def power(k: Tensor, g: int) -> Tensor:
    """2^(k/g), float64."""
    return torch.ldexp(powers(g, k.device)[k % g], k.div(g, rounding_mode="floor"))


def sphere_norms(square: Tensor, notches: int, ctx: Context | None) -> tuple[Tensor, Tensor]:
    norm, g = square.sqrt(), notches
    alive = (norm >= TINY) & torch.isfinite(norm)
    norm = norm.where(alive, 1.0)
    mantissa, exponent = torch.frexp(norm)
    if ctx is None:
        borders = powers(2 * g, norm.device)[1::2].contiguous()
        k = g * (exponent.long() - 1) + torch.searchsorted(borders, 2 * mantissa, right=True)
    else:
        below = g * (exponent.long() - 1) + torch.searchsorted(powers(g, norm.device), 2 * mantissa, right=True) - 1
        low, high = power(below, g), power(below + 1, g)
        draws = random_u16(ctx, Purpose.ROUNDING, 0, norm.numel(), norm.device)
        part = torch.round((norm - low) / (high - low) * 65536.0)
        k = below + (part.long() + draws >> 16)
    return k.where(alive, NO_NORM).to(torch.int32), power(k, g).where(alive, 0.0)


def words(rows: Rows, table: Tensor, ctx: Context, index: Tensor, width: int, d: int) -> Tensor:
    """The first ``d`` integers of the words with these numbers, (n, d) int32; ``width`` >= d fixes where words lie."""
    return table[rows(ctx, Purpose.CODEBOOK, index, width)[:, :d].long()]


def points(z: Tensor, scale: Tensor) -> Tensor:
    """The words as points at distance ``scale`` (float64) from the origin, (n, d) float32."""
    square = z.long().square().sum(1).double()  # an exact integer
    return ((scale / square.sqrt())[:, None] * z).to(torch.float32).clamp_(-HUGE, HUGE)


def errors(y: Tensor, x: Tensor) -> Tensor:
    """Squared distances of rows, float64, summed in the order of the columns."""
    total = torch.zeros(y.shape[0], dtype=torch.float64, device=y.device)
    for j in range(y.shape[1]):
        total += (y[:, j].double() - x[:, j].double()).square()
    return total


def signs(draw: Draw, ctx: Context, start: int, x: Tensor) -> Tensor:
    """Shared signs of coordinates: blocks that are alike search in different directions."""
    return (1 - 2 * (draw(ctx, Purpose.SIGN, start, x.numel(), x.device) & 1)).view(x.shape)


def looked_at(probability: float) -> tuple[int, int]:
    """How many words are looked at together, and at how many a search gives up."""
    rows = int(min(max(64.0, 0.5 / probability), 65536.0))
    return rows, -(-math.ceil(CERTAIN / probability) // rows) * rows


def lowest(scale: Tensor, size: Tensor, alpha: float) -> Tensor:
    """Words that are close enough have at least this cosine."""
    reach = scale / size
    return (reach.square() + 1 - alpha) / (2 * reach)


def find(
    draw: Draw,
    first: First,
    ctx: Context,
    x: Tensor,
    scale: Tensor,
    square: Tensor,
    alpha: float,
    probability: float,
    width: int,
    start: int | None,
    table: Tensor,
) -> Tensor:
    """:func:`sphere_search` by these draws. Scalar products of many words with many rows preselect.

    What counts is the error of the float32 values that will be decoded.
    """
    n, d = x.shape
    if start is not None:
        x = x * signs(draw, ctx, start, x)
    dtype, margin = (torch.float64, 1e-12) if alpha < FINE else (torch.float32, 1e-5)
    size = square.sqrt()
    least = (lowest(scale, size, alpha) - margin).to(dtype)
    units = (x.double() / size[:, None]).to(dtype)
    found = torch.full((n,), -1, dtype=torch.int64, device=x.device)
    stride = -(-width // 8) * 8
    left = ((square > 0) & torch.isfinite(square)).nonzero()[:, 0]
    at, (rows, limit) = 0, looked_at(probability)
    while left.numel() and at < limit:
        draws = draw(ctx, Purpose.CODEBOOK, at * stride, rows * stride, x.device).view(rows, stride)[:, :d]
        z = table[draws.long()]
        book = torch.nn.functional.normalize(z.to(dtype), dim=1).t().contiguous()
        trying, begin = left, torch.zeros_like(left)
        # Once, and again for the few words that the preselection took and the error refuses.
        while trying.numel():
            word = first(book, units[trying], least[trying], begin)
            trying, word = trying[word >= 0], word[word >= 0]
            good = errors(points(z[word], scale[trying]), x[trying]) <= alpha * square[trying]
            found[trying[good]] = at + word[good]
            trying, begin = trying[~good], word[~good] + 1
        left = left[found[left] < 0]
        at += rows
    return found


def restore(
    draw: Draw,
    rows: Rows,
    ctx: Context,
    index: Tensor,
    scale: Tensor,
    width: int,
    start: int | None,
    table: Tensor,
    out: Tensor,
    weight: float | None,
) -> None:
    """:func:`sphere_points` by these draws."""
    named = index >= 0
    if bool(named.all()):
        values = points(words(rows, table, ctx, index, width, out.shape[1]), scale)
    else:
        values = torch.zeros_like(out)
        values[named] = points(words(rows, table, ctx, index[named], width, out.shape[1]), scale[named])
    if start is not None:
        values *= signs(draw, ctx, start, out)
    _ = out.copy_(values) if weight is None else out.add_(values.mul_(weight))


def sphere_search(
    ctx: Context,
    x: Tensor,
    scale: Tensor,
    square: Tensor,
    alpha: float,
    probability: float,
    width: int,
    start: int | None,
    table: Tensor,
) -> Tensor:
    return find(random_u16, sphere_first, ctx, x, scale, square, alpha, probability, width, start, table)


def sphere_points(
    ctx: Context,
    index: Tensor,
    scale: Tensor,
    width: int,
    start: int | None,
    table: Tensor,
    out: Tensor,
    weight: float | None = None,
) -> None:
    restore(random_u16, random_rows, ctx, index, scale, width, start, table, out, weight)

"""Random points on the sphere by CUDA kernels: many words are tried at once, and the first that is close enough wins."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from tersegrad.core import host
from tersegrad.core.protocol import Context
from tersegrad.kernels.cuda import replay, scratch
from tersegrad.kernels.cuda.dither import Draws, draws_of
from tersegrad.kernels.cuda.loader import Argument, Double, VaryingFloat, launch
from tersegrad.kernels.reference.sphere import FINE, looked_at, powers

__all__ = ["sphere_norms", "sphere_points", "sphere_search"]

SOURCE = "sphere.cu"
THREADS = 256
# Rows of up to so many coordinates are compared with words in float32: rounding errors of their products stay below the margin.
NARROW = 64
# Warps that search at once, at least, if there are words for all.
WARPS = 8192
# Numbers of a book of words, at most, and how many times the expected draws it has. It serves from so many rows on.
BOOK, EXPECTED, SHARED = 1 << 22, 2, 256


@functools.lru_cache(maxsize=64)
def _notches(g: int, drawn: bool, device: torch.device) -> tuple[Tensor, Tensor]:
    """The powers of an octave, and what a norm is compared with."""
    each = powers(g)
    borders = each.clone() if drawn else powers(2 * g)[1::2].contiguous()
    found = host.send(each, device), host.send(borders, device)
    if device.type == "cuda":
        # Any stream may use them from now on.
        torch.cuda.current_stream(device).synchronize()
    return found


def sphere_norms(square: Tensor, notches: int, ctx: Context | None) -> tuple[Tensor, Tensor]:
    return _norms(square.contiguous(), notches, *_notches(notches, ctx is not None, square.device), draws_of(ctx))


@replay.operation
def _norms(square: Tensor, notches: int, each: Tensor, borders: Tensor, draws: Draws) -> tuple[Tensor, Tensor]:
    count = square.numel()
    found, sent = torch.empty(count, dtype=torch.int32, device=square.device), torch.empty_like(square)
    launch(SOURCE, "sphere_norms", -(-count // THREADS), THREADS, square, count, notches, each, borders, *draws, found, sent)
    return found, sent


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
    begin = -1 if start is None else start
    numbers = (Double(alpha), Double(probability), width, begin)
    return _search(x.contiguous(), scale.contiguous(), square.contiguous(), *numbers, table, draws_of(ctx))


@replay.operation
def _search(
    x: Tensor,
    scale: Tensor,
    square: Tensor,
    alpha: Double,
    probability: Double,
    width: int,
    start: int,
    table: Tensor,
    draws: Draws,
) -> Tensor:
    (rows, d), device = x.shape, x.device
    groups, (_, limit) = -(-width // 8), looked_at(probability)
    exact = alpha < FINE
    wide = exact or d > NARROW
    # A book for all rows, or a team of warps for each of a few.
    room = BOOK // d // 32 * 32
    known = min(-(-int(EXPECTED / probability) // 32) * 32, limit, room) if rows >= SHARED and not wide else 0
    team = max(1, min(WARPS // rows, -(-limit // 32)))
    found = torch.empty(rows, dtype=torch.int64, device=device)
    memory, (flipped, units, book) = scratch.empty(device, 4 * rows * d, (8 if wide else 4) * rows * d, 4 * known * d)
    bits = 64 if wide else 32
    launch(
        SOURCE, f"sphere_turn_{bits}", -(-rows * d // THREADS), THREADS, x, rows, d, start, square, *draws[1:], flipped, units
    )
    launch(SOURCE, "sphere_book", -(-known // THREADS), THREADS, known, groups, d, table, *draws[1:], book)
    launch(SOURCE, "sphere_begin", -(-rows // THREADS), THREADS, rows, found)
    given: tuple[Argument, ...] = (
        flipped,
        units,
        rows,
        d,
        groups,
        scale,
        square,
        alpha,
        Double(1e-12 if exact else 1e-5),
        limit,
    )
    blocks = -(-rows * team // (THREADS // 32))
    launch(SOURCE, f"sphere_search_{bits}", blocks, THREADS, *given, team, known, book, table, *draws[1:], found)
    launch(SOURCE, "sphere_end", -(-rows // THREADS), THREADS, rows, found)
    # What the kernels use is kept until here.
    del memory
    return found


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
    place = out if out.is_contiguous() else out.contiguous()
    by = None if weight is None else VaryingFloat(float(weight))
    _points(index.contiguous(), scale.contiguous(), width, -1 if start is None else start, table, place, by, draws_of(ctx))
    if place is not out:
        out.copy_(place)


@replay.operation
def _points(
    index: Tensor, scale: Tensor, width: int, start: int, table: Tensor, out: Tensor, weight: VaryingFloat | None, draws: Draws
) -> None:
    rows, d = out.shape
    groups, team = -(-width // 8), 1
    while team < 32 and 8 * team < d:
        team *= 2
    adds = (0.0, 0) if weight is None else (weight, 1)
    given = (index, scale, rows, d, groups, start, team, table, *draws[1:], *adds, out)
    launch(SOURCE, "sphere_points", -(-rows * team // THREADS), THREADS, *given)

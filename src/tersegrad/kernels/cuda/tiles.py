"""The largest coordinates of every chunk by CUDA kernels, and values back to their places. The host never waits."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tersegrad.core import host
from tersegrad.kernels.cuda import replay, scratch
from tersegrad.kernels.cuda.loader import VaryingFloat, launch
from tersegrad.kernels.reference.chunks import Area, areas

__all__ = ["chunk_carry", "chunk_choose", "chunk_scatter"]  # and for other modules of kernels: rows

SOURCE = "chunk_choose.cu"
THREADS = 256
# Coordinates of chunks that a warp has, and of those that a block of usual size has.
SMALL, USUAL = 1024, 4096


class Tiles(NamedTuple):
    """Where the chunks of a layout lie, for kernels; a tuple for ``replay``."""

    # As in chunks.cuh, with a row for the end.
    regions: Tensor
    areas: int
    chunks: int
    # Whether there are chunks of each size.
    small: bool
    usual: bool
    large: bool


def rows(found: Sequence[Area], coded: Mapping[tuple[int, int], tuple[int, int]]) -> Tensor:
    """Regions as in chunks.cuh: ``coded`` tells by size and number kept where splits are, and how many steps a chunk may have."""
    made, chunk, place, codes, spot, steps = [], 0, 0, 0, 0, 0
    for a in found:
        begin, room = coded.get((a.size, a.keep), (-1, 0))
        made.append(
            (
                a.start,
                a.cols,
                a.height,
                a.width,
                a.keep,
                a.size,
                a.cols // a.width,
                chunk,
                place,
                codes,
                spot,
                begin,
                steps,
                room,
            )
        )
        chunk, place = chunk + a.chunks, place + a.chunks * a.keep
        if begin >= 0:
            codes, spot, steps = codes + a.chunks, spot + a.chunks * a.keep, steps + a.chunks * room
    made.append((0, 1, 1, 1, 1, 1, 1, chunk, place, codes, spot, -1, steps, 0))
    return torch.tensor(made).reshape(-1)


def _tiles(regions: Tensor, device: torch.device) -> Tiles:
    return _found(regions.numpy().tobytes(), device)


@functools.lru_cache(maxsize=64)
def _found(regions: bytes, device: torch.device) -> Tiles:
    found = areas(torch.frombuffer(bytearray(regions), dtype=torch.int64))
    table = host.send(rows(found, {}), device)
    if device.type == "cuda":
        # Any stream may use it from now on.
        torch.cuda.current_stream(device).synchronize()
    sizes = [a.size for a in found]
    kinds = (any(s <= SMALL for s in sizes), any(SMALL < s <= USUAL for s in sizes), any(s > USUAL for s in sizes))
    return Tiles(table, len(found), sum(a.chunks for a in found), *kinds)


def chunk_choose(x: Tensor, regions: Tensor, places: Tensor, values: Tensor) -> Tensor:
    """Places and values of the largest coordinates of every chunk; whether ``x`` is finite (bool, 0-d)."""
    if not regions.numel():
        return torch.ones((), dtype=torch.bool, device=x.device)
    return _choose(x.contiguous(), None, 0.0, None, tuple(_tiles(regions, x.device)), places, values)


def chunk_carry(x: Tensor, carry: Tensor, decay: float, out: Tensor, regions: Tensor, places: Tensor, values: Tensor) -> Tensor:
    """``out = x + decay * carry``, and ``chunk_choose`` of it."""
    if not regions.numel():
        return torch.ones((), dtype=torch.bool, device=x.device)
    given = (float(decay), out, tuple(_tiles(regions, x.device)))
    return _choose(x.contiguous(), carry.contiguous(), *given, places, values)


@replay.operation
def _choose(
    x: Tensor, carry: Tensor | None, decay: float, out: Tensor | None, tiles: tuple[Any, ...], places: Tensor, values: Tensor
) -> Tensor:
    known = Tiles(*tiles)
    finite = torch.empty((), dtype=torch.bool, device=x.device)
    launch(SOURCE, "chunk_begin", 1, 1, finite)
    where = (known.regions, known.areas)
    given = (x, 0 if carry is None else carry, decay, 0 if out is None else out, places, values, finite)
    if known.small:
        launch(SOURCE, "chunk_choose_small", -(-known.chunks // 8), THREADS, *where, known.chunks, *given)
    if known.usual:
        launch(SOURCE, "chunk_choose_usual", known.chunks, THREADS, *where, *given)
    if known.large:
        launch(SOURCE, "chunk_choose_large", known.chunks, 1024, *where, *given)
    return finite


def chunk_scatter(places: Tensor, values: Tensor, regions: Tensor, out: Tensor, weight: float | None = None) -> None:
    """``out`` becomes zero except for ``values`` at their places; or ``weight`` times them are added to it."""
    if not regions.numel():
        return
    by = None if weight is None else VaryingFloat(float(weight))
    _scatter(places.contiguous(), values.contiguous(), tuple(_tiles(regions, out.device)), by, out)


@replay.operation
def _scatter(places: Tensor, values: Tensor, tiles: tuple[Any, ...], weight: VaryingFloat | None, out: Tensor) -> None:
    known, count = Tiles(*tiles), places.numel()
    if weight is None:
        scratch.zero(out, 4 * out.numel())
    adds = (0.0, 0) if weight is None else (weight, 1)
    where = (known.regions, known.areas)
    launch(SOURCE, "chunk_lay", -(-count // THREADS), THREADS, *where, count, places, values, *adds, out)

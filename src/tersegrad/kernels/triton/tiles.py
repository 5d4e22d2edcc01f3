# mypy: ignore-errors
"""Tiles of matrices: the largest coordinates of each, and cosine transforms (``spec/wire.md``, "Chunk sets" and "dct").

A program holds a tile of up to 4096 coordinates. Layouts with larger ones are left to the reference.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tersegrad.core import host
from tersegrad.kernels.reference import chunks, cosine
from tersegrad.kernels.triton.launch import as_bits, flag, flat, launch, raise_flag

HELD = 4096
INFINITE = tl.constexpr(0x7F800000)


class Alike(NamedTuple):
    """Tiles of one shape, wherever they lie."""

    height: int
    width: int
    keep: int
    starts: Tensor  # int64: the first coordinate of each
    strides: Tensor  # int64: from one of its rows to the next
    firsts: Tensor  # int64: its first place among all places


@functools.lru_cache(maxsize=64)
def _sorted(areas: tuple[chunks.Area, ...], device: torch.device, stream: int) -> tuple[Alike, ...]:
    kinds: dict[tuple[int, int, int], list[tuple[int, int, int]]] = {}
    first = 0
    for area in areas:
        own = kinds.setdefault((area.height, area.width, area.keep), [])
        for row in range(0, area.rows, area.height):
            for col in range(0, area.cols, area.width):
                own.append((area.start + row * area.cols + col, area.cols, first))
                first += area.keep
    return tuple(Alike(*kind, *host.send(torch.tensor(own).T.contiguous(), device)) for kind, own in kinds.items())


def _kinds(regions: Tensor, device: torch.device) -> tuple[Alike, ...] | None:
    """Tiles by shape; nothing where one is too large."""
    areas = tuple(chunks.areas(regions))
    return None if any(area.size > HELD for area in areas) else _sorted(areas, device, host.stream(device))


def _warps(size: int) -> int:
    return 8 if size >= 2048 else 4 if size >= 512 else 1


@triton.jit(do_not_specialize=["width", "size", "keep"])
def _choose(x, starts, strides, firsts, places, values, wrong, width, size, keep, SIZE: tl.constexpr):
    """The ``keep`` largest of each tile, in the order of their places."""
    tile = tl.program_id(0)
    i = tl.arange(0, SIZE)
    at = tl.load(starts + tile) + (i // width) * tl.load(strides + tile) + i % width
    value = tl.load(x + at, mask=i < size, other=0.0)
    key = tl.where(i < size, as_bits(value) & 0x7FFFFFFF, -1)
    raise_flag(wrong, tl.max(key, 0) >= INFINITE)
    # The largest key that at least ``keep`` reach, bit by bit.
    threshold = tl.max(key, 0) * 0
    for turn in range(31):
        tried = threshold | (1 << (30 - turn))
        threshold = tl.where(tl.sum((key >= tried).to(tl.int32), 0) >= keep, tried, threshold)
    above, level = key > threshold, key == threshold
    # Ties go to the lowest places.
    left = keep - tl.sum(above.to(tl.int32), 0)
    chosen = above | (level & (tl.cumsum(level.to(tl.int32), 0) <= left))
    to = tl.load(firsts + tile) + tl.cumsum(chosen.to(tl.int32), 0) - 1
    tl.store(places + to, i, mask=chosen)
    tl.store(values + to, value, mask=chosen)


@triton.jit(do_not_specialize=["weight", "width", "size", "keep"])
def _scatter(
    places, values, starts, strides, firsts, out, weight, width, size, keep, KEEP: tl.constexpr, WEIGHTED: tl.constexpr
):
    """The values of a tile to their places, or ``weight`` times them added to what stands there."""
    tile = tl.program_id(0)
    j = tl.arange(0, KEEP)
    mine = tl.load(firsts + tile) + j
    i = tl.load(places + mine, mask=j < keep, other=0)
    value = tl.load(values + mine, mask=j < keep, other=0.0)
    to = out + tl.load(starts + tile) + (i // width) * tl.load(strides + tile) + i % width
    inside = (j < keep) & (i >= 0) & (i < size)
    if WEIGHTED:
        value = tl.load(to, mask=inside, other=0.0) + value * weight
    tl.store(to, value, mask=inside)


@triton.jit(do_not_specialize=["height", "width"])
def _transform(x, out, basis, starts, strides, height, width, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, DOWN: tl.constexpr):
    """The columns of each tile (``DOWN``) or its rows, times a basis. Sums run in ascending order; their products are exact."""
    tile = tl.program_id(0)
    at, stride = tl.load(starts + tile), tl.load(strides + tile)
    row, col = tl.arange(0, HEIGHT)[:, None], tl.arange(0, WIDTH)[None, :]
    total = tl.zeros((HEIGHT, WIDTH), tl.float64)
    if DOWN:
        for j in range(height):
            terms = tl.load(x + at + j * stride + col, mask=col < width, other=0.0).to(tl.float64)
            total += tl.load(basis + j * height + row, mask=row < height, other=0.0) * terms
    else:
        for j in range(width):
            terms = tl.load(x + at + row * stride + j, mask=row < height, other=0.0).to(tl.float64)
            total += terms * tl.load(basis + j * width + col, mask=col < width, other=0.0)
    tl.store(out + at + row * stride + col, total.to(tl.float32), mask=(row < height) & (col < width))


def chunk_choose(x: Tensor, regions: Tensor, places: Tensor, values: Tensor) -> Tensor:
    """Places and values of the largest coordinates of every chunk; whether ``x`` is finite (bool, 0-d)."""
    kinds = _kinds(regions, x.device)
    if kinds is None:
        return chunks.chunk_choose(x, regions, places, values)
    x, wrong = flat(x), flag(x)
    for kind in kinds:
        size = kind.height * kind.width
        launch(
            _choose, kind.starts.numel(), (x, kind.starts, kind.strides, kind.firsts, places, values, wrong),
            (kind.width, size, kind.keep), SIZE=max(16, triton.next_power_of_2(size)), num_warps=_warps(size),
        )  # fmt: skip
    return (wrong == 0).reshape(())


def chunk_carry(x: Tensor, carry: Tensor, decay: float, out: Tensor, regions: Tensor, places: Tensor, values: Tensor) -> Tensor:
    """``out = x + decay * carry``, and ``chunk_choose`` of it."""
    return chunk_choose(torch.mul(carry, decay, out=out).add_(x), regions, places, values)


def chunk_scatter(places: Tensor, values: Tensor, regions: Tensor, out: Tensor, weight: float | None = None) -> None:
    """``out`` becomes zero except for ``values`` at their places; or ``weight`` times them are added to it."""
    kinds = _kinds(regions, out.device)
    if kinds is None:
        chunks.chunk_scatter(places, values, regions, out, weight)
        return
    if weight is None:
        out.zero_()
    for kind in kinds:
        numbers = (1.0 if weight is None else weight, kind.width, kind.height * kind.width, kind.keep)
        launch(
            _scatter, kind.starts.numel(), (places, values, kind.starts, kind.strides, kind.firsts, out), numbers,
            KEEP=triton.next_power_of_2(kind.keep), WEIGHTED=weight is not None, num_warps=_warps(kind.keep),
        )  # fmt: skip


@functools.lru_cache(maxsize=64)
def _basis(n: int, forward: bool, device: torch.device, stream: int) -> Tensor:
    rows = cosine.cosines(n).double()
    return host.send((rows.T if forward else rows).contiguous(), device)


def _both(x: Tensor, regions: Tensor, out: Tensor, forward: bool) -> Tensor:
    x, half, stream = flat(x), torch.empty_like(out), host.stream(x.device)
    for kind in _kinds(regions, x.device) or ():
        sizes, tiles = (kind.height, kind.width), (kind.starts, kind.strides)
        shape = {"HEIGHT": triton.next_power_of_2(kind.height), "WIDTH": triton.next_power_of_2(kind.width)}
        for source, to, down in ((x, half, True), (half, out, False)):
            basis = _basis(kind.height if down else kind.width, forward, x.device, stream)
            launch(
                _transform,
                kind.starts.numel(),
                (source, to, basis, *tiles),
                sizes,
                **shape,
                DOWN=down,
                num_warps=_warps(sizes[0] * sizes[1]),
            )
    return out


def cosine_forward(x: Tensor, regions: Tensor, out: Tensor) -> Tensor:
    """Coefficients of float32 ``x`` into ``out`` (another vector), which is returned."""
    return cosine.cosine_forward(x, regions, out) if _kinds(regions, x.device) is None else _both(x, regions, out, True)


def cosine_inverse(y: Tensor, regions: Tensor, out: Tensor) -> Tensor:
    """The inverse."""
    return cosine.cosine_inverse(y, regions, out) if _kinds(regions, y.device) is None else _both(y, regions, out, False)

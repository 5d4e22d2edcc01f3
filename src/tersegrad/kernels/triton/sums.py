# mypy: ignore-errors
"""Norms in the order of ``spec/wire.md``, section 5 ("Sums"), and largest magnitudes.

A program sums a few chunks of 4096 coordinates: 32 float64 lanes per chunk, one addition after another, the loads far ahead of
them. Folding a row of chunk sums "second half onto first" is the same as folding the columns of a matrix and then its one row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tersegrad.kernels.triton.launch import alignment, as_bits, cdiv, flag, flat, inside, launch, left_of, put_word

CHUNK = 4096
SQUARES, MAGNITUDES, SIGNS = 0, 1, 2


@triton.jit
def fold_last(a, ROWS: tl.constexpr, SIZE: tl.constexpr):
    """(ROWS, SIZE) -> (ROWS,): the second half is added to the first until one is left."""
    LOG: tl.constexpr = SIZE.bit_length() - 1
    for level in tl.static_range(LOG):
        a = tl.sum(tl.reshape(a, (ROWS, 2, SIZE >> (level + 1))), 1)
    return tl.reshape(a, (ROWS,))


@triton.jit
def fold_first(a, SIZE: tl.constexpr, COLUMNS: tl.constexpr):
    """(SIZE, COLUMNS) -> (COLUMNS,), likewise."""
    LOG: tl.constexpr = SIZE.bit_length() - 1
    for level in tl.static_range(LOG):
        a = tl.sum(tl.reshape(a, (2, SIZE >> (level + 1), COLUMNS)), 0)
    return tl.reshape(a, (COLUMNS,))


@triton.jit
def chunk_total(
    x, carry, bits, first, stop,
    KIND: tl.constexpr, SPAN: tl.constexpr, AHEAD: tl.constexpr, ROWS: tl.constexpr,
    ALIGN: tl.constexpr, RAGGED: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """The sums (ROWS,) of chunks ``first`` .. ``stop`` of up to ``SPAN`` coordinates of x; ``SPLIT``: of x + carry."""
    lane = tl.arange(0, 32)[None, :]
    total = tl.zeros((ROWS, 32), tl.float64)
    for at in range(0, SPAN, 32 * AHEAD):
        words = tl.zeros((ROWS, 32), tl.uint32)
        for j in tl.static_range(AHEAD):
            i = first[:, None] + (at + 32 * j + lane)
            mask = inside(i, stop[:, None], RAGGED)
            v = tl.load(x + i, mask=mask, other=0.0).to(tl.float32)
            if SPLIT:
                v += tl.load(carry + i, mask=mask, other=0.0)
            wide = v.to(tl.float64)
            if KIND == 0:
                total += wide * wide
            else:
                total += tl.abs(wide)
            if KIND == 2:
                word = tl.sum((v < 0).to(tl.uint32) << lane.to(tl.uint32), 1)
                words = tl.where(lane == j, word[:, None], words)
        if KIND == 2:
            byte = (first + at)[:, None] // 8 + 4 * lane
            if RAGGED:
                for b in tl.static_range(4):
                    here = (8 * (byte + b) < stop[:, None]) & (lane < AHEAD)
                    tl.store(bits + byte + b, (words >> (8 * b)).to(tl.uint8), mask=here)
            else:
                put_word(bits, byte // 4, words, (lane < AHEAD) | (AHEAD == 32), 4, ALIGN)
    return fold_last(total, ROWS, 32)


@triton.jit(do_not_specialize=["n", "block", "chunks", "count"])
def _chunk_sums(
    x, sums, bits, n, block, chunks, count,
    KIND: tl.constexpr, SPAN: tl.constexpr, AHEAD: tl.constexpr, ROWS: tl.constexpr,
    EXACT: tl.constexpr, CHUNKED: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """Sums of chunks; of kind ``SIGNS`` those of magnitudes, and the sign bits, 32 in a word.

    ``CHUNKED``: blocks have several chunks; else one each, and ``EXACT``: of ``SPAN`` coordinates.
    """
    chunk = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    if CHUNKED:
        first = chunk // chunks * block + chunk % chunks * 4096
        stop = tl.minimum(tl.minimum(first + 4096, (chunk // chunks + 1) * block), n)
    else:
        first = chunk * (SPAN if EXACT else block)
        stop = tl.minimum(first + block, n)
    for RAGGED in tl.static_range(2):
        if (tl.min(stop - first, 0) < SPAN) == RAGGED:
            total = chunk_total(x, x, bits, first, stop, KIND, SPAN, AHEAD, ROWS, ALIGN, RAGGED, False)
            tl.store(sums + chunk, total, mask=chunk < count)


@triton.jit(do_not_specialize=["count", "columns"])
def _fold(parts, out, count, columns, SIZE: tl.constexpr, COLUMNS: tl.constexpr):
    """Row program_id(1) of ``parts`` (rows, count), seen as (SIZE, columns) padded with zeros, to one of ``out`` (rows, columns)."""
    row = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    i = tl.arange(0, SIZE)[:, None].to(tl.int64) * columns + column[None, :]
    a = tl.load(parts + row * count + i, mask=(i < count) & (column < columns)[None, :], other=0.0)
    tl.store(out + row * columns + column, fold_first(a, SIZE, COLUMNS), mask=column < columns)


def fold(parts: Tensor) -> Tensor:
    """(rows, count) float64 -> (rows,)."""
    rows, count = parts.shape
    while count > 1:
        size = 1 << (count - 1).bit_length()
        columns = 1 if size <= 2048 else size // 64
        out = torch.empty(rows, columns, dtype=torch.float64, device=parts.device)
        wide = min(columns, 32)
        launch(_fold, (cdiv(columns, wide), rows), (parts, out), (count, columns), SIZE=size // columns, COLUMNS=wide)
        parts, count = out, columns
    return parts.view(-1)


def chunk_sums(x: Tensor, block: int, kind: int, bits: Tensor | None = None) -> Tensor:
    """(blocks, chunks) float64: the sums of all chunks of all blocks; ``bits`` takes the sign bits of kind ``SIGNS``."""
    n = x.numel()
    block = min(block, max(n, 1))
    blocks, chunks = cdiv(n, block), cdiv(block, CHUNK)
    sums = torch.empty(blocks, chunks, dtype=torch.float64, device=x.device)
    if n == 0:
        return sums
    count = blocks * chunks
    if blocks == 1:
        # The same as blocks of one chunk.
        block, chunks = min(block, CHUNK), 1
    span = max(32, 1 << (min(block, CHUNK) - 1).bit_length())
    rows = 2048 // span if span <= 1024 else 1
    where = sums if bits is None else bits
    launch(
        _chunk_sums, cdiv(count, rows), (x, sums, where), (n, block, chunks, count),
        KIND=kind, SPAN=span, AHEAD=min(32, span // 32), ROWS=rows, EXACT=block == span, CHUNKED=chunks > 1,
        ALIGN=alignment(where), num_warps=1,
    )  # fmt: skip
    return sums


def block_sum_squares(x: Tensor, block: int) -> Tensor:
    """Sum of squares of every block, in the fixed order of the schema."""
    return fold(chunk_sums(flat(x), block, SQUARES))


def block_sum_abs(x: Tensor, block: int) -> Tensor:
    """Sum of magnitudes of every block, in the fixed order of the schema."""
    return fold(chunk_sums(flat(x), block, MAGNITUDES))


def _whole(sums: Tensor) -> Tensor:
    return sums.view(()) if sums.numel() else sums.new_zeros(())


def sum_squares(x: Tensor) -> Tensor:
    """Sum of squares, in the fixed order of the schema."""
    return _whole(block_sum_squares(x, max(x.numel(), 1)))


def sum_abs(x: Tensor) -> Tensor:
    """Sum of magnitudes, in the fixed order of the schema."""
    return _whole(block_sum_abs(x, max(x.numel(), 1)))


@triton.jit(do_not_specialize=["n", "block", "blocks"])
def _row_max(x, out, n, block, blocks, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Largest magnitudes of ``ROWS`` blocks of at most ``WIDTH`` coordinates."""
    first = tl.program_id(0).to(tl.int64) * ROWS
    row, column = tl.arange(0, ROWS), tl.arange(0, WIDTH)[None, :]
    for RAGGED in tl.static_range(2):
        if (((first + ROWS) * WIDTH > n) | (block < WIDTH)) == RAGGED:
            if RAGGED:
                i = (first + row)[:, None] * block + column
                mask = (i < n) & (column < block)
            else:
                i = (first + row)[:, None] * WIDTH + column
                mask = inside(column, block, RAGGED)
            v = tl.load(x + i, mask=mask, other=0.0).to(tl.float32)
            tl.store(out + first + row, tl.max(as_bits(v) & 0x7FFFFFFF, 1), mask=first + row < blocks)


@triton.jit(do_not_specialize=["n", "block", "tiles"])
def _tile_max(x, out, n, block, tiles, TILE: tl.constexpr, ALIGN: tl.constexpr, ONE: tl.constexpr):
    """The largest magnitude of a tile, into that of its block, of which there is only ``ONE``."""
    at = tl.program_id(0).to(tl.int64)
    row = tl.zeros((), tl.int64) if ONE else at // tiles
    first = row * block + (at - row * tiles) * TILE
    left, i = left_of(tl.minimum((row + 1) * block, n), first, TILE), tl.arange(0, TILE)
    for RAGGED in tl.static_range(2):
        if (left < TILE) == RAGGED:
            v = tl.load(tl.multiple_of(x + first, ALIGN) + i, mask=inside(i, left, RAGGED), other=0.0).to(tl.float32)
            tl.atomic_max(out + row, tl.max(as_bits(v) & 0x7FFFFFFF, 0), sem="relaxed")


def block_max_bits(x: Tensor, block: int) -> Tensor:
    """The bits of the largest magnitude of every block, int32: magnitudes are ordered like their bits, NaN last."""
    n = x.numel()
    block = min(block, max(n, 1))
    blocks = cdiv(n, block)
    if block <= 2048:
        out = torch.empty(blocks, dtype=torch.int32, device=x.device)
        width = 1 << (block - 1).bit_length()
        rows = max(1, 2048 // width)
        if blocks:
            launch(_row_max, cdiv(blocks, rows), (x, out), (n, block, blocks), ROWS=rows, WIDTH=width)
        return out
    out = flag(x) if blocks == 1 else torch.zeros(blocks, dtype=torch.int32, device=x.device)
    tiles = cdiv(block, 8192)
    # The tiles of one block begin at multiples of their length.
    apart = 0 if blocks == 1 else block * x.element_size()
    launch(
        _tile_max, blocks * tiles, (x, out), (n, block, tiles),
        TILE=8192, ALIGN=alignment(x, apart), ONE=blocks == 1, num_warps=8,
    )  # fmt: skip
    return out


def block_abs_max(x: Tensor, block: int) -> Tensor:
    """Largest magnitude of every block."""
    return block_max_bits(flat(x), block).view(torch.float32)


def abs_max(x: Tensor) -> Tensor:
    """Largest magnitude; NaN or Inf exactly if ``x`` holds one."""
    return block_abs_max(x, x.numel()).view(()) if x.numel() else torch.zeros((), dtype=torch.float32, device=x.device)

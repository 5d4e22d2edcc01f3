# mypy: ignore-errors
"""Scaled signs: a scale per block, then one bit per coordinate (``spec/wire.md``, 5.7).

Blocks of up to 4096 coordinates, one chunk of the sums, take one pass: a program writes their bits as it adds up, then their scales,
and, where error feedback asks for it, what they leave out, from the cache. Longer blocks take their sums and bits, then their scales.
A vector with NaN or Inf raises a flag, and a last kernel writes its message over what was encoded.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from tersegrad.kernels.triton.codes import unpack
from tersegrad.kernels.triton.launch import (
    NAN,
    alignment,
    as_bits,
    as_float,
    cdiv,
    emit,
    flag,
    flat,
    fours,
    get_word,
    inside,
    launch,
    left_of,
    poison,
    put_word,
    raise_flag,
)
from tersegrad.kernels.triton.sums import CHUNK, SIGNS, chunk_sums, chunk_total, fold

TILE = 2048


@triton.jit
def _put_scales(total, count, out, k, here, flag, ALIGN: tl.constexpr):
    """Write the means of blocks ``k``; their bits (int32). The flag is raised for those that are none."""
    mean = total / tl.maximum(count, 1).to(tl.float64)
    finite = mean < float("inf")
    scale = tl.where(finite, as_bits(mean.to(tl.float32)), 0x7FC00000)
    put_word(out, k, scale.to(tl.uint32, bitcast=True), here, 4, ALIGN)
    raise_flag(flag, (finite == 0) & here)
    return scale


@triton.jit(do_not_specialize=["n", "block", "blocks"])
def _sign_blocks(
    x, carry, rest, flag, out, bits, n, block, blocks,
    SPAN: tl.constexpr, AHEAD: tl.constexpr, ROWS: tl.constexpr, ALIGN: tl.constexpr, BITS_ALIGN: tl.constexpr,
    SPLIT: tl.constexpr,
):  # fmt: skip
    """``ROWS`` blocks of at most ``SPAN`` coordinates. ``SPLIT``: of x + carry; ``rest`` becomes what the message leaves out."""
    k = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    first = k * block
    stop = tl.minimum(first + block, n)
    for RAGGED in tl.static_range(2):
        if (tl.min(stop - first, 0) < SPAN) == RAGGED:
            total = chunk_total(x, carry, bits, first, stop, 2, SPAN, AHEAD, ROWS, BITS_ALIGN, RAGGED, SPLIT)
            scale = _put_scales(total, stop - first, out, k, k < blocks, flag, ALIGN)
            if SPLIT:
                STRIDE: tl.constexpr = SPAN if ROWS > 1 else 512
                for at in range(0, SPAN, STRIDE):
                    i = first[:, None] + (at + tl.arange(0, STRIDE)[None, :])
                    mask = inside(i, stop[:, None], RAGGED)
                    v = tl.load(x + i, mask=mask, other=0.0).to(tl.float32) + tl.load(carry + i, mask=mask, other=0.0)
                    sent = as_float(scale[:, None] ^ ((v < 0).to(tl.int32) << 31))
                    tl.store(rest + i, v - sent, mask=mask)


@triton.jit(do_not_specialize=["n", "block", "blocks"])
def _sign_scales(totals, flag, out, n, block, blocks, TILE: tl.constexpr, ALIGN: tl.constexpr):
    k = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    here = k < blocks
    count = tl.minimum(n - k * block, block)
    _put_scales(tl.load(totals + k, mask=here, other=0.0), count, out, k, here, flag, ALIGN)


def _write_short(x: Tensor, carry: Tensor, out: Tensor, left: Tensor, block: int, split: bool) -> Tensor:
    """The message of blocks of up to ``CHUNK``; the flag that was raised where it is of a vector that is not finite."""
    n, blocks, raised = x.numel(), cdiv(x.numel(), block), flag(x)
    bits = out[4 * blocks :]
    span = 1 << (block - 1).bit_length()
    rows = 2048 // span if span <= 1024 else 1
    launch(
        _sign_blocks, cdiv(blocks, rows), (x, carry, left, raised, out, bits), (n, block, blocks),
        SPAN=span, AHEAD=min(32, span // 32), ROWS=rows, ALIGN=alignment(out), BITS_ALIGN=alignment(bits), SPLIT=split,
        num_warps=1,
    )  # fmt: skip
    poison(raised, out, 4 * blocks, NAN, 0)
    return raised


def sign_encode(x: Tensor, out: Tensor, block: int) -> None:
    """The mean magnitude of each block, then one bit per coordinate, set where x < 0."""
    n, blocks, x = x.numel(), cdiv(x.numel(), block), flat(x)
    if n == 0:
        return
    if block <= CHUNK:
        _write_short(x, x, out, x, block, False)
        return
    totals, raised = fold(chunk_sums(x, block, SIGNS, out[4 * blocks :])), flag(x)
    launch(_sign_scales, cdiv(blocks, 256), (totals, raised, out), (n, block, blocks), TILE=256, ALIGN=alignment(out))
    poison(raised, out, 4 * blocks, NAN, 0)


def sign_split(x: Tensor, carry: Tensor, out: Tensor, left: Tensor, block: int) -> Tensor:
    """The message of ``x + carry``, and what it leaves out; see the schema."""
    if x.numel() == 0:
        return flag(x).eq(0).view(())
    return _write_short(flat(x), flat(carry), out, left, block, True).eq(0).view(())


@triton.jit
def signed_scales(data, base, head, block, row, left, ALIGN: tl.constexpr, RAGGED: tl.constexpr):
    """The values of rows of four coordinates from ``base`` on, of which ``left`` are left, after ``head`` bytes of scales."""
    negative = unpack(data + head + base // 8, row, left, 1, 1, RAGGED)
    first = base // block
    # Blocks are multiples of 64 coordinates: a row lies in one of them.
    place = ((base - first * block).to(tl.int32) + 4 * row) // block
    scale = get_word(data + 4 * first, place, inside(4 * row, left, RAGGED), 4, ALIGN)
    return as_float(scale[:, None] ^ (negative.to(tl.uint32) << 31))


@triton.jit(do_not_specialize=["n", "head", "block", "weight"])
def _sign_decode(
    data, out, n, head, block, weight, TILE: tl.constexpr, ALIGN: tl.constexpr, WEIGHTED: tl.constexpr
):  # fmt: skip
    base = tl.program_id(0).to(tl.int64) * TILE
    left, i = left_of(n, base, TILE), fours(TILE)
    for RAGGED in tl.static_range(2):
        if (left < TILE) == RAGGED:
            value = signed_scales(data, base, head, block, tl.arange(0, TILE // 4), left, ALIGN, RAGGED)
            emit(out + base + i, value, inside(i, left, RAGGED), weight, WEIGHTED)


def sign_decode(data: Tensor, out: Tensor, block: int, weight: float | None = None) -> None:
    """Plus or minus the scale of the block."""
    n = out.numel()
    if n:
        numbers = (n, 4 * cdiv(n, block), block, 0.0 if weight is None else float(weight))
        kind = {"TILE": TILE, "ALIGN": alignment(data), "WEIGHTED": weight is not None}
        launch(_sign_decode, cdiv(n, TILE), (data, out), numbers, **kind)

# mypy: ignore-errors
"""Ternary and natural dithering: one float32 scale per bucket, then trits or codes (``spec/wire.md``, 5.8 and 5.10)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tersegrad.core.protocol import Context
from tersegrad.kernels.triton.codes import pack, unpack
from tersegrad.kernels.triton.launch import (
    NAN,
    alignment,
    as_bits,
    as_float,
    cdiv,
    draws_of,
    emit,
    flag,
    flat,
    fours,
    get_word,
    inside,
    last_first,
    launch,
    left_of,
    load_eights,
    poison,
    put_word,
    raise_flag,
)
from tersegrad.kernels.triton.philox import draws, words_of
from tersegrad.kernels.triton.sums import SQUARES, block_max_bits, chunk_sums, fold


@triton.jit
def _inverse(scale):
    """fl32(1 / scale): rounding the float64 quotient again changes nothing."""
    return (1.0 / scale.to(tl.float64)).to(tl.float32)


@triton.jit(do_not_specialize=["count"])
def _scales(statistics, flag, out, inverses, count, NORMS: tl.constexpr, TILE: tl.constexpr, ALIGN: tl.constexpr):
    """Scales from the bits of maxima, or from sums of squares (``NORMS``): into the message; and their inverses."""
    i = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    mask = i < count
    if NORMS:
        norm = tl.sqrt(tl.load(statistics + i, mask=mask, other=0.0))
        finite = norm < float("inf")
        norm = tl.where(norm < 1.1754943508222875e-38, 1.1754943508222875e-38, norm)
        bits = as_bits(tl.where(norm > 3.4028234663852886e38, 3.4028234663852886e38, norm).to(tl.float32))
    else:
        top = tl.load(statistics + i, mask=mask, other=0)
        finite = top < 0x7F800000
        bits = tl.maximum(top, 0x00800000)
    raise_flag(flag, mask & (finite == 0))
    put_word(out, i, bits.to(tl.uint32, bitcast=True), mask, 4, ALIGN)
    tl.store(inverses + i, _inverse(as_float(bits)), mask=mask)


def _scaled(statistics: Tensor, out: Tensor, raised: Tensor, norms: bool) -> Tensor:
    """Write the scales; their inverses."""
    count = statistics.numel()
    inverses = torch.empty(count, dtype=torch.float32, device=out.device)
    launch(
        _scales, cdiv(count, 512), (statistics, raised, out, inverses), (count,), NORMS=norms, TILE=512, ALIGN=alignment(out)
    )  # fmt: skip
    return inverses


@triton.jit
def _bucket(base, i, BUCKET: tl.constexpr):
    """The bucket of place ``i`` after coordinate ``base`` (int64); ``BUCKET`` is 0 where there is only one."""
    if BUCKET == 0:
        return i * 0
    else:
        return (base + i) // BUCKET


@triton.jit(do_not_specialize=["n", "head", "step", "who", "k0", "k1"])
def _ternary_encode(
    x, inverses, out, n, head, step, who, k0, k1, BUCKET: tl.constexpr, ROWS: tl.constexpr, ALIGN: tl.constexpr
):
    """A row is 40 coordinates: five Philox blocks, eight bytes."""
    first = last_first() * ROWS
    base = first * 40
    left, row, lane = left_of(n, base, 40 * ROWS), tl.arange(0, ROWS), tl.arange(0, 8)
    trits = tl.multiple_of(out + head, ALIGN) + first * 8
    for RAGGED in tl.static_range(2):
        if (left < 40 * ROWS) == RAGGED:
            low = tl.zeros((ROWS,), tl.int32)
            high = tl.zeros((ROWS,), tl.int32)
            for j in tl.static_range(5):
                eight = row * 5 + j
                v = load_eights(x + base, eight, left, ROWS, RAGGED)
                inverse = tl.load(inverses + _bucket(base, eight * 8, BUCKET), mask=inside(eight * 8, left, RAGGED), other=0.0)
                words = words_of(first * 5 + eight, step, who, k0, k1, 0, ROWS)
                # 32 bits: a coordinate's own 16, then its neighbour's.
                wide = tl.reshape(tl.join((words << 16) | (words >> 16), words), (ROWS, 8))
                share = tl.minimum(tl.abs(v) * inverse[:, None], 1.0)
                hit = (wide >> 2).to(tl.int32) < (share * 1073741824.0).to(tl.int32)
                trit = tl.where(hit, tl.where(as_bits(v) < 0, 0, 2), 1)
                if RAGGED:
                    trit = tl.where(eight[:, None] * 8 + lane[None, :] < left, trit, 0)
                place = 8 * j + lane
                digit = place % 5
                power = tl.where(digit == 0, 1, tl.where(digit == 1, 3, tl.where(digit == 2, 9, tl.where(digit == 3, 27, 81))))
                power = power << (place // 5 % 4 * 8)
                low += tl.sum(trit * tl.where(place < 20, power, 0)[None, :], 1)
                high += tl.sum(trit * tl.where(place < 20, 0, power)[None, :], 1)
            if RAGGED:
                for b in tl.static_range(4):
                    tl.store(trits + row * 8 + b, (low >> (8 * b)).to(tl.uint8), mask=row * 40 + 5 * b < left)
                    tl.store(trits + row * 8 + b + 4, (high >> (8 * b)).to(tl.uint8), mask=row * 40 + 5 * b + 20 < left)
            else:
                put_word(trits, row * 2, low.to(tl.uint32, bitcast=True), True, 4, ALIGN)
                put_word(trits, row * 2 + 1, high.to(tl.uint32, bitcast=True), True, 4, ALIGN)


def ternary_encode(x: Tensor, out: Tensor, bucket: int, ctx: Context) -> None:
    """The largest magnitude of each bucket, then trits, five per byte."""
    n = x.numel()
    if n == 0:
        return
    x, raised, buckets = flat(x), flag(x), cdiv(n, bucket)
    inverses = _scaled(block_max_bits(x, bucket), out, raised, False)
    kind = {"BUCKET": bucket if buckets > 1 else 0, "ROWS": 32, "ALIGN": alignment(out, 4 * buckets), "num_warps": 1}
    launch(_ternary_encode, cdiv(n, 40 * 32), (x, inverses, out), (n, 4 * buckets, *draws_of(ctx)), **kind)
    poison(raised, out, 4 * buckets, NAN, 0)


@triton.jit(do_not_specialize=["head", "count", "last"])
def _ternary_check(data, flag, head, count, last, TILE: tl.constexpr, ALIGN: tl.constexpr):
    """Bytes are below 243 = 3^5, the last one below 3 to the number of its trits."""
    base = tl.program_id(0).to(tl.int64) * TILE
    left, i = left_of(count, base, TILE), tl.arange(0, TILE // 16)[:, None] * 16 + tl.arange(0, 16)[None, :]
    trits = tl.multiple_of(data + head, ALIGN) + base
    for RAGGED in tl.static_range(2):
        if (left < TILE) == RAGGED:
            byte = tl.load(trits + i, mask=inside(i, left, RAGGED), other=0)
            raise_flag(flag, tl.max(byte.to(tl.int32), 1) >= 243)
    if base + TILE >= count:
        raise_flag(flag, tl.load(data + head + count - 1).to(tl.int32) >= last)


@triton.jit(do_not_specialize=["n", "head", "weight"])
def _ternary_decode(
    data, flag, fine, out, n, head, weight,
    BUCKET: tl.constexpr, PART: tl.constexpr, ALIGN: tl.constexpr, WEIGHTED: tl.constexpr,
):  # fmt: skip
    """Five times ``PART`` coordinates; ``fine`` becomes whether the flag is down."""
    base = tl.program_id(0).to(tl.int64) * (5 * PART)
    left, four = left_of(n, base, 5 * PART), tl.arange(0, PART // 4) * 4
    trits = data + head + tl.program_id(0).to(tl.int64) * PART
    down = tl.load(flag) == 0
    if base == 0:
        tl.store(fine, down)
    if WEIGHTED:
        left = tl.where(down, left, 0)
    for RAGGED in tl.static_range(2):
        if (left < 5 * PART) == RAGGED:
            for j in tl.static_range(5):
                row = j * PART + four
                i = row[:, None] + tl.arange(0, 4)[None, :]
                mask = inside(i, left, RAGGED)
                at = i.to(tl.uint32) // 5
                byte = tl.load(trits + at, mask=mask, other=0).to(tl.int32)
                # Digit d of a number below 3^5, from its product with 2^16 / 3^(1 + d), rounded up. Seven bits hold a power of 3.
                digit = i - 5 * at.to(tl.int32)
                power = (0x10624DD1 >> (7 * digit)) & 127
                trit = (((byte * 270 * power) & 0xFFFF) * 3) >> 16
                place = _bucket(base, row, BUCKET)
                scale = as_float(get_word(data, place, inside(row, left, RAGGED), 4, ALIGN))
                emit(out + base + i, (trit - 1).to(tl.float32) * scale[:, None], mask, weight, WEIGHTED)


def ternary_decode(data: Tensor, out: Tensor, bucket: int, weight: float | None = None) -> Tensor:
    """Trits less one, times the scale of their bucket; whether they are canonical. Where not, nothing is added."""
    n = out.numel()
    if n == 0:
        return torch.ones((), dtype=torch.bool, device=out.device)
    count, buckets, raised, fine = cdiv(n, 5), cdiv(n, bucket), flag(out), torch.empty((), dtype=torch.bool, device=out.device)
    head, last = 4 * buckets, 3 ** (n - 5 * (count - 1))
    launch(_ternary_check, cdiv(count, 4096), (data, raised), (head, count, last), TILE=4096, ALIGN=alignment(data, head))
    launch(
        _ternary_decode, cdiv(n, 5 * 512), (data, raised, fine, out), (n, head, 0.0 if weight is None else float(weight)),
        BUCKET=bucket if buckets > 1 else 0, PART=512, ALIGN=alignment(data), WEIGHTED=weight is not None,
    )  # fmt: skip
    return fine


@triton.jit(do_not_specialize=["n", "head", "levels", "least", "step", "who", "k0", "k1"])
def _natural_levels_encode(
    x, inverses, out, n, head, levels, least, step, who, k0, k1,
    BUCKET: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    base = last_first() * (8 * ROWS)
    left, row = left_of(n, base, 8 * ROWS), tl.arange(0, ROWS)
    u = draws(base // 8 + row, step, who, k0, k1, 0, ROWS)
    for RAGGED in tl.static_range(2):
        if (left < 8 * ROWS) == RAGGED:
            v = load_eights(x + base, row, left, ROWS, RAGGED)
            inverse = tl.load(inverses + _bucket(base, 8 * row, BUCKET), mask=inside(8 * row, left, RAGGED), other=0.0)
            y = tl.minimum(tl.abs(v) * inverse[:, None], 1.0)
            # The fraction of z is the chance to go up, its exponent the level.
            z = y + tl.maximum(y, least)
            level = ((as_bits(z) + 64 + (u << 7)) >> 23) - (128 - levels)
            code = (level << 1) | ((as_bits(v) < 0) & (level > 0)).to(tl.int32)
            if RAGGED:
                code = tl.where(row[:, None] * 8 + tl.arange(0, 8)[None, :] < left, code, 0)
            codes = tl.multiple_of(out + head, ALIGN) + base // 8 * WIDTH
            pack(code & ((1 << WIDTH) - 1), row, codes, left, WIDTH, ALIGN, RAGGED)


def natural_levels_encode(x: Tensor, out: Tensor, bucket: int, levels: int, width: int, ctx: Context) -> None:
    """The L2 norm of each bucket, then ``level << 1 | sign`` in ``width`` bits; level k > 0 is 2^(k - levels) of the norm."""
    n = x.numel()
    if n == 0:
        return
    x, raised, buckets = flat(x), flag(x), cdiv(n, bucket)
    inverses = _scaled(fold(chunk_sums(x, bucket, SQUARES)), out, raised, True)
    numbers = (n, 4 * buckets, levels, 2.0 ** (1 - levels), *draws_of(ctx))
    kind = {"BUCKET": bucket if buckets > 1 else 0, "WIDTH": width, "ROWS": 128, "ALIGN": alignment(out, 4 * buckets)}
    launch(_natural_levels_encode, cdiv(n, 1024), (x, inverses, out), numbers, **kind, num_warps=1)
    poison(raised, out, 4 * buckets, NAN, 0)


@triton.jit(do_not_specialize=["n", "head", "levels", "weight"])
def _natural_levels_decode(
    data, out, n, head, levels, weight,
    BUCKET: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr, ALIGN: tl.constexpr, WEIGHTED: tl.constexpr,
):  # fmt: skip
    base = tl.program_id(0).to(tl.int64) * TILE
    left, i, row = left_of(n, base, TILE), fours(TILE), tl.arange(0, TILE // 4)
    for RAGGED in tl.static_range(2):
        if (left < TILE) == RAGGED:
            code = unpack(data + head + base // 8 * WIDTH, row, left, WIDTH, ALIGN, RAGGED)
            level = code >> 1
            size = tl.where(level > 0, (level + (127 - levels)) << 23, 0)
            scale = as_float(get_word(data, _bucket(base, 4 * row, BUCKET), inside(4 * row, left, RAGGED), 4, ALIGN))
            value = as_float(size | ((code & 1) << 31)) * scale[:, None]
            emit(out + base + i, value, inside(i, left, RAGGED), weight, WEIGHTED)


def natural_levels_decode(data: Tensor, out: Tensor, bucket: int, levels: int, width: int, weight: float | None = None) -> None:
    """Powers of two of the norm of their bucket."""
    n = out.numel()
    if n == 0:
        return
    buckets = cdiv(n, bucket)
    numbers = (n, 4 * buckets, levels, 0.0 if weight is None else float(weight))
    kind = {"BUCKET": bucket if buckets > 1 else 0, "WIDTH": width, "TILE": 2048, "ALIGN": alignment(data, 4 * buckets)}
    launch(_natural_levels_decode, cdiv(n, 2048), (data, out), numbers, **kind, WEIGHTED=weight is not None)

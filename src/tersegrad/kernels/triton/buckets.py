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
    aligned,
    as_bits,
    as_float,
    cdiv,
    draws_of,
    emit,
    flag,
    flat,
    get_word,
    launch,
    poison,
    put_word,
    raise_flag,
)
from tersegrad.kernels.triton.philox import draws
from tersegrad.kernels.triton.sums import SQUARES, block_max_bits, chunk_sums, fold


@triton.jit
def _inverse(scale):
    """fl32(1 / scale): rounding the float64 quotient again changes nothing."""
    return (1.0 / scale.to(tl.float64)).to(tl.float32)


@triton.jit(do_not_specialize=["count"])
def _scales(statistics, flag, out, inverses, count, NORMS: tl.constexpr, TILE: tl.constexpr, ALIGNED: tl.constexpr):
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
    raise_flag(flag, tl.max(tl.where(mask & (finite == 0), 1, 0), 0) > 0)
    put_word(out, i, bits.to(tl.uint32, bitcast=True), mask, 4, ALIGNED)
    tl.store(inverses + i, _inverse(as_float(bits)), mask=mask)


def _scaled(statistics: Tensor, out: Tensor, raised: Tensor, norms: bool) -> Tensor:
    """Write the scales; their inverses."""
    count = statistics.numel()
    inverses = torch.empty(count, dtype=torch.float32, device=out.device)
    launch(
        _scales, cdiv(count, 512), (statistics, raised, out, inverses), (count,), NORMS=norms, TILE=512, ALIGNED=aligned(out, 4)
    )  # fmt: skip
    return inverses


@triton.jit(do_not_specialize=["n", "bucket", "step", "who", "k0", "k1"])
def _ternary_encode(x, inverses, out, n, bucket, step, who, k0, k1, ROWS: tl.constexpr, ALIGNED: tl.constexpr):
    """A row is 40 coordinates: five Philox blocks, eight bytes."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    lane = tl.arange(0, 8)
    word = tl.zeros((ROWS,), tl.int64)
    for j in tl.static_range(5):
        i = row[:, None] * 40 + (8 * j + lane)[None, :]
        mask = i < n
        v = tl.load(x + i, mask=mask, other=0.0).to(tl.float32)
        inverse = tl.load(inverses + i // bucket, mask=mask, other=1.0)
        u = draws(row * 5 + j, step, who, k0, k1, 0, ROWS)
        # 32 bits: a coordinate's own, then its neighbour's.
        even, odd = tl.split(tl.reshape(u, (ROWS, 4, 2)))
        other = tl.reshape(tl.join(odd, even), (ROWS, 8))
        wide = (u.to(tl.uint32) << 16) | other.to(tl.uint32)
        share = tl.minimum(tl.abs(v) * inverse, 1.0)
        hit = (wide >> 2).to(tl.int32) < (share * 1073741824.0).to(tl.int32)
        trit = tl.where(mask, 1 + tl.where(hit, tl.where(as_bits(v) < 0, -1, 1), 0), 0)
        place = 8 * j + lane
        digit = place % 5
        power = tl.where(digit == 0, 1, tl.where(digit == 1, 3, tl.where(digit == 2, 9, tl.where(digit == 3, 27, 81))))
        weight = power.to(tl.int64) << (place // 5 * 8).to(tl.int64)
        word += tl.sum(trit.to(tl.int64) * weight[None, :], 1)
    left = (n - row * 40 + 4) // 5
    put_word(out, row * 2, word.to(tl.uint32), left >= 8, 4, ALIGNED)
    put_word(out, row * 2 + 1, (word >> 32).to(tl.uint32), left >= 8, 4, ALIGNED)
    for b in tl.static_range(8):
        tl.store(out + row * 8 + b, (word >> (8 * b)).to(tl.uint8), mask=(left < 8) & (b < left))


def ternary_encode(x: Tensor, out: Tensor, bucket: int, ctx: Context) -> None:
    """The largest magnitude of each bucket, then trits, five a byte."""
    n = x.numel()
    if n == 0:
        return
    x, bucket, raised = flat(x), min(bucket, n), flag(x)
    head = 4 * cdiv(n, bucket)
    inverses = _scaled(block_max_bits(x, bucket), out, raised, False)
    kind = {"ROWS": 32, "ALIGNED": aligned(out, 4), "num_warps": 1}
    launch(_ternary_encode, cdiv(n, 40 * 32), (x, inverses, out[head:]), (n, bucket, *draws_of(ctx)), **kind)
    poison(raised, out, head, NAN, 0)


@triton.jit(do_not_specialize=["count", "last"])
def _ternary_check(trits, flag, count, last, TILE: tl.constexpr):
    """Bytes are below 243 = 3^5, the last one below 3 to the number of its trits."""
    i = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    byte = tl.load(trits + i, mask=i < count, other=0).to(tl.int32)
    raise_flag(flag, tl.max((byte >= tl.where(i == count - 1, last, 243)).to(tl.int32), 0) > 0)


@triton.jit(do_not_specialize=["n", "bucket", "weight"])
def _ternary_decode(
    data, trits, flag, out, n, bucket, weight, TILE: tl.constexpr, ALIGNED: tl.constexpr, WEIGHTED: tl.constexpr
):
    i = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    mask = i < n
    if WEIGHTED:
        mask = mask & (tl.load(flag) == 0)
    byte = tl.load(trits + i // 5, mask=mask, other=0).to(tl.int32)
    digit = (i % 5).to(tl.int32)
    power = tl.where(digit == 0, 1, tl.where(digit == 1, 3, tl.where(digit == 2, 9, tl.where(digit == 3, 27, 81))))
    trit = byte // power % 3
    scale = as_float(get_word(data, i // bucket, mask, 4, ALIGNED))
    emit(out + i, (trit - 1).to(tl.float32) * scale, mask, weight, WEIGHTED)


def ternary_decode(data: Tensor, out: Tensor, bucket: int, weight: float | None = None) -> Tensor:
    """Trits less one, times the scale of their bucket; whether they are canonical. Where not, nothing is added."""
    n = out.numel()
    if n == 0:
        return torch.ones((), dtype=torch.bool, device=out.device)
    bucket, count, raised = min(bucket, n), cdiv(n, 5), flag(out)
    trits = data[4 * cdiv(n, bucket) :]
    launch(_ternary_check, cdiv(count, 1024), (trits, raised), (count, 3 ** (n - 5 * (count - 1))), TILE=1024)
    launch(
        _ternary_decode, cdiv(n, 1024), (data, trits, raised, out), (n, bucket, 0.0 if weight is None else float(weight)),
        TILE=1024, ALIGNED=aligned(data, 4), WEIGHTED=weight is not None,
    )  # fmt: skip
    return (raised == 0).view(())


@triton.jit(do_not_specialize=["n", "bucket", "levels", "least", "step", "who", "k0", "k1"])
def _dithering_encode(
    x,
    inverses,
    out,
    n,
    bucket,
    levels,
    least,
    step,
    who,
    k0,
    k1,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    i = row[:, None] * 8 + tl.arange(0, 8)[None, :]
    mask = i < n
    v = tl.load(x + i, mask=mask, other=0.0).to(tl.float32)
    inverse = tl.load(inverses + i // bucket, mask=mask, other=1.0)
    y = tl.minimum(tl.abs(v) * inverse, 1.0)
    # The fraction of z is the chance to go up, its exponent the level.
    z = y + tl.maximum(y, least)
    u = draws(row, step, who, k0, k1, 0, ROWS)
    level = ((as_bits(z) + 64 + (u << 7)) >> 23) - (128 - levels)
    code = (level << 1) | ((as_bits(v) < 0) & (level > 0)).to(tl.int32)
    pack(tl.where(mask, code, 0) & ((1 << WIDTH) - 1), row, out, n, WIDTH, ALIGNED)


def dithering_encode(x: Tensor, out: Tensor, bucket: int, levels: int, width: int, ctx: Context) -> None:
    """The L2 norm of each bucket, then ``level << 1 | sign`` in ``width`` bits; level k > 0 is 2^(k - levels) of the norm."""
    n = x.numel()
    if n == 0:
        return
    x, bucket, raised = flat(x), min(bucket, n), flag(x)
    head = 4 * cdiv(n, bucket)
    inverses = _scaled(fold(chunk_sums(x, bucket, SQUARES)), out, raised, True)
    numbers = (n, bucket, levels, 2.0 ** (1 - levels), *draws_of(ctx))
    kind = {"WIDTH": width, "ROWS": 128, "ALIGNED": aligned(out, 4), "num_warps": 1}
    launch(_dithering_encode, cdiv(n, 1024), (x, inverses, out[head:]), numbers, **kind)
    poison(raised, out, head, NAN, 0)


@triton.jit(do_not_specialize=["n", "bucket", "levels", "weight"])
def _dithering_decode(
    data, codes, out, n, bucket, levels, weight,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, ALIGNED: tl.constexpr, WEIGHTED: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    i = row[:, None] * 8 + tl.arange(0, 8)[None, :]
    mask = i < n
    code = unpack(codes, row, n, WIDTH, ALIGNED)
    level = code >> 1
    size = tl.where(level > 0, (level + (127 - levels)) << 23, 0)
    scale = as_float(get_word(data, i // bucket, mask, 4, ALIGNED))
    emit(out + i, as_float(size | ((code & 1) << 31)) * scale, mask, weight, WEIGHTED)


def dithering_decode(data: Tensor, out: Tensor, bucket: int, levels: int, width: int, weight: float | None = None) -> None:
    """Powers of two of the norm of their bucket."""
    n = out.numel()
    if n == 0:
        return
    bucket = min(bucket, n)
    numbers = (n, bucket, levels, 0.0 if weight is None else float(weight))
    kind = {"WIDTH": width, "ROWS": 128, "ALIGNED": aligned(data, 4), "WEIGHTED": weight is not None}
    launch(_dithering_decode, cdiv(n, 1024), (data, data[4 * cdiv(n, bucket) :], out), numbers, **kind)

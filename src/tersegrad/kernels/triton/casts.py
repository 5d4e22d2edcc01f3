# mypy: ignore-errors
"""bf16, fp16, fp8, sign and natural: whole messages, as in ``spec/wire.md``, 5.2 to 5.4, 5.7 and 5.9.

A buffer with NaN or Inf has a message of its own. Where the first pass over the data already encodes, it raises a flag, and a
last kernel, which does nothing otherwise, writes that message over what was encoded.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from tersegrad.core.protocol import Context
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
from tersegrad.kernels.triton.sums import SIGNS, block_max_bits, chunk_sums, fold

TILE = 2048


def _weight(weight: float | None) -> float:
    return 0.0 if weight is None else float(weight)


@triton.jit(do_not_specialize=["n"])
def _bf16_encode(x, out, n, TILE: tl.constexpr, ALIGNED: tl.constexpr):
    base = tl.program_id(0).to(tl.int64) * TILE
    i = tl.arange(0, TILE)
    mask = base + i < n
    b = as_bits(tl.load(x + base + i, mask=mask, other=0.0).to(tl.float32))
    a = b & 0x7FFFFFFF
    nearest = tl.minimum((a + 0x7FFF + ((a >> 16) & 1)) >> 16, 0x7F7F)
    special = (a >> 16) | tl.where(a > 0x7F800000, 0x40, 0)
    h = tl.where(a < 0x7F800000, nearest, special) | ((b >> 16) & 0x8000)
    put_word(out + 2 * base, i, h, mask, 2, ALIGNED)


def bf16_encode(x: Tensor, out: Tensor) -> None:
    """Nearest, ties to even; finite values stay finite; NaN and infinities pass."""
    n = x.numel()
    if n:
        launch(_bf16_encode, cdiv(n, TILE), (flat(x), out), (n,), TILE=TILE, ALIGNED=aligned(out, 2))


@triton.jit(do_not_specialize=["n", "weight"])
def _bf16_decode(data, out, n, weight, TILE: tl.constexpr, ALIGNED: tl.constexpr, WEIGHTED: tl.constexpr):
    base = tl.program_id(0).to(tl.int64) * TILE
    i = tl.arange(0, TILE)
    mask = base + i < n
    value = as_float(get_word(data + 2 * base, i, mask, 2, ALIGNED) << 16)
    emit(out + base + i, value, mask, weight, WEIGHTED)


def bf16_decode(data: Tensor, out: Tensor, weight: float | None = None) -> None:
    """The float32 values of bfloat16 numbers."""
    n = out.numel()
    if n:
        kind = {"TILE": TILE, "ALIGNED": aligned(data, 2), "WEIGHTED": weight is not None}
        launch(_bf16_decode, cdiv(n, TILE), (data, out), (n, _weight(weight)), **kind)


@triton.jit(do_not_specialize=["n"])
def _fp16_encode(x, most, out, n, TILE: tl.constexpr, ALIGNED: tl.constexpr):
    top = tl.load(most)
    finite = top < 0x7F800000
    e = tl.maximum((top >> 23) - 141, -126)
    scale = tl.where(finite, (127 + e) << 23, 0x7FC00000)
    factor = as_float((127 - e) << 23)
    base = tl.program_id(0).to(tl.int64) * TILE
    i = tl.arange(0, TILE)
    mask = base + i < n
    half = (tl.load(x + base + i, mask=mask, other=0.0).to(tl.float32) * factor).to(tl.float16)
    h = tl.where(finite, half.to(tl.uint16, bitcast=True), 0)
    put_word(out + 4 + 2 * base, i, h, mask, 2, ALIGNED)
    if base == 0:
        for j in tl.static_range(4):
            tl.store(out + j, (scale >> (8 * j)).to(tl.uint8))


def fp16_encode(x: Tensor, out: Tensor) -> None:
    """A power of two that moves the largest magnitude into [2^14, 2^15), then nearest even."""
    n = x.numel()
    if n:
        x = flat(x)
        launch(_fp16_encode, cdiv(n, TILE), (x, block_max_bits(x, n), out), (n,), TILE=TILE, ALIGNED=aligned(out, 2))


@triton.jit(do_not_specialize=["n", "weight"])
def _fp16_decode(data, out, n, weight, TILE: tl.constexpr, ALIGNED: tl.constexpr, WEIGHTED: tl.constexpr):
    scale = as_float(get_word(data, 0, True, 4, False) & 0x7FFFFFFF)
    base = tl.program_id(0).to(tl.int64) * TILE
    i = tl.arange(0, TILE)
    mask = base + i < n
    h = get_word(data + 4 + 2 * base, i, mask, 2, ALIGNED)
    size = (h & 0x7FFF).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32) * scale
    size = tl.where(size > 3.4028234663852886e38, 3.4028234663852886e38, size)
    value = as_float(as_bits(size).to(tl.uint32, bitcast=True) | ((h & 0x8000) << 16))
    emit(out + base + i, value, mask, weight, WEIGHTED)


def fp16_decode(data: Tensor, out: Tensor, weight: float | None = None) -> None:
    """Half-precision numbers times their scale."""
    n = out.numel()
    if n:
        kind = {"TILE": TILE, "ALIGNED": aligned(data, 2), "WEIGHTED": weight is not None}
        launch(_fp16_decode, cdiv(n, TILE), (data, out), (n, _weight(weight)), **kind)


@triton.jit(do_not_specialize=["n", "blocks"])
def _fp8_encode(
    x, most, flag, out, n, blocks, ROWS: tl.constexpr, WIDTH: tl.constexpr, FUSED: tl.constexpr, PARTS: tl.constexpr
):
    """``ROWS`` blocks of ``WIDTH`` coordinates; not ``FUSED``: a tile of ``WIDTH``, ``PARTS`` to a block whose maximum is given."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    i = row[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    mask = i < n
    v = tl.load(x + i, mask=mask, other=0.0).to(tl.float32)
    block = row // PARTS
    if FUSED:
        top = tl.max(as_bits(v) & 0x7FFFFFFF, 1)
    else:
        top = tl.load(most + block, mask=block < blocks, other=0)
    raise_flag(flag, tl.max(top, 0) >= 0x7F800000)
    e = tl.maximum(((top + 0x17FFFF) >> 23) - 8, 1)
    y = tl.abs(v * as_float((254 - e) << 23)[:, None])
    b = as_bits(y)
    normal = ((b + 0x7FFFF + ((b >> 20) & 1)) >> 20) - 960
    subnormal = as_bits(y + 16384.0) - 0x46800000
    code = tl.where(b >= 0x3C800000, normal, subnormal) | ((as_bits(v) >> 24) & 0x80)
    tl.store(out + blocks + i, code.to(tl.uint8), mask=mask)
    tl.store(out + block, e.to(tl.uint8), mask=(block < blocks) & (row % PARTS == 0))


def fp8_encode(x: Tensor, out: Tensor, block: int) -> None:
    """Blocks of e4m3 (finite-only) with one power of two that moves the largest magnitude into (232, 464]."""
    n = x.numel()
    if n == 0:
        return
    x, blocks, raised = flat(x), cdiv(n, block), flag(x)
    fused = block <= TILE
    width = block if fused else TILE
    rows, parts = TILE // width, block // width
    most = raised if fused else block_max_bits(x, block)
    launch(
        _fp8_encode, cdiv(blocks * parts, rows), (x, most, raised, out), (n, blocks),
        ROWS=rows, WIDTH=width, FUSED=fused, PARTS=parts,
    )  # fmt: skip
    poison(raised, out, blocks, 0xFFFFFFFF, 0)


@triton.jit(do_not_specialize=["n", "blocks", "block", "weight"])
def _fp8_decode(data, out, n, blocks, block, weight, TILE: tl.constexpr, WEIGHTED: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    mask = i < n
    e = tl.load(data + i // block, mask=mask, other=0).to(tl.int32)
    scale = as_float(tl.where(e == 0, 0x00400000, tl.where(e == 255, 0x7FC00000, e << 23)))
    b = tl.load(data + blocks + i, mask=mask, other=0).to(tl.int32)
    m = b & 0x7F
    size = tl.where(m < 8, m.to(tl.float32) * 0.001953125, as_float((m << 20) + 0x3C000000))
    size = tl.where(m == 0x7F, as_float(m * 0 + 0x7FC00000), size) * scale
    size = tl.where(size > 3.4028234663852886e38, 3.4028234663852886e38, size)
    emit(out + i, as_float(as_bits(size) ^ ((b >> 7) << 31)), mask, weight, WEIGHTED)


def fp8_decode(data: Tensor, out: Tensor, block: int, weight: float | None = None) -> None:
    """e4m3 numbers times their block's scale."""
    n = out.numel()
    if n:
        numbers = (n, cdiv(n, block), block, _weight(weight))
        launch(_fp8_decode, cdiv(n, TILE), (data, out), numbers, TILE=TILE, WEIGHTED=weight is not None)


@triton.jit(do_not_specialize=["n"])
def _sign_scale(total, flag, out, n):
    mean = tl.load(total) / n.to(tl.float64)
    finite = mean < float("inf")
    scale = tl.where(finite, as_bits(mean.to(tl.float32)), 0x7FC00000)
    tl.store(flag, tl.where(finite, 0, 1))
    for j in tl.static_range(4):
        tl.store(out + j, (scale >> (8 * j)).to(tl.uint8))


def sign_encode(x: Tensor, out: Tensor) -> None:
    """The mean magnitude and one bit per coordinate, set where x < 0."""
    n = x.numel()
    if n:
        total, raised = fold(chunk_sums(flat(x), n, SIGNS, out[4:])), flag(x)
        launch(_sign_scale, 1, (total, raised, out), (n,), num_warps=1)
        poison(raised, out, 4, NAN, 0)


@triton.jit(do_not_specialize=["n", "weight"])
def _sign_decode(data, out, n, weight, TILE: tl.constexpr, WEIGHTED: tl.constexpr):
    scale = get_word(data, 0, True, 4, False)
    base = tl.program_id(0).to(tl.int64) * TILE
    i = tl.arange(0, TILE)
    mask = base + i < n
    byte = tl.load(data + 4 + base // 8 + i // 8, mask=mask, other=0).to(tl.uint32)
    value = as_float(scale ^ (((byte >> (i % 8).to(tl.uint32)) & 1) << 31))
    emit(out + base + i, value, mask, weight, WEIGHTED)


def sign_decode(data: Tensor, out: Tensor, weight: float | None = None) -> None:
    """Plus or minus the scale."""
    n = out.numel()
    if n:
        kind = {"TILE": TILE, "WEIGHTED": weight is not None}
        launch(_sign_decode, cdiv(n, TILE), (data, out), (n, _weight(weight)), **kind)


@triton.jit(do_not_specialize=["n", "step", "who", "k0", "k1"])
def _natural_encode(x, flag, signs, exponents, n, step, who, k0, k1, ROWS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    i = row[:, None] * 8 + tl.arange(0, 8)[None, :]
    mask = i < n
    b = as_bits(tl.load(x + i, mask=mask, other=0.0).to(tl.float32))
    a = b & 0x7FFFFFFF
    raise_flag(flag, tl.max(tl.max(a, 1), 0) >= 0x7F800000)
    u = draws(row, step, who, k0, k1, 0, ROWS)
    up = tl.minimum((a + 64 + (u << 7)) >> 23, 254)
    tl.store(exponents + i, up.to(tl.uint8), mask=mask)
    negative = tl.sum((b < 0).to(tl.int32) << tl.arange(0, 8)[None, :], 1)
    tl.store(signs + row, negative.to(tl.uint8), mask=row * 8 < n)


def natural_encode(x: Tensor, out: Tensor, ctx: Context) -> None:
    """Sign bits and exponents of x rounded to a neighbouring power of two."""
    n = x.numel()
    if n:
        signs, raised = cdiv(n, 8), flag(x)
        launch(_natural_encode, cdiv(n, 1024), (flat(x), raised, out, out[signs:]), (n, *draws_of(ctx)), ROWS=128, num_warps=1)
        poison(raised, out, signs, 0, 255)


@triton.jit(do_not_specialize=["n", "weight"])
def _natural_decode(signs, exponents, out, n, weight, TILE: tl.constexpr, WEIGHTED: tl.constexpr):
    base = tl.program_id(0).to(tl.int64) * TILE
    i = tl.arange(0, TILE)
    mask = base + i < n
    e = tl.load(exponents + base + i, mask=mask, other=0).to(tl.int32)
    byte = tl.load(signs + base // 8 + i // 8, mask=mask, other=0).to(tl.int32)
    value = as_float((e << 23) | (((e + 1) >> 8) << 22) | (((byte >> (i % 8)) & 1) << 31))
    emit(out + base + i, value, mask, weight, WEIGHTED)


def natural_decode(data: Tensor, out: Tensor, weight: float | None = None) -> None:
    """Powers of two."""
    n = out.numel()
    if n:
        kind = {"TILE": TILE, "WEIGHTED": weight is not None}
        launch(_natural_decode, cdiv(n, TILE), (data, data[cdiv(n, 8) :], out), (n, _weight(weight)), **kind)

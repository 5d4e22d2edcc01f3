# mypy: ignore-errors
"""bf16, fp16, fp8 and natural: whole messages, as in ``spec/wire.md``, 5.2 to 5.4 and 5.9, and sums of them and of sign.

A buffer with NaN or Inf has a message of its own. Where the first pass over the data already encodes, it raises a flag, and a
last kernel, which does nothing otherwise, writes that message over what was encoded.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from tersegrad.core.protocol import Context
from tersegrad.kernels.schema import Cast
from tersegrad.kernels.triton.codes import pack, unpack
from tersegrad.kernels.triton.launch import (
    MOST,
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
from tersegrad.kernels.triton.philox import draws
from tersegrad.kernels.triton.signs import signed_scales
from tersegrad.kernels.triton.sums import block_max_bits

TILE = 2048


def _weight(weight: float | None) -> float:
    return 0.0 if weight is None else float(weight)


@triton.jit(do_not_specialize=["n"])
def _bf16_encode(x, out, n, TILE: tl.constexpr, ALIGN: tl.constexpr):
    base = tl.program_id(0).to(tl.int64) * TILE
    left, i = left_of(n, base, TILE), fours(TILE)
    for RAGGED in tl.static_range(2):
        if (left < TILE) == RAGGED:
            mask = inside(i, left, RAGGED)
            v = tl.load(x + base + i, mask=mask, other=0.0).to(tl.float32)
            b = as_bits(v)
            # NaN, Inf and what would become Inf lose their low half; NaN stays NaN.
            nearest = b + tl.where(tl.abs(v) < 3.3961775292304601e38, 0x7FFF + ((b >> 16) & 1), 0)
            put_word(out + 2 * base, i, (nearest | tl.where(v != v, 0x400000, 0)) >> 16, mask, 2, ALIGN)


def bf16_encode(x: Tensor, out: Tensor) -> None:
    """Nearest, ties to even; finite values stay finite; NaN and infinities pass."""
    n = x.numel()
    if n:
        launch(_bf16_encode, cdiv(n, TILE), (flat(x), out), (n,), TILE=TILE, ALIGN=alignment(out))


@triton.jit
def _bf16(data, base, i, mask, ALIGN: tl.constexpr):
    """The values at places ``i`` (int32) from ``base`` (int64) on."""
    return as_float(get_word(data + 2 * base, i, mask, 2, ALIGN) << 16)


@triton.jit(do_not_specialize=["n", "weight"])
def _bf16_decode(data, out, n, weight, TILE: tl.constexpr, ALIGN: tl.constexpr, WEIGHTED: tl.constexpr):
    base = tl.program_id(0).to(tl.int64) * TILE
    left, i = left_of(n, base, TILE), fours(TILE)
    for RAGGED in tl.static_range(2):
        if (left < TILE) == RAGGED:
            mask = inside(i, left, RAGGED)
            emit(out + base + i, _bf16(data, base, i, mask, ALIGN), mask, weight, WEIGHTED)


def bf16_decode(data: Tensor, out: Tensor, weight: float | None = None) -> None:
    """The float32 values of bfloat16 numbers."""
    n = out.numel()
    if n:
        kind = {"TILE": TILE, "ALIGN": alignment(data), "WEIGHTED": weight is not None}
        launch(_bf16_decode, cdiv(n, TILE), (data, out), (n, _weight(weight)), **kind)


@triton.jit(do_not_specialize=["n"])
def _fp16_encode(x, most, out, n, TILE: tl.constexpr, ALIGN: tl.constexpr):
    top = tl.load(most)
    finite = top < 0x7F800000
    e = tl.maximum((top >> 23) - 141, -126)
    scale = tl.where(finite, (127 + e) << 23, 0x7FC00000)
    factor = as_float((127 - e) << 23)
    base = last_first() * TILE
    left, i = left_of(n, base, TILE), fours(TILE)
    for RAGGED in tl.static_range(2):
        if (left < TILE) == RAGGED:
            mask = inside(i, left, RAGGED)
            half = (tl.load(x + base + i, mask=mask, other=0.0).to(tl.float32) * factor).to(tl.float16)
            h = tl.where(finite, half.to(tl.uint16, bitcast=True), 0)
            put_word(out + 4 + 2 * base, i, h, mask, 2, ALIGN)
    if base == 0:
        for j in tl.static_range(4):
            tl.store(out + j, (scale >> (8 * j)).to(tl.uint8))


def fp16_encode(x: Tensor, out: Tensor) -> None:
    """A power of two that moves the largest magnitude into [2^14, 2^15), then nearest even."""
    n = x.numel()
    if n:
        x = flat(x)
        launch(_fp16_encode, cdiv(n, TILE), (x, block_max_bits(x, n), out), (n,), TILE=TILE, ALIGN=alignment(out))


@triton.jit
def _fp16(data, base, i, mask, ALIGN: tl.constexpr):
    """The same of an fp16 message."""
    scale = as_float(get_word(data, 0, True, 4, 1) & 0x7FFFFFFF)
    h = get_word(data + 4 + 2 * base, i, mask, 2, ALIGN)
    size = (h & 0x7FFF).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32) * scale
    size = tl.minimum(size, 3.4028234663852886e38, tl.PropagateNan.ALL)
    return as_float(as_bits(size).to(tl.uint32, bitcast=True) | ((h & 0x8000) << 16))


@triton.jit(do_not_specialize=["n", "weight"])
def _fp16_decode(data, out, n, weight, TILE: tl.constexpr, ALIGN: tl.constexpr, WEIGHTED: tl.constexpr):
    base = tl.program_id(0).to(tl.int64) * TILE
    left, i = left_of(n, base, TILE), fours(TILE)
    for RAGGED in tl.static_range(2):
        if (left < TILE) == RAGGED:
            mask = inside(i, left, RAGGED)
            emit(out + base + i, _fp16(data, base, i, mask, ALIGN), mask, weight, WEIGHTED)


def fp16_decode(data: Tensor, out: Tensor, weight: float | None = None) -> None:
    """Half-precision numbers times their scale."""
    n = out.numel()
    if n:
        kind = {"TILE": TILE, "ALIGN": alignment(data), "WEIGHTED": weight is not None}
        launch(_fp16_decode, cdiv(n, TILE), (data, out), (n, _weight(weight)), **kind)


@triton.jit(do_not_specialize=["n", "blocks"])
def _fp8_encode(
    x, most, flag, out, n, blocks,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, FUSED: tl.constexpr, PARTS: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """``ROWS`` blocks of ``WIDTH`` coordinates; not ``FUSED``: a tile of ``WIDTH``, ``PARTS`` to a block whose maximum is given."""
    first = tl.program_id(0).to(tl.int64) * ROWS
    base = first * WIDTH
    left = left_of(n, base, ROWS * WIDTH)
    i = tl.arange(0, ROWS)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    block = first // PARTS + tl.arange(0, ROWS)
    # Four adjacent coordinates per thread, as float32 and as bytes.
    codes = tl.max_contiguous(tl.multiple_of(out + blocks, ALIGN) + base + i, (1, 4))
    for RAGGED in tl.static_range(2):
        if (left < ROWS * WIDTH) == RAGGED:
            mask = inside(i, left, RAGGED)
            v = tl.load(x + base + i, mask=mask, other=0.0).to(tl.float32)
            if FUSED:
                top = tl.max(as_bits(v) & 0x7FFFFFFF, 1)
                here = inside(block, blocks, RAGGED)
            else:
                top = tl.load(most + block)
                here = (first + tl.arange(0, ROWS)) % PARTS == 0
            raise_flag(flag, top >= 0x7F800000)
            e = tl.maximum(((top + 0x17FFFF) >> 23) - 8, 1)
            tl.store(out + block, e.to(tl.uint8), mask=here)
            y = tl.abs(v * as_float((254 - e) << 23)[:, None])
            b = as_bits(y)
            normal = ((b + 0x7FFFF + ((b >> 20) & 1)) >> 20) - 960
            subnormal = as_bits(y + 16384.0) - 0x46800000
            code = tl.where(b >= 0x3C800000, normal, subnormal) | ((as_bits(v) >> 24) & 0x80)
            tl.store(codes, code.to(tl.uint8), mask=mask)


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
        _fp8_encode, cdiv(n, TILE), (x, most, raised, out), (n, blocks),
        ROWS=rows, WIDTH=width, FUSED=fused, PARTS=parts, ALIGN=alignment(out, blocks),
    )  # fmt: skip
    poison(raised, out, blocks, 0xFFFFFFFF, 0)


@triton.jit(do_not_specialize=["n", "blocks", "weight"])
def _fp8_decode(
    data, out, n, blocks, weight, BLOCK: tl.constexpr, TILE: tl.constexpr, ALIGN: tl.constexpr, WEIGHTED: tl.constexpr
):
    base = tl.program_id(0).to(tl.int64) * TILE
    left, i, row = left_of(n, base, TILE), fours(TILE), tl.arange(0, TILE // 4)
    for RAGGED in tl.static_range(2):
        if (left < TILE) == RAGGED:
            e = tl.load(data + base // BLOCK + (base % BLOCK + 4 * row) // BLOCK, mask=inside(4 * row, left, RAGGED), other=0)
            e = e.to(tl.int32)
            scale = as_float(tl.where(e == 0, 0x00400000, tl.where(e == 255, 0x7FC00000, e << 23)))
            b = unpack(tl.multiple_of(data + blocks, ALIGN) + base, row, left, 8, ALIGN, RAGGED)
            m = b & 0x7F
            # The bits of a float32 2^120 times smaller, also where it is subnormal.
            size = as_float(m << 20) * 1329227995784915872903807060280344576.0
            size = tl.where(m == 0x7F, float("nan"), size) * scale[:, None]
            size = tl.minimum(size, 3.4028234663852886e38, tl.PropagateNan.ALL)
            emit(out + base + i, as_float(as_bits(size) ^ ((b >> 7) << 31)), inside(i, left, RAGGED), weight, WEIGHTED)


def fp8_decode(data: Tensor, out: Tensor, block: int, weight: float | None = None) -> None:
    """e4m3 numbers times their block's scale."""
    n = out.numel()
    if n:
        blocks = cdiv(n, block)
        kind = {"BLOCK": block, "TILE": TILE, "ALIGN": alignment(data, blocks), "WEIGHTED": weight is not None}
        launch(_fp8_decode, cdiv(n, TILE), (data, out), (n, blocks, _weight(weight)), **kind)


@triton.jit(do_not_specialize=["n", "signs", "step", "who", "k0", "k1"])
def _natural_encode(x, flag, out, n, signs, step, who, k0, k1, ROWS: tl.constexpr, ALIGN: tl.constexpr):
    base = tl.program_id(0).to(tl.int64) * (8 * ROWS)
    left, row = left_of(n, base, 8 * ROWS), tl.arange(0, ROWS)
    u = draws(base // 8 + row, step, who, k0, k1, 0, ROWS)
    for RAGGED in tl.static_range(2):
        if (left < 8 * ROWS) == RAGGED:
            b = as_bits(load_eights(x + base, row, left, ROWS, RAGGED))
            a = b & 0x7FFFFFFF
            raise_flag(flag, tl.max(a, 1) >= 0x7F800000)
            up = tl.minimum((a + 64 + (u << 7)) >> 23, 254)
            pack(up, row, tl.multiple_of(out + signs, ALIGN) + base, left, 8, ALIGN, RAGGED)
            pack((b < 0).to(tl.int32), row, out + base // 8, left, 1, 1, RAGGED)


def natural_encode(x: Tensor, out: Tensor, ctx: Context) -> None:
    """Sign bits and exponents of x rounded to a neighbouring power of two."""
    n = x.numel()
    if n:
        signs, raised = cdiv(n, 8), flag(x)
        kind = {"ROWS": 128, "ALIGN": alignment(out, signs), "num_warps": 1}
        launch(_natural_encode, cdiv(n, 1024), (flat(x), raised, out), (n, signs, *draws_of(ctx)), **kind)
        poison(raised, out, signs, 0, 255)


@triton.jit
def _natural(data, base, signs, row, left, ALIGN: tl.constexpr, RAGGED: tl.constexpr):
    """The same of a message that begins with so many bytes of ``signs``."""
    e = unpack(data + signs + base, row, left, 8, ALIGN, RAGGED)
    negative = unpack(data + base // 8, row, left, 1, 1, RAGGED)
    return as_float((e << 23) | (((e + 1) >> 8) << 22) | (negative << 31))


@triton.jit(do_not_specialize=["n", "signs", "weight"])
def _natural_decode(data, out, n, signs, weight, TILE: tl.constexpr, ALIGN: tl.constexpr, WEIGHTED: tl.constexpr):
    base = tl.program_id(0).to(tl.int64) * TILE
    left, i, row = left_of(n, base, TILE), fours(TILE), tl.arange(0, TILE // 4)
    for RAGGED in tl.static_range(2):
        if (left < TILE) == RAGGED:
            value = _natural(data, base, signs, row, left, ALIGN, RAGGED)
            emit(out + base + i, value, inside(i, left, RAGGED), weight, WEIGHTED)


def natural_decode(data: Tensor, out: Tensor, weight: float | None = None) -> None:
    """Powers of two."""
    n = out.numel()
    if n:
        signs = cdiv(n, 8)
        kind = {"TILE": TILE, "ALIGN": alignment(data, signs), "WEIGHTED": weight is not None}
        launch(_natural_decode, cdiv(n, TILE), (data, out), (n, signs, _weight(weight)), **kind)


@triton.jit(do_not_specialize=["n", "head", "block", "weight", "p0", "p1", "p2", "p3", "p4", "p5", "p6", "p7"])
def _sum(
    out, n, head, block, weight, p0, p1, p2, p3, p4, p5, p6, p7,
    COUNT: tl.constexpr, CAST: tl.constexpr, TILE: tl.constexpr, ALIGN: tl.constexpr, ADD: tl.constexpr, WEIGHTED: tl.constexpr,
):  # fmt: skip
    """The sum of ``COUNT`` messages at the addresses, which begin with ``head`` bytes of signs or scales; ``ADD``: to what is there."""
    base = tl.program_id(0).to(tl.int64) * TILE
    left, i, row = left_of(n, base, TILE), fours(TILE), tl.arange(0, TILE // 4)
    for RAGGED in tl.static_range(2):
        if (left < TILE) == RAGGED:
            mask = inside(i, left, RAGGED)
            if ADD:
                total = tl.load(out + base + i, mask=mask, other=0.0)
            for k in tl.static_range(COUNT):
                data = tl.multiple_of((p0, p1, p2, p3, p4, p5, p6, p7)[k].to(tl.pointer_type(tl.uint8)), ALIGN)
                if CAST == "bf16":
                    value = _bf16(data, base, i, mask, ALIGN)
                elif CAST == "fp16":
                    value = _fp16(data, base, i, mask, ALIGN)
                elif CAST == "sign":
                    value = signed_scales(data, base, head, block, row, left, ALIGN, RAGGED)
                else:
                    value = _natural(data, base, head, row, left, ALIGN, RAGGED)
                if WEIGHTED:
                    value = value * weight
                total = total + value if ADD or k > 0 else value
            tl.store(out + base + i, total, mask=mask)


def sum_casts(cast: Cast, messages: Sequence[Tensor], out: Tensor, weight: float = 1.0, block: int = 0) -> None:
    """The sum of messages; see the schema. ``out`` is written once for eight of them."""
    n = out.numel()
    head = 4 * cdiv(n, block) if cast == "sign" else cdiv(n, 8)
    for at in range(0, len(messages) if n else 0, MOST):
        places = [m.data_ptr() for m in messages[at : at + MOST]]
        bits = functools.reduce(operator.or_, places, 16 | (head if cast == "natural" else 0))
        launch(
            _sum, cdiv(n, TILE), (out,), (n, head, block, float(weight), *places, *[places[0]] * (MOST - len(places))),
            COUNT=len(places), CAST=cast, TILE=TILE, ALIGN=bits & -bits, ADD=at > 0, WEIGHTED=weight != 1.0,
        )  # fmt: skip

# mypy: ignore-errors
"""int8, int4 and packed QSGD: a step per block, then signed codes (``spec/wire.md``, 5.5, 5.6 and 5.11).

Blocks of up to 4096 coordinates take one pass: a program reads its blocks, finds their steps, reads them again from the cache and
packs their codes. Longer blocks take their statistics, then their steps, then their codes.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tersegrad.core.protocol import Context
from tersegrad.kernels.reference.rounding import MARGIN, _largest_step
from tersegrad.kernels.schema_blocks import RoundingRule
from tersegrad.kernels.triton.codes import pack
from tersegrad.kernels.triton.dequantise import dequantise_blocks
from tersegrad.kernels.triton.launch import (
    alignment,
    as_bits,
    as_float,
    cdiv,
    draws_of,
    flag,
    flat,
    inside,
    last_first,
    launch,
    left_of,
    load_eights,
    put_word,
    raise_flag,
    store_eights,
)
from tersegrad.kernels.triton.philox import draws
from tersegrad.kernels.triton.sums import SQUARES, abs_max, block_max_bits, chunk_sums, fold, fold_last

NEAREST, MAX, L2 = 0, 1, 2
RULES = {"nearest": NEAREST, "max": MAX, "l2": L2}
LONGEST = 4096
TILE = 1024


@triton.jit
def _step(statistic, margin, most, LEVELS: tl.constexpr, BFLOAT16: tl.constexpr):
    """The bits (int32) of the step for a float64 statistic."""
    # The quotient by an integer below 2^8, rounded correctly: the rest is exact, and no quotient lies half way between two numbers.
    INVERSE: tl.constexpr = 1.0 / LEVELS
    inverse = tl.full(statistic.shape, INVERSE, tl.float64)
    near = statistic * inverse
    rest = tl.fma(near, tl.full(statistic.shape, -LEVELS, tl.float64), statistic)
    step = (tl.fma(rest, inverse, near) * margin).to(tl.float32)
    step = tl.where(step < 1.1754943508222875e-38, 1.1754943508222875e-38, step)
    bits = as_bits(tl.where(step > most, most, step))
    if BFLOAT16:
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
    bits = tl.where(statistic == 0, 0, bits)
    return tl.where(statistic < float("inf"), bits, 0x7FC00000)


@triton.jit
def _put_step(steps, row, bits, mask, BFLOAT16: tl.constexpr, ALIGN: tl.constexpr):
    if BFLOAT16:
        put_word(steps, row, (bits >> 16) & 0xFFFF, mask, 2, ALIGN)
    else:
        put_word(steps, row, bits.to(tl.uint32, bitcast=True), mask, 4, ALIGN)


@triton.jit
def _inverse(bits):
    """fl32(1 / step), and 0 where there is no positive step, so that all levels are 0 there."""
    live = (bits > 0) & (bits < 0x7F800000)
    step = as_float(tl.where(live, bits, 0x3F800000))
    return tl.where(live, tl.div_rn(tl.full(step.shape, 1.0, tl.float32), step), 0.0)


@triton.jit
def _rounded(v, LIMIT: tl.constexpr):
    """``v`` within -LIMIT..LIMIT, rounded to an integer, ties to even."""
    v = tl.minimum(tl.maximum(v, -LIMIT), LIMIT)
    if LIMIT < 4194304:
        return as_bits(v + 12582912.0) - 0x4B400000
    else:
        size = as_bits(tl.abs(v) + 8388608.0) - 0x4B000000
        return tl.where(v < 0, -size, size)


@triton.jit
def _level(v, inverse, u, LEVELS: tl.constexpr, RULE: tl.constexpr):
    y = tl.where(inverse > 0, v * inverse, 0.0)
    if RULE == 0:
        return _rounded(y, LEVELS)
    else:
        return (_rounded(y * 65536.0, LEVELS * 65536) + u) >> 16


@triton.jit
def _levels_of(row, first, v, inverse, step, who, k0, k1, LEVELS: tl.constexpr, RULE: tl.constexpr, ROWS: tl.constexpr):
    """Levels of rows of eight coordinates, of which the vector's ``first`` and following."""
    if RULE == 0:
        u = 0
    else:
        u = draws(first + row, step, who, k0, k1, 0, ROWS)
    return _level(v, inverse[:, None], u, LEVELS, RULE)


@triton.jit
def _spread(of_block, ROWS: tl.constexpr, GROUPS: tl.constexpr):
    """What belongs to a block, for each of its rows of eight coordinates."""
    return tl.reshape(tl.broadcast_to(of_block[:, None], (ROWS, GROUPS)), (ROWS * GROUPS,))


@triton.jit
def _quantise_tile(
    x, carry, rest, flag, steps, codes, n, blocks, margin, most, weight, step, who, k0, k1,
    RULE: tl.constexpr, BLOCK: tl.constexpr, LEVELS: tl.constexpr, WIDTH: tl.constexpr, BFLOAT16: tl.constexpr,
    ROWS: tl.constexpr, GROUPS: tl.constexpr, STEPS_ALIGN: tl.constexpr, CODES_ALIGN: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """``ROWS`` blocks in rows of eight coordinates, ``GROUPS`` (a power of two, at least BLOCK / 8) to a block.

    ``SPLIT``: of x + carry; ``rest`` becomes that plus ``weight`` times what the message decodes to.
    """
    first = tl.program_id(0).to(tl.int64) * ROWS
    base = first * BLOCK
    left = left_of(n, base, ROWS * BLOCK)
    block = tl.arange(0, ROWS)
    for RAGGED in tl.static_range(2):
        if (left < ROWS * 8 * GROUPS) == RAGGED:
            if RAGGED:
                group = tl.arange(0, GROUPS)[None, :]
                rows = block[:, None] * (BLOCK // 8) + group
                row = tl.reshape(tl.where(group < BLOCK // 8, rows, 1 << 24), (ROWS * GROUPS,))
            else:
                row = tl.arange(0, ROWS * GROUPS)
            v = load_eights(x + base, row, left, ROWS * GROUPS, RAGGED)
            if SPLIT:
                v += load_eights(carry + base, row, left, ROWS * GROUPS, RAGGED)
            if RULE == 2:
                lane = tl.arange(0, 32)
                total = tl.zeros((ROWS, 32), tl.float64)
                for at in tl.static_range(0, BLOCK, 32):
                    j = block[:, None] * BLOCK + (at + lane)[None, :]
                    mask = inside(j, left, RAGGED) & (at + lane < BLOCK)[None, :]
                    w = tl.load(x + base + j, mask=mask, other=0.0).to(tl.float32)
                    if SPLIT:
                        w += tl.load(carry + base + j, mask=mask, other=0.0)
                    w = w.to(tl.float64)
                    total += w * w
                statistic = tl.sqrt(fold_last(total, ROWS, 32))
            else:
                size = tl.reshape(as_bits(v) & 0x7FFFFFFF, (ROWS, GROUPS * 8))
                statistic = as_float(tl.max(size, 1)).to(tl.float64)
            bits = _step(statistic, margin, most, LEVELS, BFLOAT16)
            here = inside(block, blocks - first, RAGGED)
            _put_step(steps + first * (2 if BFLOAT16 else 4), block, bits, here, BFLOAT16, STEPS_ALIGN)
            inverse = _spread(_inverse(bits), ROWS, GROUPS)
            level = _levels_of(row, base // 8, v, inverse, step, who, k0, k1, LEVELS, RULE, ROWS * GROUPS)
            place = tl.multiple_of(codes + base // 8 * WIDTH, CODES_ALIGN)
            pack(level & ((1 << WIDTH) - 1), row, place, left, WIDTH, CODES_ALIGN, RAGGED)
            if SPLIT:
                decoded = level.to(tl.float32) * _spread(as_float(bits), ROWS, GROUPS)[:, None]
                v = v + decoded * weight
                raise_flag(flag, tl.max(as_bits(v) & 0x7FFFFFFF, 1) >= 0x7F800000)
                store_eights(rest + base, v, row, left, ROWS * GROUPS, RAGGED)


@triton.jit(do_not_specialize=["n", "blocks", "margin", "most", "step", "who", "k0", "k1"])
def _quantise(
    x, steps, codes, n, blocks, margin, most, step, who, k0, k1,
    RULE: tl.constexpr, BLOCK: tl.constexpr, LEVELS: tl.constexpr, WIDTH: tl.constexpr, BFLOAT16: tl.constexpr,
    ROWS: tl.constexpr, GROUPS: tl.constexpr, STEPS_ALIGN: tl.constexpr, CODES_ALIGN: tl.constexpr,
):  # fmt: skip
    _quantise_tile(
        x, x, x, x, steps, codes, n, blocks, margin, most, 0.0, step, who, k0, k1,
        RULE, BLOCK, LEVELS, WIDTH, BFLOAT16, ROWS, GROUPS, STEPS_ALIGN, CODES_ALIGN, False,
    )  # fmt: skip


@triton.jit(do_not_specialize=["n", "blocks", "margin", "most", "weight", "step", "who", "k0", "k1"])
def _split(
    x, carry, rest, flag, steps, codes, n, blocks, margin, most, weight, step, who, k0, k1,
    RULE: tl.constexpr, BLOCK: tl.constexpr, LEVELS: tl.constexpr, WIDTH: tl.constexpr, BFLOAT16: tl.constexpr,
    ROWS: tl.constexpr, GROUPS: tl.constexpr, STEPS_ALIGN: tl.constexpr, CODES_ALIGN: tl.constexpr,
):  # fmt: skip
    _quantise_tile(
        x, carry, rest, flag, steps, codes, n, blocks, margin, most, weight, step, who, k0, k1,
        RULE, BLOCK, LEVELS, WIDTH, BFLOAT16, ROWS, GROUPS, STEPS_ALIGN, CODES_ALIGN, True,
    )  # fmt: skip


@triton.jit(do_not_specialize=["blocks", "margin", "most"])
def _steps(
    statistics, steps, inverses, blocks, margin, most,
    RULE: tl.constexpr, LEVELS: tl.constexpr, BFLOAT16: tl.constexpr, TILE: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    mask = i < blocks
    if RULE == 2:
        statistic = tl.sqrt(tl.load(statistics + i, mask=mask, other=0.0))
    else:
        statistic = as_float(tl.load(statistics + i, mask=mask, other=0)).to(tl.float64)
    bits = _step(statistic, margin, most, LEVELS, BFLOAT16)
    _put_step(steps, i, bits, mask, BFLOAT16, ALIGN)
    tl.store(inverses + i, _inverse(bits), mask=mask)


@triton.jit(do_not_specialize=["n", "block", "step", "who", "k0", "k1"])
def _codes(
    x, inverses, codes, n, block, step, who, k0, k1,
    RULE: tl.constexpr, LEVELS: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """Codes of long blocks: a tile has parts of one or two of them."""
    base = last_first() * (8 * ROWS)
    left, row = left_of(n, base, 8 * ROWS), tl.arange(0, ROWS)
    here = base // block
    border = (here + 1) * block - base
    for RAGGED in tl.static_range(2):
        if (left < 8 * ROWS) == RAGGED:
            v = load_eights(x + base, row, left, ROWS, RAGGED)
            after = tl.load(inverses + here + (border < left).to(tl.int32))
            inverse = tl.where(8 * row < border, tl.load(inverses + here), after)
            level = _levels_of(row, base // 8, v, inverse, step, who, k0, k1, LEVELS, RULE, ROWS)
            pack(level & ((1 << WIDTH) - 1), row, tl.multiple_of(codes + base // 8 * WIDTH, ALIGN), left, WIDTH, ALIGN, RAGGED)


def _scaling(rule: RoundingRule, levels: int) -> tuple[float, float]:
    """What a step is raised by, and the largest step."""
    return 1.0 if rule == "nearest" else MARGIN, _largest_step(levels)


def _tiles(
    n: int, steps: Tensor, codes: Tensor, rule: RoundingRule, block: int, levels: int, width: int, bfloat16: bool
) -> tuple[int, dict[str, Any]]:
    """How many programs quantise blocks of up to ``LONGEST`` coordinates, and their constants."""
    groups = 1 << (block // 8 - 1).bit_length()
    rows = max(1, TILE // (8 * groups))
    return cdiv(cdiv(n, block), rows), {
        "RULE": RULES[rule], "BLOCK": block, "LEVELS": levels, "WIDTH": width, "BFLOAT16": bfloat16, "ROWS": rows,
        "GROUPS": groups, "STEPS_ALIGN": alignment(steps), "CODES_ALIGN": alignment(codes, rows * block // 8 * width),
        "num_warps": 1 if block <= TILE else 4,
    }  # fmt: skip


def quantise_blocks(
    x: Tensor,
    ctx: Context,
    steps: Tensor,
    codes: Tensor,
    *,
    rule: RoundingRule,
    block: int,
    levels: int,
    width: int,
    bfloat16: bool = False,
) -> None:
    """Steps and packed codes of ``x``; see the schema."""
    n = x.numel()
    if n == 0:
        return
    x, blocks = flat(x), cdiv(n, block)
    scaling = _scaling(rule, levels)
    if block <= LONGEST:
        programs, options = _tiles(n, steps, codes, rule, block, levels, width, bfloat16)
        launch(_quantise, programs, (x, steps, codes), (n, blocks, *scaling, *draws_of(ctx)), **options)
        return
    statistics = fold(chunk_sums(x, block, SQUARES)) if rule == "l2" else block_max_bits(x, block)
    inverses = torch.empty(blocks, dtype=torch.float32, device=x.device)
    launch(
        _steps, cdiv(blocks, 256), (statistics, steps, inverses), (blocks, *scaling),
        RULE=RULES[rule], LEVELS=levels, BFLOAT16=bfloat16, TILE=256, ALIGN=alignment(steps),
    )  # fmt: skip
    launch(
        _codes, cdiv(n, TILE), (x, inverses, codes), (n, block, *draws_of(ctx)),
        RULE=RULES[rule], LEVELS=levels, WIDTH=width, ROWS=TILE // 8, ALIGN=alignment(codes), num_warps=1,
    )  # fmt: skip


def split_blocks(
    x: Tensor,
    carry: Tensor,
    ctx: Context,
    steps: Tensor,
    codes: Tensor,
    left: Tensor,
    *,
    rule: RoundingRule,
    block: int,
    levels: int,
    width: int,
    bfloat16: bool = False,
    weight: float = 1.0,
) -> Tensor:
    """Steps and packed codes of ``x + carry``, and what they leave out; see the schema."""
    n = x.numel()
    if n and block <= LONGEST:
        raised, numbers = flag(x), (n, cdiv(n, block), *_scaling(rule, levels), -float(weight), *draws_of(ctx))
        programs, options = _tiles(n, steps, codes, rule, block, levels, width, bfloat16)
        launch(_split, programs, (flat(x), flat(carry), left, raised, steps, codes), numbers, **options)
        return (raised == 0).view(())
    torch.add(x, carry, out=left)
    quantise_blocks(left, ctx, steps, codes, rule=rule, block=block, levels=levels, width=width, bfloat16=bfloat16)
    dequantise_blocks(steps, codes, left, block=block, width=width, bfloat16=bfloat16, weight=-weight)
    return abs_max(left).isfinite()

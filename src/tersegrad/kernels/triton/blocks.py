# mypy: ignore-errors
"""int8, int4 and packed QSGD: a step per block, then signed codes (``spec/wire.md``, 5.5, 5.6 and 5.11).

Blocks of up to 4096 coordinates take one pass: a program reads its blocks, finds their steps, reads them again from the cache and
packs their codes. Longer blocks take their statistics, then their steps, then their codes.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tersegrad.core.protocol import Context
from tersegrad.kernels.reference.rounding import MARGIN, _largest_step
from tersegrad.kernels.schema import RoundingRule
from tersegrad.kernels.triton.codes import pack, unpack
from tersegrad.kernels.triton.launch import (
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
    put_word,
    raise_flag,
)
from tersegrad.kernels.triton.philox import draws
from tersegrad.kernels.triton.sums import SQUARES, block_max_bits, chunk_sums, fold, fold_last

NEAREST, MAX, L2 = 0, 1, 2
RULES = {"nearest": NEAREST, "max": MAX, "l2": L2}
LONGEST = 4096
TILE = 1024


@triton.jit
def _step(statistic, levels, margin, most, BFLOAT16: tl.constexpr):
    """The bits (int32) of the step for a float64 statistic."""
    step = (statistic / levels * margin).to(tl.float32)
    step = tl.where(step < 1.1754943508222875e-38, 1.1754943508222875e-38, step)
    bits = as_bits(tl.where(step > most, most, step))
    if BFLOAT16:
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
    bits = tl.where(statistic == 0, 0, bits)
    return tl.where(statistic < float("inf"), bits, 0x7FC00000)


@triton.jit
def _put_step(steps, row, bits, mask, BFLOAT16: tl.constexpr, ALIGNED: tl.constexpr):
    if BFLOAT16:
        put_word(steps, row, (bits >> 16) & 0xFFFF, mask, 2, ALIGNED)
    else:
        put_word(steps, row, bits.to(tl.uint32, bitcast=True), mask, 4, ALIGNED)


@triton.jit
def _inverse(bits):
    """fl32(1 / step), and 0 where there is no positive step, so that all levels are 0 there."""
    live = (bits > 0) & (bits < 0x7F800000)
    step = as_float(tl.where(live, bits, 0x3F800000))
    return tl.where(live, (1.0 / step.to(tl.float64)).to(tl.float32), 0.0)


@triton.jit
def _rounded(v):
    """``v`` rounded to an integer, ties to even; |v| < 2^23."""
    size = as_bits(tl.abs(v) + 8388608.0) - 0x4B000000
    return tl.where(v < 0, -size, size)


@triton.jit
def _levels(v, inverse, levels, u, RULE: tl.constexpr):
    y = tl.where(inverse > 0, v * inverse, 0.0)
    limit = levels.to(tl.float32)
    if RULE == 0:
        return tl.minimum(tl.maximum(_rounded(tl.minimum(tl.maximum(y, -limit), limit)), -levels), levels)
    else:
        limit = limit * 65536.0
        return (_rounded(tl.minimum(tl.maximum(y * 65536.0, -limit), limit)) + u) >> 16


@triton.jit(do_not_specialize=["n", "blocks", "levels", "margin", "most", "step", "who", "k0", "k1"])
def _quantise(
    x, steps, codes, n, blocks, levels, margin, most, step, who, k0, k1,
    RULE: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr, BFLOAT16: tl.constexpr,
    ROWS: tl.constexpr, GROUPS: tl.constexpr, STEPS_ALIGNED: tl.constexpr, CODES_ALIGNED: tl.constexpr,
):  # fmt: skip
    """``ROWS`` blocks in rows of eight coordinates, ``GROUPS`` (a power of two, at least BLOCK / 8) to a block."""
    block = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    group = tl.arange(0, GROUPS)
    rows = block[:, None] * (BLOCK // 8) + group[None, :]
    inside = (group < BLOCK // 8)[None, :] & (block < blocks)[:, None]
    row = tl.reshape(tl.where(inside, rows, n), (ROWS * GROUPS,))
    i = row[:, None] * 8 + tl.arange(0, 8)[None, :]
    v = tl.load(x + i, mask=i < n, other=0.0).to(tl.float32)
    if RULE == 2:
        lane = tl.arange(0, 32)
        total = tl.zeros((ROWS, 32), tl.float64)
        for at in tl.static_range(0, BLOCK, 32):
            j = block[:, None] * BLOCK + (at + lane)[None, :]
            w = tl.load(x + j, mask=(j < n) & (at + lane < BLOCK)[None, :], other=0.0).to(tl.float32).to(tl.float64)
            total += w * w
        statistic = tl.sqrt(fold_last(total, ROWS, 32))
    else:
        size = tl.reshape(as_bits(v) & 0x7FFFFFFF, (ROWS, GROUPS * 8))
        statistic = as_float(tl.max(size, 1)).to(tl.float64)
    bits = _step(statistic, levels.to(tl.float64), margin, most, BFLOAT16)
    _put_step(steps, block, bits, block < blocks, BFLOAT16, STEPS_ALIGNED)
    inverse = tl.reshape(tl.broadcast_to(_inverse(bits)[:, None], (ROWS, GROUPS)), (ROWS * GROUPS,))
    if RULE == 0:
        u = 0
    else:
        u = draws(row, step, who, k0, k1, 0, ROWS * GROUPS)
    level = _levels(v, inverse[:, None], levels, u, RULE)
    pack(level & ((1 << WIDTH) - 1), row, codes, n, WIDTH, CODES_ALIGNED)


@triton.jit(do_not_specialize=["blocks", "levels", "margin", "most"])
def _steps(
    statistics, steps, inverses, blocks, levels, margin, most,
    RULE: tl.constexpr, BFLOAT16: tl.constexpr, TILE: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    mask = i < blocks
    if RULE == 2:
        statistic = tl.sqrt(tl.load(statistics + i, mask=mask, other=0.0))
    else:
        statistic = as_float(tl.load(statistics + i, mask=mask, other=0)).to(tl.float64)
    bits = _step(statistic, levels.to(tl.float64), margin, most, BFLOAT16)
    _put_step(steps, i, bits, mask, BFLOAT16, ALIGNED)
    tl.store(inverses + i, _inverse(bits), mask=mask)


@triton.jit(do_not_specialize=["n", "block", "levels", "step", "who", "k0", "k1"])
def _codes(
    x, inverses, codes, n, block, levels, step, who, k0, k1,
    RULE: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    i = row[:, None] * 8 + tl.arange(0, 8)[None, :]
    v = tl.load(x + i, mask=i < n, other=0.0).to(tl.float32)
    inverse = tl.load(inverses + row * 8 // block, mask=row * 8 < n, other=0.0)
    if RULE == 0:
        u = 0
    else:
        u = draws(row, step, who, k0, k1, 0, ROWS)
    level = _levels(v, inverse[:, None], levels, u, RULE)
    pack(level & ((1 << WIDTH) - 1), row, codes, n, WIDTH, ALIGNED)


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
    x, number, blocks = flat(x), RULES[rule], cdiv(n, block)
    scaling = (levels, 1.0 if rule == "nearest" else MARGIN, _largest_step(levels))
    steps_aligned, codes_aligned = aligned(steps, 2 if bfloat16 else 4), aligned(codes, 4)
    if block <= LONGEST:
        groups = 1 << (block // 8 - 1).bit_length()
        rows = max(1, TILE // (8 * groups))
        launch(
            _quantise, cdiv(blocks, rows), (x, steps, codes), (n, blocks, *scaling, *draws_of(ctx)),
            RULE=number, BLOCK=block, WIDTH=width, BFLOAT16=bfloat16, ROWS=rows, GROUPS=groups,
            STEPS_ALIGNED=steps_aligned, CODES_ALIGNED=codes_aligned, num_warps=1 if block <= TILE else 4,
        )  # fmt: skip
        return
    statistics = fold(chunk_sums(x, block, SQUARES)) if rule == "l2" else block_max_bits(x, block)
    inverses = torch.empty(blocks, dtype=torch.float32, device=x.device)
    launch(
        _steps, cdiv(blocks, 256), (statistics, steps, inverses), (blocks, *scaling),
        RULE=number, BFLOAT16=bfloat16, TILE=256, ALIGNED=steps_aligned,
    )  # fmt: skip
    launch(
        _codes, cdiv(n, TILE), (x, inverses, codes), (n, block, levels, *draws_of(ctx)),
        RULE=number, WIDTH=width, ROWS=TILE // 8, ALIGNED=codes_aligned, num_warps=1,
    )  # fmt: skip


@triton.jit
def _get_step(steps, row, mask, BFLOAT16: tl.constexpr, ALIGNED: tl.constexpr):
    if BFLOAT16:
        return (get_word(steps, row, mask, 2, ALIGNED) << 16).to(tl.int32, bitcast=True)
    else:
        return get_word(steps, row, mask, 4, ALIGNED).to(tl.int32, bitcast=True)


@triton.jit(do_not_specialize=["blocks"])
def _check_steps(steps, flag, blocks, BFLOAT16: tl.constexpr, TILE: tl.constexpr, ALIGNED: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    bits = _get_step(steps, i, i < blocks, BFLOAT16, ALIGNED)
    raise_flag(flag, tl.max(bits & 0x7FFFFFFF, 0) >= 0x7F800000)


@triton.jit(do_not_specialize=["n", "block", "weight"])
def _dequantise(
    steps, codes, flag, out, n, block, weight,
    WIDTH: tl.constexpr, BFLOAT16: tl.constexpr, ROWS: tl.constexpr,
    STEPS_ALIGNED: tl.constexpr, CODES_ALIGNED: tl.constexpr, WEIGHTED: tl.constexpr,
):  # fmt: skip
    poisoned = tl.load(flag) != 0
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    i = row[:, None] * 8 + tl.arange(0, 8)[None, :]
    step = as_float(_get_step(steps, row * 8 // block, row * 8 < n, BFLOAT16, STEPS_ALIGNED))
    HALF: tl.constexpr = 1 << (WIDTH - 1)
    level = (unpack(codes, row, n, WIDTH, CODES_ALIGNED) ^ HALF) - HALF
    value = level.to(tl.float32) * step[:, None]
    value = tl.where(poisoned, as_float(level * 0 + 0x7FC00000), value)
    emit(out + i, value, i < n, weight, WEIGHTED)


def dequantise_blocks(
    steps: Tensor,
    codes: Tensor,
    out: Tensor,
    *,
    block: int,
    width: int,
    bfloat16: bool = False,
    weight: float | None = None,
) -> Tensor:
    """``out = code * step``, or ``out += weight * (code * step)``; all NaN if any step is not finite."""
    n = out.numel()
    if n == 0:
        return out
    raised, blocks = flag(out), cdiv(n, block)
    steps_aligned = aligned(steps, 2 if bfloat16 else 4)
    kind = {"BFLOAT16": bfloat16, "TILE": 2048, "ALIGNED": steps_aligned}
    launch(_check_steps, cdiv(blocks, 2048), (steps, raised), (blocks,), **kind)
    launch(
        _dequantise, cdiv(n, TILE), (steps, codes, raised, out), (n, block, 0.0 if weight is None else float(weight)),
        WIDTH=width, BFLOAT16=bfloat16, ROWS=TILE // 8, STEPS_ALIGNED=steps_aligned, CODES_ALIGNED=aligned(codes, 4),
        WEIGHTED=weight is not None, num_warps=1,
    )  # fmt: skip
    return out

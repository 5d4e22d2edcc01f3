# mypy: ignore-errors
"""What messages of int8, int4 and packed QSGD decode to, and their sums (``spec/wire.md``, 5.5, 5.6 and 5.11)."""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from tersegrad.kernels.triton.codes import unpack
from tersegrad.kernels.triton.launch import MOST, as_float, cdiv, flag, fours, get_word, inside, launch, left_of, raise_flag


@triton.jit
def _get_step(steps, row, mask, BFLOAT16: tl.constexpr, ALIGN: tl.constexpr):
    if BFLOAT16:
        return (get_word(steps, row, mask, 2, ALIGN) << 16).to(tl.int32, bitcast=True)
    else:
        return get_word(steps, row, mask, 4, ALIGN).to(tl.int32, bitcast=True)


@triton.jit(do_not_specialize=["blocks", "p0", "p1", "p2", "p3", "p4", "p5", "p6", "p7"])
def _check_steps(flag, blocks, p0, p1, p2, p3, p4, p5, p6, p7, BFLOAT16: tl.constexpr, TILE: tl.constexpr, ALIGN: tl.constexpr):
    """Raise the flag if a step at one of the addresses is not finite; program_id(1) numbers the addresses."""
    address = p0
    for k in tl.static_range(1, 8):
        address = tl.where(tl.program_id(1) == k, (p0, p1, p2, p3, p4, p5, p6, p7)[k], address)
    base = tl.program_id(0).to(tl.int64) * TILE
    steps = tl.multiple_of(address.to(tl.pointer_type(tl.uint8)), ALIGN) + base * (2 if BFLOAT16 else 4)
    left, i = left_of(blocks, base, TILE), fours(TILE)
    for RAGGED in tl.static_range(2):
        if (left < TILE) == RAGGED:
            bits = _get_step(steps, i, inside(i, left, RAGGED), BFLOAT16, ALIGN)
            raise_flag(flag, tl.max(bits & 0x7FFFFFFF, 1) >= 0x7F800000)


@triton.jit(do_not_specialize=["n", "apart", "weight", "p0", "p1", "p2", "p3", "p4", "p5", "p6", "p7"])
def _dequantise(
    flag, out, n, apart, weight, p0, p1, p2, p3, p4, p5, p6, p7,
    COUNT: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr, BFLOAT16: tl.constexpr, TILE: tl.constexpr,
    STEPS_ALIGN: tl.constexpr, CODES_ALIGN: tl.constexpr, ADD: tl.constexpr, WEIGHTED: tl.constexpr,
):  # fmt: skip
    """The sum of ``COUNT`` messages: steps at the addresses, codes ``apart`` bytes behind them; ``ADD``: to what is there."""
    poisoned = tl.load(flag) != 0
    base = tl.program_id(0).to(tl.int64) * TILE
    left, i, row = left_of(n, base, TILE), fours(TILE), tl.arange(0, TILE // 4)
    first = base // BLOCK * (2 if BFLOAT16 else 4)
    # Blocks that do not divide a tile may begin before it.
    within = base % BLOCK if TILE % BLOCK else 0
    place = ((within + 4 * row) // BLOCK).to(tl.int32)
    HALF: tl.constexpr = 1 << (WIDTH - 1)
    for RAGGED in tl.static_range(2):
        if (left < TILE) == RAGGED:
            mask = inside(i, left, RAGGED)
            if ADD:
                total = tl.load(out + base + i, mask=mask, other=0.0)
            for k in tl.static_range(COUNT):
                message = (p0, p1, p2, p3, p4, p5, p6, p7)[k].to(tl.pointer_type(tl.uint8))
                bits = _get_step(message + first, place, inside(4 * row, left, RAGGED), BFLOAT16, STEPS_ALIGN)
                bits = tl.where(poisoned, 0x7FC00000, bits)
                code = unpack(message + apart + base // 8 * WIDTH, row, left, WIDTH, CODES_ALIGN, RAGGED)
                level = (code ^ HALF) - HALF
                value = level.to(tl.float32) * as_float(bits)[:, None]
                if WEIGHTED:
                    value = value * weight
                total = total + value if ADD or k > 0 else value
            tl.store(out + base + i, total, mask=mask)


def _add_up(
    steps: list[int], apart: int, out: Tensor, block: int, width: int, bfloat16: bool, add: bool, weight: float
) -> None:
    """Up to eight messages, whose steps lie at these addresses and their codes ``apart`` bytes behind them."""
    n, blocks, raised = out.numel(), cdiv(out.numel(), block), flag(out)
    bits = functools.reduce(operator.or_, steps, 16)
    align, codes_align = bits & -bits, (bits | apart) & -(bits | apart)
    addresses = (*steps, *[steps[0]] * (MOST - len(steps)))
    kind = {"BFLOAT16": bfloat16, "TILE": 2048}
    launch(_check_steps, (cdiv(blocks, 2048), len(steps)), (raised,), (blocks, *addresses), **kind, ALIGN=align)
    launch(
        _dequantise, cdiv(n, 2048), (raised, out), (n, apart, float(weight), *addresses), **kind,
        COUNT=len(steps), BLOCK=block, WIDTH=width, STEPS_ALIGN=align, CODES_ALIGN=codes_align,
        ADD=add, WEIGHTED=weight != 1.0,
    )  # fmt: skip


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
    if out.numel():
        here = steps.data_ptr()
        added = weight is not None
        _add_up([here], codes.data_ptr() - here, out, block, width, bfloat16, added, weight if added else 1.0)
    return out


def dequantise_messages(
    messages: Sequence[Tensor],
    out: Tensor,
    *,
    block: int,
    width: int,
    bfloat16: bool = False,
    weight: float = 1.0,
) -> Tensor:
    """The sum of messages; see the schema. ``out`` is written once for eight of them."""
    if out.numel():
        head = (2 if bfloat16 else 4) * cdiv(out.numel(), block)
        for at in range(0, len(messages), MOST):
            steps = [m.data_ptr() for m in messages[at : at + MOST]]
            _add_up(steps, head, out, block, width, bfloat16, at > 0, weight)
    return out

"""Philox draws, norms and block quantisers in plain torch: the definition, on any device.

Every floating-point operation below is one IEEE operation (multiply, add, divide, square root, conversion, round half to even)
in a fixed order, so that other backends can reproduce the bytes.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from tersegrad.core import philox
from tersegrad.core.philox import MASK, Purpose
from tersegrad.core.protocol import Context
from tersegrad.kernels.schema_blocks import RoundingRule

__all__ = [
    "abs_max",
    "block_abs_max",
    "block_sum_abs",
    "block_sum_squares",
    "dequantise_blocks",
    "dequantise_messages",
    "quantise_blocks",
    "random_u16",
    "split_blocks",
    "sum_abs",
    "sum_squares",
]

LANES = 32
CHUNK = 4096
SEGMENT = 1 << 20  # coordinates at a time, to bound the temporaries
FLOAT32_MAX = float(torch.finfo(torch.float32).max)
SMALLEST_STEP = 2.0**-126
MARGIN = 1.0 + 2.0**-22  # raises stochastic steps so that |x| / step stays below `levels` after three roundings


def philox_blocks(key: int, c0: Tensor, c1: Tensor, c2: int, c3: int) -> Tensor:
    """Philox-4x32-10 of counters (c0, c1, c2, c3): int64 words in 0..2^32-1, shape (n, 4)."""
    a, b = c0 & MASK, c1 & MASK
    c, d = torch.full_like(a, c2), torch.full_like(a, c3)
    k0, k1 = key & MASK, key >> 32 & MASK
    for _ in range(10):
        # int64 products wrap; their bits are those of the unsigned product.
        p0, p1 = a * philox.M0, c * philox.M1
        a, b, c, d = (p1 >> 32 & MASK) ^ b ^ k0, p1 & MASK, (p0 >> 32 & MASK) ^ d ^ k1, p0 & MASK
        k0, k1 = k0 + philox.W0 & MASK, k1 + philox.W1 & MASK
    return torch.stack((a, b, c, d), dim=1)


def random_u16(ctx: Context, purpose: int, start: int, count: int, device: torch.device | str = "cpu") -> Tensor:
    """The 16-bit draws of coordinates start .. start + count, as int32.

    >>> random_u16(Context(seed=0), 0, 0, 2).tolist() == [0x6627E8D5 & 0xFFFF, 0x6627E8D5 >> 16]
    True
    """
    out = torch.empty(count, dtype=torch.int32, device=device)
    for at in range(start, start + count, SEGMENT):
        end = min(at + SEGMENT, start + count)
        index = torch.arange(at // 8, (end + 7) // 8, dtype=torch.int64, device=device)
        words = philox_blocks(ctx.seed, index, index >> 32 | purpose << 24, ctx.step, ctx.buffer << 16 | ctx.sender)
        halves = torch.stack((words & 0xFFFF, words >> 16), dim=2).reshape(-1)  # low half first
        out[at - start : end - start] = halves[at % 8 : at % 8 + end - at]
    return out


def _fold(a: Tensor) -> Tensor:
    """Sum over the last dimension: pad to a power of two, add the second half to the first until one is left."""
    size = 1 << max(a.shape[-1] - 1, 0).bit_length()
    a = torch.nn.functional.pad(a, (0, size - a.shape[-1]))
    while a.shape[-1] > 1:
        half = a.shape[-1] // 2
        a = a[..., :half] + a[..., half:]
    return a[..., 0]


def _rows(x: Tensor, block: int) -> Tensor:
    """``x`` cut into blocks, the last one padded with zeros: (blocks, block)."""
    blocks = -(-x.numel() // block)
    return torch.nn.functional.pad(x, (0, blocks * block - x.numel())).view(blocks, block)


def _used(block: int, numel: int) -> int:
    """``block``, but no longer than the vector: what is padded must not be sized by a configuration from outside."""
    return min(block, max(numel, 1))


def block_sum(x: Tensor, block: int, term: Callable[[Tensor], Tensor]) -> Tensor:
    """Sum of term(x) over every block, in the fixed order of the schema."""
    block = _used(block, x.numel())
    chunk = min(block, CHUNK)
    rows = _rows(x, block)  # (blocks, block)
    chunks = -(-block // chunk)
    rows = torch.nn.functional.pad(rows, (0, chunks * chunk - block)).reshape(-1, chunk)
    lanes = torch.zeros(rows.shape[0], LANES, dtype=torch.float64, device=x.device)
    for i in range(0, chunk, LANES):
        part = term(rows[:, i : i + LANES].to(torch.float64))
        lanes[:, : part.shape[1]] += part
    return _fold(_fold(lanes).view(-1, chunks))


def ordered_sum(x: Tensor, term: Callable[[Tensor], Tensor]) -> Tensor:
    """Sum of term(x) over a whole vector, in the fixed order of the schema."""
    return block_sum(x, max(x.numel(), 1), term).sum()


def block_sum_squares(x: Tensor, block: int) -> Tensor:
    """Sum of squares of every block, in the fixed order of the schema."""
    return block_sum(x, block, lambda v: v * v)


def block_sum_abs(x: Tensor, block: int) -> Tensor:
    """Sum of magnitudes of every block, in the fixed order of the schema."""
    return block_sum(x, block, torch.abs)


def block_abs_max(x: Tensor, block: int) -> Tensor:
    """Largest magnitude of every block."""
    bits = (
        _rows(x, _used(block, x.numel())).view(torch.int32) & 0x7FFFFFFF
    )  # magnitudes order like their bit patterns, NaN last
    return bits.amax(dim=1).view(torch.float32) if bits.numel() else x.new_empty(0)


def sum_squares(x: Tensor) -> Tensor:
    """Sum of squares, in the fixed order of the schema."""
    return block_sum_squares(x, max(x.numel(), 1)).sum()


def sum_abs(x: Tensor) -> Tensor:
    """Sum of magnitudes, in the fixed order of the schema."""
    return block_sum_abs(x, max(x.numel(), 1)).sum()


def abs_max(x: Tensor) -> Tensor:
    """Largest magnitude; NaN or Inf exactly if ``x`` holds one."""
    return block_abs_max(x, x.numel()).view(()) if x.numel() else x.new_zeros(())


@functools.cache
def _largest_step(levels: int) -> float:
    """The largest float32 c with levels * c finite."""
    most = FLOAT32_MAX / levels
    cap = torch.tensor(most, dtype=torch.float32)
    if cap.item() > most:
        cap = torch.nextafter(cap, torch.zeros(()))
    return cap.item()


def block_steps(x: Tensor, rule: RoundingRule, block: int, levels: int, bfloat16: bool = False) -> Tensor:
    """One float32 step per block; 0 for a zero block, NaN for one with NaN or Inf."""
    if rule == "l2":
        scale = block_sum_squares(x, block).sqrt()
    else:
        scale = block_abs_max(x, block).to(torch.float64)
    step = (scale / levels * (1.0 if rule == "nearest" else MARGIN)).to(torch.float32)
    step = step.clamp(SMALLEST_STEP, _largest_step(levels))
    if bfloat16:
        bits = step.view(torch.int32)
        step = (bits + 0x7FFF + (bits >> 16 & 1) & -0x10000).view(torch.float32)
    step = torch.where(scale == 0, torch.zeros_like(step), step)
    return torch.where(scale.isfinite(), step, torch.full_like(step, math.nan))


def round_levels(x: Tensor, steps: Tensor, ctx: Context, rule: RoundingRule, block: int, levels: int) -> Tensor:
    """int8 levels of ``x`` for given steps."""
    live = steps > 0
    inverse = torch.where(live, steps, torch.ones_like(steps)).to(torch.float64).reciprocal().to(torch.float32)
    y = torch.where(live[:, None], _rows(x, _used(block, x.numel())) * inverse[:, None], 0.0).view(-1)[: x.numel()]
    if rule == "nearest":
        return y.round().clamp(-levels, levels).to(torch.int8)
    fixed = (y * 65536.0).clamp(-65536.0 * levels, 65536.0 * levels).round().to(torch.int32)
    draws = random_u16(ctx, Purpose.ROUNDING, 0, x.numel(), x.device)
    return (fixed + draws >> 16).to(torch.int8)


def pack_codes(levels: Tensor, width: int) -> Tensor:
    """Two's complement codes of ``width`` bits in one stream, lowest bit first."""
    count = levels.numel()
    codes = _rows(levels.to(torch.int64) & (1 << width) - 1, 8)
    shifts = torch.arange(8, device=levels.device)
    words = (codes << width * shifts).sum(dim=1)  # disjoint bits: the sum is their union
    return (words[:, None] >> 8 * shifts[:width] & 0xFF).to(torch.uint8).view(-1)[: (count * width + 7) // 8]


def unpack_codes(codes: Tensor, count: int, width: int) -> Tensor:
    """The signed levels (int64) of :func:`pack_codes`."""
    shifts = torch.arange(8, device=codes.device)
    words = (_rows(codes.to(torch.int64), width) << 8 * shifts[:width]).sum(dim=1)
    levels = (words[:, None] >> width * shifts & (1 << width) - 1).view(-1)[:count]
    half = 1 << width - 1
    return (levels ^ half) - half


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
    scale = block_steps(x, rule, block, levels, bfloat16)
    words = (scale.view(torch.int32) >> 16).to(torch.int16) if bfloat16 else scale
    steps.copy_(words.view(torch.uint8))
    codes.copy_(pack_codes(round_levels(x, scale, ctx, rule, block, levels), width))


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
    if bfloat16:
        scale = (steps.clone().view(torch.int16).to(torch.int32) << 16).view(torch.float32)
    else:
        scale = steps.clone().view(torch.float32)  # the clone is aligned
    values = (
        _rows(unpack_codes(codes, out.numel(), width), _used(block, out.numel())).to(torch.float32) * scale[:, None]
    ).view(-1)[: out.numel()]
    if weight is not None:
        # Torch rounds the weight to float32.
        values = out + values * weight
    poisoned = scale.isfinite().all().logical_not()
    out.copy_(torch.where(poisoned, torch.full_like(out, math.nan), values))
    return out


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
    torch.add(x, carry, out=left)
    quantise_blocks(left, ctx, steps, codes, rule=rule, block=block, levels=levels, width=width, bfloat16=bfloat16)
    dequantise_blocks(steps, codes, left, block=block, width=width, bfloat16=bfloat16, weight=-weight)
    return left.isfinite().all()


def dequantise_messages(
    messages: Sequence[Tensor],
    out: Tensor,
    *,
    block: int,
    width: int,
    bfloat16: bool = False,
    weight: float = 1.0,
) -> Tensor:
    """The sum of messages, one after another; see the schema."""
    head = (2 if bfloat16 else 4) * -(-out.numel() // block)
    for k, message in enumerate(messages):
        added = weight if k else None
        dequantise_blocks(message[:head], message[head:], out, block=block, width=width, bfloat16=bfloat16, weight=added)
        if k == 0 and weight != 1.0:
            out.mul_(weight)
    return out

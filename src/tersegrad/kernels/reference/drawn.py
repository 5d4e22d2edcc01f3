"""Draws that both ends share, in plain torch: subtractive dither, and rows of a codebook that is never stored.

Dither. Coordinate i has the 16-bit draw u (purpose ``DITHER``), standing for U = (2u - 65535) / 2^17 of a step: odd multiples of
2^-17, symmetric about zero. With Y = rint(fl32(fl32(x * fl32(1/step)) * 65536)), ties to even, the level is q = (Y + u) >> 16, the
nearest integer to Y/65536 + U; the value is fl32(fl32(V * 2^-17) * step) with V = fl32((q << 17) - 2u + 65535), kept finite. What
travels is the folded level a = q where u >= 32768 and -q elsewhere, whose law for symmetric x depends on |U| alone; the bin of |U|
is its 15-bit size s, u - 32768 or 32767 - u, cut to 4 bits. Its octave is the number of leading ones of s in 15 bits, at most 7: a small
level is other than 0 only where |U| is nearly 1/2.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tersegrad.core.philox import MASK, Purpose
from tersegrad.core.protocol import Context
from tersegrad.kernels.reference.rounding import philox_blocks, random_u16

__all__ = [
    "random_rows",
    "sphere_first",
    "subtractive_bins",
    "subtractive_octaves",
    "subtractive_quantise",
    "subtractive_restore",
]

HUGE = float(torch.finfo(torch.float32).max)
GRID = 1 << 22  # scalar products at a time
OCTAVES = 8  # of the dither's magnitude
LEVEL_LIMIT = 1 << 30  # |x / step| from here on is not coded


def _draws(ctx: Context, start: int, count: int, device: torch.device) -> Tensor:
    return random_u16(ctx, Purpose.DITHER, start, count, device)


def _sizes(ctx: Context, start: int, out: Tensor) -> Tensor:
    u = _draws(ctx, start, out.numel(), out.device)
    return torch.where(u >= 32768, u - 32768, 32767 - u)


def subtractive_bins(ctx: Context, start: int, out: Tensor) -> None:
    out.copy_(_sizes(ctx, start, out) >> 11)


def subtractive_octaves(ctx: Context, start: int, out: Tensor) -> None:
    sizes = _sizes(ctx, start, out)
    out.zero_()
    for octave in range(1, OCTAVES):
        out += sizes >= 32768 - (32768 >> octave)


def subtractive_quantise(x: Tensor, step: float, ctx: Context, start: int, levels: Tensor) -> int | Tensor:
    if not x.numel():
        return torch.zeros((), dtype=torch.int64, device=x.device)
    # Torch rounds the step to float32, and so the quotient.
    scaled = x * torch.full((), step, dtype=torch.float32, device=x.device).reciprocal()
    fits = scaled.abs().max() < LEVEL_LIMIT
    u = _draws(ctx, start, x.numel(), x.device)
    q = torch.round(torch.where(fits, scaled, 0.0) * 65536.0).to(torch.int64) + u >> 16
    levels.copy_(torch.where(u >= 32768, q, -q))
    return torch.where(fits, levels.abs().max().long(), -1)


def subtractive_restore(levels: Tensor, step: float, ctx: Context, start: int, out: Tensor, weight: float | None) -> None:
    u = _draws(ctx, start, out.numel(), out.device)
    wide = levels.to(torch.int64)
    q = torch.where(u >= 32768, wide, -wide)
    twice = (q << 17) - 2 * u + 65535
    # Torch rounds step and weight to float32.
    values = (twice.to(torch.float32) * 2.0**-17 * step).clamp_(-HUGE, HUGE)
    if weight is None:
        out.copy_(values)
    else:
        out.add_(values * weight)


def random_rows(ctx: Context, purpose: int, rows: Tensor, width: int) -> Tensor:
    blocks = -(-width // 8)
    index = (rows[:, None] * blocks + torch.arange(blocks, device=rows.device)).reshape(-1)
    words = philox_blocks(ctx.seed, index & MASK, index >> 32 | purpose << 24, ctx.step, ctx.buffer << 16 | ctx.sender)
    halves = torch.stack((words & 0xFFFF, words >> 16), dim=2).to(torch.int32)  # low half first
    return halves.reshape(rows.numel(), 8 * blocks)[:, :width].contiguous()


def sphere_first(book: Tensor, units: Tensor, least: Tensor, start: Tensor) -> Tensor:
    words = book.shape[1]
    place = torch.arange(words, device=book.device)
    first = torch.empty_like(start)
    group = max(1, GRID // max(words, 1))
    for at in range(0, units.shape[0], group):
        part = slice(at, at + group)
        hits = (units[part] @ book >= least[part, None]) & (place >= start[part, None])
        first[part] = torch.where(hits, place, words).amin(1)
    return first.where(first < words, -1)

# mypy: ignore-errors
"""Philox-4x32-10 (``spec/wire.md``, section 3): one block serves a row of eight coordinates."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tersegrad.core.protocol import Context
from tersegrad.kernels.triton.launch import cdiv, draws_of, launch


@triton.jit
def philox(c0, c1, c2, c3, k0, k1):
    """Four uint32 words from four counter words and a key, all uint32."""
    M0: tl.constexpr = 0xD2511F53
    M1: tl.constexpr = 0xCD9E8D57
    W0: tl.constexpr = 0x9E3779B9
    W1: tl.constexpr = 0xBB67AE85
    m0 = tl.zeros_like(c0) + M0
    m1 = tl.zeros_like(c0) + M1
    for _ in tl.static_range(10):
        high0 = tl.umulhi(m0, c0)
        high1 = tl.umulhi(m1, c2)
        low0 = m0 * c0
        low1 = m1 * c2
        c0 = high1 ^ c1 ^ k0
        c1 = low1
        c2 = high0 ^ c3 ^ k1
        c3 = low0
        k0 += W0
        k1 += W1
    return c0, c1, c2, c3


@triton.jit
def blocks(index, step, who, k0, k1, PURPOSE: tl.constexpr):
    """The four words of the blocks with these int64 numbers."""
    c0 = index.to(tl.uint32)
    zero = tl.zeros_like(c0)
    c1 = (index >> 32).to(tl.uint32) | (PURPOSE << 24)
    c2 = zero + step.to(tl.uint32, bitcast=True)
    c3 = zero + who.to(tl.uint32, bitcast=True)
    return philox(c0, c1, c2, c3, zero + k0.to(tl.uint32, bitcast=True), zero + k1.to(tl.uint32, bitcast=True))


@triton.jit
def words_of(index, step, who, k0, k1, PURPOSE: tl.constexpr, ROWS: tl.constexpr):
    """The words of ``ROWS`` blocks with int64 numbers ``index``: (ROWS, 4) uint32."""
    a, b, c, d = blocks(index, step, who, k0, k1, PURPOSE)
    return tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), (ROWS, 4))


@triton.jit
def draws(index, step, who, k0, k1, PURPOSE: tl.constexpr, ROWS: tl.constexpr):
    """The 16-bit draws of ``ROWS`` blocks with int64 numbers ``index``: (ROWS, 8) int32, low half first."""
    words = words_of(index, step, who, k0, k1, PURPOSE, ROWS)
    return tl.reshape(tl.join(words & 0xFFFF, words >> 16), (ROWS, 8)).to(tl.int32)


@triton.jit(do_not_specialize=["start", "count", "step", "who", "k0", "k1"])
def _random_u16(out, start, count, step, who, k0, k1, PURPOSE: tl.constexpr, ROWS: tl.constexpr):
    row = start.to(tl.int64) // 8 + tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    u = draws(row, step, who, k0, k1, PURPOSE, ROWS)
    place = row[:, None] * 8 + tl.arange(0, 8)[None, :] - start
    tl.store(out + place, u, mask=(place >= 0) & (place < count))


def random_u16(ctx: Context, purpose: int, start: int, count: int, device: torch.device | str = "cpu") -> Tensor:
    """The 16-bit draws of coordinates start .. start + count, as int32."""
    out = torch.empty(count, dtype=torch.int32, device=device)
    if count:
        rows = (start + count + 7) // 8 - start // 8
        launch(_random_u16, cdiv(rows, 128), (out,), (start, count, *draws_of(ctx)), PURPOSE=int(purpose), ROWS=128)
    return out

# mypy: ignore-errors
"""Rows of eight codes of equal width as bytes: eight codes of ``WIDTH`` bits are ``WIDTH`` whole bytes."""

from __future__ import annotations

import triton
import triton.language as tl

from tersegrad.kernels.triton.launch import get_word, put_word


@triton.jit
def pack(codes, row, out, n, WIDTH: tl.constexpr, ALIGNED: tl.constexpr):
    """Write the rows of ``codes`` (ROWS, 8), numbered ``row`` (int64), of a sequence of ``n`` codes; all below 2^WIDTH, int32."""
    lane = tl.arange(0, 8)[None, :]
    if WIDTH == 8:
        i = row[:, None] * 8 + lane
        tl.store(out + i, codes.to(tl.uint8), mask=i < n)
    else:
        if WIDTH <= 4:
            words = tl.sum(codes.to(tl.uint32, bitcast=True) << (WIDTH * lane).to(tl.uint32), 1)
        else:
            words = tl.sum(codes.to(tl.int64) << (WIDTH * lane).to(tl.int64), 1)
        if WIDTH == 1 or WIDTH == 2 or WIDTH == 4:
            put_word(out, row, words, row * 8 + 8 <= n, WIDTH, ALIGNED)
            for j in tl.static_range(WIDTH):
                # Only the last row of a sequence may have bytes that lie beyond its end.
                tail = (row * 8 + 8 > n) & (row * 8 < n) & (8 * j < (n - row * 8) * WIDTH)
                tl.store(out + row * WIDTH + j, (words >> (8 * j)).to(tl.uint8), mask=tail)
        else:
            for j in tl.static_range(WIDTH):
                here = (row * 8 < n) & (8 * j < (n - row * 8) * WIDTH)
                tl.store(out + row * WIDTH + j, (words >> (8 * j)).to(tl.uint8), mask=here)


@triton.jit
def unpack(data, row, n, WIDTH: tl.constexpr, ALIGNED: tl.constexpr):
    """The codes of these rows, (ROWS, 8) int32; codes beyond the ``n``-th are anything."""
    lane = tl.arange(0, 8)[None, :]
    if WIDTH == 8:
        i = row[:, None] * 8 + lane
        return tl.load(data + i, mask=i < n, other=0).to(tl.int32)
    else:
        whole = row * 8 + 8 <= n
        if WIDTH == 2 or WIDTH == 4:
            words = get_word(data, row, whole, WIDTH, ALIGNED).to(tl.int64)
            skip = whole
        else:
            words = tl.zeros_like(row)
            skip = row < 0
        for j in tl.static_range(WIDTH):
            here = (row * 8 < n) & (8 * j < (n - row * 8) * WIDTH)
            words |= tl.load(data + row * WIDTH + j, mask=here & (skip == 0), other=0).to(tl.int64) << (8 * j)
        if WIDTH <= 4:
            codes = words.to(tl.uint32)[:, None] >> (WIDTH * lane).to(tl.uint32)
            return (codes & ((1 << WIDTH) - 1)).to(tl.int32)
        else:
            return ((words[:, None] >> (WIDTH * lane).to(tl.int64)) & ((1 << WIDTH) - 1)).to(tl.int32)

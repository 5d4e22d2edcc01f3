# mypy: ignore-errors
"""Codes of equal width as bytes: eight codes of ``WIDTH`` bits are ``WIDTH`` whole bytes.

Encoders hold rows of eight, which share a Philox block; decoders hold rows of four, whose float32 values are 16 bytes. Pointers are to the
first byte of a tile, ``row`` counts from there on (int32), and ``left`` codes are left from there on.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tersegrad.kernels.triton.launch import get_word, inside, put_word


@triton.jit
def pack(codes, row, out, left, WIDTH: tl.constexpr, ALIGN: tl.constexpr, RAGGED: tl.constexpr):
    """Write rows of ``codes`` (ROWS, 8), all below 2^WIDTH, int32. ``ALIGN``: what divides the address ``out``."""
    lane = tl.arange(0, 8)[None, :]
    if WIDTH == 8:
        i = row[:, None] * 8 + lane
        tl.store(out + i, codes.to(tl.uint8), mask=inside(i, left, RAGGED))
    else:
        if WIDTH <= 4:
            words = tl.sum(codes.to(tl.uint32, bitcast=True) << (WIDTH * lane).to(tl.uint32), 1)
        else:
            words = tl.sum(codes.to(tl.int64) << (WIDTH * lane).to(tl.int64), 1)
        if (WIDTH == 1 or WIDTH == 2 or WIDTH == 4) and not RAGGED:
            put_word(out, row, words, True, WIDTH, ALIGN)
        else:
            for j in tl.static_range(WIDTH):
                # The last row of a sequence may have bytes that lie beyond its end.
                here = inside(row * 8 * WIDTH + 8 * j, left * WIDTH, RAGGED)
                tl.store(out + row * WIDTH + j, (words >> (8 * j)).to(tl.uint8), mask=here)


@triton.jit
def unpack(data, row, left, WIDTH: tl.constexpr, ALIGN: tl.constexpr, RAGGED: tl.constexpr):
    """Rows of codes, (ROWS, 4) int32; codes beyond ``left`` are anything. ``ALIGN``: what divides the address ``data``."""
    lane = tl.arange(0, 4)[None, :]
    # Rows of an odd width begin in the middle of a byte, every second time.
    ODD: tl.constexpr = WIDTH % 2
    BYTES: tl.constexpr = (WIDTH + ODD) // 2
    if (BYTES == 1 or BYTES == 2 or BYTES == 4) and ODD == 0 and not RAGGED:
        words = get_word(data, row, True, BYTES, ALIGN)
    else:
        first = row * WIDTH // 2
        words = tl.zeros_like(row).to(tl.uint32)
        for j in tl.static_range(BYTES):
            here = inside(8 * (first + j), left * WIDTH, RAGGED)
            words |= tl.load(data + first + j, mask=here, other=0).to(tl.uint32) << (8 * j)
        if ODD:
            words = words >> (4 * (row % 2)).to(tl.uint32)
    return ((words[:, None] >> (WIDTH * lane).to(tl.uint32)) & ((1 << WIDTH) - 1)).to(tl.int32)

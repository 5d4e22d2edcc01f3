# mypy: ignore-errors
"""The randomised Walsh-Hadamard rotation (``spec/wire.md``, 5.65).

A program holds a block of up to 4096 coordinates and runs all stages. Longer blocks run the stages up to distance 2048 that way,
and the others in a second pass whose tiles take every 4096-th coordinate.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tersegrad.core.protocol import Context
from tersegrad.kernels.reference.hadamard import _parts, _scale
from tersegrad.kernels.triton.launch import as_bits, as_float, draws_of, flat, launch
from tersegrad.kernels.triton.philox import blocks
from tersegrad.kernels.triton.sums import abs_max

HELD = 4096


@triton.jit
def _stages(v, SIZE: tl.constexpr, COLUMNS: tl.constexpr):
    """The unnormalised transform of the columns of ``v`` (SIZE, COLUMNS): pairs at distance 1, 2, 4, ... rows."""
    LOG: tl.constexpr = SIZE.bit_length() - 1
    for level in tl.static_range(LOG):
        pairs = tl.permute(tl.reshape(v, (SIZE >> (level + 1), 2, COLUMNS << level)), (0, 2, 1))
        a, b = tl.split(pairs)
        v = tl.reshape(tl.permute(tl.join(a + b, a - b), (0, 2, 1)), (SIZE, COLUMNS))
    return v


@triton.jit
def _flips(first, step, who, k0, k1, SIZE: tl.constexpr):
    """The sign bits of coordinates ``first`` .. ``first + SIZE``, as 0 or -2^31."""
    if SIZE < 128:
        # All lie in one Philox block, unless the vector is cut at places that are no multiples of their length, and it is not.
        a, b, c, d = blocks(first // 128 + tl.zeros((1,), tl.int64), step, who, k0, k1, 3)
        i = (first % 128).to(tl.int32) + tl.arange(0, SIZE)
        word = tl.where(i < 32, a, tl.where(i < 64, b, tl.where(i < 96, c, d)))
        return ((word >> (i % 32).to(tl.uint32)) << 31).to(tl.int32, bitcast=True)
    else:
        a, b, c, d = blocks(first // 128 + tl.arange(0, SIZE // 128), step, who, k0, k1, 3)
        words = tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), (SIZE // 32,))
        bits = words[:, None] >> tl.arange(0, 32)[None, :].to(tl.uint32)
        return tl.reshape(bits << 31, (SIZE,)).to(tl.int32, bitcast=True)


@triton.jit(do_not_specialize=["start", "stop", "scale", "step", "who", "k0", "k1"])
def _near_stages(
    x,
    out,
    start,
    stop,
    scale,
    step,
    who,
    k0,
    k1,
    SIZE: tl.constexpr,
    BEFORE: tl.constexpr,
    AFTER: tl.constexpr,
    RAGGED: tl.constexpr,
):
    """All stages of blocks of ``SIZE`` from ``start`` on, signs before or after them.

    ``RAGGED``: what lies from ``stop`` on is read as zeros (signs before) or not written (signs after).
    """
    first = start + tl.program_id(0).to(tl.int64) * SIZE
    i = first + tl.arange(0, SIZE)
    v = tl.load(x + i, mask=(i < stop) | (AFTER | (RAGGED == 0)), other=0.0).to(tl.float32)
    if BEFORE:
        v = as_float(as_bits(v) ^ _flips(first, step, who, k0, k1, SIZE))
    v = tl.reshape(_stages(tl.reshape(v * scale, (SIZE, 1)), SIZE, 1), (SIZE,))
    if AFTER:
        v = as_float(as_bits(v) ^ _flips(first, step, who, k0, k1, SIZE))
    tl.store(out + i, v, mask=(i < stop) | (BEFORE | (RAGGED == 0)))


@triton.jit(do_not_specialize=["start", "stop", "size", "step", "who", "k0", "k1"])
def _far_stages(x, out, start, stop, size, step, who, k0, k1, RATIO: tl.constexpr, COLUMNS: tl.constexpr, AFTER: tl.constexpr):
    """The stages of distance 4096 and more of blocks of ``size`` = 4096 RATIO."""
    tiles = 4096 // COLUMNS
    at = tl.program_id(0).to(tl.int64)
    first = start + at // tiles * size + at % tiles * COLUMNS
    i = first + tl.arange(0, RATIO)[:, None] * 4096 + tl.arange(0, COLUMNS)[None, :]
    v = _stages(tl.load(x + i), RATIO, COLUMNS)
    if AFTER:
        bit = (i % 32).to(tl.uint32)
        a, b, c, d = blocks(i // 128, step, who, k0, k1, 3)
        word = i % 128 // 32
        chosen = tl.where(word == 0, a, tl.where(word == 1, b, tl.where(word == 2, c, d)))
        v = as_float(as_bits(v) ^ ((chosen >> bit) << 31).to(tl.int32, bitcast=True))
        tl.store(out + i, v, mask=i < stop)
    else:
        tl.store(out + i, v)


def _near(x: Tensor, out: Tensor, part: tuple[int, int, int, int], ctx: Context, before: bool, after: bool) -> None:
    start, stop, rows, n = part
    held = min(n, HELD)
    launch(
        _near_stages, rows * (n // held), (x, out), (start, stop, _scale(n), *draws_of(ctx)),
        SIZE=held, BEFORE=before, AFTER=after, RAGGED=before or after, num_warps=4 if held >= 1024 else 1,
    )  # fmt: skip


def _far(y: Tensor, out: Tensor, part: tuple[int, int, int, int], ctx: Context, after: bool) -> None:
    start, stop, rows, n = part
    columns = max(16, 2048 * HELD // n)
    kind = {"RATIO": n // HELD, "COLUMNS": columns, "AFTER": after}
    launch(_far_stages, rows * (HELD // columns), (y, out), (start, stop, n, *draws_of(ctx)), **kind)


def rotate(x: Tensor, out: Tensor, block: int, ctx: Context) -> Tensor:
    """Rotate ``x`` into float32 ``out`` of the padded size; max |x|, NaN where x is not finite, as a tensor (0-d)."""
    x = flat(x)
    for part in _parts(x.numel(), block):
        _near(x, out, part, ctx, True, False)
        if part[3] > HELD:
            _far(out, out, part, ctx, False)
    top = abs_max(x)
    return torch.where(top < torch.inf, top, torch.nan)


def unrotate(y: Tensor, out: Tensor, block: int, ctx: Context) -> Tensor:
    """The inverse: ``y`` of the padded size into ``out``, which is returned. ``out`` may be ``y``."""
    y = flat(y)
    for part in _parts(out.numel(), block):
        if part[3] <= HELD:
            _near(y, out, part, ctx, False, True)
        else:
            # The padding of a block takes part in its later stages, and ``out`` has no place for it.
            between = torch.empty_like(y)
            _near(y, between, part, ctx, False, False)
            _far(between, out, part, ctx, True)
    return out

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
from tersegrad.kernels.triton.launch import as_bits, as_float, draws_of, flag, flat, launch
from tersegrad.kernels.triton.philox import blocks

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


@triton.jit(do_not_specialize=["start", "stop", "scale", "factor", "step", "who", "k0", "k1"])
def _near_stages(
    x,
    out,
    top,
    start,
    stop,
    scale,
    factor,
    step,
    who,
    k0,
    k1,
    SIZE: tl.constexpr,
    BEFORE: tl.constexpr,
    AFTER: tl.constexpr,
    RAGGED: tl.constexpr,
    AGAIN: tl.constexpr,
):
    """All stages of blocks of ``SIZE`` from ``start`` on, signs before or after them.

    ``RAGGED``: what lies from ``stop`` on is read as zeros (signs before) or not written (signs after). ``top`` gets the bits of the
    largest magnitude (signs before); or, ``AGAIN``, it is a flag without which nothing is done, and ``factor`` multiplies x.
    """
    if (tl.load(top) != 0) if AGAIN else True:
        first = start + tl.program_id(0).to(tl.int64) * SIZE
        i = first + tl.arange(0, SIZE)
        v = tl.load(x + i, mask=(i < stop) | (AFTER | (RAGGED == 0)), other=0.0).to(tl.float32)
        if AGAIN:
            v = v * factor
        elif BEFORE:
            tl.atomic_max(top, tl.max(as_bits(v) & 0x7FFFFFFF, 0), sem="relaxed")
        if BEFORE:
            v = as_float(as_bits(v) ^ _flips(first, step, who, k0, k1, SIZE))
        v = tl.reshape(_stages(tl.reshape(v * scale, (SIZE, 1)), SIZE, 1), (SIZE,))
        if AFTER:
            v = as_float(as_bits(v) ^ _flips(first, step, who, k0, k1, SIZE))
        tl.store(out + i, v, mask=(i < stop) | (BEFORE | (RAGGED == 0)))


@triton.jit(do_not_specialize=["start", "stop", "size", "step", "who", "k0", "k1"])
def _far_stages(
    x,
    out,
    flag,
    start,
    stop,
    size,
    step,
    who,
    k0,
    k1,
    RATIO: tl.constexpr,
    COLUMNS: tl.constexpr,
    AFTER: tl.constexpr,
    AGAIN: tl.constexpr,
):
    """The stages of distance 4096 and more of blocks of ``size`` = 4096 RATIO; nothing, ``AGAIN``, without the flag."""
    if (tl.load(flag) != 0) if AGAIN else True:
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


Part = tuple[int, int, int, int]


def _near(
    x: Tensor, out: Tensor, part: Part, ctx: Context, top: Tensor, factor: float | None = None, *, side: str = ""
) -> None:
    """Signs stand ``side`` "before" or "after" the stages, or nowhere; with a ``factor`` ``top`` is the flag."""
    start, stop, rows, n = part
    held = min(n, HELD)
    numbers = (start, stop, _scale(n), 1.0 if factor is None else factor, *draws_of(ctx))
    launch(
        _near_stages, rows * (n // held), (x, out, top), numbers,
        SIZE=held, BEFORE=side == "before", AFTER=side == "after", RAGGED=bool(side), AGAIN=factor is not None,
        num_warps=4 if held >= 1024 else 1,
    )  # fmt: skip


def _far(y: Tensor, out: Tensor, part: Part, ctx: Context, flagged: Tensor | None = None, *, after: bool = False) -> None:
    start, stop, rows, n = part
    columns = max(16, 2048 * HELD // n)
    kind = {"RATIO": n // HELD, "COLUMNS": columns, "AFTER": after, "AGAIN": flagged is not None}
    given = (y, out, y if flagged is None else flagged)
    launch(_far_stages, rows * (HELD // columns), given, (start, stop, n, *draws_of(ctx)), **kind)


def rotate(x: Tensor, out: Tensor, block: int, ctx: Context) -> Tensor:
    """Rotate ``x`` into float32 ``out`` of the padded size; max |x|, not finite where x is not, as a tensor (0-d)."""
    x = flat(x)
    top = flag(x)
    for part in _parts(x.numel(), block):
        _near(x, out, part, ctx, top, side="before")
        if part[3] > HELD:
            _far(out, out, part, ctx)
    return top.view(torch.float32).reshape(())


def rotate_where(x: Tensor, out: Tensor, block: int, ctx: Context, wanted: Tensor, factor: float) -> None:
    """Rotate ``factor`` times ``x`` into ``out``, if the flag is set."""
    x, wanted = flat(x), wanted.view(torch.uint8)
    for part in _parts(x.numel(), block):
        _near(x, out, part, ctx, wanted, factor, side="before")
        if part[3] > HELD:
            _far(out, out, part, ctx, wanted)


def unrotate(y: Tensor, out: Tensor, block: int, ctx: Context) -> Tensor:
    """The inverse: ``y`` of the padded size into ``out``, which is returned. ``out`` may be ``y``."""
    y = flat(y)
    for part in _parts(out.numel(), block):
        if part[3] <= HELD:
            _near(y, out, part, ctx, y, side="after")
        else:
            # The padding of a block takes part in its later stages, and ``out`` has no place for it.
            between = torch.empty_like(y)
            _near(y, between, part, ctx, y)
            _far(between, out, part, ctx, after=True)
    return out

# mypy: ignore-errors
"""Sums of squared per-sample gradients of several modules in one launch, where autograd computes the gradients themselves.

A step of a small network is over on the GPU before the CPU has launched it, so what counts is the number of launches. A kernel here
takes up to ``SLOTS`` modules: their tensors are its parameters, and a program finds the module that it belongs to by its number. Shapes
are numbers too, so that one compiled kernel serves all networks, and no table has to be copied to the device.

``norm``: a program adds up the squares of some channels over some of the samples; what the pieces of samples found is added up in a
fixed order. ``linear``: a program owns a tile of one weight; the bias is one more column, against an input of ones.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tersegrad.kernels.triton.launch import cdiv
from tersegrad.kernels.triton.shares import Call

SLOTS = 8  # modules of one launch
PIECES = 64  # of the samples: more than enough programs for a chip, and little to sum afterwards


@triton.jit
def _pick(slot, a0, a1, a2, a3, a4, a5, a6, a7):
    """The parameter of the module in ``slot``."""
    a = tl.where(slot == 1, a1, a0)
    a = tl.where(slot == 2, a2, a)
    a = tl.where(slot == 3, a3, a)
    a = tl.where(slot == 4, a4, a)
    a = tl.where(slot == 5, a5, a)
    a = tl.where(slot == 6, a6, a)
    return tl.where(slot == 7, a7, a)


@triton.jit
def _slot(tile, f1, f2, f3, f4, f5, f6, f7):
    """The module that a tile belongs to, where module k has the tiles from ``f_k`` on."""
    low = (tile >= f1).to(tl.int32) + (tile >= f2).to(tl.int32) + (tile >= f3).to(tl.int32) + (tile >= f4).to(tl.int32)
    return low + (tile >= f5).to(tl.int32) + (tile >= f6).to(tl.int32) + (tile >= f7).to(tl.int32)


def _named(*names: str) -> list[str]:
    return [f"{name}{k}" for name in names for k in range(SLOTS)]


@triton.jit(do_not_specialize=["samples", "each", "width", *_named("f", "c", "l", "p")])
def _norm(
    x0, x1, x2, x3, x4, x5, x6, x7, d0, d1, d2, d3, d4, d5, d6, d7,
    m0, m1, m2, m3, m4, m5, m6, m7, i0, i1, i2, i3, i4, i5, i6, i7,
    out, samples, each, width,
    f0, f1, f2, f3, f4, f5, f6, f7, c0, c1, c2, c3, c4, c5, c6, c7,
    l0, l1, l2, l3, l4, l5, l6, l7, p0, p1, p2, p3, p4, p5, p6, p7,
    ALIGN: tl.constexpr, BC: tl.constexpr, BL: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    slot = _slot(tile, f1, f2, f3, f4, f5, f6, f7)
    x = _pick(slot, x0, x1, x2, x3, x4, x5, x6, x7)
    delta = _pick(slot, d0, d1, d2, d3, d4, d5, d6, d7)
    mean = _pick(slot, m0, m1, m2, m3, m4, m5, m6, m7)
    inverse = _pick(slot, i0, i1, i2, i3, i4, i5, i6, i7)
    first = _pick(slot, f0, f1, f2, f3, f4, f5, f6, f7)
    # Tells the compiler that rows begin at whole words.
    C = _pick(slot, c0, c1, c2, c3, c4, c5, c6, c7) // ALIGN * ALIGN
    L = _pick(slot, l0, l1, l2, l3, l4, l5, l6, l7)
    at = _pick(slot, p0, p1, p2, p3, p4, p5, p6, p7)
    c = (tile - first) * BC + tl.arange(0, BC)
    real = c < C
    m = tl.load(mean + c, mask=real, other=0.0)
    i = tl.load(inverse + c, mask=real, other=0.0)
    scale = tl.zeros((BC,), tl.float32)
    shift = tl.zeros((BC,), tl.float32)
    piece = tl.program_id(1)
    row = (piece * each).to(tl.int64) * L * C
    for _ in range(tl.minimum(each, samples - piece * each)):
        by_scale = tl.zeros((BL, BC), tl.float32)
        by_shift = tl.zeros((BL, BC), tl.float32)
        for low in range(0, L, BL):
            place = low + tl.arange(0, BL)
            mask = (place < L)[:, None] & real[None, :]
            spot = place[:, None] * C + c[None, :]
            d = tl.load(delta + row + spot, mask=mask, other=0.0).to(tl.float32)
            v = tl.load(x + row + spot, mask=mask, other=0.0).to(tl.float32)
            by_scale += d * (v - m[None, :])
            by_shift += d
        one = tl.sum(by_scale, 0) * i
        scale += one * one
        one = tl.sum(by_shift, 0)
        shift += one * one
        row += L * C
    spot = out + piece * width + at + c
    tl.store(spot, scale, mask=real)
    tl.store(spot + C, shift, mask=real)


def norm(parts: Sequence[tuple[Tensor, Tensor, Tensor, Tensor]]) -> list[tuple[Tensor, Tensor]]:
    """The squares of scale and shift, (channels,) float32 each, of every (x, delta, mean, 1 / standard deviation); see the schema."""
    if len(parts) > SLOTS:
        return [*norm(parts[:SLOTS]), *norm(parts[SLOTS:])]
    key = (_norm, parts[0][0].dtype, parts[0][0].device, *[x.shape for x, _, _, _ in parts])
    call, sizes = _calls.get(key) or _kept(key, _norm_call(parts))
    found = iter(torch.split_with_sizes(call(*_slots(parts)), sizes))
    return list(zip(found, found))


def _norm_call(parts: Sequence[tuple[Tensor, Tensor, Tensor, Tensor]]) -> tuple[Call, list[int]]:
    samples, channels = parts[0][0].shape[0], [x.shape[1] for x, *_ in parts]
    places = [x.numel() // max(1, samples * c) for (x, *_), c in zip(parts, channels)]
    firsts, tiles = _places([cdiv(c, 64) for c in channels])
    starts, width = _places([2 * c for c in channels])
    # Without samples one piece, which finds zeros.
    each = cdiv(max(1, samples), PIECES)
    pieces = cdiv(max(1, samples), each)
    align = 8 if not any(c % 8 for c in channels) else 1
    shapes = (*_filled(firsts, tiles), *_filled(channels), *_filled(places), *_filled(starts))
    call = Call(_norm, (tiles, pieces, 1), (samples, each, width, *shapes), (align, 64, 32), (width,), pieces)
    return call, [c for c in channels for _ in range(2)]


@triton.jit(do_not_specialize=["samples", *_named("f", "i", "o", "p")])
def _linear(
    x0, x1, x2, x3, x4, x5, x6, x7, d0, d1, d2, d3, d4, d5, d6, d7, out,
    samples, f0, f1, f2, f3, f4, f5, f6, f7, i0, i1, i2, i3, i4, i5, i6, i7,
    o0, o1, o2, o3, o4, o5, o6, o7, p0, p1, p2, p3, p4, p5, p6, p7,
    ALIGN: tl.constexpr, BO: tl.constexpr, BI: tl.constexpr, BZ: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    slot = _slot(tile, f1, f2, f3, f4, f5, f6, f7)
    x = _pick(slot, x0, x1, x2, x3, x4, x5, x6, x7)
    delta = _pick(slot, d0, d1, d2, d3, d4, d5, d6, d7)
    out += _pick(slot, p0, p1, p2, p3, p4, p5, p6, p7).to(tl.int64) * 4
    first = _pick(slot, f0, f1, f2, f3, f4, f5, f6, f7)
    I = _pick(slot, i0, i1, i2, i3, i4, i5, i6, i7) // ALIGN * ALIGN
    O = _pick(slot, o0, o1, o2, o3, o4, o5, o6, o7)
    across = I // BI + 1  # the column of ones comes after the last
    o = (tile - first) // across * BO + tl.arange(0, BO)
    k = (tile - first) % across * BI + tl.arange(0, BI)
    squares = tl.zeros((BO, BI), tl.float32)
    for low in range(0, samples, BZ):
        z = low + tl.arange(0, BZ)
        within = z < samples
        row = z.to(tl.int64)[:, None]
        d = tl.load(delta + row * O + o[None, :], mask=within[:, None] & (o < O)[None, :], other=0.0).to(tl.float32)
        u = tl.load(x + row * I + k[None, :], mask=within[:, None] & (k < I)[None, :], other=0.0).to(tl.float32)
        u = tl.where((k == I)[None, :] & within[:, None], 1.0, u)
        squares = tl.dot(tl.trans(d * d), u * u, squares, input_precision="tf32x3")
    spot = o.to(tl.int64)[:, None] * I + k[None, :]
    tl.store(out + spot, squares, mask=(o < O)[:, None] & (k < I)[None, :])
    spot = O.to(tl.int64) * I + o[:, None] + 0 * k[None, :]
    tl.store(out + spot, squares, mask=(o < O)[:, None] & (k == I)[None, :])


def linear(parts: Sequence[tuple[Tensor, Tensor]]) -> list[tuple[Tensor, Tensor]]:
    """The squares of weight and bias, (o, i) and (o,) float32, of every (x, delta); see the schema."""
    if len(parts) > SLOTS:
        return [*linear(parts[:SLOTS]), *linear(parts[SLOTS:])]
    key = (_linear, parts[0][0].dtype, parts[0][0].device, *[(x.shape, delta.shape) for x, delta in parts])
    call, (sizes, shapes) = _calls.get(key) or _kept(key, _linear_call(parts))
    found = iter(torch.split_with_sizes(call(*_slots(parts)), sizes))
    return [(weight.view(shape), bias) for weight, bias, _, shape in zip(found, found, found, shapes)]


def _linear_call(parts: Sequence[tuple[Tensor, Tensor]]) -> tuple[Call, tuple[list[int], list[tuple[int, int]]]]:
    samples, shapes = parts[0][0].shape[0], [(delta.shape[1], x.shape[1]) for x, delta in parts]
    outputs, inputs = [o for o, _ in shapes], [i for _, i in shapes]
    firsts, tiles = _places([cdiv(o, 64) * (i // 64 + 1) for o, i in shapes])
    # A weight begins at a whole word of 16 bytes.
    sizes = [n for o, i in shapes for n in (o * i, o, -(o * i + o) % 4)]
    starts, words = _places([cdiv(o * i + o, 4) for o, i in shapes])
    numbers = (*_filled(firsts, tiles), *_filled(inputs), *_filled(outputs), *_filled(starts))
    align = 8 if not any(i % 8 for i in inputs) else 1
    return Call(_linear, (tiles, 1, 1), (samples, *numbers), (align, 64, 64, 32), (4 * words,)), (sizes, shapes)


_calls: dict[Any, tuple[Call, Any]] = {}


def _kept(key: Any, made: tuple[Call, Any]) -> tuple[Call, Any]:
    _calls[key] = made
    return made


def _places(sizes: list[int]) -> tuple[list[int], int]:
    """Where each begins, and where the last ends."""
    ends = list(itertools.accumulate(sizes, initial=0))
    return ends[:-1], ends[-1]


def _slots(parts: Sequence[tuple[Tensor, ...]]) -> list[Tensor]:
    """The tensors by their place in a module's part; slots that are empty get those of the last module, and no tile."""
    filled = [*parts, *[parts[-1]] * (SLOTS - len(parts))]
    return list(itertools.chain.from_iterable(zip(*filled)))


def _filled(numbers: list[int], rest: int = 0) -> list[int]:
    return [*numbers, *[rest] * (SLOTS - len(numbers))]


def agree(seed: int, device: str, dtype: torch.dtype) -> None:
    """Raise unless both kernels agree with the reference on ``device``, with several modules in one launch and in two."""
    from tersegrad.kernels.reference.shares import share_linear_squares, share_norm_squares

    generator = torch.Generator(device).manual_seed(seed)

    def made(*shape: int) -> Tensor:
        drawn = torch.randn(shape, generator=generator, device=device, dtype=dtype)
        return drawn.to(memory_format=torch.channels_last) if len(shape) == 4 else drawn

    def positive(n: int) -> Tensor:
        return torch.rand(n, generator=generator, device=device) + 0.5

    for samples, shapes in ((70, ((64, 5, 4), (72, 6, 6), (8,))), (3, ((5, 3, 2), (130,)) * 5)):
        parts = [(made(samples, *s), made(samples, *s), positive(s[0]), positive(s[0])) for s in shapes]
        _agree("squares of a norm", norm(parts), share_norm_squares(parts))
    for samples, sizes in ((70, ((64, 10), (128, 72))), (3, ((5, 3), (65, 130), (64, 64)) * 3)):
        layers = [(made(samples, i), made(samples, o)) for i, o in sizes]
        _agree("squares of a linear layer", linear(layers), share_linear_squares(layers))


def _agree(what: str, found: list[tuple[Tensor, Tensor]], expected: list[tuple[Tensor, Tensor]]) -> None:
    for pair in zip(found, expected, strict=True):
        for a, b in zip(*pair, strict=True):
            error = float((a - b).norm() / b.norm())
            if not error < 1e-4:
                raise ArithmeticError(f"{what} is off by {error:.2g}")

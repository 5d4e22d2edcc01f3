# mypy: ignore-errors
"""Sums and sums of squares of per-sample gradients, without ever storing one.

``convolution``: a program owns a tile of the weight and walks through the samples of one worker; a sample's tile of the weight
gradient is accumulated in float32 registers, added to the sum, squared and added to the squares. The bias is one more column of
the weight, against an input of ones. ``norm_sums``: per sample and channel, the sums of delta * xhat and of delta. ``affine``: one pass
over all samples, with numbers by worker and channel.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
import threading
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tersegrad.core import private
from tersegrad.kernels.reference.shares import share_affine, share_convolution, share_norm_sums
from tersegrad.kernels.triton.launch import DIRECT, cdiv, direct, launch

FILLED = 264  # programs that keep the chip busy: two on each multiprocessor of an H100 or H200
LONG = 1 << 16  # positions of all samples from which on twice as many programs are faster


@triton.jit(do_not_specialize=["part", "each", "splits"])
def _convolution(
    x, delta, out, part, each, splits,
    H: tl.constexpr, W: tl.constexpr, SY: tl.constexpr, SX: tl.constexpr, DY: tl.constexpr, DX: tl.constexpr,
    PY: tl.constexpr, PX: tl.constexpr, C: tl.constexpr, O: tl.constexpr, KW: tl.constexpr, K: tl.constexpr,
    OW: tl.constexpr, L: tl.constexpr, BIAS: tl.constexpr, BO: tl.constexpr, BK: tl.constexpr, BL: tl.constexpr,
):  # fmt: skip
    o = tl.program_id(1) * BO + tl.arange(0, BO)
    k = tl.program_id(0) * BK + tl.arange(0, BK)
    group = tl.program_id(2).to(tl.int64)  # of samples: a piece of one worker's part
    ky = k // (KW * C)
    kx = k // C % KW
    c = k % C
    inside = k < K
    at_y = ky * DY - PY
    at_x = kx * DX - PX
    first = group // splits * part + group % splits * each
    count = tl.minimum(each, part - group % splits * each).to(tl.int32)
    total = tl.zeros((BO, BK), tl.float32)
    squares = tl.zeros((BO, BK), tl.float32)
    share = tl.zeros((BO, BK), tl.float32)
    STEPS: tl.constexpr = (L + BL - 1) // BL
    for step in range(count * STEPS):
        z = first + step // STEPS
        place = step % STEPS * BL + tl.arange(0, BL)
        within = place < L
        d = tl.load(delta + (z * L + place[:, None]) * O + o[None, :], mask=within[:, None] & (o < O)[None, :], other=0.0)
        y = (place // OW * SY)[:, None] + at_y[None, :]
        w = (place % OW * SX)[:, None] + at_x[None, :]
        ok = within[:, None] & inside[None, :] & (y >= 0) & (y < H) & (w >= 0) & (w < W)
        u = tl.load(x + ((z * H + y) * W + w) * C + c[None, :], mask=ok, other=0.0)
        if BIAS:
            u = tl.where((k == K)[None, :] & within[:, None], 1.0, u).to(d.dtype)
        share = tl.dot(tl.trans(d), u, share)
        if step % STEPS == STEPS - 1:
            total += share
            squares += share * share
            share = tl.zeros((BO, BK), tl.float32)
    ROW: tl.constexpr = O * K + (O if BIAS else 0)
    row = out + group * (2 * ROW)
    spot = o[:, None] * K + k[None, :]
    keep = (o < O)[:, None] & inside[None, :]
    tl.store(row + spot, total, mask=keep)
    tl.store(row + ROW + spot, squares, mask=keep)
    if BIAS:
        spot = O * K + o[:, None] + 0 * k[None, :]
        keep = (o < O)[:, None] & (k == K)[None, :]
        tl.store(row + spot, total, mask=keep)
        tl.store(row + ROW + spot, squares, mask=keep)


@dataclasses.dataclass(frozen=True)
class Tiles:
    """How a convolution's weight is cut into programs, and a worker's samples into pieces."""

    o: int
    k: int
    places: int
    warps: int
    stages: int
    each: int  # samples of a piece
    splits: int  # pieces of a worker's part


def tiles(columns: int, outputs: int, places: int, part: int, workers: int) -> Tiles:
    """Fewest pieces that fill the chip, in tiles that were the fastest or near it for 3x3 layers without bias on an H200."""
    if columns <= 32:  # the first layer of a network for images
        bk, bl, stages = 32, 128 if places >= 128 else 64 if places >= 64 else 32, 3
    else:
        bk, bl, stages = 64, 64 if places >= 64 else 32, 4
    programs = cdiv(columns, bk) * cdiv(outputs, 64) * workers
    wanted = FILLED * (2 if workers * part * places >= LONG else 1)
    splits = cdiv(part, max(1, part * programs // wanted))
    each = cdiv(part, splits)
    return Tiles(64, bk, bl, 4, stages, each, cdiv(part, each))


class Call:
    """One kernel on one set of shapes: everything but the tensors, found once.

    After the first call the compiled kernel is launched directly. It was compiled for tensors that begin at a multiple of 16 bytes, as
    all do but some views: those go Triton's way. A kernel may write its numbers in ``pieces`` for each of ``workers``, to be added up.
    """

    def __init__(
        self,
        kernel: Any,
        grid: tuple[int, int, int],
        numbers: tuple[int, ...],
        constants: tuple[int, ...],
        shape: tuple[int, ...],
        pieces: int = 1,
        workers: int = 1,
        **options: int,
    ):
        self.kernel = kernel
        self.grid = grid
        # The kernel's arguments after its tensors.
        self.numbers = numbers
        self.constants = constants
        # Of what it gives.
        self.shape = shape
        self.pieces = pieces
        self.options = options
        self._fold = None if pieces == 1 else _folding(shape, pieces, workers)
        self._written = pieces * math.prod(shape)
        self._direct: Any = None

    def __call__(self, *tensors: Tensor) -> Tensor:
        """What the kernel makes of ``tensors``, float32."""
        device = tensors[0].device
        if self._fold is None:
            out = torch.empty(self.shape, dtype=torch.float32, device=device)
        else:
            out = _between(self._written, device)
        pointers = [t.data_ptr() for t in tensors]
        pointers.append(out.data_ptr())
        aligned = functools.reduce(operator.or_, pointers) % 16 == 0
        if aligned and self._direct is not None:
            self._direct(self.grid, private.current_stream(device.index), *pointers, *self.numbers)
        else:
            compiled = self.kernel[self.grid](*tensors, out, *self.numbers, *self.constants, **self.options)
            if aligned and compiled is not None and DIRECT:
                self._direct = direct(compiled, self.constants)
        return out if self._fold is None else self._fold(out)


class _Memory(threading.local):
    """A thread's memory between two of its launches, by device and stream."""

    def __init__(self) -> None:
        self.held: dict[tuple[int, int], Tensor] = {}


_memory = _Memory()


def _between(words: int, device: torch.device) -> Tensor:
    """Memory of at least so many float32 from one launch to the next; the thread's next call on the stream may have it again."""
    if device.type != "cuda" or private.capturing():  # a graph runs when it likes
        return torch.empty(words, dtype=torch.float32, device=device)
    held, key = _memory.held, (device.index, private.current_stream(device.index))
    found = held.get(key)
    if found is None or found.numel() < words:
        found = held[key] = torch.empty(words, dtype=torch.float32, device=device)
    return found


@triton.jit(do_not_specialize=["pieces", "row"])
def _sum_pieces(parts, out, pieces, row, ALIGN: tl.constexpr, PIECES: tl.constexpr, TILE: tl.constexpr):
    row = row // ALIGN * ALIGN
    i = tl.program_id(0) * TILE + tl.arange(0, TILE)
    first = tl.program_id(1).to(tl.int64) * pieces
    total = tl.zeros((PIECES, TILE), tl.float32)
    for low in range(0, pieces, PIECES):
        k = low + tl.arange(0, PIECES)
        spot = (first + k)[:, None] * row + i[None, :]
        total += tl.load(parts + spot, mask=(k < pieces)[:, None] & (i < row)[None, :], other=0.0)
    tl.store(out + tl.program_id(1).to(tl.int64) * row + i, tl.sum(total, 0), mask=i < row)


def _folding(shape: tuple[int, ...], pieces: int, workers: int) -> Call:
    """The sum of each worker's pieces: in plain torch launching it would take the CPU twice as long."""
    row = math.prod(shape) // workers
    together = min(16, triton.next_power_of_2(pieces))
    tile = 1024 // together
    constants = 4 if row % 4 == 0 else 1, together, tile
    return Call(_sum_pieces, (cdiv(row, tile), workers, 1), (pieces, row), constants, shape)


_calls: dict[Any, Call] = {}


def convolution(
    x: Tensor,
    delta: Tensor,
    kernel: tuple[int, ...],
    stride: tuple[int, ...],
    dilation: tuple[int, ...],
    padding: tuple[int, ...],
    workers: int,
    bias: bool,
) -> Tensor:
    """(workers, 2, o * k [+ o]) float32: a worker's sums, then squares; either is the weight as (o, y, x, i), then the bias.

    ``x`` (samples, i, height, width) and ``delta`` (samples, o, ...) are channels-last, bfloat16 or float16.
    """
    key = (x.shape, delta.shape, kernel, stride, dilation, padding, workers, bias, x.dtype, x.device)
    call = _calls.get(key)
    if call is None:
        columns = kernel[0] * kernel[1] * x.shape[1] + bias
        chosen = tiles(columns, delta.shape[1], delta.shape[2] * delta.shape[3], max(1, x.shape[0] // workers), workers)
        call = _calls[key] = tiled(x, delta, kernel, stride, dilation, padding, workers, bias, chosen)
    return call(x, delta)


def tiled(
    x: Tensor,
    delta: Tensor,
    kernel: tuple[int, ...],
    stride: tuple[int, ...],
    dilation: tuple[int, ...],
    padding: tuple[int, ...],
    workers: int,
    bias: bool,
    tiles: Tiles,
) -> Call:
    """The convolution's kernel in these tiles."""
    samples, c, height, width = x.shape
    o, k = delta.shape[1], kernel[0] * kernel[1] * c
    grid = (cdiv(k + bias, tiles.k), cdiv(o, tiles.o), workers * tiles.splits)
    numbers = samples // workers, tiles.each, tiles.splits
    constants = (
        height, width, *stride, *dilation, *padding,
        c, o, kernel[1], k, delta.shape[3], delta.shape[2] * delta.shape[3], bias, tiles.o, tiles.k, tiles.places,
    )  # fmt: skip
    shape = (workers, 2, o * k + (o if bias else 0))
    return Call(
        _convolution, grid, numbers, constants, shape, tiles.splits, workers, num_warps=tiles.warps, num_stages=tiles.stages
    )


@triton.jit(do_not_specialize=["part", "samples"])
def _norm_sums(
    x, delta, mean, inverse, out, part, samples, C: tl.constexpr, L: tl.constexpr, BC: tl.constexpr, BL: tl.constexpr
):
    z = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    real = c < C
    worker = z // part
    m = tl.load(mean + worker * C + c, mask=real, other=0.0)
    i = tl.load(inverse + worker * C + c, mask=real, other=0.0)
    by_scale = tl.zeros((BC,), tl.float32)
    by_shift = tl.zeros((BC,), tl.float32)
    for low in range(0, L, BL):
        place = low + tl.arange(0, BL)
        mask = (place < L)[:, None] & real[None, :]
        spot = (z * L + place[:, None]) * C + c[None, :]
        d = tl.load(delta + spot, mask=mask, other=0.0).to(tl.float32)
        v = tl.load(x + spot, mask=mask, other=0.0).to(tl.float32)
        by_scale += tl.sum(d * (v - m[None, :]), 0)
        by_shift += tl.sum(d, 0)
    by_scale *= i
    row = z * C + c
    table = samples.to(tl.int64) * C
    tl.store(out + row, by_scale, mask=real)
    tl.store(out + table + row, by_shift, mask=real)
    tl.store(out + 2 * table + row, by_scale * by_scale, mask=real)
    tl.store(out + 3 * table + row, by_shift * by_shift, mask=real)


def norm_sums(x: Tensor, delta: Tensor, mean: Tensor, inverse: Tensor) -> Tensor:
    """(4, samples, channels) float32: sums over positions of delta * (x - mean) * inverse, and of delta; then their squares.

    ``x`` and ``delta`` are channels-last (or have no positions); the statistics are (workers, channels), one row per worker.
    """
    key = (x.shape, mean.shape, x.dtype, x.device)
    call = _calls.get(key)
    if call is None:
        samples, c = x.shape[:2]
        places = x[0, 0].numel()
        block = min(64, triton.next_power_of_2(c))
        constants = (c, places, block, min(64, triton.next_power_of_2(places)))
        numbers = samples * c // mean.numel(), samples
        call = _calls[key] = Call(_norm_sums, (samples, cdiv(c, block), 1), numbers, constants, (4, samples, c))
    return call(x, delta, mean, inverse)


@triton.jit(do_not_specialize=["n", "row"])
def _affine(
    x, scale, shift, delta, factor, out, n, row, ALIGN: tl.constexpr, C: tl.constexpr, BOTH: tl.constexpr, TILE: tl.constexpr
):
    # Tells the compiler that tiles end, and rows begin, at whole words.
    n = n // ALIGN * ALIGN
    row = row // ALIGN * ALIGN
    i = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    real = i < n
    # Where the worker's row has the channel.
    at = i // row * C + i % C
    v = tl.load(x + i, mask=real, other=0.0).to(tl.float32)
    v = v * tl.load(scale + at, mask=real, other=0.0) + tl.load(shift + at, mask=real, other=0.0)
    if BOTH:
        d = tl.load(delta + i, mask=real, other=0.0).to(tl.float32)
        v += d * tl.load(factor + at, mask=real, other=0.0)
    tl.store(out + i, v.to(out.dtype.element_ty), mask=real)


def affine(x: Tensor, scale: Tensor, shift: Tensor, delta: Tensor | None, factor: Tensor | None) -> Tensor:
    """``x * scale + shift (+ delta * factor)``; ``x`` and ``delta`` are channels-last (or have no positions)."""
    out, n, tile = torch.empty_like(x), x.numel(), 1024
    numbers = n, n * x.shape[1] // scale.numel()
    align = 16 if not any(k % 16 for k in numbers) else 1
    tensors = x, scale, shift, x if delta is None else delta, scale if factor is None else factor, out
    launch(_affine, cdiv(n, tile), tensors, numbers, ALIGN=align, C=x.shape[1], BOTH=delta is not None, TILE=tile)
    return out


def agree(seed: int, device: str, dtype: torch.dtype) -> None:
    """Raise unless all kernels agree with the reference on ``device``, on shapes with a rest in every tile."""
    generator = torch.Generator(device).manual_seed(seed)

    def made(*shape: int) -> Tensor:
        drawn = torch.randn(shape, generator=generator, device=device, dtype=dtype)
        return drawn.to(memory_format=torch.channels_last)

    for samples, c, o, height, width, stride, dilation, padding in ((6, 5, 70, 9, 8, 2, 1, 1), (10, 64, 130, 8, 10, 1, 2, 2)):
        x = made(samples, c, height, width)
        weight = torch.zeros(o, c, 3, 2, device=device)
        delta = made(*torch.nn.functional.conv2d(x.float(), weight, None, stride, padding, dilation).shape)
        call = (x, delta, (3, 2), (stride,) * 2, (dilation,) * 2, (padding,) * 2, 2, True)
        found, expected = convolution(*call), share_convolution(*call)
        _agree("convolution", found[:, 0], expected[:, 0])
        _agree("squares of a convolution", found[:, 1], expected[:, 1])
        mean, inverse = (torch.rand((2, c), generator=generator, device=device) + 0.5 for _ in range(2))
        d = made(*x.shape)
        _agree("norm", norm_sums(x, d, mean, inverse), share_norm_sums(x, d, mean, inverse))
        for given in ((x, mean, inverse, None, None), (x, mean, inverse, d, inverse)):
            # Rounded to the dtype of x: the last bit may differ.
            _agree("affine", affine(*given).float(), share_affine(*given).float(), 4e-3)


def _agree(what: str, found: Tensor, expected: Tensor, most: float = 1e-4) -> None:
    error = float((found - expected).norm() / expected.norm())
    if not error < most:
        raise ArithmeticError(f"{what} is off by {error:.2g}")

"""The randomised Walsh-Hadamard rotation in plain torch: the definition of every float of it.

A vector is cut into blocks of ``block`` coordinates, a power of two; the rest is padded with zeros to the next power of two. A
block of n = 2^k coordinates is multiplied by fl32(2^(-k/2)), gets its signs, and runs through k stages of (a, b) -> (a+b, a-b)
over pairs at distance 1, 2, 4, ..., n/2. Multiplying first keeps every intermediate value below the block's Euclidean norm, so
nothing overflows that the norm does not. The inverse runs the same stages and applies the signs last.

One bit per coordinate is enough for a sign, so one Philox block serves 128 of them: the sign of coordinate i is bit i % 32 of
word (i % 128) // 32 of the block with counter (i >> 7, ROTATION << 24 | i >> 39, step, buffer << 16 | sender).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tersegrad.core import philox
from tersegrad.core.philox import MASK, Purpose
from tersegrad.core.protocol import Context

__all__ = ["rotate", "rotate_where", "unrotate"]


def rotated_numel(numel: int, block: int) -> int:
    """Coordinates after padding.

    >>> [rotated_numel(n, 4096) for n in (0, 1, 4096, 4096 + 33)]
    [0, 1, 4096, 4160]
    """
    rest = numel % block
    return numel - rest + (1 << (rest - 1).bit_length() if rest else 0)


def signs(numel: int, ctx: Context, device: torch.device) -> Tensor:
    """The signs of coordinates 0 .. numel as booleans, true for minus."""
    blocks = -(-numel // 128)
    index = torch.arange(blocks, dtype=torch.int64, device=device)
    c0, c1 = index & MASK, Purpose.ROTATION << 24 | index >> 32
    c2, c3 = torch.full_like(index, ctx.step), torch.full_like(index, ctx.buffer << 16 | ctx.sender)
    k0, k1 = ctx.seed & MASK, ctx.seed >> 32
    for _ in range(10):
        # Wraps modulo 2^64, which keeps all 64 bits of the product.
        p0, p1 = philox.M0 * c0, philox.M1 * c2
        c0, c1, c2, c3 = (p1 >> 32 & MASK) ^ c1 ^ k0, p1 & MASK, (p0 >> 32 & MASK) ^ c3 ^ k1, p0 & MASK
        k0, k1 = k0 + philox.W0 & MASK, k1 + philox.W1 & MASK
    words = torch.stack((c0, c1, c2, c3), 1)  # (blocks, 4)
    bits = words.unsqueeze(2) >> torch.arange(32, device=device) & 1  # (blocks, 4, 32)
    return bits.reshape(-1)[:numel].bool()


def _stages(v: Tensor) -> Tensor:
    """The unnormalised transform of each row of ``v`` (rows, n)."""
    n, h = v.shape[1], 1
    while h < n:
        pairs = v.reshape(-1, n // (2 * h), 2, h)
        a, b = pairs[:, :, 0], pairs[:, :, 1]
        v = torch.stack((a + b, a - b), 2).reshape(-1, n)
        h *= 2
    return v


def _scale(n: int) -> float:
    k = n.bit_length() - 1
    return (0.7071067690849304 if k % 2 else 1.0) * 2.0 ** -(k // 2)  # fl32(sqrt(1/2)), an exact float32


def _parts(numel: int, block: int) -> list[tuple[int, int, int, int]]:
    """(first coordinate, last + 1, rows, block length) of the whole blocks and of the rest."""
    whole, rest = numel - numel % block, numel % block
    parts = [(0, whole, whole // block, block)] if whole else []
    return parts + ([(whole, numel, 1, rotated_numel(rest, block))] if rest else [])


def rotate(x: Tensor, out: Tensor, block: int, ctx: Context) -> Tensor:
    """Rotate float32 ``x`` into ``out`` of the padded size; returns max |x|, not finite where x is not."""
    minus = signs(out.numel(), ctx, x.device)
    for start, stop, rows, n in _parts(x.numel(), block):
        v = torch.zeros(rows * n, dtype=torch.float32, device=x.device)
        v[: stop - start] = x[start:stop]
        part = minus[start : start + rows * n]
        v = torch.where(part, -v, v) * _scale(n)
        out[start : start + rows * n] = _stages(v.view(rows, n)).view(-1)
    top = x.abs().max() if x.numel() else x.new_zeros(())
    return torch.where(top.isfinite(), top, math.nan)


def rotate_where(x: Tensor, out: Tensor, block: int, ctx: Context, wanted: Tensor, factor: float) -> None:
    """Rotate ``factor`` times ``x`` into ``out``, if the flag is set. Nothing waits for it."""
    other = torch.empty_like(out)
    rotate(x * factor, other, block, ctx)
    out.copy_(torch.where(wanted, other, out))


def unrotate(y: Tensor, out: Tensor, block: int, ctx: Context) -> Tensor:
    """The inverse: ``y`` of the padded size into ``out``, which is returned. ``out`` may be ``y``."""
    minus = signs(y.numel(), ctx, y.device)
    for start, stop, rows, n in _parts(out.numel(), block):
        v = _stages((y[start : start + rows * n] * _scale(n)).view(rows, n)).view(-1)
        v = torch.where(minus[start : start + rows * n], -v, v)
        out[start:stop] = v[: stop - start]
    return out

"""A sign and a power of two in four bits, with a float32 scale per block, in plain torch: the definition (``spec/wire.md``, "e3m0")."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tersegrad.core.numbers import HUGE, float32
from tersegrad.kernels.reference.bits import pack_bits, unpack_bits
from tersegrad.kernels.reference.rounding import block_abs_max

__all__ = ["powers_decode", "powers_encode"]

# The smallest scale whose reciprocal is a float32, and its smallest level still a normal number.
LEAST = 2.0**-120


def _each(values: Tensor, block: int, numel: int) -> Tensor:
    """A block's value for each of its coordinates."""
    return values.repeat_interleave(block)[:numel]


def powers_encode(x: Tensor, block: int, scales: Tensor, codes: Tensor) -> None:
    numel, largest = x.numel(), block_abs_max(x, block)
    finite = torch.isfinite(largest)
    largest = torch.where(largest < LEAST, 0.0, largest)
    size = x.abs() * (1.0 / _each(largest.clamp(min=LEAST), block, numel))
    exponent = ((size.view(torch.int32) + 0x00400000) >> 23) - 120
    found = torch.where(size < 2.0**-7, 0, exponent.clamp_(1, 7)) + 8 * torch.signbit(x).int()
    # A block that is not finite, or too small, has a scale that says so, whatever the codes are.
    found = torch.where(_each(finite & (largest > 0), block, numel), found, 0)
    scales.copy_(torch.where(finite, largest, math.nan).view(torch.uint8))
    pack_bits(found.to(torch.uint8), 4, codes)


def powers_decode(scales: Tensor, codes: Tensor, block: int, out: Tensor, weight: float | None = None) -> None:
    numel, scale = out.numel(), scales.clone().view(torch.float32)
    found = torch.empty(numel, dtype=torch.uint8, device=out.device)
    unpack_bits(codes, 4, found)
    found = found.int()
    power = torch.where(found % 8 == 0, 0, (found % 8 + 120) << 23).view(torch.float32)
    values = (power * _each(scale, block, numel)).clamp_(-HUGE, HUGE)
    values = torch.where(found > 7, -values, values)
    values = torch.where(torch.isfinite(scale).all(), values, math.nan)
    _ = out.copy_(values) if weight is None else out.add_(values * float32(weight))

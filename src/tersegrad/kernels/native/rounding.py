"""Philox draws, norms and block quantisers in C++."""

from __future__ import annotations

import torch
from torch import Tensor

from tersegrad.core.philox import Purpose
from tersegrad.core.protocol import Context
from tersegrad.kernels.native.module import module
from tersegrad.kernels.reference.aims import stepped
from tersegrad.kernels.schema_blocks import RoundingRule

__all__ = [
    "abs_max",
    "block_abs_max",
    "block_sum_abs",
    "block_sum_squares",
    "dequantise_blocks",
    "norm_step",
    "quantise_blocks",
    "random_u16",
    "sum_abs",
    "sum_squares",
]

RULES = {"l2": 0, "max": 1, "nearest": 2}


def random_u16(ctx: Context, purpose: int, start: int, count: int, device: torch.device | str = "cpu") -> Tensor:
    """The 16-bit draws of coordinates start .. start + count, as int32."""
    out = torch.empty(count, dtype=torch.int32)
    module.random_u16(ctx.seed, int(purpose), ctx.step, ctx.buffer, ctx.sender, start, out)
    return out.to(device)


def abs_max(x: Tensor) -> Tensor:
    """Largest magnitude; NaN or Inf exactly if ``x`` holds one."""
    return torch.scalar_tensor(module.abs_max(x), dtype=torch.float32)


def sum_squares(x: Tensor) -> Tensor:
    """Sum of squares, in the fixed order of the schema."""
    return torch.scalar_tensor(module.sum_squares(x), dtype=torch.float64)


def sum_abs(x: Tensor) -> Tensor:
    """Sum of magnitudes, in the fixed order of the schema."""
    return torch.scalar_tensor(module.sum_abs(x), dtype=torch.float64)


def block_abs_max(x: Tensor, block: int) -> Tensor:
    """Largest magnitude of every block."""
    out = torch.empty(-(-x.numel() // block), dtype=torch.float32)
    module.block_abs_max(x, block, out)
    return out


def norm_step(x: Tensor, by: float, over: float, factor: float, otherwise: float) -> Tensor:
    return stepped(sum_squares(x), by, over, factor, otherwise)


def block_sum_squares(x: Tensor, block: int) -> Tensor:
    """Sum of squares of every block, in the fixed order of the schema."""
    out = torch.empty(-(-x.numel() // block), dtype=torch.float64)
    module.block_sum_squares(x, block, out)
    return out


def block_sum_abs(x: Tensor, block: int) -> Tensor:
    """Sum of magnitudes of every block, in the fixed order of the schema."""
    out = torch.empty(-(-x.numel() // block), dtype=torch.float64)
    module.block_sum_abs(x, block, out)
    return out


def quantise_blocks(
    x: Tensor,
    ctx: Context,
    steps: Tensor,
    codes: Tensor,
    *,
    rule: RoundingRule,
    block: int,
    levels: int,
    width: int,
    bfloat16: bool = False,
) -> None:
    """Steps and packed codes of ``x``; see the schema."""
    stream = (ctx.seed, int(Purpose.ROUNDING), ctx.step, ctx.buffer, ctx.sender)
    module.quantise(x, block, levels, width, RULES[rule], bfloat16, *stream, steps, codes)


def dequantise_blocks(
    steps: Tensor,
    codes: Tensor,
    out: Tensor,
    *,
    block: int,
    width: int,
    bfloat16: bool = False,
    weight: float | None = None,
) -> Tensor:
    """``out = code * step``, or ``out += weight * (code * step)``; all NaN if any step is not finite."""
    if weight is None:
        module.dequantise(steps, codes, block, width, bfloat16, out)
    else:
        module.dequantise_add(steps, codes, block, width, bfloat16, weight, out)
    return out

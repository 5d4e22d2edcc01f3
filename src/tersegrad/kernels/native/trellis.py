"""Trellis-coded quantisation in C++: Viterbi's algorithm and entropy coding, one segment at a time."""

from __future__ import annotations

import torch
from torch import Tensor

from tersegrad.core import buffers
from tersegrad.core.errors import CorruptMessage
from tersegrad.core.philox import Purpose
from tersegrad.core.protocol import Context
from tersegrad.kernels.native.module import module, rows_of
from tersegrad.kernels.reference.aims import searched

__all__ = ["trellis_aim", "trellis_decode", "trellis_encode", "trellis_error", "trellis_max_bytes"]


def _draws(ctx: Context | None) -> tuple[bool, int, int, int, int, int]:
    if ctx is None:
        return False, 0, 0, 0, 0, 0
    return True, ctx.seed, int(Purpose.TRELLIS), int(Purpose.TRELLIS_SIGN), ctx.step, ctx.buffer << 16 | ctx.sender


def trellis_max_bytes(numel: int) -> int:
    return int(module.trellis_max_bytes(numel))


def trellis_encode(
    x: Tensor,
    step: float | Tensor,
    states: int,
    chunk: int,
    ctx: Context | None,
    out: Tensor,
    layout: Tensor | None = None,
    left: Tensor | None = None,
    rdo: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    nbytes, norm, error = module.trellis_encode(x, float(step), states, chunk, _draws(ctx), out, rows_of(layout), rdo)
    if left is not None:
        trellis_decode(out[:nbytes], states, ctx, left.copy_(x), -1.0, layout)
    return torch.tensor(nbytes), torch.tensor(norm, dtype=torch.float64), torch.tensor(error, dtype=torch.float64)


def trellis_decode(
    data: Tensor, states: int, ctx: Context | None, out: Tensor, weight: float | None, layout: Tensor | None = None
) -> Tensor:
    add = weight is not None
    # All is decoded before any is added, into memory that is used again.
    room = buffers.empty(out.numel() if add else 0, torch.float32, out.device)
    if not module.trellis_decode(data, states, _draws(ctx), out, add, weight if add else 1.0, rows_of(layout), room):
        raise CorruptMessage("not a trellis-coded message for this vector")
    return out


def trellis_error(x: Tensor, step: float, states: int, layout: Tensor | None = None) -> tuple[Tensor, Tensor]:
    error, norm = module.trellis_error(x, step, states, rows_of(layout))
    return torch.tensor(error, dtype=torch.float64), torch.tensor(norm, dtype=torch.float64)


def trellis_aim(x: Tensor, alpha: float, kappa: float, states: int, layout: Tensor | None = None, norm: float = 0.0) -> Tensor:
    return searched(trellis_error, x, alpha, kappa, states, layout, norm)

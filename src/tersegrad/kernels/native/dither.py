"""Sparse Dithering in C++: rounding and entropy coding fused, one segment at a time."""

from __future__ import annotations

import torch
from torch import Tensor

from tersegrad.core import buffers
from tersegrad.core.errors import CorruptMessage
from tersegrad.core.philox import Purpose
from tersegrad.core.protocol import Context
from tersegrad.kernels.native.module import module, rows_of
from tersegrad.kernels.reference.aims import aimed

__all__ = ["dither_aim", "dither_decode", "dither_encode", "dither_max_bytes", "dither_sample", "may_have_classes"]

NEAREST = (False, 0, 0, 0, 0)
NOTHING = torch.empty(0)
NO_BYTES = torch.empty(0, dtype=torch.uint8)


def dither_max_bytes(numel: int) -> int:
    return int(module.dither_max_bytes(numel))


def dither_encode(
    x: Tensor,
    nu: float,
    step: float | Tensor,
    coder: int,
    chunk: int,
    ctx: Context | None,
    out: Tensor,
    left: Tensor | None = None,
    carry: Tensor | None = None,
    layout: Tensor | None = None,
    rdo: bool = False,
) -> tuple[int | Tensor, float | Tensor, float | Tensor]:
    draws = NEAREST
    if ctx is not None:
        draws = True, ctx.seed, int(Purpose.ROUNDING), ctx.step, ctx.buffer << 16 | ctx.sender
    rest, more = NOTHING if left is None else left, NOTHING if carry is None else carry
    rows = rows_of(layout)
    told: tuple[int, float, float] = module.dither_encode(x, nu, float(step), coder, chunk, draws, out, rest, more, rows, rdo)
    return told


def dither_decode(data: Tensor, out: Tensor, weight: float | None, layout: Tensor | None = None) -> Tensor:
    rows = rows_of(layout)
    if weight is None:
        good = module.dither_decode(data, out, rows)
    else:
        # Levels are read before any is added; longer vectors have them in memory that is used again.
        room = NO_BYTES if out.numel() < buffers.LEAST else buffers.empty(out.numel(), torch.uint8, out.device)
        good = module.dither_decode_add(data, out, weight, room, rows)
    if not good:
        raise CorruptMessage("not a dithered message for this vector")
    return out


def dither_sample(x: Tensor, step: float, stride: int, out: Tensor, carry: Tensor | None = None) -> None:
    # Numbers go into an array faster than into a tensor.
    place = out.numpy()
    place[0], place[1] = module.dither_sample(x, step, stride, NOTHING if carry is None else carry)


def dither_aim(x: Tensor, alpha: float, carry: Tensor | None = None, norm: float = 0.0) -> Tensor:
    return aimed(dither_sample, x, alpha, carry, norm)


def may_have_classes(levels: Tensor, layout: Tensor, begin: int, numel: int) -> bool:
    return bool(module.may_have_classes(levels, rows_of(layout), begin, numel))

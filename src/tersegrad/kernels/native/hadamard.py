"""The randomised Walsh-Hadamard rotation on the compiled kernels; see ``kernels/reference/hadamard.py`` for the definition."""

from __future__ import annotations

import math
import struct

import torch
from torch import Tensor

from tersegrad.core.philox import Purpose
from tersegrad.core.protocol import Context
from tersegrad.kernels.native.module import module

__all__ = ["rotate", "unrotate"]


def rotate(x: Tensor, out: Tensor, block: int, ctx: Context) -> Tensor:
    """Rotate float32 ``x`` into ``out`` of the padded size; returns max |x|, NaN where x is not finite."""
    top = module.rotate(x, out, block, ctx.seed, int(Purpose.ROTATION), ctx.step, ctx.buffer << 16 | ctx.sender)
    value = struct.unpack("<f", struct.pack("<I", top))[0]
    return torch.scalar_tensor(value if math.isfinite(value) else math.nan, dtype=torch.float32)


def unrotate(y: Tensor, out: Tensor, block: int, ctx: Context) -> Tensor:
    """The inverse: ``y`` of the padded size into ``out``, which is returned. ``out`` may be ``y``."""
    module.unrotate(y, out, block, ctx.seed, int(Purpose.ROTATION), ctx.step, ctx.buffer << 16 | ctx.sender)
    return out

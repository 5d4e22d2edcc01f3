"""Whole messages of trellis-coded quantisers (``spec/wire.md``, "trellis" and "dithered_trellis"), from their segments."""

from __future__ import annotations

import math
import struct

import torch
from torch import Tensor

from tersegrad.core import modes
from tersegrad.core.protocol import Context
from tersegrad.kernels.reference.classes import cut
from tersegrad.kernels.reference.dither import _fold as fold
from tersegrad.kernels.reference.dither import _pieces_of as pieces_of
from tersegrad.kernels.reference.rans import SEGMENT, pieces
from tersegrad.kernels.reference.trellis import ZERO
from tersegrad.kernels.reference.trellis import _segment as segment
from tersegrad.kernels.reference.trellis_read import trellis_decode

__all__ = ["trellis_encode"]


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
    """Write a message into ``out``: length, ||x||^2 and the squared error."""
    known = pieces_of(layout, x.numel(), [])
    parts, norms, errors, at = [], [], [], 0
    for length in pieces(x.numel(), SEGMENT):
        data, norm, error = segment(x[at : at + length], at, float(step), states, chunk, ctx, cut(known, at, at + length), rdo)
        parts.append(data)
        norms.append(norm)
        errors.append(error)
        at += length
    norm, error = fold(norms), fold(errors)
    if not all(parts):
        message, norm, error = bytes([modes.NON_FINITE]), math.inf, 0.0
    elif all(part == bytes([ZERO]) for part in parts):
        message = bytes([modes.ZERO])
    else:
        table = b"".join(struct.pack("<I", len(p)) for p in parts) if len(parts) > 1 else b""
        message = bytes([modes.NORMAL]) + table + b"".join(parts)
    out[: len(message)] = torch.frombuffer(bytearray(message), dtype=torch.uint8).to(out.device)
    if left is not None:
        trellis_decode(out[: len(message)], states, ctx, left.copy_(x), -1.0, layout)
    power, wrong = torch.tensor([norm, error], dtype=torch.float64, device=out.device)
    return torch.tensor(len(message), device=out.device), power, wrong

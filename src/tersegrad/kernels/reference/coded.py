"""Levels and exponents whose symbols are coded with one rANS table, in plain torch: the definition (``spec/wire.md``, 5.9 and 5.11)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tersegrad.core.errors import CorruptMessage
from tersegrad.core.modes import NORMAL
from tersegrad.kernels.reference.bits import unpack_bits
from tersegrad.kernels.reference.rans import rans_decode

__all__ = ["coded_exponents_decode", "coded_levels_decode"]


def _symbols(data: Tensor, alphabet: int, count: int) -> Tensor | None:
    """The symbols of a block that fills ``data``."""
    symbols = torch.empty(count, dtype=torch.uint8, device=data.device)
    try:
        used = int(rans_decode(data, alphabet, None, 1, symbols))
    except CorruptMessage:
        return None
    return symbols if used == data.numel() else None


def _said(good: bool, out: Tensor) -> Tensor:
    return torch.full((1,), int(not good), dtype=torch.int64, device=out.device)


def coded_levels_decode(data: Tensor, window: int, block: int, out: Tensor) -> Tensor:
    numel = out.numel()
    front = 1 + 4 * -(-numel // block)
    found = _symbols(data[front:], 2 * window + 1, numel) if int(data[0]) == NORMAL else None
    if found is not None and out.dtype == torch.uint8:
        torch.sub(found, window, out=out)
    elif found is not None:
        steps = data[1:front].clone().view(torch.float32)
        values = (found.float() - window) * steps.repeat_interleave(block)[:numel]
        out.copy_(torch.where(torch.isfinite(steps).all(), values, math.nan))
    return _said(found is not None, out)


def coded_exponents_decode(data: Tensor, out: Tensor) -> Tensor:
    numel, (mode, least, largest) = out.numel(), data[:3].tolist()
    front = 3 + -(-numel // 8)
    good = mode == NORMAL and 1 <= least <= largest <= 254
    found = _symbols(data[front:], largest - least + 2, numel) if good else None
    if found is not None:
        exponents = torch.where(found == 0, 0, found + (least - 1))
        if out.dtype == torch.uint8:
            out.copy_(exponents)
        else:
            signs = torch.empty(numel, dtype=torch.uint8, device=data.device)
            unpack_bits(data[3:front], 1, signs)
            out.copy_((exponents.int() << 23 | signs.int() << 31).view(torch.float32))
    return _said(found is not None, out)

"""Scale classes in C++."""

from __future__ import annotations

import torch
from torch import Tensor

from tersegrad.core.errors import CorruptMessage
from tersegrad.kernels.native.module import module

__all__ = ["classes_choose", "classes_read"]


def classes_choose(symbols: Tensor, window: int, layout: Tensor, parts: Tensor, contexts: Tensor) -> Tensor | None:
    told: bytes = module.classes_choose(symbols, window, layout, parts, contexts)
    return torch.frombuffer(bytearray(told), dtype=torch.uint8) if told else None


def classes_read(data: Tensor, layout: Tensor, parts: Tensor, contexts: Tensor) -> tuple[int, int]:
    tables, used = module.classes_read(data, layout, parts, contexts)
    if used < 0:
        raise CorruptMessage("not the scale classes of this vector")
    return tables, used

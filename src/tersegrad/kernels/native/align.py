"""Signs of rows and columns in C++: the same descriptions as ``reference.align``."""

from __future__ import annotations

import torch
from torch import Tensor

from tersegrad.core.errors import CorruptMessage
from tersegrad.kernels.native.module import module

__all__ = ["align_find", "align_flip"]


def align_find(x: Tensor, least: float, layout: Tensor) -> Tensor:
    """The description for coordinates of more than ``least``."""
    told = module.align_find(x, least, layout)
    return torch.frombuffer(bytearray(told), dtype=torch.uint8) if told else torch.empty(0, dtype=torch.uint8)


def align_flip(x: Tensor, data: Tensor, layout: Tensor, out: Tensor) -> None:
    """``out`` becomes x with the signs of a description."""
    if not module.align_flip(x, data, layout, out):
        raise CorruptMessage("malformed signs of rows and columns")

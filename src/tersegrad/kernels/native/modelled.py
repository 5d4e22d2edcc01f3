"""Levels with given probabilities in C++."""

from __future__ import annotations

import torch
from torch import Tensor

from tersegrad.core.errors import CorruptMessage
from tersegrad.kernels.native.module import module

__all__ = ["modelled_decode", "modelled_encode"]


def modelled_encode(levels: Tensor, classes: Tensor, table: Tensor, shift: int) -> Tensor:
    data = module.modelled_encode(levels, classes, table.view(-1), table.shape[0], shift)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def modelled_decode(data: Tensor, classes: Tensor, table: Tensor, shift: int) -> Tensor:
    levels = torch.empty(classes.numel(), dtype=torch.int32)
    if not module.modelled_decode(data, classes, table.view(-1), table.shape[0], shift, levels):
        raise CorruptMessage("not a stream of levels: truncated, or made for another vector")
    return levels

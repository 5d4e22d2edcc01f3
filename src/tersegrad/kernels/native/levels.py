"""Sequential level codes in C++."""

from __future__ import annotations

import torch
from torch import Tensor

from tersegrad.core.errors import CorruptMessage
from tersegrad.kernels.native.module import module

__all__ = ["levels_decode", "levels_encode"]


def levels_encode(levels: Tensor, adaptive: bool) -> Tensor:
    """Signed int32 levels as one bit stream in the published or the adaptive form."""
    return torch.from_numpy(module.levels_encode(levels.contiguous(), adaptive))


def levels_decode(data: Tensor, count: int) -> Tensor:
    """The int32 levels of a stream; :class:`CorruptMessage` where it cannot be one."""
    levels = torch.empty(count, dtype=torch.int32)
    if not module.levels_decode(data.contiguous(), levels):
        raise CorruptMessage("not a stream of levels: truncated, or made for another vector")
    return levels

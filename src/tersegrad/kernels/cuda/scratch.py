"""Memory that a call needs between its kernels: one piece, in which everything has a place."""

from __future__ import annotations

import functools
import itertools

import torch
from torch import Tensor


@functools.lru_cache(maxsize=1024)
def _offsets(sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Where places of so many bytes begin, at multiples of sixteen, and where the last ends."""
    return tuple(itertools.accumulate(((size + 15) // 16 * 16 for size in sizes), initial=0))


def empty(device: torch.device, *sizes: int) -> tuple[Tensor, list[int]]:
    """Memory, int64, which must be kept as long as it is used, and the addresses of places of so many bytes."""
    *offsets, end = _offsets(sizes)
    return _addressed(torch.empty(end // 8, dtype=torch.int64, device=device), offsets)


def zeros(device: torch.device, *sizes: int) -> tuple[Tensor, list[int]]:
    """The same, all of it zero."""
    *offsets, end = _offsets(sizes)
    return _addressed(torch.zeros(end // 8, dtype=torch.int64, device=device), offsets)


def _addressed(memory: Tensor, offsets: list[int]) -> tuple[Tensor, list[int]]:
    base = memory.data_ptr()
    return memory, [base + at for at in offsets]

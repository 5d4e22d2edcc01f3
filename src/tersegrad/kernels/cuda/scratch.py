"""Memory that a call needs between its kernels, and for what it returns: one piece, in which everything has a place."""

from __future__ import annotations

import functools
import itertools

import torch
from torch import Tensor

from tersegrad.kernels.cuda import loader
from tersegrad.kernels.cuda.loader import Argument, launch

SOURCE = "memory.cu"
THREADS, BLOCKS = 256, 1056


@functools.lru_cache(maxsize=1024)
def _offsets(sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Where places of so many bytes begin, at multiples of sixteen, and where the last ends."""
    return tuple(itertools.accumulate(((size + 15) // 16 * 16 for size in sizes), initial=0))


def empty(device: torch.device, *sizes: int) -> tuple[Tensor, list[int]]:
    """Memory, int64, which must be kept as long as it is used, and the addresses of places of so many bytes.

    Nothing of it may be returned by an operation that is replayed: others use it afterwards.
    """
    *offsets, end = _offsets(sizes)
    recorder = loader.thread.recorder
    memory = torch.empty(end // 8, dtype=torch.int64, device=device) if recorder is None else recorder.take(end // 8, device)
    return _addressed(memory, offsets)


def zeros(device: torch.device, *sizes: int) -> tuple[Tensor, list[int]]:
    """The same, all of it zero."""
    found = empty(device, *sizes)
    zero(found[0], 8 * found[0].numel())
    return found


def kept(device: torch.device, *sizes: int) -> tuple[Tensor, list[int]]:
    """The same as :func:`zeros`, for what is returned; nothing follows the last place."""
    *offsets, _ = _offsets(sizes)
    words = (offsets[-1] + sizes[-1] + 7) // 8
    memory = torch.empty(words, dtype=torch.int64, device=device)
    zero(memory, 8 * words)
    return _addressed(memory, offsets)


def zero(place: Argument, nbytes: int) -> None:
    """Clear so many bytes: by a kernel like others, so that it is replayed with them."""
    launch(SOURCE, "zero", min(-(-nbytes // (64 * THREADS)), BLOCKS), THREADS, place, nbytes)


def set_number(place: Argument, value: int) -> None:
    """Put an int64 there."""
    launch(SOURCE, "set_number", 1, 32, place, value)


def _addressed(memory: Tensor, offsets: list[int]) -> tuple[Tensor, list[int]]:
    base = memory.data_ptr()
    return memory, [base + at for at in offsets]

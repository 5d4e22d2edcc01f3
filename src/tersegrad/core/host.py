"""The host's side of a device: what is read there, once, and what goes there without waiting.

On the CPU nothing is copied. For CUDA tensors the memory on the host is pinned: a read is one transfer, and what is sent is on its way
when the call returns.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tersegrad.core import buffers

CPU = torch.device("cpu")


@dataclasses.dataclass
class Tally:
    """A count of which a device may know a part: it is asked when the count is read, not before.

    >>> tally = Tally()
    >>> tally.add(3)
    >>> tally.add(torch.tensor(4))
    >>> tally.total
    7
    """

    _known: int = 0
    _there: Tensor | None = None

    def add(self, number: int | Tensor) -> None:
        """Count ``number`` more."""
        if isinstance(number, int):
            self._known += number
        else:
            self._there = number if self._there is None else self._there + number

    @property
    def total(self) -> int:
        if self._there is not None:
            self._known, self._there = self._known + int(self._there), None
        return self._known


def empty(numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Memory of the host from which copies go to ``device``."""
    return torch.empty(numel, dtype=dtype, pin_memory=True) if device.type == "cuda" else buffers.empty(numel, dtype, CPU)


def read(x: Tensor) -> Tensor:
    """``x`` in the host's memory: itself, or a copy, for which the host waits once."""
    return x if x.is_cpu else empty(x.numel(), x.dtype, x.device).view(x.shape).copy_(x)


def read_all(*tensors: Tensor) -> list[Tensor]:
    """Tensors of one device in the host's memory, all in one read."""
    if tensors[0].is_cpu:
        return list(tensors)
    flat = [t.reshape(-1).contiguous().view(torch.uint8) for t in tensors]
    # Each begins at a multiple of eight bytes, as a view of any dtype asks for.
    padded = [torch.nn.functional.pad(t, (0, -t.numel() % 8)) for t in flat]
    parts = read(torch.cat(padded)).split([t.numel() for t in padded])
    return [part[: f.numel()].view(t.dtype).view(t.shape) for part, f, t in zip(parts, flat, tensors)]


def floats(*scalars: Tensor) -> list[float]:
    """Scalars of one device as numbers, all in one read."""
    return [float(s) for s in scalars] if scalars[0].is_cpu else read(torch.stack(scalars)).tolist()


def fetch(x: Tensor) -> Tensor:
    """A copy of ``x`` in the host's memory that is on its way: whole after the next read of its device."""
    return x if x.is_cpu else empty(x.numel(), x.dtype, x.device).view(x.shape).copy_(x, non_blocking=True)


def fetched(x: Tensor) -> Callable[[], Tensor]:
    """A copy of ``x`` in the host's memory that is on its way, and how to wait for that copy, but not for what its device does after it."""
    if not x.is_cuda:
        return functools.partial(read, x)
    copy, event = fetch(x), torch.cuda.Event()
    event.record(torch.cuda.current_stream(x.device))

    def arrived() -> Tensor:
        event.synchronize()
        return copy

    return arrived


def send(x: Tensor, device: torch.device) -> Tensor:
    """``x`` of the host's memory on ``device``, without waiting; as it is if it is there."""
    if x.device == device:
        return x
    pinned = x if x.is_pinned() else empty(x.numel(), x.dtype, device).view(x.shape).copy_(x)
    return pinned.to(device, non_blocking=True)


def lay(out: Tensor, *parts: bytes | Tensor) -> int:
    """Bytes one after another into the first ones of ``out``, without waiting; how many there are.

    >>> out = torch.zeros(4, dtype=torch.uint8)
    >>> lay(out, b"ab", torch.tensor([1], dtype=torch.uint8)), out.tolist()
    (3, [97, 98, 1, 0])
    """
    at = 0
    # Memory is filled in a quarter of the time that it takes to fill a part of a tensor.
    memory: Any = memoryview(out.numpy()) if out.is_cpu else None  # type: ignore[arg-type]
    for part in parts:
        end = at + (len(part) if isinstance(part, bytes) else part.numel())
        if memory is not None:
            memory[at:end] = part if isinstance(part, bytes) else part.numpy()
        elif isinstance(part, Tensor):
            out[at:end] = part
        elif len(part) == 1:
            out[at:end] = part[0]
        else:
            out[at:end] = send(torch.frombuffer(bytearray(part), dtype=torch.uint8), out.device)
        at = end
    return at


def stream(device: torch.device) -> int:
    """The stream that work on ``device`` goes to just now: what is sent and kept must be kept by stream."""
    return int(torch.cuda.current_stream(device).cuda_stream) if device.type == "cuda" else 0


def numbers(values: list[int], device: torch.device) -> Tensor:
    """Integers of the program as int64 on ``device``, without waiting."""
    return send(torch.tensor(values, dtype=torch.int64), device)

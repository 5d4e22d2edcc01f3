"""Memory that is written to: the caller's buffer after a check, or a new one, which for large CPU tensors is a recycled one.

The C library hands large blocks back to the operating system, and a page that is touched for the first time costs microseconds: a
fresh 25 MB buffer takes longer than compressing what it holds. :func:`empty` therefore keeps blocks whose tensors have died, up to
a limit, and gives them out again; sizes that nobody asked for the longest are given up first. A tensor and its views are ordinary;
whoever holds one keeps its block.
"""

from __future__ import annotations

import contextlib
import mmap
import threading
import weakref
from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

from tersegrad.core import private
from tersegrad.core.errors import BadConfiguration

_MAPS = hasattr(mmap, "MAP_ANONYMOUS")
LEAST = 1 << 17  # smaller tensors are left to the C library, which does keep them
KEPT = 1 << 30  # bytes that wait to be used again, at most

_waiting: dict[int, list[mmap.mmap]] = {}  # by size, the one that was asked for last at the end
_held = 0  # bytes of them
_returned: deque[tuple[int, mmap.mmap]] = deque()  # blocks whose tensors have died, not yet sorted in
_lock = threading.Lock()


def empty(numel: int, dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """A flat tensor with undefined content, like ``torch.empty``.

    >>> first = empty(1 << 20, torch.float32, "cpu")
    >>> address = first.data_ptr()
    >>> del first
    >>> empty(1 << 20, torch.float32, "cpu").data_ptr() == address
    True
    """
    nbytes = numel * dtype.itemsize
    if nbytes < LEAST or not _MAPS or (device if isinstance(device, torch.device) else torch.device(device)).type != "cpu":
        return torch.empty(numel, dtype=dtype, device=device)
    size = _rounded(nbytes)
    block = _take(size)
    view = memoryview(block)
    tensor = torch.frombuffer(view, dtype=dtype, count=numel)  # holds the view until its last user is gone
    weakref.finalize(view, _give_back, size, block).atexit = False
    return tensor


def cat(parts: Sequence[Tensor]) -> Tensor:
    """Flat tensors one after another, like ``torch.cat``."""
    first = parts[0]
    return torch.cat(list(parts), out=empty(sum(p.numel() for p in parts), first.dtype, first.device))


def copy_all(sources: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
    """Copy each tensor into the one at its place: a GPU does it in a few kernels where it would take hundreds."""
    if targets:
        private.of("_foreach_copy_")(list(targets), list(sources))


def release() -> int:
    """Hand all waiting memory back to the operating system; returns how much it was."""
    global _held
    _sort_in()
    with _lock:
        total, _held = _held, 0
        _waiting.clear()
    return total


def waiting() -> int:
    """Bytes that wait to be used again."""
    _sort_in()
    with _lock:
        return _held


def _rounded(nbytes: int) -> int:
    """The next size with three leading binary digits, in whole pages: messages of about one length share a block's size."""
    unit = max(mmap.PAGESIZE, 1 << nbytes.bit_length() - 4)
    return -(-nbytes // unit) * unit


def _take(size: int) -> mmap.mmap:
    global _held
    _sort_in()
    with _lock:
        blocks = _waiting.pop(size, [])
        _waiting[size] = blocks  # now the last
        if blocks:
            _held -= size
            return blocks.pop()
    block = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # kernels without huge pages
            block.madvise(mmap.MADV_HUGEPAGE)
    return block


def _give_back(size: int, block: mmap.mmap) -> None:
    """Called when a tensor dies: in any thread, and at any point of this module, so it must not wait for the lock."""
    _returned.append((size, block))
    _sort_in()


def _sort_in() -> None:
    """Lay blocks that came back to the others; sizes that were not asked for the longest make room. Never waits."""
    global _held
    while _returned and _lock.acquire(blocking=False):
        try:
            # Whoever holds the lock sorts in what others return meanwhile; the loop looks again after the lock is free.
            while _returned:
                size, block = _returned.popleft()
                _waiting.setdefault(size, []).append(block)
                _held += size
            for size in list(_waiting) if _held > KEPT else ():
                while _held > KEPT and _waiting[size]:
                    _waiting[size].pop()
                    _held -= size
                if not _waiting[size]:
                    del _waiting[size]
        finally:
            _lock.release()


def byte_buffer(out: Tensor | None, nbytes: int, device: torch.device) -> Tensor:
    """The first ``nbytes`` of ``out``, or new memory."""
    if out is None:
        return empty(nbytes, torch.uint8, device)
    if out.dtype != torch.uint8 or out.dim() != 1 or not out.is_contiguous() or out.numel() < nbytes or out.device != device:
        raise BadConfiguration(
            f"out must be a flat, contiguous uint8 tensor of at least {nbytes} bytes on {device}, "
            f"got {out.dtype} {tuple(out.shape)} on {out.device}"
        )
    return out if out.numel() == nbytes else out[:nbytes]


def float_buffer(out: Tensor | None, numel: int, device: torch.device) -> Tensor:
    """``out`` if it can hold ``numel`` decoded coordinates, or new memory."""
    if out is None:
        return empty(numel, torch.float32, device)
    if out.dtype != torch.float32 or out.shape != (numel,) or not out.is_contiguous() or out.device != device:
        raise BadConfiguration(
            f"out must be a flat, contiguous float32 tensor of {numel} elements on {device}, "
            f"got {out.dtype} {tuple(out.shape)} on {out.device}"
        )
    return out

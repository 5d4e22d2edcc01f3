"""Backends of the hot operations, and the choice between them.

>>> import torch
>>> get(torch.device("cpu")) is not None
True
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Literal

import torch

from tersegrad.kernels import native, reference
from tersegrad.kernels.schema import Kernels

Backend = Literal["auto", "reference", "native"]

_forced: Backend = "auto"


def get(device: torch.device) -> Kernels:
    """The fastest backend for tensors on ``device``."""
    if _forced == "reference" or device.type != "cpu" or not native.available():
        return reference
    return native


def forced() -> Backend:
    """The backend that :func:`force` asks for just now."""
    return _forced


@contextlib.contextmanager
def force(backend: Backend) -> Iterator[None]:
    """Use one backend for all operations inside the block (for tests and benchmarks)."""
    global _forced
    if backend == "native" and not native.available():
        raise RuntimeError("the native kernels are not built: reinstall with a C++ compiler, or use the reference backend")
    before, _forced = _forced, backend
    try:
        yield
    finally:
        _forced = before

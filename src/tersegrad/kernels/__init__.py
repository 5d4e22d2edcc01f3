"""Backends of the hot operations, and the choice between them.

>>> import torch
>>> get(torch.device("cpu")) is not None
True
"""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Iterator
from typing import Literal

import torch

from tersegrad.kernels import native, reference
from tersegrad.kernels.schema import Kernels

Backend = Literal["auto", "reference", "native"]

_forced: Backend = "auto"
_warned = False


def get(device: torch.device) -> Kernels:
    """The fastest backend for tensors on ``device``."""
    if _forced == "reference" or device.type != "cpu":
        return reference
    if not native.available():
        _warn_once()
        return reference
    return native


def _warn_once() -> None:
    """Say that CPU tensors run on plain torch: once per process, and of the workers on one machine only the first."""
    global _warned
    if not _warned and os.environ.get("LOCAL_RANK", "0") == "0":
        _warned = True
        warnings.warn(
            f"tersegrad runs on its plain-torch kernels, which write the same bytes many times slower: {native.why_missing()}. "
            f"For the fast ones {native.REMEDY}",
            RuntimeWarning,
            stacklevel=3,
        )


def forced() -> Backend:
    """The backend that :func:`force` asks for just now."""
    return _forced


@contextlib.contextmanager
def force(backend: Backend) -> Iterator[None]:
    """Use one backend for all operations inside the block (for tests and benchmarks)."""
    global _forced
    if backend == "native" and not native.available():
        raise RuntimeError(
            f"the native kernels are not there: {native.why_missing()}; {native.REMEDY}, or use the reference backend"
        )
    before, _forced = _forced, backend
    try:
        yield
    finally:
        _forced = before

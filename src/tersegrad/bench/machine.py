"""One line that says on what a figure was measured."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import torch

from tersegrad.kernels import native


def processor() -> str:
    """The processor's name, as the operating system knows it."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text(errors="replace").splitlines():
            if line.startswith("model name"):
                return " ".join(line.partition(":")[2].split())
    return platform.processor() or platform.machine()


def cores() -> int:
    """The processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def describe() -> str:
    """Processor, cores, instruction set of the kernels, and versions, in one line.

    >>> "torch" in describe()
    True
    """
    kernels = f"{native.isa()} kernels" if native.available() else "plain torch kernels (native ones not built)"
    count = cores()
    return (
        f"{processor()}, {count} core{'s' if count > 1 else ''}, {kernels}, "
        f"torch {torch.__version__.partition('+')[0]}, Python {platform.python_version()}, {platform.system()}"
    )

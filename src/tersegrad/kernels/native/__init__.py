"""The C++ backend for CPU tensors: thin, checked wrappers around the compiled module.

Absent when the package was installed without a compiler; :func:`available` tells, and everything then runs on ``reference``.
Kernels use as many threads as ``torch.get_num_threads()`` says in the Python thread that calls them, at most one per core, and
keep them between calls. The instruction set is chosen at run time. Both can be forced, and neither changes a byte.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from tersegrad.kernels.native import (
    align,
    bits,
    casts,
    chunks,
    classes,
    cosine,
    dither,
    drawn,
    hadamard,
    levels,
    modelled,
    planar,
    powers,
    rans,
    rounding,
    select,
    subtractive,
    trellis,
    variance,
)
from tersegrad.kernels.native.align import *
from tersegrad.kernels.native.bits import *
from tersegrad.kernels.native.casts import *
from tersegrad.kernels.native.chunks import *
from tersegrad.kernels.native.classes import *
from tersegrad.kernels.native.cosine import *
from tersegrad.kernels.native.dither import *
from tersegrad.kernels.native.drawn import *
from tersegrad.kernels.native.hadamard import *
from tersegrad.kernels.native.levels import *
from tersegrad.kernels.native.modelled import *
from tersegrad.kernels.native.module import missing, module
from tersegrad.kernels.native.planar import *
from tersegrad.kernels.native.powers import *
from tersegrad.kernels.native.rans import *
from tersegrad.kernels.native.rounding import *
from tersegrad.kernels.native.select import *
from tersegrad.kernels.native.subtractive import *
from tersegrad.kernels.native.trellis import *
from tersegrad.kernels.native.variance import *

# What is implemented here; everything else is the reference's.
_TOPICS = (
    align, bits, casts, chunks, classes, cosine, dither, drawn, hadamard, levels, modelled, planar, powers, rans, rounding, select,
    subtractive, trellis, variance,
)  # fmt: skip
OPERATIONS = tuple(name for topic in _TOPICS for name in topic.__all__)
ISAS = ("portable", "avx2", "avx512")


# What brings the compiled kernels where they are missing.
REMEDY = "install a C++20 compiler (on most systems the package g++ or clang), then install tersegrad again"


def available() -> bool:
    """Whether the compiled kernels are installed."""
    return module is not None


def why_missing() -> str:
    """Why the compiled kernels are not available; empty where they are."""
    return missing


def isa() -> str:
    """The instruction set in use."""
    return str(module.isa()) if module is not None else "none"


def supported_isas() -> tuple[str, ...]:
    """The instruction sets that this machine can run, slowest first."""
    return tuple(module.supported_isas()) if module is not None else ()


def threads() -> int:
    """The largest number of threads that a kernel uses; small tensors use fewer."""
    return int(module.threads()) if module is not None else 1


@contextlib.contextmanager
def using(*, isa: str | None = None, threads: int | None = None) -> Iterator[None]:
    """Force the instruction set or the thread count inside the block."""
    if module is None:
        raise RuntimeError(f"the native kernels are not there: {missing}; {REMEDY}")
    if threads is not None and threads < 1:
        raise ValueError(f"a kernel uses at least one thread, got {threads}")
    before = module.isa()
    forced = None if threads is None else module.set_threads(threads)
    try:
        if isa is not None:
            module.set_isa(isa)
        yield
    finally:
        module.set_isa(before)
        if forced is not None:
            module.set_threads(forced)

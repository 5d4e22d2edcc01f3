"""The C++ backend for CPU tensors: thin, checked wrappers around the compiled module.

Absent when the package was installed without a compiler; :func:`available` tells, and everything then runs on ``reference``.
The instruction set and the number of threads are chosen at run time; both can be set, and neither changes a byte.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from tersegrad.kernels.native.bits import elias_bits as elias_bits
from tersegrad.kernels.native.bits import elias_decode as elias_decode
from tersegrad.kernels.native.bits import elias_encode as elias_encode
from tersegrad.kernels.native.bits import pack_bits as pack_bits
from tersegrad.kernels.native.bits import pack_trits as pack_trits
from tersegrad.kernels.native.bits import rice_best as rice_best
from tersegrad.kernels.native.bits import rice_bits as rice_bits
from tersegrad.kernels.native.bits import rice_decode as rice_decode
from tersegrad.kernels.native.bits import rice_encode as rice_encode
from tersegrad.kernels.native.bits import unpack_bits as unpack_bits
from tersegrad.kernels.native.bits import unpack_trits as unpack_trits
from tersegrad.kernels.native.casts import bf16_decode as bf16_decode
from tersegrad.kernels.native.casts import bf16_encode as bf16_encode
from tersegrad.kernels.native.casts import dithering_decode as dithering_decode
from tersegrad.kernels.native.casts import dithering_encode as dithering_encode
from tersegrad.kernels.native.casts import fp8_decode as fp8_decode
from tersegrad.kernels.native.casts import fp8_encode as fp8_encode
from tersegrad.kernels.native.casts import fp16_decode as fp16_decode
from tersegrad.kernels.native.casts import fp16_encode as fp16_encode
from tersegrad.kernels.native.casts import natural_decode as natural_decode
from tersegrad.kernels.native.casts import natural_encode as natural_encode
from tersegrad.kernels.native.casts import sign_decode as sign_decode
from tersegrad.kernels.native.casts import sign_encode as sign_encode
from tersegrad.kernels.native.casts import ternary_decode as ternary_decode
from tersegrad.kernels.native.casts import ternary_encode as ternary_encode
from tersegrad.kernels.native.hadamard import rotate as rotate
from tersegrad.kernels.native.hadamard import unrotate as unrotate
from tersegrad.kernels.native.module import module
from tersegrad.kernels.native.rounding import abs_max as abs_max
from tersegrad.kernels.native.rounding import block_abs_max as block_abs_max
from tersegrad.kernels.native.rounding import block_sum_abs as block_sum_abs
from tersegrad.kernels.native.rounding import block_sum_squares as block_sum_squares
from tersegrad.kernels.native.rounding import dequantise_blocks as dequantise_blocks
from tersegrad.kernels.native.rounding import quantise_blocks as quantise_blocks
from tersegrad.kernels.native.rounding import random_u16 as random_u16
from tersegrad.kernels.native.rounding import sum_abs as sum_abs
from tersegrad.kernels.native.rounding import sum_squares as sum_squares

ISAS = ("portable", "avx2", "avx512")


def available() -> bool:
    """Whether the compiled kernels are installed."""
    return module is not None


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
        raise RuntimeError("the native kernels are not built: reinstall with a C++ compiler")
    before = module.isa(), module.threads()
    try:
        if isa is not None:
            module.set_isa(isa)
        if threads is not None:
            module.set_threads(threads)
        yield
    finally:
        module.set_isa(before[0])
        module.set_threads(before[1])

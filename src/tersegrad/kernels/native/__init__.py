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
from tersegrad.kernels.native.module import module
from tersegrad.kernels.native.rans import rans_decode as rans_decode
from tersegrad.kernels.native.rans import rans_encode as rans_encode
from tersegrad.kernels.native.rans import rans_histogram as rans_histogram
from tersegrad.kernels.native.rans import rans_read_tables as rans_read_tables
from tersegrad.kernels.native.rans import rans_write_tables as rans_write_tables
from tersegrad.kernels.native.select import all_finite as all_finite
from tersegrad.kernels.native.select import bitmap_decode as bitmap_decode
from tersegrad.kernels.native.select import bitmap_encode as bitmap_encode
from tersegrad.kernels.native.select import digits_decode as digits_decode
from tersegrad.kernels.native.select import digits_encode as digits_encode
from tersegrad.kernels.native.select import gap_classes as gap_classes
from tersegrad.kernels.native.select import gap_histogram as gap_histogram
from tersegrad.kernels.native.select import gap_rests_decode as gap_rests_decode
from tersegrad.kernels.native.select import gap_rests_encode as gap_rests_encode
from tersegrad.kernels.native.select import golomb_decode as golomb_decode
from tersegrad.kernels.native.select import golomb_encode as golomb_encode
from tersegrad.kernels.native.select import golomb_size as golomb_size
from tersegrad.kernels.native.select import index_complement as index_complement
from tersegrad.kernels.native.select import permuted_gather as permuted_gather
from tersegrad.kernels.native.select import permuted_indices as permuted_indices
from tersegrad.kernels.native.select import permuted_scatter as permuted_scatter
from tersegrad.kernels.native.select import permuted_scatter_add as permuted_scatter_add
from tersegrad.kernels.native.select import select_compact as select_compact
from tersegrad.kernels.native.select import select_sample_key as select_sample_key
from tersegrad.kernels.native.select import select_top_k as select_top_k
from tersegrad.kernels.native.select import sparse_scatter as sparse_scatter
from tersegrad.kernels.native.select import sparse_scatter_add as sparse_scatter_add

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

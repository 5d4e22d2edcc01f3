"""The operations that hot loops are made of: one signature each, several backends behind it.

A backend is a module that satisfies :class:`Kernels` (mypy checks it). ``reference`` is plain torch, runs anywhere and is the
definition; ``native`` is C++ for CPU tensors. Both write the same bytes for the same input; ``tests/kernels`` compares them.
The protocols are split by topic so that each topic reads alone.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class BitKernels(Protocol):
    """Bit packing, trits, Elias and Golomb-Rice codes. Sizes are exact and checked by the caller."""

    def pack_bits(self, codes: Tensor, width: int, out: Tensor) -> None:
        """The low ``width`` bits of each code (uint8 up to 8 bits, int32 from 9 to 16), into all of ``out``."""
        ...

    def unpack_bits(self, data: Tensor, width: int, out: Tensor) -> None:
        """``out.numel()`` codes from ``data``; the padding after the last is not looked at."""
        ...

    def pack_trits(self, trits: Tensor, out: Tensor) -> None:
        """Five values of 0..2 a byte; ``ValueError`` for any other value."""
        ...

    def unpack_trits(self, data: Tensor, out: Tensor, check: bool) -> None:
        """The reverse. ``check``: raise ``CorruptMessage`` unless canonical; otherwise bytes above 242 read as 242."""
        ...

    def elias_bits(self, values: Tensor, code: int) -> int:
        """Bits that all values take together in code 0 gamma, 1 delta or 2 omega; ``ValueError`` for values below 1."""
        ...

    def elias_encode(self, values: Tensor, code: int) -> Tensor:
        """The codes of int64 ``values`` >= 1 one after another, as bytes."""
        ...

    def elias_decode(self, data: Tensor, code: int, out: Tensor) -> int:
        """``out.numel()`` values from the start of ``data``; returns the bytes used."""
        ...

    def rice_bits(self, values: Tensor, k: int) -> int:
        """Bits that all values take together with parameter ``k``; ``ValueError`` for negative values."""
        ...

    def rice_best(self, values: Tensor) -> int:
        """The smallest ``k`` that minimises :meth:`rice_bits`."""
        ...

    def rice_encode(self, values: Tensor, k: int) -> Tensor:
        """The codes of int64 ``values`` >= 0 one after another, as bytes."""
        ...

    def rice_decode(self, data: Tensor, k: int, out: Tensor) -> int:
        """``out.numel()`` values from the start of ``data``; returns the bytes used."""
        ...


class Kernels(BitKernels, Protocol):
    """Everything a backend provides."""

"""The operations that hot loops are made of: one signature each, several backends behind it.

A backend is a module that satisfies :class:`Kernels` (mypy checks it). ``reference`` is plain torch, runs anywhere and is the
definition; ``native`` is C++ for CPU tensors. Both write the same bytes for the same input; ``tests/kernels`` compares them.
The protocols are split by topic so that each topic reads alone.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class RansKernels(Protocol):
    """Interleaved rANS (``spec``, "rANS"): symbols and contexts are uint8 vectors, ``contexts`` one a symbol or one a step of 64."""

    def rans_histogram(
        self, symbols: Tensor, alphabet: int, contexts: Tensor | None, num_contexts: int, sample: bool
    ) -> Tensor:
        """Counts, (num_contexts, alphabet) int64.

        With ``sample``, and where the data are long enough for it, only one block of 4096 symbols in eight is counted, and one
        is added for every symbol that occurs anywhere: 0 still means absent.
        """

    def rans_write_tables(self, counts: Tensor) -> bytes:
        """The tables for these counts, (num_contexts, alphabet) int64, as bytes."""

    def rans_read_tables(self, data: Tensor, alphabet: int, num_contexts: int) -> tuple[Tensor, int]:
        """Frequencies, (num_contexts, alphabet) int16 with rows that sum to 4096, and the number of bytes read."""

    def rans_encode(
        self, symbols: Tensor, alphabet: int, contexts: Tensor | None, num_contexts: int, sample: bool, out: Tensor
    ) -> int:
        """Write the whole message into ``out`` (at least ``1 + ceil(count * bits / 8)`` bytes) and return its length."""

    def rans_decode(self, data: Tensor, alphabet: int, contexts: Tensor | None, num_contexts: int, out: Tensor) -> int:
        """Fill ``out`` with the symbols of the message at the start of ``data`` and return the message's length."""


class Kernels(RansKernels, Protocol):
    """Everything a backend provides."""

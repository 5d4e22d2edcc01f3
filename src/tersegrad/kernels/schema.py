"""The operations that hot loops are made of: one signature each, several backends behind it.

A backend is a module that satisfies :class:`Kernels` (mypy checks it). ``reference`` is plain torch, runs anywhere and is the
definition; ``native`` is C++ for CPU tensors. Both write the same bytes for the same input; ``tests/kernels`` compares them.
The protocols are split by topic so that each topic reads alone.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from tersegrad.core.protocol import Context


class CastKernels(Protocol):
    """Whole messages of the fixed-rate baselines (``spec/wire.md``).

    ``x`` and ``out`` of a decoder are flat float32, ``data`` and ``out`` of an encoder uint8 of exactly the message's length.
    Decoders store, or with a ``weight`` add ``weight`` times the value (product and sum each rounded to float32).
    """

    def bf16_encode(self, x: Tensor, out: Tensor) -> None: ...
    def bf16_decode(self, data: Tensor, out: Tensor, weight: float | None = None) -> None: ...
    def fp16_encode(self, x: Tensor, out: Tensor) -> None: ...
    def fp16_decode(self, data: Tensor, out: Tensor, weight: float | None = None) -> None: ...
    def fp8_encode(self, x: Tensor, out: Tensor, block: int) -> None:
        """``block``: a power of two from 16 to 65536."""
        ...

    def fp8_decode(self, data: Tensor, out: Tensor, block: int, weight: float | None = None) -> None: ...
    def sign_encode(self, x: Tensor, out: Tensor) -> None: ...
    def sign_decode(self, data: Tensor, out: Tensor, weight: float | None = None) -> None: ...
    def natural_encode(self, x: Tensor, out: Tensor, ctx: Context) -> None: ...
    def natural_decode(self, data: Tensor, out: Tensor, weight: float | None = None) -> None: ...
    def ternary_encode(self, x: Tensor, out: Tensor, bucket: int, ctx: Context) -> None:
        """``bucket``: a multiple of 64."""
        ...

    def ternary_decode(self, data: Tensor, out: Tensor, bucket: int, weight: float | None = None) -> None:
        """``CorruptMessage`` unless the trits are canonical; ``out`` is then undefined."""
        ...

    def dithering_encode(self, x: Tensor, out: Tensor, bucket: int, levels: int, width: int, ctx: Context) -> None:
        """``width``: bits a coordinate, enough for ``2 * levels + 2`` codes and at most 8."""
        ...

    def dithering_decode(
        self, data: Tensor, out: Tensor, bucket: int, levels: int, width: int, weight: float | None = None
    ) -> None: ...


class Kernels(CastKernels, Protocol):
    """Everything a backend provides."""

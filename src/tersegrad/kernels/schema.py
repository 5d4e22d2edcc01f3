"""The operations that hot loops are made of: one signature each, several backends behind it.

A backend is a module that satisfies :class:`Kernels` (mypy checks it). ``reference`` is plain torch, runs anywhere and is the
definition; ``native`` is C++ for CPU tensors. Both write the same bytes for the same input; ``tests/kernels`` compares them.
The protocols are split by topic so that each topic reads alone.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from tersegrad.core.protocol import Context


class HadamardKernels(Protocol):
    """The randomised Walsh-Hadamard rotation by blocks (signs from the context, sender left to the caller)."""

    def rotate(self, x: Tensor, out: Tensor, block: int, ctx: Context) -> float:
        """Rotate float32 ``x`` into ``out`` of the padded size; returns max |x|, NaN where x is not finite."""
        ...

    def unrotate(self, y: Tensor, out: Tensor, block: int, ctx: Context) -> Tensor:
        """The inverse: ``y`` of the padded size into ``out``, which is returned. ``out`` may be ``y``."""
        ...


class Kernels(HadamardKernels, Protocol):
    """Everything a backend provides."""

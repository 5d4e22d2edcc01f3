"""The operations that hot loops are made of: one signature each, several backends behind it.

A backend is a module that satisfies :class:`Kernels` (mypy checks it). ``reference`` is plain torch, runs anywhere and is the
definition; ``native`` is C++ for CPU tensors. Both write the same bytes for the same input; ``tests/kernels`` compares them.
The protocols are split by topic so that each topic reads alone.
"""

from __future__ import annotations

from typing import Protocol


class Kernels(Protocol):
    """Everything a backend provides."""

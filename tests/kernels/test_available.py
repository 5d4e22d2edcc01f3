"""The tests beside this one skip native kernels that were not built; this one fails then, so that it does not go unnoticed."""

from __future__ import annotations

from tersegrad.kernels import native


def test_the_native_kernels_are_built() -> None:
    assert native.available(), "the native kernels are not built: install the package again, with a C++ compiler at hand"

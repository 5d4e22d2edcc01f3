"""Checked wrappers of the compiled kernels for powers of two (``native/src/powers.cpp``)."""

from __future__ import annotations

from torch import Tensor

from tersegrad.kernels.native.module import module

__all__ = ["powers_decode", "powers_encode"]


def powers_encode(x: Tensor, block: int, scales: Tensor, codes: Tensor) -> None:
    module.powers_encode(x, block, scales, codes)


def powers_decode(scales: Tensor, codes: Tensor, block: int, out: Tensor, weight: float | None = None) -> None:
    if weight is None:
        module.powers_decode(scales, codes, block, out)
    else:
        module.powers_decode_add(scales, codes, block, weight, out)

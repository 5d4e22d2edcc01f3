"""Planar gamma and Rice codes in C++ (``native/include/tersegrad/planar.hpp``)."""

from __future__ import annotations

from torch import Tensor

from tersegrad.core.errors import CorruptMessage
from tersegrad.kernels.native.module import module

__all__ = [
    "planar_gamma_decode",
    "planar_gamma_encode",
    "rice_best",
    "rice_bits",
    "rice_decode",
    "rice_encode",
]


def planar_gamma_encode(values: Tensor, out: Tensor) -> int | Tensor:
    """The codes of int64 ``values`` in the first bytes of ``out``; their length."""
    return int(module.planar_gamma_encode(values, out))


def planar_gamma_decode(data: Tensor, out: Tensor) -> int | Tensor:
    """Fill ``out`` from the start of ``data``; the bytes used."""
    return _consumed(module.planar_gamma_decode(data, out))


def rice_bits(values: Tensor, k: int) -> int | Tensor:
    """Bits of all planes together, without padding."""
    bits = int(module.rice_bits(values, k))
    if bits < 0:
        raise ValueError("Rice codes are for values of at least 0")
    return bits


def rice_best(values: Tensor) -> int | Tensor:
    """The smallest parameter with the fewest bits."""
    k = int(module.rice_best(values))
    if k < 0:
        raise ValueError("Rice codes are for values of at least 0")
    return k


def rice_encode(values: Tensor, k: int, out: Tensor) -> int | Tensor:
    """The codes of int64 ``values`` in the first bytes of ``out``; their length."""
    return int(module.rice_encode(values, k, out))


def rice_decode(data: Tensor, k: int, out: Tensor) -> int | Tensor:
    """Fill ``out`` from the start of ``data``; the bytes used."""
    return _consumed(module.rice_decode(data, k, out))


def _consumed(nbytes: int) -> int:
    if nbytes < 0:
        raise CorruptMessage("a plane of codes is cut short, holds a value above 2^63 - 1, or ends in bits that are not zero")
    return nbytes

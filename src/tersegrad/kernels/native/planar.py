"""Planar gamma and Rice codes in C++ (``native/include/tersegrad/planar.hpp``)."""

from __future__ import annotations

from torch import Tensor

from tersegrad.core.errors import CorruptMessage
from tersegrad.kernels.native.module import array, module, number

__all__ = [
    "planar_gamma_decode",
    "planar_gamma_encode",
    "rice_best",
    "rice_bits",
    "rice_decode",
    "rice_encode",
]


def planar_gamma_encode(values: Tensor, out: Tensor) -> Tensor:
    """The codes of int64 ``values`` in the first bytes of ``out``; their length."""
    return number(module.planar_gamma_encode(array(values), array(out)))


def planar_gamma_decode(data: Tensor, out: Tensor) -> Tensor:
    """Fill ``out`` from the start of ``data``; the bytes used."""
    return _consumed(module.planar_gamma_decode(array(data), array(out)))


def rice_bits(values: Tensor, k: int) -> Tensor:
    """Bits of all planes together, without padding."""
    bits = int(module.rice_bits(array(values), k))
    if bits < 0:
        raise ValueError("Rice codes are for values of at least 0")
    return number(bits)


def rice_best(values: Tensor) -> Tensor:
    """The smallest parameter with the fewest bits."""
    k = int(module.rice_best(array(values)))
    if k < 0:
        raise ValueError("Rice codes are for values of at least 0")
    return number(k)


def rice_encode(values: Tensor, k: int, out: Tensor) -> Tensor:
    """The codes of int64 ``values`` in the first bytes of ``out``; their length."""
    return number(module.rice_encode(array(values), k, array(out)))


def rice_decode(data: Tensor, k: int, out: Tensor) -> Tensor:
    """Fill ``out`` from the start of ``data``; the bytes used."""
    return _consumed(module.rice_decode(array(data), k, array(out)))


def _consumed(nbytes: int) -> Tensor:
    if nbytes < 0:
        raise CorruptMessage("a plane of codes is cut short, holds a value above 2^63 - 1, or ends in bits that are not zero")
    return number(nbytes)

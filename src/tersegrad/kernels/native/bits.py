"""Bit packing, trits and serial Elias codes in C++ (``native/include/tersegrad/bits.hpp``)."""

from __future__ import annotations

import torch
from torch import Tensor

from tersegrad.core.errors import CorruptMessage
from tersegrad.kernels.native.module import module

__all__ = [
    "elias_bits",
    "elias_decode",
    "elias_encode",
    "pack_bits",
    "pack_trits",
    "unpack_bits",
    "unpack_trits",
]


def pack_bits(codes: Tensor, width: int, out: Tensor) -> None:
    """The low ``width`` bits of each code, one after another."""
    module.pack_bits(codes, width, out)


def unpack_bits(data: Tensor, width: int, out: Tensor) -> None:
    """The codes again; the padding is not looked at."""
    module.unpack_bits(data, width, out)


def pack_trits(trits: Tensor, out: Tensor) -> None:
    """Five values of 0..2 per byte."""
    if not module.pack_trits(trits, out):
        raise ValueError("trits are 0, 1 or 2")


def unpack_trits(data: Tensor, out: Tensor, check: bool) -> None:
    """The trits again; ``check`` raises unless the bytes are canonical."""
    if not module.unpack_trits(data, out) and check:
        raise CorruptMessage("a byte holds five trits, 0..242, and what follows the last trit is zero")


def elias_bits(values: Tensor, code: int) -> int:
    """Bits of all codes together."""
    bits = int(module.elias_bits(values, code))
    if bits < 0:
        raise ValueError("Elias codes are for values of at least 1")
    return bits


def elias_encode(values: Tensor, code: int) -> Tensor:
    """The codes as bytes."""
    out = torch.empty((elias_bits(values, code) + 7) // 8, dtype=torch.uint8)
    module.elias_encode(values, code, out)
    return out


def elias_decode(data: Tensor, code: int, out: Tensor) -> int:
    """Fill ``out`` from the start of ``data``; returns the bytes used."""
    return _consumed(module.elias_decode(data, code, out))


def _consumed(nbytes: int) -> int:
    if nbytes < 0:
        raise CorruptMessage("the bit stream is truncated, holds a value above 2^63 - 1, or ends in bits that are not zero")
    return int(nbytes)

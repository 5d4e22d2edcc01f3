"""Numbers as the wire format means them."""

from __future__ import annotations

import functools
import math
import struct
from fractions import Fraction

# float32's smallest normal and its largest finite number.
TINY, HUGE = 2.0**-126, 2.0**128 - 2.0**104


def float32(value: float) -> float:
    """The nearest float32.

    >>> float32(0.1)
    0.10000000149011612
    """
    return float(struct.unpack("<f", struct.pack("<f", value))[0])


def float32_bits(value: float) -> int:
    """Its bit pattern; magnitudes compare as such integers.

    >>> hex(float32_bits(1.0))
    '0x3f800000'
    """
    return int(struct.unpack("<I", struct.pack("<f", value))[0])


def float32_of(bits: int) -> float:
    """The float32 with this bit pattern.

    >>> float32_of(0x3F800000)
    1.0
    """
    return float(struct.unpack("<f", struct.pack("<I", bits))[0])


@functools.lru_cache(maxsize=1024)
def share(numel: int, fraction: float | None, k: int | None) -> int:
    """``k``, or ``fraction`` of ``numel`` rounded up; at least 1 and at most all.

    The fraction is taken as it is written: 0.07 of 100 are 7, not the 8 that binary floating point makes of it.

    >>> share(100, 0.07, None), share(100, None, 200), share(0, 0.5, None)
    (7, 100, 0)
    """
    wanted = k if k is not None else math.ceil(Fraction(repr(fraction)) * numel)
    return min(max(wanted, 1), numel)

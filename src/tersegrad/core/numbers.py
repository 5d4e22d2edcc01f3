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


# Logarithms and powers of libraries differ in their last digits. These take sums, products and quotients of float64 in a fixed order, so
# that every device finds the same (``search.cuh`` has them for CUDA).
_L23, _L21, _L19, _L17, _L15, _L13, _L11, _L9, _L7, _L5, _L3 = (1.0 / k for k in range(23, 1, -2))
_E16, _E15, _E14, _E13, _E12, _E11, _E10, _E9, _E8, _E7, _E6, _E5, _E4, _E3, _E2 = (1.0 / k for k in range(16, 1, -1))
_LN2, _TWO_OVER_LN2, _ROOT = 0.6931471805599453, 2.8853900817779268, 0.7071067811865476


@functools.lru_cache(maxsize=64)
def log2(value: float) -> float:
    """The binary logarithm of a positive normal number, to some 2^-52 of it or of 1; infinity and NaN stay as they are.

    >>> log2(8.0), log2(0.1) - math.log2(0.1)
    (3.0, 0.0)
    """
    if not value < math.inf:
        return value
    part, exponent = math.frexp(value)
    if part < _ROOT:
        part, exponent = 2 * part, exponent - 1
    # log(part) = 2 artanh(s).
    s = (part - 1) / (part + 1)
    q = s * s
    # Written out, which takes half the time of a loop.
    total = (((((_L23 * q + _L21) * q + _L19) * q + _L17) * q + _L15) * q + _L13) * q
    total = (((((total + _L11) * q + _L9) * q + _L7) * q + _L5) * q + _L3) * q
    return exponent + (s + s * total) * _TWO_OVER_LN2


def exp2(value: float) -> float:
    """2 to the power of a number between -1000 and 1000, to some 2^-51 of it.

    >>> exp2(-3.0), abs(exp2(0.3) - 2**0.3) < 1e-15
    (0.125, True)
    """
    whole = math.floor(value + 0.5)
    p = (value - whole) * _LN2
    total = (((p * _E16 + 1) * (p * _E15) + 1) * (p * _E14) + 1) * (p * _E13) + 1
    total = (((total * (p * _E12) + 1) * (p * _E11) + 1) * (p * _E10) + 1) * (p * _E9) + 1
    total = (((total * (p * _E8) + 1) * (p * _E7) + 1) * (p * _E6) + 1) * (p * _E5) + 1
    total = (((total * (p * _E4) + 1) * (p * _E3) + 1) * (p * _E2) + 1) * p + 1
    return math.ldexp(total, whole)


@functools.lru_cache(maxsize=1024)
def share(numel: int, fraction: float | None, k: int | None) -> int:
    """``k``, or ``fraction`` of ``numel`` rounded up; at least 1 and at most all.

    The fraction is taken as it is written: 0.07 of 100 are 7, not the 8 that binary floating point makes of it.

    >>> share(100, 0.07, None), share(100, None, 200), share(0, 0.5, None)
    (7, 100, 0)
    """
    wanted = k if k is not None else math.ceil(Fraction(repr(fraction)) * numel)
    return min(max(wanted, 1), numel)

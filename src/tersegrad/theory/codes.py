"""Lengths, in bits, of codes of integers and of sets of indices, exact and expected.

Codes of one integer. Elias gamma of n >= 1 takes 2 floor(log2 n) + 1 bits; delta codes the bit length by gamma; omega codes
the bit length of the bit length and so on. A Rice code of n >= 0 takes floor(n / 2^m) + 1 + m bits, a Golomb code with
divisor M replaces the m low bits by a truncated binary code. For n = T - 1, T geometric with success probability P, theta = 1
- P:

    E Rice = m + 1/(1 - theta^(2^m)),       best m = max(0, 1 + floor(log2( ln(golden) / ln(theta) ))),  golden = (sqrt 5 - 1)/2
    best Golomb divisor = the least M with theta^M + theta^(M+1) <= 1                       (an optimal prefix code)

Sets. Naming k of d indices takes log2 C(d, k) bits. With r(n) the remainder of Stirling's formula,

    ln C(d, k) = k ln(d/k) - (d-k) ln(1-k/d) - ln(2 pi k (d-k)/d)/2 + r(d) - r(k) - r(d-k),

where nothing large cancels: full precision at any d.

Citations: Elias 1975; Gallager, van Voorhis 1975 (best Golomb divisor); Kiely 2004 (best Rice parameter).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal, overload

import numpy as np
from numpy.typing import ArrayLike, NDArray

from tersegrad.core.text import require
from tersegrad.theory.arguments import (
    Array,
    looped,
    require_at_least,
    require_probability,
    require_whole,
    vectorised,
)
from tersegrad.theory.bounds import GOLDEN, LN2

Integers = NDArray[np.int64]


# One integer -----------------------------------------------------------------------------------------------------------------


def _bit_length(n: Integers) -> Integers:
    """Bits of each positive integer, by halving; exact up to 2^63 - 1."""
    length = np.ones_like(n)
    for shift in (32, 16, 8, 4, 2, 1):
        large = n >= np.int64(1) << shift
        length = np.where(large, length + shift, length)
        n = np.where(large, n >> shift, n)
    return length


def _integers(name: str, n: ArrayLike, least: int) -> Integers:
    values = np.asarray(n)
    require(values.dtype.kind in "iu", f"{name} must be integers, got {values.dtype}")
    require(values.dtype != np.uint64 or bool(np.all(values < 2**63)), f"{name} must be below 2^63")
    require(bool(np.all(values >= least)), f"{name} must be at least {least}")
    return values.astype(np.int64)


@overload
def elias_gamma_bits(n: int) -> int: ...
@overload
def elias_gamma_bits(n: ArrayLike) -> Integers: ...
def elias_gamma_bits(n: ArrayLike) -> int | Integers:
    """Length of the Elias gamma code of n >= 1.

    >>> [elias_gamma_bits(n) for n in (1, 2, 3, 4, 100)]
    [1, 3, 3, 5, 13]
    """
    bits = 2 * _bit_length(_integers("n", n, 1)) - 1
    return int(bits) if bits.ndim == 0 else bits


@overload
def elias_delta_bits(n: int) -> int: ...
@overload
def elias_delta_bits(n: ArrayLike) -> Integers: ...
def elias_delta_bits(n: ArrayLike) -> int | Integers:
    """Length of the Elias delta code of n >= 1.

    >>> [elias_delta_bits(n) for n in (1, 2, 3, 4, 100)]
    [1, 4, 4, 5, 11]
    """
    length = _bit_length(_integers("n", n, 1))
    bits = length - 1 + 2 * _bit_length(length) - 1
    return int(bits) if bits.ndim == 0 else bits


@overload
def elias_omega_bits(n: int) -> int: ...
@overload
def elias_omega_bits(n: ArrayLike) -> Integers: ...
def elias_omega_bits(n: ArrayLike) -> int | Integers:
    """Length of the Elias omega code of n >= 1.

    >>> [elias_omega_bits(n) for n in (1, 2, 3, 4, 100)]
    [1, 3, 3, 6, 13]
    """
    n = _integers("n", n, 1)
    bits = np.ones_like(n)
    while np.any(n > 1):
        length = _bit_length(n)
        bits = np.where(n > 1, bits + length, bits)
        n = np.where(n > 1, length - 1, n)
    return int(bits) if bits.ndim == 0 else bits


ELIAS: dict[str, Callable[[Integers], Integers]] = {
    "gamma": elias_gamma_bits,
    "delta": elias_delta_bits,
    "omega": elias_omega_bits,
}


@looped
def elias_expected_bits(probability: float, *, code: Literal["gamma", "delta", "omega"] = "gamma") -> float:
    """Expected Elias length of a geometric number n >= 1 with the given success probability.

    >>> round(elias_expected_bits(0.5), 4)
    2.2657
    """
    require(code in ELIAS, f"code must be gamma, delta or omega, got {code!r}")
    require(0 < probability <= 1, f"probability must lie in (0, 1], got {probability:g}")
    powers = np.arange(63)
    lengths = ELIAS[code](np.int64(1) << powers).astype(np.float64)  # the length depends on the bit length alone
    if probability == 1:
        return float(lengths[0])
    reached = np.exp((np.exp2(powers) - 1) * math.log1p(-probability))  # P(n >= 2^j)
    return float(lengths[0] + np.dot(np.diff(lengths), reached[1:]))


@overload
def rice_bits(n: int, parameter: int) -> int: ...
@overload
def rice_bits(n: ArrayLike, parameter: int) -> Integers: ...
def rice_bits(n: ArrayLike, parameter: int) -> int | Integers:
    """Length of the Rice code of n >= 0: the quotient by 2^parameter in unary, then the remainder.

    >>> rice_bits(9, 2)
    5
    """
    require(0 <= parameter < 63, f"parameter must lie between 0 and 62, got {parameter}")
    bits = (_integers("n", n, 0) >> parameter) + 1 + parameter
    return int(bits) if bits.ndim == 0 else bits


@overload
def golomb_bits(n: int, divisor: int) -> int: ...
@overload
def golomb_bits(n: ArrayLike, divisor: int) -> Integers: ...
def golomb_bits(n: ArrayLike, divisor: int) -> int | Integers:
    """Length of the Golomb code of n >= 0: the quotient by ``divisor`` in unary, then the remainder in truncated binary.

    >>> [golomb_bits(n, 3) for n in range(4)]
    [2, 3, 3, 3]
    """
    require(divisor >= 1, f"divisor must be at least 1, got {divisor}")
    quotient, remainder = np.divmod(_integers("n", n, 0), divisor)
    width = (divisor - 1).bit_length()
    bits = quotient + 1 + width - (remainder < 2**width - divisor)
    return int(bits) if bits.ndim == 0 else bits


def _log2_rate(neg_log2_probability: float) -> float:
    """log2(-ln(1-P)) from -log2 P > 0, which may be far beyond the range of floats."""
    probability = 2.0**-neg_log2_probability
    return math.log2(-math.log1p(-probability)) if neg_log2_probability < 60 else -neg_log2_probability


def _rice_parameter(log2_rate: float) -> int:
    return max(0, 1 + math.floor(math.log2(-math.log(GOLDEN)) - log2_rate))


def _rice_expected(parameter: float, log2_rate: float) -> float:
    return parameter - 1 / math.expm1(-(2.0 ** min(parameter + log2_rate, 1000.0)))


@looped
def rice_parameter(probability: float) -> float:
    """Best Rice parameter m for T - 1, T geometric with the given success probability (a whole number).

    >>> rice_parameter(0.01)
    6.0
    """
    require(0 < probability <= 1, f"probability must lie in (0, 1], got {probability:g}")
    return 0.0 if probability == 1 else float(_rice_parameter(math.log2(-math.log1p(-probability))))


@looped
def rice_expected_bits(probability: float, parameter: float) -> float:
    """Expected Rice length of T - 1, T geometric with the given success probability."""
    require(0 < probability <= 1, f"probability must lie in (0, 1], got {probability:g}")
    require_whole("parameter", parameter, 0)
    return parameter + 1 if probability == 1 else _rice_expected(parameter, math.log2(-math.log1p(-probability)))


@looped
def golomb_divisor(probability: float) -> float:
    """Best Golomb divisor for T - 1, T geometric with the given success probability (a whole number).

    No prefix code is shorter.

    >>> golomb_divisor(0.01)
    69.0
    """
    require(0 < probability <= 1, f"probability must lie in (0, 1], got {probability:g}")
    if probability == 1:
        return 1.0
    return float(max(1, math.ceil(-math.log(2 - probability) / math.log1p(-probability))))


@looped
def golomb_expected_bits(probability: float, divisor: float) -> float:
    """Expected Golomb length of T - 1, T geometric with the given success probability."""
    require(0 < probability <= 1, f"probability must lie in (0, 1], got {probability:g}")
    require_whole("divisor", divisor, 1)
    width = (int(divisor) - 1).bit_length()
    short = 2**width - int(divisor)  # that many remainders save one bit
    if probability == 1:
        return float(width + (short == 0))
    rate = math.log1p(-probability)
    none_before_divisor = math.exp(divisor * rate)
    long = (math.exp(short * rate) - none_before_divisor) / -math.expm1(divisor * rate)
    return -1 / math.expm1(divisor * rate) + width - 1 + long


@looped
def geometric_entropy(probability: float) -> float:
    """Entropy H2(P)/P of a geometric number: what no code can beat.

    >>> geometric_entropy(0.5)
    2.0
    """
    require(0 < probability <= 1, f"probability must lie in (0, 1], got {probability:g}")
    if probability == 1:
        return 0.0
    return -math.log2(probability) - (1 - probability) / probability * math.log1p(-probability) / LN2


# Sets ------------------------------------------------------------------------------------------------------------------------


@vectorised
def binary_entropy(p: Array) -> Array:
    """Entropy -p log2 p - (1-p) log2 (1-p) of a biased coin.

    >>> binary_entropy(0.5)
    1.0
    """
    require_probability("p", p)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where((p == 0) | (p == 1), 0.0, -(p * np.log(p) + (1 - p) * np.log1p(-p)) / LN2)


_STIRLING_TABLE = np.array(
    [0.0] + [math.log(math.factorial(n)) - (n + 0.5) * math.log(n) + n - 0.5 * math.log(2 * math.pi) for n in range(1, 16)]
)


def _stirling_remainder(n: Array) -> Array:
    """Ln n! minus Stirling's formula for whole n >= 1 (0 at n = 0, which no caller uses)."""
    r = 1 / np.maximum(n, 1)
    series = r * (1 / 12 - r**2 * (1 / 360 - r**2 * (1 / 1260 - r**2 * (1 / 1680 - r**2 / 1188))))
    return np.where(n < 16, _STIRLING_TABLE[np.minimum(n, 15).astype(np.int64)], series)


@vectorised
def log2_binomial(d: Array, k: Array) -> Array:
    """log2 C(d, k): bits to name k of d indices.

    >>> round(log2_binomial(10, 3), 12) == round(math.log2(120), 12)
    True
    >>> round(log2_binomial(10**9, 10**6), 3)
    11407746.447
    """
    require_whole("d", d, 0)
    require_whole("k", k, 0)
    require_at_least("d - k", d - k, 0)
    few, many = np.minimum(k, d - k), np.maximum(k, d - k)
    inner = few > 0
    few, many, d = np.where(inner, few, 1), np.where(inner, many, 1), np.where(inner, d, 2)
    nats = few * np.log(d / few) - many * np.log1p(-few / d) - 0.5 * np.log(2 * np.pi * few * (many / d))
    nats = nats + _stirling_remainder(d) - _stirling_remainder(few) - _stirling_remainder(many)
    return np.where(inner, nats / LN2, 0.0)


@vectorised
def index_bits(d: Array, k: Array) -> Array:
    """log2 C(d, k) / k: the fewest bits per index of a set of k of d indices.

    >>> round(index_bits(2**20, 2**20 // 100), 3)
    8.079
    """
    require_whole("k", k, 1)
    return np.asarray(log2_binomial(d, k)) / k

"""Expected lengths, in bits, of what the dithering and spherical compressors, QSGD and ternary send.

Sparse dithering puts the levels of a unit vector on multiples of 2 sqrt(nu/d). Its published code sends a 31-bit scale, the
number n0 of zeros, which coordinates are zero (log2 C(d, n0)), signs, and levels in unary. Bits per coordinate beyond 30 +
log2 d:

    beta_det(nu)   = 3/2 + 1/(2 sqrt nu) + log2(1 + 2^-(3/2 + 1/(4 sqrt nu)))             published bound
    beta_star(nu)  = min over t > 0 of log2(1 + 2^(max_k 1 + k - t (2k-1)^2)) + t/nu       exact worst case of that code
    beta_ideal(nu) = largest entropy of levels k with E (2|k|-1)^2 [k != 0] <= 1/nu       worst case, ideal adaptive code
    log2 3 + 1/(2 sqrt omega)                                                             randomised, expected

(A level k != 0 needs a coordinate of at least (2|k|-1) sqrt(nu/d), and the squares sum to 1: that is the constraint above.)

Spherical compression sends the index T of the first of many shared random points within squared distance alpha: T is
geometric with P = P(alpha, d), coded by Rice. With S of ``bounds``, E[point] = c u with c = 1/S exactly, so dividing by c
makes it unbiased with omega = (1-alpha)/c^2 - 1 <= alpha/(1-alpha); undivided, its mean error is 2 - alpha - 2c < alpha.

Citations: Albasyoni, Safaryan, Condat, Richtarik, Optimal Gradient Compression (arXiv 2010.03246) for sparse dithering and
spherical compression. Where we differ: beta_star, beta_ideal, the constants of spherical compression and c = 1/S are derived here; the
bound that goes with beta_det is often printed with sqrt(nu) in place of 2 sqrt(nu), which does not give its own stated value 3.35 at
nu = 0.1.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike

from tersegrad.core.errors import BadConfiguration
from tersegrad.core.text import require
from tersegrad.theory.arguments import (
    Array,
    looped,
    require_at_least,
    require_between_zero_and_one,
    require_positive,
    require_whole,
    vectorised,
)
from tersegrad.theory.bounds import GOLDEN, LN2, log_cap
from tersegrad.theory.codes import _log2_rate, _rice_expected, _rice_parameter, log2_binomial

# Sparse dithering ------------------------------------------------------------------------------------------------------------


@vectorised
def beta_det(nu: Array) -> Array:
    """Published bound on the bits per coordinate of deterministic sparse dithering (its code beyond 30 + log2 d bits).

    >>> round(beta_det(0.1), 4)
    3.3494
    """
    require_positive("nu", nu)
    root = np.sqrt(nu)
    return 1.5 + 0.5 / root + np.log1p(np.exp2(-(1.5 + 0.25 / root))) / LN2


def _least(function: Callable[[float], float], low: float, high: float) -> float:
    """Smallest value of a function that falls and then rises between ``low`` and ``high``; golden-section search."""
    left, right = high - GOLDEN * (high - low), low + GOLDEN * (high - low)
    at_left, at_right = function(left), function(right)
    while right - left > 1e-13 * max(1.0, abs(left)):
        if at_left < at_right:
            high, right, at_right = right, left, at_left
            left = high - GOLDEN * (high - low)
            at_left = function(left)
        else:
            low, left, at_left = left, right, at_right
            right = low + GOLDEN * (high - low)
            at_right = function(right)
    return min(at_left, at_right)


@looped
def beta_star(nu: float) -> float:
    """Exact worst case over all long vectors of the published code of deterministic sparse dithering, in bits per coordinate.

    >>> round(beta_star(0.1), 4)
    3.3069
    """
    require_positive("nu", nu)

    def dual(log_t: float) -> float:
        t = math.exp(log_t)
        # Where 1 + k - t (2k-1)^2 is largest; the best whole k is next to it.
        level = (1 + 1 / (4 * t)) / 2
        best = max(1 + k - t * (2 * k - 1) ** 2 for k in (max(1.0, math.floor(level)), max(1.0, math.ceil(level))))
        return (best + math.log1p(2.0**-best) / LN2 if best > 0 else math.log1p(2.0**best) / LN2) + t / nu

    middle = math.log(math.sqrt(nu) / 8)
    return _least(dual, min(middle, math.log(nu)) - 5, max(middle, 0.0) + 5)


@looped
def beta_ideal(nu: float) -> float:
    """Worst case over all long vectors of deterministic sparse dithering with an ideal adaptive code, in bits per coordinate.

    >>> round(beta_ideal(0.1), 4)
    3.0182
    """
    require_positive("nu", nu)

    def dual(log_t: float) -> float:
        t = math.exp(log_t)
        # sum over odd n, both signs, of e^(-t n^2); below t = 0.05 Poisson's formula leaves its first term, to 1e-21
        nonzero = 0.5 * math.sqrt(math.pi / t) if t < 0.05 else 2 * sum(math.exp(-t * n * n) for n in range(1, 41, 2))
        return (math.log1p(nonzero) + t / nu) / LN2

    return _least(dual, min(math.log(nu / 2), 0.0) - 3, math.log(max(1.0, math.log(2 * nu))) + 3)


@vectorised
def randomised_dithering_bits(omega: Array) -> Array:
    """Bound log2 3 + 1/(2 sqrt omega) on the expected bits per coordinate of randomised sparse dithering, beyond 30 + log2 d.

    >>> round(32 / ((1 + 0.25) * randomised_dithering_bits(0.25)), 3)
    9.903
    """
    require_positive("omega", omega)
    return math.log2(3) + 0.5 / np.sqrt(omega)


def paper_code_bits(levels: ArrayLike, *, header: bool = True) -> float:
    """Length of the published code of one vector of sparse-dithering levels: scale, n0, zero set, signs, unary levels.

    The header is the 31-bit scale and log2 d bits for the number of zeros. An all-zero vector is the scale 0 alone.

    >>> round(paper_code_bits([0, 2, -1, 0], header=False), 4)  # log2 6 + 2 signs + 3
    7.585
    """
    values = np.asarray(levels)
    require(values.ndim == 1 and values.size >= 1, "levels must be a vector of at least one integer")
    require(values.dtype.kind in "iu", f"levels must be integers, got {values.dtype}")
    magnitudes = np.abs(values.astype(np.int64))
    d, nonzeros = values.size, int(np.count_nonzero(values))
    if nonzeros == 0:
        return 31.0 if header else 0.0
    payload = log2_binomial(d, nonzeros) + nonzeros + int(magnitudes.sum())
    return payload + (31 + math.log2(d) if header else 0.0)


# Spherical compression -------------------------------------------------------------------------------------------------------


def _log_cap_checked(alpha: float, d: float) -> tuple[float, float]:
    require_between_zero_and_one("alpha", alpha)
    require_at_least("d", d, 1)
    return log_cap(alpha, d)


@looped
def spherical_rice_parameter(alpha: float, d: float) -> float:
    """Rice parameter of spherical compression (a whole number); both ends derive it, so it is never sent.

    >>> spherical_rice_parameter(0.2, 10)
    13.0
    """
    return float(_rice_parameter(_log2_rate(-_log_cap_checked(alpha, d)[0] / LN2)))


@looped
def spherical_expected_bits(alpha: float, d: float) -> float:
    """Exact expected length of spherical compression of a unit vector, the same for every vector; the norm is extra.

    >>> round(spherical_expected_bits(0.25, 8) / 8, 3)
    1.387
    """
    rate = _log2_rate(-_log_cap_checked(alpha, d)[0] / LN2)
    return _rice_expected(_rice_parameter(rate), rate)


@looped
def spherical_constant(alpha: float, d: float) -> float:
    """C with E[point sent] = c u: dividing by it makes spherical compression unbiased. It lies between 1 - alpha and 1.

    >>> round(spherical_constant(0.5, 8), 4)
    0.5488
    """
    return math.exp(-_log_cap_checked(alpha, d)[1])


@looped
def spherical_omega(alpha: float, d: float) -> float:
    """Variance (1-alpha)/c^2 - 1 of the unbiased version; at most alpha/(1-alpha).

    >>> round(spherical_omega(0.5, 8), 3)
    0.66
    """
    return max(0.0, math.expm1(math.log1p(-alpha) + 2 * _log_cap_checked(alpha, d)[1]))


@looped
def spherical_mean_error(alpha: float, d: float) -> float:
    """Mean error 2 - alpha - 2c of the biased version, whose sure bound is ``alpha``.

    >>> round(spherical_mean_error(0.25, 16), 4)
    0.2215
    """
    return -alpha - 2 * math.expm1(-_log_cap_checked(alpha, d)[1])


# QSGD and ternary levels -----------------------------------------------------------------------------------------------------


@vectorised
def qsgd_nonzero_bound(levels: Array, bucket: Array) -> Array:
    """Bound s (s + sqrt d), or d, on the expected non-zeros of any bucket of d coordinates with s levels."""
    require_whole("levels", levels, 1)
    require_whole("bucket", bucket, 1)
    return np.minimum(levels * (levels + np.sqrt(bucket)), bucket)


@looped
def qsgd_nonzero_fraction(levels: float, bucket: float, *, source: Literal["gaussian", "laplace"] = "gaussian") -> float:
    """Expected share of non-zeros E min(1, r|x|), r = s/sqrt(d), of QSGD with Euclidean norms on long iid buckets.

    >>> [round(1 / qsgd_nonzero_fraction(s, d), 1) for s, d in ((2, 128), (4, 512), (8, 512))]
    [7.1, 7.1, 3.6]
    """
    require_whole("levels", levels, 1)
    require_whole("bucket", bucket, 1)
    r = levels / math.sqrt(bucket)
    if source == "gaussian":
        return r * math.sqrt(2 / math.pi) * -math.expm1(-0.5 / r**2) + math.erfc(1 / (r * math.sqrt(2)))
    if source == "laplace":
        return r / math.sqrt(2) * -math.expm1(-math.sqrt(2) / r)
    raise BadConfiguration(f"source must be gaussian or laplace, got {source!r}")


def ternary_nonzeros(x: ArrayLike) -> float:
    """Expected non-zeros ||x||_1 / ||x||_inf of ternary levels scaled by the largest magnitude; 0 for the zero vector."""
    magnitudes = np.abs(np.asarray(x, dtype=np.float64))
    largest = float(magnitudes.max(initial=0.0))
    require(math.isfinite(largest), "x must be finite")
    return float((magnitudes / largest).sum()) if largest > 0 else 0.0

"""How few bits are possible: lower bounds on the length of a compressed vector of d coordinates, and what is achievable.

The uncertainty principle: a contractive compressor of error alpha with b bits (largest or expected) has alpha 4^(b/d) >= 1,
so

    b >= (d/2) log2(1/alpha),        and for an unbiased one        b >= (d/2) log2((1+omega)/omega).

Compressors whose error bound holds surely (the class C(alpha)) obey a sharper bound. Let P(alpha, d) be the share of the unit
sphere within squared distance alpha of the best point (a cap of half-angle arcsin sqrt(alpha)),

    P(alpha, d) = I_alpha((d-1)/2, 1/2) / 2,        I the regularised incomplete beta function.

One message serves at most one cap, hence b >= -log2 P in the worst case, and also on average: for x uniform on the sphere no
message has probability above P, so the entropy of the messages is at least -log2 P. Random codebooks on the sphere come
within 1.563 bits of it on average (``lengths.spherical_expected_bits``), and covering codebooks within log2 d + log2 log2 d +
O(1) always. When alpha bounds the average error over the sphere only, the limit is ((d-1)/2) log2(1/alpha) exactly.

All of these are for unit vectors; the norm is extra (31 bits for a float32 without its sign).

Evaluation. With a = (d-1)/2 and S = 2F1(a+1/2, 1; a+1; alpha),

    ln P = -ln 2 + a ln(alpha) + ln(1-alpha)/2 - ln(pi)/2 - ln[Gamma(a+1)/Gamma(a+1/2)] + ln S,      1 <= S <= 1/(1-alpha);

S comes from the continued fraction of the incomplete beta function, and where that would converge slowly (the cap is nearly a
half-sphere) from the complement 1 - I_{1-alpha}(1/2, a), which then loses at most one digit. The ratio of Gamma functions is
never taken as a difference of logarithms. No step cancels or underflows: relative accuracy about 1e-14 up to d = 1e9 and
beyond.

Citations: Safaryan, Shulgin, Richtarik, Uncertainty Principle for Communication Compression (arXiv 2002.08958); Albasyoni,
Safaryan, Condat, Richtarik, Optimal Gradient Compression (arXiv 2010.03246); Dytso, Cardone (arXiv 2401.04248) for the exact
rate-distortion function of the sphere; DLMF 8.17.22 for the continued fraction.
"""

from __future__ import annotations

import math

import numpy as np

from tersegrad.theory.arguments import (
    Array,
    looped,
    require_at_least,
    require_between_zero_and_one,
    require_positive,
    vectorised,
)

LN2 = math.log(2)
GOLDEN = (math.sqrt(5) - 1) / 2
# By how much the expected length of the best Rice code of a geometric number can exceed -log2 P. With x = 2^m P the excess is
# log2 x + 1/(1-e^-x), which falls and then rises on the octave from ln(1/GOLDEN) to twice that, where the best m puts x; both
# ends give the same, largest, value (about 1.563).
RICE_EXCESS = 1 + 1 / GOLDEN + math.log2(-math.log(GOLDEN))


@vectorised
def uncertainty_bits(alpha: Array, d: Array) -> Array:
    """Fewest bits (d/2) log2(1/alpha) of a contractive compressor of d coordinates, norm included.

    >>> uncertainty_bits(0.25, 100)
    100.0
    """
    require_between_zero_and_one("alpha", alpha)
    require_at_least("d", d, 1)
    return -0.5 * d * np.log2(alpha)


@vectorised
def uncertainty_bits_unbiased(omega: Array, d: Array) -> Array:
    """Fewest bits (d/2) log2((1+omega)/omega) of an unbiased compressor of d coordinates.

    >>> uncertainty_bits_unbiased(1 / 3, 100)
    100.0
    """
    require_positive("omega", omega)
    require_at_least("d", d, 1)
    return 0.5 * d * np.log1p(1 / omega) / LN2


@vectorised
def smallest_alpha(bits: Array) -> Array:
    """Smallest contractive error 4^-bits that ``bits`` per coordinate allow."""
    require_at_least("bits", bits, 0)
    return np.exp2(-2 * bits)


@vectorised
def smallest_omega(bits: Array) -> Array:
    """Smallest unbiased variance 1/(4^bits - 1) that ``bits`` per coordinate allow."""
    require_positive("bits", bits)
    return 1 / np.expm1(2 * LN2 * bits)


def log_gamma_step(a: float) -> float:
    """ln[Gamma(a+1) / Gamma(a+1/2)] for a >= 0, without subtracting large logarithms."""
    if a < 100:
        return math.log(math.gamma(a + 1) / math.gamma(a + 0.5))
    r = 1 / a
    series = r * (1 / 8 + r * (1 / 128 + r * (-5 / 1024 + r * (-21 / 32768 + r * (399 / 262144 + r * (869 / 4194304))))))
    return 0.5 * math.log(a) + math.log1p(series)


def beta_fraction(a: float, b: float, x: float) -> float:
    """F with I_x(a, b) = x^a (1-x)^b F / (a B(a, b)); quick for x < (a+1)/(a+b+2). The modified Lentz method."""
    c = 1.0
    d = 1 / (1 - (a + b) * x / (a + 1))
    value = d
    for m in range(1, 1_000_000):
        for step in (
            m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m)),
            -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1)),
        ):
            d = 1 / (1 + step * d)
            c = 1 + step / c
            value *= c * d
        if abs(c * d - 1) < 4e-16:  # two roundings of a product of two
            break
    return value


def log_cap(alpha: float, d: float) -> tuple[float, float]:
    """(ln P(alpha, d), ln S): the logarithms of the cap's share of the sphere and of the hypergeometric factor."""
    a = (d - 1) / 2
    ratio = log_gamma_step(a)
    leading = a * math.log(alpha) + 0.5 * math.log1p(-alpha) - 0.5 * math.log(math.pi) - ratio
    if alpha < (a + 1) / (a + 2.5):
        log_s = math.log(beta_fraction(a, 0.5, alpha))
        return leading + log_s - LN2, log_s
    rest = 1 - alpha
    outside = 0.0
    if a > 0:
        prefactor = 0.5 * math.log(rest) + a * math.log(alpha) + math.log(2 * a) - 0.5 * math.log(math.pi) - ratio
        outside = math.exp(prefactor) * beta_fraction(0.5, a, rest)
    log_inside = math.log1p(-outside)
    return log_inside - LN2, log_inside - leading


@looped
def neg_log2_cap(alpha: float, d: float) -> float:
    """-log2 P(alpha, d): the fewest bits for a unit vector when the error is surely at most ``alpha``.

    >>> round(neg_log2_cap(0.1, 10), 9)
    17.837661751
    >>> round(neg_log2_cap(0.1, 1e9) / 1e9, 5)
    1.66096
    """
    require_between_zero_and_one("alpha", alpha)
    require_at_least("d", d, 1)
    return -log_cap(alpha, d)[0] / LN2


@looped
def cap_probability(alpha: float, d: float) -> float:
    """P(alpha, d): the share of the unit sphere that one point serves; 0.0 where it is below the smallest float.

    >>> round(cap_probability(0.75, 3), 12)  # on the ordinary sphere: half of 1 - cos(60 degrees)
    0.25
    """
    require_between_zero_and_one("alpha", alpha)
    require_at_least("d", d, 1)
    return math.exp(log_cap(alpha, d)[0])


@vectorised
def worst_case_lower_bits(alpha: Array, d: Array) -> Array:
    """Fewest bits of the longest message of a compressor with sure error ``alpha``: -log2 P, with no constant left open."""
    return np.asarray(neg_log2_cap(alpha, d))


@vectorised
def worst_case_refined_bits(alpha: Array, d: Array) -> Array:
    """The refined worst-case bound -log2 P + log2 d, valid up to an additive constant that its authors leave open."""
    return np.asarray(neg_log2_cap(alpha, d)) + np.log2(d)


@vectorised
def worst_case_upper_bits(alpha: Array, d: Array) -> Array:
    """Length -log2 P + log2 d + log2 log2 d of a covering codebook, up to a constant; its search is exponential in d."""
    require_at_least("d", d, 2)
    return np.asarray(neg_log2_cap(alpha, d)) + np.log2(d) + np.log2(np.log2(d))


@vectorised
def average_case_lower_bits(alpha: Array, d: Array) -> Array:
    """Fewest expected bits with sure error ``alpha``: -log2 P, also with shared randomness."""
    return np.asarray(neg_log2_cap(alpha, d))


@vectorised
def average_case_upper_bits(alpha: Array, d: Array) -> Array:
    """Expected bits that spherical compression never exceeds: -log2 P + 1.563 (``spherical_expected_bits`` is exact)."""
    return np.asarray(neg_log2_cap(alpha, d)) + RICE_EXCESS


@vectorised
def sphere_rate_bits(alpha: Array, d: Array) -> Array:
    """Rate-distortion function ((d-1)/2) log2(1/alpha) of the sphere: the limit when only the average error is bounded.

    >>> sphere_rate_bits(0.25, 101)
    100.0
    """
    require_between_zero_and_one("alpha", alpha)
    require_at_least("d", d, 1)
    return -0.5 * (d - 1) * np.log2(alpha)

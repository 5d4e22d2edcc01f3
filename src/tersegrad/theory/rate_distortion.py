"""Rate-distortion functions: the fewest bits per coordinate of long iid vectors at a given relative error, and the gap to them.

Gaussian, and the worst case of any isotropic vector:

    contractive  R(alpha) = log2(1/alpha) / 2  (0 from alpha = 1),        unbiased  R(omega) = log2((1+omega)/omega) / 2.

The unbiased form is the contractive one at alpha = omega/(1+omega), and stays positive for errors above 1.

Laplace, squared error, unit variance. Shannon's lower bound is h - log2(2 pi e D)/2 = log2(e/(pi D))/2 bits. The exact
function has no closed form. For a slope s = 1/(2 sigma^2) Blahut's problem is to fit the density p by a mixture q * N(0,
sigma^2) of Gaussians:

    R(D) = max over sigma of   h + K(sigma) - log2(2 pi sigma^2)/2 - (D / (2 sigma^2)) log2 e,
    K(sigma) = min over q of KL(p || q * N(0, sigma^2)).

A two-sided exponential convolved with a Gaussian is exponential again away from the origin, so q is exactly known in the
tails and only its weights within 8 sigma of the kink at zero are unknown: 33 points a quarter of sigma apart and one tail.
Blahut-Arimoto (here the same as expectation-maximisation for mixture weights), accelerated by squared extrapolation, finds
them to about 5e-5 bit; K falls like sigma^3, so Shannon's bound is within 1e-6 bit below sigma = 0.04. The problem is solved
at 25 Chebyshev nodes in ln sigma on the first call (about a second) and kept. Accuracy of R: 2e-4 bit.

Citations: Shannon 1959; Blahut 1972; Arimoto 1972; Berger, Rate Distortion Theory, 1971; Varadhan, Roland 2008 (squared
extrapolation).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import numpy as np

from tersegrad.theory.arguments import Array, looped, require_at_least, require_positive, vectorised
from tersegrad.theory.bounds import LN2

# Gaussian --------------------------------------------------------------------------------------------------------------------


@vectorised
def gaussian_rate(alpha: Array) -> Array:
    """Fewest bits per coordinate at contractive error ``alpha``; 0 for alpha >= 1.

    >>> gaussian_rate(0.25)
    1.0
    """
    require_positive("alpha", alpha)
    return np.maximum(0.0, -0.5 * np.log2(alpha)) + 0.0  # never -0.0


@vectorised
def gaussian_distortion(bits: Array) -> Array:
    """Smallest contractive error 4^-bits at ``bits`` per coordinate."""
    require_at_least("bits", bits, 0)
    return np.exp2(-2 * bits)


@vectorised
def gaussian_rate_unbiased(omega: Array) -> Array:
    """Fewest bits per coordinate at unbiased variance ``omega``, which may exceed 1.

    >>> gaussian_rate_unbiased(1.0)
    0.5
    """
    require_positive("omega", omega)
    return 0.5 * np.log1p(1 / omega) / LN2


@vectorised
def gaussian_distortion_unbiased(bits: Array) -> Array:
    """Smallest unbiased variance 1/(4^bits - 1) at ``bits`` per coordinate."""
    require_positive("bits", bits)
    return 1 / np.expm1(2 * LN2 * bits)


@vectorised
def gap(bits: Array, error: Array, *, unbiased: bool = False) -> Array:
    """Distance, in bits per coordinate, of a measured (bits, relative error) from the Gaussian limit at that error.

    Zero is the limit for worst-case and Gaussian vectors; real gradients have structure and may go below it. Use
    ``unbiased=True`` for unbiased compressors, whose error may exceed 1. An error of 0 has no finite limit and gives -inf.

    >>> gap(1.254, 0.25)
    0.254
    >>> gap(8, 3.0, unbiased=True) == 8 - gaussian_rate_unbiased(3.0)
    True
    """
    require_at_least("bits", bits, 0)
    require_at_least("error", error, 0)
    with np.errstate(divide="ignore"):
        limit = 0.5 * np.log1p(1 / error) / LN2 if unbiased else np.maximum(0.0, -0.5 * np.log2(error)) + 0.0
    return np.where(error > 0, bits - limit, -np.inf)


@vectorised
def high_rate_gap(second_moment: Array) -> Array:
    """Gap log2(2 pi e G)/2 of a quantiser with normalised second moment G and ideal coding, at small errors.

    G is the error per coordinate over the squared volume per point: 1/12 for rounding each coordinate, kappa/4 for a trellis code
    with one point per two steps and error kappa steps squared, 1/(2 pi e) for ideal balls.

    >>> round(high_rate_gap(1 / 12), 4)
    0.2546
    """
    require_at_least("second_moment", second_moment, 1 / (2 * math.pi * math.e) * (1 - 1e-12))
    return np.maximum(0.0, 0.5 * np.log2(2 * math.pi * math.e * second_moment))


# Laplace ---------------------------------------------------------------------------------------------------------------------

_RATE = math.sqrt(2)  # of the exponential on each side, for unit variance
_ENTROPY = math.log2(math.sqrt(2) * math.e)  # differential, in bits
_LOW, _HIGH = math.log(0.04), math.log(2.5)  # range of ln sigma; above it all of q sits at zero but for 1e-6 bit
_NODES = 25


@vectorised
def laplace_shannon_bound(alpha: Array) -> Array:
    """Shannon's lower bound log2(e/(pi alpha))/2 on the Laplace rate, or 0 where that is negative."""
    require_positive("alpha", alpha)
    return np.maximum(0.0, 0.5 * np.log2(math.e / (math.pi * alpha)))


def _mixture(sigma: float) -> tuple[Array, Array, Array]:
    """Mixture densities over the Laplace density (points, components); mass of each point; starting weights."""
    positions = sigma * np.arange(33) / 4
    last = float(positions[-1])
    nodes, weights = np.polynomial.legendre.leggauss(10)
    x = (sigma * (np.arange(17)[:, None] + (1 + nodes) / 2)).ravel()  # up to 9 sigma beyond the last position
    density = _RATE * np.exp(-_RATE * x)
    bell = np.exp(-0.5 * ((x[:, None] - positions) / sigma) ** 2) + np.exp(-0.5 * ((x[:, None] + positions) / sigma) ** 2)
    bell /= sigma * math.sqrt(2 * math.pi)
    # the exponential tail of q beyond the last position, smoothed; its ratio to the Laplace density tends to `level`
    level = math.exp(_RATE * last + (_RATE * sigma) ** 2 / 2)
    reached = np.array([math.erfc(-(t - last - _RATE * sigma**2) / (sigma * math.sqrt(2))) / 2 for t in x.tolist()])
    ratios = np.column_stack([bell / density[:, None], level * reached])
    everything_beyond = np.append(np.zeros(positions.size), level)
    mass = np.append(density * np.tile(weights * (sigma / 2), 17), math.exp(-_RATE * 17 * sigma))
    start = np.exp(-_RATE * positions)
    start[0] /= 2
    start *= -math.expm1(-_RATE * last) / start.sum()
    return np.vstack([ratios, everything_beyond]), mass, np.append(start, math.exp(-_RATE * last))


def kernel_mismatch(sigma: float, tolerance: float = 5e-5) -> float:
    """K(sigma): bits by which the best mixture of Gaussians of width sigma misses the Laplace density, to ``tolerance``."""
    ratios, mass, q = _mixture(sigma)

    def update(q: Array) -> Array:
        return q * ((mass / (ratios @ q)) @ ratios)

    def mismatch(q: Array) -> float:
        return -float(mass @ np.log2(ratios @ q))

    best = mismatch(q)
    for _ in range(500):
        once = update(q)
        twice = update(once)
        change = once - q
        bend = twice - once - change
        bend_size = float(np.linalg.norm(bend))
        if bend_size == 0:
            break
        stride = max(1.0, float(np.linalg.norm(change)) / bend_size)
        ahead = q + 2 * stride * change + stride**2 * bend
        while ahead.min() <= 0 and stride > 1.01:
            stride = (stride + 1) / 2
            ahead = q + 2 * stride * change + stride**2 * bend
        following = update(ahead / ahead.sum()) if ahead.min() > 0 else update(twice)
        value = mismatch(following)
        if value > best:
            following = update(twice)
            value = mismatch(following)
        q, best = following, value
        # no other weights can do better than `best` by more than log2 of the largest factor that an update would apply
        if math.log2(float(((mass / (ratios @ q)) @ ratios).max())) < tolerance:
            break
    return best


def _dual_without_slope(log_sigma: float, mismatch: float) -> float:
    """F = R + D log2(e) / (2 sigma^2), the part of the dual that does not depend on D."""
    return _ENTROPY + mismatch - 0.5 * math.log2(2 * math.pi) - log_sigma / LN2


@functools.cache
def _dual_series() -> Array:
    """Chebyshev coefficients of ln(F sigma^2) in ln sigma: smooth, because F sigma^2 tends to a constant for wide kernels."""
    angles = (np.arange(_NODES) + 0.5) * math.pi / _NODES
    log_sigma = (_LOW + _HIGH) / 2 + (_HIGH - _LOW) / 2 * np.cos(angles)
    values = [math.log(_dual_without_slope(t, kernel_mismatch(math.exp(t)))) + 2 * t for t in log_sigma.tolist()]
    coefficients = 2 / _NODES * (np.cos(np.arange(_NODES)[:, None] * angles) @ np.array(values))
    coefficients[0] /= 2
    return np.asarray(coefficients)


def _scaled_dual(log_sigma: float) -> float:
    """F sigma^2 from the series; it never exceeds log2(e)/2, the value for a source sent as zero."""
    place = (2 * log_sigma - _LOW - _HIGH) / (_HIGH - _LOW)
    return min(math.exp(float(np.polynomial.chebyshev.chebval(place, _dual_series()))), 0.5 / LN2)


def _peak(function: Callable[[float], float]) -> float:
    """Largest value over ln sigma of a function that rises and then falls."""
    low, high = _LOW, _HIGH
    for _ in range(45):
        third = (high - low) / 3
        if function(low + third) < function(high - third):
            low += third
        else:
            high -= third
    return function((low + high) / 2)


@looped
def laplace_rate(alpha: float) -> float:
    """Fewest bits per coordinate of a long iid Laplace vector at relative squared error ``alpha``; to 2e-4 bit.

    >>> round(laplace_rate(0.25), 3)
    0.899
    """
    require_positive("alpha", alpha)
    if alpha >= 1:
        return 0.0
    shannon = _ENTROPY - 0.5 * math.log2(2 * math.pi * math.e * alpha)
    if alpha < math.exp(2 * _LOW):
        return shannon

    return max(0.0, shannon, _peak(lambda t: (_scaled_dual(t) - 0.5 * alpha / LN2) * math.exp(-2 * t)))


@looped
def laplace_distortion(bits: float) -> float:
    """Smallest relative squared error of a long iid Laplace vector at ``bits`` per coordinate.

    >>> round(laplace_distortion(laplace_rate(0.1)), 6)
    0.1
    """
    require_at_least("bits", bits, 0)
    if bits == 0:
        return 1.0
    shannon = math.e / math.pi * math.exp2(-2 * bits)
    if shannon < math.exp(2 * _LOW):
        return shannon
    # the dual read the other way: bits >= F - D log2(e)/(2 sigma^2) for every sigma, with equality at one
    return min(1.0, max(shannon, _peak(lambda t: 2 * LN2 * (_scaled_dual(t) - bits * math.exp(2 * t)))))

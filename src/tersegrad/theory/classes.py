"""The two classes of compressors, the way from one to the other, and what they cost in optimisation.

A compressor C of vectors x is

- unbiased with variance omega, C in U(omega): E C(x) = x and E||C(x) - x||^2 <= omega ||x||^2 (omega may exceed 1);
- contractive with error alpha, C in B(alpha): E||C(x) - x||^2 <= alpha ||x||^2 with 0 < alpha < 1 (in C(alpha) when it holds
  surely and not only on average).

Shrinking an unbiased compressor by 1/(1+omega) gives a contractive one with alpha = omega/(1+omega): E||C||^2 <=
(1+omega)||x||^2, expand the square. Gradient descent on an L-smooth function with compressed gradients takes the step 1/L and
1/(1-alpha) times the iterations for contractive C, the step 1/((1+omega)L) and (1+omega) times the iterations for unbiased C.
Bits per iteration times that factor is the figure of merit: total bits in units of one uncompressed run's iterations.

The worst cases of well-known compressors follow. Citations: Beznosikov, Horvath, Richtarik, Safaryan, On Biased Compression
(arXiv 2002.12410); Albasyoni, Safaryan, Condat, Richtarik, Optimal Gradient Compression (arXiv 2010.03246); Alistarh et al.,
QSGD (arXiv 1610.02132); Horvath et al., Natural Compression (arXiv 1905.10988). The ternary constant is sharper than the
usual sqrt(d): max ||x||_1 ||x||_inf / ||x||^2 = (1 + sqrt(d))/2, reached where all coordinates but one are 1/(1+sqrt(d)) of
the largest.
"""

from __future__ import annotations

import numpy as np

from tersegrad.theory.arguments import (
    Array,
    require_at_least,
    require_between_zero_and_one,
    require_positive,
    require_whole,
    vectorised,
)


@vectorised
def alpha_from_omega(omega: Array) -> Array:
    """Contraction factor omega/(1+omega) of an unbiased compressor after scaling it by :func:`shrinkage`.

    >>> alpha_from_omega(0.25)
    0.2
    """
    require_at_least("omega", omega, 0)
    return omega / (1 + omega)


@vectorised
def omega_from_alpha(alpha: Array) -> Array:
    """Variance alpha/(1-alpha) whose shrunk compressor has error ``alpha``: the inverse of :func:`alpha_from_omega`.

    >>> omega_from_alpha(0.5)
    1.0
    """
    require_between_zero_and_one("alpha", alpha)
    return alpha / (1 - alpha)


@vectorised
def shrinkage(omega: Array) -> Array:
    """Factor 1/(1+omega) that turns an unbiased compressor into a contractive one (error feedback needs it)."""
    require_at_least("omega", omega, 0)
    return 1 / (1 + omega)


@vectorised
def step_size_contractive(smoothness: Array, alpha: Array) -> Array:
    """Step 1/L of compressed gradient descent with a contractive compressor; it does not depend on ``alpha``."""
    require_positive("smoothness", smoothness)
    require_between_zero_and_one("alpha", alpha)
    return 1 / smoothness


@vectorised
def step_size_unbiased(smoothness: Array, omega: Array) -> Array:
    """Step 1/((1+omega)L) of compressed gradient descent with an unbiased compressor."""
    require_positive("smoothness", smoothness)
    require_at_least("omega", omega, 0)
    return 1 / ((1 + omega) * smoothness)


@vectorised
def iteration_factor_contractive(alpha: Array) -> Array:
    """How many times more iterations than plain gradient descent: 1/(1-alpha)."""
    require_between_zero_and_one("alpha", alpha)
    return 1 / (1 - alpha)


@vectorised
def iteration_factor_unbiased(omega: Array) -> Array:
    """How many times more iterations than plain gradient descent: 1+omega."""
    require_at_least("omega", omega, 0)
    return 1 + omega


@vectorised
def merit_contractive(bits: Array, alpha: Array) -> Array:
    """Total communication bits/(1-alpha): bits per coordinate per iteration of the uncompressed run. Smaller is better."""
    require_at_least("bits", bits, 0)
    require_between_zero_and_one("alpha", alpha)
    return bits / (1 - alpha)


@vectorised
def merit_unbiased(bits: Array, omega: Array) -> Array:
    """Total communication bits (1+omega): bits per coordinate per iteration of the uncompressed run. Smaller is better."""
    require_at_least("bits", bits, 0)
    require_at_least("omega", omega, 0)
    return bits * (1 + omega)


@vectorised
def top_k_alpha(k: Array, d: Array) -> Array:
    """Worst-case error 1 - k/d of keeping the k largest of d coordinates, reached by a constant vector."""
    require_whole("k", k, 1)
    require_at_least("d - k", d - k, 0)
    return 1 - k / d


@vectorised
def random_k_omega(k: Array, d: Array) -> Array:
    """Variance d/k - 1 of keeping k random coordinates of d, scaled by d/k; the same for every vector."""
    require_whole("k", k, 1)
    require_at_least("d - k", d - k, 0)
    return d / k - 1


@vectorised
def scaled_sign_alpha(d: Array) -> Array:
    """Worst-case error 1 - 1/d of sign(x) ||x||_1 / d; for a given x it is 1 - ||x||_1^2 / (d ||x||^2)."""
    require_whole("d", d, 1)
    return 1 - 1 / d


@vectorised
def ternary_omega(d: Array) -> Array:
    """Worst-case variance (sqrt(d) - 1)/2 of ternary levels -m, 0, m with m the largest magnitude (TernGrad).

    >>> ternary_omega(9)
    1.0
    """
    require_whole("d", d, 1)
    return (np.sqrt(d) - 1) / 2


@vectorised
def qsgd_omega(levels: Array, bucket: Array) -> Array:
    """Variance bound min(d/s^2, sqrt(d)/s) of QSGD with s levels above zero and Euclidean norms over buckets of d coordinates.

    >>> qsgd_omega(8, 64)
    1.0
    """
    require_whole("levels", levels, 1)
    require_whole("bucket", bucket, 1)
    return np.minimum(bucket / levels**2, np.sqrt(bucket) / levels)


@vectorised
def natural_dithering_omega(levels: Array, d: Array) -> Array:
    """Variance bound 1/8 + r min(1, r), r = sqrt(d) 2^(1-s), of s levels at powers of two below the Euclidean norm.

    Natural compression of floats, which has no lowest level, is the limit: 1/8.
    """
    require_whole("levels", levels, 1)
    require_whole("d", d, 1)
    lowest = np.sqrt(d) * np.exp2(1 - levels)
    return np.asarray(0.125 + lowest * np.minimum(1, lowest))

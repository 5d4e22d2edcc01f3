"""Bounds against mpmath, against exact geometry in low dimension, and against published values."""

import math

import mpmath  # type: ignore[import-untyped]
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tersegrad import theory
from tersegrad.core.errors import BadConfiguration

VECTORS = [
    (0.1, 10, 17.837661751411),
    (0.1, 1000, 1665.535521477884),
    (0.9, 300, 26.542779237742),
    (0.5, 17, 10.920306579327),
]

PER_COORDINATE = {
    0.5: (0.70631, 0.53658, 0.50531, 0.50001, 0.50000),
    0.25: (1.17845, 1.03441, 1.00510, 1.00001, 1.00000),
    0.1: (1.78377, 1.69005, 1.66554, 1.66097, 1.66096),
    0.03: (2.56978, 2.55038, 2.53320, 2.52946, 2.52945),
    0.01: (3.28421, 3.33508, 3.32491, 3.32194, 3.32193),
}


def exact_neg_log2_cap(alpha: float, d: int) -> float:
    with mpmath.workdps(40):
        share = mpmath.betainc(mpmath.mpf(d - 1) / 2, mpmath.mpf(1) / 2, 0, mpmath.mpf(alpha), regularized=True)
        return float(-mpmath.log(share / 2, 2))


def series_neg_log2_cap(alpha: float, d: float) -> float:
    """The hypergeometric series in 40 digits: independent of the continued fraction, and usable where betainc gives up."""
    with mpmath.workdps(40):
        a, x = (mpmath.mpf(d) - 1) / 2, mpmath.mpf(alpha)
        term, total, n = mpmath.mpf(1), mpmath.mpf(1), 0
        while term > total * mpmath.mpf(10) ** -25:
            term *= x * (a + mpmath.mpf(1) / 2 + n) / (a + 1 + n)
            total += term
            n += 1
        ratio = mpmath.loggamma(a + 1) - mpmath.loggamma(a + mpmath.mpf(1) / 2)
        log_p = a * mpmath.log(x) + mpmath.log(1 - x) / 2 - mpmath.log(mpmath.pi) / 2 - ratio + mpmath.log(total / 2)
        return float(-log_p / mpmath.log(2))


@pytest.mark.parametrize(("alpha", "d", "expected"), VECTORS)
def test_cap_vectors(alpha: float, d: int, expected: float) -> None:
    assert theory.neg_log2_cap(alpha, d) == pytest.approx(expected, rel=1e-12)


def test_cap_table() -> None:
    dimensions = np.array([10, 100, 1e3, 1e6, 1e9])
    for alpha, row in PER_COORDINATE.items():
        np.testing.assert_allclose(theory.neg_log2_cap(alpha, dimensions) / dimensions, row, rtol=0, atol=5.1e-6)


@pytest.mark.parametrize("d", [2, 3, 4, 7, 50, 201, 300, 1000, 5000])
@pytest.mark.parametrize("alpha", [1e-9, 1e-3, 0.1, 0.5, 0.9, 0.99, 0.999, 0.999999, 1 - 1e-12])
def test_cap_against_mpmath(alpha: float, d: int) -> None:
    assert theory.neg_log2_cap(alpha, d) == pytest.approx(exact_neg_log2_cap(alpha, d), rel=1e-13)


@pytest.mark.parametrize("d", [1e5, 1e6, 1e7, 1e9])
@pytest.mark.parametrize("alpha", [0.01, 0.3, 0.9, 0.99])
def test_cap_against_the_series_at_large_dimension(alpha: float, d: float) -> None:
    assert theory.neg_log2_cap(alpha, d) == pytest.approx(series_neg_log2_cap(alpha, d), rel=1e-14)


@pytest.mark.parametrize("alpha", [0.01, 0.3, 0.5, 0.77, 0.999])
def test_cap_is_exact_in_low_dimension(alpha: float) -> None:
    angle = math.asin(math.sqrt(alpha))
    assert theory.cap_probability(alpha, 1) == pytest.approx(0.5, rel=1e-14)
    assert theory.cap_probability(alpha, 2) == pytest.approx(angle / math.pi, rel=1e-13)
    assert theory.cap_probability(alpha, 3) == pytest.approx((1 - math.cos(angle)) / 2, rel=1e-12)
    assert theory.cap_probability(alpha, 4) == pytest.approx((angle - math.sin(2 * angle) / 2) / math.pi, rel=1e-11)


def test_cap_by_monte_carlo() -> None:
    x = np.random.default_rng(0).standard_normal((200_000, 6))
    x /= np.linalg.norm(x, axis=1, keepdims=True)
    centre = np.array([math.sqrt(0.6), 0, 0, 0, 0, 0])
    share = float(np.mean(((x - centre) ** 2).sum(axis=1) <= 0.4))
    p = theory.cap_probability(0.4, 6)
    assert abs(share - p) < 5 * math.sqrt(p * (1 - p) / 200_000)


def test_cap_asymptote() -> None:
    alpha, d = 0.3, 1e8
    asymptote = 0.5 * (d - 1) * math.log2(1 / alpha) + 0.5 * math.log2(2 * math.pi * (d - 1) * (1 - alpha))
    assert theory.neg_log2_cap(alpha, d) - asymptote == pytest.approx(0, abs=1e-6)


def test_cap_probability_underflows_to_zero() -> None:
    assert theory.cap_probability(0.1, 1e9) == 0.0


@settings(max_examples=200, deadline=None)
@given(st.floats(1e-6, 1 - 1e-6), st.floats(1, 1e9), st.floats(1.0001, 3))
def test_cap_is_monotone(alpha: float, d: float, factor: float) -> None:
    assert theory.neg_log2_cap(alpha, d * factor) > theory.neg_log2_cap(alpha, d) * (1 - 1e-13)
    assert theory.neg_log2_cap(alpha / factor, d) >= theory.neg_log2_cap(alpha, d) * (1 - 1e-13)


@settings(max_examples=200, deadline=None)
@given(st.floats(1e-6, 0.999), st.integers(2, 10**9))
def test_order_of_the_bounds(alpha: float, d: int) -> None:
    sure = theory.average_case_lower_bits(alpha, d)
    slack = 1e-12 * sure
    assert theory.sphere_rate_bits(alpha, d) <= sure + slack  # a sure error bound costs at least as much as a mean one
    assert theory.worst_case_lower_bits(alpha, d) == sure
    assert theory.worst_case_refined_bits(alpha, d) >= sure
    assert theory.worst_case_upper_bits(alpha, d) >= theory.worst_case_refined_bits(alpha, d)
    exact = theory.spherical_expected_bits(alpha, d)
    assert sure - slack <= exact <= theory.average_case_upper_bits(alpha, d) + slack + 1e-9


def test_uncertainty_principle() -> None:
    assert theory.uncertainty_bits(0.1, 1000) == pytest.approx(500 * math.log2(10))
    omega = 0.37
    assert theory.uncertainty_bits_unbiased(omega, 64) == pytest.approx(
        theory.uncertainty_bits(theory.alpha_from_omega(omega), 64), rel=1e-14
    )
    bits = np.array([0.5, 1.0, 3.2])
    np.testing.assert_allclose(theory.uncertainty_bits(theory.smallest_alpha(bits), 1), bits)
    np.testing.assert_allclose(theory.uncertainty_bits_unbiased(theory.smallest_omega(bits), 1), bits)
    assert theory.uncertainty_bits_unbiased(1e12, 2) == pytest.approx(1e-12 / math.log(2), rel=1e-9)


def test_arrays_broadcast_and_agree_with_numbers() -> None:
    alpha = np.array([[0.1], [0.5], [0.97]])
    d = np.array([2, 30, 1000, 10**7])
    table = theory.neg_log2_cap(alpha, d)
    assert table.shape == (3, 4)
    assert table.dtype == np.float64
    for i, a in enumerate(alpha.ravel()):
        for j, n in enumerate(d):
            scalar = theory.neg_log2_cap(float(a), int(n))
            assert type(scalar) is float
            assert table[i, j] == scalar
    assert theory.neg_log2_cap([], 3.0).shape == (0,)
    assert theory.neg_log2_cap(alpha=0.1, d=10) == theory.neg_log2_cap(0.1, 10)


@pytest.mark.parametrize(
    "function", [theory.neg_log2_cap, theory.cap_probability, theory.uncertainty_bits, theory.sphere_rate_bits]
)
@pytest.mark.parametrize(("alpha", "d"), [(0, 10), (1, 10), (-0.1, 10), (1.5, 10), (math.nan, 10), (0.5, 0), (0.5, math.inf)])
def test_bad_arguments(function: theory.arguments.Elementwise, alpha: float, d: float) -> None:
    with pytest.raises(BadConfiguration, match="must"):
        function(alpha, d)
    with pytest.raises(BadConfiguration, match="must"):
        function(np.array([0.5, alpha]), np.array([4.0, d]))


def test_messages_name_the_argument_and_the_value() -> None:
    with pytest.raises(BadConfiguration, match=r"alpha must lie strictly between 0 and 1, got 1\.5"):
        theory.neg_log2_cap(1.5, 10)
    with pytest.raises(BadConfiguration, match="got -3"):
        theory.uncertainty_bits(0.5, np.array([1, 2, -3]))
    with pytest.raises(BadConfiguration, match="uncertainty_bits"):
        theory.uncertainty_bits(np.full(3, 0.5), np.arange(1, 5))
    with pytest.raises(BadConfiguration, match="by position"):
        theory.alpha_from_omega("much")

"""Code lengths against brute-force sums and independent optimisation; sparse dithering and spherical compression tables."""

import itertools
import math
from collections.abc import Callable

import mpmath  # type: ignore[import-untyped]
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tersegrad import theory
from tersegrad.core.errors import BadConfiguration


def elias_omega(n: int) -> str:
    code = "0"
    while n > 1:
        code = f"{n:b}" + code
        n = n.bit_length() - 1
    return code


@given(st.integers(1, 2**63 - 1))
def test_elias_lengths(n: int) -> None:
    size = n.bit_length()
    assert theory.elias_gamma_bits(n) == 2 * size - 1
    assert theory.elias_delta_bits(n) == size - 1 + 2 * size.bit_length() - 1
    assert theory.elias_omega_bits(n) == len(elias_omega(n))


def test_elias_lengths_of_arrays() -> None:
    n = np.arange(1, 300).reshape(-1, 13)
    for function in (theory.elias_gamma_bits, theory.elias_delta_bits, theory.elias_omega_bits):
        lengths = function(n)
        assert lengths.shape == n.shape
        assert lengths.ravel().tolist() == [function(int(v)) for v in n.ravel()]
        assert np.exp2(-function(np.arange(1, 100_000)).astype(float)).sum() <= 1  # Kraft
        with pytest.raises(BadConfiguration, match="at least 1"):
            function(np.array([3, 0]))
        with pytest.raises(BadConfiguration, match="integers"):
            function(np.array([1.5]))


@pytest.mark.parametrize("p", [1.0, 0.9, 0.5, 0.3, 0.1, 0.011, 0.001])
def test_expected_lengths_of_geometric_numbers(p: float) -> None:
    n = np.arange(int(45 / p) + 2)
    law = p * (1 - p) ** n
    for code, bits in (
        ("gamma", theory.elias_gamma_bits),
        ("delta", theory.elias_delta_bits),
        ("omega", theory.elias_omega_bits),
    ):
        assert theory.elias_expected_bits(p, code=code) == pytest.approx(float(law @ bits(n + 1)), rel=1e-9)
    for m in range(12):
        assert theory.rice_expected_bits(p, m) == pytest.approx(float(law @ theory.rice_bits(n, m)), rel=1e-9)
    for divisor in (1, 2, 3, 5, 8, 69):
        assert theory.golomb_expected_bits(p, divisor) == pytest.approx(float(law @ theory.golomb_bits(n, divisor)), rel=1e-9)
    entropy = float(-(law[law > 0] @ np.log2(law[law > 0])))
    assert theory.geometric_entropy(p) == pytest.approx(entropy, abs=1e-9)


@settings(max_examples=150, deadline=None)
@given(st.floats(1e-4, 0.999))
def test_best_parameters(p: float) -> None:
    parameters = np.arange(16)
    rice = theory.rice_expected_bits(p, parameters)
    assert theory.rice_expected_bits(p, theory.rice_parameter(p)) == pytest.approx(rice.min(), rel=1e-12)
    best = theory.golomb_divisor(p)
    golomb = theory.golomb_expected_bits(p, np.arange(max(1, best - 20), best + 20))
    assert theory.golomb_expected_bits(p, best) == pytest.approx(golomb.min(), rel=1e-12)
    assert theory.geometric_entropy(p) <= golomb.min() + 1e-9
    assert golomb.min() <= rice.min() + 1e-9


def test_rice_excess() -> None:
    p = np.exp2(-np.linspace(0.001, 20, 20001))
    excess = theory.rice_expected_bits(p, theory.rice_parameter(p)) + np.log2(p)
    assert excess.max() <= theory.RICE_EXCESS
    assert excess.max() == pytest.approx(theory.RICE_EXCESS, abs=1e-3)
    assert pytest.approx(1.563, abs=5e-4) == theory.RICE_EXCESS
    assert theory.geometric_entropy(1e-9) + math.log2(1e-9) == pytest.approx(math.log2(math.e), abs=1e-6)


def test_log2_binomial_of_small_sets() -> None:
    for d in range(0, 130, 3):
        exact = [math.log2(math.comb(d, k)) for k in range(d + 1)]
        np.testing.assert_allclose(theory.log2_binomial(d, np.arange(d + 1)), exact, rtol=2e-15, atol=3e-14)


@pytest.mark.parametrize(("d", "k"), [(10**9, 3), (10**9, 10**6), (10**12, 10**11), (2**20, 15), (2**20, 16), (2**40, 2**39)])
def test_log2_binomial_of_large_sets(d: int, k: int) -> None:
    with mpmath.workdps(50):
        exact = (mpmath.loggamma(d + 1) - mpmath.loggamma(k + 1) - mpmath.loggamma(d - k + 1)) / mpmath.log(2)
        assert theory.log2_binomial(d, k) == pytest.approx(float(exact), rel=1e-15)
        assert theory.log2_binomial(d, d - k) == theory.log2_binomial(d, k)
        assert theory.index_bits(d, k) == pytest.approx(float(exact / k), rel=1e-15)


@given(st.integers(1, 10**6), st.data())
def test_log2_binomial_lies_below_the_entropy(d: int, data: st.DataObject) -> None:
    k = data.draw(st.integers(0, d))
    assert theory.log2_binomial(d, k) <= d * theory.binary_entropy(k / d) + 1e-9
    if 0 < k < d:  # the step that turns 31 header bits into 30
        assert theory.log2_binomial(d, k) <= d * theory.binary_entropy(k / d) - 1 + 1e-9


def test_binary_entropy() -> None:
    np.testing.assert_allclose(theory.binary_entropy([0, 0.5, 1, 0.25]), [0, 1, 0, 2 - 0.75 * math.log2(3)])


BETA = {
    1: (2.3755, 2.3479, 1.8205),
    0.5: (2.5595, 2.4731, 2.1456),
    0.25: (2.8219, 2.7230, 2.5024),
    0.1: (3.3494, 3.3072, 3.0182),
    0.03: (4.5631, 4.5219, 3.7580),
    0.01: (6.5875, 6.5642, 4.4778),
}


@pytest.mark.parametrize("nu", list(BETA))
def test_beta_table(nu: float) -> None:
    bound, worst, ideal = BETA[nu]
    assert theory.beta_det(nu) == pytest.approx(bound, abs=5.1e-5)
    # the listed worst cases come from a minimum over a grid, which cannot lie below the true minimum
    assert worst - 4e-4 < theory.beta_star(nu) < worst + 5e-5
    assert theory.beta_ideal(nu) == pytest.approx(ideal, abs=5.1e-5)


@pytest.mark.parametrize("nu", [1, 0.5, 0.25, 0.1, 0.03])
def test_beta_star_is_attained(nu: float) -> None:
    """The primal problem: share of zeros and a mixture of two levels that uses up the budget sum (2k-1)^2 = d/nu."""
    tau = np.linspace(1e-6, 1 - 1e-6, 400_001)
    budget = 1 / (nu * (1 - tau))  # mean of (2k-1)^2 over the non-zeros
    squares = (2.0 * np.arange(1, 4000) - 1) ** 2
    mean_level = np.interp(budget, squares, np.arange(1.0, 4000.0))  # concave, so neighbouring levels are the best mixture
    feasible = budget >= 1
    bits = theory.binary_entropy(tau) + (1 - tau) * (1 + mean_level)
    assert bits[feasible].max() == pytest.approx(theory.beta_star(nu), abs=1e-7)


@pytest.mark.parametrize("nu", [2.0, 0.5, 0.1])
def test_beta_ideal_is_a_maximum_entropy(nu: float) -> None:
    k = np.arange(1, 200)
    squares = (2.0 * k - 1) ** 2
    low, high = 1e-6, 50.0
    for _ in range(200):
        t = math.sqrt(low * high)
        weights = 2 * np.exp(-t * squares)
        mean = float((weights * squares).sum() / (1 + weights.sum()))
        low, high = (t, high) if mean > 1 / nu else (low, t)
    total = 1 + weights.sum()
    p = weights / 2 / total
    entropy = -float(2 * (p[p > 0] @ np.log2(p[p > 0])) - math.log2(total) / total)
    assert theory.beta_ideal(nu) == pytest.approx(entropy, abs=1e-9)


@settings(max_examples=60, deadline=None)
@given(st.floats(1e-6, 100), st.floats(1.01, 4))
def test_beta_order_and_monotonicity(nu: float, factor: float) -> None:
    assert theory.beta_ideal(nu) <= theory.beta_star(nu) + 1e-12 <= theory.beta_det(nu) + 2e-12
    for beta in (theory.beta_det, theory.beta_star, theory.beta_ideal):
        assert beta(nu * factor) < beta(nu)
    if nu < 1:
        assert theory.beta_ideal(nu) >= theory.gaussian_rate(nu)


def test_where_vectors_without_zeros_obey_the_bound() -> None:
    """Without zeros the code takes 31 + log2 d + (3/2 + 1/(2 sqrt nu)) d bits, which lies below the bound from this d on."""
    nu = np.array([1, 0.25, 0.1, 0.03, 0.01])
    surplus = theory.beta_det(nu) - (1.5 + 0.5 / np.sqrt(nu))
    assert np.ceil(1 / surplus).tolist() == [3, 4, 4, 6, 12]


def nearest_levels(x: np.ndarray, nu: float) -> np.ndarray:
    step = 2 * math.sqrt(nu / x.size) * np.linalg.norm(x)
    return np.asarray(np.sign(x) * np.floor(np.abs(x) / step + 0.5), dtype=np.int64)


def test_paper_code_is_a_prefix_code_length() -> None:
    # all level vectors with entries in -2..2: the lengths without scale satisfy Kraft's inequality
    total = sum(
        2.0 ** -(theory.paper_code_bits(levels) - 31) for levels in itertools.product(range(-2, 3), repeat=4) if any(levels)
    )
    assert total <= 1


def test_paper_code_on_random_vectors() -> None:
    rng = np.random.default_rng(0)
    d = 1_000_000
    for x, expected in ((rng.standard_normal(d), 2.8002), (rng.laplace(size=d), 2.6640)):
        bits = theory.paper_code_bits(nearest_levels(x, 0.1), header=False) / d
        assert bits == pytest.approx(expected, abs=0.005)
        assert bits < theory.beta_star(0.1)


def test_paper_code_on_the_worst_vector() -> None:
    nu, d = 0.1, 1_000_000
    tau = 1 / (1 + 2**2.4375)
    fives = (10 / (1 - tau) - 9) / 16
    half = math.sqrt(nu / d)
    nonzeros = round((1 - tau) * d)
    x = np.zeros(d)
    x[:nonzeros] = 3 * half * (1 + 1e-9)
    x[: round(fives * nonzeros)] = 5 * half * (1 + 1e-9)
    assert np.linalg.norm(x) == pytest.approx(1, abs=1e-5)
    levels = np.where(x == 0, 0, np.where(x > 4 * half, 3, 2))
    bits = theory.paper_code_bits(levels, header=False) / d
    assert bits == pytest.approx(3.3069, abs=5e-5)
    assert bits <= theory.beta_star(nu) + 1e-6
    error = float(((x - 2 * half * levels) ** 2).sum())
    assert 0.08 < error <= nu


def test_paper_code_on_the_constant_vector() -> None:
    d, omega = 200_000, 9 / 16
    rng = np.random.default_rng(5)
    runs = []
    for _ in range(12):
        levels = np.floor(1 / (2 * math.sqrt(omega)) + rng.random(d)).astype(np.int64)
        runs.append(theory.paper_code_bits(levels, header=False) / d)
    assert float(np.mean(runs)) == pytest.approx(2.2516, abs=1e-3)
    assert theory.randomised_dithering_bits(omega) == pytest.approx(2.25163, abs=5e-6)


def test_paper_code_on_one_coordinate() -> None:
    d, nu = 4096, 0.1
    x = np.zeros(d)
    x[7] = 1.0
    levels = nearest_levels(x, nu)
    k = round(math.sqrt(d) / (2 * math.sqrt(nu)))
    assert levels[7] == k
    assert theory.paper_code_bits(levels, header=False) == pytest.approx(math.log2(d) + 1 + k)
    assert theory.paper_code_bits(levels) == pytest.approx(31 + 2 * math.log2(d) + 1 + k)
    assert theory.paper_code_bits(np.zeros(5, dtype=np.int8)) == 31
    for bad in (np.zeros((2, 2), dtype=np.int64), np.zeros(0, dtype=np.int64), np.ones(3)):
        with pytest.raises(BadConfiguration, match="levels"):
            theory.paper_code_bits(bad)


@pytest.mark.parametrize(
    ("d", "alpha", "cap", "excess", "c", "omega"),
    [
        (4, 0.5, 3.460, 1.415, 0.5840, 0.466),
        (8, 0.5, 5.915, 1.499, 0.5488, 0.660),
        (8, 0.25, 9.623, 1.470, 0.7764, 0.244),
        (10, 0.2, 13.270, 1.504, 0.8176, 0.197),
        (6, 0.1, 10.809, 1.490, 0.9140, 0.077),
        (14, 0.25, 16.027, 1.551, 0.7661, 0.278),
    ],
)
def test_spherical_table(d: int, alpha: float, cap: float, excess: float, c: float, omega: float) -> None:
    assert theory.neg_log2_cap(alpha, d) == pytest.approx(cap, abs=5.1e-4)
    assert theory.spherical_expected_bits(alpha, d) - theory.neg_log2_cap(alpha, d) == pytest.approx(excess, abs=5.1e-4)
    assert theory.spherical_constant(alpha, d) == pytest.approx(c, abs=5.1e-5)
    assert theory.spherical_omega(alpha, d) == pytest.approx(omega, abs=5.1e-4)


BLOCK_RATES = {
    4: (1.219, 1.661, 2.174),
    8: (0.927, 1.387, 1.980),
    12: (0.809, 1.286, 1.900),
    16: (0.741, 1.229, 1.855),
    32: (0.636, 1.128, 1.773),
}
MEAN_ERRORS = {8: (0.4025, 0.1971, 0.0782), 16: (0.4460, 0.2215, 0.0884), 32: (0.4712, 0.2351, 0.0940)}
DRAWS = {4: (3.5, 5.1, 7.2), 8: (5.9, 9.6, 14.3), 12: (8.2, 13.9, 21.3), 16: (10.4, 18.1, 28.2), 32: (18.9, 34.6, 55.2)}


def test_spherical_blocks() -> None:
    alpha = np.array([0.5, 0.25, 0.1])
    for m, row in BLOCK_RATES.items():
        np.testing.assert_allclose(theory.spherical_expected_bits(alpha, m) / m, row, rtol=0, atol=5.1e-4)
        np.testing.assert_allclose(-np.log2(theory.cap_probability(alpha, m)), DRAWS[m], rtol=0, atol=0.0501)
    for m, row in MEAN_ERRORS.items():
        np.testing.assert_allclose(theory.spherical_mean_error(alpha, m), row, rtol=0, atol=5.1e-5)


def test_spherical_constant_against_its_definition() -> None:
    for alpha, d in ((0.5, 8), (0.05, 3), (0.97, 40), (0.999, 5), (0.3, 400)):
        with mpmath.workdps(30):
            x, a = mpmath.mpf(alpha), mpmath.mpf(d - 1) / 2
            p = mpmath.betainc(a, mpmath.mpf(1) / 2, 0, x, regularized=True) / 2
            c = mpmath.sqrt(1 - x) * x**a / ((d - 1) * p * mpmath.beta(a, mpmath.mpf(1) / 2))
            assert theory.spherical_constant(alpha, d) == pytest.approx(float(c), rel=1e-12)


@settings(max_examples=200, deadline=None)
@given(st.floats(1e-4, 0.9999), st.integers(1, 10**6))
def test_spherical_relations(alpha: float, d: int) -> None:
    c = theory.spherical_constant(alpha, d)
    assert (1 - alpha) * (1 - 1e-9) <= c <= 1
    omega = theory.spherical_omega(alpha, d)
    assert omega == pytest.approx((1 - alpha) / c**2 - 1, abs=1e-8 * (1 + omega))
    assert omega <= alpha / (1 - alpha) * (1 + 1e-9)
    assert theory.spherical_mean_error(alpha, d) <= alpha * (1 + 1e-9)
    probability = theory.cap_probability(alpha, d)
    if probability > 1e-300:
        best = theory.rice_expected_bits(probability, theory.spherical_rice_parameter(alpha, d))
        assert theory.spherical_expected_bits(alpha, d) == pytest.approx(best, rel=1e-11)


def test_spherical_monte_carlo() -> None:
    rng = np.random.default_rng(3)
    alpha, d = 0.5, 4
    points = rng.standard_normal((400_000, d))
    points *= math.sqrt(1 - alpha) / np.linalg.norm(points, axis=1, keepdims=True)
    accepted = points[points[:, 0] >= 1 - alpha]
    spread = float(accepted[:, 0].std()) / math.sqrt(len(accepted))
    assert float(accepted[:, 0].mean()) == pytest.approx(theory.spherical_constant(alpha, d), abs=5 * spread)
    error = ((accepted - np.eye(d)[0]) ** 2).sum(axis=1)
    assert error.max() <= alpha + 1e-12
    assert float(error.mean()) == pytest.approx(theory.spherical_mean_error(alpha, d), abs=10 * spread)


def test_unbiased_spherical_is_near_its_limit() -> None:
    alpha, d = 0.25, 200
    omega = theory.spherical_omega(alpha, d)
    distance = theory.spherical_expected_bits(alpha, d) - theory.uncertainty_bits_unbiased(omega, d)
    assert 0 < distance < 0.5 * math.log2(2 * math.pi * d * alpha * (1 - alpha)) + theory.RICE_EXCESS


def test_qsgd_nonzeros() -> None:
    levels, bucket = np.array([2, 4, 8]), np.array([128, 512, 512])
    np.testing.assert_allclose(1 / theory.qsgd_nonzero_fraction(levels, bucket), [7.1, 7.1, 3.5], rtol=0, atol=0.06)
    np.testing.assert_allclose(
        1 / theory.qsgd_nonzero_fraction(levels, bucket, source="laplace"), [8, 8, 4.1], rtol=0, atol=0.06
    )
    rng = np.random.default_rng(2)
    x = rng.standard_normal((2000, 512))
    u = np.abs(x) / np.linalg.norm(x, axis=1, keepdims=True)
    expected = np.minimum(1, 8 * u).sum(axis=1)
    assert expected.mean() / 512 == pytest.approx(theory.qsgd_nonzero_fraction(8, 512), rel=3e-3)
    assert np.all(expected <= theory.qsgd_nonzero_bound(8, 512))
    with pytest.raises(BadConfiguration, match="source"):
        theory.qsgd_nonzero_fraction(8, 512, source="cauchy")


def test_ternary_nonzeros() -> None:
    assert theory.ternary_nonzeros([0.0, -2.0, 1.0]) == 1.5
    assert theory.ternary_nonzeros(np.zeros(4)) == 0.0
    with pytest.raises(BadConfiguration, match="finite"):
        theory.ternary_nonzeros([1.0, math.inf])


def test_bad_arguments() -> None:
    calls: list[Callable[[], object]] = [
        lambda: theory.rice_expected_bits(0.0, 3),
        lambda: theory.rice_expected_bits(0.5, 1.5),
        lambda: theory.rice_bits(-1, 2),
        lambda: theory.rice_bits(1, 64),
        lambda: theory.golomb_bits(1, 0),
        lambda: theory.elias_expected_bits(0.5, code="zeta"),
        lambda: theory.log2_binomial(3, 4),
        lambda: theory.log2_binomial(3, 0.5),
        lambda: theory.index_bits(3, 0),
        lambda: theory.binary_entropy(1.1),
        lambda: theory.beta_star(0.0),
        lambda: theory.beta_ideal(math.inf),
        lambda: theory.spherical_omega(0.0, 3),
    ]
    for call in calls:
        with pytest.raises(BadConfiguration, match="must"):
            call()

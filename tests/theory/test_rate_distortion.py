"""Rate-distortion functions: closed forms, an independent Blahut-Arimoto run, and the gap."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tersegrad import theory
from tersegrad.core.errors import BadConfiguration


def test_gaussian() -> None:
    bits = np.linspace(0.01, 8, 50)
    np.testing.assert_allclose(theory.gaussian_rate(theory.gaussian_distortion(bits)), bits, rtol=1e-12)
    np.testing.assert_allclose(theory.gaussian_rate_unbiased(theory.gaussian_distortion_unbiased(bits)), bits, rtol=1e-12)
    assert theory.gaussian_rate(2.0) == 0.0
    omega = np.array([0.01, 1.0, 30.0])
    np.testing.assert_allclose(
        theory.gaussian_rate_unbiased(omega), theory.gaussian_rate(theory.alpha_from_omega(omega)), rtol=1e-12
    )


def blahut_arimoto(slope: float, cells: int = 801, reach: float = 12.0, rounds: int = 500) -> tuple[float, float, float]:
    """(distortion, rate, how far above the true rate it can be) of a finely discretised Laplace source at one slope."""
    x = np.linspace(-reach, reach, cells)
    width = x[1] - x[0]
    edges = np.concatenate([x - width / 2, [x[-1] + width / 2]])
    tail = np.where(edges < 0, 0.5 * np.exp(-math.sqrt(2) * np.abs(edges)), 1 - 0.5 * np.exp(-math.sqrt(2) * np.abs(edges)))
    p = np.diff(tail) / np.diff(tail).sum()
    y = x[::2]
    kernel = np.exp(-slope * (x[:, None] - y) ** 2)
    q = np.full(y.size, 1 / y.size)
    for _ in range(rounds):
        factor = (p / (kernel @ q)) @ kernel
        q = q * factor
    joint = p[:, None] * kernel * q / (kernel @ q)[:, None]
    distortion = float((joint * (x[:, None] - y) ** 2).sum())
    rate = -slope * distortion / math.log(2) - float(p @ np.log2(kernel @ q))
    factor = (p / (kernel @ q)) @ kernel
    return distortion, rate, math.log2(float(factor.max()))


@pytest.mark.parametrize("slope", [0.5, 1.5, 4.0])
def test_laplace_against_blahut_arimoto(slope: float) -> None:
    distortion, rate, slack = blahut_arimoto(slope)
    # the reference lies above the true rate by at most `slack`, apart from its grid (a few 1e-4)
    assert rate - slack - 1e-3 <= theory.laplace_rate(distortion) <= rate + 1e-3
    assert theory.laplace_rate(distortion) == pytest.approx(rate, abs=1.5e-3)


def test_laplace_lies_between_its_bounds() -> None:
    alpha = np.concatenate([np.geomspace(1e-6, 0.5, 40), np.linspace(0.52, 1, 40)])
    rate = theory.laplace_rate(alpha)
    assert np.all(rate >= theory.laplace_shannon_bound(alpha) - 1e-12)
    assert np.all(rate <= theory.gaussian_rate(alpha) + 1e-12)  # no source of the same variance is harder than a Gaussian
    assert np.all(np.diff(rate) < 0)
    slopes = np.diff(rate) / np.diff(alpha)
    assert np.all(np.diff(slopes) > -1e-3 * np.abs(slopes[1:]))  # convex, to the accuracy of the table
    assert theory.laplace_rate(1.0) == 0.0
    assert theory.laplace_rate(3.0) == 0.0


def test_laplace_lies_below_scalar_quantisers() -> None:
    for alpha in (0.6, 0.25, 0.03):
        entropy = theory.quantise_to_error(theory.laplace(), alpha).entropy
        assert 0 < entropy - theory.laplace_rate(alpha) < 0.26


def test_laplace_small_error_is_shannons_bound() -> None:
    assert theory.laplace_rate(1e-4) == pytest.approx(0.5 * math.log2(math.e / (math.pi * 1e-4)), abs=1e-6)
    # no visible seam where the table ends
    assert theory.laplace_rate(0.0016 * (1 - 1e-9)) == pytest.approx(theory.laplace_rate(0.0016 * (1 + 1e-9)), abs=1e-5)


@settings(max_examples=20, deadline=None)
@given(st.floats(0.02, 12))
def test_laplace_inverse(bits: float) -> None:
    assert theory.laplace_rate(theory.laplace_distortion(bits)) == pytest.approx(bits, abs=2e-5)


def test_gap() -> None:
    assert theory.gap(32.0, 1.0) == 32.0
    assert theory.gap(2.0, 5.0) == 2.0  # worse than sending nothing: the limit is 0 bits
    assert theory.gap(2.0, 5.0, unbiased=True) == pytest.approx(2 - 0.5 * math.log2(6 / 5))
    assert theory.gap(32.0, 0.0) == -math.inf
    assert theory.gap(32.0, 0.0, unbiased=True) == -math.inf
    table = theory.gap(np.array([1.0, 2.0]), np.array([[0.25], [0.0625]]))
    np.testing.assert_allclose(table, [[0, 1], [-1, 0]], atol=1e-12)
    for bad in ((-1.0, 0.5), (1.0, -0.5), (1.0, math.nan)):
        with pytest.raises(BadConfiguration, match="must"):
            theory.gap(*bad)


@given(st.floats(0, 40), st.floats(1e-12, 1e6))
def test_gap_of_both_kinds(bits: float, error: float) -> None:
    # an unbiased compressor of variance omega has the stricter limit at the same number
    assert theory.gap(bits, error, unbiased=True) <= theory.gap(bits, error) + 1e-12


def test_high_rate_gap() -> None:
    kappa = np.array([0.26502, 0.25962, 0.25600, 0.25218, 0.24964, 0.24698, 0.24516, 0.23420])
    expected = [0.0892, 0.0743, 0.0642, 0.0534, 0.0461, 0.0383, 0.0330, 0]
    np.testing.assert_allclose(theory.high_rate_gap(kappa / 4), expected, rtol=0, atol=6e-5)
    fine = theory.quantise(theory.gaussian(), 0.01)
    assert theory.gap(fine.entropy, fine.distortion) == pytest.approx(theory.high_rate_gap(1 / 12), abs=1e-4)
    with pytest.raises(BadConfiguration, match="second_moment"):
        theory.high_rate_gap(0.05)


def test_limits_at_measured_errors() -> None:
    """Rows of measurements: error, limit at that error."""
    contractive = {0.33004: 0.7996, 0.16646: 1.2934, 0.08329: 1.7928, 0.03327: 2.4548, 0.00999: 3.3228, 0.00333: 4.1149}
    unbiased = {0.66317: 0.6632, 0.33345: 0.9998, 0.16697: 1.4026, 0.06664: 2.0003, 0.02000: 2.8363, 0.00667: 3.6185}
    np.testing.assert_allclose(theory.gaussian_rate(list(contractive)), list(contractive.values()), rtol=0, atol=1e-3)
    np.testing.assert_allclose(theory.gaussian_rate_unbiased(list(unbiased)), list(unbiased.values()), rtol=0, atol=1e-3)
    np.testing.assert_allclose(
        theory.gaussian_rate_unbiased([1, 0.5, 0.25, 0.1, 0.03, 0.01]),
        [0.5, 0.7925, 1.1610, 1.7297, 2.5508, 3.3291],
        atol=5.1e-5,
    )

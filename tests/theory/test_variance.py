"""The two forms of the variance criterion decide alike; the predicted speed-ups."""

import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tersegrad import theory
from tersegrad.core.errors import BadConfiguration


@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("alpha_prime", [0.5, 1.0, 2.0, 7.0])
def test_both_forms_decide_alike(biased: bool, alpha_prime: float) -> None:
    rng = np.random.default_rng(0)
    batch = 16
    g = rng.standard_normal((20_000, batch)) + rng.standard_normal((20_000, 1)) * 0.5
    mean = g.mean(axis=1)
    by_variance = alpha_prime / batch * g.var(axis=1, ddof=0 if biased else 1) < mean**2
    by_moments = mean**2 > theory.alpha_from_prime(alpha_prime, batch, biased=biased) * ((g / batch) ** 2).sum(axis=1)
    assert 0.05 < by_variance.mean() < 0.95
    assert np.array_equal(by_variance, by_moments)


@given(st.floats(1e-3, 1e3), st.integers(2, 10**5), st.booleans())
def test_inverse_and_limit(alpha_prime: float, batch: int, biased: bool) -> None:
    alpha = theory.alpha_from_prime(alpha_prime, batch, biased=biased)
    assert alpha < theory.largest_alpha(batch)
    assert theory.prime_from_alpha(alpha, batch, biased=biased) == pytest.approx(alpha_prime, rel=1e-6)
    assert theory.alpha_from_prime(alpha_prime * 1.1, batch, biased=biased) > alpha


def test_one_standard_error_is_one_for_the_unbiased_variance() -> None:
    np.testing.assert_allclose(theory.alpha_from_prime(1.0, np.array([2, 8, 64]), biased=False), 1.0)


SPEEDUPS = {
    2: (2.0, 50.0, 191.8, 456.7, 6411.2),
    4: (2.7, 37.5, 143.9, 342.5, 4808.4),
    8: (4.6, 21.9, 83.9, 199.8, 2804.9),
    16: (8.5, 11.7, 45.0, 107.0, 1502.6),
    32: (16.5, 6.1, 23.2, 55.3, 776.4),
    64: (32.5, 3.1, 11.8, 28.1, 394.4),
    128: (64.5, 1.6, 5.9, 14.2, 198.8),
    256: (128.5, 0.8, 3.0, 7.1, 99.8),
}


def test_speedup_table() -> None:
    workers = np.array(list(SPEEDUPS))[:, None]
    # half a unit of the last digit shown; the largest ratio itself was rounded (12822.4), which shows in the last column
    np.testing.assert_allclose(
        theory.break_even_ratio(workers[:, 0]), [row[0] for row in SPEEDUPS.values()], rtol=0, atol=0.051
    )
    table = theory.all_gather_speedup(workers, np.array([100, 383.6, 913.4, 12822.4]))
    np.testing.assert_allclose(table, [row[1:] for row in SPEEDUPS.values()], rtol=1e-6, atol=0.051)
    np.testing.assert_allclose(theory.all_gather_speedup(workers, theory.break_even_ratio(workers)), 1.0)


def test_bad_arguments() -> None:
    calls: list[Callable[[], object]] = [
        lambda: theory.alpha_from_prime(0.0, 8),
        lambda: theory.alpha_from_prime(1.0, 1, biased=False),
        lambda: theory.alpha_from_prime(1.0, 2.5),
        lambda: theory.prime_from_alpha(8.0, 8),
        lambda: theory.break_even_ratio(1),
        lambda: theory.all_gather_speedup(4, -1.0),
        lambda: theory.largest_alpha(math.nan),
    ]
    for call in calls:
        with pytest.raises(BadConfiguration, match="must"):
            call()

"""The classes, their costs, and the worst cases of well-known compressors, found again by brute force."""

import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tersegrad import theory
from tersegrad.core.errors import BadConfiguration


@given(st.floats(1e-9, 1e6))
def test_unbiased_to_contractive_and_back(omega: float) -> None:
    alpha = theory.alpha_from_omega(omega)
    assert 0 < alpha < 1
    assert theory.shrinkage(omega) == pytest.approx(1 - alpha, rel=1e-6)
    assert theory.omega_from_alpha(alpha) == pytest.approx(omega, rel=1e-8)
    assert theory.iteration_factor_unbiased(omega) == pytest.approx(theory.iteration_factor_contractive(alpha), rel=1e-8)


def test_shrinking_an_unbiased_compressor() -> None:
    # random-k on one vector, every subset enumerated: error of C/(1+omega) is omega/(1+omega)
    x = np.array([3.0, -1.0, 2.0, 0.5])
    omega = theory.random_k_omega(1, 4)
    assert omega == 3.0
    outputs = np.diag(x) * 4
    assert np.allclose(outputs.mean(axis=0), x)
    norm = float((x**2).sum())
    assert float(((outputs - x) ** 2).sum(axis=1).mean()) == pytest.approx(omega * norm)
    shrunk = outputs * theory.shrinkage(omega)
    assert float(((shrunk - x) ** 2).sum(axis=1).mean()) == pytest.approx(theory.alpha_from_omega(omega) * norm)


def test_step_sizes_and_merits() -> None:
    assert theory.step_size_contractive(4.0, 0.3) == 0.25
    assert theory.step_size_unbiased(4.0, 0.25) == pytest.approx(0.2)
    assert theory.merit_contractive(3.0, 0.25) == 4.0
    assert theory.merit_unbiased(2.0, 0.25) == 2.5


def test_published_ratios_of_sparse_dithering() -> None:
    grid = np.linspace(0.05, 0.5, 4501)
    randomised = 32 / theory.merit_unbiased(theory.randomised_dithering_bits(grid), grid)
    deterministic = 32 / theory.merit_contractive(theory.beta_det(grid), grid)
    assert np.interp(0.25, grid, randomised) == pytest.approx(9.903, abs=5e-4)
    assert np.interp(0.1, grid, deterministic) == pytest.approx(8.60, abs=5e-3)
    assert grid[int(np.argmax(randomised))] == pytest.approx(0.242, abs=1e-3)
    assert grid[int(np.argmax(deterministic))] == pytest.approx(0.158, abs=1e-3)
    assert deterministic.max() == pytest.approx(8.82, abs=5e-3)


def test_top_k_and_sign_worst_cases() -> None:
    rng = np.random.default_rng(1)
    for _ in range(200):
        x = rng.standard_normal(8) * np.exp(rng.standard_normal(8))
        kept = np.sort(x**2)[-3:].sum() / (x**2).sum()
        assert 1 - kept <= theory.top_k_alpha(3, 8)
        assert 1 - np.abs(x).sum() ** 2 / (8 * (x**2).sum()) <= theory.scaled_sign_alpha(8)
    assert theory.top_k_alpha(2, 8) == 0.75


@pytest.mark.parametrize("d", [1, 2, 5, 100])
def test_ternary_worst_case(d: int) -> None:
    worst = np.full(d, 1 / (1 + math.sqrt(d)))
    worst[0] = 1.0

    def variance(x: np.ndarray) -> float:
        return float(np.abs(x).sum() * np.abs(x).max() / (x**2).sum() - 1)

    assert variance(worst) == pytest.approx(theory.ternary_omega(d), abs=1e-12)
    rng = np.random.default_rng(d)
    for _ in range(300):
        assert variance(rng.standard_normal(d) ** 3) <= theory.ternary_omega(d) + 1e-12


def stochastic_variance(x: np.ndarray, levels: np.ndarray) -> float:
    """Exact relative variance of unbiased rounding of |x|/||x|| to the two neighbouring levels."""
    u = np.abs(x) / np.linalg.norm(x)
    upper = np.clip(np.searchsorted(levels, u, side="left"), 1, levels.size - 1)
    low, high = levels[upper - 1], levels[upper]
    return float(((u - low) * (high - u)).sum())


@pytest.mark.parametrize("levels", [1, 2, 4, 8])
@pytest.mark.parametrize("d", [2, 16, 300])
def test_qsgd_and_natural_dithering_bounds(levels: int, d: int) -> None:
    rng = np.random.default_rng(d)
    uniform = np.arange(levels + 1) / levels
    powers = np.concatenate([[0.0], np.exp2(np.arange(1 - levels, 1))])
    for scale in (0.1, 1.0, 3.0):
        for _ in range(50):
            x = rng.standard_normal(d) * np.exp(scale * rng.standard_normal(d))
            assert stochastic_variance(x, uniform) <= theory.qsgd_omega(levels, d)
            assert stochastic_variance(x, powers) <= theory.natural_dithering_omega(levels, d)
    assert theory.natural_dithering_omega(200, d) == pytest.approx(0.125)


def test_bad_arguments() -> None:
    calls: list[Callable[[], object]] = [
        lambda: theory.alpha_from_omega(-1.0),
        lambda: theory.omega_from_alpha(1.0),
        lambda: theory.merit_contractive(-1.0, 0.5),
        lambda: theory.merit_contractive(1.0, 1.0),
        lambda: theory.step_size_unbiased(0.0, 0.5),
        lambda: theory.top_k_alpha(9, 8),
        lambda: theory.random_k_omega(0, 8),
        lambda: theory.qsgd_omega(1.5, 8),
    ]
    for call in calls:
        with pytest.raises(BadConfiguration, match="must"):
            call()

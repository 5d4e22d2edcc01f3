"""Quantised sources against independent integration, against measured tables, and in their limits."""

import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from tersegrad import theory
from tersegrad.core.errors import BadConfiguration
from tersegrad.theory.sources import Rounding

SOURCES = {"gauss": theory.gaussian(), "laplace": theory.laplace(), "t3": theory.student_t(3), "t10": theory.student_t(10)}
FROZEN = {
    "gauss": stats.norm(),
    "laplace": stats.laplace(scale=1 / math.sqrt(2)),
    "t3": stats.t(3, scale=1 / math.sqrt(3)),
    "t10": stats.t(10, scale=math.sqrt(0.8)),
}

# distribution, nu or omega, rounding: error, error after gain, zeros, paper code, entropy; one vector of 1e6 coordinates
MEASURED = """
gauss 1 nearest 0.33004 0.25337 0.683 1.5380 1.2413
gauss 1 randomised 0.66317 - 0.610 1.7524 1.4141
gauss 0.5 nearest 0.16646 0.14269 0.521 1.9904 1.6582
gauss 0.5 randomised 0.33345 - 0.487 2.0763 1.7546
gauss 0.25 nearest 0.08329 0.07695 0.384 2.3393 2.1042
gauss 0.25 randomised 0.16697 - 0.369 2.3781 2.1583
gauss 0.1 nearest 0.03327 0.03219 0.249 2.8002 2.7319
gauss 0.1 randomised 0.06664 - 0.245 2.8183 2.7543
gauss 0.03 nearest 0.00999 0.00989 0.138 3.7312 3.5838
gauss 0.03 randomised 0.02000 - 0.137 3.7416 3.5910
gauss 0.01 nearest 0.00333 0.00332 0.080 5.3021 4.3715
gauss 0.01 randomised 0.00667 - 0.080 5.3077 4.3738
laplace 1 nearest 0.26909 0.22925 0.757 1.2996 1.1255
laplace 1 randomised 0.59119 - 0.668 1.6022 1.3638
laplace 0.5 nearest 0.14931 0.13344 0.632 1.7419 1.5599
laplace 0.5 randomised 0.31317 - 0.568 1.9191 1.7058
laplace 0.25 nearest 0.07874 0.07358 0.507 2.1442 2.0140
laplace 0.25 randomised 0.16151 - 0.466 2.2372 2.0963
laplace 0.1 nearest 0.03255 0.03158 0.360 2.6640 2.6377
laplace 0.1 randomised 0.06566 - 0.339 2.7030 2.6759
laplace 0.03 nearest 0.00993 0.00983 0.217 3.5586 3.4840
laplace 0.03 randomised 0.01990 - 0.210 3.5714 3.4959
laplace 0.01 nearest 0.00332 0.00331 0.132 4.9542 4.2687
laplace 0.01 randomised 0.00665 - 0.129 4.9610 4.2731
"""


@pytest.mark.parametrize("row", MEASURED.strip().splitlines())
def test_measured_table(row: str) -> None:
    name, parameter, rounding, error, gained, zeros, paper, entropy = row.split()
    assert rounding in ("nearest", "randomised")
    result = theory.quantise(
        SOURCES[name], 2 * math.sqrt(float(parameter)), "nearest" if rounding == "nearest" else "randomised"
    )
    # sampling noise of the measurement: about 0.001 bit in the entropy, 0.003 in the unary lengths, 0.3 % in the errors
    assert result.entropy == pytest.approx(float(entropy), abs=2e-3)
    assert result.paper_bits == pytest.approx(float(paper), abs=4e-3)
    assert result.distortion == pytest.approx(float(error), rel=4e-3, abs=1e-5)
    assert result.zeros == pytest.approx(float(zeros), abs=1.6e-3)
    if gained != "-":
        assert result.distortion_with_gain == pytest.approx(float(gained), rel=4e-3, abs=1e-5)


MATCHED_NEAREST = {
    "gauss": {0.5: 0.6954, 0.25: 1.2512, 0.1: 1.9145, 0.03: 2.7826, 0.01: 3.5757},
    "laplace": {0.5: 0.4809, 0.25: 1.0544, 0.1: 1.7825, 0.03: 2.6753, 0.01: 3.4719},
}
MATCHED_RANDOMISED = {
    "gauss": {1: 1.2397, 0.5: 1.5459, 0.25: 1.9156, 0.1: 2.4848, 0.03: 3.3056, 0.01: 4.0837},
    "laplace": {1: 1.1147, 0.5: 1.4508, 0.25: 1.8346, 0.1: 2.3999, 0.03: 3.2107, 0.01: 3.9834},
}


@pytest.mark.parametrize("name", ["gauss", "laplace"])
def test_matched_errors(name: str) -> None:
    for error, entropy in MATCHED_NEAREST[name].items():
        result = theory.quantise_to_error(SOURCES[name], error)
        assert result.distortion_with_gain == pytest.approx(error, rel=1e-9)
        assert result.entropy == pytest.approx(entropy, abs=2e-3)
    for error, entropy in MATCHED_RANDOMISED[name].items():
        assert theory.quantise_to_error(SOURCES[name], error, "randomised").entropy == pytest.approx(entropy, abs=2e-3)


def test_matched_parameters_and_paper_code() -> None:
    """Parameter (step/2)^2 that hits the error, and the published code there: Gaussian then Laplace."""
    nearest = {
        0.5: (2.2642, 0.8275, 3.2314, 0.5560),
        0.25: (0.9833, 1.5506, 1.1267, 1.2218),
        0.1: (0.3336, 2.2012, 0.3550, 1.9450),
        0.03: (0.0930, 2.8421, 0.0947, 2.6968),
        0.01: (0.0303, 3.7194, 0.0305, 3.5424),
    }
    for error, row in nearest.items():
        for name, (nu, paper) in zip(("gauss", "laplace"), (row[:2], row[2:])):
            result = theory.quantise_to_error(SOURCES[name], error)
            assert (result.step / 2) ** 2 == pytest.approx(nu, rel=5e-3)
            assert result.paper_bits == pytest.approx(paper, abs=4e-3)


def test_figures_of_merit() -> None:
    gauss = theory.gaussian()
    for omega, merit in ((1, 2.48), (0.5, 2.32), (0.25, 2.39), (0.1, 2.73)):
        bits = theory.quantise_to_error(gauss, omega, "randomised").entropy
        assert theory.merit_unbiased(bits, omega) == pytest.approx(merit, abs=6e-3)
    for alpha, merit in ((0.5, 1.39), (0.25, 1.67), (0.1, 2.13)):
        assert theory.merit_contractive(theory.quantise_to_error(gauss, alpha).entropy, alpha) == pytest.approx(merit, abs=6e-3)


def test_sparse_dithering_at_the_mean_error_of_spherical_blocks() -> None:
    for alpha, row in ((0.5, (0.884, 0.797, 0.750)), (0.25, (1.423, 1.339, 1.295)), (0.1, (2.093, 2.004, 1.960))):
        for m, bits in zip((8, 16, 32), row):
            error = theory.spherical_mean_error(alpha, m)
            assert theory.quantise_to_error(theory.gaussian(), error).entropy == pytest.approx(bits, abs=2.5e-3)


def test_gaps_of_scalar_quantisers() -> None:
    """Nearest stays within 0.2546 of the Gaussian limit; subtractive dither at about .25; randomised rounding at .75."""
    space_filling = 0.5 * math.log2(2 * math.pi * math.e / 12)
    for error, expected in ((0.9, 0.034), (0.5, 0.197), (0.25, 0.254), (0.1, 0.254)):
        distance = theory.gap(theory.quantise_to_error(theory.gaussian(), error).entropy, error)
        assert distance == pytest.approx(expected, abs=3e-3)
        assert distance <= space_filling + 1e-9
    for omega, expected in ((9, 0.178), (1, 0.251), (1 / 3, 0.258), (1 / 9, 0.258), (0.01, 0.258)):
        bits = theory.quantise_to_error(theory.gaussian(), omega, "dithered").entropy
        assert theory.gap(bits, omega, unbiased=True) == pytest.approx(expected, abs=4e-3)
    for omega, expected in ((1, 0.737), (1 / 3, 0.755), (0.03, 0.756)):
        bits = theory.quantise_to_error(theory.gaussian(), omega, "randomised").entropy
        assert theory.gap(bits, omega, unbiased=True) == pytest.approx(expected, abs=4e-3)


def test_subtractive_dither_table() -> None:
    for omega, plain, given_dither in (
        (1, 1.011, 0.754),
        (0.5, 1.250, 1.048),
        (0.25, 1.547, 1.416),
        (0.1, 2.047, 1.984),
        (0.03, 2.826, 2.805),
        (0.01, 3.591, 3.583),
    ):
        result = theory.quantise_to_error(theory.gaussian(), omega, "dithered")
        # the listed figures condition on 16 bins of the dither, so they may only lie above the exact ones
        assert result.entropy == pytest.approx(given_dither, abs=4e-3)
        assert theory.quantise(theory.gaussian(), result.step, "randomised").entropy == pytest.approx(plain, abs=2e-3)


@pytest.mark.parametrize("name", list(SOURCES))
@pytest.mark.parametrize("step", [0.1, 1.0, 3.7])
def test_against_distribution_functions(name: str, step: float) -> None:
    frozen = FROZEN[name]
    k = np.arange(-60_000, 60_001)
    upper = frozen.sf(np.abs(k) * step - step / 2)
    p = np.where(k == 0, 2 * frozen.cdf(step / 2) - 1, upper - frozen.sf(np.abs(k) * step + step / 2))
    p = np.maximum(p, 0)
    result = theory.quantise(SOURCES[name], step)
    tolerance = 1e-6 if name == "t3" else 1e-9  # the reference stops at 60 000 levels
    assert result.zeros == pytest.approx(float(p[60_000]), abs=1e-12)
    assert result.entropy == pytest.approx(float(-(p[p > 0] @ np.log2(p[p > 0]))), abs=tolerance)
    assert result.mean_level == pytest.approx(float(p @ np.abs(k)), abs=tolerance)


@pytest.mark.parametrize("name", list(SOURCES))
def test_against_a_sample(name: str) -> None:
    x = FROZEN[name].rvs(400_000, random_state=np.random.default_rng(0))
    step = 1.3
    k = np.rint(x / step)
    result = theory.quantise(SOURCES[name], step)
    error = (x - step * k) ** 2
    assert result.distortion == pytest.approx(error.mean(), abs=6 * error.std() / 632)
    if name != "t3":
        assert result.gain == pytest.approx((x @ k) / (step * (k @ k)), rel=0.01)
        assert result.distortion_with_gain == pytest.approx(1 - (x @ k) ** 2 / ((k @ k) * (x @ x)), rel=0.02)
    rounded = np.floor(x / step + np.random.default_rng(1).random(x.size))
    randomised = theory.quantise(SOURCES[name], step, "randomised")
    counts = np.unique(rounded, return_counts=True)[1] / x.size
    assert randomised.entropy == pytest.approx(float(-(counts @ np.log2(counts))), abs=0.01)
    variance = (x - step * rounded) ** 2
    assert randomised.distortion == pytest.approx(variance.mean(), abs=6 * variance.std() / 632)


def test_heavy_tails_are_complete() -> None:
    """Exact second moments of Student's t with 3 degrees of freedom although the sum over levels converges slowly."""
    for step in (0.3, 2.0, 10.0):
        result = theory.quantise(theory.student_t(3), step)
        frozen, k = FROZEN["t3"], np.arange(1.0, 100_001.0)
        p = frozen.sf((k - 0.5) * step) - frozen.sf((k + 0.5) * step)
        beyond = 4 / (math.pi * 100_000.5 * step)  # the density falls like (2/pi) x^-4
        second = 2 * step**2 * float(p @ k**2) + beyond
        # gain = E[xq]/E[q^2] and error after the gain = 1 - gain E[xq]
        from_result = (1 - result.distortion_with_gain) / result.gain**2
        assert from_result == pytest.approx(second, rel=3e-6)


@pytest.mark.parametrize("name", list(SOURCES))
@pytest.mark.parametrize("rounding", ["nearest", "randomised", "dithered"])
def test_high_resolution(name: str, rounding: Rounding) -> None:
    step = 0.01
    result = theory.quantise(SOURCES[name], step, rounding)
    entropy = float(FROZEN[name].entropy()) / math.log(2) - math.log2(step)
    assert result.entropy == pytest.approx(entropy, abs=1e-4)
    assert result.distortion == pytest.approx(step**2 / (6 if rounding == "randomised" else 12), rel=1e-4)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(["gauss", "laplace"]), st.floats(0.01, 20), st.floats(1.01, 3))
def test_monotone_in_the_step(name: str, step: float, factor: float) -> None:
    roundings: tuple[Rounding, ...] = ("nearest", "randomised")
    for rounding in roundings:
        fine = theory.quantise(SOURCES[name], step, rounding)
        coarse = theory.quantise(SOURCES[name], step * factor, rounding)
        assert coarse.entropy < fine.entropy + 1e-12
        assert coarse.distortion_with_gain > fine.distortion_with_gain - 1e-12
        assert fine.distortion_with_gain <= fine.distortion + 1e-12
        assert fine.entropy <= fine.paper_bits + 1e-12  # no code beats the entropy
        limit = theory.gaussian_rate(min(1, fine.distortion_with_gain)) if name == "gauss" else 0
        assert fine.entropy >= (limit if rounding == "nearest" else 0) - 1e-12


def test_bad_arguments() -> None:
    calls: list[Callable[[], object]] = [
        lambda: theory.student_t(2.0),
        lambda: theory.quantise(theory.gaussian(), 0.0),
        lambda: theory.quantise(theory.gaussian(), math.nan),
        lambda: theory.quantise(theory.gaussian(), 1.0, "sideways"),  # type: ignore[arg-type]
        lambda: theory.quantise(theory.gaussian(), 200.0, "dithered"),
        lambda: theory.quantise_to_error(theory.gaussian(), 1.0),
        lambda: theory.quantise_to_error(theory.gaussian(), 0.0),
        lambda: theory.quantise_to_error(theory.gaussian(), 1e-12),
    ]
    for call in calls:
        with pytest.raises(BadConfiguration, match=r"must|needs|errs"):
            call()

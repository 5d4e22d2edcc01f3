"""Trellis-coded quantisation: rates from real bytes, the worst-case bound, targets, and an unbiased form whose variance ignores x."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import tersegrad
from tersegrad import kernels
from tersegrad.compressors.trellis import DitheredTrellis, Trellis, mean_kappa
from tersegrad.core.errors import BadConfiguration
from tersegrad.core.protocol import Context, Fed, Message, Spec
from tersegrad.core.targets import BLOCK, FINE
from tests.laws.zoo import adversarial


def gaussian(d: int, seed: int = 0) -> Tensor:
    return torch.randn(d, generator=torch.Generator().manual_seed(seed))


def once(c: Trellis | DitheredTrellis, x: Tensor, ctx: Context | None = None) -> tuple[Message, Tensor]:
    ctx = ctx or Context(seed=1)
    message, _ = c.encode(x, Spec.of(x), None, ctx)
    return message, c.decode(message, Spec.flat(x.numel()), ctx)


def relative(x: Tensor, y: Tensor) -> float:
    return float((x.double() - y.double()).square().sum() / x.double().square().sum())


@pytest.mark.parametrize(("states", "most"), [(4, 0.107), (8, 0.092), (16, 0.082), (32, 0.073)])
def test_gap_to_the_limit_on_gaussian_data(states: int, most: float) -> None:
    d = 1 << 20
    x = gaussian(d)
    for alpha in (0.25, 0.1, 0.03, 0.01):
        result = tersegrad.roundtrip(Trellis(alpha=alpha, states=states, chunk=18), x)
        assert 0.99 * alpha <= result.error <= alpha
        assert result.bits_per_coordinate <= 0.5 * math.log2(1 / alpha) + most


def test_gap_of_the_dithered_form() -> None:
    d = 1 << 20
    x = gaussian(d)
    for omega in (1 / 3, 1 / 9, 0.01):
        result = tersegrad.roundtrip(DitheredTrellis(omega=omega, chunk=18), x)
        assert result.error == pytest.approx(omega, rel=0.005)
        assert result.bits_per_coordinate <= 0.5 * math.log2((1 + omega) / omega) + 0.095


def test_shorter_than_sparse_dithering_at_equal_error() -> None:
    x = gaussian(1 << 18)
    for alpha in (0.3, 0.05):
        mine = tersegrad.roundtrip(f"trellis(alpha={alpha})", x)
        other = tersegrad.roundtrip(f"sparse_dithering(alpha={alpha})", x)
        assert mine.bits_per_coordinate <= other.bits_per_coordinate - 0.13


@pytest.mark.parametrize("rdo", [False, True])
@pytest.mark.parametrize("states", [4, 8, 16, 32])
def test_worst_case_bound(states: int, rdo: bool) -> None:
    """Adversarial vectors, vectors on the edges between integers, and random ones of all kinds."""
    generator = torch.Generator().manual_seed(states)
    vectors = [x for d in (1, 2, 7, 64, 1000) for name, x in adversarial(d).items() if name not in ("zero", "denormal")]
    for _ in range(25):
        d = int(torch.randint(1, 40, (), generator=generator))
        x = torch.randn(d, generator=generator)
        vectors += [x, torch.sign(x), torch.round(4 * x) / 2, x * torch.rand(d, generator=generator).pow(8)]
    for x in vectors:
        if not bool((x != 0).any()):
            continue
        for nu in (0.9, 0.3, 0.05):
            assert relative(x, once(Trellis(nu=nu, states=states, rdo=rdo), x)[1]) <= nu * (1 + 1e-6)


@pytest.mark.parametrize("size", [0.6, 0.9, 1.2, 1.5, 1.8])
def test_worst_case_bound_where_coordinates_are_still(size: float) -> None:
    """Rows of numbers that a dead zone swallows, beside rows that make it worth while: the bound holds all the same."""
    d, nu, g = 64 * 100, 0.3, torch.Generator().manual_seed(3)
    x = torch.where(torch.rand(64, 100, generator=g) < 0.4, 1.0, 0.02) * torch.sign(torch.randn(64, 100, generator=g))
    x[::8] = 12 * torch.randn(8, 100, generator=g)
    for _ in range(4):
        # Steps follow from the norm, and the small numbers from the step.
        step = math.sqrt(nu / d) * float(x.norm())
        small = torch.arange(64) % 8 != 0
        x[small] = torch.sign(x[small]) * torch.where(x[small].abs() > 0.5 * x[small].abs().max(), size * step, 0.02 * step)
    spec, ctx, c = Spec.of(x), Context(seed=1), Trellis(nu=nu)
    message, _ = c.encode(x, spec, None, ctx)
    # Behind the mode: the kind of the only segment.
    assert int(message.data[1]) == 3
    assert relative(x.flatten(), c.decode(message, spec, ctx)) <= nu * (1 + 1e-6)


def test_a_step_that_breaks_the_bound_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bound is verified, not assumed: with a quantiser that errs too much the step shrinks until it holds."""
    run, x = kernels.get(torch.device("cpu")), gaussian(3000)
    steps: list[float] = []

    def clumsy(x: Tensor, step: float, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
        steps.append(step)
        return run.trellis_encode(x, 4 * step, *rest)

    class Clumsy:
        trellis_encode = staticmethod(clumsy)

        def __getattr__(self, name: str) -> object:
            return getattr(run, name)

    monkeypatch.setattr(kernels, "get", lambda device: Clumsy())
    assert relative(x, once(Trellis(nu=0.3), x)[1]) <= 0.3
    assert len(steps) > 1


@pytest.mark.parametrize("name", ["gaussian", "student_t", "geometric", "one_big", "mostly_zero"])
def test_alpha_is_met_and_used(name: str) -> None:
    x = adversarial(100_000)[name]
    for alpha in (0.5, 0.1, 0.003):
        error = relative(x, once(Trellis(alpha=alpha), x)[1])
        assert error <= alpha
        # Where few values hold the energy the error jumps.
        assert error >= 0.97 * alpha or name in ("one_big", "geometric")


def test_budgets_are_kept_and_used() -> None:
    x = gaussian(50_000)
    for bits in (0.5, 2.0, 5.0):
        nbytes = int(once(Trellis(bits=bits), x)[0].nbytes)
        assert 0.98 * bits * x.numel() / 8 <= nbytes <= bits * x.numel() / 8
    assert int(once(Trellis(bits=0.001), x)[0].nbytes) <= 6


def test_error_feedback_in_one_go() -> None:
    x, residual, left = gaussian(5000), gaussian(5000, 1), torch.empty(5000)
    spec, ctx = Spec.flat(5000), Context(seed=1)
    for c in (Trellis(alpha=0.1), Trellis(nu=0.1, states=16), Trellis(bits=2.0), Trellis(alpha=0.3, rdo=True)):
        message, finite = c.encode_split(Fed(x, residual, left), spec, ctx)
        plain, _ = c.encode(x + residual, spec, None, ctx)
        assert finite
        assert message.tobytes() == plain.tobytes()
        assert torch.equal(left, x + residual - c.decode(message, spec, ctx))
    residual[7] = math.nan
    assert not Trellis(nu=0.1).encode_split(Fed(x, residual, left), spec, ctx)[1]


def means(c: DitheredTrellis, x: Tensor, seeds: int, gain: float = 1.0) -> tuple[Tensor, float, float]:
    """The mean error of every coordinate, the mean relative squared error and its standard error."""
    total, errors = torch.zeros(x.numel(), dtype=torch.float64), []
    for seed in range(seeds):
        off = gain * once(c, x, Context(seed=seed, step=seed % 7))[1].double() - x.double()
        total += off
        errors.append(float(off.square().sum() / x.double().square().sum()))
    mean = sum(errors) / seeds
    return total / seeds, mean, math.sqrt(sum((e - mean) ** 2 for e in errors)) / seeds


def allowed(c: DitheredTrellis, x: Tensor, seeds: int) -> float:
    """Bernstein at 1e-6 over all coordinates: errors up to two steps, of variance up to 0.42 squared steps at a trellis's start."""
    d = x.numel()
    step = float(x.double().norm()) * math.sqrt(c.omega / (mean_kappa(c.states, d, 15) * d))
    log = math.log(2 * d / 1e-6)
    return step * (math.sqrt(2 * 0.42 * log / seeds) + 2 * log / (3 * seeds))


@pytest.mark.parametrize("states", [4, 8, 32])
@pytest.mark.parametrize("name", ["gaussian", "one_hot", "half_steps", "student_t"])
def test_unbiased_with_the_same_variance_for_every_vector(name: str, states: int) -> None:
    d, seeds = 512, 250
    x, c = adversarial(d)[name], DitheredTrellis(omega=0.25, states=states)
    bias, mean, spread = means(c, x, seeds)
    assert float(bias.abs().max()) <= allowed(c, x, seeds)
    # Rounded metrics and the last digits of kappa: the step leaves room for two per mille.
    assert 0.995 * c.omega - 4 * spread <= mean <= c.omega + 4 * spread


def test_a_small_bias_would_be_seen() -> None:
    x, c = gaussian(512), DitheredTrellis(omega=0.02)
    bias, _, _ = means(c, x, 250, gain=0.9)
    assert float(bias.abs().max()) > allowed(c, x, 250)


def test_kappa_is_what_is_measured() -> None:
    """With whole runs, with short trellises and with few lanes."""
    for states, d in ((4, 1 << 17), (8, 1 << 17), (16, 20_000), (32, 700)):
        x, c = gaussian(d), DitheredTrellis(omega=0.1, states=states)
        _, mean, spread = means(c, x, 6 if d > 10_000 else 60)
        assert mean == pytest.approx(c.omega, abs=0.012 * c.omega + 4 * spread)


def test_configurations() -> None:
    for bad in ("trellis", "trellis(nu=0.1, alpha=0.1)", "trellis(nu=1.5)", "trellis(nu=0.1, states=6)", "trellis(bits=0)"):
        with pytest.raises(BadConfiguration):
            tersegrad.parse(bad)
    for bad in ("dithered_trellis(omega=0)", "dithered_trellis(omega=1, states=64)", "dithered_trellis(omega=1, chunk=20)"):
        with pytest.raises(BadConfiguration):
            tersegrad.parse(bad)


def test_a_search_on_samples_hears_of_what_they_do_not_hold() -> None:
    n = 2 * FINE
    x = torch.zeros(n)
    # Every other block of 4096 is in a sample; this one is not.
    x[BLOCK + 5 : BLOCK + 9] = torch.tensor([1.0, -2.0, 3.0, 4.0])
    compressor, spec, ctx = tersegrad.parse("trellis(alpha=0.1)"), Spec.flat(n), Context(seed=1)
    for gaussian in (0.0, 1.0):
        y = x + gaussian * torch.randn(n, generator=torch.Generator().manual_seed(1))
        message, _ = compressor.encode(y, spec, None, ctx)
        assert float((compressor.decode(message, spec, ctx) - y).square().sum()) <= 0.1 * float(y.square().sum())
        y[BLOCK + 7] = torch.inf
        message, _ = compressor.encode(y, spec, None, ctx)
        assert int(message.nbytes) == 1
        assert bool(compressor.decode(message, spec, ctx).isnan().all())


def student(d: int, seed: int = 3) -> Tensor:
    """Three degrees of freedom."""
    g = torch.Generator().manual_seed(seed)
    scaled: Tensor = torch.randn(d, generator=g) / torch.randn(3, d, generator=g).norm(dim=0)
    return scaled


@pytest.mark.parametrize(
    ("name", "alpha", "share"), [("student", 0.25, 0.94), ("student", 0.1, 0.98), ("gaussian", 0.25, 1.0), ("rows", 0.1, 0.995)]
)
@pytest.mark.parametrize("states", [8, 32])
def test_bits_in_the_search_save_some_at_the_same_error(name: str, alpha: float, share: float, states: int) -> None:
    x = student(1 << 17) if name == "student" else gaussian(1 << 17)
    if name == "rows":
        x = x.view(512, 256) * torch.exp2(2 * gaussian(512, 5))[:, None]
    spec, ctx, lengths = Spec.of(x), Context(), []
    for rdo in (False, True):
        c = Trellis(alpha=alpha, states=states, rdo=rdo)
        message, _ = c.encode(x, spec, None, ctx)
        assert relative(x.flatten(), c.decode(message, spec, ctx)) <= alpha
        lengths.append(int(message.nbytes))
    assert lengths[1] <= share * lengths[0]


@pytest.mark.parametrize("d", [1, 3, 10, 100, 1000, 20_000])
def test_bits_in_the_search_never_lengthen_a_message(d: int) -> None:
    for x in (gaussian(d), student(d), gaussian(d) ** 7):
        for alpha in (0.6, 0.1, 0.01):
            plain, chosen = (once(Trellis(alpha=alpha, rdo=rdo), x) for rdo in (False, True))
            assert int(chosen[0].nbytes) <= int(plain[0].nbytes)
            assert relative(x, chosen[1]) <= alpha


@pytest.mark.parametrize("size", [0.6, 0.8, 1.0, 1.2, 1.4])
def test_certificates_hold_for_numbers_that_bits_would_lose(size: float) -> None:
    """A few levels and more numbers of about a step, beside many zeros."""
    place = torch.arange(20_000) % 16
    x = torch.where(place == 0, 2 * size, torch.where(place < 4, 1.05, 0.0))
    for nu in (0.9, 0.5, 0.2, 0.05):
        assert relative(x, once(Trellis(nu=nu, rdo=True), x)[1]) <= nu


def test_budgets_are_kept_with_bits_in_the_search() -> None:
    x = student(50_000)
    for bits in (0.5, 2.0):
        (plain, before), (chosen, after) = (once(Trellis(bits=bits, rdo=rdo), x) for rdo in (False, True))
        assert int(chosen.nbytes) <= bits * x.numel() / 8
        assert relative(x, after) <= 1.01 * relative(x, before)
        assert int(plain.nbytes) <= bits * x.numel() / 8

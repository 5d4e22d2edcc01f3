"""Guarantees hold: surely where that is promised, else on average, by laws that a compressor breaking its promise mildly fails."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

import tersegrad
from tersegrad.core.numbers import HUGE
from tersegrad.core.protocol import Compressor, Context, Guarantee, Spec
from tersegrad.core.stateless import FixedRate
from tests.laws.cases import every_case
from tests.laws.inputs import once
from tests.laws.zoo import adversarial

# Absolute error per coordinate below which no guarantee speaks.
FLOOR = 2.0**-126
SURE, DRAWS, DRAWS_OF_THE_MEAN = 1e-9, 100, 300
STAKES = torch.tensor([0.03, 0.1, 0.3, 0.6, 1.0], dtype=torch.float64)


def slack(samples: Tensor) -> float:
    """What the mean of these independent samples may differ from their expectation, but for a chance of 1e-9 on each side.

    The empirical Bernstein bound (Maurer and Pontil, COLT 2009), with the range of the samples as that of their distribution.
    """
    n, log = samples.numel(), math.log(2 / SURE)
    spread = float(samples.max() - samples.min())
    return math.sqrt(2 * float(samples.var()) * log / n) + 7 * spread * log / (3 * (n - 1))


def wealth(samples: Tensor, bound: float) -> float:
    """What one coin becomes that is staked, in equal parts at several stakes, on samples above ``bound``.

    Where independent samples are nowhere below some ``least`` and their expectation is at most ``bound``, that of the wealth is at
    most 1, so it exceeds 1 / SURE with a chance below SURE (Waudby-Smith and Ramdas, JRSS B 2024). The ``least`` is half of the
    smallest sample. Of samples that vary much, this takes a third of those that ``slack`` takes to show a broken promise.
    """
    least = float(samples.min()) / 2
    if least >= bound:
        return math.inf
    gains = (samples - least) / (bound - least) - 1
    return float(torch.log1p(STAKES[:, None] * gains).sum(1).exp().mean())


def check_error(c: Compressor[Any], dimensions: tuple[int, ...] = (1, 64, 1000)) -> None:
    """The error that ``guarantee`` promises, on vectors that are hard to compress."""
    for d in dimensions:
        guarantee = c.guarantee(Spec.flat(d))
        if guarantee.kind == "none":
            return
        assert guarantee.value >= 0
        for name, x in adversarial(d).items():
            norm = float(x.double().square().sum())
            bound = guarantee.value * norm * (1 + 1e-6) + d * FLOOR**2
            errors: list[float] = []
            # Where a few draws leave no doubt that the promise is kept, they are enough.
            for draws in (1,) if guarantee.sure else (30, DRAWS):
                for seed in range(len(errors), draws):
                    _, decoded = once(c, x, Context(seed=seed, step=seed))
                    errors.append(float((decoded.double() - x.double()).square().sum()))
                samples = torch.tensor(errors, dtype=torch.float64)
                doubt = 0.0 if guarantee.sure else slack(samples)
                if float(samples.mean()) + doubt <= bound:
                    break
            found = (name, d, float(samples.mean()) / max(norm, 1e-300), guarantee)
            assert float(samples.mean()) <= bound + doubt, found
            assert guarantee.sure or wealth(samples, bound) < 1 / SURE, found


def check_mean(c: Compressor[Any]) -> None:
    """No bias: not along x, and not in any of 64 values that are sent many times."""
    pattern = torch.linspace(-2, 2, 64).where(torch.arange(64) % 5 > 0, torch.tensor(0.25))
    copies = 32
    x = pattern.repeat(copies)
    if c.guarantee(Spec.flat(x.numel())).kind != "unbiased":
        return
    norm = float(x.double().square().sum())
    along, total, spread = [], torch.zeros(64, dtype=torch.float64), 0.0
    for seed in range(DRAWS_OF_THE_MEAN):
        _, decoded = once(c, x, Context(seed=seed))
        error = (decoded - x).double()
        along.append(float(error @ x.double()) / norm)
        by_value = error.view(copies, 64)
        total += by_value.sum(0)
        spread = max(spread, float(by_value.max() - by_value.min()))
    samples, draws = torch.tensor(along, dtype=torch.float64), copies * DRAWS_OF_THE_MEAN
    assert abs(float(samples.mean())) <= slack(samples) + 2.0**-16, "biased along x"
    # Hoeffding over all 64 coordinates at once, at 1e-6, plus the 2^-16 of a step that 16-bit draws allow.
    bound = spread * (math.sqrt(math.log(2 * 64 / 1e-6) / (2 * draws)) + 2.0**-16)
    assert float((total / draws).abs().max()) <= bound


@every_case
def test_guarantee_on_adversarial_vectors(text: str) -> None:
    check_error(tersegrad.parse(text))


@every_case
def test_unbiased_means_unbiased(text: str) -> None:
    check_mean(tersegrad.parse(text))


@dataclasses.dataclass(frozen=True)
class Noisy(FixedRate):
    """Planted: factor times x plus noise of a given variance, relative to the mean square of x; promises omega without bias."""

    name: ClassVar[str] = "noisy"
    wire_id: ClassVar[int] = 200
    omega: float
    variance: float
    factor: float = 1.0

    def nbytes(self, numel: int) -> int:
        return 4 * numel

    def pack(self, x: Tensor, data: Tensor, ctx: Context) -> None:
        signs = torch.randint(0, 2, x.shape, generator=torch.Generator().manual_seed(ctx.seed)) * 2.0 - 1
        size = math.sqrt(self.variance * float(x.double().square().mean())) if x.numel() else 0.0
        data[:] = (self.factor * x + signs * size).clamp(-HUGE, HUGE).view(torch.uint8)

    def unpack(self, data: Tensor, out: Tensor, weight: float | None) -> None:
        values = data.view(torch.float32)
        _ = out.copy_(values) if weight is None else out.add_(values, alpha=weight)

    def guarantee(self, spec: Spec) -> Guarantee:
        return Guarantee("unbiased", self.omega)


@dataclasses.dataclass(frozen=True)
class Lottery(Noisy):
    """Planted: coordinates survive with probability 1 / (1 + variance), scaled by ``factor`` times the inverse."""

    name: ClassVar[str] = "lottery"

    def pack(self, x: Tensor, data: Tensor, ctx: Context) -> None:
        chance = 1 / (1 + self.variance)
        kept = torch.rand(x.shape, generator=torch.Generator().manual_seed(ctx.seed)) < chance
        data[:] = (x * kept * (self.factor / chance)).clamp(-HUGE, HUGE).view(torch.uint8)


@pytest.mark.parametrize("planted", [Noisy, Lottery])
@pytest.mark.parametrize("omega", [0.05, 0.5, 3.0])
def test_the_laws_catch_a_promise_that_is_broken_mildly(planted: type[Noisy], omega: float) -> None:
    check_error(planted(omega, omega))
    check_mean(planted(omega, omega))
    with pytest.raises(AssertionError):
        check_error(planted(omega, 1.2 * omega))
    for factor in (0.9, 1.1):
        with pytest.raises(AssertionError, match="biased along x"):
            check_mean(planted(omega, omega, factor))

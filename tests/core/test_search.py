"""The bracket on synthetic curves: it ends after few looks, and what it returns was looked at and was allowed."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest

from tersegrad.core.search import Bracket

LOW, HIGH, TIGHT = -126.0, 127.0, -0.0087
Curve = Callable[[float], float]

SMOOTH: dict[str, Curve] = {
    "square": lambda at: 2 * at - 7.3,
    "steep": lambda at: 40 * (at - 60),
    "gentle": lambda at: 0.1 * (at + 33),
    "saturating": lambda at: math.tanh(at / 3 - 1),
    "error of rounding": lambda at: 2 * at - 3 if at < 0 else 2 * math.log2(1 + at) - 3,
    "exponential": lambda at: math.exp2(min(at, 60)) - 5,
}
STEPPY: dict[str, Curve] = {
    "stairs": lambda at: math.floor(2 * at) - 9.5,
    "cliff": lambda at: -1.0 if at < 12.345 else 1.0,
    "infinite cliff": lambda at: -math.inf if at < 12.345 else math.inf,
    "plateau": lambda at: min(at, -1.0) if at < 70 else 0.5 * (at - 70) + 1e-6,
    "saw": lambda at: at / 8 + 0.3 * (at * 7 % 1) - 0.2,
}
FLAT: dict[str, Curve] = {
    "all allowed": lambda at: -1.0,
    "none allowed": lambda at: 0.001,
    "not a number": lambda at: math.nan,
    "infinite": lambda at: math.inf,
}


class Asked:
    """A curve that remembers what was asked."""

    def __init__(self, curve: Curve) -> None:
        self.curve, self.looks = curve, dict[float, float]()

    def __call__(self, at: float) -> float:
        assert LOW <= at <= HIGH
        self.looks[at] = self.curve(at)
        return self.looks[at]


def found(curve: Curve, start: float, slope: float = 2.0, trials: int = 60) -> tuple[Bracket, Asked]:
    asked = Asked(curve)
    bracket = Bracket(start=start, slope=slope, tight=TIGHT, low=LOW, high=HIGH).search(asked, trials)
    assert bracket.looks <= trials
    allowed = [at for at, value in asked.looks.items() if value <= 0]
    assert bracket.at == (max(allowed) if allowed else None)
    return bracket, asked


every_start = pytest.mark.parametrize("start", [-1e9, LOW, -50.0, 0.0, 3.0, 90.0, HIGH, 1e9])


@every_start
@pytest.mark.parametrize("name", SMOOTH)
def test_smooth_curves_are_met_closely(name: str, start: float) -> None:
    bracket, _ = found(SMOOTH[name], start)
    assert bracket.good or (bracket.at is not None and SMOOTH[name](bracket.at + 2e-3) > 0)
    assert bracket.looks <= 26


def test_a_good_start_takes_two_looks() -> None:
    bracket, _ = found(SMOOTH["square"], 3.0)
    assert bracket.good
    assert bracket.looks <= 2


@every_start
@pytest.mark.parametrize("name", STEPPY)
def test_steps_close_the_bracket(name: str, start: float) -> None:
    curve = STEPPY[name]
    bracket, asked = found(curve, start)
    assert bracket.at is not None
    assert bracket.looks <= 50
    refused = [at for at, value in asked.looks.items() if value > 0 and at > bracket.at]
    assert bracket.good or min(refused) - bracket.at < 1e-3


@every_start
@pytest.mark.parametrize("name", FLAT)
def test_flat_curves_end_at_a_bound(name: str, start: float) -> None:
    bracket, asked = found(FLAT[name], start)
    assert bracket.looks <= 26
    assert bracket.at == (HIGH if name == "all allowed" else None)
    assert name == "all allowed" or LOW in asked.looks


@pytest.mark.parametrize("seed", range(200))
def test_values_without_any_order(seed: int) -> None:
    rng = random.Random(seed)
    choices = (-math.inf, -1.0, TIGHT * 1.01, -1e-12, 0.0, 1e-12, 1.0, math.inf, math.nan, rng.gauss(0, 1), rng.gauss(0, 100))
    memory: dict[float, float] = {}

    def curve(at: float) -> float:
        return memory.setdefault(at, rng.choice(choices))

    for trials in (1, 3, 60):
        memory.clear()
        found(curve, rng.uniform(-200, 200), slope=rng.choice((0.01, 1.0, 2.0, 50.0)), trials=trials)


@pytest.mark.parametrize("seed", range(50))
def test_an_adversary_cannot_keep_it_going(seed: int) -> None:
    """The worst answer: whatever leaves the larger part of the bracket, with values that lead secants astray."""
    rng = random.Random(seed)
    low, high = LOW, HIGH

    def curve(at: float) -> float:
        nonlocal low, high
        if at - low > high - at:
            high = at
            return rng.choice((1e-9, 1.0, 1e9))
        low = at
        return rng.choice((-1e9, -1.0, TIGHT * 1.001))

    bracket, _ = found(curve, rng.uniform(LOW, HIGH), trials=200)
    assert bracket.looks <= 80

"""Steps for quantisers that are given a target: the largest step whose error is at most alpha, the smallest whose message fits.

Both work on log2 of the step through :class:`~tersegrad.core.search.Bracket`. A search for an error looks at samples of the vector
first; what it returns was verified on all of it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import torch
from torch import Tensor

from tersegrad.core.numbers import HUGE, TINY, float32
from tersegrad.core.search import Bracket

# Coordinates that a search for the step looks at: often, and a few times; they come in blocks.
COARSE, FINE, BLOCK = 1 << 16, 1 << 21, 1 << 12
# A search on a sample may end this much (relative) below the target error: half a hundredth of a bit.
SLACK = 0.006
# log2 of an error over its target from which the slope leads to the target.
NEAR = 0.05
# log2 of an error over its target that costs less than 0.005 bit.
CLOSE = -0.009
# Whole messages after the first that meets the target, for one that is closer to it.
CORRECTIONS = 5


@dataclasses.dataclass(frozen=True)
class Coded:
    """A message, and what its encoder knows of the error."""

    data: Tensor  # uint8
    norm: float = 0.0  # ||x||^2
    error: float = 0.0  # ||x - decoded||^2


def toward_zero(value: float) -> float:
    """The nearest normal float32 that is not larger.

    >>> toward_zero(0.1), toward_zero(0.0) == 2**-126
    (0.09999999403953552, True)
    """
    value = min(max(value, TINY), HUGE)
    rounded = float32(value)
    return float(torch.nextafter(torch.tensor(rounded), torch.tensor(0.0))) if rounded > value else rounded


def strided(x: Tensor, most: int) -> Tensor:
    """About ``most`` coordinates of x, in blocks that are evenly spread; all of them if there are no more."""
    stride = x.numel() // most
    return x if stride < 2 else x[: x.numel() // BLOCK * BLOCK].view(-1, BLOCK)[::stride].reshape(-1)


def log2_error(wrong: float, norm: float, alpha: float) -> float:
    """log2 of the relative error over alpha; errors below 1e-300 count as that much."""
    return math.log2(max(wrong / norm if norm > 0 else 0.0, 1e-300)) - math.log2(alpha)


def sampled_step(x: Tensor, alpha: float, kappa: float, error: Callable[[Tensor, float], tuple[float, float]]) -> Bracket:
    """A bracket that starts at log2 of a step whose error on a sample of x is just below alpha.

    ``error(part, step)``: squared error and squared norm. Small steps err by ``kappa`` times their square per coordinate.
    """
    coarse, fine = strided(x, COARSE), strided(x, FINE)
    # Below the target by what the sample may mislead.
    aim = alpha * (1 - (SLACK / 4 if fine is not x else SLACK / 6 if coarse is not x else 0)) or alpha

    def value(part: Tensor) -> Callable[[float], float]:
        return lambda at: log2_error(*error(part, toward_zero(2.0**at)), aim)

    norm = error(coarse, HUGE)[1] or error(x, HUGE)[1]
    start = (math.log2(norm / (kappa * coarse.numel())) + math.log2(aim)) / 2
    look = value(coarse)
    at, slope = Bracket(start=start, slope=2.0, tight=math.log2(1 - SLACK)).search(look, trials=60).low, 2.0
    if coarse is not x:
        # Refine on a larger sample, starting from the slope measured on the small one. From a near miss that slope leads to a
        # place that need not be looked at.
        slope = min(max(4 * (look(at + 0.125) - look(at - 0.125)), 0.25), 4.0)
        near = Bracket(start=at, slope=slope, tight=math.log2(1 - SLACK * (0.8 if fine is x else 0.25)))
        look, here = value(fine), math.inf
        while near.looks < 4 and not near.good and abs(here) >= NEAR:
            here = look(at)
            near.tell(at, here)
            at = at if near.good else near.guess()
        if near.at is not None and abs(here) >= NEAR:
            at = near.at
        slope = near.slope
    return Bracket(start=at, slope=slope, tight=CLOSE)


def meet_error(bracket: Bracket, alpha: float, numel: int, encode: Callable[[float], Coded]) -> Coded | None:
    """A message at nearly the largest step whose error is at most alpha, verified; None where no step met it."""
    corrections = CORRECTIONS if numel > COARSE else 0
    while (at := bracket.next()) is not None and bracket.looks < 40:
        coded = encode(toward_zero(2.0**at))
        good, value = coded.error <= alpha * coded.norm, log2_error(coded.error, coded.norm, alpha)
        # Logarithms round: the comparison itself decides.
        bracket.tell(at, min(value, 0.0) if good else max(value, 1e-9))
        if good and (bracket.good or not corrections or coded.error <= 0):
            return coded
        corrections = max(corrections - (bracket.at is not None), 0)
    # The last message is not the best one.
    return None if bracket.at is None else encode(toward_zero(2.0**bracket.at))


def meet_size(norm: float, budget: int, numel: int, encode: Callable[[float], Coded]) -> Coded | None:
    """A message at nearly the smallest step that fits into ``budget`` bytes; None where no step did."""
    best = None
    # Finer steps, the larger negative logarithms, take about one bit more per octave.
    rate = 8 * budget / numel
    start = min(rate, 24.0) - 2 - math.log2(norm / numel) / 2
    bracket = Bracket(start=start, slope=1.0, tight=-0.0025 * rate, low=-127.0, high=126.0, reach=2.0)
    while (at := bracket.next()) is not None and bracket.looks < 60:
        coded = encode(toward_zero(2.0**-at))
        bracket.tell(at, 8 * (coded.data.numel() - budget) / numel)
        if at == bracket.at:
            best = coded
            # Exact for all purposes: a longer message tells nothing more.
            if coded.error <= 1e-12 * norm:
                break
    return best

"""Steps for quantisers that are given a target: the largest step whose error is at most alpha, the smallest whose message fits.

Both work on log2 of the step through :class:`~tersegrad.core.search.Bracket`. A search for an error looks at samples of the vector
first; what it returns was verified on all of it.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable

import torch
from torch import Tensor

from tersegrad.core import host
from tersegrad.core.numbers import HUGE, TINY, exp2, float32, float32_bits, float32_of, log2
from tersegrad.core.search import Bracket
from tersegrad.core.text import require

# Coordinates that a search for the step looks at: often, and a few times; they come in blocks.
COARSE, FINE, BLOCK = 1 << 16, 1 << 21, 1 << 12
# A search on a sample may end this much (relative) below the target error: half a hundredth of a bit.
SLACK = 0.006
# log2 of an error over its target from which the slope leads to the target.
NEAR = 0.05
# Looks at the larger sample, at most.
FINE_LOOKS = 4
# log2 of an error over its target that costs less than 0.005 bit.
CLOSE = -0.009
# How far below the target a search on samples ends, as a share of what they may mislead by: for rounding to nearest and for trellis codes.
MARGIN, TRELLIS_MARGIN = 0.5, 0.25
# Whole messages after the first that meets the target, for one that is closer to it.
CORRECTIONS = 5


@dataclasses.dataclass(frozen=True)
class Coded:
    """A message, and what its encoder knows of the error."""

    buffer: Tensor  # uint8, at least nbytes long
    nbytes: int
    norm: float = 0.0  # ||x||^2
    error: float = 0.0  # ||x - decoded||^2

    @property
    def data(self) -> Tensor:
        return self.buffer[: self.nbytes]


def one_target(name: str, nu: float | None, alpha: float | None, bits: float | None) -> float:
    """The error that is promised by the one of nu (a certificate), alpha (an error) and bits (a budget) that was given."""
    given = [key for key, value in (("nu", nu), ("alpha", alpha), ("bits", bits)) if value is not None]
    require(len(given) == 1, f"{name} takes exactly one of nu, alpha and bits, got {given or 'none'}")
    require(nu is None or 0 < nu <= 1, f"nu must lie in (0, 1], got {nu}: for larger errors use alpha=")
    require(alpha is None or 0 < alpha < 1, f"alpha must lie in (0, 1), got {alpha}")
    require(bits is None or 0 < bits < math.inf, f"bits is a budget per coordinate and must be positive, got {bits}")
    return nu if nu is not None else alpha if alpha is not None else 1.0


def toward_zero(value: float) -> float:
    """The nearest normal float32 that is not larger.

    >>> toward_zero(0.1), toward_zero(0.0) == 2**-126
    (0.09999999403953552, True)
    """
    value = min(max(value, TINY), HUGE)
    rounded = float32(value)
    # The one below a positive float32 has the next lower bits.
    return float32_of(float32_bits(rounded) - 1) if rounded > value else rounded


@functools.lru_cache(maxsize=64)
def step_at(at: float) -> float:
    """The step that a search means by a place: its binary logarithm.

    >>> step_at(-1.0), step_at(1000.0) == HUGE
    (0.5, True)
    """
    return toward_zero(exp2(at))


def strided(x: Tensor, most: int) -> Tensor:
    """About ``most`` coordinates of x, in blocks that are evenly spread; all of them if there are no more."""
    stride = x.numel() // most
    return x if stride < 2 else x[: x.numel() // BLOCK * BLOCK].view(-1, BLOCK)[::stride].reshape(-1)


def log2_error(wrong: float, norm: float, alpha: float) -> float:
    """log2 of the relative error over alpha; errors below 1e-300 count as that much."""
    return log2(max(wrong / norm if norm > 0 else 0.0, 1e-300)) - log2(alpha)


def rounding_energy(norm: float, numel: int) -> float:
    """For :func:`sampled_step`, from a sample's squared norm: rounding to nearest errs by a twelfth of the squared step."""
    return 12 * norm / (numel // max(1, numel // COARSE) + 1)


class Looks:
    """Squared error and squared norm of about ``most`` coordinates, evenly spread, of all where there are no more, at a step.

    ``ask(most, step)`` gives them as two float64 numbers. Where these are on a device a look is a read, and so are several together.
    """

    def __init__(self, ask: Callable[[int, float], Tensor]) -> None:
        self._ask = ask
        self._known: dict[tuple[int, float], tuple[float, float]] = {}

    def __call__(self, most: int, step: float) -> tuple[float, float]:
        if (most, step) not in self._known:
            self._known[most, step] = _pair(host.read(self._ask(most, step)).tolist())
        return self._known[most, step]

    def together(self, *looks: tuple[int, float]) -> None:
        """These will be asked for, one by one."""
        found = [self._ask(*look) for look in looks]
        rows = found if found[0].is_cpu else host.read(torch.stack(found))
        self._known.update({look: _pair(row.tolist()) for look, row in zip(looks, rows, strict=True)})


def _pair(numbers: list[float]) -> tuple[float, float]:
    error, norm = numbers
    return error, norm


def refines(numel: int) -> bool:
    """Whether a search looks at a larger sample after the small one, which is less than the whole."""
    return numel // COARSE > 1


def sample_target(numel: int, alpha: float, margin: float) -> tuple[float, float, float]:
    """What a search on samples aims at, and how good is good enough on the small and on the larger one."""
    fine = numel // FINE > 1
    aim = alpha * (1 - (SLACK * margin if fine else SLACK / 6 if refines(numel) else 0)) or alpha
    return aim, log2(1 - SLACK), log2(1 - SLACK * (margin if fine else 0.8))


def sampled_step(look: Looks, numel: int, alpha: float, energy: float, margin: float) -> Bracket:
    """A bracket that starts at log2 of a step whose error on a sample of a vector is just below alpha.

    ``energy``: a small step is expected to err by alpha where its square is alpha times this. ``margin``: how far
    below the target to end, as a share of what a sample may mislead by.
    """
    aim, tight, near_tight = sample_target(numel, alpha, margin)

    def value(most: int) -> Callable[[float], float]:
        return lambda at: log2_error(*look(most, step_at(at)), aim)

    # A small step errs in proportion to its square: the logarithm rises by 2 per octave.
    start, error = (log2(energy) + log2(aim)) / 2, value(COARSE)
    at, slope = Bracket(start=start, slope=2.0, tight=tight).search(error, trials=60).low, 2.0
    if refines(numel):
        # Refine on a larger sample, starting from the slope measured on the small one. From a near miss that slope leads to a
        # place that need not be looked at.
        look.together(*((m, step_at(a)) for m, a in ((COARSE, at + 0.125), (COARSE, at - 0.125), (FINE, at))))
        slope = min(max(4 * (error(at + 0.125) - error(at - 0.125)), 0.25), 4.0)
        near = Bracket(start=at, slope=slope, tight=near_tight)
        error, here = value(FINE), math.inf
        while near.looks < FINE_LOOKS and not near.good and abs(here) >= NEAR:
            here = error(at)
            near.tell(at, here)
            at = at if near.good else near.guess()
        if near.at is not None and abs(here) >= NEAR:
            at = near.at
        slope = near.slope
    return Bracket(start=at, slope=slope, tight=CLOSE)


def meet_error(
    bracket: Bracket, alpha: float, numel: int, encode: Callable[[float], Coded], first: Coded | None = None
) -> Coded | None:
    """A message at nearly the largest step whose error is at most alpha, verified; None where no step met it.

    ``first``: the message at the step that the bracket starts from, where it is known.
    """
    corrections = CORRECTIONS if numel > COARSE else 0
    while (at := bracket.next()) is not None and bracket.looks < 40:
        coded, first = first or encode(step_at(at)), None
        good, value = coded.error <= alpha * coded.norm, log2_error(coded.error, coded.norm, alpha)
        # Logarithms round: the comparison itself decides.
        bracket.tell(at, min(value, 0.0) if good else max(value, 1e-9))
        if good and (bracket.good or not corrections or coded.error <= 0):
            return coded
        corrections = max(corrections - (bracket.at is not None), 0)
    # The last message is not the best one.
    return None if bracket.at is None else encode(step_at(bracket.at))


def meet_error_aimed(
    aim: Callable[[float], Tensor],
    alpha: float,
    numel: int,
    encode: Callable[[float | Tensor], Coded],
    squares: Callable[[], Tensor],
) -> Coded | None:
    """As :func:`meet_error`, but samples of x choose the first step, on the device, and the first message is encoded with it at once.

    If the error of that message is close enough to the target, the device is read from only once.
    ``aim(norm)`` gives, on the device, what ``dither_aim`` does. ``squares()``: the squared norm of the whole vector.
    """
    seen = 0.0
    while True:
        found = aim(seen)
        told = host.fetch(found)
        first = encode(found[0])
        _, at, slope, norm = told.tolist()
        if norm or not 0 < first.norm < math.inf:
            break
        # The sample is all zeros, the vector is not: aim again with the norm of the whole vector.
        seen = float(squares())
    if not 0 < norm < math.inf:
        return first
    return meet_error(Bracket(start=at, slope=slope, tight=CLOSE), alpha, numel, encode, first)


def aimed_bracket(aim: Callable[[float], Tensor], squares: Callable[[], Tensor]) -> Bracket | None:
    """Where a search begins on the host, by :func:`meet_error_aimed`'s ``aim`` and ``squares``; None for zeros and what is not finite."""
    _, at, slope, norm = host.read(aim(0.0)).tolist()
    if norm == 0:
        norm = float(squares())
        _, at, slope, _ = host.read(aim(norm)).tolist()
    return Bracket(start=at, slope=slope, tight=CLOSE) if 0 < norm < math.inf else None


def meet_size(norm: float, budget: int, numel: int, encode: Callable[[float], Coded]) -> Coded | None:
    """A message at nearly the smallest step that fits into ``budget`` bytes; None where no step did."""
    best = None
    # Finer steps, the larger negative logarithms, take about one bit more per octave.
    rate = 8 * budget / numel
    start = min(rate, 24.0) - 2 - log2(norm / numel) / 2
    bracket = Bracket(start=start, slope=1.0, tight=-0.0025 * rate, low=-127.0, high=126.0, reach=2.0)
    while (at := bracket.next()) is not None and bracket.looks < 60:
        coded = encode(step_at(-at))
        bracket.tell(at, 8 * (coded.nbytes - budget) / numel)
        if at == bracket.at:
            best = coded
            # Exact for all purposes: a longer message tells nothing more.
            if coded.error <= 1e-12 * norm:
                break
    return best

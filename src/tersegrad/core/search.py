"""The largest number that is still allowed, where asking is expensive: a step whose error meets a target, a message that fits.

``value(at)`` tells how far ``at`` is beyond what is allowed: it rises with ``at``, at least roughly, and ``at`` is allowed where it
is at most 0. :class:`Bracket` proposes where to look next. It never forgets the largest place that was allowed, proposes only
places between that and the smallest one that was refused, and so ends after few looks whatever the values are: smooth, flat, in
steps or without any order.
"""

from __future__ import annotations

import math
from collections.abc import Callable

# Slopes that are taken from two looks stay within these factors of the one that was expected.
SLOPES = (1 / 8, 2.0)
# Where secants do not halve the bracket, every so many looks do.
HALVING = 4
# Looks on one side after which each goes twice as far as the slope says.
PATIENCE = 3


class Bracket:
    """Where to look for the largest allowed place in [low, high].

    ``start``: the first look. ``slope``: how much the value is expected to rise per unit. ``tight``, negative: an allowed place
    whose value is at least this is good enough. ``reach``: how far one look may lie from the last before the next one may go twice
    as far. ``resolution``: a bracket this narrow is closed.

    >>> bracket = Bracket(start=3.0, slope=1.0, tight=-0.01, low=0.0, high=100.0)
    >>> found = bracket.search(lambda at: math.log2(at) - 5, trials=20)
    >>> 31.5 < found.at <= 32, found.looks
    (True, 7)
    """

    def __init__(
        self,
        *,
        start: float,
        slope: float,
        tight: float,
        low: float = -126.0,
        high: float = 127.0,
        reach: float = 4.0,
        resolution: float = 1e-3,
    ) -> None:
        self.low, self.high = low, high
        self.slope, self.tight, self.reach, self.resolution = slope, tight, reach, resolution
        self.start = min(max(start, low), high)
        self.looks = 0
        self.at: float | None = None
        """The largest place that was allowed."""
        self.value = -math.inf
        """Its value."""
        self._refused: tuple[float, float] | None = None
        self._last: tuple[float, float] | None = None
        self._expected = slope

    @property
    def good(self) -> bool:
        """Whether an allowed place is good enough."""
        return self.at is not None and self.value >= self.tight

    def tell(self, at: float, value: float) -> None:
        """What a look at ``at`` has found; a value that is not a number counts as refused."""
        self.looks += 1
        if self._last is not None and math.isfinite(value) and abs(at - self._last[0]) > 10 * self.resolution:
            slope = (value - self._last[1]) / (at - self._last[0])
            if math.isfinite(slope):
                self.slope = min(max(slope, SLOPES[0] * self._expected), SLOPES[1] * self._expected)
        self._last = at, value
        if value <= 0:
            self.at, self.value, self.low = at, value, at
        else:
            self._refused, self.high = (at, value), at

    def next(self) -> float | None:
        """Where to look next; None where it is not worth while."""
        if self._last is None:
            return self.start
        if self.good or self.high - self.low < self.resolution:
            return None
        return self.guess()

    def guess(self) -> float:
        """The place that is expected to be just good enough, inside the bracket."""
        assert self._last is not None
        at, value = self._last
        aim = self.tight / 2
        if self.at is not None and self._refused is not None:
            share = (aim - self.value) / (self._refused[1] - self.value)
            halve = self.looks % HALVING == 0 or not 0 < share < 1
            return self.low + (self.high - self.low) * (0.5 if halve else min(max(share, 0.05), 0.95))
        # All looks were on one side: follow the slope, within a reach that grows, and faster with every look that did not help.
        move = abs(aim - value) / self.slope * 2.0 ** max(0, self.looks - PATIENCE)
        move = max(min(move, self.reach) if math.isfinite(move) else self.reach, self.resolution)
        self.reach *= 2
        return max(at - move, self.low) if self.at is None else min(at + move, self.high)

    def search(self, value: Callable[[float], float], trials: int) -> Bracket:
        """Look until it is good enough, at most ``trials`` times."""
        while self.looks < trials:
            at = self.next()
            if at is None:
                break
            self.tell(at, value(at))
        return self

"""A training step on a clock: the backward pass gives gradients group by group, and each group's exchange is under way meanwhile.

Two things are occupied: the processor, by the backward pass and by coding, and the wire, by one collective after another. (The latency
of a collective does not occupy it.) Where no core is spare, sending takes its toll from computing, for the part of a collective that
passes while the worker computes; a worker that waits does that work in the time in which it waits. Who waits when is what the code does:

- ``pipeline``: our engine under DDP. A group that is complete is encoded at once; then every older exchange is waited for and moved on by
  one collective (:class:`tersegrad.exchange.Pipeline`).
- ``end``: torch's all-reduce under DDP. Nothing waits before the backward pass has ended.
- ``each``: our engine under FSDP2, and local SGD. Every exchange is waited for at once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Literal

from tersegrad.core.text import require
from tersegrad.planner.trips import Leg, Trip

Waits = Literal["pipeline", "end", "each"]


@dataclasses.dataclass(frozen=True)
class Timeline:
    """``seconds`` from the first segment's begin to the last result; ``waited``: of them, those in which the processor idles."""

    seconds: float
    waited: float


class _Flight:
    """A trip under way."""

    def __init__(self, trip: Trip) -> None:
        self.legs, self.last, self.done, self.end = list(trip.legs), trip.last, False, 0.0


class _Clock:
    """The processor's time, and when the wire is free."""

    def __init__(self) -> None:
        self.now, self.free, self.waited = 0.0, 0.0, 0.0
        # Collectives that take from computing, with when they get the wire.
        self._tolls: list[tuple[float, Leg]] = []

    def work(self, seconds: float) -> None:
        """Compute, and pay the toll of what is on the wire meanwhile."""
        until = self.now + seconds
        for begin, leg in self._tolls:
            meanwhile = min(until, begin + leg.busy) - max(self.now, begin)
            seconds += leg.toll * max(0.0, meanwhile) / leg.busy
        self.now += seconds
        self._tolls = [(begin, leg) for begin, leg in self._tolls if begin + leg.busy > self.now]

    def begin(self, flight: _Flight) -> None:
        """Work, then the next collective; or the last work."""
        if not flight.legs:
            self.work(flight.last)
            flight.done = True
            return
        leg = flight.legs.pop(0)
        self.work(leg.work)
        begin = max(self.now, self.free)
        if leg.toll and leg.busy:
            self._tolls.append((begin, leg))
        self.free = begin + leg.busy
        flight.end = self.free + leg.delay

    def advance(self, flight: _Flight) -> None:
        """Wait for the collective under way, and go on."""
        if not flight.done:
            self.waited += max(0.0, flight.end - self.now)
            self.now = max(self.now, flight.end)
            self.begin(flight)


def simulate(segments: Sequence[float], trips: Sequence[Trip], waits: Waits = "pipeline") -> Timeline:
    """The time of a backward pass with exchanges; ``segments``: seconds of computing before each group is complete.

    >>> one = Trip((Leg(work=1.0, busy=4.0),), last=1.0)
    >>> simulate([10.0, 10.0], [one, one], "end").seconds  # all but the last group's wire is hidden
    27.0
    >>> simulate([10.0, 10.0], [one, one], "each").seconds
    32.0
    >>> crowded = Trip((Leg(work=1.0, busy=4.0, toll=3.0),), last=0.0)
    >>> simulate([10.0, 10.0], [crowded, crowded], "end").seconds  # sending the first group takes 3 seconds from the backward pass
    29.0
    """
    require(len(segments) == len(trips), f"{len(segments)} segments do not fit {len(trips)} exchanges")
    clock, flights = _Clock(), list[_Flight]()
    for segment, trip in zip(segments, trips):
        clock.work(segment)
        flight = _Flight(trip)
        clock.begin(flight)
        if waits == "pipeline":
            for older in reversed(flights):
                clock.advance(older)
        while waits == "each" and not flight.done:
            clock.advance(flight)
        flights.append(flight)
    while not all(flight.done for flight in flights):
        for flight in reversed(flights) if waits == "pipeline" else flights:
            clock.advance(flight)
    return Timeline(clock.now, clock.waited)

"""When workers that train alone exchange what they have learned, and how the outer optimiser steps: local SGD, DiLoCo, SparseLoCo."""

from __future__ import annotations

import dataclasses
import itertools
import types
from collections.abc import Mapping, Sequence
from typing import ClassVar

from tersegrad.core.text import Configuration, require
from tersegrad.integrations.schedules import SCHEDULES, Schedule
from tersegrad.recipes import parse_form


@dataclasses.dataclass(frozen=True)
class Method(Configuration):
    """When and how rounds end; the classes below are sets of defaults."""

    every: int  # inner steps between two exchanges of the same parameters
    lr: float = 1.0  # of the outer optimiser
    momentum: float = 0.0  # Nesterov's, of the outer optimiser
    fragments: int = 1  # parts of the model that take turns
    overlap: int = 0  # inner steps that an exchange may take
    mixing: float | None = None  # share of the worker's own parameters that is kept when the mean arrives; 0.5 with overlap
    schedule: Schedule | None = None  # of the outer rate

    def __post_init__(self) -> None:
        require(self.every >= 1, f"{self.name}: every is at least 1, got {self.every}")
        require(self.lr > 0 and 0 <= self.momentum < 1, f"{self.name}: lr > 0 and 0 <= momentum < 1")
        require(1 <= self.fragments <= self.every, f"{self.name}: fragments lies between 1 and every, got {self.fragments}")
        require(0 <= self.overlap < self.every, f"{self.name}: overlap is less than every = {self.every}, got {self.overlap}")
        require(self.mixing is None or 0 <= self.mixing < 1, f"{self.name}: mixing lies in [0, 1), got {self.mixing}")
        known = self.schedule is None or isinstance(self.schedule, Schedule)
        require(known, f"{self.name}: schedule is one of {', '.join(SCHEDULES)}, got {self.schedule!r}")

    def rate(self, step: int) -> float:
        """The outer rate of an update that is taken in after ``step`` inner steps; the first round is number 0."""
        round_ = max(0, step - self.overlap - 1) // self.every
        return self.lr * (self.schedule.factor(round_) if self.schedule is not None else 1.0)

    @property
    def kept(self) -> float:
        """The share of its own parameters that a worker keeps."""
        return self.mixing if self.mixing is not None else 0.5 if self.overlap else 0.0

    def turn(self, step: int) -> list[int]:
        """The fragments that are exchanged after ``step`` inner steps, spread evenly."""
        return [f for f in range(self.fragments) if (step + f * self.every // self.fragments) % self.every == 0]

    def reaches(self, steps: int, departed: Sequence[tuple[int, int]], flights: Sequence[tuple[int, int, bool]]) -> bool:
        """Whether a run can be here after ``steps``: (fragment, step of its latest exchange), and (fragment, step it is due at, kept)."""
        pairs = [*departed, *((fragment, due) for fragment, due, _ in flights)]
        whole = all(type(number) is int for number in (steps, *itertools.chain(*pairs)))
        if not whole or not all(type(kept) is bool for *_, kept in flights):
            return False
        once = all(len({fragment for fragment, *_ in rows}) == len(rows) for rows in (departed, flights))
        past = all(0 <= fragment < self.fragments and 0 <= step <= steps for fragment, step in departed)
        return once and past and all(f in dict(departed) and steps < due <= steps + self.overlap for f, due, _ in flights)


@dataclasses.dataclass(frozen=True)
class LocalSGD(Method):
    """The mean of the workers' parameters, every so many steps.

    >>> print(LocalSGD(every=8))
    local_sgd(every=8)
    """

    name: ClassVar[str] = "local_sgd"

    every: int = 10


@dataclasses.dataclass(frozen=True)
class DiLoCo(Method):
    """Nesterov steps along the mean pseudo-gradient.

    >>> DiLoCo(every=100, fragments=4).turn(25), DiLoCo(every=100, fragments=4).turn(26)
    ([3], [])
    """

    name: ClassVar[str] = "diloco"

    every: int = 50
    lr: float = 0.7
    momentum: float = 0.9


@dataclasses.dataclass(frozen=True)
class SparseLoCo(Method):
    """Plain steps along the update, without momentum, every 30 inner steps (Sarfi et al. 2025)."""

    name: ClassVar[str] = "sparse_loco"

    every: int = 30


@dataclasses.dataclass(frozen=True)
class StreamingDiLoCo(Method):
    """DiLoCo whose fragments take turns while the workers go on; half of what they learn meanwhile is kept (Douillard et al. 2025).

    >>> StreamingDiLoCo().kept
    0.5
    """

    name: ClassVar[str] = "streaming_diloco"

    every: int = 100
    lr: float = 0.4
    momentum: float = 0.9
    fragments: int = 4
    overlap: int = 5


METHODS: Mapping[str, type[Method]] = types.MappingProxyType(
    {m.name: m for m in (LocalSGD, DiLoCo, SparseLoCo, StreamingDiLoCo)}
)


def method(text: str | Method) -> Method:
    """The method that a text form describes.

    >>> method("diloco(every=20)").momentum
    0.9
    >>> method("sparse_loco(schedule=stages([900], [0.4]))").rate(30 * 901)
    0.4
    """
    if isinstance(text, Method):
        return text
    made: Method = parse_form(text, {**METHODS, **SCHEDULES}, "method")
    require(isinstance(made, Method), f"{text} is a schedule; the methods are {', '.join(METHODS)}")
    return made

"""When workers that train alone exchange what they have learned, and how the outer optimiser steps: local SGD and DiLoCo."""

from __future__ import annotations

import dataclasses
import itertools
import types
from collections.abc import Mapping, Sequence
from typing import ClassVar

from tersegrad.core.text import Configuration, require
from tersegrad.recipes import parse_form


@dataclasses.dataclass(frozen=True)
class Method(Configuration):
    """When and how rounds end; :class:`LocalSGD` and :class:`DiLoCo` are two sets of defaults."""

    every: int  # inner steps between two exchanges of the same parameters
    lr: float = 1.0  # of the outer optimiser
    momentum: float = 0.0  # Nesterov's, of the outer optimiser
    fragments: int = 1  # parts of the model that take turns
    overlap: int = 0  # inner steps that an exchange may take
    mixing: float | None = None  # share of the worker's own parameters that is kept when the mean arrives; 0.5 with overlap

    def __post_init__(self) -> None:
        require(self.every >= 1, f"{self.name}: every is at least 1, got {self.every}")
        require(self.lr > 0 and 0 <= self.momentum < 1, f"{self.name}: lr > 0 and 0 <= momentum < 1")
        require(1 <= self.fragments <= self.every, f"{self.name}: fragments lies between 1 and every, got {self.fragments}")
        require(0 <= self.overlap < self.every, f"{self.name}: overlap is less than every = {self.every}, got {self.overlap}")
        require(self.mixing is None or 0 <= self.mixing < 1, f"{self.name}: mixing lies in [0, 1), got {self.mixing}")

    @property
    def kept(self) -> float:
        """The share of its own parameters that a worker keeps."""
        return self.mixing if self.mixing is not None else 0.5 if self.overlap else 0.0

    def turn(self, step: int) -> list[int]:
        """The fragments that are exchanged after ``step`` inner steps, spread evenly."""
        return [f for f in range(self.fragments) if (step + f * self.every // self.fragments) % self.every == 0]

    def reaches(self, steps: int, departed: Sequence[tuple[int, int]], flights: Sequence[tuple[int, int, bool]]) -> bool:
        """Whether a run can be here after ``steps``: (fragment, step of its latest exchange), and (fragment, step it is due at, ...)."""
        pairs = [*departed, *((fragment, due) for fragment, due, _ in flights)]
        if not all(type(number) is int for number in (steps, *itertools.chain(*pairs))):
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


METHODS: Mapping[str, type[Method]] = types.MappingProxyType({m.name: m for m in (LocalSGD, DiLoCo)})


def method(text: str | Method) -> Method:
    """The method that a text form describes.

    >>> method("diloco(every=20)").momentum
    0.9
    """
    if isinstance(text, Method):
        return text
    made: Method = parse_form(text, METHODS, "method")
    return made

"""How the outer rate of workers that train alone changes from round to round.

>>> Cosine(rounds=100, least=0.1).factor(50), Linear(rounds=10).factor(5), Stages((3, 5), (0.5, 0.1)).factor(4)
(0.55, 0.5, 0.5)
"""

from __future__ import annotations

import dataclasses
import math
import types
from collections.abc import Mapping
from typing import ClassVar

from tersegrad.core.text import Configuration, require


@dataclasses.dataclass(frozen=True)
class Schedule(Configuration):
    """A factor of the outer rate for each round, from 0 on."""

    def factor(self, round_: int) -> float:
        raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class Linear(Schedule):
    """From 1 down to ``least``, which is reached after ``rounds`` rounds."""

    name: ClassVar[str] = "linear"

    rounds: int
    least: float = 0.0

    def __post_init__(self) -> None:
        require(self.rounds >= 1 and 0 <= self.least <= 1, f"{self.name}: rounds is at least 1, least lies in [0, 1]")

    def factor(self, round_: int) -> float:
        return self.least + (1 - self.least) * (1 - min(round_ / self.rounds, 1.0))


@dataclasses.dataclass(frozen=True)
class Cosine(Schedule):
    """Half a cosine from 1 down to ``least``, which is reached after ``rounds`` rounds."""

    name: ClassVar[str] = "cosine"

    rounds: int
    least: float = 0.0

    def __post_init__(self) -> None:
        require(self.rounds >= 1 and 0 <= self.least <= 1, f"{self.name}: rounds is at least 1, least lies in [0, 1]")

    def factor(self, round_: int) -> float:
        return self.least + (1 - self.least) * (1 + math.cos(math.pi * min(round_ / self.rounds, 1.0))) / 2


@dataclasses.dataclass(frozen=True)
class Stages(Schedule):
    """1, and from round ``after[j]`` on ``factors[j]``."""

    name: ClassVar[str] = "stages"

    after: tuple[int, ...]
    factors: tuple[float, ...]

    def __post_init__(self) -> None:
        require(len(self.after) == len(self.factors) > 0, "stages: as many factors as rounds, at least one")
        require(list(self.after) == sorted(set(self.after)) and self.after[0] >= 0, "stages: rounds increase")
        require(all(f > 0 and math.isfinite(f) for f in self.factors), "stages: factors are positive")

    def factor(self, round_: int) -> float:
        return next((f for start, f in reversed([*zip(self.after, self.factors)]) if round_ >= start), 1.0)


SCHEDULES: Mapping[str, type[Schedule]] = types.MappingProxyType({s.name: s for s in (Linear, Cosine, Stages)})

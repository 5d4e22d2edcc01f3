"""Delay without any other error, and how old what a message carries is.

:class:`Late` sends every gradient some steps later, and :class:`Leaky` sends a share of what there is and keeps the rest, so that ages are
geometric: both exactly, in 32 bits. What training loses with them, it loses through delay.

:class:`Ages` follows the mass of every coordinate through error feedback. A residual grows one step older with every step; what a message
sends of a coordinate is a share of all that has gathered there, the old and the new alike. The mean age is over what was sent,
weighed by its size. In a steady state it is (mass that waits) / (mass sent per step), Little's law, which needs no history: the cheap
estimate is ||residual||_1 / ||message||_1.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import torch
from torch import Tensor

from tersegrad.compressors import Identity
from tersegrad.core.protocol import Context, Guarantee, Message, Spec, Stats
from tersegrad.core.state import carried, slice_spec
from tersegrad.core.text import Configuration, require

EVERY = 8  # one coordinate in so many is followed


@dataclasses.dataclass(frozen=True)
class _Exact(Configuration):
    """What the two have in common: messages are those of ``identity``."""

    wire_id: ClassVar[int] = 200
    fixed_size: ClassVar[bool] = True

    def decode(self, message: Message, spec: Spec, ctx: Context, out: Tensor | None = None) -> Tensor:
        return Identity().decode(message, spec, ctx, out)

    def max_nbytes(self, spec: Spec) -> int:
        return Identity().max_nbytes(spec)

    def guarantee(self, spec: Spec) -> Guarantee:
        return Guarantee("none")


@dataclasses.dataclass(frozen=True)
class Queue:
    """Gradients that are not sent yet, the oldest first."""

    held: Tensor  # (steps, numel)


@dataclasses.dataclass(frozen=True)
class Late(_Exact):
    """Send every gradient exactly, ``steps`` steps later; the first steps send zeros."""

    name: ClassVar[str] = "late"

    steps: int

    def init(self, spec: Spec, device: torch.device | str) -> Queue:
        return Queue(torch.zeros(self.steps, spec.numel, device=device))

    def encode(
        self, x: Tensor, spec: Spec, state: Queue, ctx: Context, *, stats: Stats | None = None, out: Tensor | None = None
    ) -> tuple[Message, Queue]:
        line = torch.cat([state.held, x[None]])
        return Identity().encode(line[0], spec, None, ctx, out=out)[0], Queue(line[1:])


@dataclasses.dataclass(frozen=True)
class Waiting:
    """What waits, by coordinate."""

    carries: ClassVar[str] = "residual"

    residual: Tensor


@dataclasses.dataclass(frozen=True)
class Leaky(_Exact):
    """Send ``share`` of what has gathered, exactly: a mean age of (1 - share) / share steps."""

    name: ClassVar[str] = "leaky"

    share: float

    def __post_init__(self) -> None:
        require(0 < self.share <= 1, f"leaky: 0 < share <= 1, got {self.share}")

    def init(self, spec: Spec, device: torch.device | str) -> Waiting:
        return Waiting(torch.zeros(spec.numel, device=device))

    def encode(
        self, x: Tensor, spec: Spec, state: Waiting, ctx: Context, *, stats: Stats | None = None, out: Tensor | None = None
    ) -> tuple[Message, Waiting]:
        whole = x + state.residual
        sent = whole * self.share
        return Identity().encode(sent, spec, None, ctx, out=out)[0], Waiting(whole - sent)


class _Mass:
    """Mass and its age by coordinate, of one sender."""

    def __init__(self, numel: int) -> None:
        self.waits, self.aged = torch.zeros(numel), torch.zeros(numel)
        self.sent = self.sent_aged = self.held = self.out = 0.0

    def step(self, given: Tensor, before: Tensor, after: Tensor) -> Tensor:
        """A message went out: ``given`` came in, and the residual was ``before`` and is ``after``. Returns what was sent."""
        whole = given + before
        sent = whole - after
        mass = self.waits + given.abs()
        aged = self.aged + self.waits
        share = torch.where(whole != 0, sent / whole, torch.zeros_like(whole)).clamp_(0, 1)
        self.sent += float((share * mass).sum())
        self.sent_aged += float((share * aged).sum())
        self.held += float(before.abs().sum())
        self.out += float(sent.abs().sum())
        self.waits, self.aged = (1 - share) * mass, (1 - share) * aged
        return sent


class Ages:
    """The ages of what all workers' messages carried, over a run; both rounds of a two-shot exchange."""

    def __init__(self, exchange: Any, spec: Spec, size: int) -> None:
        self.exchange, self.spec, self.size = exchange, spec, size
        numel = -(-spec.numel // EVERY)
        self.first, self.second = [_Mass(numel) for _ in range(size)], _Mass(numel)
        self.keeps = False  # whether anything was ever carried

    def _carried(self, states: list[Any]) -> tuple[list[Tensor], Tensor]:
        """The residuals of each rank's first round, and of the second round of all."""
        first, second = [torch.zeros(self.spec.numel) for _ in states], torch.zeros(self.spec.numel)
        for rank, state in enumerate(states):
            for part in self.exchange.parts(state, self.spec, rank, self.size):
                amount = carried(part.state, slice_spec(self.spec, part.start, part.stop))
                if amount is not None:
                    self.keeps = True
                    (second if part.round == "second" else first[rank])[part.start : part.stop] = amount
        return [r[::EVERY] for r in first], second[::EVERY]

    def step(self, given: list[Tensor], before: list[Any], after: list[Any]) -> None:
        """Take one exchange in."""
        old, old_second = self._carried(before)
        new, new_second = self._carried(after)
        if not self.keeps:
            return
        sent = [mass.step(x[::EVERY], a, b) for mass, x, a, b in zip(self.first, given, old, new)]
        self.second.step(torch.stack(sent).mean(0), old_second, new_second)

    @property
    def mean(self) -> float:
        """Steps that what was sent had waited, in both rounds."""
        return _ratio(sum(m.sent_aged for m in self.first), sum(m.sent for m in self.first)) + _ratio(
            self.second.sent_aged, self.second.sent
        )

    @property
    def estimate(self) -> float:
        """The same by Little's law, of the first round alone, from sizes of residuals and messages."""
        return _ratio(sum(m.held for m in self.first), sum(m.out for m in self.first))

    @property
    def first_mean(self) -> float:
        """Of the first round alone."""
        return _ratio(sum(m.sent_aged for m in self.first), sum(m.sent for m in self.first))


def _ratio(a: float, b: float) -> float:
    return a / b if b else 0.0

"""One step: vectors in, means out, and states that are committed together or not at all.

``submit`` starts a group's exchange and moves the ones before it on by one collective, so that bytes travel while later vectors are
computed; the order of collectives follows from the order of submitting alone, hence is the same on every rank. On a GPU that may
happen beside the backward pass (:mod:`tersegrad.engine.aside`). ``results`` finishes all of them. What the integration made of the results
goes through ``check``, in the dtype and at the scale in which the optimiser will see it, and ``commit`` keeps the new states if everything
was finite: the decision is the same on every rank, and the one a GradScaler takes.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import struct
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tersegrad import kernels
from tersegrad.compressors import Identity
from tersegrad.core.errors import BadConfiguration
from tersegrad.core.protocol import Stats
from tersegrad.engine.lane import Lane, Meters
from tersegrad.engine.layers import Layer
from tersegrad.exchange import Pending, Pipeline, start

if TYPE_CHECKING:
    from tersegrad.engine.engine import Engine

AGAIN = 1 << 16  # children of a context for the second and later exchanges of a group within one step


@dataclasses.dataclass
class _Flight:
    """One exchange under way. ``x`` is kept only where the result will be compared with the exact one."""

    lane: Lane
    pending: Pending[Any]
    x: Tensor | None
    counted: bool = False


class Step:
    """The exchanges of one step, made by :meth:`tersegrad.engine.Engine.begin`."""

    def __init__(self, engine: Engine, number: int, scale: float, dense: bool, measured: bool) -> None:
        self._engine, self.number, self.scale = engine, number, scale
        self.dense, self.measured = dense, measured
        self._due = engine.logs.due(number)
        # What is measured is measured in order, by the caller.
        self._aside = None if measured or self._due else engine.aside()
        self._pipeline: Pipeline[Any] = Pipeline()
        self._flights: list[_Flight] = []
        self._after: dict[int, Any] = {}  # the tentative states by group
        self._flags: list[Tensor] = []
        self.layers: dict[str, Layer] = {}  # what a log of this step will say of each layer

    def submit(self, number: int, x: Tensor, stats: Stats | None = None, *, owned: bool = False) -> None:
        """Start the exchange of a group's vector, given at the loss scale. ``owned``: ``x`` may be written to."""
        if self._aside is None:
            self._submit(number, x, stats, owned)
        else:
            self._aside.do(functools.partial(self._submit, number, x, stats, owned))

    def _submit(self, number: int, x: Tensor, stats: Stats | None, owned: bool) -> None:
        lane, totals = self._engine.lanes[number], self._engine.totals
        if self.scale != 1.0:
            x = x.mul_(1.0 / self.scale) if owned else x * (1.0 / self.scale)
        ctx = lane.context(self._engine.settings.seed, self.number)
        times = self.submitted(number)
        if times:
            self._land(number)
            ctx = ctx.child(AGAIN + times)
        if self.dense:
            exchange = lane.plain(self._engine.settings.dense_for(lane.group.dtype), totals.meters)
            state = lane.fresh(exchange)
        else:
            exchange, state = lane.exchange, self._after.get(number, lane.state)
        if self._engine.auto is not None:
            self._engine.auto.see(self._engine, lane, x)
        totals.meters.first.probing = self.measured or bool(self._due)
        totals.meters.first.layers = self.layers if self._due == "layers" else None
        pending = start(exchange, x, state, lane.group.spec, ctx, lane.link, stats)
        self._pipeline.add(pending)
        self._flights.append(_Flight(lane, pending, x if self.measured else None))

    def advance(self) -> None:
        """Move every exchange on by one collective."""
        self._pipeline.advance()

    def submitted(self, number: int | None = None) -> int:
        """How many exchanges were started, of all groups or of one."""
        return sum(number is None or flight.lane.group.number == number for flight in self._flights)

    def _land(self, number: int) -> Tensor:
        """Wait for a group's latest exchange; its result in float32, at scale 1."""
        flight = next(f for f in reversed(self._flights) if f.lane.group.number == number)
        result, after = flight.pending.wait()
        self._after[number] = after
        if not flight.counted:
            flight.counted = True
            totals = self._engine.totals
            totals.sent += flight.pending.sent
            totals.intra_node += flight.pending.intra_node
            totals.received += flight.pending.received
            totals.coordinates += flight.lane.group.spec.numel
            if flight.x is not None:
                self._measure(flight, result)
        return result

    def result(self, number: int, factor: float = 1.0) -> Tensor:
        """A group's result now: the mean over ranks (or the sum of this rank's part), times ``factor``, at the loss scale."""
        result = self._land(number)
        factor *= self.scale
        return result if factor == 1.0 else result.mul_(factor)

    def results(self) -> dict[int, Tensor]:
        """The results of all groups, at the loss scale."""
        if self._aside is None:
            self._pipeline.finish()
        else:
            self._aside.do(self._pipeline.finish)
            self._aside.join()
        return {flight.lane.group.number: self.result(flight.lane.group.number) for flight in self._flights}

    def _measure(self, flight: _Flight, result: Tensor) -> None:
        """Compare with the exact result, which an exchange without compression gives (its bytes are not counted)."""
        lane, x = flight.lane, flight.x
        assert x is not None
        exact = lane.plain(Identity(), Meters())
        ctx = lane.context(self._engine.settings.seed, self.number)
        wanted, _ = start(exact, x, lane.fresh(exact), lane.group.spec, ctx, lane.link).wait()
        mine = float((result.double() - wanted.double()).square().sum()), float(x.double().square().sum())
        rows = [struct.unpack("<2d", row) for row in lane.link.gather(struct.pack("<2d", *mine))]
        size = lane.link.size
        # Sums of parts: the error of the mean is their total over the squared number of ranks.
        error = sum(e for e, _ in rows) / size**2 if lane.scheme.shards else rows[0][0]
        power = sum(p for _, p in rows) / size
        if math.isfinite(error) and math.isfinite(power):
            self._engine.totals.error += error
            self._engine.totals.power += power

    def check(self, *outputs: Tensor) -> None:
        """Note whether what the optimiser will see is finite; nothing waits for a device here."""
        self._flags += [_finite(x) for x in outputs]

    def commit(self) -> bool:
        """Keep the new states if everything that was checked is finite on every rank; whether it was."""
        # The one read of a step.
        finite = bool(self._decided())
        if finite and not self.dense:
            for number, after in self._after.items():
                self._engine.lanes[number].state = after
        self._engine.closed(self, finite)
        return finite

    def close(self) -> None:
        """As :meth:`commit`; where no state depends on the outcome, a device is not waited for."""
        if self._keeping:
            self.commit()
        else:
            flag = self._decided()
            self._engine.closed(self, bool(flag) if flag.is_cpu else flag)

    @property
    def _keeping(self) -> bool:
        return any(self._engine.lanes[number].stateful for number in self._after)

    def _decided(self) -> Tensor:
        """Whether everything that was checked is finite, on every rank where a state depends on it."""
        engine = self._engine
        for flight in self._flights:
            if not flight.counted:
                raise BadConfiguration(
                    f"the exchange of group {flight.lane.group.number} was started and its result never taken"
                )
        flag = _together(self._flags)
        if self._keeping:
            for link in engine.agreeing:
                flag = link.agreed(flag)
        return flag

    def abandon(self) -> None:
        """The step failed: states and the step's number are those before it."""
        self._engine.dropped(self)


def _together(flags: list[Tensor]) -> Tensor:
    """Whether all flags are set: on their device, where they share one."""
    if len({flag.device for flag in flags}) > 1:
        flags = [flag.cpu() for flag in flags]
    return torch.stack(flags).all() if flags else torch.ones((), dtype=torch.bool)


def _finite(x: Tensor) -> Tensor:
    """Whether all elements are finite, as a scalar on the tensor's device."""
    if x.device.type == "cpu":
        # A finite sum has finite terms; the exact check is only needed when large terms overflow it.
        quick = torch.isfinite(x.sum(dtype=torch.float32))
        return quick if bool(quick) else torch.isfinite(x).all()
    return kernels.get(x.device).all_finite(x) if x.dtype == torch.float32 else torch.isfinite(x).all()

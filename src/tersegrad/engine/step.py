"""One step: vectors in, means out, and states that are committed together or not at all.

``submit`` starts a group's exchange and moves the ones before it on by one collective, so that bytes travel while later vectors are
computed; the order of collectives follows from the order of submitting alone, hence is the same on every rank. On a GPU that may
happen beside the backward pass (:mod:`tersegrad.engine.aside`). ``results`` finishes all of them; so does ``deliver``, where each result is
handed over when it arrives. What the integration made of the results goes through ``check``, in the dtype and at the scale in which the
optimiser will see it (results that it sees as they are were checked when they arrived), and ``commit`` keeps the new states if everything
was finite: the decision is the same on every rank, and the one a GradScaler takes. ``close`` leaves a GPU's decision to a thread; the
engine waits for it before anyone looks at the states.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import struct
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tersegrad import kernels
from tersegrad.compressors import Identity
from tersegrad.core import trust
from tersegrad.core.errors import BadConfiguration
from tersegrad.core.protocol import Stats
from tersegrad.core.trust import Doubt
from tersegrad.engine.lane import Lane, Meters
from tersegrad.engine.layers import Layer
from tersegrad.exchange import Pending, Pipeline, start
from tersegrad.exchange.stretches import Stretches

if TYPE_CHECKING:
    from tersegrad.engine.engine import Engine

AGAIN = 1 << 16  # children of a context for the second and later exchanges of a group within one step


@dataclasses.dataclass
class _Flight:
    """One exchange under way. ``x`` is kept only where the result will be compared with the exact one."""

    lane: Lane
    pending: Pending[Any]
    x: Tensor | None
    seen: bool  # the optimiser will see the result as it is
    counted: bool = False


class Step:
    """The exchanges of one step, made by :meth:`tersegrad.engine.Engine.begin`."""

    def __init__(
        self,
        engine: Engine,
        number: int,
        scale: float,
        dense: bool,
        measured: bool,
        take: Callable[[dict[int, Tensor]], None] | None,
    ) -> None:
        self._engine, self.number, self.scale = engine, number, scale
        self.dense, self.measured = dense, measured
        self._due = engine.logs.due(number)
        # What is measured is measured in order, by the caller.
        self._aside = None if measured or self._due else engine.aside()
        self._pipeline: Pipeline[Any] = Pipeline()
        self._flights: list[_Flight] = []
        self._after: dict[int, Any] = {}  # the tentative states by group
        self._found: dict[int, Tensor] = {}  # the results that were taken already
        # What is yet to be looked at of messages; :meth:`deliver` does.
        self._doubts: list[Doubt] | None = [] if engine.overlaps and not measured else None
        # Who is given results, and what :meth:`deliver` has asked about them.
        self._take = take
        self._asked: Callable[[], tuple[list[Tensor], bool]] | None = None
        self._flags: list[Tensor] = []
        self.layers: dict[str, Layer] = {}  # what a log of this step will say of each layer

    def in_stretches(self, number: int) -> bool:
        """Whether a group's vector may be given where its pieces lie, as :class:`Stretches`: nobody has to see the whole of it."""
        lane, auto = self._engine.lanes[number], self._engine.auto
        whole = self.dense or self.measured or self.scale != 1.0 or (auto is not None and auto.measuring)
        return not whole and lane.group.device.type == "cpu" and getattr(lane.exchange, "in_stretches", False)

    def submit(
        self, number: int, x: Tensor | Stretches, stats: Stats | None = None, *, owned: bool = False, seen: bool = False
    ) -> None:
        """Start the exchange of a group's vector, given at the loss scale.

        ``owned``: ``x`` may be written to, and the result may lie there. ``seen``: the optimiser will see the result as it is, so that
        nobody has to :meth:`check` it. Stretches check what is laid into them.
        """
        seen, owned = seen and isinstance(x, Tensor), owned and isinstance(x, Tensor)
        if self._aside is None:
            self._submit(number, x, stats, owned, seen)
        else:
            self._aside.do(functools.partial(self._submit, number, x, stats, owned, seen))

    def _submit(self, number: int, x: Any, stats: Stats | None, owned: bool, seen: bool) -> None:
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
        into = x if owned and not (times or self.measured) else None
        with trust.postponing(self._doubts):
            pending = start(exchange, x, state, lane.group.spec, ctx, lane.link, stats, into)
            self._pipeline.add(pending)
        self._flights.append(_Flight(lane, pending, x if self.measured else None, seen))
        self._hand_over(self._look())

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
        """The results of all groups, at the loss scale; of a group that was given in stretches, those, which hold and have checked it."""
        if self._aside is None:
            self._finish()
        else:
            self._aside.do(self._finish)
            self._aside.join()
        return {flight.lane.group.number: self._taken(flight) for flight in self._flights}

    def _finish(self) -> None:
        with trust.postponing(self._doubts):
            self._pipeline.finish()
        arrived = self._look()
        if self._take is not None and self._doubts:
            # What is laid in place after this is not waited for.
            self._asked, self._flags = trust.asked(self._doubts, self._flags), []
        self._hand_over(arrived)

    def deliver(self) -> None:
        """Finish all exchanges. Their results are given to whom :meth:`Engine.begin` was told of, each when it arrives.

        That is before a device has said whether all messages were well-formed. Where it then says no, those messages are decoded again,
        which changes the results, and all are given once more.
        """
        results = self.results()
        if self._asked is None:
            return
        changed, finite = self._asked()
        # This read told all flags at once. Where results changed they are checked anew below; where all flags were set none is kept,
        # because one on the CPU beside later ones on a device would make the host wait for those.
        self._flags = [] if changed or finite else [torch.tensor(False)]
        if changed:
            for result in changed:
                result.mul_(self.scale)
            self.check(*(self._taken(flight) for flight in self._flights if flight.seen))
            self._hand_over(results)

    def _look(self) -> dict[int, Tensor]:
        """The results that have arrived, once. Those that the optimiser will see as they are are checked while they are near."""
        found: dict[int, Tensor] = {}
        for flight in self._flights:
            number = flight.lane.group.number
            if number not in self._found and flight.pending.done and (flight.seen or self._take is not None):
                found[number] = self._taken(flight)
                if flight.seen:
                    self.check(found[number])
        return found

    def _hand_over(self, results: dict[int, Tensor]) -> None:
        if results and self._take is not None:
            self._take(results)

    def _taken(self, flight: _Flight) -> Tensor:
        number = flight.lane.group.number
        if number not in self._found:
            self._found[number] = self.result(number)
        return self._found[number]

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

    def checker(self) -> Callable[[Tensor], None]:
        """What does as :meth:`check` and holds no step: in a circle, old states would wait for Python's garbage collector."""
        flags = self._flags
        return lambda x: flags.append(_finite(x))

    def commit(self) -> bool:
        """Keep the new states if everything that was checked is finite on every rank; whether it was."""
        # The one read of a step.
        finite = bool(self._decided())
        self._keep(finite)
        self._engine.closed(self, finite)
        return finite

    def close(self) -> None:
        """As :meth:`commit`, but the caller does not wait for a device."""
        flag = self._decided()
        if flag.is_cpu:
            self._keep(bool(flag))
            self._engine.closed(self, bool(flag))
            return
        if self._keeping and not self.dense:
            lanes = self._engine.lanes
            self._engine.later(lambda: self._keep(bool(flag), lanes))
        self._engine.closed(self, flag)

    def _keep(self, finite: bool, lanes: Sequence[Lane] | None = None) -> None:
        """Make the tentative states the committed ones, if everything was finite."""
        if finite and not self.dense:
            lanes = self._engine.lanes if lanes is None else lanes
            for number, after in self._after.items():
                lanes[number].state = after

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
        if self._doubts:
            raise BadConfiguration("messages of this step have yet to be looked at: take its results by deliver")
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

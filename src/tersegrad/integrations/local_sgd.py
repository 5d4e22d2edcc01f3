"""Local SGD and DiLoCo: workers train alone for some steps, then exchange how far they have come, compressed.

Every worker starts a round from the same parameters theta (the *anchor*) and takes H steps of its own optimiser to theta_i. The
pseudo-gradient theta - theta_i goes through a compressed exchange; an outer optimiser steps theta by the mean, and all go on from there.
Local SGD (Stich 2019; McMahan et al. 2017) takes the mean itself; DiLoCo (Douillard et al. 2023) uses AdamW inside and SGD with Nesterov
momentum outside. With ``fragments`` the parameters take turns, so that the peak of traffic falls by as much, and with ``overlap``
the exchange of a fragment travels while the next inner steps are computed; what arrives is mixed with what the worker learned
meanwhile (Streaming DiLoCo, Douillard et al. 2025). ``integrations/outer.py`` has published methods whole.

The mean has the same bits on every rank, so the anchors have too. Residuals of error feedback are kept in the units of parameters.
A round whose mean is not finite is dropped everywhere: residuals stay, and the workers go back to the anchor.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Unpack

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from tersegrad import engine
from tersegrad.core import private
from tersegrad.core.errors import BadConfiguration
from tersegrad.core.protocol import Compressor
from tersegrad.core.text import require
from tersegrad.engine import Engine, Options, Settings, Step, TimedGroup, checkpoint
from tersegrad.engine.engine import Route
from tersegrad.engine.report import Report
from tersegrad.exchange import Scheme
from tersegrad.integrations.anchors import Outer, divide
from tersegrad.integrations.attached import claim, free
from tersegrad.integrations.methods import DiLoCo, LocalSGD, Method, SparseLoCo, StreamingDiLoCo, method

__all__ = ["DiLoCo", "Handle", "LocalSGD", "Method", "SparseLoCo", "StreamingDiLoCo", "attach", "method"]


@dataclasses.dataclass
class _Flight:
    """The exchange of one fragment: under way, or landed and waiting for its step."""

    fragment: int
    due: int  # the inner step after which the means are taken in
    step: Step | None
    means: dict[int, Tensor] = dataclasses.field(default_factory=dict)  # by group, once landed; empty if the round was dropped


class Handle(engine.Handle):
    """The outer loop of one model: anchors, outer optimiser and exchanges. Made by :func:`attach`."""

    further = ("anchors", "momenta", "flights")

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        settings: Settings,
        how: Method,
        group_bytes: int | None,
        process_group: dist.ProcessGroup | TimedGroup | None,
    ) -> None:
        self.method, self.steps = how, 0
        self._flights: list[_Flight] = []
        self._departed: dict[int, int] = {}  # fragment -> the inner step of its latest exchange
        self._counted = 0  # inner steps before the last reset of the report
        link = TimedGroup.of(process_group)
        self.rank, self.size = link.rank, link.size
        groups, self._fragments = divide(parameters, how.fragments, group_bytes)
        routes = [Route(group, link) for group in groups]
        self.engine = Engine("local_sgd", routes, settings, replicated=lambda: self._outer.common(), facts={"method": str(how)})
        self.engine.now = lambda: self.steps
        for parameter in parameters.values():  # all start alike
            link.broadcast(parameter.detach())
        self._outer = Outer(parameters, groups, how)

    # -------------------------------------------------------------------------------------------------------------- the loop

    def step(self) -> bool:  # type: ignore[override]
        """Call after every step of the inner optimiser, on every rank; whether the parameters were moved."""
        with self._working():
            self.steps += 1
            due = [flight for flight in self._flights if flight.due == self.steps]
            for flight in self._flights:
                if flight not in due and flight.step is not None:
                    flight.step.advance()
            for flight in due:
                self._apply(flight, self.method.kept)
            turn = self.method.turn(self.steps)
            for fragment in turn:
                flight = self._depart(fragment)
                if not self.method.overlap:
                    self._apply(flight, self.method.kept)
            return bool(due) or (bool(turn) and not self.method.overlap)

    @contextlib.contextmanager
    def _working(self) -> Iterator[None]:
        self._in_use()
        try:
            with self.engine.timed():
                yield
        except BaseException:
            self._flights = [flight for flight in self._flights if flight.step is None]
            raise

    def finish(self) -> None:
        """End the round of every fragment now: afterwards all workers have the same parameters (a collective call)."""
        with self._working():
            for flight in list(self._flights):
                self._apply(flight, 1.0)  # the anchors move; what the worker learned since is exchanged next
            for fragment in range(self.method.fragments):
                if self.method.kept or self._departed.get(fragment) != self.steps:  # else the worker is at the anchor already
                    self._apply(self._depart(fragment), 0.0)

    def _depart(self, fragment: int) -> _Flight:
        """Start the exchange of a fragment's pseudo-gradients."""
        if self.engine.upcoming() != (None, None):
            self._settle()  # a change of compressor finds no exchange under way
        step = self.engine.begin()
        for number in self._fragments[fragment]:
            step.submit(number, self._outer.progress(number), owned=True)
        self._departed[fragment] = self.steps
        flight = _Flight(fragment, self.steps + self.method.overlap, step)
        self._flights.append(flight)
        return flight

    def _land(self, flight: _Flight) -> None:
        """Finish a flight's exchange; its states are committed if all means are finite."""
        if flight.step is not None:
            means = flight.step.results()
            flight.step.check(*means.values())
            flight.means = means if flight.step.commit() else {}
            flight.step = None

    def _settle(self) -> None:
        """Finish all exchanges; their means are taken in at their steps, as if nothing had happened."""
        for flight in self._flights:
            self._land(flight)

    def _apply(self, flight: _Flight, kept: float) -> None:
        """Step the anchors along the means, and move the worker's parameters towards them."""
        self._land(flight)
        self._flights.remove(flight)
        self._outer.move(flight.means, self.method.rate(self.steps))
        for number in self._fragments[flight.fragment]:
            # After a dropped round the worker's own parameters are not to be trusted.
            self._outer.pull(number, kept if flight.means else 0.0)

    @contextlib.contextmanager
    def anchors(self) -> Iterator[None]:
        """The common parameters in place of the worker's own, for an evaluation."""
        with self._outer.in_place():
            yield

    # ------------------------------------------------------------------------------------------------------ report and state

    def report(self) -> Report:
        found = super().report()
        steps, numel = self.steps - self._counted, sum(group.spec.numel for group in self.groups)
        return found | {
            "method": str(self.method),
            "exchanges": found["steps"],
            "exchanges/dropped": found.pop("steps/dropped"),
            "exchanges/warmup": found.pop("steps/warmup"),
            "steps": steps,
            "bits_per_coordinate/step": 8 * float(found["bytes/sent"]) / (steps * numel) if steps else 0.0,
            "outer/bytes": 4 * numel * (2 if self.method.momentum else 1),
        }

    def reset_report(self) -> None:
        super().reset_report()
        self._counted = self.steps

    def _identity(self) -> dict[str, Any]:
        return super()._identity() | {"method": str(self.method), "layout": [list(g.names) for g in self.groups]}

    def _extra(self) -> tuple[dict[str, Any], dict[str, Any]]:
        facts = {
            "steps": self.steps,
            "departed": sorted(self._departed.items()),
            "flights": [[f.fragment, f.due, bool(f.means)] for f in self._flights],
        }
        flights = {str(f.fragment): self._outer.copies(f.means) for f in self._flights}
        return facts, {**self._outer.state(), "flights": flights}

    def _read_extra(self, parts: Sequence[Any], public: checkpoint.Public) -> Callable[[], None]:
        own, extra = parts[0], public.extra
        outer = self._outer.read(own["anchors"], own["momenta"])
        steps, departed, found = extra["steps"], extra["departed"], extra["flights"]
        checkpoint.require(self.method.reaches(steps, departed, found), "the saved rounds do not fit one another")
        held = {fragment: bool(means) for fragment, means in own["flights"].items()}
        checkpoint.require(held == {str(f): kept for f, _, kept in found}, "the saved means are not those under way")
        flights = []
        for fragment, due, kept in found:
            members = self._fragments[fragment] if kept else []
            means = {number: self._outer.flat(number, own["flights"][str(fragment)]) for number in members}
            flights.append(_Flight(fragment, due, None, means))

        def assign() -> None:
            outer()
            self.steps, self._departed, self._flights = steps, dict(departed), flights

        return assign


def attach(
    model: torch.nn.Module,
    compressor: Compressor[Any] | str | None,
    exchange: Scheme | str | None = None,
    how: Method | str = "diloco",
    *,
    group_bytes: int | None = None,
    process_group: dist.ProcessGroup | TimedGroup | None = None,
    **options: Unpack[Options],
) -> Handle:
    """Train ``model`` (a plain module, the same on every rank) by local steps; call ``handle.step()`` after each ``optimizer.step()``.

    ``how``: "local_sgd(every=10)" or "diloco(every=50, lr=0.7, momentum=0.9, fragments=1, overlap=0)". ``options``: see
    :class:`tersegrad.engine.Options`; their steps are rounds. All ranks start from rank 0's parameters.
    """
    inner = private.unwrapped(model)
    if isinstance(inner, DistributedDataParallel):
        raise BadConfiguration("local steps need a plain module: DistributedDataParallel exchanges gradients in every step")
    settings = Settings.make(compressor, exchange, **options)
    named = {private.plain_name(name): p for name, p in inner.named_parameters() if p.requires_grad}
    require(bool(named), "the model has no parameters to train")
    free(inner)
    handle = Handle(named, settings, method(how), group_bytes, process_group)
    claim([inner], handle)
    return handle

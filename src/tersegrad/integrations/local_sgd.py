"""Local SGD and DiLoCo: workers train alone for some steps, then exchange how far they have come, compressed.

Every worker starts a round from the same parameters theta (the *anchor*) and takes H steps of its own optimiser to theta_i. The
pseudo-gradient theta - theta_i goes through a compressed exchange; an outer optimiser steps theta by the mean, and all go on from there.
Local SGD (Stich 2019; McMahan et al. 2017) takes the mean itself; DiLoCo (Douillard et al. 2023) uses AdamW inside and SGD with Nesterov
momentum outside. With ``fragments`` the parameters take turns, so that the peak of traffic falls by as much, and with ``overlap``
the exchange of a fragment travels while the next inner steps are computed; what arrives is mixed with what the worker learned
meanwhile (Streaming DiLoCo, Douillard et al. 2025).

The mean has the same bits on every rank, so the anchors have too. Residuals of error feedback are kept in the units of parameters.
A round whose mean is not finite is dropped everywhere: residuals stay, and the workers go back to the anchor.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import time
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from tersegrad.compressors import Identity
from tersegrad.core import state as states
from tersegrad.core.errors import BadConfiguration
from tersegrad.core.protocol import Compressor, Context
from tersegrad.core.text import Configuration, require
from tersegrad.exchange import Exchange, Pending, Plan, plan, start
from tersegrad.integrations import checkpoint, replicas
from tersegrad.integrations.groups import Group, make_groups
from tersegrad.integrations.meter import Meter, TimedGroup, watch
from tersegrad.recipes import parse, parse_form
from tersegrad.wrappers import ByTensor

FORMAT = 1  # of state_dict


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


@dataclasses.dataclass
class _Flight:
    """The exchange of one fragment: under way, or landed and waiting for its step."""

    fragment: int
    due: int  # the inner step after which the means are taken in
    pendings: list[tuple[int, Pending[Any]]]
    means: dict[int, Tensor] | None = None  # by group, once landed; empty if the round was dropped


@dataclasses.dataclass
class _Totals:
    """What :meth:`Handle.report` counts."""

    steps: int = 0
    exchanges: int = 0  # of fragments
    dropped: int = 0
    sent: int = 0
    received: int = 0
    seconds: float = 0.0
    first: Meter = dataclasses.field(default_factory=Meter)
    second: Meter = dataclasses.field(default_factory=Meter)


class Handle:
    """The outer loop of one model: anchors, outer optimiser, exchange states and counters. Made by :func:`attach`."""

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        compressor: Compressor[Any] | None,
        exchange: Plan,
        how: Method,
        *,
        group_bytes: int,
        dense_below: int,
        seed: int,
        measure_every: int,
        process_group: dist.ProcessGroup | None,
    ) -> None:
        self.compressor, self.plan, self.method = compressor, exchange, how
        self.dense_below, self.seed, self.measure_every = dense_below, seed, measure_every
        self.steps = 0
        self.group = TimedGroup(process_group)
        self._parameters = dict(parameters)
        self._totals = _Totals()
        self._flights: list[_Flight] = []
        self._rounds = 0
        self._departed: dict[int, int] = {}  # fragment -> the step of its latest exchange
        for parameter in self._parameters.values():  # all start alike
            dist.broadcast(
                parameter.detach(), dist.get_global_rank(process_group, 0) if process_group else 0, group=process_group
            )
        self.groups, self._fragments = _divide(self._parameters, how.fragments, group_bytes)
        self._resolved = exchange.resolve(self.group)
        self._exchanges: list[Exchange[Any]] = [self._exchange(group) for group in self.groups]
        rank, size = self.group.rank, self.group.size
        self._states = [e.init(g.spec, g.device, rank, size) for e, g in zip(self._exchanges, self.groups)]
        self._anchors = [self._gather(number) for number in range(len(self.groups))]
        self._outer = torch.optim.SGD(self._anchors, lr=how.lr, momentum=how.momentum, nesterov=how.momentum > 0)

    def _exchange(self, group: Group) -> Exchange[Any]:
        c: Compressor[Any] = self.compressor or Identity()
        if self.dense_below:
            c = ByTensor(c, small=Identity(), below=self.dense_below)
        return self._resolved.make(watch(c, self._totals.first), watch(c, self._totals.second))

    # ---------------------------------------------------------------------------------------------------- flat and by parameter

    def _gather(self, number: int) -> Tensor:
        """The worker's own parameters of a group, as one float32 vector."""
        named = [self._parameters[name].detach().reshape(-1).to(torch.float32) for name in self.groups[number].names]
        return torch.cat(named)

    def _scatter(self, number: int, flat: Tensor) -> None:
        at = 0
        with torch.no_grad():
            for piece in self.groups[number].spec.pieces:
                parameter = self._parameters[piece.name]
                parameter.copy_(flat[at : at + piece.numel].view(parameter.shape))
                at += piece.numel

    def _by_name(self, flats: Mapping[int, Tensor]) -> dict[str, Tensor]:
        named = {}
        for number, flat in flats.items():
            pieces = self.groups[number].spec.pieces
            for piece, part in zip(pieces, flat.detach().split([p.numel for p in pieces])):
                named[piece.name] = part.clone().view(piece.shape)
        return named

    def _flat(self, number: int, named: Mapping[str, Tensor]) -> Tensor:
        group = self.groups[number]
        return torch.cat([named[name].reshape(-1).to(group.device, torch.float32) for name in group.names])

    # -------------------------------------------------------------------------------------------------------------- the loop

    def step(self) -> bool:
        """Call after every step of the inner optimiser, on every rank; whether the parameters were moved."""
        begin = time.perf_counter()
        self.steps += 1
        self._totals.steps += 1
        due = [flight for flight in self._flights if flight.due == self.steps]
        for flight in self._flights:
            if flight not in due and flight.means is None:
                for _, pending in flight.pendings:  # one collective a step, so that the order is the same on every rank
                    pending.advance()
        moved = bool(due)
        for flight in due:
            self._apply(flight, self.method.kept)
        for fragment in self.method.turn(self.steps):
            flight = self._depart(fragment)
            if not self.method.overlap:
                self._apply(flight, self.method.kept)
                moved = True
        self._totals.seconds += time.perf_counter() - begin
        return moved

    def finish(self) -> None:
        """End the round of every fragment now: afterwards all workers have the same parameters (a collective call)."""
        begin = time.perf_counter()
        for flight in list(self._flights):
            self._apply(flight, 1.0)  # the anchors move; what the worker learned since is exchanged next
        for fragment in range(self.method.fragments):
            if self.method.kept or self._departed.get(fragment) != self.steps:  # else the worker is at the anchor already
                self._apply(self._depart(fragment), 0.0)
        self._totals.seconds += time.perf_counter() - begin

    def _depart(self, fragment: int) -> _Flight:
        """Start the exchange of a fragment's pseudo-gradients."""
        self._totals.first.probing = bool(self.measure_every) and self._rounds % self.measure_every == 0
        flight = _Flight(fragment, self.steps + self.method.overlap, [])
        for number in self._fragments[fragment]:
            delta = self._anchors[number].detach() - self._gather(number)
            ctx = Context(seed=self.seed, step=self._rounds % (1 << 32), buffer=number)
            group = self.groups[number]
            pending = start(self._exchanges[number], delta, self._states[number], group.spec, ctx, self.group)
            for _, earlier in flight.pendings:
                earlier.advance()
            flight.pendings.append((number, pending))
        self._rounds += 1
        self._departed[fragment] = self.steps
        self._totals.exchanges += 1
        self._flights.append(flight)
        return flight

    def _land(self, flight: _Flight) -> dict[int, Tensor]:
        """Finish a flight's collectives; commit its states if all means are finite."""
        if flight.means is not None:
            return flight.means
        while not all(pending.done for _, pending in flight.pendings):
            for _, pending in flight.pendings:
                pending.advance()
        means: dict[int, Tensor] = {}
        after = {}
        for number, pending in flight.pendings:
            means[number], after[number] = pending.wait()
            self._totals.sent += pending.sent
            self._totals.received += pending.received
        if all(bool(torch.isfinite(mean).all()) for mean in means.values()):
            for number, state in after.items():
                self._states[number] = state
        else:
            self._totals.dropped += 1
            means = {}
        flight.means, flight.pendings = means, []
        return means

    def _apply(self, flight: _Flight, kept: float) -> None:
        """Step the anchors along the means, and move the worker's parameters towards them."""
        means = self._land(flight)
        self._flights.remove(flight)
        for number, mean in means.items():
            self._anchors[number].grad = mean
        if means:
            self._outer.step()
            self._outer.zero_grad()
        for number in self._fragments[flight.fragment]:
            anchor = self._anchors[number].detach()
            if not means or kept == 0:  # after a dropped round the worker's own parameters are not to be trusted
                self._scatter(number, anchor)
            elif kept < 1:
                self._scatter(number, torch.lerp(anchor, self._gather(number), kept))

    @contextlib.contextmanager
    def anchors(self) -> Iterator[None]:
        """The common parameters in place of the worker's own, for an evaluation."""
        own = [self._gather(number) for number in range(len(self.groups))]
        originals = {name: p.detach().clone() for name, p in self._parameters.items()}
        for number in range(len(own)):
            self._scatter(number, self._anchors[number])
        try:
            yield
        finally:
            with torch.no_grad():
                for name, parameter in self._parameters.items():
                    parameter.copy_(originals[name])

    # ------------------------------------------------------------------------------------------------------ safety and report

    def check_replicas(self) -> None:
        """Raise :class:`~tersegrad.integrations.replicas.ReplicasDiffer` unless the anchors are the same everywhere (a collective call)."""
        replicas.compare(self._by_name(dict(enumerate(self._anchors))), self.group, self.steps)

    def report(self) -> dict[str, float | str]:
        """Counters since the start (or :meth:`reset_report`) as a flat dict; sizes are those of bytes that travelled."""
        t = self._totals
        numel = sum(g.spec.numel for g in self.groups)
        parts = [
            part
            for e, s, g in zip(self._exchanges, self._states, self.groups)
            for part in e.parts(s, g.spec, self.group.rank, self.group.size)
        ]
        out: dict[str, float | str] = {
            "compressor": str(self.compressor) if self.compressor else "none",
            "exchange": str(self.plan),
            "method": str(self.method),
            "steps": t.steps,
            "exchanges": t.exchanges,
            "exchanges/dropped": t.dropped,
            "bytes/sent": t.sent,
            "bytes/received": t.received,
            "bits_per_coordinate": 8 * t.first.nbytes / t.first.coordinates if t.first.coordinates else 0.0,
            "bits_per_coordinate/step": 8 * t.sent / (t.steps * numel) if t.steps else 0.0,
            "seconds": t.seconds,
            "seconds/encode": t.first.encode + t.second.encode,
            "seconds/decode": t.first.decode + t.second.decode,
            "seconds/wire": self.group.waited,
            "state/bytes": sum(states.nbytes(part.state) for part in parts) + 4 * numel * (2 if self.method.momentum else 1),
        }
        if t.first.power:
            out["message_error"] = t.first.error / t.first.power
        return out

    def reset_report(self) -> None:
        """Count from zero again."""
        require(all(flight.means is not None for flight in self._flights), "an exchange is under way: reset before it starts")
        self._totals = _Totals()
        self.group.waited = 0.0
        self._exchanges = [self._exchange(group) for group in self.groups]

    # ----------------------------------------------------------------------------------------------------------------- state

    def state_dict(self) -> dict[str, Any]:
        """The state of this rank under ``rank<r>``, by parameter; every rank saves its own, with its model and inner optimiser.

        A collective call: exchanges under way are waited for (their means are taken in at their step, as if nothing had happened).
        """
        for flight in self._flights:
            self._land(flight)
        rank, size = self.group.rank, self.group.size
        rounds: dict[str, dict[str, Any]] = {"first": {}, "second": {}}
        for exchange, state, group in zip(self._exchanges, self._states, self.groups):
            for name, entries in checkpoint.save(exchange, state, group.spec, rank, size).items():
                rounds.setdefault(name, {}).update(entries)
        momenta = {}
        for number, anchor in enumerate(self._anchors):
            buffer = self._outer.state.get(anchor, {}).get("momentum_buffer")
            if buffer is not None:
                momenta[number] = buffer
        public = {
            "format": FORMAT,
            "rank": rank,
            "size": size,
            "steps": self.steps,
            "rounds": self._rounds,
            "seed": self.seed,
            "compressor": str(self.compressor),
            "exchange": str(self.plan),
            "method": str(self.method),
            "dense_below": self.dense_below,
            "layout": [list(g.names) for g in self.groups],
            "departed": sorted(self._departed.items()),
            "flights": [[f.fragment, f.due, bool(f.means)] for f in self._flights],
        }
        flights = {str(f.fragment): self._by_name(f.means or {}) for f in self._flights}
        anchors = self._by_name(dict(enumerate(self._anchors)))
        own = {
            "public": json.dumps(public),
            "anchors": anchors,
            "momenta": self._by_name(momenta),
            "flights": flights,
            **rounds,
        }
        return {f"rank{rank}": own}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from this rank's :meth:`state_dict` (load model and inner optimiser too): bit for bit the run that saved it."""
        self.load_state_dicts([state_dict])

    def load_state_dicts(self, state_dicts: Sequence[Mapping[str, Any]]) -> None:
        """Continue from the states of all ranks that saved; on another world size residuals start from their mean."""
        ranks = {key: value for one in state_dicts for key, value in one.items()}
        require(bool(ranks), "there is no state to load")
        if not all(isinstance(part, Mapping) and "anchors" in part for part in ranks.values()):
            raise BadConfiguration("the state was not saved by a local SGD handle: resume with the method that saved it")
        key = f"rank{self.group.rank}"
        size = int(json.loads(next(iter(ranks.values()))["public"])["size"])
        if size == self.group.size:
            require(key in ranks, f"the state has {sorted(ranks)}, this is {key}")
            parts = [ranks[key]]
        else:
            parts = [ranks.get(f"rank{r}") for r in range(size)]
            missing = [r for r, part in enumerate(parts) if part is None]
            require(not missing, f"for another world size the states of all {size} ranks are needed, {missing} are missing")
        self._load(parts)

    def _load(self, parts: Sequence[Any]) -> None:
        public: dict[str, Any] = json.loads(parts[0]["public"])
        require(public["format"] == FORMAT, f"state format {public['format']} was written by another version")
        mine = {
            "compressor": str(self.compressor),
            "exchange": str(self.plan),
            "method": str(self.method),
            "dense_below": self.dense_below,
            "layout": [list(g.names) for g in self.groups],
        }
        for name, value in mine.items():
            if public[name] != value:
                raise BadConfiguration(f"the state was saved with another {name}: {public[name]}, here it is {value}")
        for name, parameter in self._parameters.items():
            saved = parts[0]["anchors"][name]
            if saved.shape != parameter.shape:
                raise BadConfiguration(
                    f"the model changed: {name} has shape {list(parameter.shape)}, saved {list(saved.shape)}"
                )
        for flight in self._flights:
            self._land(flight)
        self.steps, self.seed, self._rounds = (int(public[k]) for k in ("steps", "seed", "rounds"))
        rank, size = self.group.rank, self.group.size
        saved_rounds = [{k: part[k] for k in part if k not in ("public", "anchors", "momenta", "flights")} for part in parts]
        for number, (exchange, group) in enumerate(zip(self._exchanges, self.groups)):
            with torch.no_grad():
                self._anchors[number].copy_(self._flat(number, parts[0]["anchors"]))
            fresh = exchange.init(group.spec, group.device, rank, size)
            self._states[number] = checkpoint.restore(exchange, fresh, group.spec, rank, size, saved_rounds)
            self._outer.state.pop(self._anchors[number], None)
            if set(group.names) <= parts[0]["momenta"].keys():
                self._outer.state[self._anchors[number]] = {"momentum_buffer": self._flat(number, parts[0]["momenta"])}
        self._departed = {int(fragment): int(step) for fragment, step in public["departed"]}
        self._flights = []
        for fragment, due, kept in public["flights"]:
            named = parts[0]["flights"].get(str(fragment), {})
            means = {number: self._flat(number, named) for number in self._fragments[fragment]} if kept else {}
            self._flights.append(_Flight(int(fragment), int(due), [], means))


def attach(
    model: torch.nn.Module,
    compressor: Compressor[Any] | str | None,
    exchange: Plan | str = "two_shot",
    how: Method | str = "diloco",
    *,
    group_bytes: int = 25 << 20,
    dense_below: int = 1024,
    seed: int = 0,
    measure_every: int = 0,
    process_group: dist.ProcessGroup | None = None,
) -> Handle:
    """Train ``model`` (a plain module, the same on every rank) by local steps; call ``handle.step()`` after each ``optimizer.step()``.

    ``how``: "local_sgd(every=10)" or "diloco(every=50, lr=0.7, momentum=0.9, fragments=1, overlap=0)". ``measure_every``: so many
    exchanges apart the error of messages is measured. The rest as in :func:`tersegrad.integrations.ddp.attach`. All ranks start
    from rank 0's parameters.
    """
    inner = getattr(model, "_orig_mod", model)
    if isinstance(inner, DistributedDataParallel):
        raise BadConfiguration("local steps need a plain module: DistributedDataParallel exchanges gradients in every step")
    chosen = plan(exchange)
    parsed = parse(compressor) if isinstance(compressor, str) else compressor
    if chosen.compresses != (parsed is None):
        raise BadConfiguration(
            f"{chosen} compresses by itself: pass None as compressor" if chosen.compresses else f"{chosen} needs a compressor"
        )
    for name, value in (("dense_below", dense_below), ("measure_every", measure_every)):
        require(value >= 0, f"{name} must not be negative, got {value}")
    named = {name.replace("_orig_mod.", ""): p for name, p in inner.named_parameters() if p.requires_grad}
    require(bool(named), "the model has no parameters to train")
    return Handle(
        named,
        parsed,
        chosen,
        method(how),
        group_bytes=group_bytes,
        dense_below=dense_below,
        seed=seed,
        measure_every=measure_every,
        process_group=process_group,
    )


def _divide(parameters: Mapping[str, Tensor], fragments: int, group_bytes: int) -> tuple[list[Group], list[list[int]]]:
    """Groups, and which of them each fragment has: neighbouring parameters, of about the same size in all."""
    total = sum(p.numel() for p in parameters.values())
    shares: list[dict[str, Tensor]] = [{} for _ in range(fragments)]
    before = 0
    for name, parameter in parameters.items():
        middle = before + parameter.numel() / 2
        shares[min(fragments - 1, int(middle * fragments / max(1, total)))][name] = parameter
        before += parameter.numel()
    groups: list[Group] = []
    numbers: list[list[int]] = []
    for share in shares:
        made = make_groups(share, group_bytes)
        numbers.append(list(range(len(groups), len(groups) + len(made))))
        groups += [dataclasses.replace(g, number=len(groups) + k) for k, g in enumerate(made)]
    return groups, numbers

"""What every integration's handle offers its user: settings, report, changes, checkpoints."""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from tersegrad.core.errors import BadCheckpoint, BadConfiguration
from tersegrad.core.protocol import Compressor
from tersegrad.core.text import require
from tersegrad.engine import checkpoint
from tersegrad.engine.checkpoint import Public
from tersegrad.engine.engine import Change, Engine, Route
from tersegrad.engine.groups import Group
from tersegrad.engine.lane import Lane
from tersegrad.engine.logs import Log, Target
from tersegrad.engine.report import Report, report, sent_dense
from tersegrad.engine.settings import Given
from tersegrad.exchange import Scheme
from tersegrad.planner import Link

_told: weakref.WeakSet[torch.amp.GradScaler] = weakref.WeakSet()  # which some handle knows


class Handle:
    """The exchange of one model; integrations add how vectors get in and out."""

    engine: Engine
    rank: int  # in the whole run
    size: int
    further: tuple[str, ...] = ()  # entries of a saved state beside those of the exchanges
    _scaler: Any = None
    detached: bool = False
    _scale: float | None = None
    _looked: bool = False  # for a GradScaler that nobody told us of

    # ------------------------------------------------------------------------------------------------------------- settings

    @property
    def step(self) -> int:
        """How many steps were exchanged."""
        return self.engine.step

    @property
    def seed(self) -> int:
        return self.engine.settings.seed

    @property
    def compressor(self) -> Compressor[Any]:
        return self.engine.settings.compressor

    @property
    def exchange(self) -> str:
        """The text form of the exchange."""
        return self.engine.exchange

    @property
    def groups(self) -> list[Group]:
        """The groups of parameters that travel together."""
        return [lane.group for lane in self.engine.lanes]

    @property
    def scaler(self) -> Any:
        """The GradScaler, if there is one."""
        return self._scaler

    @scaler.setter
    def scaler(self, given: Any) -> None:
        self._scaler = given
        if isinstance(given, torch.amp.GradScaler):
            _told.add(given)

    def set_scale(self, scale: float | None) -> None:
        """The loss scale by which gradients are multiplied, if no GradScaler was given; None for 1."""
        require(scale is None or (math.isfinite(scale) and scale > 0), f"a loss scale is positive, got {scale}")
        self._scale = scale

    def loss_scale(self) -> float:
        """The loss scale of the next step."""
        if self.scaler is None and self._scale is None and not self._looked:
            self._look_for_scaler()
            self._looked = True
        scale = self.scaler.get_scale() if self.scaler is not None else self._scale
        return 1.0 if scale is None else float(scale)

    def _scaling(self) -> dict[str, str]:
        """What ranks must agree on: gradients of one scale would be averaged with those of another."""
        return {"scaler": "none" if self.scaler is None else f"one at {float(self.scaler.get_scale())}"}

    def _look_for_scaler(self) -> None:
        """Raise where residuals would be kept at a loss scale that changes; asked once, before the first step that is made."""
        if not any(lane.stateful for lane in self.engine.lanes):
            return
        # Asking an object for its class may run code of its own; its type does not.
        scalers: list[Any] = [one for one in gc.get_objects() if issubclass(type(one), torch.amp.GradScaler)]
        for one in scalers:
            if one not in _told and one.is_enabled() and one._scale is not None and one.get_scale() != 1:
                raise BadConfiguration(
                    "this process scales losses with a GradScaler that attach was not told of, and residuals would be kept at a scale "
                    "that changes: attach(..., scaler=scaler), or handle.set_scale(1.0) if it scales the loss of another model"
                )

    def detach(self) -> None:
        """Exchange nothing more: the model is the framework's again, uncompressed (the same call on every rank, between two steps).

        Logs end. The report stays readable, what residuals hold is lost, and the model can be attached anew.
        """
        if not self.detached:
            self._settle()
            require(self.engine.between_steps, "a handle can only be detached between two steps")
            self._release()
            self.engine.logs.close()
            self.detached = True

    def _in_use(self) -> None:
        require(not self.detached, "this handle was detached: attach the model again")

    def change(
        self, compressor: Given | None = None, exchange: Scheme | str | None = None, groups: Sequence[int] | None = None
    ) -> Change:
        """Use another compressor, exchange or both from the next step on; see :meth:`tersegrad.engine.Engine.change`."""
        self._in_use()
        self._settle()
        return self.engine.change(compressor, exchange, groups)

    # --------------------------------------------------------------------------------------------------------------- report

    def report(self) -> Report:
        """Counters since the start (or :meth:`reset_report`) as a flat dict; sizes are those of bytes that travelled."""
        return report(self.engine)

    def reset_report(self) -> None:
        """Count from zero again, between two steps."""
        self.engine.reset_report()

    def sent_dense(self) -> dict[str, str]:
        """The parameters that are sent dense, each with the reason."""
        return sent_dense(self.engine)

    def log_to(self, target: Target, *, every: int = 10, layers: bool = False, all_ranks: bool = False) -> Log | None:
        """Write bits, ratio, error, residual norm and times of the run to ``target``, every so many steps.

        ``target``: a file that ends in .csv or .jsonl, a folder for TensorBoard, a SummaryWriter, or a function that is called with the
        numbers (a flat dict) and the step. ``layers``: bits, error and residual norm of every layer too. Rank 0 writes; with
        ``all_ranks`` each rank writes what it has, to a target of its own. The log that is returned (None on ranks that do not write)
        can be closed; it is nobody else's business, so the call need not be the same on every rank.
        """
        require(every >= 1, f"every is a number of steps, at least 1, got {every}")
        if self.rank != 0 and not all_ranks:
            return None
        log = Log(target, every, layers)
        self.engine.logs.add(log)
        return log

    @property
    def seconds(self) -> float:
        """Spent in the exchange since the start or :meth:`reset_report`, the time that was waited for the wire included."""
        return self.engine.totals.seconds

    def compare(self, rounds: int = 3) -> dict[str, float]:
        """Time dense all-reduces of all gradients on this link, for the report (a collective call, between two steps)."""
        return self.engine.compare(rounds)

    def measure_link(self) -> Link:
        """Rate and latency of the link between the ranks, for the report (a collective call, between two steps)."""
        return self.engine.measure_link()

    def check_replicas(self) -> None:
        """Raise :class:`~tersegrad.engine.ReplicasDiffer` unless all ranks have the same parameters (a collective call)."""
        self.engine.check_replicas()

    # ---------------------------------------------------------------------------------------------------------------- state

    def state_dict(self) -> dict[str, Any]:
        """The state of this rank under ``rank<r>``, keyed by parameter names; what a checkpoint stores (every rank its own)."""
        self._settle()
        engine = self.engine
        require(engine.between_steps, "a state can only be saved between two steps")
        rounds: dict[str, dict[str, Any]] = {"first": {}, "second": {}}
        groups = []
        for lane in engine.lanes:
            saved = checkpoint.save(lane)
            kept = {name: sum(map(len, parameters.values())) for name, parameters in saved.items()}
            place = [lane.link.rank, lane.link.size]
            described = {"names": list(lane.group.names), "compressor": str(lane.compressor), "place": place, "kept": kept}
            groups.append(described | {"exchange": engine.exchange_of(lane)})
            for name, parameters in saved.items():
                for parameter, ranges in parameters.items():
                    rounds.setdefault(name, {}).setdefault(parameter, {}).update(ranges)
        facts, entries = self._extra()
        public = Public(
            kind=engine.kind,
            rank=self.rank,
            size=self.size,
            step=engine.step,
            seed=self.seed,
            settings=self._identity(),
            groups=groups,
            shapes=self._shapes(),
            extra=facts,
        )
        return {f"rank{self.rank}": {"public": public.dumps(), **rounds, **entries}}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from this rank's :meth:`state_dict`: the next steps are bit for bit those of the run that saved it."""
        self.load_state_dicts([state_dict])

    def load_state_dicts(self, state_dicts: Sequence[Mapping[str, Any]]) -> None:
        """Continue from the states of all ranks that saved, on any world size: residuals start from their mean over those ranks.

        Nothing changes unless everything fits (:class:`~tersegrad.core.errors.BadCheckpoint` says what does not).
        """
        self._settle()
        require(self.engine.between_steps, "a state can only be loaded between two steps")
        with checkpoint.reading():
            commit = self._read(state_dicts)
        commit()

    def _identity(self) -> dict[str, Any]:
        """The settings that a checkpoint must share with the run that reads it."""
        settings = self.engine.settings
        return {"compressor": str(settings.compressor), "exchange": self.exchange, "dense_below": settings.dense_below}

    def _read(self, state_dicts: Sequence[Mapping[str, Any]]) -> Callable[[], None]:
        """Check and build everything; the function that is returned assigns it."""
        engine = self.engine
        places = {(lane.link.rank, lane.link.size) for lane in engine.lanes}
        parts = checkpoint.select(state_dicts, engine.kind, self.rank, self.size, places)
        for part in parts:
            checkpoint.check_whole(part, checkpoint.public(part), self.further)
        public = checkpoint.public(parts[0])
        self._check_identity(public)
        routes = self._routes(public)
        layout = [list(route.group.names) for route in routes]
        checkpoint.require(
            len(parts) > 1 or public.size != self.size or layout == [group["names"] for group in public.groups],
            "the parameters were grouped in another way: build and shard the model as in the run that saved",
        )
        saved: list[checkpoint.Saved] = [{k: v for k, v in part.items() if k in checkpoint.ROUNDS} for part in parts]
        lanes: list[Lane] = []
        for route, described in zip(routes, self._described(public, routes)):
            lane = engine.lane_of(route, described["compressor"], described["exchange"])
            lane.state = checkpoint.restore(lane, saved)
            lanes.append(lane)
        finish = self._read_extra(parts, public)

        def commit() -> None:
            engine.restored(routes, lanes, public.step, public.seed)
            finish()

        return commit

    def _check_identity(self, public: Public) -> None:
        for name, value in self._identity().items():
            saved = public.settings.get(name)
            chosen = name == "compressor" and (self.engine.settings.schedule is not None or self.engine.auto is not None)
            if saved != value and not chosen and not (name == "exchange" and self.engine.settings.auto == "both"):
                raise BadCheckpoint(
                    f"the state was saved with {name}={saved}, this handle has {value}: attach with the saved one (change() may "
                    "change it afterwards)"
                )
        shapes = self._shapes()
        for name in sorted(shapes.keys() | public.shapes.keys()):
            if shapes.get(name) != public.shapes.get(name):
                raise BadCheckpoint(
                    f"the model changed: {name} has shape {shapes.get(name)} here and {public.shapes.get(name)} in the saved state"
                )

    def _described(self, public: Public, routes: Sequence[Route]) -> list[dict[str, Any]]:
        """What was saved of each group of this run; that of the first of its kind where the arrangement differs."""
        if len(public.groups) == len(routes):
            return public.groups
        first = {described["exchange"]: described for described in reversed(public.groups)}
        return [first["reduce_scatter" if route.scheme else self.exchange] for route in routes]

    # --------------------------------------------------------------------------------------------- what integrations add to it

    def _release(self) -> None:
        """Give the model back to its framework."""

    def _settle(self) -> None:
        """Finish exchanges that are under way between steps, if there can be any."""

    def _shapes(self) -> dict[str, list[int]]:
        """The shapes of all parameters that are exchanged, the same on every rank."""
        return {piece.name: list(piece.shape) for group in self.groups for piece in group.spec.pieces}

    def _routes(self, public: Public) -> list[Route]:
        """The groups to read states for."""
        return [self.engine.route(number) for number in range(len(self.engine.lanes))]

    def _extra(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Further facts and entries of the state."""
        return {}, {}

    def _read_extra(self, parts: Sequence[Any], public: Public) -> Callable[[], None]:
        """Check and build the further entries; the function that is returned assigns them."""
        return lambda: None

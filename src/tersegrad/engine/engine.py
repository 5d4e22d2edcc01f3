"""The engine: lanes, steps, changes of compressor and exchange, and what ranks agree on. See :mod:`tersegrad.engine`."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

import tersegrad
from tersegrad.core.errors import BadConfiguration, RankLost
from tersegrad.core.protocol import Compressor, needs_second_moment
from tersegrad.core.text import require
from tersegrad.engine import agreement, checkpoint, replicas
from tersegrad.engine.aside import Aside
from tersegrad.engine.auto import Auto
from tersegrad.engine.carry import Left, carry
from tersegrad.engine.groups import Group
from tersegrad.engine.lane import Lane
from tersegrad.engine.logs import Logs
from tersegrad.engine.meter import TimedGroup
from tersegrad.engine.report import Totals
from tersegrad.engine.settings import Choice, Given, Settings, compressor_of
from tersegrad.engine.step import Step
from tersegrad.exchange import Scheme
from tersegrad.exchange.schemes import AllReduceScheme
from tersegrad.exchange.steps import broke_off
from tersegrad.planner import Link, measure_link

Change = dict[int, Left]  # by group: what a change of compressor or exchange could not carry over


@dataclasses.dataclass(frozen=True)
class Route:
    """A group and the process group that it travels over; ``scheme`` where the settings' exchange does not apply."""

    group: Group
    link: TimedGroup
    scheme: Scheme | None = None
    compressor: Compressor[Any] | None = None


class Engine:
    """The exchanges of one model. Integrations call :meth:`begin`, the step's methods, and little else."""

    def __init__(
        self,
        kind: str,
        routes: Sequence[Route],
        settings: Settings,
        *,
        replicated: Callable[[], Mapping[str, Tensor]] = dict,
        agreeing: Sequence[TimedGroup] = (),
        facts: Mapping[str, str] | None = None,
        hint: str = "",
    ) -> None:
        """``replicated``: tensors that must be equal on all ranks. ``agreeing``: process groups that decide together whether a step
        was finite, where ranks see different results. ``facts``: what else all ranks must agree on. ``hint``: what to do where they differ.
        """
        self.kind, self.settings, self.step, self._hint = kind, settings, 0, hint
        self.totals = Totals()
        self.agreeing, self.replicated, self._facts = tuple(agreeing), replicated, dict(facts or {})
        self.dense_seconds: dict[str, float] | None = None  # of dense all-reduces on this link
        self.link: Link | None = None  # as measured
        self._open: list[Step] = []
        self._aside: Aside | None = None
        self._upcoming: tuple[int, Choice] | None = None  # the step that the schedule was asked for, and its answer
        self.links = list({id(route.link): route.link for route in routes}.values())
        # Ranks that exchange nothing with one another still belong to one run.
        self._comparing = list({id(link): link for link in (*self.links, *self.agreeing)}.values())
        self._routes = list(routes)
        self._lanes: list[Lane] = []
        self._deciding = False  # whether a thread has yet to commit or drop the states of the last step
        self.logs = Logs()
        self.now: Callable[[], int] = lambda: self.step  # what logs call the step
        self._agree()
        self._agreed = True  # a checkpoint that was read is compared at the next step
        self._schemes: dict[tuple[str, int], Scheme] = {}
        self.auto = Auto(settings.auto == "compressor", settings.warmup_steps) if settings.auto else None
        self.lanes = [self.lane(route, settings) for route in routes]

    @property
    def lanes(self) -> list[Lane]:
        """The groups with what is used and kept for each. Their states are those of the last step that was committed."""
        self.settle()
        return self._lanes

    @lanes.setter
    def lanes(self, lanes: list[Lane]) -> None:
        self.settle()
        self._lanes = lanes

    def later(self, decision: Callable[[], None]) -> None:
        """Take a decision about states that waits for a device, in another thread; whoever asks for :attr:`lanes` waits for it."""
        self._aside = self._aside or Aside(self.lanes[0].group.device)
        self._aside.do(decision)
        self._deciding = True

    def settle(self) -> None:
        """Wait until the states of the last step were committed or dropped."""
        if self._deciding and self._aside is not None:
            self._deciding = False
            self._aside.join()

    @property
    def overlaps(self) -> bool:
        """Whether exchanges start while gradients are still computed, and are asked for at the end."""
        return self.kind == "ddp"

    @property
    def exchange(self) -> str:
        """The text form of the exchange; FSDP's own where there is no other."""
        return str(self.settings.scheme) if any(not lane.scheme.shards for lane in self.lanes) else "reduce_scatter"

    def route(self, number: int) -> Route:
        """How a group travels."""
        return self._routes[number]

    def lane(self, route: Route, settings: Settings, given: Compressor[Any] | None = None) -> Lane:
        """A lane with a fresh state."""
        compressor = given or route.compressor or settings.compressor
        return Lane.make(route.group, route.link, compressor, self._resolved(route, settings), settings, self.totals.meters)

    def exchange_of(self, lane: Lane) -> str:
        """What a checkpoint calls a group's exchange: the settings' own words where they apply."""
        route = self._routes[lane.group.number]
        if route.scheme is not None:
            return route.scheme.name
        return str(self.settings.scheme if lane.scheme == self._resolved(route, self.settings) else lane.scheme)

    def lane_of(self, route: Route, compressor: str, exchange: str) -> Lane:
        """A lane with what :meth:`exchange_of` said, and with a fresh state."""
        if route.scheme is not None:
            require(exchange == route.scheme.name, f"a group went through {exchange}, here it goes through {route.scheme.name}")
            return self.lane(route, self.settings, self.settings.choose(compressor, None).compressor)
        return self.lane(dataclasses.replace(route, compressor=None), self.settings.choose(compressor, exchange))

    def _resolved(self, route: Route, settings: Settings) -> Scheme:
        """The scheme of a route, with what only its process group knows (a collective call the first time)."""
        if route.scheme is not None:
            return route.scheme
        key = (str(settings.scheme), id(route.link))
        if key not in self._schemes:
            self._schemes[key] = settings.scheme.resolve(route.link)
        return self._schemes[key]

    # ---------------------------------------------------------------------------------------------------------- agreement

    def _agree(self) -> None:
        """Compare with the other ranks what all must share."""
        settings = self.settings
        facts = {
            "version": tersegrad.__version__,
            "kind": self.kind,
            "compressor": str(settings.compressor),
            "exchange": str(settings.scheme),
            "compressor of means": str(settings.scheme.again(settings.compressor)),
            **settings.facts(),
            **self._facts,
            "number of groups": str(len(self._routes)),
            "step": str(self.step),
        }
        said = []
        for link in self._comparing:
            lines = [_line(route) for route in self._routes if route.link is link]
            lines += [f"{lane.compressor} {lane.scheme}" for lane in self.lanes if lane.link is link]
            layout = hashlib.blake2b("\n".join(lines).encode(), digest_size=8).hexdigest()
            said.append((link, facts | {"layout of the model": layout}))
        agreement.compare(said)

    def _same(self, facts: Mapping[str, str]) -> None:
        """Compare the arguments of one call."""
        agreement.compare([(link, {**facts, "step": str(self.step)}) for link in self._comparing])

    def restored(self, routes: list[Route], lanes: list[Lane], step: int, seed: int) -> None:
        """Go on from what a checkpoint gave."""
        self._routes, self.lanes, self.step = routes, lanes, step
        self.settings = dataclasses.replace(self.settings, seed=seed)
        if len({str(lane.compressor) for lane in lanes}) == 1 and not self.settings.scheme.compresses:
            self.settings = dataclasses.replace(self.settings, compressor=lanes[0].compressor)
        if self.auto is not None:
            if self.settings.auto == "both":
                self.settings = self.settings.choose(lanes[-1].compressor, lanes[-1].scheme)
            self.auto.restart(step)
        self._upcoming, self._agreed = None, False

    # --------------------------------------------------------------------------------------------------------------- steps

    @property
    def warming_up(self) -> bool:
        """Whether the next step is sent dense."""
        return self.step < self.settings.warmup_steps

    def upcoming(self) -> tuple[Given | None, Scheme | str | None]:
        """Compressor and exchange that the schedule wants from the next step on; it is asked once per step, and nothing changes yet."""
        if self.settings.schedule is None:
            return None, None
        if self._upcoming is None or self._upcoming[0] != self.step:
            self._upcoming = self.step, self.settings.schedule(self.step)
        choice = self._upcoming[1]
        return choice if isinstance(choice, tuple) else (choice, None)

    def wants_moments(self) -> bool:
        """Whether the next step needs second moments, whatever becomes of the states of this one."""
        compressor, exchange = self.upcoming()
        if self.warming_up:
            return False
        if compressor is not None:
            return needs_second_moment(self.settings.choose(compressor, exchange).compressor)
        return any(lane.by_variance for lane in self._lanes)

    def begin(self, scale: float = 1.0, take: Callable[[dict[int, Tensor]], None] | None = None) -> Step:
        """Start the next step (the same call on every rank); ``scale``: that of vectors. ``take``: see :meth:`Step.deliver`."""
        if self.auto is not None:
            self.auto.before(self)
        compressor, exchange = self.upcoming()
        if not self._agreed:
            self._agree()
            self._agreed = True
        if self.settings.schedule is not None:
            self._same({"choice of the schedule": f"{_text(compressor)}, {exchange}"})
        if compressor is not None or exchange is not None:
            self._change(compressor, exchange, None)
        every = self.settings.measure_every
        step = Step(self, self.step, scale, self.warming_up, bool(every) and self.step % every == 0, take)
        self.step += 1
        self._open.append(step)
        return step

    def passes_by(self) -> bool:
        """Whether torch's own hook may do the next step: nothing is compressed, and nothing is to be measured, compared or asked."""
        if self.auto is not None:
            self.auto.before(self)
            if self.auto.measuring:
                return False
        how, asked = self.settings.scheme, self.settings.measure_every or self.settings.check_every or self.settings.schedule
        if asked or self.warming_up or not self._agreed or not isinstance(how, AllReduceScheme):
            return False
        # The hook knows one precision, that of the settings.
        return all(lane.scheme == how for lane in self.lanes)

    def passed(self, numel: int, nbytes: int, last: bool) -> None:
        """Torch's own hook has taken so many coordinates; ``last`` of its step."""
        size = self.links[-1].size
        self.totals.coordinates += numel
        self.totals.sent += 2 * (size - 1) * nbytes // size
        self.totals.received += 2 * (size - 1) * nbytes // size
        if last:
            self.logs.closed(self.step, {})
        self.step += last
        self.totals.steps += last

    def closed(self, step: Step, finite: bool | Tensor) -> None:
        """A step was committed or dropped (called by the step itself)."""
        self._open.remove(step)
        self.totals.steps += 1
        self.totals.lost.add((~finite).long() if isinstance(finite, Tensor) else int(not finite))
        self.totals.warmup += step.dense
        self.logs.closed(step.number, step.layers)
        if (every := self.settings.check_every) and step.number % every == 0:
            self.check_replicas()

    def aside(self) -> Aside | None:
        """Where the exchanges of the next step run, if not in the thread that starts them: where that has a GPU to keep at work."""
        device = self.lanes[0].group.device
        if not self.overlaps or device.type != "cuda" or not any(lane.link.beside and lane.waits for lane in self.lanes):
            return None
        if self.auto is not None and self.auto.measuring:
            return None
        self._aside = self._aside or Aside(device)
        return self._aside

    def dropped(self, step: Step) -> None:
        """A step failed: the next one has its number again."""
        if self._aside is not None:
            self._aside.drain()
        if step in self._open:
            self._open.remove(step)
            self.step = step.number

    @property
    def between_steps(self) -> bool:
        return not self._open

    @contextlib.contextmanager
    def timed(self) -> Iterator[None]:
        """Around an integration's work: its seconds are counted, and if it fails the steps under way are lost."""
        begin, probe = time.perf_counter(), self.totals.meters.first.probe
        try:
            yield
        except BaseException as error:
            number = self._open[0].number if self._open else self.step
            for step in reversed(self._open):
                self.dropped(step)
            if broke_off(error):
                raise RankLost(number, error) from error
            raise
        finally:
            # Errors are measured for logs and reports: no exchange takes longer for it.
            self.totals.seconds += time.perf_counter() - begin - (self.totals.meters.first.probe - probe)
        self.logs.write(self, self.now())

    # ------------------------------------------------------------------------------------------------------------- changes

    def change(
        self, compressor: Given | None = None, exchange: Scheme | str | None = None, groups: Sequence[int] | None = None
    ) -> Change:
        """Use another compressor, another exchange or both from the next step on, for all groups or for some.

        The same call on every rank, between two steps. Residuals are carried over where both keep them; what cannot be carried is
        returned by group, and counted in the report. An exchange that is part of the framework (FSDP's reduce-scatter) stays.
        """
        require(self.between_steps, "compressor and exchange can only change between two steps")
        named = "all" if groups is None else str(sorted(set(groups)))
        # Before anything that could fail on one rank only.
        self._same({"changed groups": named, "compressor": _text(compressor), "exchange": str(exchange)})
        return self._change(compressor, exchange, groups)

    def _change(self, compressor: Given | None, exchange: Scheme | str | None, groups: Sequence[int] | None) -> Change:
        require(self.between_steps, "compressor and exchange can only change between two steps")
        chosen = self.settings.choose(compressor, exchange)
        # A group whose compressor was given apart (inside a node) changes only when it is named.
        usual = [n for n, route in enumerate(self._routes) if route.compressor is None]
        numbers = usual if groups is None else sorted(set(groups))
        fixed = exchange is not None and all(self.lanes[n].scheme.shards for n in numbers if n < len(self.lanes))
        require(not fixed, f"these gradients go through FSDP's reduce-scatter, which cannot become {exchange}")
        require(all(0 <= n < len(self.lanes) for n in numbers), f"groups lie in 0..{len(self.lanes) - 1}, got {list(numbers)}")
        made: dict[int, Lane] = {}
        left: Change = {}
        for number in numbers:
            old = self.lanes[number]
            new = self.lane(dataclasses.replace(self._routes[number], compressor=None), chosen)
            if (new.compressor, new.scheme) != (old.compressor, old.scheme):
                new.state, left[number] = carry(old, new)
                made[number] = new
        for number, lane in made.items():
            self.lanes[number] = lane
            self.totals.left_behind += left[number].power
        self.totals.changes += bool(made)
        if groups is None:
            self.settings = chosen
        return {number: one for number, one in left.items() if one.residuals or one.renewed}

    def rearrange(self, number: int, route: Route) -> None:
        """Another layout of one group (parameters were frozen or thawed): states of parameters that stay are kept."""
        old, self._routes[number] = self.lanes[number], route
        saved = checkpoint.save(old)
        new = self.lane(route, self.settings, old.compressor)
        new.state = checkpoint.merge(new, saved)
        self.lanes[number] = new

    # -------------------------------------------------------------------------------------------------------------- safety

    def check_replicas(self) -> None:
        """Raise :class:`ReplicasDiffer` unless what must be equal on all ranks is (a collective call)."""
        tensors = self.replicated()
        if tensors:
            problem = agreement.told(replicas.difference(tensors, self.links[-1]), self._comparing)
            if problem:
                raise replicas.ReplicasDiffer(f"{problem} before step {self.step}{self._hint}")

    def compare(self, rounds: int = 3) -> dict[str, float]:
        """Time dense all-reduces of all groups on this link, for the report (a collective call, between two steps)."""
        require(self.between_steps, "links are compared between two steps")
        numel = sum(lane.group.spec.numel for lane in self.lanes)
        self.dense_seconds = self.links[-1].dense_seconds(numel, self.lanes[0].group.device, rounds)
        return self.dense_seconds

    def measure_link(self) -> Link:
        """Rate and latency between the ranks, for the report (a collective call, between two steps)."""
        require(self.between_steps, "links are measured between two steps")
        self.link = measure_link(self.links[-1])
        return self.link

    def reset_report(self) -> None:
        """Count from zero again, between two steps."""
        require(self.between_steps, "the counters can only be reset between two steps")
        self.totals = Totals()
        for link in self.links:
            link.waited = 0.0
        for lane in self.lanes:
            lane.recount(self.settings, self.totals.meters)


def _line(route: Route) -> str:
    group = route.group
    pieces = [(p.name, p.shape, p.start, p.stop) for p in group.spec.pieces]
    return f"{group.number} {group.buffer} {group.dtype} {route.scheme} {route.compressor} {pieces}"


def _text(given: Given | None) -> str:
    """The text form of what a user said; as it is where it makes no sense."""
    try:
        return "None" if given is None else str(compressor_of(given))
    except BadConfiguration:
        return repr(given)

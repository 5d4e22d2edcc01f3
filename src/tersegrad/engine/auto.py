"""``attach(model, "auto")``: compressor and exchange chosen by measuring, and chosen anew when conditions change.

The first ``WARM`` steps go through torch's all-reduce in bfloat16 (FSDP2: bfloat16 through its reduce-scatter), and are timed: what does
not pass in the exchange is computing. Then the link is measured, and on a gradient of the last step the coding of every compressor of the
ladder (:data:`tersegrad.planner.plan.LADDER`). All numbers are averaged over ranks, so that all of them decide alike. The planner
forecasts a step with every setting, and the ladder is climbed: from bfloat16 on, a setting of fewer bits must make steps 5 % faster. Where
settings before it come within ``DOUBT`` of the one that it leads to, a forecast does not tell: each of them does ``TRIAL`` steps, and the
ladder is climbed by the clock.

Where exchanges start during the backward pass, what it hides may as well be sent with more bits: if the forecast says that the groups which
are complete first can have finer settings in the same time, that mixture is tried against the one setting for all, and kept if the clock
agrees.

Every ``CHECK`` steps the ranks compare how long steps take. Where that has changed by more than ``CHANGED`` twice in a row, they time
``WARM`` steps and decide again; a setting that is still within 5 % of the best stays. Every decision is logged and in the report.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import math
import statistics
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tersegrad.planner import Coding, Forecast, Measured, Setting, Topology, Workload, forecast, measure_coding, measure_link
from tersegrad.planner.coding import LONG, measure_cast
from tersegrad.planner.plan import LADDER, TIE, WORTH, choose, mix, rate_text, seconds_text
from tersegrad.planner.trips import ExchangeName
from tersegrad.recipes import parse

if TYPE_CHECKING:
    from tersegrad.engine.engine import Engine
    from tersegrad.engine.lane import Lane

WARM = 8  # steps that are timed before a decision
CHECK = 50  # steps between two looks at the time of steps
CHANGED = 0.3
DOUBT = 0.3
TRIAL = 10  # steps for which a setting is tried; the first two are not counted
BACKWARD = 2 / 3  # of computing, during which gradients appear
BUDGET = 0.03  # seconds for each measurement of coding

log = logging.getLogger("tersegrad")


class Auto:
    """Chooses for one engine. ``fixed``: the exchange stays what the user said. ``warmup``: steps that are sent dense anyway."""

    def __init__(self, fixed: bool, warmup: int = 0) -> None:
        self.fixed = fixed
        self.decisions = 0
        self.seconds = 0.0  # spent in measuring and deciding
        self._decides_at = warmup + WARM
        self.choice, self.why = "bf16", f"measuring until step {self._decides_at}"
        self._seen = -1
        # The clock, and seconds in the integration, when the step before began.
        self._last: tuple[float, float] | None = None
        # Seconds of whole steps, and of the integration's part in them.
        self._times: list[tuple[float, float]] = []
        self._sample: Tensor | None = None
        self._reference: float | None = None  # seconds of a step since the decision
        self._strange = 0  # looks in a row at which steps took another time
        self._trial: _Trial | None = None
        self._mixing: Callable[[Forecast], Forecast] | None = None  # until a decision looked at the groups one by one

    @property
    def measuring(self) -> bool:
        """Whether steps are being timed for a decision."""
        return self._seen < self._decides_at

    @property
    def decided(self) -> bool:
        """Whether ``choice`` was chosen, and is not one that is being measured or tried."""
        return self._trial is None and (self.decisions > 0 or not self.measuring)

    def restart(self, step: int) -> None:
        """Decide again some steps from now."""
        self._decides_at, self._reference, self._strange = step + WARM, None, 0
        self._times, self._sample, self._last, self._trial, self._mixing = [], None, None, None, None

    def before(self, engine: Engine) -> None:
        """Before every step, on every rank (a collective call in the steps that decide or look)."""
        step = engine.step
        if step <= self._seen:
            return
        decided = self._seen >= self._decides_at
        now, exchanging = time.perf_counter(), engine.totals.seconds
        if self._last is not None and exchanging >= self._last[1]:  # the counters may have been reset
            self._times.append((now - self._last[0], exchanging - self._last[1]))
        if engine.between_steps:
            self._seen = step
            if not decided and step >= self._decides_at:
                self._decide(engine)
            elif self._trial is not None:
                self._try(engine, self._trial)
            elif decided and (step - self._decides_at) % CHECK == 0:
                self._look(engine)
        self._last = time.perf_counter(), engine.totals.seconds
        # Integrations call this within the time that they count, and it is no part of an exchange.
        self.seconds += self._last[0] - now
        engine.totals.seconds -= self._last[0] - now

    def see(self, engine: Engine, lane: Lane, x: Tensor) -> None:
        """Keep a part of the largest group's gradient, in the step before a decision."""
        if not self.measuring or engine.step < self._decides_at:
            return
        if lane is max(engine.lanes, key=lambda other: other.group.spec.numel):
            self._sample = x.detach().reshape(-1)[:LONG].to(torch.float32, copy=True)

    # ------------------------------------------------------------------------------------------------------------- decisions

    def _look(self, engine: Engine) -> None:
        """Compare how long steps take now with what they took after the decision."""
        taken = statistics.median(wall for wall, _ in self._times) if self._times else 0.0
        (mean,) = _mean(engine, [taken])
        self._times = []
        if self._reference is None:
            self._reference = mean
        else:
            ratio = mean / max(self._reference, 1e-9)
            self._strange = self._strange + 1 if not 1 / (1 + CHANGED) <= ratio <= 1 + CHANGED else 0
        if self._strange >= 2:
            self.restart(engine.step)

    def _decide(self, engine: Engine) -> None:
        link = engine.links[-1]
        if link.size == 1:
            self.why = "one rank has nobody to send to"
            return
        good = self._sample is not None and bool(torch.isfinite(self._sample).all())
        # On every rank: a loss scale may have been too large.
        if _mean(engine, [float(good)]) != [1.0]:
            self._decides_at = engine.step + 1
            return
        engine.link = measure_link(link)
        measured, compute = self._measure(engine)
        forecasts = self._forecasts(engine, measured, compute)
        base = next(f for f in forecasts if f.setting.compressor == "bf16")
        best, now = choose(forecasts, LADDER, base=base), self._now(engine)
        kept = next((f for f in forecasts if f.setting == now), None)
        if self.decisions and kept is not None and kept.seconds <= (1 + WORTH) * best.seconds:
            best = kept
        told = (
            f"computing {seconds_text(compute)}, link {rate_text(engine.link.bits_per_second)} and {seconds_text(engine.link.latency)} for "
            f"each of {link.size} ranks"
        )
        self._times, self._mixing = [], lambda chosen: self._mix(engine, chosen, forecasts, measured, compute)
        doubtful = [] if best is kept else [f for f in _finer(forecasts, best) if f.seconds <= (1 + DOUBT) * best.seconds]
        if doubtful:
            self._begin_trial(engine, _Trial((*doubtful, best), told, _by_ladder))
        else:
            why = f"a step would take {seconds_text(best.seconds)}, with bf16 {seconds_text(base.seconds)}: {told}"
            self._settle(engine, best, why, told)

    def _begin_trial(self, engine: Engine, trial: _Trial) -> None:
        self._trial, count = trial, len(trial.forecasts)
        trial.until = engine.step + TRIAL
        self.why = f"trying {count} settings until step {engine.step + TRIAL * count}: {trial.told}"
        self._use(engine, trial.forecasts[0])

    def _try(self, engine: Engine, trial: _Trial) -> None:
        """Go on to the next setting of a trial, or choose by the times of all."""
        if engine.step < trial.until:
            return
        (taken,) = _mean(engine, [statistics.median(wall for wall, _ in self._times[2:] or [(0.0, 0.0)])])
        self._times = []
        trial.seconds.append(taken)
        trial.until = engine.step + TRIAL
        if len(trial.seconds) < len(trial.forecasts):
            self._use(engine, trial.forecasts[len(trial.seconds)])
            return
        self._trial = None
        timed = [dataclasses.replace(f, seconds=t) for f, t in zip(trial.forecasts, trial.seconds)]
        best = trial.choose(timed)
        others = ", ".join(f"{_name_of(f, timed)} {seconds_text(f.seconds)}" for f in timed if f is not best)
        why = f"tried: a step takes {seconds_text(best.seconds)}, with {others}: {trial.told}"
        self._settle(engine, best, why, trial.told)

    def _mix(
        self, engine: Engine, chosen: Forecast, forecasts: Sequence[Forecast], measured: dict[str, Measured], compute: float
    ) -> Forecast:
        """The same with finer settings for the groups that the backward pass hides, where there are such."""
        if chosen.setting.dense or self.fixed or not engine.overlaps or _shards(engine):
            return chosen
        work, topology, groups = self._workload(engine, compute)
        return mix(chosen, [f.setting for f in _finer(forecasts, chosen)], work, topology, measured, groups)

    def _use(self, engine: Engine, what: Forecast) -> None:
        setting = what.setting
        self.choice = _told(what)
        if setting.dense:
            engine.change(None, "all_reduce")
        elif self.fixed or _shards(engine):
            engine.change(setting.compressor)
        else:
            engine.change(setting.compressor, setting.exchange)
        for finer in dict.fromkeys(what.mixed[: what.mixed.index(setting)] if what.mixed else ()):
            numbers = [number for number, one in enumerate(what.mixed) if one == finer]
            engine.change(None if finer.dense else finer.compressor, finer.exchange, numbers)

    def _settle(self, engine: Engine, best: Forecast, why: str, told: str) -> None:
        """Take a setting, and say so; but try first what else it could be for some groups."""
        mixing, self._mixing = self._mixing, None
        if mixing is not None and (mixed := mixing(best)).mixed:
            self._begin_trial(engine, _Trial((best, mixed), told, _unless_slower))
            return
        self.decisions += 1
        self.why = why
        self._use(engine, best)
        link = engine.links[-1]
        if link.global_rank(link.rank) == 0:
            # At this level, so that it is seen without any set-up: what is sent changes here.
            log.warning("auto, step %d: %s (%s)", engine.step, self.choice, self.why)

    def _measure(self, engine: Engine) -> tuple[dict[str, Measured], float]:
        """Coding of every rung, and seconds of computing in a step, as the mean over ranks (a collective call)."""
        assert self._sample is not None
        x, times = self._sample, self._times[1:] or [(0.0, 0.0)]
        compute = max(0.0, statistics.median(wall - exchanging for wall, exchanging in times))
        found: dict[str, Measured] = {}
        for text in ("bf16", *LADDER):
            # All ranks code at once, as they do in a step.
            engine.links[-1].barrier()
            if text == "bf16" and not self.fixed and not _shards(engine):
                found[text] = measure_cast(torch.bfloat16, x.numel(), x.device, BUDGET, in_job=True)
            else:
                found[text] = measure_coding(parse(text), x, budget=BUDGET, in_job=True, workers=engine.links[-1].size)
        numbers = [compute]
        for one in found.values():
            numbers += _numbers(one)
        compute, *means = _mean(engine, numbers)
        averaged = iter(means)
        return {text: _averaged(one, averaged) for text, one in found.items()}, compute

    def _forecasts(self, engine: Engine, measured: dict[str, Measured], compute: float) -> list[Forecast]:
        work, topology, groups = self._workload(engine, compute)
        overlaps = engine.overlaps
        return [
            forecast(
                Setting(text, name),
                work,
                topology,
                one,
                waits=None if overlaps else "each",
                groups=None if overlaps and name == "all_reduce" else groups,
            )
            for text, one in measured.items()
            for name in self._exchanges(engine, text)
        ]

    def _workload(self, engine: Engine, compute: float) -> tuple[Workload, Topology, list[int]]:
        """What the planner asks for, and the coordinates of our groups in the order in which they are complete."""
        sizes = [piece.numel for lane in engine.lanes for piece in lane.group.spec.pieces]
        work = Workload(
            "model", tuple(reversed(sizes)), (1 - BACKWARD) * compute, BACKWARD * compute, engine.settings.dense_below
        )
        assert engine.link is not None
        return work, Topology(engine.links[-1].size, engine.link), [lane.group.spec.numel for lane in engine.lanes]

    def _exchanges(self, engine: Engine, text: str) -> Sequence[ExchangeName]:
        if _shards(engine):
            return ("reduce_scatter",)
        if self.fixed:
            return (_name(engine),)
        return ("all_reduce",) if text == "bf16" else ("two_shot", "all_gather")

    def _now(self, engine: Engine) -> Setting:
        """The setting that the engine has."""
        if engine.settings.scheme.name == "all_reduce":
            return Setting("bf16", "all_reduce")
        name = self._exchanges(engine, "")[0] if self.fixed or _shards(engine) else _name(engine)
        return Setting(str(engine.settings.compressor), name)


def _numbers(one: Measured) -> list[float]:
    """What was measured of a compressor, and of what compresses means in its place."""
    c = one.coding
    own = [c.encode, c.decode, c.add or c.decode, c.each_encode, c.each_decode, c.copy, one.bits, one.error]
    return own + (_numbers(one.means) if one.means is not None else [])


def _averaged(one: Measured, numbers: Iterator[float]) -> Measured:
    """The same with other numbers, in the order of :func:`_numbers`."""
    own = list(itertools.islice(numbers, 8))
    means = _averaged(one.means, numbers) if one.means is not None else None
    return Measured(Coding(*own[:6]), own[6], own[7], one.fixed_size, means)


@dataclasses.dataclass
class _Trial:
    """Settings that are tried one after the other; ``choose``: among them, by the clock; ``seconds``: of their steps, so far."""

    forecasts: tuple[Forecast, ...]
    told: str
    choose: Callable[[Sequence[Forecast]], Forecast]
    until: int = 0
    seconds: list[float] = dataclasses.field(default_factory=list)


def _by_ladder(timed: Sequence[Forecast]) -> Forecast:
    return choose(timed, [f.setting.compressor for f in timed[1:]], base=timed[0])


def _unless_slower(timed: Sequence[Forecast]) -> Forecast:
    """The second, which is finer, where it takes as long as the first."""
    plain, mixed = timed
    return mixed if mixed.seconds <= (1 + TIE) * plain.seconds else plain


def _finer(forecasts: Sequence[Forecast], best: Forecast) -> list[Forecast]:
    """The settings before ``best`` on the ladder, each with its fastest exchange."""
    rungs = ["bf16", *LADDER]
    before = rungs[: rungs.index(best.setting.compressor)]
    return [min((f for f in forecasts if f.setting.compressor == text), key=lambda f: f.seconds) for text in before]


def _told(what: Forecast) -> str:
    """For logs and reports."""
    text = str(what.setting)
    for finer in dict.fromkeys(one for one in what.mixed if one != what.setting):
        numbers = [number for number, one in enumerate(what.mixed) if one == finer]
        text += f"; {finer} for {f'groups {numbers[0]} to {numbers[-1]}' if len(numbers) > 1 else f'group {numbers[0]}'}"
    return text + (f" of {len(what.mixed)}" if what.mixed else "")


def _name_of(one: Forecast, timed: Sequence[Forecast]) -> str:
    """The compressor, or how one of two with the same compressor differs from the other."""
    if all(other is one or other.setting.compressor != one.setting.compressor for other in timed):
        return one.setting.compressor
    return "groups of their own" if one.mixed else "one setting for all"


def _name(engine: Engine) -> ExchangeName:
    return "all_gather" if engine.settings.scheme.name == "all_gather" else "two_shot"


def _shards(engine: Engine) -> bool:
    return any(lane.scheme.shards for lane in engine.lanes)


def _mean(engine: Engine, numbers: Sequence[float]) -> list[float]:
    """The mean over all ranks, the same on each (a collective call)."""
    finite = [n if math.isfinite(n) else 0.0 for n in numbers]
    for link in (engine.links[-1], *engine.agreeing):
        rows = [struct.unpack(f"<{len(finite)}d", row) for row in link.gather(struct.pack(f"<{len(finite)}d", *finite))]
        finite = [sum(column) / len(rows) for column in zip(*rows)]
    return finite

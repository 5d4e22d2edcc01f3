"""DistributedDataParallel with compressed gradients: ``attach(model, "error_feedback(top_k(fraction=0.01))")``.

How a step goes. DDP hands over its buckets in one order on all ranks. Their gradients are copied into stable groups
(:mod:`tersegrad.integrations.groups`); when a group's last gradient has arrived its exchange starts, and the exchanges that started
before it take one step each, so that bytes travel while later gradients are computed. The order of collectives follows from the
buckets alone, hence is the same everywhere. The last bucket's hook finishes all exchanges, writes the means into the buckets and
completes the futures that DDP waits for.

Compressors that decide by the variance over samples (``vgc``, ``hybrid``) get the second moments of the per-sample gradients from a
:class:`~tersegrad.moments.Collector`, which the handle attaches to the model. The moments are whole only when the backward pass has ended,
so these exchanges all start with the last bucket.

States (residuals) belong to groups of named parameters. They are committed once every group's mean, in the gradients' own dtype
and at the loss scale, is finite: the means are the same on all ranks, so the decision is too, and it is the one a GradScaler takes.
"""

import dataclasses
import json
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from tersegrad.compressors import BF16, Identity
from tersegrad.core import state as states
from tersegrad.core.errors import BadConfiguration, MissingStatistics
from tersegrad.core.protocol import Compressor, Context, Stats, needs_second_moment
from tersegrad.core.text import require
from tersegrad.exchange import Exchange, Pipeline, Plan, PowerSGDExchange, plan, start
from tersegrad.integrations import checkpoint, replicas
from tersegrad.integrations.groups import Group, from_layout, make_groups
from tersegrad.integrations.meter import Meter, TimedGroup, watch
from tersegrad.integrations.replicas import ReplicasDiffer as ReplicasDiffer
from tersegrad.moments import Collector
from tersegrad.recipes import parse
from tersegrad.wrappers import ByTensor

FORMAT = 2  # of state_dict
GROUP_BYTES = 25 << 20  # of float32 gradient that one message serves, unless told otherwise


@dataclasses.dataclass
class _Totals:
    """What :meth:`Handle.report` counts."""

    steps: int = 0
    dropped: int = 0
    warmup: int = 0
    sent: int = 0
    inside: int = 0
    received: int = 0
    coordinates: int = 0
    seconds: float = 0.0  # in the hook, all in all
    error: float = 0.0
    power: float = 0.0
    first: Meter = dataclasses.field(default_factory=Meter)
    second: Meter = dataclasses.field(default_factory=Meter)


@dataclasses.dataclass
class _Bucket:
    """What is kept of a DDP bucket until the step's means are known."""

    parameters: list[Tensor]
    gradients: list[Tensor]
    buffer: Tensor
    future: "Future[Tensor]"


class Handle:
    """The exchange of one DDP model: state, settings and counters. Made by :func:`attach` or :func:`make_hook`."""

    def __init__(
        self,
        compressor: Compressor[Any] | str | None,
        exchange: Plan | str | None = None,
        *,
        group_bytes: int = GROUP_BYTES,
        dense_below: int | None = None,
        dense: Compressor[Any] | str | None = None,
        warmup_steps: int = 0,
        schedule: Callable[[int], Compressor[Any] | str | None] | None = None,
        scaler: Any = None,
        seed: int = 0,
        check_every: int = 0,
        measure_every: int = 0,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        require(group_bytes > 0, f"group_bytes must be positive, got {group_bytes}")
        by_variance = compressor is not None and needs_second_moment(_compressor(compressor))
        if (
            dense_below is None
        ):  # by variance even small tensors send next to nothing, and dense they would be most of the bytes
            dense_below = 0 if by_variance else 1024
        for name, value in (
            ("dense_below", dense_below),
            ("warmup_steps", warmup_steps),
            ("check_every", check_every),
            ("measure_every", measure_every),
        ):
            require(value >= 0, f"{name} must not be negative, got {value}")
        self.plan = plan(exchange if exchange is not None else "all_gather" if by_variance else "two_shot")
        self.compressor = self._checked(compressor)
        self.group_bytes, self.dense_below = group_bytes, dense_below
        self.dense_compressor = None if dense is None else _compressor(dense)
        self.warmup_steps, self.schedule, self.scaler = warmup_steps, schedule, scaler
        self.seed, self.check_every, self.measure_every = seed, check_every, measure_every
        Context(seed=seed)  # refuses a seed that does not fit
        self.step = 0
        self.groups: list[Group] = []
        self._process_group = process_group
        self._driver: TimedGroup | None = None
        self._scale: float | None = None
        self._parameters: dict[str, Tensor] = {}
        self._replicas: dict[str, Tensor] = {}
        self._resolved: Plan | None = None  # the plan, with what the process group knows
        self._exchanges: list[Exchange[Any]] = []
        self._states: list[Any] = []
        self._flat: list[Tensor] = []
        self._where: dict[int, tuple[int, int]] = {}  # id of a parameter -> its group and where it begins there
        self._saved: Sequence[Mapping[str, Any]] | None = None  # a checkpoint read before the parameters were known
        self._module: torch.nn.Module | None = None
        self._collector: Collector | None = None  # of second moments, while the compressor asks for them
        self._totals = _Totals()
        self._dense_seconds: dict[str, float] | None = None  # of dense all-reduces on this link
        self._begin()

    def _checked(self, given: Compressor[Any] | str | None) -> Compressor[Any]:
        """The compressor that goes with the exchange; Identity stands for none."""
        chosen = Identity() if given is None else _compressor(given)
        if self.plan.compresses and chosen != Identity():
            raise BadConfiguration(f"{self.plan} compresses by itself and takes no compressor: pass None instead of {chosen}")
        if not self.plan.compresses and given is None:
            raise BadConfiguration(f"{self.plan} needs a compressor, got None; identity sends gradients as they are")
        if needs_second_moment(chosen) and self.plan.recompresses:
            raise BadConfiguration(
                f"{chosen} decides by the variance over samples, and {self.plan} compresses means a second time, which have none: use "
                'exchange="all_gather" (or hierarchical(between=all_gather))'
            )
        return chosen

    @property
    def exchange(self) -> str:
        """The text form of the exchange."""
        return str(self.plan)

    # ------------------------------------------------------------------------------------------------ what it is attached to

    @property
    def group(self) -> TimedGroup:
        """The process group as the driver of exchanges."""
        if self._driver is None:
            self._driver = TimedGroup(self._process_group)
        return self._driver

    @property
    def hook(self) -> "Callable[[Handle, GradBucket], Future[Tensor]]":
        """The communication hook; ``(handle, handle.hook)`` is what ``register_comm_hook`` takes."""
        return compressed_hook

    def bind(self, model: torch.nn.Module) -> None:
        """Learn names and groups from a model. :func:`attach` does it; a plain pair may, to name parameters in checkpoints."""
        require(not self._parameters, "this handle already has its parameters: make one handle for each model")
        inner = getattr(model, "_orig_mod", model)
        ignored: set[str] = set(getattr(inner, "parameters_to_ignore", ()))
        if isinstance(inner, DistributedDataParallel):
            if self._process_group is None:
                self._process_group = inner.process_group
            inner = inner.module
        self._module = inner
        named = {name: p for name, p in inner.named_parameters() if name not in ignored}
        self._bind({_plain(name): p for name, p in named.items()})

    def _bind(self, named: Mapping[str, Tensor]) -> None:
        self._replicas = dict(named)
        self._parameters = {name: p for name, p in named.items() if p.requires_grad}
        self._arrange(make_groups(self._parameters, self.group_bytes, self.dense_below))
        if self._saved is not None:
            saved, self._saved = self._saved, None
            self.load_state_dicts(saved)
        self._observe()

    def _observe(self) -> None:
        """Collect second moments from the next forward pass on, if the compressor of the next step asks for them."""
        chosen: Compressor[Any] | str | None = self.schedule(self.step) if self.schedule and not self.warming_up else None
        wanted = needs_second_moment(self.compressor if chosen is None else _compressor(chosen))
        if wanted and self._collector is None and self._module is not None:
            self._collector = Collector(self._module)
        elif not wanted and self._collector is not None:
            self._collector.remove()
            self._collector = None

    def _arrange(self, groups: list[Group]) -> None:
        self.groups = groups
        self._where = {}
        for group in groups:
            at = 0
            for piece in group.spec.pieces:
                self._where[id(self._parameters[piece.name])] = group.number, at
                at += piece.numel
        self._flat = [torch.zeros(g.spec.numel, dtype=torch.float32, device=g.device) for g in groups]
        self._make_exchanges()
        self._states = self._fresh()
        self._begin()

    def _make_exchanges(self) -> None:
        self._resolved = self._resolved or self.plan.resolve(self.group)  # a collective call: once
        self._exchanges = [self._exchange(self._effective(g), self._totals) for g in self.groups]

    def _fresh(self) -> list[Any]:
        rank, size = self.group.rank, self.group.size
        return [e.init(g.spec, g.device, rank, size) for e, g in zip(self._exchanges, self.groups)]

    def _dense(self, group: Group) -> Compressor[Any]:
        """What dense parts are sent with: nothing is lost that the gradient's own dtype would keep."""
        return self.dense_compressor or (BF16() if group.dtype == torch.bfloat16 else Identity())

    def _effective(self, group: Group) -> Compressor[Any]:
        if not self.dense_below:
            return self.compressor
        return ByTensor(self.compressor, small=self._dense(group), below=self.dense_below)

    def _exchange(self, compressor: Compressor[Any], totals: _Totals, how: Plan | None = None) -> Exchange[Any]:
        return (how or self._resolved or self.plan).make(watch(compressor, totals.first), watch(compressor, totals.second))

    # -------------------------------------------------------------------------------------------------------------- settings

    def set_compressor(self, compressor: Compressor[Any] | str) -> None:
        """Use another compressor from the next step on (call it on every rank). Residuals are kept where both have them."""
        chosen = self._checked(compressor)
        if chosen == self.compressor:
            return
        require(not self._buckets, "the compressor can only change between two steps")
        saved = [self._saved_group(number) for number in range(len(self.groups))]
        self.compressor = chosen
        self._make_exchanges()
        self._states = self._fresh()
        for number, one in enumerate(saved):
            try:
                self._restore_group(number, [one])
            except BadConfiguration:
                continue  # the two keep different things: start anew
        self._observe()

    def set_scale(self, scale: float | None) -> None:
        """The loss scale by which gradients are multiplied, if no GradScaler was given; None for 1."""
        require(scale is None or (math.isfinite(scale) and scale > 0), f"a loss scale is positive, got {scale}")
        self._scale = scale

    @property
    def warming_up(self) -> bool:
        """Whether the next step is sent dense."""
        return self.step < self.warmup_steps

    # -------------------------------------------------------------------------------------------------------------- one step

    def _begin(self) -> None:
        self._buckets: list[_Bucket] = []
        self._missing = [len(g.spec.pieces) for g in self.groups]
        self._pipeline: Pipeline[Any] = Pipeline()
        self._started: list[int] = []  # the groups in it
        self._complete: list[int] = []  # groups that wait for their second moments
        self._step_scale = 1.0

    def _plan(self) -> None:
        """Settings of the step that begins."""
        self._begin()
        scale = self.scaler.get_scale() if self.scaler is not None else self._scale
        self._step_scale = 1.0 if scale is None else float(scale)
        self._totals.first.probing = bool(self.measure_every) and self.step % self.measure_every == 0
        self._choose()

    def _choose(self) -> None:
        if self.schedule is not None and not self.warming_up:
            chosen = self.schedule(self.step)
            if chosen is not None:
                self.set_compressor(chosen)

    def on_bucket(self, bucket: GradBucket) -> "Future[Tensor]":
        """Take in one bucket; the future holds the bucket's means once the last bucket was seen."""
        begin = time.perf_counter()
        try:
            return self._on_bucket(bucket)
        except BaseException:
            self._begin()  # the step is lost, the states are those before it
            if self._collector is not None:
                self._collector.clear()
            raise
        finally:
            self._totals.seconds += time.perf_counter() - begin

    def _on_bucket(self, bucket: GradBucket) -> "Future[Tensor]":
        if bucket.index() == 0:
            self._plan()
        buffer = bucket.buffer()
        if buffer.is_sparse:
            raise BadConfiguration("a gradient is a sparse tensor (sparse=True embedding): build the layer with sparse=False")
        future: Future[Tensor] = Future(devices=[buffer.device]) if buffer.is_cuda else Future()
        arrived = _Bucket(list(bucket.parameters()), list(bucket.gradients()), buffer, future)
        self._buckets.append(arrived)
        if self._parameters:
            self._take(arrived)
        elif bucket.is_last():
            self._bind_to_buckets()
        if bucket.is_last():
            self._finish()
        return future

    def _bind_to_buckets(self) -> None:
        """Without a model: DDP's first buckets, last to first, hold the parameters in the order of their registration."""
        buckets, scale = self._buckets, self._step_scale
        ordered = [p for bucket in reversed(buckets) for p in bucket.parameters]
        self._bind({f"parameter{number}": p for number, p in enumerate(ordered)})
        self._choose()  # a checkpoint that waited for the parameters may have moved the step
        self._buckets, self._step_scale = buckets, scale
        for bucket in buckets:
            self._take(bucket)

    def _take(self, bucket: _Bucket) -> None:
        complete = []
        for parameter, gradient in zip(bucket.parameters, bucket.gradients, strict=True):
            place = self._where.get(id(parameter))
            if place is None:
                raise BadConfiguration(
                    f"DDP exchanges a parameter of shape {tuple(parameter.shape)} that was frozen or absent when the handle was "
                    "attached: attach right after building DDP"
                )
            number, at = place
            self._flat[number][at : at + gradient.numel()].view(gradient.shape).copy_(gradient)
            self._missing[number] -= 1
            if not self._missing[number]:
                complete.append(number)
        for number in sorted(complete):
            if self._by_variance:
                self._complete.append(number)
            else:
                self._start(number)

    @property
    def _by_variance(self) -> bool:
        """Whether this step's messages need second moments."""
        return not self.warming_up and needs_second_moment(self.compressor)

    def _second_moments(self) -> dict[int, Tensor]:
        """The second moments of every group, at loss scale 1, laid out like the gradients."""
        taken: dict[Any, Tensor] = {} if self._collector is None else dict(self._collector.take())
        found = {}
        for group in self.groups:
            second = torch.zeros(group.spec.numel, dtype=torch.float32, device=group.device)
            for piece in group.spec.pieces:
                parameter = self._parameters[piece.name]
                at = self._where[id(parameter)][1]
                moment = taken.get(parameter)
                if moment is not None:
                    second[at : at + piece.numel] = moment.reshape(-1)
                elif bool(self._flat[group.number][at : at + piece.numel].any()):
                    raise MissingStatistics(
                        f"{piece.name} has a gradient but no second moment: attach(model, ...) or handle.bind(model) before the "
                        "forward pass, and run the model through DistributedDataParallel"
                    )
            found[group.number] = second.mul_(self._step_scale**-2)
        return found

    def _start(self, number: int, second_moment: Tensor | None = None) -> None:
        group, flat = self.groups[number], self._flat[number]
        if self._step_scale != 1.0:
            flat.mul_(1.0 / self._step_scale)
        exchange, state = self._exchanges[number], self._states[number]
        if self.warming_up:
            exchange = self._exchange(self._dense(group), self._totals, plan("two_shot") if self.plan.compresses else None)
            state = exchange.init(group.spec, group.device, self.group.rank, self.group.size)
        ctx = Context(seed=self.seed, step=self.step % (1 << 32), buffer=number)
        stats = None if second_moment is None else Stats(second_moment)
        self._pipeline.add(start(exchange, flat, state, group.spec, ctx, self.group, stats))
        self._started.append(number)

    def _finish(self) -> None:
        if any(self._missing):
            lacking = [g.names for g, missing in zip(self.groups, self._missing) if missing]
            raise BadConfiguration(f"DDP gave no gradient for some of {lacking}: attach right after building DDP")
        if self._complete:
            moments = self._second_moments()
            for number in self._complete:
                self._start(number, moments.pop(number))
        elif self._collector is not None:
            self._collector.clear()  # a dense step
        results = self._pipeline.finish()
        means: dict[int, Tensor] = {}
        after: dict[int, Any] = {}
        finite = True
        for number, pending, (mean, state) in zip(self._started, self._pipeline.pendings, results, strict=True):
            after[number] = state
            if self.measure_every and self.step % self.measure_every == 0:
                self._measure(self._flat[number], mean)
            if self._step_scale != 1.0:
                mean = mean.mul_(self._step_scale)
            means[number] = mean.to(self.groups[number].dtype)
            finite = finite and _finite(means[number])
            self._totals.sent += pending.sent
            self._totals.inside += pending.inside
            self._totals.received += pending.received
            self._totals.coordinates += mean.numel()
        for bucket in self._buckets:
            for parameter, gradient in zip(bucket.parameters, bucket.gradients):
                number, at = self._where[id(parameter)]
                gradient.copy_(means[number][at : at + gradient.numel()].view(gradient.shape))
        if finite and not self.warming_up:
            self._states = [after[number] for number in range(len(self.groups))]
        self._totals.steps += 1
        self._totals.dropped += not finite
        self._totals.warmup += self.warming_up
        buckets, step = self._buckets, self.step
        self._begin()
        self.step += 1
        self._observe()
        if self.check_every and step % self.check_every == 0:
            self.check_replicas()
        for bucket in buckets:
            bucket.future.set_result(bucket.buffer)

    def _measure(self, mine: Tensor, mean: Tensor) -> None:
        """Compare with the exact mean, which one dense all-reduce gives."""
        exact = torch.cat([mine.double(), mine.double().square().sum().reshape(1)])
        dist.all_reduce(exact, group=self._process_group)
        exact /= self.group.size
        error, power = float((mean.double() - exact[:-1]).square().sum()), float(exact[-1])
        if math.isfinite(error) and math.isfinite(power):
            self._totals.error += error
            self._totals.power += power

    # ---------------------------------------------------------------------------------------------------------------- safety

    def check_replicas(self) -> None:
        """Raise :class:`ReplicasDiffer` unless every parameter has the same bits on all ranks (a collective call)."""
        replicas.compare(self._replicas, self.group, self.step)

    # ---------------------------------------------------------------------------------------------------------------- report

    def dense(self) -> dict[str, str]:
        """The parameters that are sent dense, each with the reason."""
        if self.warming_up:
            return dict.fromkeys(self._parameters, f"warm-up until step {self.warmup_steps}")
        if isinstance(self._exchanges[0] if self._exchanges else None, PowerSGDExchange):
            found = [e.dense(g.spec) for e, g in zip(self._exchanges, self.groups) if isinstance(e, PowerSGDExchange)]
            return {name: why for one in found for name, why in one.items()}
        small = {name: p.numel() for name, p in self._parameters.items() if p.numel() < self.dense_below}
        return {name: f"{numel} elements, fewer than dense_below={self.dense_below}" for name, numel in small.items()}

    def report(self) -> dict[str, float | str]:
        """Counters since the start (or :meth:`reset_report`) as a flat dict; sizes are those of bytes that travelled."""
        t, size = self._totals, self.group.size
        message = t.first.nbytes / t.steps if t.steps else 0.0  # of this rank, for the whole model
        estimates = {"all_gather": (size - 1) * message, "two_shot": 2 * (size - 1) / size * message}
        dense = self.dense()
        coded = t.first.seconds + t.second.seconds
        out: dict[str, float | str] = {
            "compressor": "none" if self.plan.compresses else str(self.compressor),
            "exchange": self.exchange,
            "steps": t.steps,
            "steps/dropped": t.dropped,
            "steps/warmup": t.warmup,
            "bytes/sent": t.sent,
            "bytes/sent/inside": t.inside,
            "bytes/received": t.received,
            "bits_per_coordinate": 8 * t.first.nbytes / t.first.coordinates if t.first.coordinates else 0.0,
            "bits_per_coordinate/sent": 8 * t.sent / t.coordinates if t.coordinates else 0.0,
            "seconds/encode": t.first.encode + t.second.encode,
            "seconds/decode": t.first.decode + t.second.decode,
            "seconds/wire": self.group.waited,
            "seconds/other": max(0.0, t.seconds - coded - self.group.waited),
            "dense/parameters": len(dense),
            "dense/coordinates": sum(self._parameters[name].numel() for name in dense),
            "dense/why": "; ".join(sorted({reason.split(", ")[-1] for reason in dense.values()})),
            "state/bytes": sum(map(self._memory, range(len(self.groups)))),
            "groups": len(self.groups),
            # At two ranks both send the same; all_gather then compresses once instead of twice.
            "cheaper_exchange": "all_gather" if estimates["all_gather"] <= estimates["two_shot"] else "two_shot",
            "bytes/step/all_gather": estimates["all_gather"],
            "bytes/step/two_shot": estimates["two_shot"],
        }
        if t.power:
            out["relative_error"] = t.error / t.power
        if self._collector is not None:
            out["moments/fallbacks"] = len(self._collector.fallbacks)
        if t.first.power:
            out["message_error"] = t.first.error / t.first.power
        if self.plan.compresses:
            exchanges = [(e, g.spec) for e, g in zip(self._exchanges, self.groups) if isinstance(e, PowerSGDExchange)]
            coordinates = sum(spec.numel for _, spec in exchanges)
            if coordinates:
                out["bits_per_coordinate"] = 8 * sum(e.message_nbytes(spec) for e, spec in exchanges) / coordinates
        if self.exchange not in ("two_shot", "all_gather"):
            for name in ("cheaper_exchange", "bytes/step/all_gather", "bytes/step/two_shot"):
                del out[name]
        if t.steps:
            out |= self._verdict()
        return out

    def _verdict(self) -> dict[str, float | str]:
        """Whether compression pays, against a bf16 all-reduce: on this link if it was compared, else on which links."""
        t, size = self._totals, self.group.size
        taken = t.seconds / t.steps
        saved = 2 * (size - 1) / size * 2 * t.coordinates - t.sent  # bytes, in all steps
        rate = 8 * saved / max(t.seconds - self.group.waited, 1e-9)
        out: dict[str, float | str] = {"seconds/step": taken, "pays_below": max(0.0, rate)}
        if self._dense_seconds is not None:
            out |= {f"seconds/step/{kind}": seconds for kind, seconds in self._dense_seconds.items()}
            kind, dense = min(self._dense_seconds.items(), key=lambda item: item[1])
            word = "pays" if taken < dense else "does not pay"
            out["verdict"] = (
                f"compression {word} here: {taken:.4f} s a step in the exchange, {kind} all-reduce takes {dense:.4f} s"
            )
        elif rate <= 0:
            out["verdict"] = "compression does not pay: a bf16 all-reduce would not send more bytes"
        else:
            out["verdict"] = (
                f"compression pays where a rank's link is slower than {rate / 1e6:.3g} Mbit/s; compare() tells for this one"
            )
        return out

    def compare(self, rounds: int = 3) -> dict[str, float]:
        """Time dense all-reduces of all gradients on this link, for the report (a collective call, between two steps)."""
        require(not self._buckets, "links are compared between two steps")
        device = self.groups[0].device if self.groups else torch.device("cpu")
        numel = sum(g.spec.numel for g in self.groups)
        found: dict[str, float] = {}
        for kind, dtype in (("float32", torch.float32), ("bf16", torch.bfloat16)):
            buffer, taken = torch.zeros(numel, dtype=dtype, device=device), []
            for _ in range(rounds + 1):
                dist.barrier(group=self._process_group)
                begin = time.perf_counter()
                dist.all_reduce(buffer, group=self._process_group)
                if buffer.is_cuda:
                    torch.cuda.synchronize(device)
                taken.append(time.perf_counter() - begin)
            found[kind] = statistics.median(taken[1:])
        # The mean over ranks, so that all say the same.
        shared = torch.tensor(list(found.values()), dtype=torch.float32, device=device)
        dist.all_reduce(shared, group=self._process_group)
        self._dense_seconds = dict(zip(found, (shared / self.group.size).tolist()))
        return self._dense_seconds

    @property
    def seconds(self) -> float:
        """Spent in the hook since the start or :meth:`reset_report`, the time that was waited for the wire included."""
        return self._totals.seconds

    def _memory(self, number: int) -> int:
        parts = self._exchanges[number].parts(self._states[number], self.groups[number].spec, self.group.rank, self.group.size)
        return sum(states.nbytes(part.state) for part in parts)

    def reset_report(self) -> None:
        """Count from zero again, between two steps."""
        require(not self._buckets, "the counters can only be reset between two steps")
        self._totals = _Totals()
        self.group.waited = 0.0
        self._make_exchanges()  # their clocks write into the new counters

    # ----------------------------------------------------------------------------------------------------------------- state

    def state_dict(self) -> dict[str, Any]:
        """The state of this rank under ``rank<r>``, keyed by parameter names; what a checkpoint stores (every rank its own)."""
        require(not self._buckets, "a state can only be saved between two steps")
        rank, size = self.group.rank, self.group.size
        rounds: dict[str, dict[str, Any]] = {"first": {}, "second": {}}
        for number in range(len(self.groups)):
            for name, parameters in self._saved_group(number).items():
                rounds.setdefault(name, {}).update(parameters)
        shapes = {p.name: list(p.shape) for g in self.groups for p in g.spec.pieces}
        public = {
            "format": FORMAT,
            "rank": rank,
            "size": size,
            "step": self.step,
            "seed": self.seed,
            "compressor": str(self.compressor),
            "dense_below": self.dense_below,
            "exchange": self.exchange,
            "layout": [list(g.names) for g in self.groups],
            "shapes": shapes,
        }
        # One text, so that torch.distributed.checkpoint keeps it whole.
        return {f"rank{rank}": {"public": json.dumps(public), **rounds}}

    def _saved_group(self, number: int) -> checkpoint.Saved:
        spec, rank, size = self.groups[number].spec, self.group.rank, self.group.size
        return checkpoint.save(self._exchanges[number], self._states[number], spec, rank, size)

    def _restore_group(self, number: int, saved: Sequence[checkpoint.Saved]) -> None:
        spec, rank, size = self.groups[number].spec, self.group.rank, self.group.size
        self._states[number] = checkpoint.restore(self._exchanges[number], self._states[number], spec, rank, size, saved)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from this rank's :meth:`state_dict`: the next steps are bit for bit those of the run that saved it."""
        self._load(checkpoint.own_part(state_dict, self.group.rank, self.group.size))

    def load_state_dicts(self, state_dicts: Sequence[Mapping[str, Any]]) -> None:
        """Continue from the states of all ranks that saved, on any world size: residuals start from their mean over those ranks."""
        self._load(checkpoint.needed_parts(state_dicts, self.group.rank, self.group.size))

    def _load(self, parts: Sequence[Mapping[str, Any]]) -> None:
        public = checkpoint.public(parts[0])
        require(public["format"] == FORMAT, f"state format {public['format']} was written by another version")
        if not self._parameters:  # a plain pair learns its parameters in the first step
            self._saved = [{f"rank{checkpoint.public(part)['rank']}": part} for part in parts]
            return
        shapes = {name: list(p.shape) for name, p in self._parameters.items()}
        saved = {name: list(shape) for name, shape in public["shapes"].items()}
        for name in sorted(shapes.keys() | saved.keys()):
            if shapes.get(name) != saved.get(name):
                raise BadConfiguration(
                    f"the model changed: {name} has shape {shapes.get(name)} here and {saved.get(name)} in the saved state"
                )
        if public["exchange"] != self.exchange or public["dense_below"] != self.dense_below:
            raise BadConfiguration(
                f"the state was saved with exchange={public['exchange']!r}, dense_below={public['dense_below']}; this handle has "
                f"{self.exchange!r}, {self.dense_below}"
            )
        if public["compressor"] != str(self.compressor):
            if self.schedule is None:
                raise BadConfiguration(
                    f"the state was saved with {public['compressor']}, this handle compresses with {self.compressor}: "
                    "attach with the saved one (set_compressor may change it afterwards)"
                )
            self.compressor = parse(str(public["compressor"]))
        self.step, self.seed = int(public["step"]), int(public["seed"])
        self._arrange(from_layout(self._parameters, public["layout"]))
        saved_rounds = [{name: value for name, value in part.items() if name != "public"} for part in parts]
        for number in range(len(self.groups)):
            self._restore_group(number, saved_rounds)


def compressed_hook(state: Handle, bucket: GradBucket) -> Future[Tensor]:
    """The communication hook of every handle, for ``register_comm_hook(handle, compressed_hook)``."""
    return state.on_bucket(bucket)


def attach(
    model: torch.nn.Module,
    compressor: Compressor[Any] | str | None,
    exchange: Plan | str | None = None,
    *,
    group_bytes: int = GROUP_BYTES,
    dense_below: int | None = None,
    dense: Compressor[Any] | str | None = None,
    warmup_steps: int = 0,
    schedule: Callable[[int], Compressor[Any] | str | None] | None = None,
    scaler: Any = None,
    seed: int = 0,
    check_every: int = 0,
    measure_every: int = 0,
    process_group: dist.ProcessGroup | None = None,
) -> Handle:
    """Exchange the gradients of a DistributedDataParallel model through ``compressor``; the same call on every rank.

    ``exchange``: "two_shot" (the default), "all_gather" (the default for compressors that decide by the variance over samples),
    "hierarchical(ranks_per_node=8)" or "power_sgd(rank=4)"; the last compresses by itself, and ``compressor`` is None then.
    ``group_bytes``: how much float32 gradient one message serves. ``dense_below``: tensors with fewer elements (default 1024, by
    variance 0) are sent with ``dense`` (default: exactly, as float32 or bfloat16), as is everything in the first ``warmup_steps``
    steps. ``schedule``: a function of the step that returns the compressor to use from then on, or None for no change. ``scaler``:
    the GradScaler, so that residuals are kept at scale 1. ``check_every`` and ``measure_every``: every so many steps compare the replicas'
    parameters, and the mean with the exact one (one dense all-reduce).
    """
    inner = getattr(model, "_orig_mod", model)
    if not isinstance(inner, DistributedDataParallel):
        raise BadConfiguration(
            f"attach takes a DistributedDataParallel model, got {type(inner).__name__}: wrap the model first"
        )
    handle = Handle(
        compressor,
        exchange,
        group_bytes=group_bytes,
        dense_below=dense_below,
        dense=dense,
        warmup_steps=warmup_steps,
        schedule=schedule,
        scaler=scaler,
        seed=seed,
        check_every=check_every,
        measure_every=measure_every,
        process_group=process_group,
    )
    handle.bind(model)
    inner.register_comm_hook(handle, compressed_hook)
    return handle


def make_hook(
    compressor: Compressor[Any] | str | None, exchange: Plan | str | None = None, **options: Any
) -> tuple[Handle, Callable[[Handle, GradBucket], Future[Tensor]]]:
    """A plain ``(state, hook)`` pair, with the options of :func:`attach`, for frameworks that register the hook themselves.

    The pair learns the parameters in the first step and names them by their position; ``handle.bind(model)`` gives their names.
    """
    handle = Handle(compressor, exchange, **options)
    return handle, compressed_hook


def _compressor(given: Compressor[Any] | str) -> Compressor[Any]:
    return parse(given) if isinstance(given, str) else given


def _plain(name: str) -> str:
    """A parameter's name without what torch.compile puts in."""
    return name.replace("_orig_mod.", "")


def _finite(x: Tensor) -> bool:
    # A finite sum has finite terms; the exact check is only needed when large terms overflow it.
    return bool(torch.isfinite(x.sum(dtype=torch.float32))) or bool(torch.isfinite(x).all())

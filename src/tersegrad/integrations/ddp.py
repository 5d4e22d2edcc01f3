"""DistributedDataParallel with compressed gradients: ``attach(model, "error_feedback(top_k(fraction=0.01))")``.

DDP hands over its buckets in one order on all ranks. Their gradients are copied into stable groups
(:mod:`tersegrad.engine.groups`); when a group's last gradient has arrived, its exchange starts. The last bucket's hook finishes all
exchanges, writes the means into the buckets and completes the futures that DDP waits for.

Compressors that decide by the variance over samples (``vgc``, ``hybrid``) get the second moments of the per-sample gradients from a
:class:`~tersegrad.moments.Collector`, which the handle attaches to the model. The moments are whole only when the backward pass has
ended, so these exchanges all start with the last bucket.
"""

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Unpack

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from tersegrad import engine
from tersegrad.core import private
from tersegrad.core.errors import BadConfiguration
from tersegrad.core.protocol import Compressor, Stats
from tersegrad.core.text import require
from tersegrad.engine import Change, Engine, Options, Settings, Staging, Step, TimedGroup, from_layout, make_groups
from tersegrad.engine.checkpoint import Public
from tersegrad.engine.engine import Route
from tersegrad.engine.report import Report
from tersegrad.exchange import Scheme
from tersegrad.integrations.all_reduce import pass_by, plain_all_reduce
from tersegrad.integrations.attached import advice, free, last_hook, register
from tersegrad.integrations.processes import several_groups
from tersegrad.integrations.second_moments import Moments


@dataclasses.dataclass
class _Bucket:
    """What is kept of a DDP bucket until the step's means are known."""

    parameters: list[Tensor]
    gradients: list[Tensor]
    buffer: Tensor
    future: "Future[Tensor]"


class Handle(engine.LateHandle):
    """The exchange of one DDP model. Made by :func:`attach` or :func:`make_hook`."""

    def __init__(self, settings: Settings, group_bytes: int | None, scaler: Any, process_group: Any) -> None:
        super().__init__()
        require(group_bytes is None or group_bytes > 0, f"group_bytes must be positive, got {group_bytes}")
        self._settings, self._group_bytes, self.scaler = settings, group_bytes, scaler
        self._process_group = process_group
        self._parameters: dict[str, Tensor] = {}
        self._moments = Moments()
        self._step: Step | None = None
        self._buckets: list[_Bucket] = []
        self._passing = False  # torch's own hook does this step
        self._forward: Any = None  # the hook before forward passes, where there is a schedule
        self.successor: Handle | None = None  # DDP keeps its hook: where this one is detached, another may follow

    # ------------------------------------------------------------------------------------------------------- its parameters

    def bind(self, model: torch.nn.Module) -> None:
        """Learn names and groups from a model. :func:`attach` does it; a plain pair may, to name parameters in checkpoints."""
        require(self._engine is None, "this handle already has its parameters: make one handle for each model")
        inner = private.unwrapped(model)
        ignored: set[str] = set(getattr(inner, "parameters_to_ignore", ()))
        if self._settings.schedule is not None:
            self._forward = inner.register_forward_pre_hook(torch.compiler.disable(lambda *_: self._observe()))
        if isinstance(inner, DistributedDataParallel):
            self._process_group = self._process_group or inner.process_group
            inner = inner.module
        self._moments = Moments(inner)
        self._bind({private.plain_name(name): p for name, p in inner.named_parameters() if name not in ignored})

    def _bind(self, named: Mapping[str, Tensor]) -> None:
        link = TimedGroup.of(self._process_group)
        self.rank, self.size = link.rank, link.size
        self._parameters = {name: p for name, p in named.items() if p.requires_grad}
        routes = [Route(g, link) for g in make_groups(self._parameters, self._group_bytes, self._settings.dense_below)]
        self._engine = Engine("ddp", routes, self._settings, replicated=lambda: named, facts=self._scaling())
        self._staging = Staging(self.groups, self._parameters)
        self._catch_up()
        self._observe()

    def _bind_to_buckets(self) -> None:
        """Without a model: DDP's first buckets, last to first, hold the parameters in the order of their registration."""
        if self._process_group is None and several_groups():
            raise BadConfiguration(
                "this process has several process groups, and a pair without a model cannot know which one its DDP uses: "
                "make_hook(..., process_group=group), or handle.bind(model)"
            )
        ordered = [p for bucket in reversed(self._buckets) for p in bucket.parameters]
        self._bind({f"parameter{number}": p for number, p in enumerate(ordered)})

    def _observe(self) -> None:
        """Collect second moments from the next forward pass on, if the compressor of the next step asks for them."""
        self._moments.observe(self.engine.wants_moments())

    def change(self, compressor: Any = None, exchange: Any = None, groups: Sequence[int] | None = None) -> Change:
        left = super().change(compressor, exchange, groups)
        self._observe()
        return left

    # ------------------------------------------------------------------------------------------------------------- one step

    def on_bucket(self, bucket: GradBucket) -> "Future[Tensor]":
        """Take in one bucket; the future holds the bucket's means once the last bucket was seen."""
        if self.detached:
            next_one = self.successor
            return plain_all_reduce(self._process_group, bucket) if next_one is None else next_one.on_bucket(bucket)
        try:
            with self._engine.timed() if self._engine is not None else contextlib.nullcontext():
                return self._on_bucket(bucket)
        except BaseException:
            if self._step is not None:
                self._step.abandon()
            self._step, self._buckets = None, []
            self._moments.clear()
            raise

    def _on_bucket(self, bucket: GradBucket) -> "Future[Tensor]":
        if bucket.index() == 0:
            self._buckets, self._passing = [], self._engine is not None and self._engine.passes_by()
            if self._engine is not None and not self._passing:
                self._begin()
        if self._passing:
            return pass_by(self.engine, self._process_group, bucket)
        buffer = bucket.buffer()
        if buffer.is_sparse:
            raise BadConfiguration("a gradient is a sparse tensor (sparse=True embedding): build the layer with sparse=False")
        # A future without devices: means are written on the stream of the hook, which the backward pass waits for by itself.
        self._buckets.append(taken := _Bucket(list(bucket.parameters()), list(bucket.gradients()), buffer, Future()))
        if self._step is not None:
            self._take(taken, self._step)
        elif bucket.is_last():
            self._bind_to_buckets()
            for arrived in self._buckets:
                self._take(arrived, self._step or self._begin())
        if bucket.is_last():
            self._finish(self._step or self._begin())
        return taken.future

    def _begin(self) -> Step:
        self._step = self.engine.begin(self.loss_scale(), self._staging.get)
        self._staging.clear()
        self._complete: dict[int, bool] = {}  # groups that wait for second moments; whether means are seen as they are
        return self._step

    def _take(self, bucket: _Bucket, step: Step) -> None:
        seen = bucket.buffer.dtype == torch.float32
        for number in self._staging.put(bucket.parameters, bucket.gradients):
            if self.engine.lanes[number].by_variance and not step.dense:
                self._complete[number] = seen
            else:
                step.submit(number, self._staging.vector(number, step), owned=True, seen=seen)

    def _finish(self, step: Step) -> None:
        if lacking := self._staging.lacking:
            raise BadConfiguration(f"DDP gave no gradient for some of {lacking}: attach right after building DDP")
        if self._complete:
            self._moments.take()
        for number, seen in self._complete.items():
            flat = self._staging.flat(number)
            second = self._moments.of(self.groups[number], self._parameters, flat).mul_(step.scale**-2)
            step.submit(number, flat, Stats(second), owned=True, seen=seen)
        self._moments.clear()
        buckets, outputs = self._buckets, [bucket.buffer for bucket in self._buckets]
        step.deliver()
        step.check(*(x for x in outputs if x.dtype != torch.float32))
        step.close()
        self._step, self._buckets = None, []
        if self._settings.schedule is None:
            self._observe()
        for bucket, mean in zip(buckets, outputs):
            bucket.future.set_result(mean)

    def _release(self) -> None:
        self._moments.observe(False)
        if self._forward is not None:
            self._forward.remove()

    # ------------------------------------------------------------------------------------------------------ report and state

    def report(self) -> Report:
        return super().report() | self._moments.report() | {"staging/bytes": self._staging.nbytes}

    def _routes(self, public: Public) -> list[Route]:
        """The groups that were saved: the same bytes are sent whatever group_bytes is now."""
        layout = [described["names"] for described in public.groups]
        require(
            sorted(itertools.chain(*layout)) == sorted(self._parameters),
            "the groups that were saved do not hold this model's parameters",
        )
        return [Route(group, self.engine.links[0]) for group in from_layout(self._parameters, layout)]

    def _read_extra(self, parts: Sequence[Any], public: Public) -> Callable[[], None]:
        def assign() -> None:
            self._staging = Staging(self.groups, self._parameters)
            self._observe()

        return assign


def compressed_hook(state: Handle, bucket: GradBucket) -> Future[Tensor]:
    """The communication hook of every handle, for ``register_comm_hook(handle, compressed_hook)``."""
    return state.on_bucket(bucket)


class HookOptions(Options, total=False):
    """The options of :func:`attach`, beside those of every integration (:class:`tersegrad.engine.Options`).

    ``group_bytes``: how much float32 gradient one message serves (25 MiB, on a GPU 128). ``scaler``: the GradScaler, so that residuals are
    kept at scale 1. ``process_group``: by default that of the model.
    """

    group_bytes: int | None
    scaler: Any
    process_group: dist.ProcessGroup | TimedGroup | None


def attach(
    model: torch.nn.Module,
    compressor: Compressor[Any] | str | None,
    exchange: Scheme | str | None = None,
    **options: Unpack[HookOptions],
) -> Handle:
    """Exchange the gradients of a DistributedDataParallel model through ``compressor``; the same call on every rank.

    ``compressor``: "auto" chooses it, and the exchange, by measuring. ``exchange``: "two_shot" (the default), "all_gather" (the default for
    compressors that decide by the variance over samples), "hierarchical(ranks_per_node=8)", "power_sgd(rank=4)" or "all_reduce"; the
    last two take None for ``compressor``. ``options``: see :class:`HookOptions`.
    """
    inner = private.unwrapped(model)
    if not isinstance(inner, DistributedDataParallel):
        raise BadConfiguration(f"attach takes a DistributedDataParallel model, got {type(inner).__name__}: {advice(inner)}")
    free(inner)
    before = last_hook(inner)
    handle, hook = make_hook(compressor, exchange, **options)
    handle.bind(model)
    register(inner, before, handle, hook)
    return handle


def make_hook(
    compressor: Compressor[Any] | str | None,
    exchange: Scheme | str | None = None,
    *,
    group_bytes: int | None = None,
    scaler: Any = None,
    process_group: dist.ProcessGroup | TimedGroup | None = None,
    **options: Unpack[Options],
) -> tuple[Handle, Callable[[Handle, GradBucket], Future[Tensor]]]:
    """A plain ``(state, hook)`` pair, with the options of :func:`attach`, for frameworks that register the hook themselves.

    The pair learns the parameters in the first step and names them by their position; ``handle.bind(model)`` gives their names.
    """
    settings = Settings.make(compressor, exchange, collects=True, **options)
    return Handle(settings, group_bytes, scaler, process_group), compressed_hook

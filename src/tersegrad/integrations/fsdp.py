"""FSDP2 (``fully_shard``) with compressed gradients: ``attach(model, "qsgd(bits=4)")``.

FSDP gathers parameters and reduce-scatters gradients, one group of parameters (*unit*) at a time. The reduce-scatter is replaced by
the first half of a two-shot exchange: every rank encodes each shard of its gradient, sends it to the shard's owner, and the owner adds up
what it decodes, in rank order and in float32. Nothing else of FSDP changes; parameters are gathered as before.

With ``between``, shards live inside a node and gradients are averaged between nodes by any exchange: FSDP's own reduce-scatter runs
inside (or one compressed with ``reduce_compressor``), and an all-reduce hook exchanges each rank's shard with its peers in other nodes.

A step is one backward pass. Its states are committed when the pass ends, once every reduced gradient is finite on every rank.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Unpack

import torch
import torch.distributed as dist
from torch import Tensor

from tersegrad import engine
from tersegrad.core import private
from tersegrad.core.protocol import Compressor
from tersegrad.core.text import require
from tersegrad.engine import Engine, Group, Options, Settings, Step, TimedGroup
from tersegrad.engine.engine import Route
from tersegrad.engine.settings import compressor_of, paired, without_auto
from tersegrad.exchange import Scheme, scheme
from tersegrad.exchange.schemes import ReduceScatterScheme
from tersegrad.integrations.attached import claim, free
from tersegrad.integrations.fsdp_units import ReduceScatter, Unit, find_units, refuse_late, weight

HINT = ": a 1-D shard mesh does not copy parameters between nodes; build the model from one seed, or load one checkpoint"


class Handle(engine.Handle):
    """The compressed gradient reduction of one FSDP2 model. Made by :func:`attach`."""

    def __init__(
        self,
        units: list[Unit],
        settings: Settings,
        reduce: Compressor[Any] | None,
        between: dist.ProcessGroup | None,
        scaler: Any,
    ) -> None:
        """``reduce``: what the reduce-scatter is compressed with where there is an exchange between nodes; None leaves it to FSDP."""
        self.units, self.scaler, self.rank, self.size = units, scaler, dist.get_rank(), dist.get_world_size()
        self._reduce, self._between = reduce, None if between is None else TimedGroup(between)
        self._shards: dict[int, TimedGroup] = {}
        self._step: Step | None = None
        routes: list[Route] = []
        for unit in units:
            process_group = unit.group.mesh_info.shard_process_group
            link = self._shards.setdefault(id(process_group), TimedGroup(process_group))
            if between is None or reduce is not None:
                unit.reduces = len(routes)
                routes.append(self._inner_route(unit, link))
            if self._between is not None:
                unit.crosses = len(routes)
                routes.append(self._outer_route(unit))
        groups = (*self._shards.values(), *([] if self._between is None else [self._between]))
        facts = {"reduce_compressor": str(reduce), "between": "nodes" if between is not None else "nothing", **self._scaling()}
        self.engine = Engine("fsdp", routes, settings, replicated=self._replicated, agreeing=groups, facts=facts, hint=HINT)
        self.first: list[Callable[[], None]] = [] if between is None else [self.engine.check_replicas]  # before the first step

    def _inner_route(self, unit: Unit, link: TimedGroup) -> Route:
        """The compressed reduce-scatter of a unit."""
        assert unit.reduces is not None
        layout, given = unit.layout, None if self._between is None else self._reduce
        group = Group(unit.reduces, layout.spec_of_all(), unit.dtype, unit.device, buffer_number=unit.number)
        return Route(group, link, ReduceScatterScheme(layout.ends), given)

    def _outer_route(self, unit: Unit) -> Route:
        """The exchange of a unit's shard between nodes."""
        assert unit.crosses is not None
        assert self._between is not None
        spec, branch = unit.layout.spec(unit.rank), unit.size + unit.rank
        return Route(Group(unit.crosses, spec, unit.dtype, unit.device, branch, buffer_number=unit.number), self._between)

    def _replicated(self) -> dict[str, Tensor]:
        return {} if self._between is None else dict(pair for unit in self.units for pair in unit.local())

    # ------------------------------------------------------------------------------------------------------------- one step

    @contextlib.contextmanager
    def _in_step(self, unit: Unit, width: int) -> Iterator[Step]:
        """Around the work on one unit; if it fails the step is lost, and the states are those before it."""
        with self.engine.timed():
            try:
                while self.first:
                    self.first.pop()()
                self._fit(unit, width)
                if self._step is None:
                    self._step = self.engine.begin(self.loss_scale())
                yield self._step
            except BaseException:
                self._step = None
                raise

    def _fit(self, unit: Unit, width: int) -> None:
        """Follow parameters that were frozen or thawed, and see that the buffer is laid out as expected."""
        if unit.trainable() != unit.layout:
            for number in (unit.reduces, unit.crosses):
                exchanged = self._step is not None and number is not None and self._step.submitted(number)
                require(not exchanged, "requires_grad changed within a step")
            unit.layout = unit.trainable()
            if unit.reduces is not None:
                self.engine.rearrange(unit.reduces, self._inner_route(unit, self.engine.lanes[unit.reduces].link))
            if unit.crosses is not None:
                self.engine.rearrange(unit.crosses, self._outer_route(unit))
        unit.check(width)

    def reduce(self, unit: Unit, out: Tensor, x: Tensor, op: Any) -> None:
        """FSDP's reduce-scatter of one unit: ``x`` holds a row for every rank, ``out`` becomes the reduced own row."""
        with self._in_step(unit, x.numel() // unit.size) as step:
            assert unit.reduces is not None
            flat, copied = unit.layout.take(x, range(unit.size))
            step.submit(unit.reduces, flat, owned=copied)
            unit.layout.put(step.result(unit.reduces, weight(op, unit, unit.size)), out, unit.rank)
            step.check(out)
            if unit.crosses is None:
                self._commit_later()

    def cross(self, unit: Unit, row: Tensor) -> None:
        """The exchange of one unit's reduced gradient between nodes, in place."""
        with self._in_step(unit, row.numel()) as step:
            assert unit.crosses is not None
            assert self._between is not None
            flat, copied = unit.layout.take(row, [unit.rank])
            step.submit(unit.crosses, flat, owned=copied)
            # With a divide factor of the user's, FSDP divides by it and sums between nodes, as it does in native HSDP.
            summed = unit.group.gradient_divide_factor is not None
            unit.layout.put(step.result(unit.crosses, self._between.size if summed else 1.0), row, unit.rank)
            step.check(row)
            self._commit_later()

    def _commit_later(self) -> None:
        """Commit at the end of the backward pass. Every unit asks for it; the first call that is made finds all of them reduced."""
        private.of("autograd.Variable._execution_engine").queue_callback(self._commit)

    def _commit(self) -> None:
        if self._step is not None:
            step, self._step = self._step, None
            with self.engine.timed():
                step.close()

    def _release(self) -> None:
        for unit in self.units:
            unit.restore()

    def _shapes(self) -> dict[str, list[int]]:
        # A rank may hold no element of a small parameter.
        return {slot.name: list(slot.shape) for unit in self.units for slot in unit.layout.slots}

    def _identity(self) -> dict[str, Any]:
        return super()._identity() | {"reduce_compressor": str(self._reduce), "between": self._between is not None}


def attach(
    model: torch.nn.Module,
    compressor: Compressor[Any] | str,
    exchange: Scheme | str | None = None,
    *,
    between: dist.ProcessGroup | None = None,
    reduce_compressor: Compressor[Any] | str | None = None,
    scaler: Any = None,
    **options: Unpack[Options],
) -> Handle:
    """Reduce the gradients of an FSDP2 model through ``compressor``; the same call on every rank, after the last ``fully_shard``.

    Without ``between``, gradients are reduce-scattered in compressed messages. With ``between``, the group of this rank's peers in
    all nodes, the model is sharded inside each node: reduce-scatter is FSDP's own (or compressed with ``reduce_compressor``), and
    shards are averaged between nodes by ``exchange`` (default "two_shot"). ``scaler``: the GradScaler, so that residuals are kept at
    scale 1. ``options``: see :class:`tersegrad.engine.Options`.
    """
    exchange = without_auto(compressor, exchange, alone=between is not None)
    how = scheme(exchange or "two_shot")
    require(
        between is not None or (exchange is None and reduce_compressor is None),
        "exchange= and reduce_compressor= go with between=: without it compressor= serves the reduce-scatter, which is all there is",
    )
    require(not how.compresses, f"{how} needs whole matrices, FSDP shards them: use two_shot or all_gather with a compressor")
    settings = Settings.make(compressor, how, **options)
    reduce = None if reduce_compressor is None else paired(compressor_of(reduce_compressor), how, False)
    found = find_units(model)
    modules = [module for module, _ in found]
    free(*modules)
    handle = Handle([unit for _, unit in found], settings, reduce, between, scaler)
    handle.first.append(functools.partial(refuse_late, weakref.ref(model), handle.units))
    for module, unit in found:
        if unit.reduces is not None:
            module.set_custom_reduce_scatter(ReduceScatter(handle.reduce, unit))
        if unit.crosses is not None:
            module.set_all_reduce_hook(lambda row, unit=unit: handle.cross(unit, row))
    claim(modules, handle)
    return handle

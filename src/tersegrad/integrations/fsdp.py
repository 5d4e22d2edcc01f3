"""FSDP2 (``fully_shard``) with compressed gradients: ``attach(model, "qsgd(bits=4)")``.

FSDP gathers parameters and reduce-scatters gradients, one group of parameters (*unit*) at a time. The reduce-scatter is replaced by
the first half of a two-shot exchange: every rank encodes each shard of its gradient, sends it to the shard's owner, and the owner adds up
what it decodes, in rank order and in float32. Nothing else of FSDP changes; parameters are gathered as before.

With ``between`` shards live inside a node and gradients are averaged between nodes by any exchange: FSDP's own reduce-scatter runs
inside (or a compressed one), and an all-reduce hook exchanges each rank's shard with its peers in the other nodes.

States (residuals) belong to named parameters and ranges of their elements. They are committed at the end of a backward pass, once every
reduced gradient is finite on every rank, as a GradScaler decides it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tersegrad.compressors import BF16, Identity
from tersegrad.core import state as states
from tersegrad.core.errors import BadConfiguration
from tersegrad.core.protocol import Compressor, Context, Piece, Spec
from tersegrad.core.text import require
from tersegrad.exchange import AllGather, Exchange, Part, Pending, Plan, plan, start
from tersegrad.exchange.two_shot import reduce_scatter
from tersegrad.integrations import checkpoint
from tersegrad.integrations.ddp import ReplicasDiffer
from tersegrad.integrations.meter import Meter, TimedGroup, watch
from tersegrad.recipes import parse
from tersegrad.wrappers import ByTensor

FORMAT = 1  # of state_dict
INSIDE = "inside"  # the round of the reduce-scatter in checkpoints


@dataclasses.dataclass(frozen=True)
class Slot:
    """One parameter in FSDP's reduce-scatter buffer: each rank's row has ``width`` of its elements, the last ones padded."""

    name: str
    shape: tuple[int, ...]
    numel: int
    width: int

    def range(self, rank: int) -> tuple[int, int]:
        """The elements that a rank's shard holds."""
        return min(rank * self.width, self.numel), min((rank + 1) * self.width, self.numel)


@dataclasses.dataclass(frozen=True)
class Layout:
    """How the gradients of a unit lie in FSDP's buffer of ``size`` rows, and what of it are not padding."""

    slots: tuple[Slot, ...]
    size: int

    @property
    def width(self) -> int:
        """Elements of a row."""
        return sum(slot.width for slot in self.slots)

    def spec(self, rank: int) -> Spec:
        """The shard of a rank: which elements of which parameters."""
        ranges = [(slot, *slot.range(rank)) for slot in self.slots]
        return Spec(tuple(Piece(slot.shape, a, b, slot.name) for slot, a, b in ranges if a < b))

    def _runs(self, rank: int) -> list[tuple[int, int]]:
        """Where a row holds elements; neighbours are joined, so a row without padding is one run."""
        runs: list[tuple[int, int]] = []
        at = 0
        for slot in self.slots:
            a, b = slot.range(rank)
            if a < b and runs and runs[-1][1] == at:
                runs[-1] = (runs[-1][0], at + b - a)
            elif a < b:
                runs.append((at, at + b - a))
            at += slot.width
        return runs

    def take(self, row: Tensor, rank: int) -> Tensor:
        """The elements of a row without the padding, as float32."""
        runs = self._runs(rank)
        taken = row[:0] if not runs else row[slice(*runs[0])] if len(runs) == 1 else torch.cat([row[a:b] for a, b in runs])
        return taken.to(torch.float32)

    def put(self, values: Tensor, row: Tensor, rank: int) -> None:
        """The inverse of :meth:`take`, in the row's dtype; padding becomes zero."""
        at = end = 0
        for a, b in self._runs(rank):
            row[end:a] = 0
            row[a:b] = values[at : at + b - a]
            at, end = at + b - a, b
        row[end:] = 0


class Unit:
    """One parameter group of FSDP: its layout, its states, and how often it was reduced."""

    def __init__(self, number: int, group: Any, names: Mapping[int, str]) -> None:
        self.number, self.group = number, group
        self.size: int = group.mesh_info.shard_process_group.size()
        self.rank: int = group.mesh_info.shard_process_group.rank()
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._slots: list[tuple[Any, Slot]] = []
        for parameter in group.fsdp_params:
            info = parameter._module_info
            name = f"{names[id(info.module)]}.{info.param_name}".removeprefix(".")
            shape, dim = list(parameter._orig_size), parameter.fsdp_placement.dim
            self.shapes[name] = tuple(shape)
            if dim:  # FSDP lays the shards one after another: as if the tensor had been built that way
                shape[dim] //= self.size
                shape[0] *= self.size
            numel = parameter._orig_size.numel()
            rows = numel // shape[0] if shape[0] else 0
            slot = Slot(name, tuple(shape), numel, -(-shape[0] // self.size) * rows)
            self._slots.append((parameter, slot))
        policy = group.mp_policy
        first = group.fsdp_params[0].sharded_param.dtype
        self.dtype: torch.dtype = policy.reduce_dtype or policy.param_dtype or first
        self.device: torch.device = group.device
        self.calls = 0
        self.layout = self.trainable()
        self.inside: tuple[Any, ...] = ()
        self.between: Any = None

    def trainable(self) -> Layout:
        """The layout of the parameters that have gradients now."""
        return Layout(tuple(slot for p, slot in self._slots if p.sharded_param.requires_grad), self.size)

    def local(self) -> list[tuple[str, Tensor]]:
        """The shards of the parameters that this rank holds."""
        return [(slot.name, p.sharded_param.to_local()) for p, slot in self._slots]


@dataclasses.dataclass
class _Totals:
    """What :meth:`Handle.report` counts."""

    steps: int = 0
    dropped: int = 0
    sent: int = 0
    received: int = 0
    seconds: float = 0.0
    first: Meter = dataclasses.field(default_factory=Meter)
    second: Meter = dataclasses.field(default_factory=Meter)


class Handle:
    """The compressed gradient reduction of one FSDP2 model: state, settings and counters. Made by :func:`attach`."""

    def __init__(
        self,
        units: list[Unit],
        inside: Compressor[Any] | None,
        compressor: Compressor[Any],
        between: dist.ProcessGroup | None,
        exchange: Plan,
        *,
        dense_below: int,
        dense: Compressor[Any] | None,
        scaler: Any,
        seed: int,
    ) -> None:
        self.units, self.inside, self.compressor, self.plan = units, inside, compressor, exchange
        self.dense_below, self.scaler, self.seed = dense_below, scaler, seed
        self._dense_compressor = dense
        self._between = None if between is None else TimedGroup(between)
        self._resolved = exchange if self._between is None else exchange.resolve(self._between)
        self._groups: dict[int, TimedGroup] = {}
        self._totals = _Totals()
        self._tentative: dict[int, tuple[tuple[Any, ...], Any]] = {}
        self._finite = True
        self._checked = between is None
        self._make()
        for unit in units:
            self._renew(unit)

    # -------------------------------------------------------------------------------------------------------------- exchanges

    def _make(self) -> None:
        totals = self._totals
        self._inside: list[Compressor[Any] | None] = []
        self._exchanges: list[Exchange[Any] | None] = []
        for unit in self.units:
            inside = None if self.inside is None else self._effective(self.inside, unit)
            self._inside.append(None if inside is None else watch(inside, totals.first))
            c = self._effective(self.compressor, unit)
            exchange = None if self._between is None else self._resolved.make(watch(c, totals.first), watch(c, totals.second))
            self._exchanges.append(exchange)

    def _effective(self, compressor: Compressor[Any], unit: Unit) -> Compressor[Any]:
        if not self.dense_below:
            return compressor
        dense = self._dense_compressor or (BF16() if unit.dtype == torch.bfloat16 else Identity())
        return ByTensor(compressor, small=dense, below=self.dense_below)

    def _fresh(self, unit: Unit) -> tuple[tuple[Any, ...], Any]:
        inside, exchange, layout = self._inside[unit.number], self._exchanges[unit.number], unit.layout
        first = () if inside is None else tuple(inside.init(layout.spec(r), unit.device) for r in range(unit.size))
        if exchange is None or self._between is None:
            return first, None
        return first, exchange.init(layout.spec(unit.rank), unit.device, self._between.rank, self._between.size)

    def _renew(self, unit: Unit) -> None:
        """States for the parameters that are trainable now; those of parameters that were before are kept."""
        before = self._save(unit) if unit.inside or unit.between is not None else {}
        unit.layout = unit.trainable()
        unit.inside, unit.between = self._fresh(unit)
        if before:
            merged = self._save(unit)
            for name, parameters in merged.items():
                parameters.update({k: v for k, v in before.get(name, {}).items() if k in parameters})
            self._restore(unit, [merged])

    # -------------------------------------------------------------------------------------------------------------- one step

    def _current(self, unit: Unit) -> tuple[tuple[Any, ...], Any]:
        if unit.trainable() != unit.layout:
            require(unit.number not in self._tentative, "requires_grad changed within a step")
            self._renew(unit)
        return self._tentative.get(unit.number, (unit.inside, unit.between))

    def _scale(self) -> float:
        return 1.0 if self.scaler is None else float(self.scaler.get_scale())

    def _context(self, unit: Unit) -> Context:
        return Context(seed=self.seed, step=unit.calls % (1 << 32), buffer=unit.number)

    def _row(self, unit: Unit, numel: int) -> None:
        if numel != unit.layout.width:
            raise BadConfiguration(
                f"FSDP reduces {numel} elements a rank of the unit that begins with {next(iter(unit.shapes))}, its trainable parameters "
                f"have {unit.layout.width}: some got no gradient. Call model.set_reduce_scatter_unused_params(True), or freeze what is "
                "not used"
            )

    @contextlib.contextmanager
    def timed(self) -> Iterator[None]:
        """Around the work on one unit: counts its seconds; if it fails the step is lost, and the states are those before it."""
        begin = time.perf_counter()
        try:
            yield
        except BaseException:
            self._tentative, self._finite = {}, True
            raise
        finally:
            self._totals.seconds += time.perf_counter() - begin

    def reduce(self, unit: Unit, out: Tensor, x: Tensor, group: dist.ProcessGroup, op: Any) -> None:
        """FSDP's reduce-scatter of one unit: ``x`` holds a row for every rank, ``out`` becomes the reduced own row."""
        driver = self._groups.setdefault(id(group), TimedGroup(group))
        first, second = self._current(unit)
        self._row(unit, x.numel() // driver.size)
        layout, compressor = unit.layout, self._inside[unit.number]
        assert compressor is not None
        weight, scale = _weight(op, unit, driver.size), self._scale()
        xs = [_unscaled(layout.take(row, r), scale) for r, row in enumerate(x.view(driver.size, -1))]
        specs = [layout.spec(r) for r in range(driver.size)]
        steps = reduce_scatter(compressor, xs, first, specs, self._context(unit), driver.rank, driver.size)
        total, after = self._wait(Pending(steps, driver))
        layout.put(total.mul_(weight * scale), out, driver.rank)
        self._note(unit, (after, second), out, last=self._between is None)

    def exchange(self, unit: Unit, row: Tensor) -> None:
        """The exchange of one unit's reduced gradient between nodes, in place."""
        group, exchange = self._between, self._exchanges[unit.number]
        assert group is not None
        assert exchange is not None
        if not self._checked:
            self.check_replicas()
        first, second = self._current(unit)
        self._row(unit, row.numel())
        scale = self._scale()
        x = _unscaled(unit.layout.take(row, unit.rank), scale)
        ctx = self._context(unit).child(unit.size + unit.rank)
        mean, after = self._wait(start(exchange, x, second, unit.layout.spec(unit.rank), ctx, group))
        # With a divide factor of the user's, FSDP divides by it and sums between nodes, as it does in native HSDP.
        summed = unit.group.gradient_divide_factor is not None
        unit.layout.put(mean.mul_(scale * (group.size if summed else 1)), row, unit.rank)
        self._note(unit, (first, after), row, last=True)

    def _wait(self, pending: Pending[Any]) -> tuple[Tensor, Any]:
        result = pending.wait()
        self._totals.sent += pending.sent
        self._totals.received += pending.received
        return result

    def _note(self, unit: Unit, after: tuple[tuple[Any, ...], Any], row: Tensor, last: bool) -> None:
        self._tentative[unit.number] = after
        self._finite = self._finite and bool(torch.isfinite(row).all())
        if last:
            unit.calls += 1
            # The first callback after FSDP's own finds all units reduced; further ones find nothing to do.
            torch.autograd.Variable._execution_engine.queue_callback(self._commit)

    def _commit(self) -> None:
        """The end of a backward pass: keep the states if everything is finite on all ranks."""
        if not self._tentative:
            return
        finite = self._finite
        if self._stateful:
            flag = torch.tensor([int(finite)], dtype=torch.int32, device=self.units[0].device)
            shards = {id(group): group for group in (unit.group.mesh_info.shard_process_group for unit in self.units)}
            for group in (*shards.values(), *([self._between.group] if self._between else [])):
                dist.all_reduce(flag, dist.ReduceOp.MIN, group=group)
            finite = bool(flag.item())
        if finite:
            for number, (inside, between) in self._tentative.items():
                self.units[number].inside, self.units[number].between = inside, between
        self._tentative, self._finite = {}, True
        self._totals.steps += 1
        self._totals.dropped += not finite

    @property
    def _stateful(self) -> bool:
        """Whether there is anything to keep, by what all ranks know."""
        probe = Spec.flat(1)
        return any(c is not None and c.init(probe, "cpu") is not None for c in (self.inside, self.compressor))

    # ------------------------------------------------------------------------------------------------------ safety and report

    def check_replicas(self) -> None:
        """Raise :class:`ReplicasDiffer` unless the nodes have the same parameters (a collective call)."""
        group = self._between
        if group is None:
            return
        self._checked = True
        local = [pair for unit in self.units for pair in unit.local()]
        digests = b"".join(_digest(shard) for _, shard in local)
        mine = torch.frombuffer(bytearray(digests), dtype=torch.uint8).to(self.units[0].device)
        work, everyone = group.launch(AllGather(mine))
        work.wait()
        rows = everyone.cpu().view(group.size, len(local), -1)
        for number, (name, _) in enumerate(local):
            differ = [rank for rank in range(1, group.size) if not torch.equal(rows[rank, number], rows[0, number])]
            if differ:
                raise ReplicasDiffer(
                    f"{name} differs between node 0 and node {differ[0]}: a 1-D shard mesh does not copy parameters between nodes; "
                    "build the model from one seed, or load one checkpoint"
                )

    def dense(self) -> dict[str, str]:
        """The trainable parameters that are sent dense, each with the reason."""
        found = {slot.name: slot.numel for unit in self.units for slot in unit.layout.slots if slot.numel < self.dense_below}
        return {name: f"{numel} elements, fewer than dense_below={self.dense_below}" for name, numel in found.items()}

    def report(self) -> dict[str, float | str]:
        """Counters since the start (or :meth:`reset_report`) as a flat dict; sizes are those of bytes that travelled."""
        t = self._totals
        coded = t.first.seconds + t.second.seconds
        waited = sum(g.waited for g in (*self._groups.values(), *([self._between] if self._between else [])))
        kept = [part.state for unit in self.units for part, _ in self._parts(unit)]
        return {
            "compressor": str(self.compressor),
            "inside": "none" if self.inside is None else str(self.inside),
            "exchange": "reduce_scatter" if self._between is None else str(self.plan),
            "steps": t.steps,
            "steps/dropped": t.dropped,
            "bytes/sent": t.sent,
            "bytes/received": t.received,
            "bits_per_coordinate": 8 * t.first.nbytes / t.first.coordinates if t.first.coordinates else 0.0,
            "seconds/encode": t.first.encode + t.second.encode,
            "seconds/decode": t.first.decode + t.second.decode,
            "seconds/wire": waited,
            "seconds/other": max(0.0, t.seconds - coded - waited),
            "dense/parameters": len(self.dense()),
            "state/bytes": sum(states.nbytes(state) for state in kept),
            "units": len(self.units),
        }

    def reset_report(self) -> None:
        """Count from zero again, between two steps."""
        require(not self._tentative, "the counters can only be reset between two steps")
        self._totals = _Totals()
        for group in (*self._groups.values(), *([self._between] if self._between else [])):
            group.waited = 0.0
        self._make()

    # ----------------------------------------------------------------------------------------------------------------- state

    def _parts(self, unit: Unit) -> list[tuple[Part, Spec]]:
        found = [(Part(INSIDE, 0, 0, state), unit.layout.spec(r)) for r, state in enumerate(unit.inside)]
        exchange, group = self._exchanges[unit.number], self._between
        if exchange is not None and group is not None:
            own = unit.layout.spec(unit.rank)
            for part in exchange.parts(unit.between, own, group.rank, group.size):
                found.append((part, states.slice_spec(own, part.start, part.stop)))
        return found

    def _save(self, unit: Unit) -> checkpoint.Saved:
        return checkpoint.save_parts(self._parts(unit))

    def _restore(self, unit: Unit, saved: Sequence[checkpoint.Saved]) -> None:
        loaded = [checkpoint.restore_part(part, spec, saved) for part, spec in self._parts(unit)]
        unit.inside, rest = tuple(loaded[: len(unit.inside)]), loaded[len(unit.inside) :]
        exchange, group = self._exchanges[unit.number], self._between
        if exchange is not None and group is not None:
            unit.between = exchange.join(rest, unit.layout.spec(unit.rank), group.rank, group.size)

    def state_dict(self) -> dict[str, Any]:
        """The state of this rank under ``rank<r>``, keyed by parameter names; what a checkpoint stores (every rank its own)."""
        require(not self._tentative, "a state can only be saved between two steps")
        rounds: dict[str, dict[str, Any]] = {INSIDE: {}, "first": {}, "second": {}}
        for unit in self.units:
            for name, parameters in self._save(unit).items():
                rounds[name].update(parameters)
        public = {
            "format": FORMAT,
            "rank": dist.get_rank(),
            "size": dist.get_world_size(),
            "seed": self.seed,
            "settings": self._settings,
            "calls": {next(iter(unit.shapes)): unit.calls for unit in self.units},
            "shapes": {name: list(shape) for unit in self.units for name, shape in unit.shapes.items()},
        }
        # One text, so that torch.distributed.checkpoint keeps it whole.
        return {f"rank{dist.get_rank()}": {"public": json.dumps(public), **rounds}}

    @property
    def _settings(self) -> dict[str, Any]:
        return {
            "compressor": str(self.compressor),
            "inside": None if self.inside is None else str(self.inside),
            "exchange": None if self._between is None else str(self.plan),
            "dense_below": self.dense_below,
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from this rank's :meth:`state_dict`: the next steps are bit for bit those of the run that saved it."""
        self._load(checkpoint.own_part(state_dict, dist.get_rank(), dist.get_world_size()))

    def load_state_dicts(self, state_dicts: Sequence[Mapping[str, Any]]) -> None:
        """Continue from the states of all ranks that saved, on any world size: residuals start from their mean over those ranks."""
        self._load(checkpoint.needed_parts(state_dicts, dist.get_rank(), dist.get_world_size()))

    def _load(self, parts: Sequence[Mapping[str, Any]]) -> None:
        require(not self._tentative, "a state can only be loaded between two steps")
        public = checkpoint.public(parts[0])
        require(public["format"] == FORMAT, f"state format {public['format']} was written by another version")
        shapes = {name: list(shape) for unit in self.units for name, shape in unit.shapes.items()}
        saved = public["shapes"]
        for name in sorted(shapes.keys() | saved.keys()):
            if shapes.get(name) != saved.get(name):
                raise BadConfiguration(
                    f"the model changed: {name} has shape {shapes.get(name)} here and {saved.get(name)} in the saved state"
                )
        for name, value in self._settings.items():
            if public["settings"][name] != value:
                raise BadConfiguration(
                    f"the state was saved with {name}={public['settings'][name]}, this handle has {value}: attach with the saved one"
                )
        self.seed = int(public["seed"])
        rounds = [{name: value for name, value in part.items() if name != "public"} for part in parts]
        most = max(public["calls"].values(), default=0)
        for unit in self.units:
            unit.layout = unit.trainable()
            unit.inside, unit.between = self._fresh(unit)
            self._restore(unit, rounds)
            unit.calls = int(public["calls"].get(next(iter(unit.shapes)), most))


class ReduceScatter:
    """What FSDP calls for one unit instead of its reduce-scatter."""

    def __init__(self, handle: Handle, unit: Unit) -> None:
        self.handle, self.unit = handle, unit

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory for FSDP's input and output."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        with self.handle.timed():
            self.handle.reduce(self.unit, output_tensor, input_tensor, group, op)


def attach(
    model: torch.nn.Module,
    compressor: Compressor[Any] | str,
    *,
    between: dist.ProcessGroup | None = None,
    exchange: Plan | str = "two_shot",
    inside: Compressor[Any] | str | None = None,
    dense_below: int = 1024,
    dense: Compressor[Any] | str | None = None,
    scaler: Any = None,
    seed: int = 0,
) -> Handle:
    """Reduce the gradients of an FSDP2 model through ``compressor``; the same call on every rank, after the last ``fully_shard``.

    Without ``between``, gradients are reduce-scattered in compressed messages. With ``between``, the group of this rank's peers in
    all nodes, the model is sharded inside each node: reduce-scatter is FSDP's own (or compressed with ``inside``), and shards are
    averaged between nodes by ``exchange``. ``dense_below``: tensors with fewer elements are sent with ``dense`` (default: exactly).
    ``scaler``: the GradScaler, so that residuals are kept at scale 1.
    """
    chosen = parse(compressor) if isinstance(compressor, str) else compressor
    first = parse(inside) if isinstance(inside, str) else inside
    small = parse(dense) if isinstance(dense, str) else dense
    how = plan(exchange)
    require(dense_below >= 0, f"dense_below must not be negative, got {dense_below}")
    require(first is None or between is not None, "inside= goes with between=: without it, compressor= is what serves inside")
    require(
        not how.compresses, f"{how} needs whole matrices, and FSDP shards them: use two_shot or all_gather with a compressor"
    )
    Context(seed=seed)  # refuses a seed that does not fit
    units = find_units(model)
    handle = Handle(
        [unit for _, unit in units],
        first if between is not None else chosen,
        chosen,
        between,
        how,
        dense_below=dense_below,
        dense=small,
        scaler=scaler,
        seed=seed,
    )
    for module, unit in units:
        if handle.inside is not None:
            module.set_custom_reduce_scatter(ReduceScatter(handle, unit))
        if between is not None:
            module.set_all_reduce_hook(_hook(handle, unit))
    return handle


def find_units(model: torch.nn.Module) -> list[tuple[Any, Unit]]:
    """The FSDP modules of a model with their parameter groups, in the order of the modules."""
    from torch.distributed.fsdp import FSDPModule

    names = {id(module): _plain(name) for name, module in reversed(list(model.named_modules()))}
    found: list[tuple[Any, Unit]] = []
    seen: set[int] = set()
    for module in model.modules():
        if not isinstance(module, FSDPModule):
            continue
        state = module._get_fsdp_state()
        groups = getattr(state, "_fsdp_param_groups", None)
        if groups is None:  # before torch 2.12: at most one
            groups = [g for g in [getattr(state, "_fsdp_param_group", None)] if g is not None]
        if len(groups) > 1:
            raise BadConfiguration("one fully_shard call with parameters on several meshes is not supported: shard them apart")
        for group in groups:
            if id(group) in seen or not group.fsdp_params:
                continue
            seen.add(id(group))
            if getattr(group.mesh_info, "replicate_mesh_dim", None) is not None:
                raise BadConfiguration(
                    "this model is sharded on a 2-D mesh (native HSDP), whose all-reduce between nodes is FSDP's own: it runs, "
                    "uncompressed, before any hook. Shard on the inner dimension alone and name the outer one: "
                    "fully_shard(m, mesh=mesh['shard']), "
                    "attach(model, ..., between=mesh['replicate'].get_group())"
                )
            if not hasattr(module, "set_custom_reduce_scatter"):
                raise BadConfiguration(
                    f"torch {torch.__version__} has no FSDPModule.set_custom_reduce_scatter: use a newer one"
                )
            found.append((module, Unit(len(found), group, names)))
    require(bool(found), f"attach takes a model with fully_shard applied, got a plain {type(model).__name__}")
    require(len(found) < 1 << 16, f"at most 65535 units are supported, got {len(found)}")
    return found


def _hook(handle: Handle, unit: Unit) -> Any:
    def exchange(row: Tensor) -> None:
        with handle.timed():
            handle.exchange(unit, row)

    return exchange


def _unscaled(x: Tensor, scale: float) -> Tensor:
    return x if scale == 1.0 else x * (1.0 / scale)


def _weight(op: Any, unit: Unit, size: int) -> float:
    """By what the sum over ranks is multiplied."""
    if op == dist.ReduceOp.SUM:
        return 1.0
    if op == dist.ReduceOp.AVG:
        return 1.0 / size
    if op == dist.ReduceOp.PREMUL_SUM:
        factor = getattr(op, "factor", None)  # torch before 2.12 keeps it to itself
        return float(factor) if factor is not None else 1.0 / float(unit.group.gradient_divide_factor)
    raise BadConfiguration(f"gradients are reduced by SUM, AVG or PREMUL_SUM, FSDP asks for {op}")


def _plain(name: str) -> str:
    """A module's name without what torch.compile and activation checkpointing put in."""
    hidden = ("_orig_mod", "_checkpoint_wrapped_module")
    return ".".join(part for part in name.split(".") if part not in hidden)


def _digest(x: Tensor) -> bytes:
    data = x.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return hashlib.blake2b(data.data, digest_size=16).digest()

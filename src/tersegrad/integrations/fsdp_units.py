"""What FSDP2 keeps to itself: parameter groups, how their gradients lie in its buffers, and private names of torch, in one place."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tersegrad.core import buffers, private
from tersegrad.core.errors import BadConfiguration
from tersegrad.core.protocol import Piece, Spec
from tersegrad.core.text import require

_WHO, _ELSE = "compressed FSDP2", ", or use DDP"
# What is used of FSDP's objects besides its documented interface; torch may move it in any release.
_MODULE = ("_get_fsdp_state", "set_custom_reduce_scatter", "set_all_reduce_hook")
_GROUP = ("fsdp_params", "mesh_info", "device", "gradient_divide_factor")
_PARAMETER = ("_module_info", "_orig_size", "fsdp_placement", "sharded_param")


def _knows(thing: Any, names: Sequence[str]) -> None:
    """See that an object of FSDP has what is used of it."""
    private.need(thing, names, _WHO, _ELSE)


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

    @property
    def ends(self) -> tuple[int, ...]:
        """Where each rank's elements end, laid one after another without padding."""
        return tuple(itertools.accumulate(sum(b - a for a, b in self._runs(rank)) for rank in range(self.size)))

    def spec_of_all(self) -> Spec:
        """The shards of all ranks, one after another."""
        return Spec(tuple(piece for rank in range(self.size) for piece in self.spec(rank).pieces))

    def take(self, rows: Tensor, ranks: Sequence[int]) -> tuple[Tensor, bool]:
        """The elements of some ranks' rows without the padding, flat, as float32; and whether they are a copy."""
        found = [row[a:b] for row, rank in zip(rows.view(len(ranks), -1), ranks) for a, b in self._runs(rank)]
        total = sum(part.numel() for part in found)
        if total == rows.numel() and rows.dtype == torch.float32:
            return rows.reshape(-1), False
        flat = buffers.empty(total, torch.float32, rows.device)
        at = 0
        for part in found:
            flat[at : at + part.numel()].copy_(part)
            at += part.numel()
        return flat, True

    def put(self, values: Tensor, row: Tensor, rank: int) -> None:
        """The inverse of :meth:`take`, in the row's dtype; padding becomes zero."""
        at = end = 0
        for a, b in self._runs(rank):
            row[end:a] = 0
            row[a:b] = values[at : at + b - a]
            at, end = at + b - a, b
        row[end:] = 0


class Unit:
    """One parameter group of FSDP: its layout, and the groups of the engine that serve it."""

    def __init__(self, number: int, module: Any, group: Any, names: Mapping[int, str]) -> None:
        self.number, self._module, self.group = number, module, group
        self._own = getattr(group, "_reduce_scatter_comm", None)  # FSDP's
        self.size: int = group.mesh_info.shard_process_group.size()
        self.rank: int = group.mesh_info.shard_process_group.rank()
        self._slots: list[tuple[Any, Slot]] = []
        for parameter in group.fsdp_params:
            info = parameter._module_info
            name = f"{names[id(info.module)]}.{info.param_name}".removeprefix(".")
            shape, dim = list(parameter._orig_size), parameter.fsdp_placement.dim
            if dim:
                # FSDP lays shards of another dimension one after another, as if that dimension came first.
                shape[dim] //= self.size
                shape[0] *= self.size
            numel = parameter._orig_size.numel()
            rows = numel // shape[0] if shape[0] else 0
            self._slots.append((parameter, Slot(name, tuple(shape), numel, -(-shape[0] // self.size) * rows)))
        self.dtype, self.device = _reduce_dtype(group), group.device
        self.layout = self.trainable()
        self.reduces: int | None = None  # the engine's group of the compressed reduce-scatter
        self.crosses: int | None = None  # the engine's group of the exchange between nodes

    def trainable(self) -> Layout:
        """The layout of the parameters that have gradients now."""
        return Layout(tuple(slot for p, slot in self._slots if p.sharded_param.requires_grad), self.size)

    def check(self, width: int) -> None:
        """Raise unless FSDP reduces as many elements per rank as the trainable parameters have."""
        if width != self.layout.width:
            raise BadConfiguration(
                f"FSDP reduces {width} elements per rank of the unit that begins with {self.first_name}, its trainable parameters "
                f"have {self.layout.width}: some got no gradient. Call model.set_reduce_scatter_unused_params(True), or freeze what is "
                "not used"
            )

    def restore(self) -> None:
        """Leave the reduction to FSDP again."""
        if self.reduces is not None:
            if self._own is None:
                raise private.unknown("FSDPParamGroup._reduce_scatter_comm", _WHO, _ELSE)
            self._module.set_custom_reduce_scatter(self._own)
        if self.crosses is not None:
            self._module.set_all_reduce_hook(None)

    @property
    def first_name(self) -> str:
        return self._slots[0][1].name

    def local(self) -> list[tuple[str, Tensor]]:
        """The shards of the parameters that this rank holds."""
        return [(slot.name, p.sharded_param.to_local()) for p, slot in self._slots]


class ReduceScatter:
    """What FSDP calls for one unit instead of its reduce-scatter."""

    def __init__(self, reduce: Callable[[Unit, Tensor, Tensor, Any], None], unit: Unit) -> None:
        self.reduce, self.unit = reduce, unit

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory for FSDP's input and output."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        self.reduce(self.unit, output_tensor, input_tensor, op)


def _reduce_dtype(group: Any) -> torch.dtype:
    """The dtype of FSDP's reduced gradients."""
    policy = getattr(group, "mp_policy", None) or getattr(group, "_mp_policy", None)
    first: torch.dtype = group.fsdp_params[0].sharded_param.dtype
    # Later torch releases keep the policy with each parameter.
    if policy is None:
        policy = getattr(group.fsdp_params[0], "mp_policy", None)
    if policy is None:
        raise private.unknown(f"{type(group).__name__}.mp_policy", _WHO, _ELSE)
    return policy.reduce_dtype or policy.param_dtype or first


def find_units(model: torch.nn.Module) -> list[tuple[Any, Unit]]:
    """The FSDP modules of a model with their parameter groups, in the order of the modules."""
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

    if any(isinstance(module, FullyShardedDataParallel) for module in model.modules()):
        raise BadConfiguration(
            "this model is wrapped in FullyShardedDataParallel (FSDP1), which is not supported: shard it with fully_shard (FSDP2), which "
            "torch recommends instead, or use DistributedDataParallel"
        )
    names = {id(module): private.plain_name(name) for name, module in reversed(list(model.named_modules()))}
    found: list[tuple[Any, Unit]] = []
    seen: set[int] = set()
    for module in model.modules():
        if not isinstance(module, FSDPModule):
            continue
        _knows(module, _MODULE)
        state = module._get_fsdp_state()
        groups = getattr(state, "_fsdp_param_groups", None)
        if groups is None:  # before torch 2.12: at most one
            _knows(state, ["_fsdp_param_group"])
            groups = [g for g in [state._fsdp_param_group] if g is not None]
        if len(groups) > 1:
            raise BadConfiguration("one fully_shard call with parameters on several meshes is not supported: shard them apart")
        for group in groups:
            _knows(group, _GROUP)
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
            _knows(group.mesh_info, ["shard_process_group"])
            _knows(group.fsdp_params[0], _PARAMETER)
            found.append((module, Unit(len(found), module, group, names)))
    require(bool(found), f"attach takes a model with fully_shard applied, got a plain {type(model).__name__}")
    require(len(found) < 1 << 16, f"at most 65535 units are supported, got {len(found)}")
    return found


def refuse_late(attached: Callable[[], torch.nn.Module | None], units: Sequence[Unit]) -> None:
    """Raise where fully_shard was called after attach: such a unit would silently stay uncompressed."""
    known, model = {id(unit.group) for unit in units}, attached()
    late = [] if model is None else [unit for _, unit in find_units(model) if id(unit.group) not in known]
    if late:
        raise BadConfiguration(
            f"fully_shard was called after attach: the unit that begins with {late[0].first_name} would stay uncompressed. Call attach "
            "after the last fully_shard"
        )


def weight(op: Any, unit: Unit, size: int) -> float:
    """By what the sum over ranks is multiplied."""
    if op == dist.ReduceOp.SUM:
        return 1.0
    if op == dist.ReduceOp.AVG:
        return 1.0 / size
    if op == dist.ReduceOp.PREMUL_SUM:
        factor = getattr(op, "factor", None)  # torch before 2.12 keeps it to itself
        return float(factor) if factor is not None else 1.0 / float(unit.group.gradient_divide_factor)
    raise BadConfiguration(f"gradients are reduced by SUM, AVG or PREMUL_SUM, FSDP asks for {op}")

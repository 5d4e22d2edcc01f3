"""One small model under every integration, so that a test is written once for all of them."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from tersegrad import engine
from tersegrad.integrations import ddp, fsdp, local_sgd

KINDS = ("ddp", "fsdp", "nodes", "local_sgd")
FEEDBACK = "error_feedback(top_k(fraction=0.1))"
SMALL = 20  # dense_below of most tests: biases


def net(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(10, 24), nn.ReLU(), nn.Linear(24, 24), nn.ReLU(), nn.Linear(24, 5)).to(dtype)


def loss_of(model: nn.Module, rank: int, step: int) -> Tensor:
    g = torch.Generator().manual_seed(100 * step + rank)
    return nn.functional.cross_entropy(model(torch.randn(8, 10, generator=g)), torch.randint(0, 5, (8,), generator=g))


def group_of(timeout: float) -> Any:
    """A process group of all ranks, for a job that breaks it."""
    return dist.new_group(timeout=timedelta(seconds=timeout))


@dataclasses.dataclass
class Run:
    """A model, its handle, and what one step is."""

    kind: str
    model: nn.Module
    handle: engine.Handle
    optimizer: torch.optim.Optimizer

    def steps(self, first: int, last: int) -> None:
        for step in range(first, last):
            self.optimizer.zero_grad()
            loss_of(self.model, dist.get_rank(), step).backward()
            self.optimizer.step()
            if self.kind == "local_sgd":
                self.handle.step()  # type: ignore[operator]

    @property
    def exchanged(self) -> int:
        """Steps that were exchanged."""
        return self.handle.engine.step

    def bits(self) -> bytes:
        """A hash of what must be the same on every rank."""
        parameters = [whole(p.detach()) for p in self.model.parameters()]
        return hashlib.blake2b(b"".join(p.float().numpy().tobytes() for p in parameters)).digest()


def whole(x: Tensor) -> Tensor:
    """A tensor or all shards of it.

    A DTensor that torch made may carry an equal mesh of an earlier job, whose process group of all ranks was broken.
    """
    if not isinstance(x, DTensor):
        return x
    everyone = x.device_mesh.size() == dist.get_world_size()
    group: Any = dist.group.WORLD if everyone else x.device_mesh.get_group()
    parts: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(parts, x.to_local().detach(), group=group)
    return torch.cat(parts)


def sharded(mesh: DeviceMesh) -> nn.Sequential:
    model = net()
    for module in (model[0], model[2], model):
        fully_shard(module, mesh=mesh)
    return model


def split(outer: int, timeout: float | None = None) -> tuple[DeviceMesh, Any]:
    """All ranks as ``outer`` nodes: the shard mesh of this rank's node, and the group of its peers, with a timeout for both."""
    if timeout is None:
        mesh = init_device_mesh("cpu", (outer, dist.get_world_size() // outer), mesh_dim_names=("replicate", "shard"))
        return mesh["shard"], mesh["replicate"].get_group()
    ranks = torch.arange(dist.get_world_size()).view(outer, -1)
    made = [dist.new_group(row, timeout=timedelta(seconds=timeout)) for row in (*ranks.tolist(), *ranks.T.tolist())]
    node, peers = divmod(dist.get_rank(), ranks.shape[1])
    return DeviceMesh.from_group(made[node], "cpu"), made[outer + peers]


def start(
    kind: str,
    compressor: Any = FEEDBACK,
    exchange: Any = None,
    *,
    group: Any = None,
    nodes: int = 2,
    timeout: float | None = None,
    how: str = "local_sgd(every=1)",
    **options: Any,
) -> Run:
    """A run of one kind; ``nodes`` is FSDP2 between nodes, and a local SGD step is one exchange unless ``how`` says otherwise.

    ``timeout``: of process groups that are made for this run, which may break.
    """
    if timeout is not None and kind != "nodes":
        group = group_of(timeout)
    options = {"dense_below": SMALL, **options}
    model: nn.Module
    handle: engine.Handle
    if kind == "ddp":
        model = DistributedDataParallel(net(), process_group=group)
        handle = ddp.attach(model, compressor, exchange, **{"group_bytes": 1500, **options})
    elif kind == "fsdp":
        mesh = DeviceMesh.from_group(group, "cpu") if group is not None else init_device_mesh("cpu", (dist.get_world_size(),))
        model = sharded(mesh)
        handle = fsdp.attach(model, compressor, **options)
    elif kind == "nodes":
        mesh, peers = split(min(nodes, dist.get_world_size()), timeout)
        model = sharded(mesh)
        handle = fsdp.attach(model, compressor, exchange, between=peers, **options)
    else:
        model = net()
        options = {"group_bytes": 1500, **options}
        handle = local_sgd.attach(model, compressor, exchange, how, process_group=group, **options)
    return Run(kind, model, handle, torch.optim.SGD(model.parameters(), lr=0.1))


def caught(call: Callable[[], Any], kinds: type[BaseException] = Exception) -> tuple[str, str]:
    """The name and text of what a call raises."""
    try:
        call()
    except kinds as error:
        return type(error).__name__, str(error)
    return "", ""

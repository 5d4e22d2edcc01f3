"""What the front doors to Lightning, Accelerate and Transformers share: attach to whatever they wrapped, and save every rank's state."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from tersegrad import engine
from tersegrad.core import private
from tersegrad.core.errors import BadConfiguration, MissingExtra
from tersegrad.core.protocol import Compressor
from tersegrad.exchange import Scheme
from tersegrad.integrations import ddp, fsdp


def attach(
    model: torch.nn.Module,
    compressor: Compressor[Any] | str | None,
    exchange: Scheme | str | None = None,
    **options: Any,
) -> engine.Handle:
    """Exchange the gradients of a model that a framework has wrapped for DDP or sharded with fully_shard."""
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

    inner = private.unwrapped(model)
    if isinstance(inner, DistributedDataParallel):
        return ddp.attach(model, compressor, exchange, **options)
    if any(isinstance(module, FSDPModule | FullyShardedDataParallel) for module in inner.modules()):
        if compressor is None:
            raise BadConfiguration("FSDP2 needs a compressor")
        return fsdp.attach(inner, compressor, exchange, **options)
    raise BadConfiguration(
        f"the framework has left {type(inner).__name__} as it is, so there is nothing to compress: run several processes (torchrun, or "
        "the framework's launcher) with DDP or FSDP2"
    )


class AllRanks:
    """The states of a handle on all ranks as one, for frameworks whose checkpoints hold what rank 0 has.

    Residuals differ from rank to rank. :meth:`state_dict` collects them on rank 0 (a collective call, as saving is in these frameworks);
    :meth:`load_state_dict` takes them on every rank, of any world size.
    """

    def __init__(self, handle: engine.Handle) -> None:
        self.handle = handle

    def state_dict(self) -> dict[str, Any]:
        """What rank 0 saves; the others have nothing to."""
        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, _on_cpu(self.handle.state_dict()))
        return {"ranks": found if dist.get_rank() == 0 else []}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what was saved."""
        self.handle.load_state_dicts(state["ranks"])


def _on_cpu(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.cpu()
    return {key: _on_cpu(part) for key, part in value.items()} if isinstance(value, Mapping) else value


def base(names: tuple[str, ...], attribute: str) -> Any:
    """The class of a framework to derive from: of the first module that is there; ``object`` where none is."""
    for name in names:
        try:
            return getattr(importlib.import_module(name), attribute)
        except ImportError:
            continue
    return object


def require_base(found: Any, package: str) -> None:
    """Raise where a front door's framework is missing."""
    if found is object:
        raise MissingExtra(f"this needs {package}: pip install {package}")

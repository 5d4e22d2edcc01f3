"""torch's own all-reduce of a DDP model at full or half precision: the baseline, with the counters of a compressed exchange.

The hooks are torch's. What they send is counted as a ring does it, 2 (p-1)/p times the buffer: no all-reduce sends less.
"""

import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from tersegrad.core.errors import BadConfiguration
from tersegrad.engine import Engine, TimedGroup
from tersegrad.exchange.schemes import AllReduceScheme

# by the name of the compressor that rounds alike
HOOKS: Mapping[str, tuple[torch.dtype, Any]] = {
    "identity": (torch.float32, default_hooks.allreduce_hook),
    "bf16": (torch.bfloat16, default_hooks.bf16_compress_hook),
    "fp16": (torch.float16, default_hooks.fp16_compress_hook),
}


def pass_by(engine: Engine, group: dist.ProcessGroup | None, bucket: GradBucket) -> Future[Tensor]:
    """Give a bucket of a handle whose exchange is all_reduce to torch's hook, and count it."""
    scheme = engine.settings.scheme
    assert isinstance(scheme, AllReduceScheme)
    dtype, hook = HOOKS["identity" if scheme.dtype == "float32" else scheme.dtype]
    numel = bucket.buffer().numel()
    engine.passed(numel, numel * dtype.itemsize, bucket.is_last())
    future: Future[Tensor] = hook(dist.group.WORLD if group is None else group, bucket)
    return future


def plain_all_reduce(group: Any, bucket: GradBucket) -> Future[Tensor]:
    """What DDP does without a hook."""
    own = group.group if isinstance(group, TimedGroup) else group
    future: Future[Tensor] = default_hooks.allreduce_hook(dist.group.WORLD if own is None else own, bucket)  # type: ignore[arg-type]
    return future


class Handle:
    """Counters of one model's all-reduce; it has no state. Made by :func:`attach`."""

    def __init__(self, precision: str, group: dist.ProcessGroup, measure_every: int) -> None:
        self.precision, self.measure_every = precision, measure_every
        self.dtype, self._hook = HOOKS[precision]
        self._group, self._size = group, dist.get_world_size(group)
        self.step = 0
        self._steps, self._nbytes, self._coordinates, self._seconds, self._error, self._power = 0, 0, 0, 0.0, 0.0, 0.0

    def on_bucket(self, bucket: GradBucket) -> "Future[Tensor]":
        """Count a bucket, and hand it to torch's hook."""
        begin = time.perf_counter()
        buffer = bucket.buffer()
        self._nbytes += buffer.numel() * self.dtype.itemsize
        self._coordinates += buffer.numel()
        if self.measure_every and self.step % self.measure_every == 0:
            exact = buffer.double()
            self._error += float((buffer.to(self.dtype).double() - exact).square().sum())
            self._power += float(exact.square().sum())
        if bucket.is_last():
            self.step += 1
            self._steps += 1
        future: Future[Tensor] = self._hook(self._group, bucket)
        self._seconds += time.perf_counter() - begin
        return future

    def report(self) -> dict[str, float | str]:
        """The counters, named as those of a compressed exchange."""
        out: dict[str, float | str] = {
            "compressor": self.precision,
            "exchange": "all_reduce",
            "steps": self._steps,
            "bytes/sent": self._nbytes * 2 * (self._size - 1) / self._size,
            "bits_per_coordinate": 8 * self._nbytes / self._coordinates if self._coordinates else 0.0,
            "seconds/encode": self._seconds,
        }
        if self._power:
            out["message_error"] = self._error / self._power
        return out

    def reset_report(self) -> None:
        """Count from zero again."""
        self._steps, self._nbytes, self._coordinates, self._seconds, self._error, self._power = 0, 0, 0, 0.0, 0.0, 0.0

    def check_replicas(self) -> None:
        """Nothing: DDP itself keeps the replicas alike."""

    def state_dict(self) -> dict[str, Any]:
        """The step, which is all there is."""
        return {"step": self.step}

    def load_state_dicts(self, state_dicts: Sequence[Mapping[str, Any]]) -> None:
        """Continue from the states of any ranks."""
        if not state_dicts or set(state_dicts[0]) != {"step"}:
            raise BadConfiguration("the state was saved with a compressed exchange: resume with the exchange that saved it")
        self.step = int(state_dicts[0]["step"])


def attach(model: DistributedDataParallel, precision: str = "bf16", *, measure_every: int = 0) -> Handle:
    """All-reduce the gradients of ``model`` as torch does, in ``precision``: identity (float32), bf16 or fp16."""
    if precision not in HOOKS:
        raise BadConfiguration(
            f"all_reduce adds numbers, it takes {', '.join(HOOKS)} and no other compressor, got {precision!r}"
        )
    handle = Handle(precision, model.process_group, measure_every)
    model.register_comm_hook(handle, _hook)
    return handle


def _hook(state: Handle, bucket: GradBucket) -> Future[Tensor]:  # DDP reads these annotations
    return state.on_bucket(bucket)

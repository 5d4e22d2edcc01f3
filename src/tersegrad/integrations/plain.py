"""Gradients of a plain module, exchanged between the backward pass and the optimiser's step, without DistributedDataParallel.

The groups, messages, states and checkpoints are those of :mod:`~tersegrad.integrations.ddp`, and so are the means, bit for bit; only the
overlap with the backward pass is missing. It serves loops that accumulate or change gradients before they are exchanged, and
virtual workers (:mod:`tersegrad.engine.threads`), for which there is no DDP.
"""

from __future__ import annotations

from typing import Any, Unpack

import torch
from torch import Tensor

from tersegrad.core import private
from tersegrad.core.errors import BadConfiguration
from tersegrad.core.protocol import Compressor
from tersegrad.core.text import require
from tersegrad.engine import Options, Settings, TimedGroup
from tersegrad.exchange import Scheme
from tersegrad.integrations import ddp
from tersegrad.integrations.attached import claim, free


class _Bucket:
    """The gradients of some parameters in one buffer, with the face of one of DDP's buckets."""

    def __init__(self, number: int, last: bool, parameters: list[Tensor]) -> None:
        self._number, self._last, self._parameters = number, last, parameters
        self._buffer = torch.cat([p.grad.detach().reshape(-1) for p in parameters if p.grad is not None])

    def index(self) -> int:
        return self._number

    def is_last(self) -> bool:
        return self._last

    def buffer(self) -> Tensor:
        return self._buffer

    def parameters(self) -> list[Tensor]:
        return self._parameters

    def gradients(self) -> list[Tensor]:
        """Views of the buffer."""
        parts = self._buffer.split([p.numel() for p in self._parameters])
        return [part.view(p.shape) for part, p in zip(parts, self._parameters)]


class Handle(ddp.Handle):
    """The exchange of one plain module's gradients. Made by :func:`attach`."""

    def reduce(self) -> None:
        """Replace every gradient by its mean over ranks; between ``backward()`` and the optimiser's step, on every rank."""
        self._in_use()
        lacking = [name for name, p in self._parameters.items() if p.grad is None]
        if lacking:
            raise BadConfiguration(
                f"{lacking[0]} has no gradient: call reduce() after backward(), and freeze unused parameters"
            )
        kinds: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
        for parameter in self._parameters.values():
            kinds.setdefault((parameter.dtype, parameter.device), []).append(parameter)
        buckets = [_Bucket(k, k == len(kinds) - 1, chosen) for k, chosen in enumerate(kinds.values())]
        for bucket in buckets:
            self.on_bucket(bucket)  # type: ignore[arg-type]
        for bucket in buckets:
            for parameter, mean in zip(bucket.parameters(), bucket.gradients()):
                assert parameter.grad is not None
                parameter.grad.copy_(mean)


def attach(
    model: torch.nn.Module,
    compressor: Compressor[Any] | str | None,
    exchange: Scheme | str | None = None,
    *,
    group_bytes: int | None = None,
    scaler: Any = None,
    process_group: Any = None,
    **options: Unpack[Options],
) -> Handle:
    """Exchange the gradients of a plain module; call ``handle.reduce()`` after ``backward()``.

    The arguments are those of :func:`tersegrad.integrations.ddp.attach`; ``process_group`` may be a member of virtual workers. All
    ranks start from rank 0's parameters and buffers.
    """
    inner = private.unwrapped(model)
    require(not isinstance(inner, torch.nn.parallel.DistributedDataParallel), "for DistributedDataParallel there is ddp.attach")
    free(inner)
    settings = Settings.make(compressor, exchange, collects=True, **options)
    handle = Handle(settings, group_bytes, scaler, process_group)
    handle.bind(model)
    link = TimedGroup.of(process_group)
    for tensor in (*inner.parameters(), *inner.buffers()):
        link.broadcast(tensor.detach())
    claim([inner], handle)
    return handle

"""The tap: an identity in the graph that sees a module's output gradient together with what the module was fed.

It is an autograd function rather than a hook, because what it saves then goes through autograd's own saved tensors: freed with
the graph, recomputed by activation checkpointing, guarded against in-place changes. Marked as an in-place operation, it costs
no copy and allows in-place activations behind it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import Parameter

Record = Callable[[Sequence[Tensor], Tensor], Sequence[Tensor | None]]


class _Tap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, record: Record, count: int, out: Tensor, *tensors: Tensor | None) -> Tensor:
        ctx.record, ctx.count, ctx.total = record, count, len(tensors)
        ctx.save_for_backward(*tensors[:count])
        ctx.mark_dirty(out)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, delta: Tensor) -> Any:
        gradients = ctx.record(ctx.saved_tensors, delta)
        return (None, None, delta, *[None] * ctx.count, *(gradients or [None] * (ctx.total - ctx.count)))


def tap(out: Tensor, record: Record, saved: Sequence[Tensor | None], parameters: Sequence[Parameter | None] = ()) -> Tensor:
    """``out``, with ``record(saved, delta)`` called in the backward pass; it returns the gradients of ``parameters``.

    ``parameters`` are those that ``out`` was computed from detached: their gradient is the tap's to give.
    """
    kept = [None if s is None else s.detach() for s in saved]
    result: Tensor = _Tap.apply(record, len(kept), out, *kept, *parameters)  # type: ignore[no-untyped-call]
    return result

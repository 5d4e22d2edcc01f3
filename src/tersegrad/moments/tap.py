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
    def forward(ctx: Any, record: Record, saved: Sequence[Tensor | None], out: Tensor, *parameters: Parameter | None) -> Tensor:
        ctx.record = record
        ctx.save_for_backward(*saved)  # no inputs of the tap, which would give the graph an edge to each
        ctx.mark_dirty(out)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, delta: Tensor) -> Any:
        return (None, None, delta, *ctx.record(ctx.saved_tensors, delta))


def tap(out: Tensor, record: Record, saved: Sequence[Tensor | None], parameters: Sequence[Parameter | None] = ()) -> Tensor:
    """``out``, with ``record(saved, delta)`` called in the backward pass; it returns the gradients of ``parameters``.

    ``parameters`` are those that ``out`` was computed from detached: their gradient is the tap's to give.
    """
    result: Tensor = _Tap.apply(record, saved, out, *parameters)  # type: ignore[no-untyped-call]
    return result

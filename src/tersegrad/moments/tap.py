"""The tap: an identity in the graph that sees a module's output gradient together with what the module was fed.

It is an autograd function rather than a hook, because what it saves then goes through autograd's own saved tensors: freed with
the graph, recomputed by activation checkpointing, guarded against in-place changes. Marked as an in-place operation, it costs
no copy and allows in-place activations behind it.

Where torch's own function saves what the module was fed, a hook on it reads that, in a third of the time: :func:`watch`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import Parameter

from tersegrad.core import private

Record = Callable[[Sequence[Tensor], Tensor], Sequence[Tensor | None]]


class _Tap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, record: Record, saved: Sequence[Tensor | None], out: Tensor, *parameters: Parameter | None) -> Tensor:
        ctx.record = record
        # No inputs of the tap, which would give the graph an edge to each.
        ctx.save_for_backward(*saved)
        ctx.mark_dirty(out)
        return out

    @staticmethod
    def backward(ctx: Any, delta: Tensor) -> Any:
        # The decorator that refuses a second derivative costs as much as all else here, and is needed where there may be one.
        return _once(ctx, delta) if torch.is_grad_enabled() else _recorded(ctx, delta)


def _recorded(ctx: Any, delta: Tensor) -> Any:
    return (None, None, delta, *ctx.record(ctx.saved_tensors, delta))


_once = once_differentiable(_recorded)
_apply = private.applied(_Tap)


# What torch's functions call the input that they save.
SAVED: Mapping[str, str] = {
    "AddmmBackward0": "_saved_mat1",
    "CudnnBatchNormBackward0": "_saved_input",
    "MmBackward0": "_saved_self",
    "NativeBatchNormBackward0": "_saved_input",
}
# In a hook, the function that it hangs on: holding it in the hook would make a circle.
_function: Callable[[], Any] | None = private.fast("_current_autograd_node", None)


def watch(out: Tensor, record: Record, rest: Sequence[Tensor] = ()) -> bool:
    """Call ``record((x, *rest), delta)`` in the backward pass, where ``out`` was made from ``x`` by a function that saves it.

    False where it was not, and nothing is done. ``rest`` is kept with the graph.
    """
    node = out.grad_fn
    name = SAVED.get(type(node).__name__)
    # Checkpointing gives back each saved tensor once.
    if name is None or node is None or _function is None or private.packs():
        return False

    def before(deltas: Sequence[Tensor | None]) -> None:
        delta, function = deltas[0], _function() if _function is not None else None
        if delta is None:
            return
        saved = (getattr(function, name), *rest)
        if torch.is_grad_enabled():
            with torch.no_grad():
                record(saved, delta)
        else:
            record(saved, delta)

    node.register_prehook(before)
    return True


def tap(out: Tensor, record: Record, saved: Sequence[Tensor | None], parameters: Sequence[Parameter | None] = ()) -> Tensor:
    """``out``, with ``record(saved, delta)`` called in the backward pass; it returns the gradients of ``parameters``.

    ``parameters`` are those that ``out`` was computed from detached: their gradient is the tap's to give.
    """
    result: Tensor = _apply(record, saved, out, *parameters)
    return result

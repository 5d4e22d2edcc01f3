"""Multi-head attention: its projections are linear layers, called as functions on slices of one packed weight.

The module's own forward runs, and every ``linear`` in it whose weight is a parameter of the module, or a slice of one, is tapped:
torch's function for attention is called with that one name bound to ours.
Inside, sequences come first: (length, samples, width), flattened to (length * samples, width) before the last projection.
"""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from tersegrad.core import private
from tersegrad.moments.shares import Use
from tersegrad.moments.site import Site, autocast


@dataclasses.dataclass(frozen=True, eq=False)
class ProjectionUse(Use):
    """Some rows of a weight, and of a bias; saved = (x,); parameters = (weight, bias)."""

    weight: Parameter
    bias: Parameter | None
    samples: int
    rows: slice
    bias_rows: slice

    @property
    def parameters(self) -> tuple[Parameter | None, ...]:  # type: ignore[override]
        return self.weight, self.bias

    def per_sample(self, saved: Sequence[Tensor], delta: Tensor, low: int, high: int) -> Sequence[Tensor | None]:
        x, d = (t.reshape(-1, self.samples, t.shape[-1])[:, low:high].transpose(0, 1) for t in (saved[0], delta))
        weight = bias = None
        if self.weight.requires_grad:
            weight = _placed(torch.bmm(d.mT, x), self.weight, self.rows)
        if self.bias is not None and self.bias.requires_grad:
            bias = _placed(d.sum(1, dtype=torch.float32), self.bias, self.bias_rows)
        return weight, bias


def _placed(shares: Tensor, parameter: Parameter, rows: slice) -> Tensor:
    if rows == slice(0, parameter.shape[0]):
        return shares
    whole = shares.new_zeros((shares.shape[0], *parameter.shape))
    whole[:, rows] = shares
    return whole


class _Projections(TorchFunctionMode):
    """Taps ``linear`` calls on the parameters of one module."""

    def __init__(self, site: Site, samples: int) -> None:
        super().__init__()
        self.site, self.samples = site, samples

    def __torch_function__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.multi_head_attention_forward:
            func = self._rebound()
        return func(*args, **(kwargs or {}))

    def _rebound(self) -> Any:
        """Torch's function, and those of its own that it calls, with ``linear`` tapped."""
        names = {**vars(F), "linear": self._linear, "has_torch_function": lambda _: False}
        called = (private.of("nn.functional._in_projection_packed"), private.of("nn.functional._in_projection"))
        function: Any
        for function in (*called, F.multi_head_attention_forward):
            name = function.__name__
            copy = types.FunctionType(function.__code__, names, name, function.__defaults__, function.__closure__)
            copy.__kwdefaults__ = function.__kwdefaults__
            names[name] = copy
        return names["multi_head_attention_forward"]

    def _linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        owner, rows = self._owner(weight)
        bias_owner, bias_rows = (None, rows) if bias is None else self._owner(bias)
        if owner is None or (bias is not None and bias_owner is None):
            return F.linear(x, weight, bias)
        x = autocast(x)
        use = ProjectionUse(owner, bias_owner, self.samples, rows, bias_rows)
        return self.site.observe(F.linear(x, weight, bias), use, (x,))

    def _owner(self, tensor: Tensor) -> tuple[Parameter | None, slice]:
        viewed = private.get(tensor, "_base")
        base = tensor if viewed is None else viewed
        for p in self.site.parameters:
            if p is base:
                first = tensor.storage_offset() // (tensor.stride(0) if tensor.ndim > 1 else 1)
                return p, slice(first, first + tensor.shape[0])
        return None, slice(0, 0)


def attention(site: Site, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Rule of MultiheadAttention."""
    module: Any = site.module
    samples = 1 if query.ndim == 2 else query.shape[0 if module.batch_first else 1]
    with _Projections(site, samples):
        return site.plain(query, key, value, *args, **kwargs)

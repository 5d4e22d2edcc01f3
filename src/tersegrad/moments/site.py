"""A site: one watched module. It stands in for the module's ``forward`` and runs it by the rule."""

from __future__ import annotations

import copy
import types
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from tersegrad.moments.shares import Use
from tersegrad.moments.tap import tap, watch

if TYPE_CHECKING:
    from tersegrad.moments.collector import Collector


class Rule(Protocol):
    """Runs ``site.module`` on its arguments with taps, and returns what its own forward would."""

    def __call__(self, site: Site, *args: Any, **kwargs: Any) -> Any: ...


class Site:
    """Callable put in place of ``module.forward``. A copy or a pickle of the module gets the module's own forward back."""

    def __init__(
        self, collector: Collector, module: nn.Module, name: str, rule: Rule, parameters: Sequence[Parameter], axis: int
    ):
        self.collector = collector
        self.module = module
        self.name = name
        self.rule = rule
        self.parameters = tuple(parameters)
        self.axis = axis  # of the samples, in the module's input and output

        self._as_it_is = torch.compiler.disable(self._watched)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # A compiled model breaks its graph here and runs this as it is.
        if torch.compiler.is_compiling():
            return self._as_it_is(*args, **kwargs)
        return self._watched(*args, **kwargs)

    def _watched(self, *args: Any, **kwargs: Any) -> Any:
        if self.collector.expects(self.parameters):
            return self.rule(self, *args, **kwargs)
        return self.plain(*args, **kwargs)

    def plain(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own forward."""
        return type(self.module).forward(self.module, *args, **kwargs)

    def observe(self, out: Tensor, use: Use, saved: Sequence[Tensor], own: bool = False) -> Tensor:
        """Record shares of parameters whose gradient autograd computes by itself.

        ``own`` says that ``out`` was made from ``saved[0]`` by one function of torch's, which saves it.
        """
        if not out.requires_grad:
            return out
        record = self.collector.recorder(self, use, fused=False)
        return out if own and watch(out, record, saved[1:]) else tap(out, record, saved)

    def supply(self, out: Tensor, use: Use, saved: Sequence[Tensor | None]) -> Tensor:
        """Record shares, and give the sum of them as the gradient of the use's parameters (``out`` was made from detached ones)."""
        return tap(out, self.collector.recorder(self, use, fused=True), saved, use.parameters)

    def attach(self) -> None:
        self.module.__dict__["forward"] = self

    def detach(self) -> None:
        if self.module.__dict__.get("forward") is self:
            del self.module.__dict__["forward"]

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return _own_forward(copy.deepcopy(self.module, memo))

    def __reduce__(self) -> Any:
        return _own_forward, (self.module,)


def _own_forward(module: nn.Module) -> Any:
    return types.MethodType(type(module).forward, module)


def autocast(x: Tensor) -> Tensor:
    """``x`` in the dtype that autocast runs matrix products in, so that what is saved is saved once."""
    kind = x.device.type
    if not torch.is_autocast_enabled(kind) or not x.is_floating_point():
        return x
    dtype = torch.get_autocast_dtype(kind)
    return x if x.dtype == dtype else x.to(dtype)


def detached(parameter: Parameter | None) -> Tensor | None:
    """``parameter`` without its gradient."""
    return None if parameter is None else parameter.detach()

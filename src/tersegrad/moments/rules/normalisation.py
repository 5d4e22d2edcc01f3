"""Normalisations: y = xhat * gamma + beta, so c_z is sum over positions of delta * xhat for gamma, of delta for beta.

Batch norm couples the samples through its statistics. delta is what autograd gives, the derivative of the whole loss, so that the
shares still sum to the gradient exactly; their squares are the spread of the samples' contributions.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.nn import functional as F

from tersegrad import kernels
from tersegrad.core import private
from tersegrad.moments.joint import Part
from tersegrad.moments.shares import Budget, Totals, Use, accelerated
from tersegrad.moments.site import Site


@dataclasses.dataclass(eq=False)
class BatchNormUse(Use):
    """saved = (x, mean, 1 / standard deviation); parameters = (gamma, beta)."""

    gamma: Parameter | None
    beta: Parameter | None
    samples: int

    @property
    def parameters(self) -> tuple[Parameter | None, ...]:  # type: ignore[override]
        return self.gamma, self.beta

    def nbytes(self, saved: Sequence[Tensor], delta: Tensor) -> int:
        return 4 * saved[0].numel() // self.samples

    joint = "share_norm_squares"

    def part(self, saved: Sequence[Tensor], delta: Tensor) -> Part | None:
        x, mean, inverse = saved
        gamma, beta = self.gamma, self.beta
        if gamma is None or beta is None or not gamma.requires_grad or not beta.requires_grad or mean.dtype != torch.float32:
            return None
        if not accelerated(x, delta):
            delta = delta.to(memory_format=torch.channels_last) if x.ndim == 4 and x.is_cuda else delta
            if not accelerated(x, delta):
                return None
        return x, delta, mean, inverse

    def totals(self, saved: Sequence[Tensor], delta: Tensor, budget: Budget, gradient: bool) -> list[Totals | None]:
        part = self.part(saved, delta)
        if part is None:
            return super().totals(saved, delta, budget, gradient)
        budget.part(self.samples)
        x = part[0]
        found = kernels.get(x.device).share_norm_sums(*part)
        gamma, beta, *squares = found.view(4, budget.workers, -1, x.shape[1]).sum(2).unbind()
        return [Totals(gamma, squares[0]), Totals(beta, squares[1])]

    def per_sample(self, saved: Sequence[Tensor], delta: Tensor, low: int, high: int) -> Sequence[Tensor | None]:
        x, mean, inverse = saved
        x, d = x[low:high], delta[low:high]
        shape = (1, -1, *[1] * (x.ndim - 2))
        axes = tuple(range(2, x.ndim))
        gamma = beta = None
        if self.gamma is not None and self.gamma.requires_grad:
            gamma = (x - mean.view(shape)).mul_(d)
            gamma = (gamma.sum(axes) if axes else gamma).mul_(inverse)
        if self.beta is not None and self.beta.requires_grad:
            beta = d.sum(axes, dtype=torch.float32) if axes else d
        return gamma, beta


@functools.cache
def _torchs() -> tuple[Any, Any]:
    """F.batch_norm that returns the statistics it used too, and the check before it."""
    return private.of("_batch_norm_impl_index"), private.of("nn.functional._verify_batch_size")


def batch_norm(site: Site, x: Tensor) -> Tensor:
    """Rule of BatchNorm1d, 2d and 3d."""
    module: Any = site.module
    normalised, verify = _torchs()
    private.get(module, "_check_input_dim")(x)
    # Each of these is looked up in Python code of the module's.
    weight, bias, mean, var = module.weight, module.bias, module.running_mean, module.running_var
    training = module.training or (mean is None and var is None)
    momentum = 0.0 if module.momentum is None else module.momentum
    if training:
        verify(x.size())
    if module.training and module.track_running_stats and (tracked := module.num_batches_tracked) is not None:
        if module.momentum is None:
            tracked.add_(1)
            momentum = 1.0 / float(tracked)
        else:
            site.collector.turn.count(tracked)
    if module.training and not module.track_running_stats:
        mean = var = None
    out, saved_mean, saved_inverse, _, _ = normalised(
        x, weight, bias, mean, var, training, momentum, module.eps, torch.backends.cudnn.enabled
    )
    if not training:
        saved_mean, saved_inverse = mean, (var + module.eps).rsqrt()
    return site.observe(out, BatchNormUse(weight, bias, x.shape[0]), (x, saved_mean, saved_inverse), own=True)


@dataclasses.dataclass(frozen=True, eq=False)
class ReadyUse(Use):
    """saved = the shares themselves, (samples, *shape) for each parameter."""

    parameters: tuple[Parameter | None, ...]
    samples: int

    def per_sample(self, saved: Sequence[Tensor], delta: Tensor, low: int, high: int) -> Sequence[Tensor | None]:
        return [s[low:high] if p is not None and p.requires_grad else None for p, s in zip(self.parameters, saved, strict=True)]


def worker_batch_norm(site: Site, x: Tensor) -> Tensor:
    """Rule of what ``moments.worker_batch_norm`` makes."""
    module: Any = site.module
    if not module.training:
        return batch_norm(site, x)
    record = site.collector.recorder(site, ReadyUse((module.weight, module.bias), x.shape[0]), fused=False)
    result: Tensor = module.normalise(x, lambda gamma, beta: record((gamma, beta), beta))
    return result


@dataclasses.dataclass(frozen=True, eq=False)
class ScaleUse(Use):
    """y = f(x) * gamma + beta with f elementwise or within a sample; saved = (x,); parameters = (gamma, beta)."""

    gamma: Parameter | None
    beta: Parameter | None
    samples: int
    axis: int
    function: Callable[[Tensor], Tensor]
    trailing: bool  # gamma lies on the last axes (layer norm) or on axis 1 (channels)

    @property
    def parameters(self) -> tuple[Parameter | None, ...]:  # type: ignore[override]
        return self.gamma, self.beta

    def nbytes(self, saved: Sequence[Tensor], delta: Tensor) -> int:
        return 8 * saved[0].numel() // self.samples

    def per_sample(self, saved: Sequence[Tensor], delta: Tensor, low: int, high: int) -> Sequence[Tensor | None]:
        x, d = (t.movedim(self.axis, 0)[low:high].float() for t in (saved[0], delta))
        gamma = beta = None
        if self.gamma is not None and self.gamma.requires_grad:
            gamma = self._gather(self.function(x).mul(d), self.gamma)
        if self.beta is not None and self.beta.requires_grad:
            beta = self._gather(d, self.beta)
        return gamma, beta

    def _gather(self, x: Tensor, parameter: Parameter) -> Tensor:
        """Sum over the positions that one element of ``parameter`` serves."""
        if self.trailing:
            return x.flatten(1, x.ndim - parameter.ndim - 1).sum(1) if x.ndim > 1 + parameter.ndim else x
        if parameter.numel() == 1:
            return x.flatten(1).sum(1, keepdim=True)
        return x.flatten(2).sum(2) if x.ndim > 2 else x


def layer_norm(site: Site, x: Tensor) -> Tensor:
    """Rule of LayerNorm."""
    module: Any = site.module

    def function(t: Tensor) -> Tensor:
        return F.layer_norm(t, module.normalized_shape, None, None, module.eps)

    use = ScaleUse(module.weight, module.bias, x.shape[site.axis], site.axis, function, trailing=True)
    return site.observe(site.plain(x), use, (x,))


def rms_norm(site: Site, x: Tensor) -> Tensor:
    """Rule of RMSNorm."""
    module: Any = site.module
    eps = torch.finfo(x.dtype).eps if module.eps is None else module.eps  # of the dtype it ran in

    def function(t: Tensor) -> Tensor:
        return F.rms_norm(t, module.normalized_shape, None, eps)

    use = ScaleUse(module.weight, None, x.shape[site.axis], site.axis, function, trailing=True)
    return site.observe(site.plain(x), use, (x,))


def group_norm(site: Site, x: Tensor) -> Tensor:
    """Rule of GroupNorm."""
    module: Any = site.module

    def function(t: Tensor) -> Tensor:
        return F.group_norm(t, module.num_groups, None, None, module.eps)

    return site.observe(site.plain(x), ScaleUse(module.weight, module.bias, x.shape[0], 0, function, trailing=False), (x,))


def instance_norm(site: Site, x: Tensor) -> Tensor:
    """Rule of InstanceNorm1d, 2d and 3d."""
    module: Any = site.module
    mean, var = module.running_mean, module.running_var
    own = module.training or not module.track_running_stats

    def function(t: Tensor) -> Tensor:
        return F.instance_norm(t, mean, var, None, None, own, 0.0, module.eps)

    return site.observe(site.plain(x), ScaleUse(module.weight, module.bias, x.shape[0], 0, function, trailing=False), (x,))


def prelu(site: Site, x: Tensor) -> Tensor:
    """Rule of PReLU: y = max(x, 0) + gamma min(x, 0)."""
    use = ScaleUse(site.module.weight, None, x.shape[site.axis], site.axis, lambda t: t.clamp(max=0), trailing=False)  # type: ignore[arg-type]
    return site.observe(site.plain(x), use, (x,))

"""Batch normalisation of several workers' batches in one pass: every worker's part is normalised with its own statistics.

``worker_batch_norm(model, p)`` turns every BatchNorm of a model into one that takes its batch for p equal consecutive parts.
What p workers would compute one by one is then computed at once. The running statistics are updated with the mean over workers of
what each would have added: the mean of the workers' own running statistics, at any time. Evaluation is ordinary batch norm.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from tersegrad import kernels
from tersegrad.core import private
from tersegrad.core.errors import BadConfiguration
from tersegrad.kernels import reference
from tersegrad.moments.shares import accelerated

Report = Callable[[Tensor, Tensor], object]


class _WorkerNorm(torch.autograd.Function):
    """y = a x + b with a, b by worker and channel; the backward sums by sample first, which the moments need too."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,  # (workers * part, channels, *size)
        gamma: Tensor | None,
        beta: Tensor | None,
        mean: Tensor,  # (workers, 1, channels, ...) float32
        inverse: Tensor,
        report: Report | None,
    ) -> Tensor:
        scale = inverse if gamma is None else inverse * gamma.view(mean.shape[1:])
        shift = -mean * scale if beta is None else torch.addcmul(beta.view(mean.shape[1:]), mean, scale, value=-1)
        out = _affine(x, scale, shift)
        ctx.save_for_backward(x, gamma, mean, inverse)
        ctx.report, ctx.has_beta = report, beta is not None
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, delta: Tensor) -> Any:
        x, gamma, mean, inverse = ctx.saved_tensors
        delta = delta.to(memory_format=torch.channels_last) if x.ndim == 4 and x.is_cuda else delta
        workers, axes = mean.shape[0], tuple(range(3, mean.ndim))
        parts, d = x.unflatten(0, (workers, -1)), delta.unflatten(0, (workers, -1))
        if accelerated(x, delta):
            both = kernels.get(x.device).share_norm_sums(x, delta, mean, inverse)[:2].view(2, workers, -1, *mean.shape[2:])
            by_gamma, by_beta = both.unbind(0)  # (workers, part, channels, 1..)
        else:
            by_beta = d.sum(axes, dtype=torch.float32, keepdim=True) if axes else d.float()
            by_gamma = torch.sub(parts, mean).mul_(d)
            by_gamma = (by_gamma.sum(axes, keepdim=True) if axes else by_gamma).mul_(inverse)
        if ctx.report is not None:
            ctx.report(by_gamma.flatten(0, 1).flatten(1), by_beta.flatten(0, 1).flatten(1))
        sum_beta, sum_gamma = by_beta.sum(1, keepdim=True), by_gamma.sum(1, keepdim=True)  # (workers, 1, channels, 1..)
        into = None
        if ctx.needs_input_grad[0]:
            count = parts[0].numel() // parts.shape[2]
            a = inverse if gamma is None else inverse * gamma.view(mean.shape[1:])
            b = a * inverse * sum_gamma / -count
            c = torch.addcmul(a * sum_beta / -count, b, mean, value=-1)
            into = _affine(x, b, c, delta, a)
        for_gamma = None if gamma is None else sum_gamma.sum(0).view_as(gamma)
        for_beta = sum_beta.sum(0).flatten() if ctx.has_beta else None
        return into, for_gamma, for_beta, None, None, None


def _affine(x: Tensor, scale: Tensor, shift: Tensor, delta: Tensor | None = None, factor: Tensor | None = None) -> Tensor:
    """``x * scale + shift``, and ``delta * factor`` added, with numbers by worker and channel."""
    fast = accelerated(x) if delta is None else accelerated(x, delta)
    backend = kernels.get(x.device) if fast else reference
    return backend.share_affine(x, scale, shift, delta, factor)


class _WorkerBatchNorm:
    """What the classes below add to torch's batch norms."""

    workers: int = 1

    def forward(self, x: Tensor) -> Tensor:
        module: Any = self
        if not module.training:
            result: Tensor = super().forward(x)  # type: ignore[misc]
            return result
        return self.normalise(x)

    def normalise(self, x: Tensor, report: Report | None = None) -> Tensor:
        """Training's forward; ``report`` gets the shares of gamma and beta, (samples, channels) each, in the backward pass."""
        module: Any = self
        private.get(module, "_check_input_dim")(x)
        if x.shape[0] % self.workers:
            raise BadConfiguration(f"{x.shape[0]} samples do not split into {self.workers} equal workers")
        mean, var, count = self._statistics(x)
        if module.track_running_stats:
            self._follow(mean, var, count)
        inverse = (var + module.eps).rsqrt_()
        result: Tensor = _WorkerNorm.apply(x, module.weight, module.bias, mean, inverse, report)  # type: ignore[no-untyped-call]
        return result

    def _statistics(self, x: Tensor) -> tuple[Tensor, Tensor, int]:
        with torch.no_grad():
            parts = x.unflatten(0, (self.workers, -1))
            axes = (1, *range(3, parts.ndim))
            count = parts[0].numel() // max(1, parts.shape[2])
            if count < 2:
                raise BadConfiguration(f"batch norm needs more than one value a channel and worker, got {count}")
            if x.dtype in (torch.float32, torch.float64):
                var, mean = torch.var_mean(parts, axes, correction=0, keepdim=True)
            else:  # the inputs carry 8 or 11 bits, so float32 leaves room for the difference of two squares
                mean = parts.sum(axes, keepdim=True, dtype=torch.float32).div_(count)
                norm = torch.linalg.vector_norm(parts, dim=axes, keepdim=True, dtype=torch.float32)
                var = norm.square_().div_(count).sub_(mean.square()).clamp_(min=0)
            return mean, var, count

    @torch.no_grad()
    def _follow(self, mean: Tensor, var: Tensor, count: int) -> None:
        module: Any = self
        module.num_batches_tracked.add_(1)
        momentum = module.momentum
        if momentum is None:
            momentum = 1.0 / float(module.num_batches_tracked)
        module.running_mean.lerp_(mean.mean(0).flatten().to(module.running_mean.dtype), momentum)
        unbiased = var.mean(0).flatten().mul_(count / (count - 1))
        module.running_var.lerp_(unbiased.to(module.running_var.dtype), momentum)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, workers={self.workers}"  # type: ignore[misc]


class WorkerBatchNorm1d(_WorkerBatchNorm, nn.BatchNorm1d):
    """BatchNorm1d with statistics of each worker's part of the batch."""


class WorkerBatchNorm2d(_WorkerBatchNorm, nn.BatchNorm2d):
    """BatchNorm2d with statistics of each worker's part of the batch."""


class WorkerBatchNorm3d(_WorkerBatchNorm, nn.BatchNorm3d):
    """BatchNorm3d with statistics of each worker's part of the batch."""


_KINDS: dict[type[nn.Module], type[nn.Module]] = {
    nn.BatchNorm1d: WorkerBatchNorm1d,
    nn.BatchNorm2d: WorkerBatchNorm2d,
    nn.BatchNorm3d: WorkerBatchNorm3d,
}


def worker_batch_norm(model: nn.Module, workers: int) -> nn.Module:
    """``model`` with every BatchNorm normalising each of ``workers`` equal consecutive parts of its batch by itself.

    In place: modules, parameters and buffers stay the same objects (an optimiser made before goes on working), and so does the
    state dict. ``workers=1`` gives ordinary batch norm back.

    >>> model = worker_batch_norm(nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)), workers=4)
    >>> model[1]
    WorkerBatchNorm2d(8, eps=1e-05, momentum=0.1, affine=True, ... workers=4)
    """
    if workers < 1:
        raise BadConfiguration(f"workers must be at least 1, got {workers}")
    back = {worker: plain for plain, worker in _KINDS.items()}
    for module in model.modules():
        kind = type(module)
        if isinstance(module, private.of("nn.modules.batchnorm._BatchNorm")) and kind not in _KINDS and kind not in back:
            raise BadConfiguration(f"worker_batch_norm knows BatchNorm1d, 2d and 3d, not {kind.__name__}")
        plain = back.get(kind, kind)
        if plain in _KINDS:
            module.__class__ = plain if workers == 1 else _KINDS[plain]
            if isinstance(module, _WorkerBatchNorm):
                module.workers = workers
    return model

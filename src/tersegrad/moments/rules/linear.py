"""Linear: W (o, i), y = x W^T + b.

One position a sample: c_z = delta_z x_z^T, so the squares are (delta^2)^T (x^2): one product, no per-sample tensor.
Several positions t (a sequence): c_z = sum_t delta_zt x_zt^T is formed sample by sample. Bias: c_z = sum_t delta_zt.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.nn import functional as F

from tersegrad.moments.joint import Part, joins
from tersegrad.moments.shares import Budget, Totals, Use, accelerated, fold
from tersegrad.moments.site import Site, autocast, detached


@dataclasses.dataclass(eq=False)
class LinearUse(Use):
    """saved = (x,); parameters = (weight, bias)."""

    weight: Parameter
    bias: Parameter | None
    samples: int
    axis: int

    @property
    def parameters(self) -> tuple[Parameter | None, ...]:  # type: ignore[override]
        return self.weight, self.bias

    def _rows(self, x: Tensor) -> Tensor:
        """(samples, positions, features)."""
        if self.axis:
            x = x.movedim(self.axis, 0)
        return x.reshape(self.samples, -1, x.shape[-1])

    def nbytes(self, saved: Sequence[Tensor], delta: Tensor) -> int:
        return self.weight.numel() * delta.element_size()

    def per_sample(self, saved: Sequence[Tensor], delta: Tensor, low: int, high: int) -> Sequence[Tensor | None]:
        x, d = self._rows(saved[0])[low:high], self._rows(delta)[low:high]
        weight = torch.bmm(d.mT, x) if self.weight.requires_grad else None
        bias = d.sum(1, dtype=torch.float32) if self.bias is not None and self.bias.requires_grad else None
        return weight, bias

    joint = "share_linear_squares"

    def part(self, saved: Sequence[Tensor], delta: Tensor) -> Part | None:
        x = saved[0]
        fits = x.ndim == 2 and self.axis == 0 and self.weight.requires_grad and accelerated(x, delta)
        return (x, delta) if fits else None

    def totals(self, saved: Sequence[Tensor], delta: Tensor, budget: Budget, gradient: bool) -> list[Totals | None]:
        x, weight, bias = saved[0], None, None
        if x.numel() != self.samples * x.shape[-1]:  # several positions a sample
            return super().totals(saved, delta, budget, gradient)
        part = budget.part(self.samples)
        x, d = x.reshape(budget.workers, part, x.shape[-1]), delta.reshape(budget.workers, part, delta.shape[-1])
        if self.weight.requires_grad:
            weight = Totals(product(d, x) if gradient else None, product(_squared(d), _squared(x)))
        if self.bias is not None and self.bias.requires_grad:
            bias = fold(d.flatten(0, 1), slice(0, budget.workers), budget.workers, gradient)
        return [weight, bias]


def product(d: Tensor, x: Tensor) -> Tensor:
    """(workers, n, o), (workers, n, i) -> (workers, o, i) in float32."""
    if d.dtype == torch.float32:
        return torch.bmm(d.mT, x)
    if d.is_cuda:
        return torch.bmm(d.mT, x, out_dtype=torch.float32)
    return torch.bmm(d.mT, x).float()


def _squared(x: Tensor) -> Tensor:
    return x.float().square_() if x.dtype == torch.float16 else x.square()  # squares leave float16's range


def linear(site: Site, x: Tensor) -> Tensor:
    """Rule of Linear."""
    module = site.module
    weight: Parameter = module.weight  # type: ignore[assignment]
    bias: Parameter | None = module.bias  # type: ignore[assignment]
    x = autocast(x)
    use = LinearUse(weight, bias, x.shape[site.axis], site.axis)
    if site.collector.workers == 1 and joins(x) and accelerated(x):  # a joint launch finds the squares alone
        return site.observe(F.linear(x, weight, bias), use, (x,), own=weight.requires_grad)
    return site.supply(F.linear(x, weight.detach(), detached(bias)), use, (x,))

"""Convolutions: the share of a sample is its own weight gradient, one product of delta with the unfolded input.

With U the windows of the padded input, c_z = delta_z U_z^T (per group). The products are formed once, by sample; their sum is the
gradient, so a sample's squares cost one pass over them. Note that delta^2 correlated with x^2 would be wrong: it lacks the cross
terms between positions.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.nn import functional as F

from tersegrad import kernels
from tersegrad.core import private
from tersegrad.moments.shares import Budget, Totals, Use, accelerated
from tersegrad.moments.site import Site, autocast, detached


@dataclasses.dataclass(eq=False)
class ConvolutionUse(Use):
    """saved = (x,); parameters = (weight, bias)."""

    weight: Parameter
    bias: Parameter | None
    samples: int
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    padding: Sequence[int]  # last axis first, both sides, as F.pad takes it
    padding_mode: str
    groups: int

    @property
    def parameters(self) -> tuple[Parameter | None, ...]:  # type: ignore[override]
        return self.weight, self.bias

    def nbytes(self, saved: Sequence[Tensor], delta: Tensor) -> int:
        windows = self.groups * math.prod(self.weight.shape[1:]) * math.prod(delta.shape[2:])
        return (self.weight.numel() + windows) * delta.element_size()

    def per_sample(self, saved: Sequence[Tensor], delta: Tensor, low: int, high: int) -> Sequence[Tensor | None]:
        x, d = saved[0][low:high], delta[low:high]
        weight = bias = None
        if self.weight.requires_grad:
            weight = self._weight(x, d)
        if self.bias is not None and self.bias.requires_grad:
            bias = d.flatten(2).sum(2, dtype=torch.float32)
        return weight, bias

    def totals(self, saved: Sequence[Tensor], delta: Tensor, budget: Budget, gradient: bool) -> list[Totals | None]:
        found = self._found(saved[0], delta, budget.workers)
        if found is None:
            return super().totals(saved, delta, budget, gradient)
        budget.part(self.samples)
        return [
            None if pair is None else Totals(*pair) for pair in self._views(found, (budget.workers,), (2 * found.shape[2],))
        ]

    def pairs(self, saved: Sequence[Tensor], delta: Tensor) -> list[tuple[Tensor, Tensor] | None] | None:
        found = self._found(saved[0], delta, 1)
        return None if found is None else self._views(found)

    def _found(self, x: Tensor, delta: Tensor, workers: int) -> Tensor | None:
        """What the kernel makes of them, where it can: (workers, 2, row)."""
        if self.groups != 1 or self.padding_mode != "zeros" or not self.weight.requires_grad:
            return None
        if not accelerated(x, delta):
            delta = delta.to(memory_format=torch.channels_last) if _channels_last(x) else delta
            if not accelerated(x, delta):
                return None
        right, left, bottom, top = self.padding
        if right != left or bottom != top:
            x, left, top = F.pad(x, self.padding).contiguous(memory_format=torch.channels_last), 0, 0
        kernel, bias = tuple(self.weight.shape[2:]), self.bias is not None and self.bias.requires_grad
        return kernels.get(x.device).share_convolution(x, delta, kernel, self.stride, self.dilation, (top, left), workers, bias)

    def _views(
        self, found: Tensor, axis: tuple[int, ...] = (), stride: tuple[int, ...] = ()
    ) -> list[tuple[Tensor, Tensor] | None]:
        """(sums, squares) of weight and bias in it, with an axis of workers where one is given."""
        row, end, weight, bias = _places(self.weight.shape, found.shape[2], axis, stride)
        view = found.as_strided
        pairs: list[tuple[Tensor, Tensor] | None] = [(view(*weight, 0), view(*weight, row))]
        pairs.append(None if bias is None else (view(*bias, end), view(*bias, row + end)))
        return pairs

    def _weight(self, x: Tensor, d: Tensor) -> Tensor:
        kernel = self.weight.shape[2:]
        if self.groups == 1 and _channels_last(x):
            last = (0, 0, *self.padding)
            padded = _pad(x.movedim(1, -1), last, self.padding_mode)  # (n, *size, i)
            patches = windows(padded, 1, kernel, self.stride, self.dilation, d.shape[2:])  # (n, *out, *kernel, i)
            n, positions = x.shape[0], math.prod(d.shape[2:])
            rows = d.movedim(1, -1).reshape(n, positions, -1)
            shares = torch.bmm(rows.mT, patches.reshape(n, positions, -1))  # (n, o, *kernel * i)
            return shares.reshape(n, -1, *kernel, x.shape[1]).movedim(-1, 2)
        padded = _pad(x, self.padding, self.padding_mode)
        patches = windows(
            padded, 2, kernel, self.stride, self.dilation, d.shape[2:], kernel_first=True
        )  # (n, i, *kernel, *out)
        n, g = x.shape[0], self.groups
        columns = patches.reshape(n * g, x.shape[1] // g * math.prod(kernel), -1)
        shares = torch.bmm(d.reshape(n * g, d.shape[1] // g, -1), columns.mT)
        return shares.reshape(n, *self.weight.shape)


_Place = tuple[tuple[int, ...], tuple[int, ...]]


@functools.cache
def _places(
    shape: tuple[int, ...], row: int, axis: tuple[int, ...], stride: tuple[int, ...]
) -> tuple[int, int, _Place, _Place | None]:
    """Of a row of so many numbers, where the bias begins, and how weight and bias lie in it, as (size, stride)."""
    o, i, height, width = shape
    each = i * height * width
    # A row has the weight as (o, height, width, i), then the bias.
    weight = (*axis, o, i, height, width), (*stride, each, 1, width * i, i)
    return row, o * each, weight, None if row == o * each else ((*axis, o), (*stride, 1))


def windows(
    x: Tensor,
    axis: int,
    kernel: Sequence[int],
    stride: Sequence[int],
    dilation: Sequence[int],
    out: Sequence[int],
    kernel_first: bool = False,
) -> Tensor:
    """View of ``x`` whose spatial axes (from ``axis`` on) are replaced by (*out, *kernel), or the reverse; trailing axes are kept."""
    end = axis + len(kernel)
    spatial = x.stride()[axis:end]
    places = ([*out], [s * k for s, k in zip(spatial, stride, strict=True)])
    inside = ([*kernel], [s * k for s, k in zip(spatial, dilation, strict=True)])
    first, second = (inside, places) if kernel_first else (places, inside)
    size = [*x.shape[:axis], *first[0], *second[0], *x.shape[end:]]
    return x.as_strided(size, [*x.stride()[:axis], *first[1], *second[1], *x.stride()[end:]])


def _channels_last(x: Tensor) -> bool:
    if x.ndim == 4:
        return x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous()
    return x.ndim == 5 and x.is_contiguous(memory_format=torch.channels_last_3d) and not x.is_contiguous()


def _pad(x: Tensor, padding: Sequence[int], mode: str) -> Tensor:
    if not any(padding):
        return x
    return F.pad(x, padding) if mode == "zeros" else F.pad(x, padding, mode=mode)


def convolution(site: Site, x: Tensor) -> Tensor:
    """Rule of Conv1d, 2d and 3d."""
    module: Any = site.module
    weight, bias = module.weight, module.bias
    if x.ndim == weight.ndim - 1:  # one sample without a batch axis
        return convolution(site, x.unsqueeze(0)).squeeze(0)
    x = autocast(x)
    use = ConvolutionUse(
        weight,
        bias,
        x.shape[0],
        module.stride,
        module.dilation,
        private.get(module, "_reversed_padding_repeated_twice"),
        module.padding_mode,
        module.groups,
    )
    out = private.get(module, "_conv_forward")(x, weight.detach(), detached(bias))
    return site.supply(out, use, (x,))


@dataclasses.dataclass(frozen=True, eq=False)
class TransposedUse(Use):
    """A transposed convolution is a convolution with input and delta exchanged; saved = (x,); parameters = (weight, bias)."""

    weight: Parameter  # (i, o / groups, *kernel)
    bias: Parameter | None
    samples: int
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    padding: tuple[int, ...]
    groups: int

    @property
    def parameters(self) -> tuple[Parameter | None, ...]:  # type: ignore[override]
        return self.weight, self.bias

    def nbytes(self, saved: Sequence[Tensor], delta: Tensor) -> int:
        columns = self.groups * math.prod(self.weight.shape[1:]) * math.prod(saved[0].shape[2:])
        return (self.weight.numel() + columns) * delta.element_size()

    def per_sample(self, saved: Sequence[Tensor], delta: Tensor, low: int, high: int) -> Sequence[Tensor | None]:
        x, d = saved[0][low:high], delta[low:high]
        weight = bias = None
        if self.weight.requires_grad:
            n, g, kernel = x.shape[0], self.groups, self.weight.shape[2:]
            padded = _pad(d.contiguous(), tuple(p for p in reversed(self.padding) for _ in (0, 1)), "zeros")
            patches = windows(padded, 2, kernel, self.stride, self.dilation, x.shape[2:], kernel_first=True)
            columns = patches.reshape(n * g, self.weight.shape[1] * math.prod(kernel), -1)
            weight = torch.bmm(x.reshape(n * g, x.shape[1] // g, -1), columns.mT).reshape(n, *self.weight.shape)
        if self.bias is not None and self.bias.requires_grad:
            bias = d.flatten(2).sum(2, dtype=torch.float32)
        return weight, bias


def transposed_convolution(site: Site, x: Tensor, output_size: list[int] | None = None) -> Tensor:
    """Rule of ConvTranspose1d, 2d and 3d."""
    module: Any = site.module
    if x.ndim == module.weight.ndim - 1:
        return transposed_convolution(site, x.unsqueeze(0), output_size).squeeze(0)
    x = autocast(x)
    extra = private.get(module, "_output_padding")(
        x, output_size, module.stride, module.padding, module.kernel_size, x.ndim - 2, module.dilation
    )
    run = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}[x.ndim - 2]
    bias = detached(module.bias)
    out = run(x, module.weight.detach(), bias, module.stride, module.padding, extra, module.groups, module.dilation)
    use = TransposedUse(module.weight, module.bias, x.shape[0], module.stride, module.dilation, module.padding, module.groups)
    return site.supply(out, use, (x,))

"""Shares: what one use of a parameter contributes, sample by sample, and how shares are summed and squared.

c_z, the share of sample z, is the part of the gradient that flows through z's own activations: for a weight W used as
``y = x W^T`` it is delta_z^T x_z with delta = dLoss/dy as autograd gives it, so that the sum over z of c_z is the gradient of
the loss that was given, whether that loss was a mean or a sum.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Iterator, Sequence
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import Parameter

from tersegrad import kernels
from tersegrad.core.errors import BadConfiguration
from tersegrad.moments.joint import Kind, Part


@dataclasses.dataclass(frozen=True)
class Totals:
    """Per worker: the sum of the shares (None where nobody asked) and the sum of their squares, float32."""

    gradient: Tensor | None  # (workers, *shape)
    squares: Tensor  # (workers, *shape)


@dataclasses.dataclass(frozen=True)
class Budget:
    """How a batch is cut: into equal consecutive parts by worker, and into chunks of so many bytes of per-sample shares."""

    workers: int
    chunk_bytes: int

    def part(self, samples: int) -> int:
        """The samples of one worker."""
        if samples % self.workers:
            raise BadConfiguration(f"{samples} samples do not split into {self.workers} equal workers")
        return samples // self.workers

    def chunks(self, samples: int, nbytes: int) -> Iterator[tuple[int, int, slice]]:
        """(first sample, one past the last, workers they belong to), where one sample's shares take ``nbytes``.

        A chunk is a piece of one worker's part, or several whole parts.
        """
        part = self.part(samples)
        size = max(1, min(samples, self.chunk_bytes // max(1, nbytes)))
        step = size // part * part if size >= part else size
        if step < part:
            for worker in range(self.workers):
                for low in range(worker * part, (worker + 1) * part, step):
                    yield low, min(low + step, (worker + 1) * part), slice(worker, worker + 1)
        else:
            for low in range(0, samples, step):
                high = min(low + step, samples)
                yield low, high, slice(low // part, high // part)


class Use(abc.ABC):
    """One use of some parameters in a forward pass: from what was saved and delta to the shares.

    ``parameters`` may hold parameters that need no gradient; nothing is asked of them.
    """

    parameters: tuple[Parameter | None, ...]
    samples: int
    joint: ClassVar[Kind | None] = None  # the operation that finds the squares of several such uses at once

    def part(self, saved: Sequence[Tensor], delta: Tensor) -> Part | None:
        """What that operation takes of this use; None where it cannot."""
        return None

    def pairs(self, saved: Sequence[Tensor], delta: Tensor) -> list[tuple[Tensor, Tensor] | None] | None:
        """What ``totals`` gives for one worker, without the axis of workers, where a faster backend has both; None otherwise."""
        return None

    @abc.abstractmethod
    def per_sample(self, saved: Sequence[Tensor], delta: Tensor, low: int, high: int) -> Sequence[Tensor | None]:
        """The shares of samples low..high of every parameter: (high - low, *shape), None where it needs no gradient."""

    def nbytes(self, saved: Sequence[Tensor], delta: Tensor) -> int:
        """Bytes that ``per_sample`` takes for one sample, working memory included."""
        return sum(p.numel() for p in self.wanted) * delta.element_size()

    @property
    def wanted(self) -> tuple[Parameter, ...]:
        return tuple(p for p in self.parameters if p is not None and p.requires_grad)

    def totals(self, saved: Sequence[Tensor], delta: Tensor, budget: Budget, gradient: bool) -> list[Totals | None]:
        """Sums and sums of squares over each worker's samples, chunk by chunk."""
        found: list[Totals | None] = [None] * len(self.parameters)
        for low, high, workers in budget.chunks(self.samples, self.nbytes(saved, delta)):
            for k, shares in enumerate(self.per_sample(saved, delta, low, high)):
                if shares is not None:
                    found[k] = fold(shares, workers, budget.workers, gradient, found[k])
        return found


def fold(shares: Tensor, workers: slice, count: int, gradient: bool, into: Totals | None = None) -> Totals:
    """Add (samples, *shape) shares, all of ``workers`` out of ``count``, to the totals; no float32 copy of them is made."""
    if shares.dtype == torch.float64:
        shares = shares.float()
    grouped = shares.unflatten(0, (workers.stop - workers.start, -1))
    if shares.is_cuda or shares[0].numel() < 1 << 12:
        squares = torch.linalg.vector_norm(grouped, dim=1, dtype=torch.float32).square_()
        part = Totals(grouped.sum(1, dtype=torch.float32) if gradient else None, squares)
        if into is None and squares.shape[0] == count:
            return part
        into = into or _empty(grouped, count, gradient)
        into.squares[workers] += part.squares
        if into.gradient is not None and part.gradient is not None:
            into.gradient[workers] += part.gradient
        return into
    into = into or _empty(grouped, count, gradient)
    for worker, group in zip(range(workers.start, workers.stop), grouped, strict=True):
        squares = into.squares[worker]
        total = None if into.gradient is None else into.gradient[worker]
        # A sample's shares are read twice while they are in the cache; reducing over samples is slower.
        for one in group:
            squares.addcmul_(one, one)
            if total is not None:
                total += one
    return into


def _empty(grouped: Tensor, count: int, gradient: bool) -> Totals:
    # Keeps the memory format, so that adding runs through memory in order.
    like = grouped[0, 0]
    zeros = torch.zeros_like(
        like.unsqueeze(0).expand(count, *like.shape), dtype=torch.float32, memory_format=torch.preserve_format
    )
    return Totals(torch.zeros_like(zeros) if gradient else None, zeros)


@dataclasses.dataclass(frozen=True, eq=False)
class Grouped(Use):
    """A use whose rows are consecutive groups of ``size`` a sample: frames of a clip, windows of an image, flattened sequences."""

    inner: Use
    size: int

    @property
    def parameters(self) -> tuple[Parameter | None, ...]:  # type: ignore[override]
        return self.inner.parameters

    @property
    def samples(self) -> int:  # type: ignore[override]
        return self.inner.samples // self.size

    def nbytes(self, saved: Sequence[Tensor], delta: Tensor) -> int:
        return self.inner.nbytes(saved, delta) * self.size

    def per_sample(self, saved: Sequence[Tensor], delta: Tensor, low: int, high: int) -> Sequence[Tensor | None]:
        rows = self.inner.per_sample(saved, delta, low * self.size, high * self.size)
        return [None if r is None else r.unflatten(0, (high - low, self.size)).sum(1, dtype=torch.float32) for r in rows]


_HALVES = (torch.bfloat16, torch.float16)
_LAST = torch.channels_last


def accelerated(*tensors: Tensor) -> bool:
    """Whether a faster backend can run on ``tensors``: 16-bit, channels-last (or without positions), on a CUDA device."""
    first = tensors[0]
    dtype = first.dtype
    if not first.is_cuda or dtype not in _HALVES:
        return False
    for t in tensors:
        axes = t.ndim
        if t.dtype != dtype or not (t.is_contiguous(memory_format=_LAST) if axes == 4 else axes == 2 and t.is_contiguous()):
            return False
    return kernels.faster(first.device, "share_affine")  # which comes with all the others

"""Shares: what one use of a parameter contributes, sample by sample, and how shares are summed and squared.

c_z, the share of sample z, is the part of the gradient that flows through z's own activations: for a weight W used as
``y = x W^T`` it is delta_z^T x_z with delta = dLoss/dy as autograd gives it, so that the sum over z of c_z is the gradient of
the loss that was given, whether that loss was a mean or a sum.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.nn import Parameter

from tersegrad.core.errors import BadConfiguration


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
                if shares is None:
                    continue
                part = fold(shares, workers.stop - workers.start, gradient)
                if low == 0 and high == self.samples:
                    found[k] = part
                    continue
                whole = found[k]
                if whole is None:
                    whole = found[k] = _empty(part, budget.workers)
                whole.squares[workers] += part.squares
                if whole.gradient is not None:
                    whole.gradient[workers] += part.gradient
        return found


def _empty(like: Totals, workers: int) -> Totals:
    zeros = like.squares.new_zeros((workers, *like.squares.shape[1:]))
    return Totals(None if like.gradient is None else torch.zeros_like(zeros), zeros)


def fold(shares: Tensor, workers: int, gradient: bool) -> Totals:
    """Sums over the samples of each worker of (samples, *shape); no float32 copy of the shares is made."""
    grouped = shares.unflatten(0, (workers, -1))
    squares = torch.linalg.vector_norm(grouped, dim=1, dtype=torch.float32).square_()
    return Totals(grouped.sum(1, dtype=torch.float32) if gradient else None, squares)


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

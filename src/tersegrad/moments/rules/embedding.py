"""Embedding: c_z of row v is the sum of delta over the places where sample z looked row v up.

Repeated ids inside a sample are summed before squaring: the lookups are sorted by (sample, id), equal neighbours are added, and
the sums are squared into their rows. No per-sample table is made, and nothing waits for the device.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from tersegrad.moments.shares import Budget, Totals, Use
from tersegrad.moments.site import Site


@dataclasses.dataclass(frozen=True, eq=False)
class EmbeddingUse(Use):
    """saved = (ids,); parameters = (weight,)."""

    weight: Parameter
    samples: int
    axis: int
    padding_idx: int | None
    by_frequency: bool

    @property
    def parameters(self) -> tuple[Parameter | None, ...]:  # type: ignore[override]
        return (self.weight,)

    def _lookups(self, ids: Tensor, delta: Tensor) -> tuple[Tensor, Tensor]:
        """(samples, lookups) ids and their (samples, lookups, width) gradients as the table's gradient counts them."""
        flat = ids.movedim(self.axis, 0).reshape(self.samples, -1)
        d = delta.movedim(self.axis, 0).reshape(*flat.shape, -1).float()
        if self.by_frequency:
            d = d / torch.bincount(ids.flatten(), minlength=self.weight.shape[0])[flat].unsqueeze(-1)
        if self.padding_idx is not None:
            d = d * (flat != self.padding_idx).unsqueeze(-1)
        return flat, d

    def per_sample(self, saved: Sequence[Tensor], delta: Tensor, low: int, high: int) -> Sequence[Tensor | None]:
        ids, d = (t[low:high] for t in self._lookups(saved[0], delta))
        shares = d.new_zeros((high - low, *self.weight.shape))
        return (shares.scatter_add_(1, ids.unsqueeze(-1).expand_as(d), d),)

    def totals(self, saved: Sequence[Tensor], delta: Tensor, budget: Budget, gradient: bool) -> list[Totals | None]:
        ids, d = self._lookups(saved[0], delta)
        rows, part = self.weight.shape[0], budget.part(self.samples)
        sample = torch.arange(self.samples, device=ids.device).unsqueeze(1)
        table = d.new_zeros((budget.workers * rows, d.shape[-1]))
        keys, order = (sample * rows + ids).flatten().sort()
        d = d.reshape(-1, d.shape[-1])[order]
        fresh = torch.ones_like(keys)
        fresh[1:] = keys[1:] != keys[:-1]
        group = fresh.cumsum(0) - 1
        sums = torch.zeros_like(d).index_add_(0, group, d)
        row = keys // rows // part * rows + keys % rows  # of (worker, id)
        squares = table.index_add(0, torch.zeros_like(row).scatter_(0, group, row), sums.square_())
        shape = (budget.workers, *self.weight.shape)
        return [Totals(table.index_add_(0, row, d).view(shape) if gradient else None, squares.view(shape))]


def embedding(site: Site, ids: Tensor) -> Tensor:
    """Rule of Embedding."""
    module: Any = site.module
    if module.max_norm is not None:
        # Looked-up rows are shrunk in place, as F.embedding does, before the use is recorded.
        with torch.no_grad():
            torch.embedding_renorm_(module.weight, ids.contiguous(), module.max_norm, module.norm_type)
    out = torch.nn.functional.embedding(
        ids, module.weight, module.padding_idx, None, 2.0, module.scale_grad_by_freq, module.sparse
    )
    use = EmbeddingUse(module.weight, ids.shape[site.axis], site.axis, module.padding_idx, module.scale_grad_by_freq)
    return site.observe(out, use, (ids,))

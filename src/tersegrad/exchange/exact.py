"""The exact mean of float32 vectors in two rounds.

Hierarchical exchanges take it inside a node, PowerSGD of its factors, and a change of exchange of the residuals.

A reduce-scatter by all-to-all and an all-gather; sums run in rank order, so every rank has the same bits, and they are those of
virtual ranks. (A library's all-reduce adds in an order of its own.)
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tersegrad.exchange.steps import AllGather, AllToAll, Steps


def sum_in_order(vectors: Sequence[Tensor]) -> Tensor:
    """The sum of vectors, from the first to the last."""
    total = vectors[0].clone()
    for vector in vectors[1:]:
        total += vector
    return total


def exact_mean(x: Tensor, size: int) -> Steps[None]:
    """The mean over ranks of a flat float32 vector; 2 (p-1)/p of its bytes leave each rank."""
    width = -(-x.numel() // size)
    padded = torch.zeros(size * width, dtype=torch.float32, device=x.device)
    padded[: x.numel()] = x
    splits = (4 * width,) * size
    arrived = yield AllToAll(padded.view(torch.uint8), splits, splits)
    mean = sum_in_order(arrived.view(torch.float32).split(width) if width else [padded]).mul_(1.0 / size)
    everyone = yield AllGather(mean.view(torch.uint8))
    return everyone.view(torch.float32)[: x.numel()].clone(), None

"""Inputs that several benchmarks share; made once, because 64 Mi samples take seconds."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from tersegrad import bench


@functools.lru_cache(maxsize=1)
def gaussian(numel: int) -> Tensor:
    """Independent standard normal samples."""
    return bench.draw("gaussian", numel)


def mostly_zero(numel: int, share: float = 0.005) -> Tensor:
    """Gaussian samples of which all but ``share`` are exactly zero, at random places: the gradient of an embedding."""
    generator = torch.Generator().manual_seed(1)
    x = torch.zeros(numel)
    count = max(1, round(share * numel))
    where = torch.randint(numel, (count,), generator=generator)
    x[where] = torch.randn(count, generator=generator)
    return x

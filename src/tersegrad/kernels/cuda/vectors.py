"""Whole vectors by CUDA kernels: whether all is finite, what settles them after the fact, and permutations by a key."""

from __future__ import annotations

import torch
from torch import Tensor

from tersegrad.kernels.cuda.loader import launch

__all__ = ["all_finite", "permuted_gather", "permuted_scatter", "permuted_scatter_add", "revert", "settle"]

SOURCE = "vectors.cu"
THREADS, BLOCKS = 256, 1056
# As in vectors.cu.
GATHER, SCATTER, SCATTER_ADD = 1, 2, 3


def _blocks(n: int) -> int:
    return min(-(-n // THREADS), BLOCKS)


def all_finite(x: Tensor) -> Tensor:
    finite = torch.ones((), dtype=torch.bool, device=x.device)
    launch(SOURCE, "not_finite", _blocks(x.numel()), THREADS, x.contiguous(), x.numel(), finite)
    return finite


def settle(values: Tensor, good: Tensor, factor: Tensor | None = None) -> Tensor:
    if not values.is_contiguous():
        return values.copy_(settle(values.contiguous(), good, factor))
    by = good if factor is None else factor
    launch(SOURCE, "settle", _blocks(values.numel()), THREADS, values, values.numel(), good, by, int(factor is not None))
    return values


def revert(values: Tensor, good: Tensor, before: Tensor) -> Tensor:
    if not values.is_contiguous():
        return values.copy_(revert(values.contiguous(), good, before))
    nbytes = values.numel() * values.element_size()
    launch(SOURCE, "revert", _blocks(nbytes), THREADS, values, nbytes, good, before.contiguous())
    return values


def _permuted(what: int, keys: list[int], rotation: int, weight: float, values: Tensor, x: Tensor) -> None:
    n, count = x.numel(), values.numel()
    sizes = (rotation, n, max(n - 1, 0).bit_length(), count, float(weight))
    launch(SOURCE, "permuted", -(-count // THREADS), THREADS, what, *keys, *sizes, values, x)


def permuted_gather(x: Tensor, keys: list[int], rotation: int, k: int) -> Tensor:
    values = torch.empty(k, dtype=torch.float32, device=x.device)
    _permuted(GATHER, keys, rotation, 0.0, values, x.contiguous())
    return values


def permuted_scatter(values: Tensor, keys: list[int], rotation: int, out: Tensor) -> None:
    _permuted(SCATTER, keys, rotation, 0.0, values.contiguous(), out.zero_())


def permuted_scatter_add(values: Tensor, keys: list[int], rotation: int, weight: float, out: Tensor) -> None:
    _permuted(SCATTER_ADD, keys, rotation, weight, values.contiguous(), out)

"""Sparse vectors in plain torch: choosing coordinates, putting values back, keyed permutations."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

__all__ = [
    "all_finite",
    "permuted_gather",
    "permuted_indices",
    "permuted_scatter",
    "permuted_scatter_add",
    "select_compact",
    "select_sample_key",
    "select_top_k",
    "sparse_scatter",
    "sparse_scatter_add",
]

INFINITE_KEY = 0x7F800000


def index_dtype(numel: int) -> torch.dtype:
    return torch.int32 if numel <= 1 << 31 else torch.int64


def _keys(x: Tensor) -> Tensor:
    return x.view(torch.int32) & 0x7FFFFFFF


def all_finite(x: Tensor) -> bool:
    return bool(torch.isfinite(x).all())


def select_top_k(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    keys = _keys(x)
    k = min(k, int((keys > 0).sum()))
    if k == 0:
        return torch.empty(0, dtype=index_dtype(x.numel()), device=x.device), x[:0]
    threshold = torch.topk(keys, k, sorted=True).values[-1]
    larger, equal = keys > threshold, keys == threshold
    first_ties = equal & (torch.cumsum(equal, 0) <= k - larger.sum())
    indices = torch.nonzero(larger | first_ties).reshape(-1)
    return indices.to(index_dtype(x.numel())), x[indices]


def sample_positions(numel: int, device: torch.device | str = "cpu") -> Tensor:
    """Coordinates of the sample: runs of 16, one in each of equal strata, placed there by a multiplicative hash."""
    everything = numel // 16
    runs = min(everything, max(64, min(everything // 16, 4096)))
    if runs == 0:
        return torch.arange(numel, device=device)
    j = torch.arange(runs, dtype=torch.int64, device=device)
    first = j * everything // runs
    width = (j + 1) * everything // runs - first
    run = first + ((j * 0x9E3779B1 & 0xFFFFFFFF) * width >> 32)
    return (run[:, None] * 16 + torch.arange(16, device=device)).reshape(-1)


def select_sample_key(x: Tensor, k: int) -> int:
    keys = _keys(x[sample_positions(x.numel(), x.device)])
    if keys.numel() == 0 or k == 0:
        return INFINITE_KEY
    rank = -(-k * keys.numel() // x.numel())
    key = int(torch.topk(keys, rank).values[-1]) if rank <= keys.numel() else 0
    return min(max(key, 1), INFINITE_KEY)


def select_compact(x: Tensor, key: int, limit: int) -> tuple[Tensor, Tensor, int]:
    indices = torch.nonzero(_keys(x) >= max(key, 1)).reshape(-1)
    kept = indices[:limit]
    return kept.to(index_dtype(x.numel())), x[kept], indices.numel()


def check_indices(indices: Tensor, numel: int) -> None:
    if not _increasing(indices, numel):
        raise ValueError("indices must increase strictly and lie within the vector")


def sparse_scatter(indices: Tensor, values: Tensor, out: Tensor) -> None:
    check_indices(indices, out.numel())
    out.zero_()
    out[indices.long()] = values


def sparse_scatter_add(indices: Tensor, values: Tensor, weight: float, out: Tensor) -> None:
    check_indices(indices, out.numel())
    at = indices.long()
    out[at] = out[at] + values * torch.tensor(weight, dtype=torch.float32, device=out.device)


def _increasing(indices: Tensor, numel: int) -> bool:
    if indices.numel() == 0:
        return True
    steps = bool((indices[1:] > indices[:-1]).all())
    return steps and int(indices[0]) >= 0 and int(indices[-1]) < numel


# ---- permutations -----------------------------------------------------------------------------------------------------------


def _mix(h: Tensor) -> Tensor:
    """A 32-bit hash on int64 tensors; products wrap modulo 2^64, whose low half is what counts."""
    h = h ^ h >> 16
    h = h * 0x7FEB352D & 0xFFFFFFFF
    h = h ^ h >> 15
    h = h * 0x846CA68B & 0xFFFFFFFF
    return h ^ h >> 16


def _network(keys: list[int], bits: int) -> Callable[[Tensor], Tensor]:
    left_bits = bits // 2
    right_bits = bits - left_bits
    left_mask, right_mask = (1 << left_bits) - 1, (1 << right_bits) - 1

    def apply(v: Tensor) -> Tensor:
        a, b = v >> right_bits, v & right_mask
        for r in range(0, len(keys), 2):
            a = a ^ _mix(b + keys[r] & 0xFFFFFFFF) & left_mask
            b = b ^ _mix(a + keys[r + 1] & 0xFFFFFFFF) & right_mask
        return a << right_bits | b

    return apply


def permuted_indices(keys: list[int], rotation: int, numel: int, k: int) -> Tensor:
    return _images(keys, rotation, numel, k, torch.device("cpu")).to(index_dtype(numel))


def _images(keys: list[int], rotation: int, numel: int, k: int, device: torch.device) -> Tensor:
    apply = _network(keys, max(numel - 1, 0).bit_length())
    v = apply(torch.arange(k, dtype=torch.int64, device=device))
    while True:
        outside = v >= numel
        if not bool(outside.any()):
            break
        v[outside] = apply(v[outside])
    return torch.where(v + rotation >= numel, v + rotation - numel, v + rotation)


def permuted_gather(x: Tensor, keys: list[int], rotation: int, k: int) -> Tensor:
    return x[_images(keys, rotation, x.numel(), k, x.device)]


def permuted_scatter(values: Tensor, keys: list[int], rotation: int, out: Tensor) -> None:
    out.zero_()
    out[_images(keys, rotation, out.numel(), values.numel(), out.device)] = values


def permuted_scatter_add(values: Tensor, keys: list[int], rotation: int, weight: float, out: Tensor) -> None:
    at = _images(keys, rotation, out.numel(), values.numel(), out.device)
    out[at] = out[at] + values * torch.tensor(weight, dtype=torch.float32, device=out.device)

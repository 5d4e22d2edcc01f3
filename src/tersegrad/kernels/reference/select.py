"""Sparse vectors in plain torch: choosing coordinates, putting values back, keyed permutations."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from tersegrad.core import host
from tersegrad.core.numbers import HUGE

__all__ = [
    "all_finite",
    "permuted_gather",
    "permuted_indices",
    "permuted_scatter",
    "permuted_scatter_add",
    "revert",
    "select_compact",
    "select_sample_key",
    "select_top_k",
    "select_top_k_of_sum",
    "settle",
    "sparse_scatter",
    "sparse_scatter_add",
]

INFINITE_KEY = 0x7F800000


def index_dtype(numel: int) -> torch.dtype:
    return torch.int32 if numel <= 1 << 31 else torch.int64


def _keys(x: Tensor) -> Tensor:
    return x.view(torch.int32) & 0x7FFFFFFF


def all_finite(x: Tensor) -> Tensor:
    return torch.isfinite(x).all()


def compacted(x: Tensor, chosen: Tensor, room: int) -> tuple[Tensor, Tensor, Tensor]:
    """Indices and values of the first ``room`` coordinates that are chosen, zeros behind them, and how many there are."""
    place = torch.cumsum(chosen, 0) - 1
    # Whatever has no place goes behind the last one.
    place = torch.where(chosen & (place < room), place, room)
    at = torch.arange(x.numel(), dtype=index_dtype(x.numel()), device=x.device)
    indices = torch.zeros(room + 1, dtype=at.dtype, device=x.device).scatter_(0, place, at)
    values = torch.zeros(room + 1, dtype=x.dtype, device=x.device).scatter_(0, place, x)
    return indices[:room], values[:room], chosen.sum()


def revert(values: Tensor, good: Tensor, before: Tensor) -> Tensor:
    return values.copy_(torch.where(good, values, before))


def settle(values: Tensor, good: Tensor, factor: Tensor | None = None) -> Tensor:
    if values.is_cpu:
        if not good:
            return values.fill_(math.nan)
        return values if factor is None or factor == 1 else values.mul_(factor).clamp_(-HUGE, HUGE)
    if factor is not None:
        values.copy_(torch.where(factor == 1, values, (values * factor).clamp_(-HUGE, HUGE)))
    return values.masked_fill_(~good, math.nan)


def select_top_k(x: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    keys, k = _keys(x), min(k, x.numel())
    if k == 0:
        return compacted(x, torch.zeros_like(keys, dtype=torch.bool), 0)
    threshold = torch.topk(keys, k, sorted=True).values[-1]
    larger, equal = keys > threshold, (keys == threshold) & (keys > 0)
    first_ties = equal & (torch.cumsum(equal, 0) <= k - larger.sum())
    return compacted(x, larger | first_ties, k)


def select_top_k_of_sum(x: Tensor, y: Tensor, rest: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    indices, values, count = select_top_k(torch.add(x, y, out=rest), k)
    # Behind those that were chosen there is room that nothing fills.
    rest[indices[: int(count)].long()] = 0
    return indices, values, count


def sample_runs(numel: int) -> int:
    """How many runs of 16 a sample has; none where it is all there is."""
    everything = numel // 16
    return min(everything, max(64, min(everything // 16, 4096)))


def sample_positions(numel: int, device: torch.device | str = "cpu") -> Tensor:
    """Coordinates of the sample: runs of 16, one in each of equal strata, placed there by a multiplicative hash."""
    everything, runs = numel // 16, sample_runs(numel)
    if runs == 0:
        return torch.arange(numel, device=device)
    j = torch.arange(runs, dtype=torch.int64, device=device)
    first = j * everything // runs
    width = (j + 1) * everything // runs - first
    run = first + ((j * 0x9E3779B1 & 0xFFFFFFFF) * width >> 32)
    return (run[:, None] * 16 + torch.arange(16, device=device)).reshape(-1)


def select_sample_key(x: Tensor, k: int) -> Tensor:
    keys = _keys(x[sample_positions(x.numel(), x.device)])
    if keys.numel() == 0 or k == 0:
        return torch.full((), INFINITE_KEY, dtype=torch.int32, device=x.device)
    rank = -(-k * keys.numel() // x.numel())
    key = torch.topk(keys, rank).values[-1] if rank <= keys.numel() else keys.new_zeros(())
    return key.clamp(1, INFINITE_KEY)


def select_compact(x: Tensor, key: Tensor | int, limit: int) -> tuple[Tensor, Tensor, Tensor]:
    keys = _keys(x)
    return compacted(x, (keys >= key) & (keys > 0), min(limit, x.numel()))


def check_indices(indices: Tensor, numel: int) -> None:
    """Refuse what is no index set. On another device than the CPU that would wait: there they come from a decoder, which checks."""
    if indices.is_cpu and not _increasing(indices, numel):
        raise ValueError("indices must increase strictly and lie within the vector")


def sparse_scatter(indices: Tensor, values: Tensor, out: Tensor) -> None:
    check_indices(indices, out.numel())
    out.zero_()
    out[indices.long()] = values


def sparse_scatter_add(indices: Tensor, values: Tensor, weight: float, out: Tensor) -> None:
    check_indices(indices, out.numel())
    at = indices.long()
    out[at] = out[at] + values * weight


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
    return _images(keys, rotation, numel, k).to(index_dtype(numel))


def _images(keys: list[int], rotation: int, numel: int, k: int) -> Tensor:
    """On the CPU: how often the network is walked depends on the keys alone, and a device would have to be asked each time."""
    apply = _network(keys, max(numel - 1, 0).bit_length())
    v = apply(torch.arange(k, dtype=torch.int64))
    while True:
        outside = v >= numel
        if not bool(outside.any()):
            break
        v[outside] = apply(v[outside])
    return torch.where(v + rotation >= numel, v + rotation - numel, v + rotation)


def permuted_gather(x: Tensor, keys: list[int], rotation: int, k: int) -> Tensor:
    return x[host.send(_images(keys, rotation, x.numel(), k), x.device)]


def permuted_scatter(values: Tensor, keys: list[int], rotation: int, out: Tensor) -> None:
    out.zero_()
    out[host.send(_images(keys, rotation, out.numel(), values.numel()), out.device)] = values


def permuted_scatter_add(values: Tensor, keys: list[int], rotation: int, weight: float, out: Tensor) -> None:
    at = host.send(_images(keys, rotation, out.numel(), values.numel()), out.device)
    out[at] = out[at] + values * weight

"""Choosing coordinates, and the steps of variance-based compression, by CUDA kernels. One look at a count by the host."""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from tersegrad.kernels.cuda.loader import Argument, launch
from tersegrad.kernels.reference.select import INFINITE_KEY, index_dtype, sample_positions

__all__ = [
    "hybrid_select",
    "select_compact",
    "select_top_k",
    "sparse_scatter",
    "sparse_scatter_add",
    "variance_select",
]

SOURCE = "select.cu"
# As in select.cu.
TILE, SLOTS = 4096, 256
WARPS = 4
THREADS = 256


class _Slots:
    """What a pass over a vector collected, in the slots of its tiles."""

    def __init__(self, x: Tensor) -> None:
        self.n, self.device = x.numel(), x.device
        self.tiles = -(-self.n // TILE)
        self.offsets = torch.empty(self.tiles * SLOTS, dtype=torch.int16, device=x.device)
        self.values = torch.empty(self.tiles * SLOTS, dtype=torch.float32, device=x.device)
        self.counts = torch.empty(self.tiles, dtype=torch.int64, device=x.device)

    def collect(self, kernel: str, *source: Argument, after: tuple[Argument, ...] = ()) -> int:
        """Run the pass; how many passed."""
        launch(SOURCE, kernel, -(-self.tiles // WARPS), 32 * WARPS, *source, self.offsets, self.values, self.counts, *after)
        self.sums = self.counts.cumsum(0)
        return int(self.sums[-1])

    def spread(self, kernel: str, *source: Argument, limit: int) -> tuple[Tensor, Tensor]:
        """Indices and values of the first ``limit`` of them."""
        indices = torch.empty(limit, dtype=index_dtype(self.n), device=self.device)
        values = torch.empty(limit, dtype=torch.float32, device=self.device)
        places = (self.offsets, self.values, self.counts, self.sums, limit, int(indices.dtype == torch.int64), indices, values)
        launch(SOURCE, kernel, -(-self.tiles // WARPS), 32 * WARPS, *source, *places)
        return indices, values


def _nothing(x: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty(0, dtype=index_dtype(x.numel()), device=x.device), x[:0]


def _candidates(x: Tensor, key: Tensor) -> tuple[_Slots, int]:
    slots = _Slots(x)
    return slots, slots.collect("select_collect", x, x.numel(), key)


def select_compact(x: Tensor, key: int, limit: int) -> tuple[Tensor, Tensor, int]:
    if x.numel() == 0:
        return *_nothing(x), 0
    x = x.contiguous()
    least = torch.full((1,), key, dtype=torch.int64, device=x.device)
    slots, count = _candidates(x, least)
    if min(count, limit) == 0:
        return *_nothing(x), count
    return *slots.spread("select_spread", x, x.numel(), least, limit=min(count, limit)), count


@functools.lru_cache(maxsize=16)
def _sample(numel: int, device: torch.device) -> Tensor:
    return sample_positions(numel, device)


def _bound(x: Tensor, k: int) -> Tensor:
    """A key that, most likely, a few more than ``k`` coordinates have: of a sample, some places below the ``k``-th."""
    keys = x[_sample(x.numel(), x.device)].view(torch.int32) & 0x7FFFFFFF
    share = k * keys.numel() / x.numel()
    rank = math.ceil(1.1 * share + 5 * math.sqrt(share) + 16)
    if rank > keys.numel():
        return torch.ones(1, dtype=torch.int64, device=x.device)
    return torch.topk(keys, rank).values[-1:].long().clamp(1, INFINITE_KEY)


def select_top_k(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    n = x.numel()
    if n == 0 or k == 0:
        return _nothing(x)
    x, k = x.contiguous(), min(k, n)
    key = _bound(x, k)
    slots, count = _candidates(x, key)
    if count < k:
        # The sample misled, or the rest is zero.
        key.fill_(1)
        slots, count = _candidates(x, key)
    if count == 0:
        return _nothing(x)
    indices, values = slots.spread("select_spread", x, n, key, limit=count)
    if count <= k:
        return indices, values
    state = torch.tensor([0, k], dtype=torch.int64, device=x.device)
    histogram = torch.zeros(256, dtype=torch.int64, device=x.device)
    for shift in (24, 16, 8, 0):
        launch(SOURCE, "select_digit", min(-(-count // 2048), 512), THREADS, values, count, shift, state, histogram)
        launch(SOURCE, "select_choose", 1, THREADS, histogram, shift, state)
    flags = torch.empty(2, count, dtype=torch.int64, device=x.device)
    blocks, wide = -(-count // THREADS), int(indices.dtype == torch.int64)
    launch(SOURCE, "select_flags", blocks, THREADS, values, count, state, flags)
    kept = torch.empty(k, dtype=indices.dtype, device=x.device)
    out = torch.empty(k, dtype=torch.float32, device=x.device)
    launch(SOURCE, "select_finish", blocks, THREADS, indices, values, count, wide, flags, flags.cumsum(1), state, kept, out)
    return kept, out


def _put(indices: Tensor, values: Tensor, weight: float, adds: bool, out: Tensor) -> None:
    bad = torch.zeros(1, dtype=torch.int64, device=out.device)
    count, wide = indices.numel(), int(indices.dtype == torch.int64)
    arguments = (indices.contiguous(), values.contiguous(), count, wide, out.numel(), float(weight), int(adds), out, bad)
    launch(SOURCE, "sparse_put", -(-count // THREADS), THREADS, *arguments)
    if int(bad):
        raise ValueError("indices must increase strictly and lie within the vector")


def sparse_scatter(indices: Tensor, values: Tensor, out: Tensor) -> None:
    _put(indices, values, 0.0, False, out.zero_())


def sparse_scatter_add(indices: Tensor, values: Tensor, weight: float, out: Tensor) -> None:
    _put(indices, values, weight, True, out)


def _step(
    r: Tensor, v: Tensor, x: Tensor, s: Tensor, alpha: float, tau: float, zeta: float, hybrid: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, bool]:
    if x.numel() == 0:
        return r.clone(), v.clone(), *_nothing(x), True
    slots, infinite = _Slots(x), torch.zeros(1, dtype=torch.int64, device=x.device)
    scalars = (float(alpha), float(zeta), float(tau), float(2 * tau), float(tau * tau), int(hybrid))
    source = (r.contiguous(), v.contiguous(), x.contiguous(), s.contiguous(), x.numel(), *scalars)
    next_r, next_v = torch.empty_like(source[0]), torch.empty_like(source[1])
    count = slots.collect("variance_collect", *source, next_r, next_v, after=(infinite,))
    indices, values = slots.spread("variance_spread", *source, limit=count) if count else _nothing(x)
    return next_r, next_v, indices, values, not int(infinite)


def variance_select(
    r: Tensor, v: Tensor, x: Tensor, s: Tensor, alpha: float, zeta: float
) -> tuple[Tensor, Tensor, Tensor, Tensor, bool]:
    return _step(r, v, x, s, alpha, 0.0, zeta, False)


def hybrid_select(
    r: Tensor, v: Tensor, x: Tensor, s: Tensor, alpha: float, tau: float, zeta: float
) -> tuple[Tensor, Tensor, Tensor, Tensor, bool]:
    return _step(r, v, x, s, alpha, tau, zeta, True)

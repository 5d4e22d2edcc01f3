"""Choosing coordinates, and the steps of variance-based compression, by CUDA kernels. The host never waits."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tersegrad.kernels.cuda.loader import Argument, launch, scan
from tersegrad.kernels.reference.select import index_dtype

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
TILE, SLOTS, SAMPLE, BINS = 4096, 256, 1 << 14, 2048
WARPS = 4
# Warps that divide candidates among themselves.
SPANS = 4096
THREADS = 256


class _Slots:
    """What a pass over a vector collected, in the slots of its tiles."""

    def __init__(self, x: Tensor) -> None:
        self.n, self.device = x.numel(), x.device
        self.tiles = -(-self.n // TILE)
        self.offsets = torch.empty(self.tiles * SLOTS, dtype=torch.int16, device=x.device)
        self.values = torch.empty(self.tiles * SLOTS, dtype=torch.float32, device=x.device)
        self.places = torch.empty(self.tiles + 1, dtype=torch.int64, device=x.device)

    def collect(self, kernel: str, *source: Argument, after: tuple[Argument, ...] = ()) -> Tensor:
        """Run the pass; how many passed (int64, 0-d)."""
        launch(SOURCE, kernel, -(-self.tiles // WARPS), 32 * WARPS, *source, self.offsets, self.values, self.places, *after)
        scan(SOURCE, self.places)
        return self.places[-1]

    def spread(self, kernel: str, *source: Argument, room: int) -> tuple[Tensor, Tensor]:
        """Indices and values of the first ``room`` of them, zeros behind them."""
        indices, values = _room(self.n, room, self.device)
        places = (self.offsets, self.values, self.places, room, int(indices.dtype == torch.int64), indices, values)
        launch(SOURCE, kernel, -(-self.tiles // WARPS), 32 * WARPS, *source, *places)
        return indices, values


def _room(numel: int, room: int, device: torch.device) -> tuple[Tensor, Tensor]:
    return torch.empty(room, dtype=index_dtype(numel), device=device), torch.empty(room, dtype=torch.float32, device=device)


def _nothing(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return *_room(x.numel(), 0, x.device), torch.zeros((), dtype=torch.int64, device=x.device)


def select_compact(x: Tensor, key: Tensor | int, limit: int) -> tuple[Tensor, Tensor, Tensor]:
    if x.numel() == 0:
        return _nothing(x)
    x = x.contiguous()
    if isinstance(key, Tensor):
        least = key.reshape(1).to(torch.int64)
    else:
        least = torch.full((1,), key, dtype=torch.int64, device=x.device)
    slots = _Slots(x)
    count = slots.collect("select_collect", x, x.numel(), least)
    return *slots.spread("select_spread", x, x.numel(), least, room=min(limit, x.numel())), count


def _candidates(x: Tensor, k: int) -> tuple[Tensor, Tensor, int, Tensor, Tensor]:
    """Indices and values of coordinates that the k largest are very probably among, how many fit, their least key, how many there are.

    There is room for none where a sample would not tell enough.
    """
    n, expected = x.numel(), k * SAMPLE / x.numel()
    if n < 16 * SAMPLE or expected > SAMPLE / 8:
        nothing = torch.zeros(1, dtype=torch.int64, device=x.device)
        return nothing, x, 0, nothing, nothing
    # Four standard deviations and a little more on both sides.
    rank = math.ceil(expected + 4 * math.sqrt(expected) + 8)
    room = math.ceil(n / SAMPLE * (rank + 4 * math.sqrt(rank) + 8))
    key = torch.empty(1, dtype=torch.int64, device=x.device)
    launch(SOURCE, "select_bound", 1, 1024, x, n, rank, key)
    slots = _Slots(x)
    found = slots.collect("select_collect", x, n, key)
    return *slots.spread("select_spread", x, n, key, room=room), room, key, found


def select_top_k(x: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    n, k = x.numel(), min(k, x.numel())
    if k == 0:
        return _nothing(x)
    x = x.contiguous()
    origins, candidates, room, key, found = _candidates(x, k)
    which = (room, key, found, k)
    state = torch.empty(3, dtype=torch.int64, device=x.device)
    histogram = torch.zeros(BINS + 1, dtype=torch.int64, device=x.device)
    for shift, bits in ((20, 11), (10, 10), (0, 10)):
        digit = (shift, bits, state, histogram)
        launch(SOURCE, "select_digit", min(-(-n // 2048), 528), THREADS, x, n, candidates, *which, *digit)
    spans = min(-(-n // 256), SPANS)
    places = torch.empty(2, spans + 1, dtype=torch.int64, device=x.device)
    launch(SOURCE, "select_count", -(-spans // WARPS), 32 * WARPS, x, n, candidates, *which, state, spans, places)
    scan(SOURCE, places)
    indices, values = _room(n, k, x.device)
    into = (places, int(indices.dtype == torch.int64), indices, values)
    launch(SOURCE, "select_place", -(-spans // WARPS), 32 * WARPS, x, n, candidates, origins, *which, state, spans, *into)
    return indices, values, state[2]


def _put(indices: Tensor, values: Tensor, weight: float, adds: bool, out: Tensor) -> None:
    bad = torch.zeros(1, dtype=torch.int64, device=out.device)
    count, wide = indices.numel(), int(indices.dtype == torch.int64)
    arguments = (indices.contiguous(), values.contiguous(), count, wide, out.numel(), float(weight), int(adds), out, bad)
    launch(SOURCE, "sparse_put", -(-count // THREADS), THREADS, *arguments)
    # On a device that would wait: there they come from a decoder, which checks.
    if bad.is_cpu and int(bad):
        raise ValueError("indices must increase strictly and lie within the vector")


def sparse_scatter(indices: Tensor, values: Tensor, out: Tensor) -> None:
    _put(indices, values, 0.0, False, out.zero_())


def sparse_scatter_add(indices: Tensor, values: Tensor, weight: float, out: Tensor) -> None:
    _put(indices, values, weight, True, out)


def _step(
    r: Tensor, v: Tensor, x: Tensor, s: Tensor, alpha: float, tau: float, zeta: float, hybrid: bool, limit: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    if x.numel() == 0:
        return r.clone(), v.clone(), *_nothing(x), torch.ones((), dtype=torch.bool, device=x.device)
    slots, infinite = _Slots(x), torch.zeros((), dtype=torch.int64, device=x.device)
    scalars = (float(alpha), float(zeta), float(tau), float(2 * tau), float(tau * tau), int(hybrid))
    source = (r.contiguous(), v.contiguous(), x.contiguous(), s.contiguous(), x.numel(), *scalars)
    next_r, next_v = torch.empty_like(source[0]), torch.empty_like(source[1])
    count = slots.collect("variance_collect", *source, next_r, next_v, after=(infinite,))
    indices, values = slots.spread("variance_spread", *source, room=min(limit, x.numel()))
    return next_r, next_v, indices, values, count, infinite == 0


def variance_select(
    r: Tensor, v: Tensor, x: Tensor, s: Tensor, alpha: float, zeta: float, limit: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    return _step(r, v, x, s, alpha, 0.0, zeta, False, limit)


def hybrid_select(
    r: Tensor, v: Tensor, x: Tensor, s: Tensor, alpha: float, tau: float, zeta: float, limit: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    return _step(r, v, x, s, alpha, tau, zeta, True, limit)

"""Choosing coordinates, and the steps of variance-based compression, by CUDA kernels. The host never waits."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tersegrad.kernels.cuda import scratch
from tersegrad.kernels.cuda.loader import Argument, launch, scan
from tersegrad.kernels.reference.select import INFINITE_KEY, index_dtype, sample_runs

__all__ = [
    "hybrid_select",
    "select_compact",
    "select_sample_key",
    "select_top_k",
    "sparse_scatter",
    "sparse_scatter_add",
    "variance_select",
]

SOURCE = "select.cu"
# As in select.cu.
TILE, SLOTS, SAMPLE, BINS = 4096, 256, 1 << 14, 2048
WARPS = 4
# Where the state of a search has how many were chosen.
CHOSEN = 2
# Warps that divide candidates among themselves.
SPANS = 4096
THREADS = 256


class _Slots:
    """What a pass over a vector collects, in the slots of its tiles, and room for ``more`` places of so many bytes."""

    def __init__(self, x: Tensor, *more: int) -> None:
        self.n, self.device = x.numel(), x.device
        self.tiles = -(-self.n // TILE)
        sizes = (2 * self.tiles * SLOTS, 4 * self.tiles * SLOTS, 8 * (self.tiles + 1))
        self.memory, (self.offsets, self.values, self.places, *self.more) = scratch.empty(x.device, *sizes, *more)

    @property
    def count(self) -> int:
        """Where it stands how many passed."""
        return self.places + 8 * self.tiles

    def collect(self, kernel: str, *source: Argument, after: tuple[Argument, ...] = ()) -> None:
        """Run the pass."""
        launch(SOURCE, kernel, -(-self.tiles // WARPS), 32 * WARPS, *source, self.offsets, self.values, self.places, *after)
        scan(SOURCE, self.places, 1, self.tiles + 1)

    def spread(self, kernel: str, *source: Argument, room: int, wide: bool, indices: Argument, values: Argument) -> None:
        """Indices and values of the first ``room`` of them, zeros behind them."""
        places = (self.offsets, self.values, self.places, room, int(wide), indices, values)
        launch(SOURCE, kernel, -(-self.tiles // WARPS), 32 * WARPS, *source, *places)

    def taken(self, kernel: str, *source: Argument, limit: int) -> tuple[Tensor, Tensor, Tensor]:
        """The first ``limit`` of them in memory of their own, and how many there are (int64, 0-d)."""
        room = min(limit, self.n)
        indices, values = _room(self.n, room, self.device)
        self.spread(kernel, *source, room=room, wide=indices.dtype == torch.int64, indices=indices, values=values)
        return indices, values, self.memory[(self.count - self.memory.data_ptr()) // 8]


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
    slots.collect("select_collect", x, x.numel(), least)
    return slots.taken("select_spread", x, x.numel(), least, limit=limit)


def select_sample_key(x: Tensor, k: int) -> Tensor:
    everything = x.numel() // 16
    runs = sample_runs(x.numel())
    count = 16 * runs if runs else x.numel()
    if count == 0 or k == 0:
        return torch.full((), INFINITE_KEY, dtype=torch.int32, device=x.device)
    sample = x = x.contiguous()
    if runs:
        sample = torch.empty(count, dtype=torch.float32, device=x.device)
        launch(SOURCE, "select_sample", -(-count // THREADS), THREADS, x, everything, runs, sample)
    state = torch.empty(3, dtype=torch.int64, device=x.device)
    # All of the sample is looked through, since there is no room for candidates.
    _digits(sample, -(-k * count // x.numel()), (sample, 0, state, state), state)
    return state[0].clamp(1, INFINITE_KEY).to(torch.int32)


def _digits(x: Tensor, k: int, candidates: tuple[Argument, ...], state: Argument) -> None:
    """Find the key of the k-th largest, digit by digit, among candidates if they are enough, else in all of x."""
    histogram = torch.zeros(BINS + 1, dtype=torch.int64, device=x.device)
    blocks = min(-(-x.numel() // 2048), 528)
    for shift, bits in ((20, 11), (10, 10), (0, 10)):
        launch(SOURCE, "select_digit", blocks, THREADS, x, x.numel(), *candidates, k, shift, bits, state, histogram)


def _candidates(n: int, k: int) -> tuple[int, int]:
    """The rank in a sample that very probably bounds the k largest of n, and room for all that reach it; 0 where it tells little."""
    expected = k * SAMPLE / n
    if n < 16 * SAMPLE or expected > SAMPLE / 8:
        return 0, 0
    # Four standard deviations and a little more on both sides.
    rank = math.ceil(expected + 4 * math.sqrt(expected) + 8)
    return rank, math.ceil(n / SAMPLE * (rank + 4 * math.sqrt(rank) + 8))


def select_top_k(x: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    n, k = x.numel(), min(k, x.numel())
    if k == 0:
        return _nothing(x)
    x, wide = x.contiguous(), index_dtype(n) == torch.int64
    rank, room = _candidates(n, k)
    spans = min(-(-n // 256), SPANS)
    slots = _Slots(x, 8, (8 if wide else 4) * room, 4 * room, 24, 16 * (spans + 1))
    key, origins, candidates, state, places = slots.more
    if room:
        launch(SOURCE, "select_bound", 1, 1024, x, n, rank, key)
        slots.collect("select_collect", x, n, key)
        slots.spread("select_spread", x, n, key, room=room, wide=wide, indices=origins, values=candidates)
    which = (room, key, slots.count, k)
    _digits(x, k, (candidates, *which[:3]), state)
    launch(SOURCE, "select_count", -(-spans // WARPS), 32 * WARPS, x, n, candidates, *which, state, spans, places)
    scan(SOURCE, places, 2, spans + 1)
    indices, values = _room(n, k, x.device)
    into = (places, int(wide), indices, values)
    launch(SOURCE, "select_place", -(-spans // WARPS), 32 * WARPS, x, n, candidates, origins, *which, state, spans, *into)
    return indices, values, slots.memory[(state - slots.memory.data_ptr()) // 8 + CHOSEN]


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
    slots.collect("variance_collect", *source, next_r, next_v, after=(infinite,))
    return next_r, next_v, *slots.taken("variance_spread", *source, limit=limit), infinite == 0


def variance_select(
    r: Tensor, v: Tensor, x: Tensor, s: Tensor, alpha: float, zeta: float, limit: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    return _step(r, v, x, s, alpha, 0.0, zeta, False, limit)


def hybrid_select(
    r: Tensor, v: Tensor, x: Tensor, s: Tensor, alpha: float, tau: float, zeta: float, limit: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    return _step(r, v, x, s, alpha, tau, zeta, True, limit)

"""Choosing coordinates, and the steps of variance-based compression, by CUDA kernels. The host never waits."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tersegrad.kernels.cuda import replay, scratch
from tersegrad.kernels.cuda.loader import Argument, VaryingFloat, launch, placed
from tersegrad.kernels.reference.select import INFINITE_KEY, index_dtype, sample_runs

__all__ = [
    "hybrid_select",
    "select_compact",
    "select_sample_key",
    "select_top_k",
    "select_top_k_of_sum",
    "sparse_scatter",
    "sparse_scatter_add",
    "variance_select",
]

SOURCE = "select.cu"
# As in select.cu.
TILE, SLOTS, SAMPLE, BINS = 4096, 256, 1 << 14, 2048
WARPS = 8
# Where the state of a search has how many were chosen.
CHOSEN = 2
THREADS = 32 * WARPS
# Blocks that divide candidates among themselves, and the tiles in which something was collected, at most.
DIVIDING, LAYING = 512, 264


class _Slots:
    """What a pass over a vector collects, in the slots of its tiles, and room for ``more`` places of so many bytes."""

    def __init__(self, x: Tensor, *more: int) -> None:
        self.n, self.device = x.numel(), x.device
        tiles = -(-self.n // TILE)
        self.blocks = -(-tiles // WARPS)
        sizes = (2 * tiles * SLOTS, 4 * tiles * SLOTS, 8 * tiles, 8 * (self.blocks + 1))
        self.memory, (*self.places, self.sums) = scratch.empty(x.device, *sizes)
        # Kept as long as this is.
        self.beside, self.more = scratch.empty(x.device, *more)
        # How many passed.
        self.count = torch.empty(1, dtype=torch.int64, device=x.device)

    def collect(self, kernel: str, *source: Argument) -> None:
        """Run the pass."""
        launch(SOURCE, kernel, self.blocks, THREADS, *source, *self.places, self.sums)
        self.scanned = placed(SOURCE, self.sums, 1, self.blocks)

    def spread(
        self,
        kernel: str,
        *source: Argument,
        room: int,
        wide: bool,
        into: tuple[Argument, Argument],
        after: tuple[Argument, ...] = (),
    ) -> None:
        """Indices and values of the first ``room`` of them, zeros behind them."""
        places = (*self.places, self.sums, self.scanned, room, int(wide), *into, self.count)
        launch(SOURCE, kernel, min(self.blocks, LAYING), THREADS, *source, *places, *after)

    def taken(self, kernel: str, *source: Argument, limit: int) -> tuple[Tensor, Tensor, Tensor]:
        """The first ``limit`` of them in memory of their own, and how many there are (int64, 0-d)."""
        room = min(limit, self.n)
        indices, values = _room(self.n, room, self.device)
        self.spread(kernel, *source, room=room, wide=indices.dtype == torch.int64, into=(indices, values))
        return indices, values, self.count[0]


def _room(numel: int, room: int, device: torch.device) -> tuple[Tensor, Tensor]:
    return torch.empty(room, dtype=index_dtype(numel), device=device), torch.empty(room, dtype=torch.float32, device=device)


def _nothing(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return *_room(x.numel(), 0, x.device), torch.zeros((), dtype=torch.int64, device=x.device)


def select_compact(x: Tensor, key: Tensor | int, limit: int) -> tuple[Tensor, Tensor, Tensor]:
    if x.numel() == 0:
        return _nothing(x)
    return _compact(x.contiguous(), key.reshape(1).to(torch.int64) if isinstance(key, Tensor) else key, limit)


@replay.operation
def _compact(x: Tensor, key: Tensor | int, limit: int) -> tuple[Tensor, Tensor, Tensor]:
    slots = _Slots(x, 8)
    (least,) = slots.more
    if isinstance(key, int):
        scratch.set_number(least, key)
    at = least if isinstance(key, int) else key
    slots.collect("select_collect", x, x.numel(), at)
    return slots.taken("select_spread", x, x.numel(), at, limit=limit)


def select_sample_key(x: Tensor, k: int) -> Tensor:
    everything = x.numel() // 16
    runs = sample_runs(x.numel())
    count = 16 * runs if runs else x.numel()
    if count == 0 or k == 0:
        return torch.full((), INFINITE_KEY, dtype=torch.int32, device=x.device)
    return _sample_key(x.contiguous(), k, everything, runs, count)[0].clamp(1, INFINITE_KEY).to(torch.int32)


@replay.operation
def _sample_key(x: Tensor, k: int, everything: int, runs: int, count: int) -> Tensor:
    state = torch.empty(3, dtype=torch.int64, device=x.device)
    memory, (sampled,) = scratch.empty(x.device, 4 * count if runs else 0)
    cleared, (histogram,) = scratch.zeros(x.device, 8 * (BINS + 1))
    if runs:
        launch(SOURCE, "select_sample", -(-count // THREADS), THREADS, x, everything, runs, sampled)
    # All of the sample is looked through, since there is no room for candidates.
    sample: Argument = sampled if runs else x
    _digits(sample, count, -(-k * count // x.numel()), (sample, 0, state, state), state, histogram, 0)
    # What the kernels use is kept until here.
    del memory, cleared
    return state


# The shifts and widths of a key's digits (select.cu).
DIGITS = ((20, 11), (10, 10), (0, 10))


def _digits(
    x: Argument,
    n: int,
    k: int,
    candidates: tuple[Argument, int, Argument, Argument],
    state: Argument,
    histogram: int,
    known: int,
) -> None:
    """Find the key of the k-th largest, digit by digit, among candidates if they are enough, else in all n of x; some are ``known``."""
    blocks = min(-(-(candidates[1] or n) // 4096), 528)
    for shift, bits in DIGITS[known:]:
        launch(SOURCE, "select_digit", blocks, THREADS, x, n, *candidates, k, shift, bits, state, histogram)


def _candidates(n: int, k: int) -> tuple[int, int]:
    """The rank in a sample that very probably bounds the k largest of n, and room for all that reach it; 0 where it tells little."""
    expected = k * SAMPLE / n
    if n < 16 * SAMPLE or expected > SAMPLE / 8:
        return 0, 0
    # Four standard deviations and a little more on both sides; the bound is rounded down.
    rank = math.ceil(expected + 4 * math.sqrt(expected) + 8)
    return rank, math.ceil(n / SAMPLE * (rank + 5 * math.sqrt(rank) + 8))


def select_top_k(x: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    k = min(k, x.numel())
    return _top_k(x.contiguous(), None, None, k) if k else _nothing(x)


def select_top_k_of_sum(x: Tensor, y: Tensor, rest: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    k = min(k, x.numel())
    return _top_k(x.contiguous(), y.contiguous(), rest, k) if k else _nothing(torch.add(x, y, out=rest))


@replay.operation
def _top_k(x: Tensor, y: Tensor | None, rest: Tensor | None, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Of x, or of x + y, which goes to ``rest`` except for what is chosen."""
    n, wide = x.numel(), index_dtype(x.numel()) == torch.int64
    rank, room = _candidates(n, k)
    blocks = min(-(-n // 2048), DIVIDING)
    spans = WARPS * blocks
    histogram_size, sizes = 8 * (BINS + 1), (8, (8 if wide else 4) * room, 4 * room, 16 * spans, 16 * (blocks + 1))
    slots = _Slots(x, *sizes, histogram_size, 4 * SAMPLE if room else 0)
    key, origins, candidates, counts, sums, histogram, sampled = slots.more
    state = torch.empty(3, dtype=torch.int64, device=x.device)
    if room:
        launch(SOURCE, "select_spaced", SAMPLE // THREADS, THREADS, x, 0 if y is None else y, n, sampled, histogram)
        launch(SOURCE, "select_bound", 1, 1024, sampled, rank, key)
    else:
        scratch.zero(histogram, histogram_size)
        scratch.set_number(key, INFINITE_KEY)
    if y is not None and rest is not None:
        slots.collect("select_collect_sum", x, y, rest, n, key)
        x = rest
    elif room:
        slots.collect("select_collect", x, n, key)
    if room:
        slots.spread(
            "select_candidates", x, n, key, room=room, wide=wide, into=(origins, candidates), after=(k, state, histogram)
        )
    else:
        scratch.zero(histogram, histogram_size)
    which = (room, key, slots.count, k)
    _digits(x, n, k, (candidates, room, key, slots.count), state, histogram, 1 if room else 0)
    launch(SOURCE, "select_count", blocks, THREADS, x, n, candidates, *which, state, spans, counts, sums)
    scanned = placed(SOURCE, sums, 2, blocks)
    indices, values = _room(n, k, x.device)
    into = (counts, sums, scanned, int(wide), indices, values, 0 if rest is None else rest)
    launch(SOURCE, "select_place", blocks, THREADS, x, n, candidates, origins, *which, state, spans, *into)
    return indices, values, state[CHOSEN]


@replay.operation
def _put(indices: Tensor, values: Tensor, weight: VaryingFloat | None, out: Tensor) -> Tensor:
    """To their places, or ``weight`` times as much added there; whether indices are wrong."""
    bad, _ = scratch.kept(out.device, 8)
    count, wide = indices.numel(), int(indices.dtype == torch.int64)
    if weight is None:
        scratch.zero(out, 4 * out.numel())
    adds = (0.0, 0) if weight is None else (weight, 1)
    launch(SOURCE, "sparse_put", -(-count // THREADS), THREADS, indices, values, count, wide, out.numel(), *adds, out, bad)
    return bad


def _put_anywhere(indices: Tensor, values: Tensor, weight: float | None, out: Tensor) -> None:
    place = out if out.is_contiguous() else out.contiguous()
    bad = _put(indices.contiguous(), values.contiguous(), None if weight is None else VaryingFloat(float(weight)), place)
    if place is not out:
        out.copy_(place)
    # On a device that would wait: there they come from a decoder, which checks.
    if bad.is_cpu and int(bad):
        raise ValueError("indices must increase strictly and lie within the vector")


def sparse_scatter(indices: Tensor, values: Tensor, out: Tensor) -> None:
    _put_anywhere(indices, values, None, out)


def sparse_scatter_add(indices: Tensor, values: Tensor, weight: float, out: Tensor) -> None:
    _put_anywhere(indices, values, weight, out)


def _step(
    r: Tensor, v: Tensor, x: Tensor, s: Tensor, alpha: float, tau: float, zeta: float, hybrid: bool, limit: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    if x.numel() == 0:
        return r.clone(), v.clone(), *_nothing(x), torch.ones((), dtype=torch.bool, device=x.device)
    next_r, next_v = torch.empty_like(r, memory_format=_FLAT), torch.empty_like(v, memory_format=_FLAT)
    source = (r.contiguous(), v.contiguous(), x.contiguous(), s.contiguous())
    scalars = (float(alpha), float(zeta), float(tau), float(2 * tau), float(tau * tau), int(hybrid))
    return next_r, next_v, *_stepped(source, scalars, limit, next_r, next_v)


_FLAT = torch.contiguous_format


@replay.operation
def _stepped(
    vectors: tuple[Tensor, ...], scalars: tuple[float, ...], limit: int, next_r: Tensor, next_v: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    source: tuple[Argument, ...] = (*vectors, vectors[2].numel(), *scalars)
    slots, finite = _Slots(vectors[2]), torch.empty(1, dtype=torch.int64, device=next_r.device)
    scratch.set_number(finite, 1)
    slots.collect("variance_collect", *source, next_r, next_v, finite)
    # The first byte of the number is the flag.
    return *slots.taken("variance_spread", *source, limit=limit), finite.view(torch.bool)[0]


def variance_select(
    r: Tensor, v: Tensor, x: Tensor, s: Tensor, alpha: float, zeta: float, limit: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    return _step(r, v, x, s, alpha, 0.0, zeta, False, limit)


def hybrid_select(
    r: Tensor, v: Tensor, x: Tensor, s: Tensor, alpha: float, tau: float, zeta: float, limit: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    return _step(r, v, x, s, alpha, tau, zeta, True, limit)

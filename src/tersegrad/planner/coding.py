"""How long coding takes here, and what messages weigh: measured on this machine, with real bytes.

A message of n coordinates takes a + b n seconds. Two lengths tell both: a short vector, where the start of a kernel is most of it, and a
long one. Buffers are touched before, and take turns so that none is in a cache: a backward pass has filled that with other things by
the time a gradient is encoded. Where means are compressed by another compressor than gradients (two_shot's second round), both are
measured. On a GPU the device is waited for. For a plan, made on a machine that may be busy with something else now, a time counts that
one call in ten beats. Inside a job it is the mean of all calls: where workers share cores, they take turns of some milliseconds, most
calls are shorter than a turn and meet nobody, and the few that do wait for the others' turns.
"""

from __future__ import annotations

import dataclasses
import itertools
import statistics
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from tersegrad.core.protocol import Accumulator, Compressor, Context, Message, Spec, Stats, has_fixed_size, needs_second_moment
from tersegrad.core.text import require
from tersegrad.exchange.two_shot import for_means
from tersegrad.planner.trips import Coding, Measured

LONG = 1 << 20  # coordinates of the long vector, unless the model is smaller
SHORT = 1 << 12
CACHED = 1 << 24  # coordinates that no cache holds; buffers take turns until there are so many, or MOST of them
MOST = 8
UNAMBIGUOUS = 1 / 538  # coordinates that vgc(alpha=1.5) sent on average in 100 epochs of CIFAR-10 (experiments/variance_based)


def measure_coding(
    compressor: Compressor[Any],
    vector: Tensor | None = None,
    stats: Stats | None = None,
    spec: Spec | None = None,
    *,
    history: Iterable[tuple[Tensor, Stats | None]] = (),
    numel: int = LONG,
    device: torch.device | str = "cpu",
    budget: float = 0.3,
    in_job: bool = False,
    workers: int = 4,
) -> Measured:
    """Time ``compressor`` and weigh its messages: on ``vector`` (laid out as ``spec`` says), else on ``numel`` normal coordinates.

    Normal data is the hardest for a given variance; gradients usually take fewer bits. Error feedback runs for some steps first.
    ``history``: vectors of earlier steps, for compressors whose messages depend on them. ``budget``: seconds for each of the
    measurements. ``in_job``: the other workers of this machine do the same now, and what they take from this one counts. ``workers``: over
    whose messages means are taken.
    """
    clock = _Clock(torch.device(device if vector is None else vector.device), in_job)
    if vector is None:
        vector = torch.randn(max(1, numel), generator=torch.Generator().manual_seed(0)).to(device)
    x = vector.detach().reshape(-1).to(torch.float32)
    require(x.numel() > 0, "there is nothing to measure on: the vector is empty")
    if stats is None and needs_second_moment(compressor):
        stats = Stats(_moments(x))
    long = _times(compressor, x, stats, spec or Spec.flat(x.numel()), budget, clock, history)
    if x.numel() <= 2 * SHORT:
        each, slope = [0.0, 0.0, 0.0], [t / x.numel() for t in long.seconds]
    else:
        few = None if stats is None else Stats(_cut(stats, SHORT))
        short = _times(compressor, x[:SHORT], few, Spec.flat(SHORT), budget / 4, clock)
        slope = [max(b - a, 0.0) / (x.numel() - SHORT) for a, b in zip(short.seconds, long.seconds)]
        each = [max(a - s * SHORT, 0.0) for a, s in zip(short.seconds, slope)]
    coding = Coding(slope[0], slope[1], slope[2], each[0], each[1], copy_seconds(clock, x.numel()))
    second, means = for_means(compressor), None
    if second != compressor:
        mean = _mean(compressor, x, spec or Spec.flat(x.numel()), stats, workers)
        means = measure_coding(second, mean, spec=spec, budget=budget, in_job=in_job)
    return Measured(coding, 8 * long.nbytes / x.numel(), long.error, has_fixed_size(compressor), means)


def measure_cast(
    dtype: torch.dtype, numel: int = LONG, device: torch.device | str = "cpu", budget: float = 0.1, in_job: bool = False
) -> Measured:
    """What torch's hooks do around a dense all-reduce in ``dtype``: cast, divide, and copy back."""
    clock = _Clock(torch.device(device), in_job)
    x = torch.randn(numel, generator=torch.Generator().manual_seed(0)).to(device)
    half = x.to(dtype)
    error = float((half.double() - x.double()).square().sum() / x.double().square().sum())
    turns = itertools.cycle([x.clone() for _ in range(_several(numel))])
    if dtype == torch.float32:
        return Measured(Coding(encode=clock.seconds(lambda: next(turns).div_(1.0), budget) / numel), 32.0, error, True)
    there = clock.seconds(lambda: next(turns).to(dtype).div_(3.0), budget) / numel
    back = clock.seconds(lambda: next(turns).copy_(half), budget) / numel
    return Measured(Coding(there, back), 8.0 * half.element_size(), error, True)


def copy_seconds(clock: _Clock, numel: int, budget: float = 0.05) -> float:
    """Seconds per coordinate of copying float32."""
    turns = itertools.cycle([(_touched(numel, clock.device), _touched(numel, clock.device)) for _ in range(_several(numel))])

    def copy() -> None:
        target, source = next(turns)
        target.copy_(source)

    return clock.seconds(copy, budget) / numel


def _several(numel: int) -> int:
    return max(1, min(MOST, CACHED // max(numel, 1)))


def _touched(numel: int, device: torch.device) -> Tensor:
    return torch.ones(numel, dtype=torch.float32, device=device)


@dataclasses.dataclass(frozen=True)
class _Times:
    seconds: tuple[float, float, float]  # encode, decode, decode and add
    nbytes: int
    error: float


def _times(
    compressor: Compressor[Any],
    x: Tensor,
    stats: Stats | None,
    spec: Spec,
    budget: float,
    clock: _Clock,
    history: Iterable[tuple[Tensor, Stats | None]] = (),
) -> _Times:
    state, several = compressor.init(spec, x.device), _several(x.numel())
    out = torch.ones(compressor.max_nbytes(spec), dtype=torch.uint8, device=x.device)
    vectors = itertools.cycle([x.clone() for _ in range(several)])
    targets = itertools.cycle([_touched(x.numel(), x.device) for _ in range(several)])
    # Moments that repeat themselves would pass the test of variance in the end.
    keeps = stats is not None
    message, step = None, 0
    for earlier, moments in history:
        _, state = compressor.encode(earlier, spec, state, Context(step=step), stats=moments, out=out)
        step += 1

    def encode() -> None:
        nonlocal message, state, step
        message, after = compressor.encode(next(vectors), spec, state, Context(step=step), stats=stats, out=out)
        state, step = (state if keeps else after), step + 1

    for _ in range(2):
        encode()
    encoding = clock.seconds(encode, budget)
    # The error of a message, against a fresh state so that there is no residual to know of.
    found, _ = compressor.encode(x, spec, compressor.init(spec, x.device), Context(), stats=stats)
    decoded = compressor.decode(found, spec, Context())
    error = float((decoded.double() - x.double()).square().sum() / x.double().square().sum().clamp_min(1e-300))
    assert message is not None
    last, ctx = Message(message.payload.clone(), message.length), Context(step=step - 1)
    decoding = clock.seconds(lambda: compressor.decode(last, spec, ctx, next(targets)), budget / 2)
    if isinstance(compressor, Accumulator):
        fused = compressor
        adding = clock.seconds(lambda: fused.decode_add(last, spec, ctx, next(targets), 1e-3), budget / 2)
    else:
        adding = clock.seconds(lambda: next(targets).add_(compressor.decode(last, spec, ctx)), budget / 2)
    return _Times((encoding, decoding, adding), last.length, error)


def _mean(compressor: Compressor[Any], x: Tensor, spec: Spec, stats: Stats | None, workers: int) -> Tensor:
    """What the mean of some workers' messages looks like: one worker's messages one after another, which differ as theirs do."""
    state, total = compressor.init(spec, x.device), torch.zeros_like(x)
    for step in range(workers):
        message, state = compressor.encode(x, spec, state, Context(step=step), stats=stats)
        total += compressor.decode(message, spec, Context(step=step))
    return total / workers


def waiting(device: torch.device) -> Callable[[], None]:
    """A function that waits until a device has done what it was told."""
    if device.type != "cuda":
        return lambda: None
    return lambda: torch.cuda.synchronize(device)


@dataclasses.dataclass(frozen=True)
class _Clock:
    """Times calls on a device."""

    device: torch.device
    in_job: bool

    def seconds(self, body: Callable[[], object], budget: float) -> float:
        """Seconds of one call, from at least five, after one that warms up."""
        samples: list[float] = []
        wait = waiting(self.device)
        body()
        start = time.perf_counter()
        while len(samples) < 5 or (time.perf_counter() - start < budget and len(samples) < 200):
            wait()
            begin = time.perf_counter()
            body()
            wait()
            samples.append(time.perf_counter() - begin)
        return statistics.fmean(samples) if self.in_job else sorted(samples)[len(samples) // 10]


def _moments(x: Tensor) -> Tensor:
    """Second moments under which one coordinate in 538 is unambiguous."""
    few = torch.rand(x.numel(), generator=torch.Generator().manual_seed(1)).to(x.device) < UNAMBIGUOUS
    return torch.where(few, 0.0, 10 * x * x)


def _cut(stats: Stats, numel: int) -> Tensor:
    assert stats.second_moment is not None
    return stats.second_moment.reshape(-1)[:numel]

"""The clock: bodies run in turn with C memmove, and what is reported is the median of their ratios.

A virtual machine's speed drifts by tens of per cent within seconds, so an absolute figure says little. Every round therefore
times each body *and* a memmove of the same number of bytes, one after another; the ratio of the two is taken inside the round
and the median over rounds is reported. Buffers are written once before the first round: a page touched for the first time
costs more than the work that is being timed.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping

import torch

from tersegrad.kernels import native

Body = Callable[[], object]

MEMMOVE = "memmove"


@dataclasses.dataclass(frozen=True)
class Timing:
    """Medians over the rounds of one race."""

    seconds: float  # of one call
    ratio: float  # memmove's time over this body's time in the same round: 1 is as fast as memmove, 2 is twice as fast
    nbytes: int  # bytes counted for one call
    samples: tuple[float, ...]  # seconds of one call, round by round

    @property
    def rounds(self) -> int:
        return len(self.samples)

    @property
    def gigabytes(self) -> float:
        """10^9 bytes per second."""
        return self.nbytes / self.seconds / 1e9

    def times_faster_than(self, other: Timing) -> float:
        """The median over the rounds that both ran in; of the same race only."""
        return statistics.median(b / max(a, 1e-12) for a, b in zip(self.samples, other.samples))


@contextlib.contextmanager
def thread_count(threads: int) -> Iterator[None]:
    """Let the native kernels and torch use ``threads`` threads inside the block."""
    before = torch.get_num_threads()
    with contextlib.ExitStack() as stack:
        if native.available():
            stack.enter_context(native.using(threads=threads))
        torch.set_num_threads(threads)
        try:
            yield
        finally:
            torch.set_num_threads(before)


def touched(nbytes: int) -> torch.Tensor:
    """A uint8 buffer whose pages have all been written."""
    return torch.ones(max(nbytes, 1), dtype=torch.uint8)


def _memmove(nbytes: int) -> Body:
    source, target = touched(nbytes), touched(nbytes)
    to, of = target.data_ptr(), source.data_ptr()

    def body() -> object:
        # The tensors are captured so that the pointers stay valid.
        return ctypes.memmove(to, of, nbytes), source, target

    return body


def _once(body: Body, repeats: int) -> float:
    start = time.perf_counter()
    for _ in range(repeats):
        body()
    return (time.perf_counter() - start) / repeats


def race(
    bodies: Mapping[str, Body], nbytes: int, *, rounds: int = 9, shortest: float = 2e-3, budget: float = math.inf
) -> dict[str, Timing]:
    """Time ``bodies`` in turn with a memmove of ``nbytes``; the result holds an entry ``"memmove"`` too.

    A body is repeated inside a round until the round lasts ``shortest`` seconds. Rounds stop early, but not before the
    third, once ``budget`` seconds have passed.

    >>> timings = race({"nothing": lambda: None}, 1 << 16, rounds=3)
    >>> timings["memmove"].ratio
    1.0
    """
    runners = {MEMMOVE: _memmove(nbytes), **bodies}
    repeats = {}
    # The first call warms up; the second tells how often to repeat.
    for name, body in runners.items():
        body()
        repeats[name] = max(1, min(100_000, math.ceil(shortest / max(_once(body, 1), 1e-7))))
    samples: dict[str, list[float]] = {name: [] for name in runners}
    start = time.perf_counter()
    for k in range(rounds):
        if k >= 3 and time.perf_counter() - start > budget:
            break
        for name, body in runners.items():
            samples[name].append(_once(body, repeats[name]))
    reference = samples[MEMMOVE]
    return {
        name: Timing(
            seconds=statistics.median(times),
            ratio=statistics.median(r / max(t, 1e-12) for r, t in zip(reference, times)),
            nbytes=nbytes,
            samples=tuple(times),
        )
        for name, times in samples.items()
    }


def memmove_speed(nbytes: int, rounds: int = 5) -> float:
    """C memmove of ``nbytes`` on this machine right now, in 10^9 bytes per second."""
    return race({}, nbytes, rounds=rounds)[MEMMOVE].gigabytes

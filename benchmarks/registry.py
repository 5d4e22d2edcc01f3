"""What a benchmark is, and the list of all of them.

A benchmark has a name, a setup that makes the input *and checks the output*, bodies that are timed in turn with memmove of the
same bytes, facts that are no times (message sizes), and targets. Its setup raises before anything is timed if the output is
wrong; ``verify`` is called again after timing, on what the timed calls wrote. Add one by decorating a setup function in
``benchmarks/cases/``::

    @benchmark("rans/16 symbols", targets={"encode": 0.7, "decode": 0.8})
    def rans_16(numel: int) -> Work: ...
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import pkgutil
from collections.abc import Callable, Iterator, Mapping

from tersegrad.bench import Refused, Timing, race, thread_count
from tersegrad.bench.clock import MEMMOVE
from tersegrad.kernels import native

Body = Callable[[], object]


@dataclasses.dataclass(frozen=True)
class Fact:
    """A number that is not a time; smaller is better."""

    value: float
    unit: str


@dataclasses.dataclass(frozen=True)
class Work:
    """What a setup returns: checked, ready to be timed."""

    bodies: Mapping[str, Body]
    nbytes: int  # counted for one call of any body: the float32 input, or 4 bytes per symbol
    verify: Callable[[], None]  # raises Refused unless what the bodies wrote is right
    facts: Mapping[str, Fact] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Versus:
    """A comparison of two bodies of one benchmark: how many times faster ``fast`` is than ``slow``."""

    fast: str
    slow: str


@dataclasses.dataclass(frozen=True)
class Benchmark:
    """A registered setup with its size, conditions and targets."""

    name: str
    setup: Callable[[int], Work]
    numel: int
    targets: Mapping[str, float]  # body or comparison: at least; fact: at most
    isa: str | None  # force one instruction set
    threads: int
    versus: Mapping[str, Versus]
    shrinks: bool  # whether a quick run may use fewer coordinates


@dataclasses.dataclass(frozen=True)
class Result:
    """One line of the report."""

    benchmark: str
    quantity: str
    value: float
    unit: str
    target: float | None
    reached: bool | None
    numel: int
    seconds: float | None
    memmove_gigabytes: float | None


REGISTRY: dict[str, Benchmark] = {}


def benchmark(
    name: str,
    *,
    numel: int = 64 << 20,
    targets: Mapping[str, float] | None = None,
    isa: str | None = None,
    threads: int = 1,
    versus: Mapping[str, Versus] | None = None,
    shrinks: bool = True,
) -> Callable[[Callable[[int], Work]], Callable[[int], Work]]:
    """Register the decorated setup under ``name``."""

    def register(setup: Callable[[int], Work]) -> Callable[[int], Work]:
        if name in REGISTRY:
            raise ValueError(f"two benchmarks are called {name!r}")
        REGISTRY[name] = Benchmark(name, setup, numel, targets or {}, isa, threads, versus or {}, shrinks)
        return setup

    return register


def load() -> dict[str, Benchmark]:
    """All benchmarks, after importing every module of ``benchmarks.cases``."""
    cases = importlib.import_module("benchmarks.cases")
    for module in pkgutil.iter_modules(cases.__path__):
        importlib.import_module(f"benchmarks.cases.{module.name}")
    return REGISTRY


def refuse_unless(condition: bool, why: str) -> None:
    """Raise :class:`Refused` unless ``condition`` holds: for setups and ``verify``."""
    if not condition:
        raise Refused(f"refusing to time: {why}")


@contextlib.contextmanager
def _conditions(case: Benchmark) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        stack.enter_context(thread_count(case.threads))
        if case.isa is not None:
            stack.enter_context(native.using(isa=case.isa))
        yield


def runnable(case: Benchmark) -> str | None:
    """Why ``case`` cannot run on this machine, or None."""
    if case.isa is not None and case.isa not in native.supported_isas():
        return f"needs {case.isa}"
    return None


def execute(case: Benchmark, *, quick: bool = False) -> list[Result]:
    """Set up, check, time, check again."""
    numel = max(case.numel // 64, 1 << 14) if quick and case.shrinks else case.numel
    with _conditions(case):
        work = case.setup(numel)
        timings: Mapping[str, Timing] = {}
        if work.bodies:
            # Short vectors are timed more often: a busy machine disturbs them more.
            rounds = 5 if quick else 9 * max(1, min(9, (64 << 20) // numel))
            timings = race(work.bodies, work.nbytes, rounds=rounds, budget=20)
            work.verify()
    results = [
        _judged(case, name, timing.ratio, "x memmove", numel, least=True, timing=timing, copy=timings[MEMMOVE])
        for name, timing in timings.items()
        if name != MEMMOVE
    ]
    for name, pair in case.versus.items():
        faster = timings[pair.fast].times_faster_than(timings[pair.slow])
        results.append(_judged(case, name, faster, f"x {pair.slow}", numel, least=True))
    results += [_judged(case, name, fact.value, fact.unit, numel, least=False) for name, fact in work.facts.items()]
    return results


def _judged(
    case: Benchmark,
    quantity: str,
    value: float,
    unit: str,
    numel: int,
    *,
    least: bool,
    timing: Timing | None = None,
    copy: Timing | None = None,
) -> Result:
    target = case.targets.get(quantity) if numel == case.numel else None  # targets are for the full size
    reached = None if target is None else (value >= target if least else value <= target)
    return Result(
        case.name,
        quantity,
        value,
        unit,
        target,
        reached,
        numel,
        None if timing is None else timing.seconds,
        None if copy is None else copy.gigabytes,
    )

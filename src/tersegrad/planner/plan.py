"""Which compressor and exchange to use on a link: the step time of every setting, ranked, and a verdict.

The verdict climbs a ladder of settings, from more bits to fewer: it starts at torch's own all-reduce in bfloat16 and takes the next
setting only where that makes steps at least ``WORTH`` faster than the best one before it. Where none does, it says not to compress,
and why.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence

from tersegrad.advice import DEFAULT, row
from tersegrad.advice import LADDER as LADDER
from tersegrad.core.text import require
from tersegrad.planner.timeline import Waits, simulate
from tersegrad.planner.trips import ExchangeName, Measured, Topology, Trip, trip
from tersegrad.theory import iteration_factor_contractive

# Bytes of float32 gradient in one of DDP's buckets, and in one of our groups; in one of our groups on a GPU.
BUCKET, GPU_GROUP = 25 << 20, 128 << 20
FIRST_BUCKET = 1 << 20  # of DDP
WORTH = 0.05
TIE = 0.03  # two exchanges of one compressor that differ by less are alike: all_gather is taken, which compresses once
HIDDEN = 0.01  # of a step that finer settings for the groups that the backward pass hides may cost
MOMENTS = 0.4  # of forward and backward that the statistics of variance-based compressors add

# Steps to an accuracy, against those without compression, where they were measured: MNIST, four hosts, plain SGD, three seeds
# (benchmarks/results, cluster-train).
ITERATIONS: Mapping[str, float] = {
    "error_feedback(top_k(fraction=0.003))": 410 / 400,
    "error_feedback(sparse_dithering(alpha=0.9))": 410 / 400,
    "vgc(alpha=2.0)": 410 / 400,
}


@dataclasses.dataclass(frozen=True)
class Setting:
    """A compressor and an exchange, as text. For all_reduce the compressor is identity (float32) or bf16.

    >>> print(Setting("bf16", "all_reduce"))
    bf16, all_reduce
    """

    compressor: str
    exchange: ExchangeName

    def __str__(self) -> str:
        return f"{self.compressor}, {self.exchange}"

    @property
    def dense(self) -> bool:
        return self.exchange == "all_reduce"


BASELINE = Setting("bf16", "all_reduce")
# A plan does not know the optimiser.
_LESS_OFTEN = "; ".join(
    f"{optimizer}, {found.local} with {found.compressor}"
    for optimizer, found in (("with Adam", row("adam", 100)), ("with momentum", row("momentum", 100)))
)

# Beside the ladder (docs/plan.md), the table of a plan has these: faster on a slow link, at a price.
OTHERS: tuple[str, ...] = (
    "int8",
    DEFAULT,
    row("adam", 10).compressor,
    row("momentum", 10).compressor,
    "error_feedback(top_k(fraction=0.01))",
    "vgc(alpha=1.5)",
)


@dataclasses.dataclass(frozen=True)
class Workload:
    """What a worker computes in a step: parameters in the order of their registration, and seconds.

    Gradients are assumed to appear last to first, in proportion to their number.
    """

    name: str
    numels: tuple[int, ...]
    forward: float
    backward: float
    dense_below: int = 1024  # smaller tensors travel as float32
    group_bytes: int = BUCKET  # of our engine's groups

    def __post_init__(self) -> None:
        require(sum(self.numels) > 0, f"{self.name} has no parameters to train")
        times = (self.forward, self.backward)
        require(all(0 <= t < math.inf for t in times), f"computing takes a number of seconds, got {times}")

    @property
    def numel(self) -> int:
        return sum(self.numels)

    @property
    def compute(self) -> float:
        return self.forward + self.backward

    def groups(self) -> list[int]:
        """Coordinates of our engine's groups: from the last parameter to the first, none above ``group_bytes`` if it has several.

        >>> Workload("w", (100, 50, 10), 0, 0, group_bytes=400).groups()
        [60, 100]
        """
        groups: list[list[int]] = []
        for numel in reversed(self.numels):
            if not groups or 4 * (sum(groups[-1]) + numel) > self.group_bytes:
                groups.append([])
            groups[-1].append(numel)
        # What may be in DDP's last bucket belongs to the last group, where groups are much larger than buckets.
        before = 4 * sum(groups[-1][:-1]) if self.group_bytes >= 2 * BUCKET else BUCKET
        while len(groups) > 1 and (before := before + 4 * groups[-2][-1]) < BUCKET:
            groups[-1].insert(0, groups[-2].pop())
            groups = [group for group in groups if group]
        return [sum(group) for group in groups]

    def buckets(self, limit: int = BUCKET, first: int = FIRST_BUCKET) -> list[int]:
        """Coordinates of DDP's own buckets, each closed by the parameter that reaches its limit; the first has a smaller one.

        >>> Workload("w", (100, 50, 10, 50), 0, 0).buckets(limit=400, first=40)
        [50, 160]
        """
        sizes, full = list[int](), True
        for numel in reversed(self.numels):
            if full:
                sizes.append(0)
            sizes[-1] += numel
            full = 4 * sizes[-1] >= (first if len(sizes) == 1 else limit)
        return sizes


@dataclasses.dataclass(frozen=True)
class Forecast:
    """What one setting would do."""

    setting: Setting
    seconds: float  # of a step
    waited: float  # of them, for the link
    sent: float  # bytes that leave a machine in a step
    bits: float  # per coordinate, of a message
    error: float  # of a message
    by_variance: bool = False
    mixed: tuple[Setting, ...] = ()  # by group, where the first groups have a finer setting than ``setting``

    @property
    def iterations(self) -> tuple[float, str] | None:
        """How many times the iterations of training without compression, and whether that was measured or is a bound of theory."""
        if self.setting.compressor in ITERATIONS:
            return ITERATIONS[self.setting.compressor], "measured"
        if self.error == 0:
            return 1.0, "exact"
        if self.by_variance or not self.error < 1:
            return None
        return float(iteration_factor_contractive(self.error)), "at most"


def forecast(
    setting: Setting,
    workload: Workload,
    topology: Topology,
    measured: Measured,
    *,
    waits: Waits | None = None,
    groups: Sequence[int] | None = None,
    by_variance: bool = False,
    moments: float | None = None,
) -> Forecast:
    """The step of ``workload`` with one setting.

    ``groups``: coordinates of the groups in the order in which they are complete, where they are not the usual ones. ``moments``:
    seconds that second moments add, where they are known.
    """
    groups = groups or (workload.buckets() if setting.dense else workload.groups())
    segments = [workload.backward * n / workload.numel for n in groups]
    if by_variance:
        # Moments are whole only when the backward pass has ended.
        extra = MOMENTS * workload.compute if moments is None else moments
        segments = [workload.backward + extra, *([0.0] * (len(groups) - 1))]
    trips, bits = _trips(setting, workload, topology, measured, groups, by_variance)
    line = simulate(segments, trips, waits or ("end" if setting.dense else "pipeline"))
    sent = sum(t.sent for t in trips)
    return Forecast(setting, workload.forward + line.seconds, line.waited, sent, bits, measured.error, by_variance)


def _trips(
    setting: Setting,
    workload: Workload,
    topology: Topology,
    measured: Measured,
    groups: Sequence[int],
    by_variance: bool = False,
) -> tuple[list[Trip], float]:
    """The exchanges of all groups, and bits per coordinate, small tensors among them."""
    bits, means, numel = measured.bits, measured.means, workload.numel
    if not setting.dense:
        small = 0 if by_variance else sum(n for n in workload.numels if n < workload.dense_below)
        bits = (measured.bits * (numel - small) + 32 * small) / numel
        if means is not None:
            means = dataclasses.replace(means, bits=(means.bits * (numel - small) + 32 * small) / numel)
    return [trip(setting.exchange, n, topology, bits, measured.coding, measured.fixed_size, means) for n in groups], bits


def mix(
    best: Forecast,
    finer: Sequence[Setting],
    workload: Workload,
    topology: Topology,
    measured: Mapping[str, Measured],
    groups: Sequence[int],
) -> Forecast:
    """``best`` with finer settings, the finest first, for the groups that are complete first, as far as steps take as long.

    What the backward pass hides may be sent with more bits; the last group has nothing to hide behind. ``groups``: coordinates of our
    engine's groups, in the order in which they are complete.
    """
    segments = [workload.backward * n / workload.numel for n in groups]

    def trips(setting: Setting) -> list[Trip]:
        return _trips(setting, workload, topology, measured[setting.compressor], groups)[0]

    coarse, found, mixed = trips(best.setting), list[Trip](), list[Setting]()
    limit = (1 + HIDDEN) * simulate(segments, coarse).seconds
    for setting in finer:
        own, low, high = trips(setting), len(found), len(groups) - 1
        while low < high:  # the longest stretch of groups, by bisection
            middle = (low + high + 1) // 2
            fits = simulate(segments, [*found, *own[len(found) : middle], *coarse[middle:]]).seconds <= limit
            low, high = (middle, high) if fits else (low, middle - 1)
        mixed += [setting] * (low - len(found))
        found += own[len(found) : low]
    if not mixed:
        return best
    whole = [*found, *coarse[len(found) :]]
    line = simulate(segments, whole)
    by_group = (*mixed, *[best.setting] * (len(groups) - len(mixed)))
    sent = sum(t.sent for t in whole)
    return dataclasses.replace(best, seconds=workload.forward + line.seconds, waited=line.waited, sent=sent, mixed=by_group)


def exchanges(topology: Topology, by_variance: bool) -> tuple[ExchangeName, ...]:
    """The exchanges that can carry a compressor's messages."""
    if by_variance:
        return ("all_gather",)
    grouped = topology.per_node > 1 and topology.nodes > 1
    return ("two_shot", "all_gather", "hierarchical") if grouped else ("two_shot", "all_gather")


@dataclasses.dataclass(frozen=True)
class Plan:
    """All forecasts, the fastest first, and the choice."""

    workload: Workload
    topology: Topology
    forecasts: tuple[Forecast, ...]
    chosen: Forecast
    baseline: Forecast
    pays_below: float | None  # bits per second of a machine's link below which the choice (or the ladder's best) is worth it
    measured: Mapping[str, Measured]

    def again(self, setting: Setting, bits_per_second: float) -> Forecast:
        """The same setting on a link of another rate."""
        where = at_rate(self.topology, bits_per_second)
        variance = any(f.by_variance for f in self.forecasts if f.setting == setting)
        return forecast(setting, self.workload, where, self.measured[setting.compressor], by_variance=variance)

    @property
    def best(self) -> tuple[Forecast, ...]:
        """Each compressor with its fastest exchange."""
        seen: dict[str, Forecast] = {}
        for one in self.forecasts:
            seen.setdefault(one.setting.compressor, one)
        return tuple(seen.values())

    @property
    def verdict(self) -> str:
        """In one sentence."""
        base, chosen = self.baseline, self.chosen
        if not chosen.setting.dense:
            words = (
                f"compress with {chosen.setting.compressor} through {chosen.setting.exchange}: {base.seconds / chosen.seconds:.2g} times "
                f"as fast as bf16 ({seconds_text(chosen.seconds)} per step instead of {seconds_text(base.seconds)}), and worth it "
                + ("on any link" if self.pays_below == math.inf else f"up to {rate_text(self.pays_below or 0.0)}")
            )
        elif base.waited < WORTH * base.seconds:
            words = f"do not compress: the link is not your bottleneck, a bf16 step waits for it {_share(base)} of its time"
        elif self._latency > 0.5 * base.waited:
            words = f"do not compress: latency, not bandwidth, is your bottleneck, and takes {seconds_text(self._latency)} of a step"
        else:
            words = f"do not compress: coding takes longer than what it saves of the {seconds_text(base.waited)} that a bf16 step waits"
        if chosen.setting.dense and self.pays_below:
            words += f"; compression would pay below {rate_text(self.pays_below)}"
        if chosen.waited > 0.5 * chosen.seconds:
            words += f"; a step still waits {_share(chosen)} of its time, so exchange less often: {_LESS_OFTEN}"
        return words

    @property
    def _latency(self) -> float:
        """Seconds of a bf16 step that are latency."""
        where = dataclasses.replace(self.topology, link=dataclasses.replace(self.topology.link, latency=0.0))
        return self.baseline.seconds - forecast(BASELINE, self.workload, where, self.measured["bf16"]).seconds


def _share(found: Forecast) -> str:
    share = 100 * found.waited / found.seconds
    return f"{share:.0f} %" if share >= 10 else f"{share:.1f} %"


def make_plan(
    workload: Workload,
    topology: Topology,
    measured: Mapping[str, Measured],
    ladder: Sequence[str] = LADDER,
    by_variance: Sequence[str] = (),
) -> Plan:
    """Forecast every setting. ``measured``: by compressor, "bf16" and "identity" for the dense all-reduces among them."""

    def at(where: Topology, compressor: str) -> list[Forecast]:
        variance = compressor in by_variance
        dense = compressor in ("bf16", "identity")
        names: tuple[ExchangeName, ...] = ("all_reduce",) if dense else exchanges(where, variance)
        return [
            forecast(Setting(compressor, name), workload, where, measured[compressor], by_variance=variance) for name in names
        ]

    require("bf16" in measured, "the plan compares with bf16: measure it too")
    forecasts = sorted((f for c in measured for f in at(topology, c)), key=lambda f: f.seconds)
    base = next(f for f in forecasts if f.setting == BASELINE)
    chosen = choose([f for f in forecasts if f.setting == BASELINE or f.setting.compressor in ladder], ladder)
    wanted = [chosen.setting.compressor] if not chosen.setting.dense else [c for c in ladder if c in measured]

    def pays(rate: float) -> bool:
        # As much faster as the choice asks for, so that no border contradicts it.
        where = at_rate(topology, rate)
        least = min((f.seconds for c in wanted for f in at(where, c)), default=math.inf)
        return least < (1 - WORTH) * at(where, "bf16")[0].seconds

    rate = topology.link.bits_per_second
    border = crossing(pays, high=rate) if chosen.setting.dense else crossing(pays, low=rate)
    return Plan(workload, topology, tuple(forecasts), chosen, base, border, measured)


def at_rate(topology: Topology, bits_per_second: float) -> Topology:
    """The same machines with links of another rate."""
    return dataclasses.replace(topology, link=dataclasses.replace(topology.link, bits_per_second=bits_per_second))


def choose(forecasts: Sequence[Forecast], ladder: Sequence[str], base: Forecast | None = None) -> Forecast:
    """The first rung (``base``, by default bf16, then the ladder) that no later one beats by ``WORTH``, climbing from the first."""
    best = base or next(f for f in forecasts if f.setting == BASELINE)
    for compressor in ladder:
        own = [f for f in forecasts if f.setting.compressor == compressor]
        least = min((f.seconds for f in own), default=math.inf)
        if least < (1 - WORTH) * best.seconds:
            alike = [f for f in own if f.seconds <= (1 + TIE) * least]
            best = min(alike, key=lambda f: (f.setting.exchange != "all_gather", f.seconds))
    return best


def crossing(pays: Callable[[float], bool], low: float = 1e4, high: float = 1e13) -> float | None:
    """The rate up to which something pays, by bisection; None where it never does, infinite where it always does."""
    if not pays(low):
        return None
    if pays(high):
        return math.inf
    for _ in range(40):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if pays(middle) else (low, middle)
    return low


def seconds_text(value: float) -> str:
    """A duration for people.

    >>> seconds_text(0.00123), seconds_text(0.0456), seconds_text(0.789), seconds_text(12.3)
    ('1.2 ms', '46 ms', '789 ms', '12.3 s')
    """
    if value >= 1:
        return f"{value:.1f} s"
    return f"{1000 * value:.1f} ms" if value < 0.01 else f"{1000 * value:.0f} ms"


def rate_text(rate: float) -> str:
    """A rate for people.

    >>> rate_text(1e8), rate_text(2.5e9), rate_text(64e3)
    ('100 Mbit/s', '2.5 Gbit/s', '64 kbit/s')
    """
    for unit, size in (("Gbit/s", 1e9), ("Mbit/s", 1e6)):
        if rate >= size:
            return f"{float(f'{rate / size:.3g}'):g} {unit}"
    return f"{float(f'{rate / 1e3:.3g}'):g} kbit/s"

"""Trips, the clock of a step, and the choice: against the engine's own order of events, and against bytes that exchanges send."""

from __future__ import annotations

import dataclasses
import itertools
import math
import time

import pytest
import torch

import tersegrad
from tersegrad import advice
from tersegrad.core.errors import BadConfiguration
from tersegrad.core.protocol import Context, Spec, Stats
from tersegrad.exchange import Pending, Pipeline, scheme, virtual
from tersegrad.exchange.steps import AllGather, Collective
from tersegrad.planner import (
    Coding,
    Leg,
    Link,
    Measured,
    Setting,
    Topology,
    Trip,
    Workload,
    forecast,
    make_plan,
    measure_coding,
    simulate,
    trip,
)
from tersegrad.planner.coding import _Clock, measure_cast
from tersegrad.planner.plan import HIDDEN, LADDER, WORTH, choose, mix
from tersegrad.planner.trips import NAMES, ExchangeName

FAST = Coding(1e-9, 5e-10, 4e-10)
MODEL = Workload("model", (1000, 4_000_000, 1000, 8_000_000, 16_000_000, 1000), 0.05, 0.1)


def measured(bits: float, error: float = 0.1, coding: Coding = FAST, fixed: bool = False) -> Measured:
    return Measured(coding, bits, error, fixed)


ALL = {
    "identity": measured(32, 0.0),
    "bf16": measured(16, 1e-6),
    LADDER[0]: measured(4.25, 0.03, fixed=True),
    LADDER[1]: measured(2.0, 0.1),
}


# ---------------------------------------------------------------------------------------------------------------------- trips


@pytest.mark.parametrize("workers", [2, 6])
@pytest.mark.parametrize(
    ("exchange", "text"),
    [
        ("two_shot", "int8"),
        ("all_gather", "sign"),
        ("two_shot", "top_k(fraction=0.05)"),
        ("all_gather", "top_k(fraction=0.05)"),
    ],
)
def test_bytes_are_those_that_exchanges_send(exchange: ExchangeName, text: str, workers: int) -> None:
    numel = 4096 * workers
    spec, compressor = Spec.flat(numel), tersegrad.parse(text)
    made = scheme(exchange).make(compressor)
    vectors = [torch.randn(numel, generator=torch.Generator().manual_seed(rank)) for rank in range(workers)]
    outcome = virtual.run(made, vectors, virtual.init(made, spec, workers), spec, Context())
    found = measure_coding(compressor, vectors[0], budget=0)
    told = trip(exchange, numel, Topology(workers, Link(1e9)), found.bits, fixed_size=found.fixed_size)
    assert told.sent == pytest.approx(outcome.sent[0], rel=0.02)


@pytest.mark.parametrize("workers", [2, 6])
@pytest.mark.parametrize("text", ["error_feedback(sparse_dithering(alpha=0.1))", "error_feedback(top_k(fraction=0.01))"])
def test_bytes_of_both_rounds_where_means_travel_unbiased(text: str, workers: int) -> None:
    numel = 4096 * workers
    spec, compressor = Spec.flat(numel), tersegrad.parse(text)
    made = scheme("two_shot").make(compressor)
    vectors = [torch.randn(numel, generator=torch.Generator().manual_seed(rank)) for rank in range(workers)]
    outcome = virtual.run(made, vectors, virtual.init(made, spec, workers), spec, Context())
    found = measure_coding(compressor, vectors[0], budget=0, workers=workers)
    told, alike = (trip("two_shot", numel, Topology(workers, Link(1e9)), found.bits, means=m).sent for m in (found.means, None))
    assert told == pytest.approx(outcome.sent[0], rel=0.1)
    assert abs(told - outcome.sent[0]) < abs(alike - outcome.sent[0])


@pytest.mark.parametrize("text", ["bf16", "top_k(fraction=0.05)"])
def test_hierarchical_bytes_between_machines(text: str) -> None:
    numel, workers, each = 1 << 15, 6, 2
    spec, compressor = Spec.flat(numel), tersegrad.parse(text)
    made = scheme(f"hierarchical(ranks_per_node={each})").make(compressor)
    vectors = [torch.randn(numel, generator=torch.Generator().manual_seed(rank)) for rank in range(workers)]
    outcome = virtual.run(made, vectors, virtual.init(made, spec, workers), spec, Context())
    crossing = sum(outcome.sent[r] - outcome.intra_node[r] for r in range(each))
    found = measure_coding(compressor, vectors[0], budget=0)
    told = trip("hierarchical", numel, Topology(workers, Link(1e9), each), found.bits, fixed_size=found.fixed_size)
    assert told.sent == pytest.approx(crossing, rel=0.03)
    flat = trip("two_shot", numel, Topology(workers, Link(1e9), each), found.bits, fixed_size=found.fixed_size)
    assert told.sent < 0.7 * flat.sent


def test_a_machine_with_all_workers_sends_nothing() -> None:
    for name in NAMES:
        assert trip(name, 10**6, Topology(8, Link(1e6), per_node=8), 4.0).sent == 0
        assert trip(name, 10**6, Topology(8, Link(1e6), per_node=8), 4.0).wire < 0.01


def test_rings_pass_a_machine_once_and_direct_exchanges_do_not() -> None:
    alone, shared = (Topology(16, Link(1e9), per_node=n) for n in (1, 8))
    assert trip("all_reduce", 10**6, shared, 16).wire == trip("all_reduce", 10**6, alone, 16).wire
    assert trip("two_shot", 10**6, shared, 16).wire > 4 * trip("two_shot", 10**6, alone, 16).wire
    assert trip("hierarchical", 10**6, shared, 16).wire < trip("two_shot", 10**6, alone, 16).wire


def test_latency_by_ring_and_tree() -> None:
    ring, tree = (Topology(1024, Link(1e12, 0.01, collectives=kind)) for kind in ("ring", "tree"))
    assert trip("all_reduce", 1, ring).wire == pytest.approx(2 * 1023 * 0.01, rel=1e-3)
    assert trip("all_reduce", 1, tree).wire == pytest.approx(2 * 10 * 0.01, rel=1e-3)


def test_coding_counts_messages() -> None:
    each = Coding(each_encode=1.0, each_decode=0.01)
    assert trip("two_shot", 64, Topology(4, Link(1e9)), 1.0, each).coding == pytest.approx(5 * 1.0 + 8 * 0.01)
    assert trip("all_gather", 64, Topology(4, Link(1e9)), 1.0, each).coding == pytest.approx(1.0 + 4 * 0.01)


def test_the_second_round_takes_what_its_own_messages_take() -> None:
    first, again = Coding(1e-9, 2e-9, 3e-9, 1e-3, 2e-3), Coding(10e-9, 20e-9, 30e-9, 1e-2, 2e-2)
    means, where = Measured(again, 4.0, 0.1), Topology(4, Link(1e9, 0.5))
    same, other = (trip("two_shot", 4000, where, 1.0, first, means=m) for m in (None, means))
    # One of four parts is encoded anew, and four are decoded.
    assert same.coding == pytest.approx(5 * (1000e-9 + 1e-3) + (1000 * 11e-9 + 4 * 2e-3) + 4 * (1000 * 2e-9 + 2e-3))
    assert other.coding - same.coding == pytest.approx((9000e-9 + 9e-3) + 4 * (1000 * 18e-9 + 18e-3))
    assert [leg.sent for leg in other.legs] == pytest.approx([leg.sent for leg in same.legs[:-1]] + [4 * same.legs[-1].sent])
    # Means of a fixed size need no lengths.
    assert len(trip("two_shot", 4000, where, 1.0, first, means=dataclasses.replace(means, fixed_size=True)).legs) == 3
    two_machines = Topology(4, Link(1e9), per_node=2)
    assert trip("hierarchical", 4000, two_machines, 1.0, means=means).sent == pytest.approx(
        4 * 1000 * 2.5 / 8 + 2 * 24
    )  # lengths travel first
    for name in ("all_gather", "reduce_scatter", "all_reduce"):
        assert trip(name, 4000, where, 1.0, first, means=means) == trip(name, 4000, where, 1.0, first)


def test_means_are_measured_where_they_travel_otherwise() -> None:
    fed, plain = (
        measure_coding(tersegrad.parse(text), numel=5000, budget=0) for text in ("error_feedback(top_k(fraction=0.01))", "int8")
    )
    assert fed.means is not None
    assert plain.means is None
    assert (fed.means.bits != fed.bits, fed.means.fixed_size, fed.means.means) == (True, False, None)
    model, where, setting = (
        Workload("w", (1000, 9000), 0.0, 0.0, dense_below=2000),
        Topology(2, Link(1e9)),
        Setting("x", "two_shot"),
    )
    # A tenth of the coordinates travel as float32, in both rounds; 24 bytes are lengths.
    assert forecast(setting, model, where, fed).sent == pytest.approx(5000 / 8 * (6.4 + 0.9 * (fed.bits + fed.means.bits)) + 24)


# ------------------------------------------------------------------------------------------------------------------ the clock


class Script:
    """A process group on a made-up clock: collectives take turns on one wire, as in the model."""

    def __init__(self) -> None:
        self.now = self.free = 0.0

    def launch(self, request: Collective) -> tuple[Script, torch.Tensor]:
        work = Script()
        self.free = max(self.now, self.free) + float(request.data[0])
        work.now, work.free = self.free, 0.0
        return Waiting(self, self.free), request.data  # type: ignore[return-value]

    def sent(self, request: Collective) -> int:
        return 0

    received = sent


@dataclasses.dataclass
class Waiting:
    script: Script
    end: float

    def wait(self) -> None:
        self.script.now = max(self.script.now, self.end)


def steps(one: Trip, script: Script):  # type: ignore[no-untyped-def]
    for leg in one.legs:
        script.now += leg.work
        yield AllGather(torch.tensor([leg.busy]))
    script.now += one.last
    return torch.zeros(1), None


@pytest.mark.parametrize("groups", [1, 2, 3, 7])
def test_the_clock_follows_the_engines_pipeline(groups: int) -> None:
    g = torch.Generator().manual_seed(groups)
    draws = iter(torch.rand(100, generator=g).tolist())
    trips = [Trip(tuple(Leg(next(draws), next(draws) * 3) for _ in range(4)), next(draws)) for _ in range(groups)]
    segments = [next(draws) * 4 for _ in trips]
    script, pipeline = Script(), Pipeline[None]()
    for segment, one in zip(segments, trips):
        script.now += segment
        pipeline.add(Pending(steps(one, script), script))  # type: ignore[arg-type]
    pipeline.finish()
    assert simulate(segments, trips).seconds == pytest.approx(script.now, rel=1e-5)


def test_overlap_hides_the_wire_and_never_more() -> None:
    trips = [Trip((Leg(0.01, 0.1),), 0.01)] * 5
    for waits in ("pipeline", "end", "each"):
        line = simulate([0.2] * 5, trips, waits)
        assert 1.1 <= line.seconds <= 1.0 + 5 * trips[0].seconds + 1e-9
        assert line.seconds == pytest.approx(1.0 + sum(t.coding for t in trips) + line.waited)
    assert simulate([0.2] * 5, trips, "end").seconds < simulate([0.2] * 5, trips, "each").seconds
    with pytest.raises(BadConfiguration, match="segments"):
        simulate([1.0], [])


def test_sending_takes_from_computing_but_not_from_waiting() -> None:
    def line(busy: float, toll: float) -> float:
        return simulate([0.2] * 5, [Trip((Leg(0.0, busy, toll=toll),))] * 5, "end").seconds

    # Four of five collectives pass while the worker computes; the fifth begins when there is nothing left to take from.
    assert line(0.1, 0.05) == pytest.approx(line(0.1, 0.0) + 4 * 0.05)
    # Where the wire is what a step waits for, the worker does that work in the time in which it waits.
    assert line(2.0, 0.05) == pytest.approx(line(2.0, 0.0), rel=1e-9)


def test_a_crowded_machine_makes_dense_steps_longer() -> None:
    def step(exchange: ExchangeName, toll: float = 0.0) -> float:
        return forecast(Setting("bf16", exchange), MODEL, Topology(4, Link(1e11, toll=toll)), ALL["bf16"]).seconds

    sent = 2 * (16 * MODEL.numel / 8) * 3 / 4
    for name in ("all_reduce", "two_shot", "all_gather"):
        assert step(name, toll=1e-9) > step(name) + 0.01, name
    assert step("all_reduce", toll=1e-9) <= step("all_reduce") + 1.0001e-9 * sent


# ----------------------------------------------------------------------------------------------------------------- the choice


# Parameters and groups of up to 100, in MiB: what comes with the last parameter, in a bucket of 25, is in its group.
LAST: list[tuple[list[int], list[int]]] = [
    ([100, 20, 10, 5, 90], [95, 10, 120]),
    ([60, 60, 50, 10, 10, 10, 1, 30], [61, 50, 60, 60]),
    ([60, 10, 14, 1, 1, 98], [100, 84]),
    ([150, 3, 10, 30, 60], [90, 163]),
    ([5, 20, 1, 90], [90, 26]),
    ([10, 5, 5, 90], [90, 20]),
    ([200], [200]),
]


def test_groups_are_those_of_the_engine() -> None:
    from tersegrad.engine import GPU_GROUP_BYTES, GROUP_BYTES, make_groups
    from tersegrad.planner.plan import BUCKET, GPU_GROUP

    assert (BUCKET, GPU_GROUP) == (GROUP_BYTES, GPU_GROUP_BYTES)
    shapes = [30, 500, 10, 70, 70, 1, 200]
    named = {f"p{k}": torch.zeros(n) for k, n in enumerate(shapes)}
    for limit in (4, 400, 1000, 10**6):
        assert Workload("w", tuple(shapes), 0, 0, group_bytes=limit).groups() == [
            g.spec.numel for g in make_groups(named, limit)
        ]
    for sizes, wanted in LAST:
        named = {f"p{k}": torch.empty(n << 18, device="meta") for k, n in enumerate(sizes)}
        made = [g.spec.numel for g in make_groups(named, 100 << 20)]
        assert Workload("w", tuple(n << 18 for n in sizes), 0, 0, group_bytes=100 << 20).groups() == made
        assert [n >> 18 for n in made] == wanted


def test_slow_links_get_coarse_settings_and_fast_ones_none() -> None:
    chosen = []
    for rate in (1e7, 1e8, 1e9, 1e10, 1e12):
        plan = make_plan(MODEL, Topology(4, Link(rate, 1e-4)), ALL)
        assert plan.forecasts == tuple(sorted(plan.forecasts, key=lambda f: f.seconds))
        chosen.append(["bf16", *LADDER].index(plan.chosen.setting.compressor))
        assert plan.chosen.seconds <= plan.baseline.seconds
    assert chosen == sorted(chosen, reverse=True)
    assert chosen[0] == len(LADDER)
    assert chosen[-1] == 0
    assert plan.verdict.startswith("do not compress: the link is not your bottleneck")


def test_pays_below_is_where_it_stops_to_pay() -> None:
    plan = make_plan(MODEL, Topology(4, Link(1e8, 1e-4)), ALL)
    assert plan.verdict.startswith("compress with ")
    assert plan.pays_below is not None
    for factor, worth in ((0.9, True), (1.1, False)):
        rate = factor * plan.pays_below
        ours, dense = (plan.again(one.setting, rate).seconds for one in (plan.chosen, plan.baseline))
        assert (ours < (1 - WORTH) * dense) is worth


@pytest.mark.parametrize("factor", [0.9, 0.98, 0.999, 1.001, 1.02, 1.1])
def test_the_verdict_agrees_with_itself_beside_its_border(factor: float) -> None:
    """Below the rate that it names it advises to compress, above it against that."""
    border = make_plan(MODEL, Topology(4, Link(1e11, 1e-4)), ALL).pays_below
    assert border is not None
    rate = factor * border
    plan = make_plan(MODEL, Topology(4, Link(rate, 1e-4)), ALL)
    assert plan.chosen.setting.dense is (factor > 1)
    assert plan.pays_below is not None
    assert (plan.pays_below < rate) is (factor > 1)


def test_slow_coding_is_not_worth_it() -> None:
    slow = {c: m if c in ("bf16", "identity") else dataclasses.replace(m, coding=Coding(1e-6, 1e-6)) for c, m in ALL.items()}
    plan = make_plan(MODEL, Topology(4, Link(1e9, 1e-4)), slow)
    assert plan.chosen.setting.dense
    assert "coding takes longer" in plan.verdict
    assert "would pay below" in plan.verdict


def test_latency_is_named() -> None:
    plan = make_plan(MODEL, Topology(4096, Link(1e8, 0.08)), ALL)
    assert "latency, not bandwidth" in plan.verdict
    assert "exchange less often" in plan.verdict
    for words, row in (("with Adam", advice.row("adam", 100)), ("with momentum", advice.row("momentum", 100))):
        assert f"{words}, {row.local} with {row.compressor}" in plan.verdict


def test_a_coarser_rung_must_be_worth_it() -> None:
    base, one, two = (
        dataclasses.replace(make_plan(MODEL, Topology(4, Link(1e8)), ALL).baseline, setting=s, seconds=t)
        for s, t in ((Setting("bf16", "all_reduce"), 1.0), (Setting("a", "two_shot"), 0.5), (Setting("b", "two_shot"), 0.49))
    )
    assert choose([base, one, two], ["a", "b"]) is one
    assert choose([base, two], ["a", "b"]) is two
    assert choose([base], ["a", "b"]) is base


def test_what_the_backward_pass_hides_gets_finer_settings() -> None:
    """As many of the first groups as fit in the time of the step, the finest setting first, and never the last group."""
    groups = [1_000_000, 2_000_000, 2_000_000, 1_400_000, 200_000]  # an exchange passes while the next group is computed
    model = Workload("m", tuple(reversed(groups)), 0.1, 1.0, dense_below=0)
    where = Topology(4, Link(1.3e8, latency=1e-4))
    coarse, medium = Measured(Coding(2e-9, 2e-9), 2.0, 0.01), Measured(Coding(1e-9, 1e-9), 6.0, 0.001, True)
    found = {"coarse": coarse, LADDER[0]: medium, "bf16": Measured(Coding(1e-10, 1e-10), 16.0, 0.0, True)}
    best = forecast(Setting("coarse", "two_shot"), model, where, coarse, groups=groups)
    finer = [Setting("bf16", "all_reduce"), Setting(LADDER[0], "two_shot")]
    mixed = mix(best, finer, model, where, found, groups)
    assert mixed.mixed == (finer[0], finer[1], finer[1], best.setting, best.setting)
    assert mixed.setting == best.setting
    assert mixed.seconds <= (1 + HIDDEN) * best.seconds
    assert mixed.sent > best.sent

    def seconds(chosen: list[Setting]) -> float:
        """The step with these settings, group by group."""
        parts = [(s.exchange, n, where, found[s.compressor]) for s, n in zip(chosen, groups)]
        trips = [trip(name, n, where, m.bits, m.coding, m.fixed_size) for name, n, where, m in parts]
        return 0.1 + simulate([n / sum(groups) for n in groups], trips).seconds

    chosen = list(mixed.mixed)
    assert seconds(chosen) == pytest.approx(mixed.seconds)
    for more in ([finer[0], finer[0], *chosen[2:]], [*chosen[:3], finer[1], chosen[4]]):
        assert seconds(more) > (1 + HIDDEN) * best.seconds
    # Where nothing is hidden, or there is one group, nothing is mixed.
    slow = Topology(4, Link(1e6, latency=1e-3))
    waiting = forecast(best.setting, model, slow, coarse, groups=groups)
    assert mix(waiting, finer, model, slow, found, groups) == waiting
    assert mix(best, finer, model, where, found, [sum(groups)]) == best


def test_of_two_exchanges_that_take_as_long_the_one_that_compresses_once_is_taken() -> None:
    base = forecast(Setting("bf16", "all_reduce"), MODEL, Topology(2, Link(1e8)), ALL["bf16"])

    def chosen(two_shot: float, all_gather: float) -> Setting:
        times: dict[ExchangeName, float] = {"two_shot": two_shot, "all_gather": all_gather}
        own = [dataclasses.replace(base, setting=Setting(LADDER[0], name), seconds=t) for name, t in times.items()]
        return choose([base, *own], LADDER).setting

    half = base.seconds / 2
    assert chosen(half, 1.02 * half) == Setting(LADDER[0], "all_gather")
    assert chosen(half, 1.04 * half) == Setting(LADDER[0], "two_shot")
    assert chosen(1.02 * half, half) == Setting(LADDER[0], "all_gather")


def test_by_variance_waits_for_the_end_of_the_backward_pass() -> None:
    same = forecast(Setting("x", "all_gather"), MODEL, Topology(2, Link(1e9)), measured(0.1))
    late = forecast(Setting("x", "all_gather"), MODEL, Topology(2, Link(1e9)), measured(0.1), by_variance=True)
    assert late.seconds > same.seconds + 0.3 * MODEL.compute


def test_small_tensors_travel_dense() -> None:
    many = Workload("norms", (10**6, *(900,) * 100), 0.1, 0.1)
    found = forecast(Setting("x", "two_shot"), many, Topology(2, Link(1e9)), measured(0.1))
    assert found.bits == pytest.approx((0.1 * 1e6 + 32 * 90_000) / 1_090_000)


# ------------------------------------------------------------------------------------------------------------------ measuring


def test_measured_coding_is_of_real_messages() -> None:
    x = torch.randn(1 << 14, generator=torch.Generator().manual_seed(3))
    found = measure_coding(tersegrad.parse("qsgd(bits=4, norm=max)"), x, budget=0)
    told = tersegrad.roundtrip("qsgd(bits=4, norm=max)", x)
    assert found.bits == told.bits_per_coordinate
    assert found.error == pytest.approx(told.error, rel=0.2)
    assert found.fixed_size
    assert all(t > 0 for t in (found.coding.encode + found.coding.each_encode, found.coding.decode + found.coding.each_decode))


def test_inside_a_job_the_turns_of_others_count() -> None:
    calls = itertools.count()

    def body() -> None:
        if next(calls) % 10 == 9:  # another process has the core for a while
            time.sleep(0.02)

    alone, shared = (_Clock(torch.device("cpu"), in_job).seconds(body, 0.2) for in_job in (False, True))
    assert alone < 0.0005
    assert 0.001 < shared < 0.01


def test_variance_based_compressors_get_moments() -> None:
    found = measure_coding(tersegrad.parse("vgc(alpha=1.5)"), numel=1 << 16, budget=0)
    assert 0.005 < found.bits < 0.1
    given = measure_coding(tersegrad.parse("vgc(alpha=1.5)"), torch.ones(9000), Stats(torch.zeros(9000)), budget=0)
    assert given.error < 0.1  # nothing is ambiguous, all is sent


def test_casts() -> None:
    half, whole = measure_cast(torch.bfloat16, 1 << 14, budget=0), measure_cast(torch.float32, 1 << 14, budget=0)
    assert (half.bits, whole.bits, whole.error) == (16, 32, 0)
    assert 0 < half.error < 1e-4


def test_bad_input() -> None:
    with pytest.raises(BadConfiguration, match="parameters"):
        Workload("empty", (), 0, 0)
    with pytest.raises(BadConfiguration, match="seconds"):
        Workload("w", (1,), -1, 0)
    with pytest.raises(BadConfiguration, match="bf16"):
        make_plan(MODEL, Topology(4, Link(1e9)), {LADDER[0]: ALL[LADDER[0]]})
    with pytest.raises(BadConfiguration, match="machine"):
        Topology(4, Link(1e9), per_node=0)
    with pytest.raises(BadConfiguration, match="empty"):
        measure_coding(tersegrad.parse("bf16"), torch.zeros(0))
    assert math.isinf(
        make_plan(MODEL, Topology(4, Link(1e9)), ALL | {"bf16": measured(16, coding=Coding(1.0))}).pays_below or 0
    )

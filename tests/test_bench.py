"""Measurements: a broken compressor is refused, a correct one is measured, and the clock counts what it says."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import ClassVar

import pytest
import torch
from benchmarks import registry
from torch import Tensor

from tersegrad import bench
from tersegrad.bench.clock import MEMMOVE
from tersegrad.core.errors import BadConfiguration
from tersegrad.core.protocol import Context, Guarantee, Message, Spec, Stats
from tersegrad.core.text import Configuration


@dataclasses.dataclass(frozen=True)
class Half(Configuration):
    """A correct compressor, small enough to read: bfloat16, with a fused accumulate."""

    name: ClassVar[str] = "half"

    @property
    def wire_id(self) -> int:
        return 999

    def init(self, spec: Spec, device: torch.device | str) -> None:
        return None

    def encode(
        self, x: Tensor, spec: Spec, state: None, ctx: Context, *, stats: Stats | None = None, out: Tensor | None = None
    ) -> tuple[Message, None]:
        data = self.values(x, ctx).bfloat16().view(torch.uint8)
        if out is None:
            return Message(data, data.numel()), None
        out[: data.numel()] = data
        return Message(out, data.numel()), None

    def values(self, x: Tensor, ctx: Context) -> Tensor:
        return x

    def decode(self, message: Message, spec: Spec, ctx: Context, out: Tensor | None = None) -> Tensor:
        x = message.payload.view(torch.bfloat16).float()
        return x if out is None else out.copy_(x)

    def decode_add(self, message: Message, spec: Spec, ctx: Context, out: Tensor, weight: float = 1.0) -> Tensor:
        return out.add_(self.decode(message, spec, ctx), alpha=weight)

    def max_nbytes(self, spec: Spec) -> int:
        return 2 * spec.numel

    def guarantee(self, spec: Spec) -> Guarantee:
        return Guarantee("contractive", 2.0**-16, sure=True)


class TooLong(Half):
    def max_nbytes(self, spec: Spec) -> int:
        return spec.numel


class Restless(Half):
    """Draws from the global generator instead of the context."""

    def values(self, x: Tensor, ctx: Context) -> Tensor:
        return x + torch.rand(()) * 1e-2


class Lossy(Half):
    """Loses more than it promises."""

    def values(self, x: Tensor, ctx: Context) -> Tensor:
        return x * 0.9


class Biased(Lossy):
    """Calls itself unbiased and shrinks everything."""

    def guarantee(self, spec: Spec) -> Guarantee:
        return Guarantee("unbiased", 0.5)


class Opposite(Half):
    def values(self, x: Tensor, ctx: Context) -> Tensor:
        return -x

    def guarantee(self, spec: Spec) -> Guarantee:
        return Guarantee("none")


class Doubled(Half):
    """Decodes to another dtype."""

    def decode(self, message: Message, spec: Spec, ctx: Context, out: Tensor | None = None) -> Tensor:
        return super().decode(message, spec, ctx, out).double()


class Stale(Half):
    """Ignores the buffer that it was given."""

    def decode(self, message: Message, spec: Spec, ctx: Context, out: Tensor | None = None) -> Tensor:
        return super().decode(message, spec, ctx) if out is None else out


class Heavy(Half):
    def decode_add(self, message: Message, spec: Spec, ctx: Context, out: Tensor, weight: float = 1.0) -> Tensor:
        return out.add_(self.decode(message, spec, ctx))


class Poisoned(Half):
    def values(self, x: Tensor, ctx: Context) -> Tensor:
        return torch.where(torch.arange(x.numel()) == 7, torch.nan, x)


@pytest.fixture
def x() -> Tensor:
    return bench.draw("gaussian", 10_000)


def test_correct_compressor_is_measured(x: Tensor) -> None:
    speed = bench.measure_speed(Half(), x, rounds=3)
    assert speed.bits_per_coordinate == 16
    assert 0 < speed.error < 2**-16
    assert speed.decode_add is not None
    for timing in (speed.memmove, speed.encode, speed.decode, speed.decode_add):
        assert timing.rounds == 3
        assert timing.nbytes == 40_000
        assert timing.seconds > 0
        assert timing.gigabytes == pytest.approx(40_000 / timing.seconds / 1e9)


@pytest.mark.parametrize(
    ("broken", "why"),
    [
        (TooLong, "max_nbytes promises"),
        (Restless, "different bytes"),
        (Lossy, "guarantees"),
        (Biased, "unbiased"),
        (Opposite, "points away"),
        (Doubled, "float64"),
        (Stale, "given buffer"),
        (Heavy, "decode_add differs"),
        (Poisoned, "NaN"),
    ],
)
@pytest.mark.parametrize("measure", [bench.measure_speed, bench.measure_rate, bench.check])
def test_broken_compressor_is_refused(broken: type[Half], why: str, measure: Callable[..., object], x: Tensor) -> None:
    with pytest.raises(bench.Refused, match=why):
        measure(broken(), x)


def test_zero_tensor_is_refused() -> None:
    with pytest.raises(bench.Refused, match="not zero"):
        bench.check(Half(), torch.zeros(10))


def test_output_that_changes_while_timed_is_refused(x: Tensor) -> None:
    class Tiring(Half):
        """Correct for the first few calls only, as a kernel with a race might be."""

        calls: ClassVar[list[int]] = []

        def values(self, x: Tensor, ctx: Context) -> Tensor:
            self.calls.append(1)
            return x if len(self.calls) < 5 else x * 1.01

    with pytest.raises(bench.Refused, match="changed while it was timed"):
        bench.measure_speed(Tiring(), x, rounds=3)


def test_race_alternates_and_reports_the_ratio_to_memmove() -> None:
    calls: list[str] = []
    timings = bench.race({"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, 1 << 12, rounds=4, shortest=0)
    assert calls == ["a", "a", "b", "b", *["a", "b"] * 4]  # two calls each to warm up, then in turn
    assert timings[MEMMOVE].ratio == 1
    assert set(timings) == {MEMMOVE, "a", "b"}


def test_faster_is_the_median_of_rounds() -> None:
    fast, slow = bench.Timing(1, 1, 1, (1.0, 1.0, 9.0)), bench.Timing(2, 1, 1, (2.0, 2.0, 9.0))
    assert fast.times_faster_than(slow) == 2
    assert fast.rounds == 3


def test_race_stops_at_its_budget_but_not_before_the_third_round() -> None:
    assert bench.race({"a": lambda: None}, 64, rounds=50, budget=0)["a"].rounds == 3


def test_thread_count_is_restored() -> None:
    before = torch.get_num_threads()
    with bench.thread_count(2):
        assert torch.get_num_threads() == 2
    assert torch.get_num_threads() == before


def test_rate_of_a_known_compressor(x: Tensor) -> None:
    rate = bench.measure_rate(Half(), [x, 3 * x], source="gaussian")
    assert rate.messages == 2
    assert rate.ratio == 2
    assert rate.limit == pytest.approx(0.5 * math.log2(1 / rate.error))
    assert rate.gap == pytest.approx(16 - rate.limit)
    assert rate.source_limit == pytest.approx(rate.limit)


def test_limit_of_unbiased_and_exact_messages() -> None:
    assert bench.limit_at(1 / 3, Guarantee("unbiased", 1.0))[0] == pytest.approx(1.0)
    assert bench.limit_at(0.25, Guarantee("contractive", 0.5))[0] == pytest.approx(1.0)
    assert bench.limit_at(2.0, Guarantee("none"))[0] == 0
    assert bench.limit_at(0.0, Guarantee("contractive", 0.0))[0] == math.inf
    laplace = bench.limit_at(0.1, Guarantee("contractive", 0.5), "laplace")[1]
    assert laplace is not None
    assert laplace < bench.limit_at(0.1, Guarantee("contractive", 0.5))[0]


@pytest.mark.parametrize(("source", "variance"), [("gaussian", 1.0), ("laplace", 2.0), ("student_t", 3.0)])
def test_sources(source: str, variance: float) -> None:
    drawn = bench.draw(source, 400_000)
    assert drawn.dtype == torch.float32
    assert bool(torch.isfinite(drawn).all())
    assert torch.equal(drawn, bench.draw(source, 400_000))
    assert not torch.equal(drawn[:10], bench.draw(source, 10, seed=1))
    assert float(drawn.double().square().mean()) == pytest.approx(variance, rel=0.2 if source == "student_t" else 0.02)
    assert abs(float(drawn.mean())) < 0.02


def test_unknown_source_and_bad_files(tmp_path: object) -> None:
    with pytest.raises(BadConfiguration, match="gaussian"):
        bench.draw("cauchy", 3)
    with pytest.raises(BadConfiguration, match="neither a file"):
        bench.load("cauchy", 3)


def test_machine_line_is_one_line() -> None:
    line = bench.describe()
    assert "\n" not in line
    assert "core" in line
    assert "torch" in line


def test_every_benchmark_of_the_registry_has_a_setup_and_known_targets() -> None:
    cases = registry.load()
    assert len(cases) > 40
    for case in cases.values():
        assert all(target > 0 for target in case.targets.values()), case.name


def test_a_registered_benchmark_runs_and_is_judged_at_full_size_only() -> None:
    def setup(numel: int) -> registry.Work:
        bodies = {"one": lambda: None, "two": lambda: None}
        return registry.Work(bodies, numel, lambda: None, {"size": registry.Fact(3.0, "bits")})

    versus = {"gain": registry.Versus(fast="two", slow="one")}
    targets = {"one": 1e-9, "gain": 1e9, "size": 3.5}
    case = registry.Benchmark("test", setup, 1 << 20, targets, isa=None, threads=1, versus=versus, shrinks=True)
    full = {r.quantity: r.reached for r in registry.execute(case)}
    assert full == {"one": True, "two": None, "gain": False, "size": True}
    assert all(r.reached is None for r in registry.execute(case, quick=True))


def test_a_benchmark_with_wrong_output_is_refused() -> None:
    def setup(numel: int) -> registry.Work:
        return registry.Work({"body": lambda: None}, 64, lambda: registry.refuse_unless(False, "wrong"))

    with pytest.raises(bench.Refused, match="wrong"):
        registry.execute(registry.Benchmark("test", setup, 64, {}, isa=None, threads=1, versus={}, shrinks=True))

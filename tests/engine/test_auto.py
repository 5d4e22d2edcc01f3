"""``attach(model, "auto")`` between real ranks: what it chooses on slow and fast links, alike on all ranks, said aloud, and chosen anew."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
import re
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from tersegrad.core.errors import BadConfiguration
from tersegrad.core.protocol import Context, Spec
from tersegrad.engine import Settings, auto
from tersegrad.exchange import scheme, virtual
from tersegrad.integrations import fsdp
from tersegrad.planner import Coding, Forecast, Link, Measured, Setting
from tersegrad.planner.plan import LADDER
from tests.engine.models import sharded, start
from tests.exchange.pool import Pool

SLOW, FAST = Link(1e3), Link(1e15)  # so slow that a busy machine's computing does not count
COARSE = LADDER[-1]


@contextlib.contextmanager
def world(link: Link, **settings: Any) -> Iterator[list[str]]:
    """A made-up link and quick, made-up coding that differs from rank to rank; short phases. Gives what was logged."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]

    def coded(compressor: object, *_: object, **__: object) -> Measured:
        bits = {LADDER[0]: 8.0, LADDER[1]: 2.0}.get(str(compressor), 16.0)
        return Measured(Coding(1e-12 * (1 + dist.get_rank())), bits, 1 / bits)

    changed = {"measure_link": lambda _: link, "measure_coding": coded, "WARM": 3, "CHECK": 4, **settings}
    before = {name: getattr(auto, name) for name in changed}
    logging.getLogger("tersegrad").addHandler(handler)
    try:
        for name, value in changed.items():
            setattr(auto, name, value)
        yield said
    finally:
        logging.getLogger("tersegrad").removeHandler(handler)
        for name, value in before.items():
            setattr(auto, name, value)


def job_choose(kind: str, link: Link, exchange: str | None) -> dict[str, Any]:
    with world(link) as said:
        run = start(kind, "auto", exchange, dense_below=20)
        run.steps(0, 3)
        early = dict(run.handle.report())
        run.steps(3, 6)
        run.handle.check_replicas()
        report = run.handle.report()
    return {"early": early, "report": report, "said": said}


@pytest.mark.parametrize("kind", ["ddp", "fsdp", "nodes", "local_sgd"])
def test_a_slow_link_gets_the_coarsest_rung(ranks: Pool, kind: str) -> None:
    found = ranks.run(job_choose, kind, SLOW, None)
    for rank, one in enumerate(found):
        assert one["early"]["auto/decisions"] == one["early"]["auto/decided"] == 0
        assert "measuring until step" in one["early"]["auto/why"]
        report = one["report"]
        assert report["auto/decisions"] == report["auto/decided"] == 1
        assert report["auto/choice"].startswith(COARSE)
        assert COARSE in report["compressor"]
        assert "link 1 kbit/s" in report["auto/why"]
        assert "with bf16" in report["auto/why"]
        assert len(one["said"]) == (rank == 0)
        assert report["auto/choice"] == found[0]["report"]["auto/choice"]
    assert COARSE in found[0]["said"][0]
    assert "step 3" in found[0]["said"][0]


@pytest.mark.parametrize("kind", ["ddp", "local_sgd"])
def test_the_exchange_may_be_named_auto_too(ranks: Pool, kind: str) -> None:
    for one in ranks.run(job_choose, kind, SLOW, "auto"):
        assert one["report"]["auto/choice"].startswith(COARSE)


def job_sharded() -> str:
    model = sharded(init_device_mesh("cpu", (dist.get_world_size(),)))
    return str(fsdp.attach(model, "auto", "auto").report()["auto/choice"])


def test_fsdp_takes_auto_twice_as_well(ranks: Pool) -> None:
    assert ranks.run(job_sharded) == ["bf16"] * 4


def job_auto_between() -> str:
    with pytest.raises(BadConfiguration) as error:
        start("nodes", "auto", "auto")
    return str(error.value)


def test_between_nodes_auto_does_not_choose_the_exchange(ranks: Pool) -> None:
    assert all("leave the exchange out" in told for told in ranks.run(job_auto_between))


@pytest.mark.parametrize("kind", ["ddp", "fsdp", "local_sgd"])
def test_a_fast_link_gets_no_compression(ranks: Pool, kind: str) -> None:
    for one in ranks.run(job_choose, kind, FAST, None):
        report = one["report"]
        assert report["auto/decisions"] == 1
        assert report["auto/choice"] == ("bf16, reduce_scatter" if kind == "fsdp" else "bf16, all_reduce")
        assert report["changes"] == 0
        assert report["bits_per_coordinate"] == pytest.approx(16, rel=0.3)


def test_an_exchange_of_the_users_stays(ranks: Pool) -> None:
    for one in ranks.run(job_choose, "ddp", SLOW, "all_gather"):
        assert one["report"]["exchange"] == "all_gather"
        assert one["report"]["auto/choice"] == f"{COARSE}, all_gather"
        assert one["early"]["compressor"] == "bf16"


def job_dense(compressor: str | None, exchange: str | None) -> tuple[Any, dict[str, Any]]:
    with world(FAST):
        run = start("ddp", compressor, exchange)
        run.steps(0, 8)
        return [p.detach().clone() for p in run.model.parameters()], dict(run.handle.report())


def test_dense_steps_are_those_of_torch(ranks: Pool) -> None:
    """After the decision torch's own hook does the work: the same steps, the same count of bytes."""
    by_hook, by_engine = ranks.run(job_dense, "auto", None), ranks.run(job_dense, "bf16", "two_shot")
    for (mine, report), (theirs, _) in zip(by_hook, by_engine):
        assert report["steps"] == 8
        for a, b in zip(mine, theirs):
            torch.testing.assert_close(a, b, rtol=0.05, atol=2e-3)
        numel = sum(p.numel() for p in mine)
        assert report["bytes/sent"] == pytest.approx(8 * 2 * 3 / 4 * 2 * numel, rel=0.01)
        assert "nothing is compressed" in report["verdict"]
    for (a, _), (b, _) in itertools.pairwise(by_hook):
        assert all(torch.equal(x, y) for x, y in zip(a, b))


class Clock:
    """Stands still unless told."""

    now = 0.0

    def perf_counter(self) -> float:
        return self.now


def job_trial(kind: str, slow: str) -> dict[str, Any]:
    """Forecasts that are nearly alike, and steps that take twice as long with the setting whose name begins with ``slow``."""
    told, clock = {"bf16": 1.0, LADDER[0]: 0.9, LADDER[1]: 0.84}, Clock()

    def forecast(setting: Setting, *_: object, **__: object) -> Forecast:
        return Forecast(setting, told[setting.compressor] + (setting.exchange == "all_gather"), 0.0, 1.0, 1.0, 0.0)

    def mix(best: Forecast, *_: object) -> Forecast:
        return best

    with world(FAST, TRIAL=4, forecast=forecast, mix=mix, time=clock) as said:
        run, used, decided = start(kind, "auto", dense_below=20), [], []
        for step in range(3 + 3 * 4 + 2):
            run.steps(step, step + 1)
            used.append(str(run.handle.report()["auto/choice"]).partition("(")[0].partition(",")[0])
            decided.append(run.handle.report()["auto/decided"])
            clock.now += 100.0 if used[-1] == slow else 50.0
        run.handle.check_replicas()
        return {"report": run.handle.report(), "said": said, "used": used, "decided": decided}


@pytest.mark.parametrize("kind", ["ddp", "fsdp", "local_sgd"])
def test_what_a_forecast_does_not_tell_the_clock_does(ranks: Pool, kind: str) -> None:
    rungs = ["bf16", "qsgd", "error_feedback"]
    for slow, best in (("bf16", "qsgd"), ("qsgd", "bf16")):
        found = ranks.run(job_trial, kind, slow)
        for rank, one in enumerate(found):
            assert one["used"] == ["bf16"] * 3 + [rung for rung in rungs for _ in range(4)] + [best] * 2
            assert one["report"]["auto/decisions"] == 1
            assert one["decided"] == [0] * 15 + [1] * 2
            assert "tried: a step takes 50.0 s" in one["report"]["auto/why"]
            assert len(one["said"]) == (rank == 0)


def job_groups(slow: bool) -> dict[str, Any]:
    """A forecast by which the first two groups may have finer settings in the same time; ``slow``: the clock says otherwise."""
    clock = Clock()

    def mix(best: Forecast, finer: list[Setting], *_: object) -> Forecast:
        return dataclasses.replace(best, mixed=(*finer, *[best.setting] * (len(run.handle.engine.lanes) - 2)))

    with world(SLOW, TRIAL=4, DOUBT=-1.0, time=clock, mix=mix) as said:
        run, choices, lanes = start("ddp", "auto", dense_below=20, group_bytes=1000), [], []
        for step in range(3 + 2 * 4 + 2):
            run.steps(step, step + 1)
            choices.append(str(run.handle.report()["auto/choice"]))
            lanes.append([f"{lane.compressor}, {lane.scheme.name}" for lane in run.handle.engine.lanes])
            clock.now += 60.0 if slow and "group" in choices[-1] else 50.0
        run.handle.check_replicas()
        saved = run.handle.state_dict()
        other = start("ddp", "auto", dense_below=20, group_bytes=1000)
        other.model.load_state_dict(run.model.state_dict())
        other.handle.load_state_dict(saved)
        restored = [f"{lane.compressor}, {lane.scheme.name}" for lane in other.handle.engine.lanes]
        for each in (run, other):
            each.steps(20, 22)
        return {
            "choices": choices, "lanes": lanes, "restored": restored, "same": run.bits() == other.bits(),
            "report": run.handle.report(), "said": said,
        }  # fmt: skip


@pytest.mark.parametrize("slow", [False, True])
def test_groups_that_the_backward_pass_hides_get_finer_settings(ranks: Pool, slow: bool) -> None:
    for rank, one in enumerate(ranks.run(job_groups, slow)):
        before, plain, mixed = one["lanes"][0], one["lanes"][4], one["lanes"][8]
        assert len(plain) > 2
        assert len(set(before)) == len(set(plain)) == 1
        assert mixed[:2] == ["identity, all_reduce", f"{LADDER[0]}, two_shot"]
        assert mixed[2:] == plain[2:]
        assert one["lanes"][3:7] == [plain] * 4
        assert one["lanes"][7:11] == [mixed] * 4
        assert one["lanes"][11:] == [plain if slow else mixed] * 2
        assert one["choices"][8] == f"{plain[0]}; bf16, all_reduce for group 0; {mixed[1]} for group 1 of {len(plain)}"
        assert one["choices"][12] == one["choices"][4 if slow else 8]
        assert one["report"]["auto/decisions"] == 1
        assert "one setting for all" in one["report"]["auto/why"] or slow
        assert "groups of their own 60.0 s" in one["report"]["auto/why"] or not slow
        assert len(one["said"]) == (rank == 0)
        # A checkpoint goes on group by group.
        assert one["restored"] == one["lanes"][12]
        assert one["same"]


def job_chosen_anew() -> dict[str, Any]:
    run = None
    with world(FAST) as said:
        run = start("ddp", "auto", dense_below=20)
        run.steps(0, 8)
        first = run.handle.report()["auto/choice"]
    with world(SLOW) as more:
        # Steps take much longer all of a sudden, as they do on a link that has become slow.
        for step in range(8, 30):
            time.sleep(0.05)
            run.steps(step, step + 1)
            if int(run.handle.report()["auto/decisions"]) == 2:
                break
        run.steps(30, 32)
        run.handle.check_replicas()
        return {"first": first, "report": run.handle.report(), "said": said + more, "step": run.handle.step}


def test_conditions_change(ranks: Pool) -> None:
    found = ranks.run(job_chosen_anew)
    for one in found:
        assert one["first"] == "bf16, all_reduce"
        assert one["report"]["auto/decisions"] == 2
        assert one["report"]["auto/choice"].startswith(COARSE)
        assert one["step"] == found[0]["step"]
    assert len(found[0]["said"]) == 2


def job_stays() -> float:
    with world(SLOW, CHECK=2):
        run = start("ddp", "auto", dense_below=20)
        run.steps(0, 16)
        return float(run.handle.report()["changes"])


def test_what_is_still_good_stays(ranks: Pool) -> None:
    """However often it decides on a noisy machine, the same answer changes nothing."""
    assert ranks.run(job_stays) == [1.0] * 4


def job_not_finite() -> dict[str, Any]:
    with world(SLOW) as said:
        run = start("ddp", "auto", dense_below=20)
        run.steps(0, 2)
        run.optimizer.zero_grad()
        scale = float("inf") if dist.get_rank() == 2 else 1.0
        (run.model(torch.ones(4, 10)).sum() * scale).backward()  # the step whose gradient would be looked at
        run.steps(3, 4)
        early = run.handle.report()["auto/decisions"]
        run.steps(4, 6)
        return {"early": early, "report": run.handle.report(), "said": said}


def test_a_gradient_that_is_not_finite_is_not_looked_at(ranks: Pool) -> None:
    for one in ranks.run(job_not_finite):
        assert one["early"] == 0
        assert one["report"]["auto/decisions"] == 1
        assert one["report"]["auto/choice"].startswith(COARSE)


def job_warmup() -> list[Any]:
    with world(SLOW):
        run = start("ddp", "auto", dense_below=20, warmup_steps=4)
        found = []
        for step in range(8):
            run.steps(step, step + 1)
            found.append(run.handle.report()["auto/decisions"])
        return found


def test_warm_up_comes_first(ranks: Pool) -> None:
    for found in ranks.run(job_warmup):
        assert found == [0] * 7 + [1]


def job_resume() -> tuple[bool, str]:
    with world(SLOW):
        one = start("ddp", "auto", dense_below=20)
        one.steps(0, 6)
        saved = one.handle.state_dict()
        weights = {name: value.clone() for name, value in one.model.state_dict().items()}
        two = start("ddp", "auto", dense_below=20)
        two.model.load_state_dict(weights)
        two.handle.load_state_dict(saved)
        chosen = two.handle.exchange
        one.steps(6, 8)
        two.steps(6, 8)
        return one.bits() == two.bits(), chosen


def test_a_checkpoint_continues_with_the_choice(ranks: Pool) -> None:
    for equal, exchange in ranks.run(job_resume):
        assert equal
        assert exchange in ("two_shot", "all_gather")


def job_real() -> dict[str, Any]:
    run = start("ddp", "auto")
    for step in range(auto.WARM + (3 + len(LADDER)) * auto.TRIAL + 2):
        run.steps(step, step + 1)
    return dict(run.handle.report())


def test_with_everything_measured(ranks: Pool) -> None:
    found = ranks.run(job_real)
    assert len({one["auto/choice"] for one in found}) == 1
    assert all(one["auto/decisions"] == 1 for one in found)
    assert all(one["link/bits_per_second"] > 0 for one in found if "link/bits_per_second" in one)


def test_bad_input() -> None:
    with pytest.raises(BadConfiguration, match="auto and a schedule"):
        Settings.make("auto", None, schedule=lambda step: None)
    with pytest.raises(BadConfiguration, match="compresses by itself"):
        Settings.make("bf16", "all_reduce")
    for exchange in ("all_reduce", "power_sgd(rank=2)"):
        with pytest.raises(BadConfiguration, match=f"auto chooses a compressor, and {re.escape(exchange)} takes none"):
            Settings.make("auto", exchange)
    with pytest.raises(BadConfiguration, match='give "auto" for both, or an exchange for int8'):
        Settings.make("int8", "auto")
    with pytest.raises(BadConfiguration, match="dtype"):
        scheme("all_reduce(dtype=int8)")


@pytest.mark.parametrize(("dtype", "close"), [("float32", 1e-6), ("bf16", 0.03), ("fp16", 4e-3)])
def test_all_reduce_is_an_exchange(dtype: str, close: float) -> None:
    made, spec = scheme(f"all_reduce(dtype={dtype})").make(None), Spec.flat(1000)  # type: ignore[arg-type]
    vectors = [torch.randn(1000, generator=torch.Generator().manual_seed(rank)) for rank in range(4)]
    outcome = virtual.run(made, vectors, virtual.init(made, spec, 4), spec, Context())
    torch.testing.assert_close(outcome.mean, torch.stack(vectors).mean(0), rtol=close, atol=close)
    assert outcome.sent[0] == 1.5 * 1000 * (4 if dtype == "float32" else 2)


def test_settings_are_values() -> None:
    one = Settings.make("auto", None)
    assert (one.auto, one.scheme.name) == ("both", "all_reduce")
    assert Settings.make("auto", "auto") == one
    assert dataclasses.replace(one, auto="").facts() != one.facts()

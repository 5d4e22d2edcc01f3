"""A step of the engine on a simulated device: one finite flag, and at most one read per group and direction."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import tersegrad
from tersegrad import kernels
from tersegrad.core import trust
from tersegrad.core.errors import BadConfiguration
from tersegrad.core.protocol import Piece, Spec
from tersegrad.core.sums import decode_sum
from tersegrad.engine.engine import Engine, Route
from tersegrad.engine.groups import Group
from tersegrad.engine.logs import Log
from tersegrad.engine.meter import TimedGroup
from tersegrad.engine.replicas import ReplicasDiffer
from tersegrad.engine.settings import Settings
from tersegrad.engine.step import Step
from tersegrad.exchange import all_gather
from tests.device import Device, OnDevice

GROUPS, ROWS = 3, 40


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    monkeypatch.setattr(kernels, "FASTER", {"cpu": ("native",)})
    with Device() as made:
        yield made


def engine_of(compressor: str, exchange: str, device: Device, kind: str = "test") -> Engine:
    """An engine with three groups."""
    specs = [Spec((Piece((ROWS, 50), 0, ROWS * 50, f"{j}.weight"),)) for j in range(GROUPS)]
    link = TimedGroup()
    groups = [Group(j, spec, torch.float32, device.device) for j, spec in enumerate(specs)]
    return Engine(kind, [Route(group, link) for group in groups], Settings.make(compressor, exchange, dense_below=0))


def vectors(device: Device, bad: bool) -> list[Tensor]:
    """What the groups exchange; one of them is not finite where it is ``bad``."""
    xs = [device.to(torch.randn(ROWS * 50, generator=torch.Generator().manual_seed(j))) for j in range(GROUPS)]
    if bad:
        xs[1].fill_(float("inf"))
    return xs


def waits(
    compressor: str, exchange: str, device: Device, bad: bool = False, closes: bool = False, log: Log | None = None
) -> tuple[int, bool]:
    """Waits of one step of three groups, and whether it was committed, or counted as good where it ``closes``."""
    engine, xs = engine_of(compressor, exchange, device), vectors(device, bad)
    if log is not None:
        engine.logs.add(log)
    device.waits.clear()
    with engine.timed():
        step = engine.begin()
        for j, x in enumerate(xs):
            step.submit(j, x)
        for result in step.results().values():
            step.check(result)
        if closes:
            step.close()
        committed = closes or step.commit()
    count = device.count
    return count, committed and engine.totals.dropped == 0


@pytest.mark.usefixtures("single")
@pytest.mark.parametrize("text", ["bf16", "qsgd(bits=4)", "error_feedback(sign)", "rotated(int4)", "random_k(fraction=0.1)"])
@pytest.mark.parametrize("exchange", ["two_shot", "all_gather"])
def test_fixed_rates_wait_for_the_finite_flag_alone(text: str, exchange: str, device: Device) -> None:
    assert waits(text, exchange, device) == (1, True)
    assert waits(text, exchange, device, bad=True) == (1, False)


@pytest.mark.usefixtures("single")
@pytest.mark.parametrize("text", ["bf16", "qsgd(bits=4)", "rotated(int4)", "random_k(fraction=0.1)"])
@pytest.mark.parametrize("exchange", ["two_shot", "all_gather"])
def test_steps_of_fixed_rates_that_close_wait_for_nothing(text: str, exchange: str, device: Device) -> None:
    for one in (text, f"error_feedback({text}, force=true)"):
        assert waits(one, exchange, device, closes=True) == (0, True)
        assert waits(one, exchange, device, bad=True, closes=True) == (0, False)


@pytest.mark.usefixtures("single")
@pytest.mark.parametrize("bad", [False, True])
def test_states_are_decided_before_anyone_sees_them(bad: bool, device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    made = engine_of("error_feedback(sign)", "all_gather", device)
    held = threading.Event()
    kept = Step._keep

    def late(self: Step, *arguments: Any) -> None:
        # On a GPU this thread waits for the flag.
        assert held.wait(20)
        kept(self, *arguments)

    monkeypatch.setattr(Step, "_keep", late)
    # The simulation belongs to this thread.
    monkeypatch.setattr(OnDevice, "__bool__", lambda flag: bool(flag.memory), raising=False)
    before = [lane.state for lane in made.lanes]
    with made.timed():
        step = made.begin()
        for j, x in enumerate(vectors(device, bad)):
            step.submit(j, x, owned=True, seen=True)
        step.results()
        step.close()
    assert made.between_steps
    # What DDP asks at the end of a step does not wait.
    assert not made.wants_moments()
    assert all(lane.state is old for lane, old in zip(made._lanes, before))
    held.set()
    assert [lane.state is old for lane, old in zip(made.lanes, before)] == [bad] * GROUPS


@pytest.mark.usefixtures("single")
def test_fixed_rates_wait_where_their_bytes_go_by_the_host(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for by_host in (False, True):
        monkeypatch.setattr(TimedGroup, "by_host", lambda link, device, by_host=by_host: by_host)
        found += [{lane.waits for lane in engine_of(text, "two_shot", device).lanes} for text in ("qsgd", "top_k(k=3)")]
    assert found == [{False}, {True}, {True}, {True}]


@pytest.mark.usefixtures("single")
def test_results_may_lie_where_the_vectors_were(device: Device) -> None:
    for text, exchange in (("error_feedback(top_k(fraction=0.1))", "all_gather"), ("qsgd(bits=4)", "two_shot")):
        found = []
        for owned in (False, True):
            made, xs = engine_of(text, exchange, device), vectors(device, False)
            for _ in range(2):
                with made.timed():
                    step = made.begin()
                    given = [x.clone() for x in xs]
                    for j, x in enumerate(given):
                        step.submit(j, x, owned=owned, seen=owned)
                    results = step.results()
                    step.check(*(() if owned else results.values()))
                    assert step.commit()
            assert [results[j] is x for j, x in enumerate(given)] == [owned] * GROUPS
            found.append([result.clone() for result in results.values()])
        assert all(torch.equal(a, b) for a, b in zip(*found))


@pytest.mark.usefixtures("single")
@pytest.mark.parametrize("text", ["top_k(fraction=0.1)", "error_feedback(top_k(fraction=0.1))", "sparse_dithering(nu=0.1)"])
def test_variable_rates_wait_once_per_group_and_direction(text: str, device: Device) -> None:
    assert waits(text, "all_gather", device) == (1 + GROUPS, True)
    # There and back: gradients are compressed, and their means once more.
    assert waits(text, "two_shot", device) == (1 + 2 * GROUPS, True)


@pytest.mark.usefixtures("single")
def test_power_sgd_waits_for_the_finite_flag_alone(device: Device) -> None:
    engine_waits, committed = waits("identity", "power_sgd(rank=2)", device)
    assert (engine_waits, committed) == (1, True)


@pytest.mark.usefixtures("single")
@pytest.mark.parametrize("text", ["int8", "error_feedback(sign)", "error_feedback(top_k(fraction=0.1))"])
@pytest.mark.parametrize("layers", [False, True])
def test_a_log_waits_for_the_device_in_its_own_steps_only(text: str, layers: bool, device: Device) -> None:
    lines: list[dict[str, float]] = []
    plain, _ = waits(text, "two_shot", device)
    silent, _ = waits(text, "two_shot", device, log=Log(lambda numbers, step: lines.append(numbers), 2, layers))
    assert (silent, lines) == (plain, [])
    telling, _ = waits(text, "two_shot", device, log=Log(lambda numbers, step: lines.append(numbers), 1, layers))
    assert telling > plain
    assert 0 < lines[0]["message_error"] < 1


@pytest.mark.usefixtures("single")
@pytest.mark.parametrize("wrong", [False, True])
def test_results_that_had_to_be_decoded_again_are_handed_over_again(
    wrong: bool, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, xs = engine_of("error_feedback(sign)", "all_gather", device, "ddp"), vectors(device, False)
    wanted = [tersegrad.roundtrip("sign", x.memory).decoded for x in xs if isinstance(x, OnDevice)]

    def doubtful(compressor: Any, messages: Any, spec: Spec, contexts: Any, out: Tensor) -> Tensor:
        said = trust.numbers(device.to(torch.tensor([int(wrong and spec.pieces[0].name.startswith("1."))])))
        # Believed and wrong: what lies there is of no use, and not even finite.
        decode_sum(compressor, messages, spec, contexts, out)
        return out.fill_(float("nan")) if said == [0] and wrong and spec.pieces[0].name.startswith("1.") else out

    monkeypatch.setattr(all_gather, "decode_sum", doubtful)
    taken: list[dict[int, Tensor]] = []
    with made.timed():
        step = made.begin(4.0, lambda means: taken.append({j: mean.clone() for j, mean in means.items()}))
        for j, x in enumerate(xs):
            step.submit(j, x.mul_(4.0), owned=True, seen=True)
        step.deliver()
        assert step.commit()
    # Each when it has arrived, and all of them once more.
    assert sorted(j for means in taken[: len(taken) - wrong] for j in means) == list(range(GROUPS))
    latest = {j: mean for means in taken for j, mean in means.items()}
    assert len(taken[-1]) == GROUPS or not wrong
    assert all(torch.equal(latest[j].cpu(), 4 * one) for j, one in enumerate(wanted))


@pytest.mark.usefixtures("single")
@pytest.mark.parametrize("bad", [False, True])
def test_good_news_of_messages_leave_the_rest_to_the_device(bad: bool, device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where gradients are bfloat16 the optimiser sees other tensors than the means; whether these are finite nobody waits for."""
    made, xs = engine_of("sign", "all_gather", device, "ddp"), vectors(device, False)

    def noted(compressor: Any, messages: Any, spec: Spec, contexts: Any, out: Tensor) -> Tensor:
        trust.numbers(device.to(torch.tensor([0])))
        return decode_sum(compressor, messages, spec, contexts, out)

    monkeypatch.setattr(all_gather, "decode_sum", noted)
    step = made.begin()
    for j, x in enumerate(xs):
        step.submit(j, x)
    step.results()
    # Nobody has looked at what was believed.
    with pytest.raises(BadConfiguration, match="by deliver"):
        step.close()
    step.abandon()
    device.waits.clear()
    with made.timed():
        step = made.begin(take=lambda means: None)
        for j, x in enumerate(xs):
            step.submit(j, x, owned=True)
        step.deliver()
        assert device.count == 1
        step.check(*(x.bfloat16() * (float("inf") if bad else 1.0) for x in xs))
        step.close()
    assert device.count == 1
    assert made.totals.dropped == bad


@pytest.mark.usefixtures("single")
def test_a_step_that_ends_with_an_error_of_replicas_keeps_its_states(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """The step was taken: what messages left out must not be forgotten, however the step was closed."""
    monkeypatch.setattr(OnDevice, "__bool__", lambda flag: bool(flag.memory), raising=False)
    for how in ("commit", "close"):
        made, xs = engine_of("error_feedback(sign)", "all_gather", device), vectors(device, False)
        made.settings = dataclasses.replace(made.settings, check_every=1)

        def differ() -> None:
            raise ReplicasDiffer("they differ")

        monkeypatch.setattr(made, "check_replicas", differ)
        before = [lane.state for lane in made.lanes]
        step = made.begin()
        for j, x in enumerate(xs):
            step.submit(j, x, owned=True, seen=True)
        step.results()
        with pytest.raises(ReplicasDiffer):
            getattr(step, how)()
        assert made.between_steps
        assert not any(lane.state is old for lane, old in zip(made.lanes, before))

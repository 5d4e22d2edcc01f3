"""A step of the engine on a simulated device: one finite flag, and at most one read per group and direction."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tersegrad import kernels
from tersegrad.core.protocol import Piece, Spec
from tersegrad.engine.engine import Engine, Route
from tersegrad.engine.groups import Group
from tersegrad.engine.logs import Log
from tersegrad.engine.meter import TimedGroup
from tersegrad.engine.settings import Settings
from tests.device import Device

GROUPS, ROWS = 3, 40


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    monkeypatch.setattr(kernels, "FASTER", {"cpu": ("native",)})
    with Device() as made:
        yield made


def waits(
    compressor: str, exchange: str, device: Device, bad: bool = False, closes: bool = False, log: Log | None = None
) -> tuple[int, bool]:
    """Waits of one step of three groups, and whether it was committed, or counted as good where it ``closes``."""
    shape = (ROWS, 50)
    specs = [Spec((Piece(shape, 0, ROWS * 50, f"{j}.weight"),)) for j in range(GROUPS)]
    link = TimedGroup()
    groups = [Group(j, spec, torch.float32, device.device) for j, spec in enumerate(specs)]
    engine = Engine("test", [Route(group, link) for group in groups], Settings.make(compressor, exchange, dense_below=0))
    if log is not None:
        engine.logs.add(log)
    xs = [device.to(torch.randn(ROWS * 50, generator=torch.Generator().manual_seed(j))) for j in range(GROUPS)]
    if bad:
        xs[1].fill_(float("inf"))
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
def test_without_states_fixed_rates_wait_for_nothing(text: str, exchange: str, device: Device) -> None:
    assert waits(text, exchange, device, closes=True) == (0, True)
    assert waits(text, exchange, device, bad=True, closes=True) == (0, False)
    assert waits(f"error_feedback({text}, force=true)", exchange, device, bad=True, closes=True) == (1, False)


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

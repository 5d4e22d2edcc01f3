"""``handle.log_to``: every kind of target gets the numbers of the run, and a run without logs does nothing for them."""

from __future__ import annotations

import csv
import importlib.util
import json
import logging
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tersegrad.core.errors import BadConfiguration, MissingExtra
from tersegrad.core.protocol import Context, Piece, Spec
from tersegrad.engine.layers import by_layer, power_of
from tersegrad.engine.meter import Meter, watch
from tersegrad.integrations import ddp
from tersegrad.recipes import parse
from tests.engine.models import FEEDBACK, Run, net, start

pytestmark = pytest.mark.usefixtures("single")


class Writer:
    """What TensorBoard's SummaryWriter has of what is used."""

    def __init__(self) -> None:
        self.rows: list[tuple[str, float, int]] = []
        self.flushed = 0

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.rows.append((name, value, step))

    def flush(self) -> None:
        self.flushed += 1


def kept(run: Run, **options: Any) -> list[tuple[int, dict[str, float]]]:
    """The lines that a function is called with."""
    lines: list[tuple[int, dict[str, float]]] = []
    run.handle.log_to(lambda numbers, step: lines.append((step, numbers)), **options)
    return lines


def test_a_line_tells_of_the_steps_since_the_one_before() -> None:
    run = start("ddp", measure_every=1)
    lines = kept(run, every=2)
    run.steps(0, 5)
    assert [step for step, _ in lines] == [2, 4]
    report = run.handle.report()
    assert sum(2 * numbers["bytes/sent"] for _, numbers in lines) <= float(report["bytes/sent"])
    for _, numbers in lines:
        assert numbers["ratio"] == 32 / numbers["bits_per_coordinate"]
        assert 0 < numbers["message_error"] < 1
        assert numbers["residual_norm"] > 0
        parts = [numbers[f"seconds/{part}"] for part in ("encode", "decode", "wire", "other")]
        assert min(parts) >= 0
        assert sum(parts) == pytest.approx(numbers["seconds/step"], rel=0.2)
        assert all(math.isfinite(value) for value in numbers.values())


def test_bits_and_error_are_those_of_the_report() -> None:
    run = start("ddp", measure_every=1)
    lines = kept(run, every=3)
    run.steps(0, 3)
    report, (_, numbers) = run.handle.report(), lines[0]
    assert numbers["bits_per_coordinate"] == report["bits_per_coordinate"]
    assert numbers["message_error"] == report["message_error"]
    assert numbers["message_age"] == report["message_age"]
    assert numbers["message_age"] > 0
    assert 3 * numbers["bytes/sent"] == report["bytes/sent"]


def test_the_age_of_messages_is_what_waits_over_what_leaves() -> None:
    meter, spec = Meter(probing=True), Spec.flat(1000)
    watched = watch(parse("error_feedback(top_k(fraction=0.1))"), meter)
    state, x = watched.init(spec, "cpu"), torch.ones(1000)
    # Equal gradients: a tenth of the coordinates takes its turn in each step, so that from the tenth on messages carry ten steps.
    for step in range(40):
        if step == 20:
            meter.waits = meter.out = 0.0
        _, state = watched.encode(x, spec, state, Context(step=step))
    assert meter.age == pytest.approx(4.5, rel=0.02)
    meter = Meter(probing=True)
    watch(parse("qsgd(bits=4)"), meter).encode(x, spec, None, Context())
    assert meter.age is None


def test_only_steps_that_log_are_measured() -> None:
    run = start("ddp")
    lines = kept(run, every=4)
    run.steps(0, 3)
    first = run.handle.engine.totals.meters.first
    assert (first.power, first.probe, lines) == (0.0, 0.0, [])
    run.steps(3, 4)
    assert first.power > 0
    assert "message_error" in lines[0][1]


def test_counters_may_be_reset_between_lines() -> None:
    run = start("ddp")
    lines = kept(run, every=1)
    run.steps(0, 2)
    run.handle.reset_report()
    run.steps(2, 3)
    assert all(numbers["bytes/sent"] >= 0 and numbers["seconds/step"] > 0 for _, numbers in lines)
    assert lines[2][1]["bits_per_coordinate"] == pytest.approx(lines[1][1]["bits_per_coordinate"], rel=0.2)


def test_json_lines(tmp_path: Path) -> None:
    path = tmp_path / "new" / "run.jsonl"
    run = start("ddp")
    run.handle.log_to(path, every=1)
    run.steps(0, 2)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2]
    assert rows[0]["compressor"] == FEEDBACK
    assert rows[0]["exchange"] == "two_shot"
    assert rows[1]["bits_per_coordinate"] > 0


def test_a_table_has_one_head_and_goes_on_below_an_earlier_run(tmp_path: Path) -> None:
    path = tmp_path / "run.csv"
    for _ in range(2):
        run = start("ddp")
        log = run.handle.log_to(str(path), every=1)
        run.steps(0, 2)
        assert log is not None
        log.close()
        run.steps(2, 3)
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["step"] for row in rows] == ["1", "2", "1", "2"]
    assert all(float(row["residual_norm"]) > 0 for row in rows)


def test_a_summary_writer_gets_scalars() -> None:
    run, writer = start("ddp"), Writer()
    log = run.handle.log_to(writer, every=2)
    run.steps(0, 4)
    assert {step for _, _, step in writer.rows} == {2, 4}
    assert all(name.startswith("tersegrad/") and isinstance(value, float | int) for name, value, _ in writer.rows)
    assert log is not None
    log.close()
    assert writer.flushed == 1


def test_a_folder_is_for_tensorboard(tmp_path: Path) -> None:
    run = start("ddp")
    if importlib.util.find_spec("tensorboard") is None:
        with pytest.raises(MissingExtra, match="pip install tensorboard"):
            run.handle.log_to(tmp_path / "runs")
        return
    log = run.handle.log_to(tmp_path / "runs", every=1)
    run.steps(0, 3)
    assert log is not None
    log.close()
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(tmp_path / "runs"))
    found.Reload()
    events = found.Scalars("tersegrad/bits_per_coordinate")
    assert [event.step for event in events] == [1, 2, 3]
    assert all(0 < event.value < 32 for event in events)


@pytest.mark.parametrize("text", [FEEDBACK, "qsgd(bits=4)", "error_feedback(sparse_dithering(alpha=0.1))"])
@pytest.mark.parametrize("exchange", ["two_shot", "all_gather"])
def test_layers_add_up_to_the_message(text: str, exchange: str) -> None:
    run = start("ddp", text, exchange)
    lines = kept(run, every=2, layers=True)
    run.steps(0, 2)
    numbers, shapes = lines[0][1], {name: p.numel() for name, p in net().named_parameters()}
    bits = sum(numbers[f"layer/{name}/bits_per_coordinate"] * size for name, size in shapes.items())
    before = sum(shapes.values()) * numbers["bits_per_coordinate"]  # of two steps, in which the bits differ a little
    assert bits == pytest.approx(before, rel=0.1)
    # What is sent dense is sent exactly, in 32 bits.
    assert numbers["layer/4.bias/bits_per_coordinate"] == 32
    assert numbers["layer/4.bias/message_error"] == 0
    assert 0 < numbers["layer/2.weight/message_error"] < 1
    if "error_feedback" in text:
        squares = [numbers[f"layer/{name}/residual_norm"] ** 2 for name in shapes if f"layer/{name}/residual_norm" in numbers]
        assert math.sqrt(sum(squares)) == pytest.approx(numbers["residual_norm"])


def test_the_error_of_a_layer_is_that_of_its_coordinates() -> None:
    sizes = {"large": 4000, "small": 1000}
    x = torch.cat([torch.randn(n, generator=torch.Generator().manual_seed(n)) for n in sizes.values()])
    x[4000:] *= 0.01  # far below the common step: nothing of it is sent
    spec = Spec(tuple(Piece((n,), 0, n, name) for name, n in sizes.items()))
    compressor, ctx = parse("sparse_dithering(alpha=0.1)"), Context(seed=0)
    message, _ = compressor.encode(x, spec, compressor.init(spec, "cpu"), ctx)
    decoded = compressor.decode(message, spec, ctx)
    found = dict(by_layer(compressor, message, spec, ctx, decoded, decoded - x, x))
    assert found["small"].error / found["small"].power == pytest.approx(1)
    assert found["large"].error / found["large"].power == pytest.approx(0.1, rel=0.05)
    assert found["small"].bits == 0
    assert found["large"].bits == 8 * int(message.nbytes)


@pytest.mark.parametrize("numel", [0, 1, 4095, 4096, 4097, 100_003])
def test_squared_norms(numel: int) -> None:
    x = torch.randn(numel, generator=torch.Generator().manual_seed(numel))
    assert float(power_of(x)) == pytest.approx(float(x.double().square().sum()), rel=1e-6)


def test_a_log_that_fails_is_told_of_and_the_run_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    run, calls = start("ddp"), 0

    def broken(numbers: dict[str, float], step: int) -> None:
        nonlocal calls
        calls += 1
        raise OSError("no space left")

    run.handle.log_to(broken, every=1)
    lines = kept(run, every=1)
    with caplog.at_level(logging.WARNING, "tersegrad"):
        run.steps(0, 3)
    assert calls == 1
    assert len(lines) == 3
    assert [r.message for r in caplog.records] == ["log_to failed in step 1, and this log ends here: OSError: no space left"]


def test_torchs_own_all_reduce_is_logged() -> None:
    run = start("ddp", None, "all_reduce")
    lines = kept(run, every=1)
    run.steps(0, 3)
    assert [step for step, _ in lines] == [1, 2, 3]
    assert "message_error" not in lines[0][1]


def test_a_pair_without_a_model_logs_from_its_first_step_on() -> None:
    model = DistributedDataParallel(nn.Linear(64, 64))
    handle, hook = ddp.make_hook("error_feedback(sign)")
    lines: list[int] = []
    handle.log_to(lambda numbers, step: lines.append(step), every=1)
    model.register_comm_hook(handle, hook)
    for _ in range(3):
        model(torch.ones(2, 64)).sum().backward()
    assert lines == [2, 3]  # the parameters are known after the first one


@pytest.mark.parametrize("target", ["run.txt", 7])
def test_what_is_no_target_is_refused(target: Any) -> None:
    with pytest.raises(BadConfiguration, match=r"log_to takes|a log ends in"):
        start("ddp").handle.log_to(target)


def test_bad_options_and_files_are_refused(tmp_path: Path) -> None:
    handle = start("ddp").handle
    with pytest.raises(BadConfiguration, match="at least 1"):
        handle.log_to(print, every=0)
    (tmp_path / "mine.csv").write_text("a,b\n1,2\n")
    with pytest.raises(BadConfiguration, match="no log of ours"):
        handle.log_to(tmp_path / "mine.csv")
    (tmp_path / "file").write_text("")
    with pytest.raises(BadConfiguration, match="cannot write"):
        handle.log_to(tmp_path / "file" / "run.jsonl")

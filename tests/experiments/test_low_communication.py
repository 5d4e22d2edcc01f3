"""Loss against bytes: the quick form runs through, its numbers are those of real messages, and predictions add up."""

from __future__ import annotations

import dataclasses
import json
import zipfile
from pathlib import Path

import pytest
import torch

pytest.importorskip("matplotlib")

from experiments.low_communication import corpus, predict, run
from experiments.low_communication.methods import CANDIDATES, METHODS, Method
from experiments.low_communication.plans import PLANS, Run

from tersegrad.planner import ETHERNET
from tersegrad.train import models

LOCAL = Method("float32, local", "local, uncompressed", "identity")


def made(**changes: object) -> Run:
    usual = Run(LOCAL, 0, 8, 1_000_000, 600, 1000, 20, 1.5, 140e6, 32.0, 0.0, 1.0, 0.0, 0.0, 60.0, ())
    return dataclasses.replace(usual, **changes)  # type: ignore[arg-type]


def test_quick_run_writes_everything(tmp_path: Path) -> None:
    (tmp_path / "text").mkdir()
    for k in range(40):
        (tmp_path / "text" / f"{k}.py").write_text("".join(f"def f{j}(x):\n    return x * {j + k}\n" for j in range(40)))
    words = [str(tmp_path / "text"), "--plan", "quick", "--only", "bf16;float32;SparseLoCo", "--out", str(tmp_path / "out")]
    assert run.main(words) == 0
    document = json.loads((tmp_path / "out" / "quick.json").read_text())
    labels = [r["method"]["label"] for r in document["results"]]
    assert labels[:3] == ["bf16, every step", "float32, local", "float32, DiLoCo"]
    kept = run.read(tmp_path / "out" / "quick.json", PLANS["quick"])
    bf16, local = kept[0], kept[1]
    assert bf16.exchanges == 20
    assert local.exchanges == 4
    assert local.bits == pytest.approx(32 * 2 * 7 / 8, rel=1e-3)  # two-shot, 8 workers
    assert bf16.sent > 2 * local.sent
    assert [p.step for p in local.points] == [10, 20]
    table = (tmp_path / "out" / "quick.md").read_text()
    assert "times fewer than float32, local" in table
    assert (tmp_path / "out" / "quick.png").stat().st_size > 10_000
    assert run.read(tmp_path / "out" / "quick.json", PLANS["small"]) == []


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("text")
    for k in range(40):
        (made / f"{k}.py").write_text("".join(f"def f{j}(x):\n    return x * {j + k}\n" for j in range(40)))
    return made


@pytest.mark.parametrize("label", ["float32, local", "trellis 4, local", "SparseLoCo"])
def test_a_stack_of_workers_is_the_trainer(folder: Path, label: str) -> None:
    """The same losses up to the order of sums, and the same bytes but for the vectors, which cost the trainer more in small models."""
    method = next(m for m in METHODS if m.label == label)
    plan = dataclasses.replace(PLANS["quick"], steps=10, evaluate_every=5, workers=4)
    # Groups of parameters are numbered otherwise, and with them the noise.
    near = 0.05 if "trellis" in label else 1e-3
    real, stack = (run.one(method, dataclasses.replace(plan, stacked=stacked), 3, folder) for stacked in (False, True))
    assert [p.loss for p in stack.points] == pytest.approx([p.loss for p in real.points], rel=near)
    assert stack.loss == pytest.approx(real.loss, rel=near)
    assert (stack.exchanges, stack.parameters, stack.tokens) == (real.exchanges, real.parameters, real.tokens)
    assert stack.sent == pytest.approx(real.sent, rel=0.02 if label != "SparseLoCo" else 0.3)


def slow(method: Method, plan: object, seed: int, folder: Path) -> Run:
    if seed == 1:
        raise ValueError("this one fails")
    return made(method=method, seed=seed)


def test_runs_that_fail_and_runs_that_are_not_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run, "one", slow)
    jobs = [(LOCAL, seed) for seed in range(3)]
    found = [(seed, isinstance(done, Run)) for _, seed, done in run.complete(jobs, PLANS["quick"], Path(), 1, 0.0)]
    assert found == [(0, True), (1, False), (2, True)]
    words = [str(tmp_path), "--plan", "quick", "--only", "float32, local", "--seeds", "2", "--out", str(tmp_path / "out")]
    (tmp_path / "text.txt").write_text("text")
    assert run.main(words) == 1
    assert "this one fails" in capsys.readouterr().err
    assert "Traceback" in (tmp_path / "out" / "quick.log").read_text()
    assert [r.seed for r in run.read(tmp_path / "out" / "quick.json", PLANS["quick"])] == [0]
    assert list(run.complete(jobs, PLANS["quick"], Path(), 1, 1e-9)) == []
    assert capsys.readouterr().err.count("not started") == 3


def test_methods_are_lines() -> None:
    assert len({m.label for m in METHODS}) == len(METHODS)
    assert METHODS[0].compressor == "bf16"
    assert not any(m.lacking() for m in METHODS if m.compressor.startswith(("bf16", "identity", "int8", "vgc")))
    assert "no compressor called" in Method("new", "new", "error_feedback(not_yet)").lacking()
    assert LOCAL in METHODS
    assert LOCAL.local_steps(15) == "local_sgd(every=15)"
    assert not [m.label for m in (*METHODS, *CANDIDATES) if m.lacking()]


@pytest.mark.parametrize(("name", "least", "most"), [("small", 1e5, 2e5), ("search", 1e6, 2e6), ("large", 20e6, 50e6)])
def test_sizes_of_the_plans(name: str, least: float, most: float) -> None:
    plan = PLANS[name]
    plan.job(METHODS[0], "text:folder", 0)
    config = models.network(plan.model)
    assert isinstance(config, models.GPT)
    with torch.device("meta"):
        network = config.build((config.context,), 256)
    assert least <= sum(p.numel() for p in network.parameters()) <= most
    assert plan.steps % plan.every == 0


def test_predictions() -> None:
    """A hundred megabits carry 32 bits of a billion parameters, sent 14/8 times, in 560 s and Ethernet's headers."""
    wire, coding = predict.exchange(made(), 1e9, 100e6)
    assert wire == pytest.approx(560 * ETHERNET)
    assert coding == 0
    scale = predict.Scale("1 B", 1e9, 3000)
    assert predict.hours(made(), scale, 100e6) == pytest.approx(100 * wire / 3600)
    slow = made(encode=1e-9, decode=2e-9)
    assert predict.exchange(slow, 1e9, 100e6)[1] == pytest.approx(9 / 8 + 4)
    gathered = made(method=dataclasses.replace(LOCAL, exchange="all_gather"), message_bits=1.0)
    assert predict.exchange(gathered, 1e9, 100e6)[0] == pytest.approx(70 * ETHERNET)


def test_the_corpus_is_pinned_and_laid_out(tmp_path: Path) -> None:
    pins = {part: (corpus.PINS / f"{part}.txt").read_text().splitlines() for part in corpus.PARTS}
    names = [{line.partition("==")[0] for line in lines} for lines in pins.values()]
    assert not names[0] & names[1]
    assert all(len(line.partition("--hash=sha256:")[2]) == 64 for lines in pins.values() for line in lines)
    wheel = tmp_path / "thing-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name in ("thing/a.py", "thing/b.py", "thing/data.bin", "../out.py"):
            archive.writestr(name, "x = 1\n" * 100)
    assert corpus.extract(wheel, tmp_path / "train") == 1200
    assert sorted(p.name for p in (tmp_path / "train").rglob("*")) == ["a.py", "b.py", "thing"]
    assert corpus.extract(wheel, tmp_path / "little", limit=0.0007) == 600
    assert not (tmp_path / "out.py").exists()

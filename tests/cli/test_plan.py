"""``tersegrad plan``: its table and verdict at any width, its JSON and figure, models of the user's, and mistakes in one line."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from tests.cli.test_cli import one_line_error, run

from tersegrad.bench import planning, workloads
from tersegrad.planner import Coding, Measured, measure_coding
from tersegrad.planner.plan import LADDER

QUICK = ("--bandwidth", "100Mbit", "--backward-ms", "100")


def known(text: str, *_: object) -> Measured:
    """Made-up coding of any compressor, so that nothing is measured."""
    bits = {"identity": 32.0, "bf16": 16.0, "int8": 8.1, LADDER[0]: 4.25, LADDER[1]: 2.0}.get(text, 0.4)
    return Measured(Coding(1e-9, 1e-9), bits, 1 / bits if bits < 16 else 0.0, text == "int8")


@pytest.fixture(autouse=True)
def quick(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(planning, "coding_of", known)


def test_a_slow_link() -> None:
    shown = run("plan", "--model", "resnet50", *QUICK, "--workers", "16").output
    assert "resnet50: 25,557,032 parameters, 16 workers, 100 Mbit/s, latency 0.2 ms" in shown
    assert f"Compress with {LADDER[-1]} through" in " ".join(shown.split())
    assert "Assumed:" in shown
    for text in ("float32", "bf16", "int8", *LADDER):
        assert text in shown


def test_a_fast_link() -> None:
    shown = run("plan", "--model", "resnet50", "--bandwidth", "100Gbit", "--backward-ms", "1000").output
    assert "Do not compress: the link is not your bottleneck" in shown


def test_beyond_one_machine() -> None:
    words = ("--workers", "4096", "--bandwidth", "100Mbit", "--latency", "80ms", "--backward-ms", "100")
    shown = run("plan", "--model", "gpt2", *words).output
    assert "4096 workers are simulated" in shown
    assert "124,439,808 parameters" in shown


@pytest.mark.parametrize("width", [60, 80, 200])
def test_any_width(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    shown = run("plan", "--model", "resnet50", *QUICK).output
    assert max(len(line.rstrip()) for line in shown.splitlines()) <= width
    assert "error_feedback(sparse_dithering(alpha=0.1))" in shown
    assert "\x1b" not in shown


def test_machines_and_all_exchanges() -> None:
    shown = run("plan", "--model", "resnet50", *QUICK, "--workers", "16", "--per-node", "8", "--all").output
    assert "16 workers, 8 on each machine" in shown
    assert shown.count("hierarchical") > 3
    assert "all_gather" in shown


def test_json_and_figure(tmp_path: Path) -> None:
    found = json.loads(run("plan", "--model", "resnet50", *QUICK, "--json", "-").output)
    assert found["verdict"].startswith("compress with")
    seconds = [row["seconds"] for row in found["results"]]
    assert seconds == sorted(seconds)
    pytest.importorskip("matplotlib")
    for name in ("plan.svg", "plan.png"):
        shown = run("plan", "--model", "resnet50", *QUICK, "--figure", str(tmp_path / name)).output
        assert f"figure: {tmp_path / name}" in shown.replace("\n", "")
        assert (tmp_path / name).stat().st_size > 5000
    assert "100 Mbit/s" in (tmp_path / "plan.svg").read_text()


def test_a_users_model(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "import torch\n"
        "def build():\n    return torch.nn.Linear(100, 50)\n"
        "def whole():\n    m = torch.nn.Linear(100, 50)\n    return m, lambda: m(torch.ones(4, 100)).square().mean()\n"
        "def broken():\n    raise ValueError('no data')\n"
        "def number():\n    return 3\n"
    )
    # Lines may break anywhere: the folder's name is as long as it likes.
    shown = " ".join(run("plan", "--model", f"{file}:whole", "--bandwidth", "1Gbit").output.split())
    assert "5,050 parameters" in shown
    assert "were run here" in shown
    assert "5,050 parameters" in " ".join(run("plan", "--model", f"{file}:build", *QUICK).output.split())
    for name, words in {
        "build": "--backward-ms",
        "broken": "no data",
        "number": "returns a module",
        "gone": "no function",
    }.items():
        assert words in one_line_error(run("plan", "--model", f"{file}:{name}", "--bandwidth", "1Gbit", code=2))


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--model", "resnet51", "--bandwidth", "1Gbit"), "PATH:FUNCTION"),
        (("--model", "nowhere.py:f", "--bandwidth", "1Gbit"), "no file"),
        (("--model", "resnet50", "--bandwidth", "fast"), "100Mbit"),
        (("--model", "resnet50", "--bandwidth", "1Gbit", "--latency", "3"), "0.2ms"),
        (("--model", "resnet50", "--bandwidth", "1Gbit", "--backward-ms", "soon"), "milliseconds"),
        (("--model", "resnet50", "--bandwidth", "1Gbit", "--device", "cuda"), "no GPU"),
        (("--model", "resnet50", "--bandwidth", "1Gbit", "--device", "cuda:1"), "no GPU"),
        (("--model", "resnet50", "--bandwidth", "1Gbit", "--device", "gpu"), "cpu, cuda, or cuda:1"),
        (("--model", "resnet50", "--bandwidth", "1Gbit", "--device", "xpu"), "cpu, cuda, or cuda:1"),
        (("--model", "resnet50", "--bandwidth", "1Gbit", "--device", "cuda:x"), "cpu, cuda, or cuda:1"),
        (("--model", "resnet50", "--bandwidth", "1Gbit", "--figure", "plan.pdf"), ".svg or .png"),
        (("--model", "resnet50", *QUICK, "--compressor", "topk"), "topk"),
    ],
)
def test_mistakes(words: tuple[str, ...], told: str) -> None:
    assert told in one_line_error(run("plan", *words, code=2))


def test_a_gpu_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    told = one_line_error(run("plan", "--model", "resnet50", *QUICK, "--device", "cuda:2", code=2))
    assert "the last GPU is cuda:1" in told


def test_a_figure_asks_for_matplotlib_before_anything_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr(planning, "plan", lambda *_: pytest.fail("measured before"))
    words = ("plan", "--model", "resnet50", *QUICK, "--figure", str(tmp_path / "plan.svg"))
    assert "pip install 'tersegrad[report]'" in one_line_error(run(*words, code=2))


def test_measurements_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    text, calls = "error_feedback(top_k(fraction=0.01))", []  # has a second round of its own
    cache = planning.Cache(tmp_path / "sub" / "coding.json")
    measure = measure_coding

    def counted(*args: object, **options: object) -> Measured:
        calls.append(1)
        return measure(*args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(planning, "measure_coding", counted)
    first = planning.coding_of(text, 5000, "cpu", cache)
    again = planning.coding_of(text, 5000, "cpu", planning.Cache(cache.path))
    assert first == again
    assert again.means is not None
    assert planning.coding_of(text, 5000, "cpu", cache, workers=8).means != first.means
    calls.pop()
    assert len(calls) == 1
    planning.coding_of(text, 6000, "cpu", cache)
    planning.coding_of(text, 5000, "cpu", planning.Cache(cache.path, fresh=True))
    assert len(calls) == 3
    cache.path.write_text("not json")
    planning.coding_of(text, 5000, "cpu", planning.Cache(cache.path))
    assert len(calls) == 4
    cache.path.write_text(json.dumps({key: {"bits": 3} for key in json.loads(cache.path.read_text())}))
    planning.coding_of(text, 5000, "cpu", planning.Cache(cache.path))
    assert len(calls) == 5


def test_known_models_are_estimated_by_their_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    speed = workloads.multiply_adds(side=256)
    assert 1e7 < speed < 1e13
    monkeypatch.setattr(workloads, "multiply_adds", lambda device: speed)
    small, large = (workloads.model("resnet50", batch).workload for batch in (1, 64))
    assert large.backward == pytest.approx(64 * small.backward)
    assert large.backward == pytest.approx(2 * large.forward)
    # 4.1 billion multiply-adds per image and forward pass, at half the speed of a matrix product.
    assert small.forward == pytest.approx(2 * 4.1e9 / speed, rel=0.02)

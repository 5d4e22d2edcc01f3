"""The benchmark of whole training steps runs on the CPU with small networks, and its table and JSON hold what they promise."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from benchmarks.gpu_steps import Copies, alone_methods, chosen, main
from benchmarks.gpu_trace import before_the_optimiser
from benchmarks.resnet import resnet50
from benchmarks.throttle import compiler

ROOT = Path(__file__).parents[1]
NUMEL = 115_072  # of the small transformer


def run(*arguments: str, module: str = "gpu_steps") -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", f"benchmarks.{module}", *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120, check=False)


def test_alone(tmp_path: Path) -> None:
    file = tmp_path / "steps.json"
    done = run("alone", "--tiny", "--only", "qsgd*all_gather", "error_feedback(top_k*all_gather", "--json", str(file))
    assert done.returncode == 0, done.stderr
    found = json.loads(file.read_text())
    assert found["failed"] == []
    assert [(r["network"].partition(",")[0], r["method"].partition("(")[0]) for r in found["rows"]] == [
        (network, method)
        for network in ("resnet", "transformer")
        for method in ("float32 + all_reduce", "qsgd", "error_feedback")
    ]
    for dense, coded, fed_back in (found["rows"][:3], found["rows"][3:]):
        assert dense["ratio"] == 1
        assert dense["error"] == dense["added"] == 0
        assert dense["message"] == 4 * dense["parameters"]
        assert coded["message"] < dense["message"] / 5
        assert 0 < coded["error"] < 0.3
        assert 0 < fed_back["error"] < 1
        assert coded["state"] == 0
        assert 0.9 * dense["message"] < fed_back["state"] <= dense["message"]
        assert all(len(r["samples"]) == 2 and min(r["samples"]) > 0 and r["by_itself"] is not None for r in (coded, fed_back))
    for line in ("| `float32 + all_reduce`", "| `qsgd(bits=4, norm=max) + all_gather`", "x no hook", "ms hidden"):
        assert done.stdout.count(line) == 2


@pytest.mark.parametrize("what", ["exchange", "training", "round", "message"])
def test_where_time_goes(what: str) -> None:
    done = run(what, "--tiny", module="gpu_trace")
    assert done.returncode == 0, done.stderr
    assert "ms per step while it was watched" in done.stdout
    assert "% of its samples" in done.stdout


def test_the_end_of_a_backward_pass_is_told_kernel_by_kernel() -> None:
    told = [
        ("gemm<1>", 7, 0, 100),
        ("gemm<2>", 7, 100, 100),
        ("select", 13, 150, 60),
        ("copy", 7, 230, 10),
        ("FusedAdam", 7, 300, 50),
    ]
    steps = [
        {"cat": "kernel", "name": name, "tid": stream, "ts": ts + 1e5 * k, "dur": dur}
        for k in range(3)
        for name, stream, ts, dur in told
    ]
    assert before_the_optimiser(steps) == [
        ("gemm", "7", "300", "2", "200", "5700"),
        ("select", "13", "150", "1", "60", "0"),
        ("copy", "7", "70", "1", "10", "20"),
        ("the optimiser", "", "0", "1", "0", "60"),
    ]
    assert before_the_optimiser(steps[:4]) == []


@pytest.mark.skipif(compiler() is None, reason="needs a C compiler")
def test_links(tmp_path: Path) -> None:
    file, rate = tmp_path / "links.json", 10e6
    arguments = ["--ranks", "2", "--only", "qsgd", "--rate", "10mbit", "--json", str(file)]
    done = run("links", "--tiny", "--throttle", *arguments)
    found = json.loads(file.read_text())
    # A busy machine may fall behind the rate, which the benchmark says.
    assert all("the table means little" in line for line in found["failed"]), done.stderr
    half, coded = found["rows"]
    assert (half["method"], coded["method"]) == ("bf16 + all_reduce", "qsgd(bits=4, norm=max) + two_shot")
    assert found["plain TCP"] < 1.05 * rate
    # A link lets no more through than its rate, and two ranks send each number once: nothing is faster than that.
    assert half["step"] > 0.9 * 8 * half["sent"] / rate
    assert half["sent"] > 2 * NUMEL
    assert coded["sent"] < half["sent"] / 3
    assert "| `bf16 + all_reduce`" in done.stdout
    assert "token buckets in the processes" in done.stdout


def test_the_baseline_is_always_there() -> None:
    every = alone_methods([1 << 20])
    assert chosen(every, ["vgc"]) == ["float32", "vgc(alpha=2) + all_gather"]
    assert chosen(every, []) == every


def test_copies_have_the_gradients_they_are_given() -> None:
    given = [torch.randn(3, 4), torch.randn(5)]
    copies = Copies(given)
    copies().backward()
    for weight, gradient in zip(copies.weights, given):
        torch.testing.assert_close(weight.grad, gradient)


def test_the_residual_network_is_as_large_as_resnet_50() -> None:
    assert sum(p.numel() for p in resnet50().parameters()) == 25_557_032


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["alone"]) == 2
    assert "--tiny" in capsys.readouterr().err

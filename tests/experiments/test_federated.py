"""The federated experiment runs and its table rests on real bytes; the example's tasks read what they say they read."""

from __future__ import annotations

import gzip
import json
import lzma
import socket
import struct
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("flwr")
pytest.importorskip("sklearn")
pytest.importorskip("matplotlib")

import typer
from examples.flower.federated import tasks
from experiments.federated import deployment, run
from experiments.federated.deployment import Counter
from experiments.federated.methods import METHODS
from experiments.federated.simulate import Setting, simulate
from typer.testing import CliRunner

import tersegrad


def test_quick_run_writes_everything(tmp_path: Path) -> None:
    app = typer.Typer()
    app.command()(run.main)
    result = CliRunner().invoke(
        app, ["--quick", "--task", "digits-small", "--only", "fp16,alpha 0.25,Spherical", "--out", str(tmp_path)]
    )
    assert result.exit_code == 0, result.output
    document = json.loads((tmp_path / "digits-small.json").read_text())
    assert {r["method"]["label"] for r in document["results"]} >= {METHODS[0].label, "fp16", "Spherical + feedback, alpha 0.5"}
    assert all(r["rejected"] == 0 for r in document["results"])
    kept = run.read(tmp_path / "digits-small.json", Setting(**document["results"][0]["setting"]))
    assert [r.last.uplink for r in kept] == [r["last"]["uplink"] for r in document["results"]]
    assert "points lost" in (tmp_path / "digits-small.md").read_text()
    assert (tmp_path / "digits-small.png").stat().st_size > 10_000


def test_every_method_is_a_compressor() -> None:
    for method in METHODS:
        assert method.uplink is None or tersegrad.parse(method.uplink)
    assert len({m.label for m in METHODS}) == len(METHODS)


def test_committed_results_reach_the_goals() -> None:
    runs = run.read(run.RESULTS / "mnist.json", run.SETTINGS["mnist"])
    plain = {r.seed: r for r in runs if r.method.uplink is None}
    assert plain
    for smaller, points in run.GOALS:
        reached = [
            r.method.label for r in runs
            if plain[r.seed].uplink_message / r.uplink_message >= smaller and plain[r.seed].last.score - r.last.score <= points
        ]  # fmt: skip
        assert any(reached.count(label) == len(plain) for label in reached), (smaller, points)
    assert all(plain[r.seed].downlink_message / r.downlink_message >= 8 for r in runs if r.method.uplink)
    assert all(r.rejected == 0 for r in runs)
    assert {r.method.family for r in runs} <= set(run.FAMILIES)


def test_the_deployment_has_a_table() -> None:
    counted = {"tcp_up": 80_000, "tcp_down": 90_000, "messages_up": 0, "messages_down": 0, "score": 50.0}
    plain = {"label": "plain", "uplink": None, "simulated": {"up": 79_000, "down": 79_000, "score": 50.0}, **counted}
    ours = {**plain, "label": "ours", "uplink": "sign", "tcp_up": 4_000, "messages_up": 3_000}
    shown = deployment.table([plain, ours], nodes=2, rounds=4)
    assert shown.rows[1][3:7] == ("375", "9,875", "500", "20.0")
    assert "not counted" in shown.rows[0]


def test_seeds_are_paired() -> None:
    setting = Setting(task="digits-small", clients=4, rounds=2, every=1)
    one, other, next_ = simulate(METHODS[1], setting, 0), simulate(METHODS[1], setting, 0), simulate(METHODS[1], setting, 1)
    assert one.points == other.points
    assert one.points[0].score != next_.points[0].score
    assert one.points[0].score == simulate(METHODS[0], setting, 0).points[0].score


def test_shares_are_skewed_and_complete() -> None:
    task = tasks.load("digits")
    shares = task.shares(20, 0.3)
    assert len(shares) == 20
    assert sum(len(s.y) for s in shares) == 1437
    assert min(len(s.y) for s in shares) >= 2
    assert np.mean([len(s.y.unique()) for s in shares]) < 8


def test_tasks_from_a_folder(tmp_path: Path) -> None:
    for name, count in (("train", 30), ("t10k", 10)):
        images, labels = np.zeros((count, 28, 28), np.uint8), np.arange(count, dtype=np.uint8) % 10
        for kind, array, code in (("images-idx3", images, 3), ("labels-idx1", labels, 1)):
            header = struct.pack(f">HBB{code}I", 0, 8, code, *array.shape)
            (tmp_path / f"{name}-{kind}-ubyte.gz").write_bytes(gzip.compress(header + array.tobytes()))
    mnist = tasks.load("mnist", tmp_path)
    assert mnist.pool is not None
    assert mnist.pool.x.shape == (30, 784)
    speech = "to be or not to be that is the question " * 60
    (tmp_path / "input.txt.xz").write_bytes(lzma.compress(f"HAMLET:\n{speech}\n\nGHOST:\nboo\n\nOPHELIA:\n{speech}".encode()))
    text = tasks.load("shakespeare", tmp_path)
    assert len(text.natural) == 2  # the ghost says too little
    assert len(text.shares(2, 1.0)) == 2
    rows = ["subject#,age,motor_UPDRS,total_UPDRS,HNR"] + [f"{1 + n // 20},{n},{n % 7},{n % 11},{n % 3}" for n in range(60)]
    (tmp_path / "parkinsons_updrs.data").write_text("\n".join(rows))
    patients = tasks.load("parkinsons", tmp_path)
    assert [len(s.y) for s in patients.natural] == [16, 16, 16]
    (tmp_path / "a9a.xz").write_bytes(lzma.compress(b"-1 3:1 123:1\n+1 1:1 2:0.5 \n" * 20))
    (tmp_path / "a9a.t").write_text("+1 1:1\n-1 2:1\n")
    census = tasks.load("a9a", tmp_path)
    assert census.pool is not None
    assert census.pool.x.shape == (40, 123)
    assert census.pool.x[1].nonzero().flatten().tolist() == [0, 1]
    assert census.pool.y[:4].tolist() == [0, 1, 0, 1]
    for task in (mnist, text, patients, census):
        share = task.shares(2, 0.5)[0]
        model = task.model()
        before = torch.cat([p.detach().flatten() for p in model.parameters()])
        assert np.isfinite(tasks.train(model, task, share, 1, 0.01, 50, 0))
        assert not torch.equal(before, torch.cat([p.detach().flatten() for p in model.parameters()]))
        assert np.isfinite(task.score(model))
    with pytest.raises(FileNotFoundError, match="folder="):
        tasks.load("mnist", tmp_path / "elsewhere")
    with pytest.raises(ValueError, match="choose among"):
        tasks.load("imagenet")


def test_the_relay_counts_both_directions() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(1000)
                connection.sendall(b"x" * 70)

        threading.Thread(target=answer, daemon=True).start()
        counter = Counter(server.getsockname()[1])
        with socket.create_connection(("127.0.0.1", counter.port), timeout=5) as client:
            client.sendall(b"y" * 30)
            received = b""
            while chunk := client.recv(100):
                received += chunk
        counter.close()
    assert len(received) == counter.down == 70
    assert counter.up == 30

"""The trainer on real processes: it learns, resumes bit for bit (after kill -9 too), and on another world size."""

from __future__ import annotations

import dataclasses
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tersegrad.core.errors import BadConfiguration
from tersegrad.integrations import processes
from tersegrad.train import Job, Progress, Result, compare, comparison_table, demonstration, result_table, run, snapshots
from tests.exchange.pool import Pool, pool
from tests.train.elastic import job

SIZE = 2
SMALL: dict[str, Any] = {"model": "mlp(width=48)", "epochs": 2, "batch": 40, "seed": 1}
LOCAL = "diloco(every=6, lr=0.9, momentum=0.3, fragments=2, overlap=2)"


@pytest.fixture(scope="module")
def workers() -> Iterator[Pool]:
    with pool(SIZE) as p:
        yield p


def job_run(wanted: Job) -> Result:
    with processes.join() as worker:
        seen: list[Progress] = []
        result = run(wanted, worker, seen.append)
        assert len(seen) == (result.steps - seen[0].step + 1 if worker.leads else 0)
        return result


def job_refused(wanted: Job) -> str:
    with processes.join() as worker:
        try:
            run(wanted, worker)
        except BadConfiguration as error:
            return str(error)
    return ""


def learned(folder: Path, rank: int = 0) -> list[dict[str, Any]]:
    """Models of the newest snapshot: the common one, or each rank's own."""
    place = snapshots.complete(folder)[-1]
    _, shared, own = snapshots.read(place)
    return [shared["model"]] if "model" in shared else [one["model"] for one in own]


def same(a: list[dict[str, Any]], b: list[dict[str, Any]]) -> bool:
    return len(a) == len(b) and all(torch.equal(x[k], y[k]) for x, y in zip(a, b) for k in x)


@pytest.mark.parametrize(
    ("compressor", "exchange", "local"),
    [
        ("bf16", "all_reduce", None),
        ("error_feedback(sparse_dithering(alpha=0.1))", "two_shot", None),
        ("error_feedback(top_k(fraction=0.1))", "all_gather", None),
        (None, "power_sgd(rank=2)", None),
        ("error_feedback(sparse_dithering(alpha=0.1))", "two_shot", "local_sgd(every=4)"),
    ],
)
def test_it_learns_and_counts(workers: Pool, compressor: str | None, exchange: str, local: str | None) -> None:
    wanted = Job(compressor=compressor, exchange=exchange, local=local, **SMALL | {"epochs": 6})
    a, b = workers.run(job_run, wanted)
    assert a.accuracy == b.accuracy > 0.8
    assert a.bytes_sent == b.bytes_sent > 0
    assert a.steps == 6 * (1500 // 80)
    dense = 16 * a.parameters * a.steps / 8  # a bf16 ring of two workers sends each coordinate once
    assert a.bytes_sent == dense if exchange == "all_reduce" else a.bytes_sent < 0.6 * dense
    assert a.cpu_seconds > 0
    assert a.step_seconds(1e6) > a.step_seconds(1e9) > a.cpu_seconds
    if compressor == "bf16":
        assert a.bits_per_coordinate == 16
        assert a.error is not None
        assert 0 < a.error < 2**-16
    elif compressor == "error_feedback(sparse_dithering(alpha=0.1))":
        assert a.error is not None
        assert 0.01 < a.error <= 0.1  # the guarantee holds for what error feedback hands to the compressor
        assert a.above_limit is not None


def test_the_exchange_is_chosen_by_measuring(workers: Pool, tmp_path: Path) -> None:
    wanted = Job(compressor="auto", exchange="auto", log=tmp_path / "log.jsonl", **SMALL | {"epochs": 3})  # time for a trial
    a, b = workers.run(job_run, wanted)
    assert a.report["auto/decisions"] == 1
    assert a.report["auto/choice"] == b.report["auto/choice"]
    assert a.accuracy == b.accuracy
    assert ("auto", f"chose {a.report['auto/choice']}: {a.report['auto/why']}") in result_table(a).rows
    only = Job(compressor="auto", exchange="all_gather", **SMALL)
    assert workers.run(job_run, only)[0].report["exchange"] == "all_gather"
    assert only.label == "auto, all_gather"


@pytest.mark.parametrize("local", [None, LOCAL])
def test_resumes_bit_for_bit(workers: Pool, tmp_path: Path, local: str | None) -> None:
    whole = tmp_path / "whole"
    workers.run(job_run, Job(checkpoint=whole, save_every=13, local=local, **SMALL))
    kept = snapshots.complete(whole)
    assert [p.name for p in kept] == ["step-00000026", "step-00000036"]
    again = tmp_path / "again"
    shutil.copytree(kept[0], again / kept[0].name)
    (again / "step-00000030").mkdir()  # a snapshot that was not finished
    workers.run(job_run, Job(checkpoint=again, save_every=13, resume=True, local=local, **SMALL))
    assert same(learned(whole), learned(again))
    assert not same(learned(whole), [torch.load(kept[0] / "shared.pt")["model"]] if local is None else [])


def test_restarts_after_kill_and_ends_bit_identical(workers: Pool, tmp_path: Path) -> None:
    """kill -9 of a rank under torchrun's elastic agent, against a run that was never interrupted."""
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    workers.run(job_run, job(whole))
    assert processes.launch(["-m", "tests.train.elastic", str(killed), "10"], SIZE, restarts=1) == 0
    assert (killed / "died").read_text() == "10"
    assert (killed / "restarts").read_text() == "1 18"
    assert same(learned(whole), learned(killed))


def test_a_worker_leaves_while_gloo_still_works(tmp_path: Path) -> None:
    """The same worker without ``leave`` is aborted by one of gloo's threads."""
    words = (
        "import sys\n"
        "import torch\n"
        "import torch.distributed as dist\n"
        "from torch.nn.parallel import DistributedDataParallel\n"
        "from tersegrad.integrations import processes\n"
        "dist.init_process_group('gloo', init_method=f'file://{sys.argv[1]}', rank=int(sys.argv[2]), world_size=2)\n"
        "DistributedDataParallel(torch.nn.Linear(2, 2))  # keeps the group alive\n"
        "for _ in range(3000):\n"
        "    dist.all_reduce(torch.ones(3), async_op=True)\n"
        "dist.destroy_process_group()\n"
        "processes.leave()\n"
    )
    started = [subprocess.Popen([sys.executable, "-c", words, str(tmp_path / "store"), str(rank)]) for rank in range(2)]
    assert [one.wait(280) for one in started] == [0, 0]


def test_continues_on_another_world_size(workers: Pool, tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    with pool(3) as three:
        three.run(job_run, Job(checkpoint=saved, save_every=7, **SMALL))
    shutil.rmtree(snapshots.complete(saved)[-1])
    (result, _) = workers.run(job_run, Job(checkpoint=saved, resume=True, **SMALL))
    facts = json.loads((snapshots.complete(saved)[-1] / "complete.json").read_text())
    assert facts["size"] == SIZE
    assert facts["epoch"] == 2
    assert result.accuracy > 0.5


def test_refuses_what_does_not_fit(workers: Pool, tmp_path: Path) -> None:
    workers.run(job_run, Job(checkpoint=tmp_path, **SMALL | {"epochs": 1}))
    again = workers.run(job_refused, Job(checkpoint=tmp_path, **SMALL | {"epochs": 1}))
    assert "--resume" in again[0]
    assert again[0] == again[1]
    other = workers.run(job_refused, Job(checkpoint=tmp_path, resume=True, **SMALL | {"epochs": 1, "batch": 20}))
    assert "batch = 40" in other[0]
    assert "1600 examples" in workers.run(job_refused, Job(batch=800))[0].replace("2 workers x 800", "1600")


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"compressor": "qsdg"}, "qsgd"),
        ({"exchange": "ring"}, "exchange"),
        ({"exchange": "power_sgd"}, "by itself"),
        ({"compressor": None}, "needs a compressor"),
        ({"compressor": "qsgd", "exchange": "all_reduce"}, "all_reduce takes"),
        ({"local": "diloco", "compressor": "bf16", "exchange": "all_reduce"}, "two_shot"),
        ({"local": "diloco(every=0)"}, "at least 1"),
        ({"local": "fedavg"}, "method"),
        ({"model": "vit"}, "model"),
        ({"optimizer": "sgd(lr=-1)"}, "lr > 0"),
        ({"epochs": 0}, "positive"),
        ({"resume": True}, "checkpoint"),
        ({"exchange": "auto"}, "--compressor auto"),
    ],
)
def test_bad_jobs_are_refused_at_construction(settings: dict[str, Any], expected: str) -> None:
    with pytest.raises(BadConfiguration, match=expected):
        Job(**settings)


def _result(wanted: Job, accuracy: float, sent: float, cpu: float) -> Result:
    return Result(wanted, 4, 1000, 10, accuracy, 0.1, sent, 16.0, 0.01, cpu, 1.0, {"steps": 10})


def test_step_time_and_the_words_below_the_table() -> None:
    jobs = demonstration()
    slow, fast, wrong = (
        _result(jobs[0], 0.97, 1e6, 0.001),
        _result(jobs[1], 0.965, 1e5, 0.003),
        _result(jobs[2], 0.5, 1.0, 0.001),
    )
    assert slow.step_seconds(1e7) == pytest.approx(0.001 + 0.08)
    assert slow.above_limit == pytest.approx(16 - 3.3219, abs=1e-3)
    words = compare.closing([slow, fast, wrong])
    assert "    qsgd(bits=4, bucket=128, norm=max), two_shot\n      at 10 Mbit/s (x7.4), 100 Mbit/s (x" in words
    assert "    none: compression does not pay\n      at 1 Gbit/s, 10 Gbit/s" in words
    assert "now and then" not in words
    auto = dataclasses.replace(
        fast, job=jobs[-1], report={"steps": 10, "auto/choice": "bf16, all_reduce", "auto/why": "the link is fast"}
    )
    assert compare.closing([slow, auto]).endswith("auto chose bf16, all_reduce:\n  the link is fast")
    assert comparison_table([slow, auto]).rows[1][:2] == ("auto", "chose bf16, all_reduce")
    trying = dataclasses.replace(auto, report={**auto.report, "auto/decided": 0, "auto/why": "trying 2 settings until step 28"})
    assert compare.closing([slow, trying]).endswith(
        "auto had not decided, used bf16, all_reduce:\n  trying 2 settings until step 28"
    )
    table = comparison_table([slow, fast])
    assert table.rows[0][0] == "bf16"
    assert "81 ms" in table.rows[0]
    assert "97.00 %" in result_table(slow).markdown()

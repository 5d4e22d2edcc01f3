"""Language models: text and tokens, the network, virtual workers against real processes, and runs that are extended."""

from __future__ import annotations

import functools
import itertools
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tersegrad.core.errors import BadConfiguration
from tersegrad.integrations import processes
from tersegrad.integrations.processes import Worker
from tersegrad.train import Job, Progress, Result, gpt, models, result_table, run, snapshots, text, tokens
from tests.exchange.pool import Pool, pool
from tests.train import killed
from tests.train.test_train import job_run, learned, same

SIZE = 4
TINY = "gpt(layers=1, width=32, context=16)"
OPTIMIZER = "adamw(lr=0.01, beta2=0.95, weight_decay=0.1, warmup=2)"
ENTROPY = 2.0  # nats per byte that the toy text is far below once learned


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("corpus")
    for part, count in (("train", 6), ("validation", 2)):
        (folder / part).mkdir()
        for k in range(count):
            lines = [f"def f{j}(x):\n    return x + {j * (k + 1) % 10}\n" for j in range(60)]
            (folder / part / f"file{k}.py").write_text("".join(lines))
    (folder / "train" / "picture.bin").write_bytes(b"\x00\x01\x02")
    return f"text:{folder}"


@pytest.fixture(scope="module")
def workers() -> Iterator[Pool]:
    with pool(SIZE, timeout=120) as p:
        yield p


def tiny(corpus: str, **options: Any) -> Job:
    usual: dict[str, Any] = {
        "model": TINY,
        "optimizer": OPTIMIZER,
        "batch": 4,
        "steps": 8,
        "seed": 1,
        "clip": 1.0,
        "held_out": 8,
    }
    return Job(data=corpus, **usual | options)


def virtual_run(wanted: Job, size: int = SIZE) -> list[Result]:
    return processes.virtual(size, lambda worker: run(wanted, worker))


# ------------------------------------------------------------------------------------------------------------------------ text


def test_the_split_by_folders(corpus: str) -> None:
    found = text.load(Path(corpus.removeprefix("text:"))).cut(16)
    assert found.vocabulary == 256
    assert found.bytes_per_token == 1
    inputs, targets = found.examples(torch.tensor([0, 3]))
    assert inputs.shape == targets.shape == (2, 16)
    assert bytes(inputs[0].tolist()).startswith(b"def f0(x):")
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    assert bytes(found.train.tolist()).count(b"\0") == 5  # between six files; the picture is no text
    last, _ = found.held_out(torch.tensor([found.count_held_out - 1]))
    assert last.shape == (1, 16)


def test_files_are_split_by_their_names(tmp_path: Path) -> None:
    for k in range(80):
        (tmp_path / f"{k}.txt").write_text(f"file {k} " * 10)
    found = text.load(tmp_path)
    assert 0 < len(found.test) < len(found.train) / 8
    (tmp_path / ".hidden").write_text("no")
    again = text.load(tmp_path)
    assert torch.equal(found.train, again.train)


def test_one_file_and_none(tmp_path: Path) -> None:
    with pytest.raises(BadConfiguration, match="no folder"):
        text.load(tmp_path / "none")
    with pytest.raises(BadConfiguration, match="no files"):
        text.check(tmp_path)
    (tmp_path / "one.txt").write_bytes(bytes(range(1, 101)))
    found = text.load(tmp_path)
    assert (len(found.train), len(found.test)) == (95, 5)
    with pytest.raises(BadConfiguration, match="context of 64"):
        found.cut(64)


def test_tokens_are_learned_and_read_back(corpus: str) -> None:
    whole = text.load(Path(corpus.removeprefix("text:")))
    found = text.load(Path(corpus.removeprefix("text:")), 300)
    assert 256 < found.vocabulary <= 300
    assert len(found.train) < len(whole.train) / 2
    assert found.bytes_per_token == pytest.approx(len(whole.test) / len(found.test))
    raw = bytes(np.random.default_rng(0).integers(0, 256, 3000, dtype=np.uint8)) + b"def  f(x):\n\t return 12345"
    learned = tokens.learn(raw * 3 + b"return " * 50, 400)
    assert learned.decode(learned.encode(raw)) == raw
    assert len(learned.encode(b"return")) == 1


def test_merges_are_those_of_the_definition() -> None:
    """Against counting all pairs anew after every merge."""
    words = [list(w) for w in b"abab abc abcab bcbc aab".split(b" ")]
    merges: list[tuple[int, int]] = []
    for number in range(6):
        counts: dict[tuple[int, int], int] = {}
        for word in words:
            for pair in itertools.pairwise(word):
                counts[pair] = counts.get(pair, 0) + 1
        best = min(counts, key=lambda pair: (-counts[pair], pair), default=None)
        if best is None or counts[best] < 2:
            break
        merges.append(best)
        words = [tokens._merge(word, best, 256 + number) for word in words]
    found = tokens.learn(b"abab\nabc\nabcab\nbcbc\naab", 262)
    assert [m for m in found.merges if 10 not in m] == merges


# --------------------------------------------------------------------------------------------------------------------- network


def test_the_network_is_causal_and_starts_at_chance() -> None:
    torch.manual_seed(0)
    network = gpt.GPT(vocabulary=50, layers=2, width=32, heads=2)
    x = torch.randint(0, 50, (3, 12))
    logits = network(x)
    assert logits.shape == (3, 12, 50)
    y = x.clone()
    y[:, 7:] = 0
    torch.testing.assert_close(network(y)[:, :7], logits[:, :7])
    assert not torch.allclose(network(y)[:, 8], logits[:, 8])
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), x.flatten())
    assert abs(float(loss.detach()) - math.log(50)) < 0.2


def test_sizes_of_networks() -> None:
    large = models.network("gpt(layers=8, width=512, context=512)").build((512,), 256)
    assert sum(p.numel() for p in large.parameters()) == 8 * (12 * 512**2 + 2 * 512) + 512 + 2 * 256 * 512
    with pytest.raises(BadConfiguration, match="heads"):
        models.network("gpt(width=100, heads=3)")


# ------------------------------------------------------------------------------------------------- virtual and real workers


@pytest.mark.parametrize(
    ("compressor", "exchange", "local", "accumulate"),
    [
        ("error_feedback(sparse_dithering(alpha=0.1))", "two_shot", None, 2),
        ("vgc(alpha=1.0)", "all_gather", None, 1),
        ("error_feedback(sparse_dithering(alpha=0.5))", "two_shot", "diloco(every=3)", 1),
        ("error_feedback(top_k(fraction=0.05))", "all_gather", "local_sgd(every=4, fragments=2, overlap=1)", 1),
        ("sparse_loco(chunk=256, k=16)", "all_gather(mean=senders, clip=median)", "sparse_loco(every=3)", 1),
        ("dithered_trellis(omega=4)", "two_shot(second=error_feedback(sparse_dithering(alpha=0.5)))", "local_sgd(every=4)", 1),
    ],
)
def test_virtual_workers_end_with_the_bits_of_processes(
    workers: Pool, corpus: str, tmp_path: Path, compressor: str, exchange: str, local: str | None, accumulate: int
) -> None:
    options = {"compressor": compressor, "exchange": exchange, "local": local, "accumulate": accumulate}
    real = workers.run(job_run, tiny(corpus, checkpoint=tmp_path / "real", **options))
    virtual = virtual_run(tiny(corpus, checkpoint=tmp_path / "virtual", **options))
    assert same(learned(tmp_path / "real"), learned(tmp_path / "virtual"))
    for a, b in zip(real, virtual):
        assert (a.test_loss, a.accuracy, a.bytes_sent, a.loss) == (b.test_loss, b.accuracy, b.bytes_sent, b.loss)
        assert b.bytes_sent > 0


def test_a_run_of_processes_goes_on_virtually(workers: Pool, corpus: str, tmp_path: Path) -> None:
    """And the other way round: checkpoints do not know the difference. The run is extended, too."""
    options: dict[str, Any] = {"optimizer": "adamw(lr=0.01, decay=none, warmup=0)"}
    virtual_run(tiny(corpus, checkpoint=tmp_path / "whole", steps=9, **options))
    workers.run(job_run, tiny(corpus, checkpoint=tmp_path / "parts", steps=4, **options))
    virtual_run(tiny(corpus, checkpoint=tmp_path / "parts", steps=6, resume=True, **options))
    (again, *_) = workers.run(job_run, tiny(corpus, checkpoint=tmp_path / "parts", steps=9, resume=True, **options))
    assert again.steps == 9
    assert same(learned(tmp_path / "whole"), learned(tmp_path / "parts"))
    with pytest.raises(BadConfiguration, match="more --epochs or --steps"):
        virtual_run(tiny(corpus, checkpoint=tmp_path / "parts", steps=7, resume=True, **options))


def test_fewer_virtual_workers_go_on(corpus: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"local": "diloco(every=2)", "checkpoint": tmp_path}
    before = virtual_run(tiny(corpus, steps=6, **options), 4)
    after = virtual_run(tiny(corpus, steps=12, resume=True, **options), 3)
    assert len(after) == 3
    assert after[0].test_loss < before[0].test_loss + 0.1
    assert len(snapshots.read(snapshots.complete(tmp_path)[-1])[2]) == 3


class Killed(Exception):
    """A worker is gone."""


def residuals(folder: Path) -> dict[str, dict[str, torch.Tensor]]:
    """What the newest snapshot owes to the parameters: by round of the exchange and tensor, the mean over the workers that hold a part."""
    _, _, own = snapshots.read(snapshots.complete(folder)[-1])
    sums: dict[str, dict[str, torch.Tensor]] = {"first": {}, "second": {}}
    for rank, one in enumerate(own):
        for name, tensors in sums.items():
            for tensor, pieces in one["exchange"][f"rank{rank}"].get(name, {}).items():
                whole = tensors.setdefault(tensor, torch.zeros(256 * 32))
                for place, parts in pieces.items():
                    a, b = map(int, place.split(":"))
                    # Of the second round every coordinate has one owner.
                    whole[a:b] += next(iter(parts.values())) / (len(own) if name == "first" else 1)
    return sums


@pytest.mark.parametrize(
    ("compressor", "exchange", "local"),
    [
        ("sparse_loco(chunk=256, k=32)", "all_gather(mean=senders, clip=median)", "sparse_loco(every=3)"),
        ("error_feedback(sparse_dithering(alpha=0.5))", "two_shot", "local_sgd(every=3)"),
    ],
)
def test_a_worker_is_killed_and_six_of_eight_go_on(
    corpus: str, tmp_path: Path, compressor: str, exchange: str, local: str
) -> None:
    """The loss goes on where it was, and what had not been sent yet is neither lost nor sent twice."""
    optimizer = "adamw(lr=0.01, beta2=0.95, warmup=2, decay=none)"
    options: dict[str, Any] = {
        "compressor": compressor,
        "exchange": exchange,
        "local": local,
        "optimizer": optimizer,
        "batch": 2,
    }
    options |= {"checkpoint": tmp_path, "save_every": 12, "evaluate_every": 3}
    losses: dict[int, float] = {}

    def watch(now: Progress) -> None:
        note(losses, now)
        if now.step == 14:
            raise Killed

    with pytest.raises(Killed):
        processes.virtual(8, lambda worker: run(tiny(corpus, steps=24, **options), worker, watch))
    saved = residuals(tmp_path)
    assert all(bool(t.any()) for t in saved["first"].values())
    # Nothing to do but to be read and written again, by six.
    again = virtual_run(tiny(corpus, steps=12, resume=True, **options), 6)
    assert again[0].workers == 6
    assert again[0].test_loss == pytest.approx(losses[12], rel=1e-6)
    for name, tensors in residuals(tmp_path).items():
        assert tensors.keys() == saved[name].keys()
        for tensor, kept in tensors.items():
            torch.testing.assert_close(kept, saved[name][tensor], rtol=1e-5, atol=1e-7)
    before = losses[12]
    losses.clear()
    after = processes.virtual(6, lambda w: run(tiny(corpus, steps=21, resume=True, **options), w, lambda p: note(losses, p)))
    assert sorted(losses) == [15, 18, 21]
    assert max(losses.values()) < before + 0.02
    assert after[0].test_loss < before - 0.05


def test_of_eight_processes_one_is_killed_and_six_go_on(corpus: str, tmp_path: Path) -> None:
    """With kill -9: eight, and the six that resume, have the bits of virtual workers, and the loss goes on where it was."""
    real, virtual = tmp_path / "real", tmp_path / "virtual"
    words = ["-m", "tests.train.killed", str(real), corpus]
    assert processes.launch([*words, "24", "new"], 8) != 0
    virtual_run(killed.job(virtual, corpus, 12), 8)
    assert [place.name for place in snapshots.complete(real)] == ["step-00000012"]
    assert same(learned(real), learned(virtual))
    assert len(learned(real)) == 8
    assert processes.launch([*words, "21", "resume"], 6) == 0
    virtual_run(killed.job(virtual, corpus, 21, resume=True), 6)
    assert same(learned(real), learned(virtual))
    for name, tensors in residuals(virtual).items():
        assert all(torch.equal(kept, residuals(real)[name][tensor]) for tensor, kept in tensors.items())
    lines = [json.loads(line) for line in (real / "run.jsonl").read_text().splitlines()]
    losses = {line["step"]: line["test_loss"] for line in lines if line.get("test_loss") is not None and "step" in line}
    assert sorted(losses) == [3, 6, 9, 12, 15, 18, 21]
    assert max(losses[step] for step in (15, 18, 21)) < losses[12] + 0.02
    assert losses[21] < losses[12] - 0.05


def note(losses: dict[int, float], now: Progress) -> None:
    if now.test_loss is not None:
        losses[now.step] = now.test_loss


def test_it_learns_the_text(corpus: str, tmp_path: Path) -> None:
    log = tmp_path / "logs" / "run.jsonl"
    wanted = tiny(corpus, steps=60, precision="bf16", evaluate_every=20, log=log, vocabulary=280)
    result = virtual_run(wanted, 2)[0]
    assert result.bits_per_byte is not None
    assert result.bits_per_byte < ENTROPY / math.log(2)
    assert result.tokens == 60 * 2 * 4 * 16
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert lines[0]["model"] == TINY
    assert [line["step"] for line in lines if "test_loss" in line and "step" in line] == [20, 40, 60]
    assert lines[-1]["result"]["test_loss"] == result.test_loss
    assert next(line for line in lines if "step" in line)["rate"] > 0
    table = result_table(result).markdown()
    assert "bits per byte" in table
    assert "of tokens" in table


def test_signs_are_steps_of_one_size(corpus: str, tmp_path: Path) -> None:
    """DisTrO's update: every coordinate with a gradient moves by the rate, whatever the gradient's size."""
    options: dict[str, Any] = {"compressor": "identity", "optimizer": "sign_sgd(lr=0.01, decay=none, warmup=0)"}
    for steps in (1, 2):
        virtual_run(tiny(corpus, steps=steps, checkpoint=tmp_path / str(steps), **options), 2)
    one, two = (learned(tmp_path / str(k))[0] for k in (1, 2))
    moved = (two["blocks.0.up.weight"] - one["blocks.0.up.weight"]).abs()
    torch.testing.assert_close(moved, torch.full_like(moved, 0.01), rtol=1e-4, atol=1e-6)


def test_accumulation_gives_the_gradient_of_the_whole_batch(corpus: str, tmp_path: Path) -> None:
    """Up to rounding: with identity and SGD two steps stay close."""
    options: dict[str, Any] = {"compressor": "identity", "optimizer": "sgd(lr=0.1, momentum=0)", "steps": 2}
    for k in (1, 4):
        virtual_run(tiny(corpus, accumulate=k, checkpoint=tmp_path / str(k), **options), 2)
    one, four = (learned(tmp_path / str(k))[0] for k in (1, 4))
    for name in one:
        torch.testing.assert_close(one[name], four[name], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("local", [None, "local_sgd(every=2)"])
def test_a_compiled_model_learns_the_same(corpus: str, monkeypatch: pytest.MonkeyPatch, local: str | None) -> None:
    # Without code generation, which takes minutes and a compiler: what is tested is that the trainer uses it rightly.
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    losses = [virtual_run(tiny(corpus, compile=compiled, steps=4, local=local), 2)[0].test_loss for compiled in (False, True)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"model": "mlp"}, "mlp reads images"),
        ({"accumulate": 3}, "equal parts"),
        ({"precision": "fp8"}, "float32 or bf16"),
        ({"vocabulary": 100}, "256"),
        ({"steps": -1}, "negative"),
        ({"optimizer": "adamw(warmup=-1)"}, "warmup"),
        ({"optimizer": "adamw(decay=steps)"}, "decay must be"),
    ],
)
def test_bad_jobs(corpus: str, options: dict[str, Any], expected: str) -> None:
    with pytest.raises(BadConfiguration, match=expected):
        tiny(corpus, **options)


def test_virtual_workers_have_no_ring(corpus: str) -> None:
    with pytest.raises(BadConfiguration, match="two_shot"):
        virtual_run(tiny(corpus, compressor="bf16", exchange="all_reduce"), 2)
    with pytest.raises(BadConfiguration, match="gpt"):
        Job(model=TINY)


def test_virtual_workers_live_in_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.get_num_threads()
    assert processes.virtual(2, lambda worker: (worker.rank, worker.virtual)) == [(0, True), (1, True)]
    assert torch.get_num_threads() == before
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(BadConfiguration, match="without torchrun"):
        processes.virtual(2, lambda worker: worker.rank)
    assert not Worker(0, 1, torch.device("cpu")).virtual

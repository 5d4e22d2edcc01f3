"""DDP on real processes: equal to plain DDP, to virtual ranks and among ranks, in every situation that long runs meet."""

from __future__ import annotations

import contextlib
import copy
import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.nn.parallel import DistributedDataParallel as DDP

import tersegrad
from tersegrad import engine
from tersegrad.core.errors import BadCheckpoint, BadConfiguration
from tersegrad.engine import ReplicasDiffer, make_groups
from tersegrad.exchange import scheme, virtual
from tersegrad.integrations import ddp
from tersegrad.wrappers import ByTensor
from tests.exchange.pool import Pool, pool

SIZE = 3
FEEDBACK = "error_feedback(top_k(fraction=0.1))"
TWICE = f"two_shot(second={FEEDBACK})"  # a residual in both rounds
SMALL: dict[str, Any] = {"group_bytes": 3000, "dense_below": 20}  # several groups, and buckets that cut across them
SMALL_GROUPS = {"group_bytes": SMALL["group_bytes"], "small": SMALL["dense_below"]}


@pytest.fixture(scope="module")
def workers() -> Iterator[Pool]:
    with pool(SIZE) as p:
        yield p


class Net(nn.Module):
    """Layers of several sizes, one shared, one frozen, one that is used only for some inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(10, 24)
        self.shared = nn.Linear(24, 24)
        self.frozen = nn.Linear(24, 24).requires_grad_(False)
        self.sometimes = nn.Linear(24, 24)
        self.conv = nn.Conv1d(1, 4, 3, padding=1)
        self.out = nn.Linear(96, 5)

    def forward(self, x: Tensor, skip: bool = False) -> Tensor:
        h = self.shared(torch.relu(self.shared(torch.relu(self.inp(x)))))
        h = self.frozen(h)
        if not skip:
            h = torch.relu(self.sometimes(h))
        result: Tensor = self.out(self.conv(h.unsqueeze(1)).flatten(1))
        return result


def net(dtype: torch.dtype = torch.float32) -> Net:
    torch.manual_seed(3)
    return Net().to(dtype)


def batch(rank: int, step: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(8, 10, generator=g).to(dtype), torch.randint(0, 5, (8,), generator=g)


def loss_of(model: nn.Module, rank: int, step: int, dtype: torch.dtype = torch.float32, **kwargs: Any) -> Tensor:
    x, y = batch(rank, step, dtype)
    return nn.functional.cross_entropy(model(x, **kwargs).float(), y)


def wrap(model: nn.Module, **kwargs: Any) -> DDP:
    setattr(dist, "_DEFAULT_FIRST_BUCKET_BYTES", 2000)  # noqa: B010 - not exported; several buckets for a small model
    return DDP(model, bucket_cap_mb=0.002, **kwargs)


def flat(model: nn.Module) -> bytes:
    return b"".join(p.detach().float().contiguous().numpy().tobytes() for p in model.parameters())


def vector(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().float().reshape(-1) for p in model.parameters()])


def same(a: Any, b: Any) -> bool:
    """Whether two saved states are equal, bit for bit."""
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    return torch.equal(a, b) if isinstance(a, Tensor) and isinstance(b, Tensor) else bool(a == b)


def steps(model: nn.Module, first: int, last: int, **kwargs: Any) -> None:
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    for step in range(first, last):
        optimizer.zero_grad()
        loss_of(model, dist.get_rank(), step, **kwargs).backward()
        optimizer.step()


# ------------------------------------------------------------------------------------------------------------ jobs for workers


def job_train(
    text: str | None, exchange: Any, situation: str, count: int, compressed: bool
) -> tuple[bytes, Tensor, dict[str, Any]]:
    """Train in one situation, ``compressed`` or with plain DDP."""
    rank = dist.get_rank()
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(situation, torch.float32)
    options: dict[str, dict[str, Any]] = {
        "unused": {"find_unused_parameters": True},
        "static": {"static_graph": True},
        "view": {"gradient_as_bucket_view": True},
    }
    core: nn.Module = net(dtype)
    if situation == "compile_inner":
        core = torch.compile(core, backend="aot_eager")  # type: ignore[assignment]
    model = wrap(core, **options.get(situation, {}))
    handle = ddp.attach(model, text, exchange, seed=5, measure_every=1, **SMALL) if compressed else None
    run: nn.Module = torch.compile(model, backend="aot_eager") if situation == "compile_outer" else model  # type: ignore[assignment]
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    if situation == "join":
        with Join([model]):
            for step in range(count + rank):
                optimizer.zero_grad()
                loss_of(model, rank, step).backward()
                optimizer.step()
    else:
        for step in range(count):
            optimizer.zero_grad(set_to_none=step % 2 == 0)
            for micro in range(3 if situation == "no_sync" else 1):
                quiet = situation == "no_sync" and micro < 2
                with model.no_sync() if quiet else contextlib.nullcontext():
                    extra = {"skip": (step + rank) % 2 == 0} if situation == "unused" else {}
                    loss_of(run, rank, 10 * micro + step, dtype, **extra).backward()
            if situation == "clip":
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
    return flat(model), vector(model), handle.report() if handle else {}


def job_gradients(text: str | None, exchange: Any, count: int) -> list[bytes]:
    """The averaged gradients of some steps at fixed parameters."""
    model = wrap(net())
    handle = ddp.attach(model, text, exchange, seed=9, **SMALL)
    assert len(handle.groups) > 2
    results, buckets = [], []
    inner, early = handle.on_bucket, []

    def watching(bucket: Any) -> Any:
        future = inner(bucket)
        buckets.append(bucket.index())
        early.append(not bucket.is_last() and handle._step is not None and handle._step.submitted())
        return future

    handle.on_bucket = watching  # type: ignore[method-assign]
    for step in range(count):
        model.zero_grad()
        loss_of(model, dist.get_rank(), step).backward()
        results.append(b"".join(p.grad.numpy().tobytes() for p in model.parameters() if p.grad is not None))
    assert buckets[0] == 0
    assert buckets[-1] >= 2
    assert any(early)  # exchanges are under way while later gradients are computed
    return results


def carry(saved: engine.Handle, resumed: engine.Handle, sharded: bool) -> None:
    """One handle's state into another through files: of torch.save per rank, or of a distributed checkpoint."""
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    if sharded:
        dcp_save({"exchange": saved}, checkpoint_id=folder[0])
        dcp_load({"exchange": resumed}, checkpoint_id=folder[0])
    else:
        path = f"{folder[0]}/{dist.get_rank()}.pt"
        torch.save(saved.state_dict(), path)
        resumed.load_state_dict(torch.load(path, weights_only=True))


def job_resume(text: str | None, exchange: Any, hows: tuple[str, ...]) -> tuple[bytes, dict[str, bytes]]:
    """Four steps at once, and two plus two through each kind of checkpoint (other buckets after resuming)."""
    options: dict[str, Any] = {"seed": 4, "warmup_steps": 1, **SMALL}

    def attach(model: DDP, how: str, **changes: Any) -> ddp.Handle:
        if how != "pair":
            return ddp.attach(model, text, exchange, **options | changes)
        state, hook = ddp.make_hook(text, exchange, **options | changes)
        model.register_comm_hook(state, hook)
        return state

    whole = wrap(net())
    attach(whole, "torch")
    steps(whole, 0, 4)
    found = {}
    for how in hows:
        if how != "dcp":  # which saves the handle that was saved by torch
            model = wrap(net())
            handle = attach(model, how)
            steps(model, 0, 2)
        again = wrap(net())
        resumed = attach(again, how) if how == "dcp" else attach(again, how, group_bytes=1 << 20, seed=0)
        again.module.load_state_dict(copy.deepcopy(model.module.state_dict()))
        carry(handle, resumed, sharded=how == "dcp")
        steps(again, 2, 4)
        assert resumed.step == 4
        found[how] = flat(again)
    return flat(whole), found


def job_states(text: str, exchange: Any, count: int) -> dict[str, Any]:
    model = wrap(net())
    handle = ddp.attach(model, text, exchange, **SMALL)
    steps(model, 0, count)
    return handle.state_dict()


def job_resized(saved: list[dict[str, Any]], text: str, exchange: Any, size: int) -> dict[str, Any] | None:
    """Load the states of all old ranks into a group of the first ``size`` ranks."""
    group = dist.new_group(list(range(size)))
    if dist.get_rank() >= size:
        return None
    model = wrap(net(), process_group=group)
    handle = ddp.attach(model, text, exchange, **SMALL)
    handle.load_state_dicts(saved)
    return handle.state_dict()


def job_scaled(text: str) -> list[Any]:
    """A dynamic loss scale with an overflow in the second step; returns residuals and parameters along the way."""
    rank = dist.get_rank()
    model = wrap(net())
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=100)
    handle = ddp.attach(model, text, "two_shot", scaler=scaler, seed=1, **SMALL)
    plain = wrap(net())
    reference = ddp.attach(plain, text, "two_shot", seed=1, **SMALL)
    optimizers = [torch.optim.SGD([p for p in m.parameters() if p.requires_grad], lr=0.1) for m in (model, plain)]
    trace: list[Any] = []
    for step in range(4):
        poison = step == 1
        before, residuals = flat(model), handle.state_dict()[f"rank{rank}"]["first"]
        for o in optimizers:
            o.zero_grad()
        loss = loss_of(model, rank, step)
        scaler.scale(loss * (float("inf") if poison and rank == 1 else 1.0)).backward()
        scaler.step(optimizers[0])
        scaler.update()
        if poison:
            assert flat(model) == before
            assert same(handle.state_dict()[f"rank{rank}"]["first"], residuals)
            reference.engine.step += 1
        else:
            loss_of(plain, rank, step).backward()
            optimizers[1].step()
        trace.append((flat(model), flat(plain), scaler.get_scale()))
    trace.append(handle.report()["steps/dropped"])
    return trace


def job_warmup_and_schedule() -> list[Any]:
    seen: list[Any] = []
    model = wrap(net())
    texts = {2: "error_feedback(top_k(fraction=0.3))", 3: "error_feedback(top_k(fraction=0.1))", 4: "qsgd"}
    handle = ddp.attach(model, "identity", "two_shot", warmup_steps=2, schedule=texts.get, dense="bf16", **SMALL)
    for step in range(6):
        steps(model, step, step + 1)
        entries = handle.state_dict()[f"rank{dist.get_rank()}"]["first"]
        seen.append((str(handle.compressor), len(entries), len(handle.sent_dense()), handle.report()["bytes/sent"]))
    return [*seen, flat(model)]


def job_check(broken: bool) -> str:
    model = wrap(net())
    ddp.attach(model, FEEDBACK, check_every=2, **SMALL)
    steps(model, 0, 2)
    if broken and dist.get_rank() == 2:
        with torch.no_grad():
            model.module.shared.bias[3] += 1e-6
    try:
        steps(model, 2, 4)
    except ReplicasDiffer as error:
        return str(error)
    return "equal"


def job_pair(count: int) -> tuple[bytes, bytes, bytes]:
    """A plain pair, unbound and bound, against attach."""
    results = []
    for how in ("attach", "pair", "bound"):
        model = wrap(net())
        if how == "attach":
            ddp.attach(model, FEEDBACK, "all_gather", **SMALL)
        else:
            state, hook = ddp.make_hook(FEEDBACK, "all_gather", process_group=dist.group.WORLD, **SMALL)
            if how == "bound":
                state.bind(model)
            model.register_comm_hook(state, hook)
        steps(model, 0, count)
        results.append(flat(model))
    return results[0], results[1], results[2]


def job_until(folder: str, last: int, killed: tuple[int, int] | None) -> bytes:
    """Train to step ``last`` from the newest complete checkpoint; rank and step of ``killed`` die in mid-step."""
    rank = dist.get_rank()
    model = wrap(net())
    handle = ddp.attach(model, FEEDBACK, "two_shot", seed=2, **SMALL)
    done = [n for n in range(last, 0, -1) if all(os.path.exists(f"{folder}/{n}-{r}.pt") for r in range(SIZE))]
    if done:
        saved = torch.load(f"{folder}/{done[0]}-{rank}.pt", weights_only=True)
        model.module.load_state_dict(saved["model"])
        handle.load_state_dict(saved["exchange"])
    assert handle.step == (done[0] if done else 0)
    dist.barrier()
    for step in range(handle.step, last):
        if killed == (rank, step):
            handle._finish = lambda step: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[method-assign]
        steps(model, step, step + 1)
        torch.save({"model": model.module.state_dict(), "exchange": handle.state_dict()}, f"{folder}/{step + 1}-{rank}.pt")
    return flat(model)


# ---------------------------------------------------------------------------------------------------------------------- tests

SITUATIONS = (
    "plain", "unused", "static", "view", "no_sync", "bf16", "fp16", "join", "clip", "compile_inner", "compile_outer",
)  # fmt: skip
NODES, FACTORS = "hierarchical(ranks_per_node=2)", "power_sgd(rank=2)"
CODED = "power_sgd(rank=2, factors=subtractive_dithering(omega=0.1))"
CASES = [*(("two_shot", s) for s in SITUATIONS), *(("all_gather", s) for s in ("plain", "unused", "join")), (NODES, "plain")]


@pytest.mark.parametrize(("exchange", "situation"), CASES)
def test_identity_equals_plain_ddp(workers: Pool, exchange: str, situation: str) -> None:
    ours = workers.run(job_train, "identity", exchange, situation, 3, True)
    plain = workers.run(job_train, None, exchange, situation, 3, False)
    assert len({bits for bits, _, _ in ours}) == 1
    loose = situation in ("bf16", "fp16")
    torch.testing.assert_close(ours[0][1], plain[0][1], rtol=2e-2 if loose else 1e-5, atol=1e-2 if loose else 1e-6)


@pytest.mark.parametrize(("exchange", "situation"), [*CASES, (FACTORS, "plain"), (FACTORS, "bf16"), (CODED, "plain")])
def test_ranks_agree_bit_for_bit_when_compressed(workers: Pool, exchange: str, situation: str) -> None:
    results = workers.run(job_train, None if exchange in (FACTORS, CODED) else FEEDBACK, exchange, situation, 3, True)
    assert len({bits for bits, _, _ in results}) == 1
    report = results[0][2]
    assert 0 < report["bits_per_coordinate"] < (24 if exchange == FACTORS else 16)
    assert report["bytes/sent"] > 0
    assert 0 < report["relative_error"] < 10


VIRTUAL = [(e, t) for e in ("two_shot", "all_gather", NODES) for t in (FEEDBACK, "sparse_dithering(alpha=0.1)", "qsgd")]


@pytest.mark.parametrize(("exchange", "text"), [*VIRTUAL, (FACTORS, None), (CODED, None)])
def test_equals_virtual_ranks(workers: Pool, exchange: str, text: str | None) -> None:
    count = 2
    real = workers.run(job_gradients, text, exchange, count)
    model = net()
    groups = make_groups({n: p for n, p in model.named_parameters() if p.requires_grad}, **SMALL_GROUPS)
    compressor = ByTensor(tersegrad.parse(text or "identity"), small=tersegrad.Identity(), below=SMALL["dense_below"])
    made = scheme(exchange).make(compressor)
    states = [virtual.init(made, g.spec, SIZE) for g in groups]
    for step in range(count):
        gradients: list[dict[str, Tensor]] = []
        for rank in range(SIZE):
            model.zero_grad()
            loss_of(model, rank, step).backward()
            gradients.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
        means: dict[str, Tensor] = {}
        for number, group in enumerate(groups):
            xs = [torch.cat([g[name].reshape(-1) for name in group.names]) for g in gradients]
            ctx = tersegrad.Context(seed=9, step=step, buffer=number)
            outcome = virtual.run(made, xs, states[number], group.spec, ctx)
            states[number] = list(outcome.states)
            means |= zip(group.names, torch.split(outcome.mean, [p.numel for p in group.spec.pieces]))
        expected = b"".join(means[n].numpy().tobytes() for n, p in model.named_parameters() if p.requires_grad)
        assert {r[step] for r in real} == {expected}


RESUMED = [
    (exchange, text, ("torch", "dcp", "pair"))
    for exchange in ("two_shot", TWICE, "all_gather")
    for text in (FEEDBACK, "random_sparse_dithering(omega=0.5)")
]


@pytest.mark.parametrize(
    ("exchange", "text", "hows"),
    [*RESUMED, (NODES, FEEDBACK, ("torch", "dcp")), (FACTORS, None, ("torch", "dcp")), (CODED, None, ("torch",))],
)
def test_resuming_is_bit_identical(workers: Pool, exchange: str, text: str | None, hows: tuple[str, ...]) -> None:
    for whole, resumed in workers.run(job_resume, text, exchange, hows):
        assert resumed == dict.fromkeys(hows, whole)


@pytest.mark.parametrize("exchange", [TWICE, "all_gather"])
@pytest.mark.parametrize("size", [1, 2])
def test_another_world_size_keeps_the_mean_of_residuals(workers: Pool, exchange: str, size: int) -> None:
    saved = workers.run(job_states, FEEDBACK, exchange, 2)
    loaded = [s for s in workers.run(job_resized, saved, FEEDBACK, exchange, size) if s is not None]
    old = [s[f"rank{r}"] for r, s in enumerate(saved)]
    new = [s[f"rank{r}"] for r, s in enumerate(loaded)]
    for name, ranges in old[0]["first"].items():
        ((whole, entries),) = ranges.items()
        for key in entries:
            before = torch.stack([o["first"][name][whole][key] for o in old]).mean(0)
            after = torch.stack([n["first"][name][whole][key] for n in new]).mean(0)
            torch.testing.assert_close(after, before)

    def seconds(parts: list[Any]) -> dict[str, Tensor]:
        segments: dict[str, list[Any]] = {}
        for part in parts:
            for name, ranges in part["second"].items():
                for key, entries in ranges.items():
                    segments.setdefault(name, []).append((int(key.split(":")[0]), *entries.values()))
        return {n: torch.cat([t for _, t in sorted(s, key=lambda e: int(e[0]))]) for n, s in segments.items()}

    before_second, after_second = seconds(old), seconds(new)
    assert before_second.keys() == after_second.keys()
    assert bool(before_second) == exchange.startswith("two_shot")
    for name, value in before_second.items():
        assert torch.equal(value, after_second[name])


def test_a_loss_scale_does_not_change_the_residuals_and_an_overflow_is_skipped(workers: Pool) -> None:
    results = workers.run(job_scaled, FEEDBACK)
    for trace in results:
        assert trace[-1] == 1
        assert [scale for _, _, scale in trace[:-1]] == [1024.0, 512.0, 512.0, 512.0]
        # A power of two scales exactly, so the scaled run is the unscaled one bit for bit.
        assert all(scaled == plain for scaled, plain, _ in trace[:-1])


def test_warm_up_and_schedule(workers: Pool) -> None:
    results = workers.run(job_warmup_and_schedule)
    assert len({r[-1] for r in results}) == 1
    texts = [r[0] for r in results[0][:-1]]
    assert texts == ["identity", "identity", *(f"error_feedback(top_k(fraction={f}))" for f in (0.3, 0.1)), "qsgd", "qsgd"]
    sent = [r[3] for r in results[0][:-1]]
    each = [b - a for a, b in zip([0, *sent], sent)]
    assert each[0] == each[1] > each[2] > each[3]
    assert results[0][0][2] > results[0][1][2] > 0  # after the last warm-up step only small tensors are dense


def test_replicas_that_differ_are_named(workers: Pool) -> None:
    assert set(workers.run(job_check, False)) == {"equal"}
    for message in workers.run(job_check, True):
        assert "shared.bias on rank 2 differs" in message


def test_a_plain_pair_trains_like_attach(workers: Pool) -> None:
    results = workers.run(job_pair, 3)
    assert len(set(results)) == 1
    attached, pair, bound = results[0]
    assert attached == pair == bound


def test_a_killed_rank_fails_the_others_and_training_resumes_bit_identical(workers: Pool, tmp_path: Path) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    whole.mkdir()
    broken.mkdir()
    with pool(SIZE) as victims:
        answers: list[Any] = []
        for connection in victims._connections:
            connection.send((job_until, (str(broken), 6, (1, 3))))
        for connection in victims._connections:
            assert connection.poll(60), "a rank hangs"
            try:
                answers.append(connection.recv())
            except (EOFError, ConnectionResetError):
                answers.append(None)
        for process in victims._processes:
            process.kill()
    assert answers[1] is None
    assert answers[0][0] is answers[2][0] is False
    assert (broken / "3-0.pt").exists()
    assert not (broken / "4-0.pt").exists()
    assert workers.run(job_until, str(whole), 6, None) == workers.run(job_until, str(broken), 6, None)


@pytest.fixture
def single() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("single")
def test_clear_errors() -> None:
    with pytest.raises(BadConfiguration, match="DistributedDataParallel"):
        ddp.attach(net(), "identity")
    with pytest.raises(BadConfiguration, match="exchange"):
        ddp.make_hook("identity", "ring")
    with pytest.raises(BadConfiguration, match="takes no compressor"):
        ddp.make_hook("qsgd", "power_sgd(rank=2)")
    with pytest.raises(BadConfiguration, match="needs a compressor"):
        ddp.make_hook(None, "two_shot")
    with pytest.raises(BadConfiguration, match="group_bytes"):
        ddp.make_hook("identity", group_bytes=0)
    for options in ({"warmup_steps": 1.5}, {"check_every": True}, {"dense_below": "1Ki"}, {"measure_every": -1}, {"seed": "x"}):
        with pytest.raises(BadConfiguration, match=f"{next(iter(options))} is a whole number"):
            ddp.make_hook("identity", **options)
    model = wrap(net())
    handle = ddp.attach(model, FEEDBACK)
    saved = handle.state_dict()
    other = ddp.attach(wrap(nn.Linear(3, 2)), FEEDBACK)
    with pytest.raises(BadConfiguration, match="model changed: bias"):
        other.load_state_dict(saved)
    other = ddp.attach(wrap(net()), "qsgd")
    with pytest.raises(BadConfiguration, match="saved with compressor=error_feedback"):
        other.load_state_dict(saved)
    other = ddp.attach(wrap(net()), FEEDBACK, "all_gather")
    with pytest.raises(BadConfiguration, match="two_shot"):
        other.load_state_dict(saved)
    moved = {"rank5": saved["rank0"]}
    with pytest.raises(BadCheckpoint, match="stored under 'rank5'"):
        handle.load_state_dict(moved)
    text = saved["rank0"]["public"].replace('"rank": 0', '"rank": 5').replace('"size": 1', '"size": 6')
    with pytest.raises(BadCheckpoint, match="load_state_dicts"):
        handle.load_state_dict({"rank5": saved["rank0"] | {"public": text}})


@pytest.mark.usefixtures("single")
def test_sparse_gradients_are_refused() -> None:
    model = wrap(nn.Sequential(nn.Embedding(10, 4, sparse=True)))
    handle = ddp.attach(model, "identity")
    with pytest.raises(BadConfiguration, match="sparse"):
        model(torch.tensor([1, 2])).sum().backward()
    assert handle.step == 0


@pytest.mark.usefixtures("single")
def test_report_is_flat_and_says_what_is_dense() -> None:
    model = wrap(net())
    handle = ddp.attach(model, FEEDBACK, dense_below=100)
    steps(model, 0, 2)
    report = handle.report()
    assert all(isinstance(v, (int, float, str)) for v in report.values())
    assert report["steps"] == 2
    assert report["dense/parameters"] == len(handle.sent_dense()) > 0
    assert "fewer than dense_below=100" in str(report["dense/why"])
    assert "inp.bias" in handle.sent_dense()
    assert "shared.weight" not in handle.sent_dense()
    assert isinstance(report["state/bytes"], int)
    assert report["state/bytes"] > 0
    assert report["state/bytes/peak"] == 2 * report["state/bytes"]
    handle.reset_report()
    assert handle.report()["bytes/sent"] == handle.report()["steps"] == 0
    steps(model, 2, 3)
    assert handle.report()["steps"] == 1
    assert handle.report()["bits_per_coordinate"] != 0


@pytest.mark.usefixtures("single")
def test_power_sgd_reports_what_it_sends_and_what_it_sends_exactly() -> None:
    model = wrap(net())
    handle = ddp.attach(model, None, "power_sgd(rank=2)", warmup_steps=1)
    steps(model, 0, 3)
    assert handle.sent_dense()["inp.bias"] == "not a matrix"
    assert "shared.weight" not in handle.sent_dense()
    report = handle.report()
    sides = {n: p for n, p in model.module.named_parameters() if p.requires_grad}
    sent = sum(2 * (p.shape[0] + p[0].numel()) if n not in handle.sent_dense() else p.numel() for n, p in sides.items())
    assert report["bits_per_coordinate"] == pytest.approx(32 * sent / sum(p.numel() for p in sides.values()))
    assert report["compressor"] == "none"
    assert report["exchange"] == "power_sgd(rank=2)"
    assert "cheaper_exchange" not in report
    assert int(report["state/bytes"]) > 0
    assert report["steps/warmup"] == 1


@pytest.mark.usefixtures("single")
def test_hierarchical_finds_the_ranks_of_a_host() -> None:
    model = wrap(net())
    handle = ddp.attach(model, FEEDBACK, "hierarchical", **SMALL)
    steps(model, 0, 2)
    report = handle.report()
    assert report["exchange"] == "hierarchical"
    assert report["bytes/sent/intra_node"] == report["bytes/sent"] == 0
    handle.reset_report()
    assert str(handle.engine.lanes[0].scheme) == "hierarchical(ranks_per_node=1)"


@pytest.mark.usefixtures("single")
def test_a_scale_given_by_hand_is_taken_out_before_compression() -> None:
    plain, scaled = wrap(net()), wrap(net())
    handles = [ddp.attach(m, FEEDBACK, **SMALL) for m in (plain, scaled)]
    handles[1].set_scale(256.0)
    loss_of(plain, 0, 0).backward()
    (loss_of(scaled, 0, 0) * 256).backward()
    for p, q in zip(plain.parameters(), scaled.parameters()):
        if p.grad is not None and q.grad is not None:
            assert torch.equal(p.grad * 256, q.grad)
    assert same(handles[0].state_dict(), handles[1].state_dict())
    with pytest.raises(BadConfiguration, match="positive"):
        handles[1].set_scale(0.0)


@pytest.mark.usefixtures("single")
def test_a_step_that_fails_leaves_states_and_step_as_they_were() -> None:
    model = wrap(net())
    handle = ddp.attach(model, FEEDBACK, **SMALL)
    steps(model, 0, 2)
    before = handle.state_dict()
    start, handle.engine.begin = handle.engine.begin, None  # type: ignore[assignment, method-assign]
    with pytest.raises(TypeError):
        steps(model, 2, 3)
    assert same(handle.state_dict(), before)
    handle.engine.begin = start  # type: ignore[method-assign]
    assert handle.step == 2  # torch itself cannot go on with this DDP; a new one takes the state
    again = wrap(net())
    resumed = ddp.attach(again, FEEDBACK, **SMALL)
    resumed.load_state_dict(handle.state_dict())
    steps(again, 2, 3)
    assert resumed.step == 3

"""Variance-based compression in DDP, on real processes: the moments are collected, and everything that DDP's handle promises holds."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import tersegrad
from tersegrad.core.errors import BadConfiguration, MissingStatistics
from tersegrad.engine import Settings, make_groups
from tersegrad.exchange import scheme, virtual
from tersegrad.integrations import ddp
from tersegrad.moments import Collector
from tests.exchange.pool import Pool, pool
from tests.integrations import test_ddp as base

SIZE = base.SIZE
VGC = "vgc(alpha=1.5)"
HYBRID = "hybrid(alpha=1, tau=0.01)"
NODES = "hierarchical(ranks_per_node=2, between=all_gather)"
GROUPS: dict[str, Any] = {"group_bytes": 3000}


@pytest.fixture(scope="module")
def workers() -> Iterator[Pool]:
    with pool(SIZE) as p:
        yield p


# ------------------------------------------------------------------------------------------------------------ jobs for workers


def job_gradients(text: str, exchange: str | None, count: int) -> tuple[list[bytes], dict[str, Any]]:
    """The averaged gradients of some steps at fixed parameters, and the state in the end."""
    model = base.wrap(base.net())
    handle = ddp.attach(model, text, exchange, seed=9, **GROUPS)
    assert len(handle.groups) > 2
    results = []
    for step in range(count):
        model.zero_grad()
        base.loss_of(model, dist.get_rank(), step).backward()
        results.append(b"".join(p.grad.numpy().tobytes() for p in model.parameters() if p.grad is not None))
    return results, handle.state_dict()[f"rank{dist.get_rank()}"]["first"]


def job_scaled() -> list[Any]:
    """A dynamic loss scale with an overflow in the second step, against a run without a scale and without that step."""
    rank = dist.get_rank()
    model, plain = base.wrap(base.net()), base.wrap(base.net())
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=100)
    handle = ddp.attach(model, VGC, scaler=scaler, **GROUPS)
    reference = ddp.attach(plain, VGC, **GROUPS)
    optimizers = [torch.optim.SGD([p for p in m.parameters() if p.requires_grad], lr=0.1) for m in (model, plain)]
    trace: list[Any] = []
    for step in range(4):
        poison = step == 1
        before, states = base.flat(model), handle.state_dict()[f"rank{rank}"]["first"]
        for o in optimizers:
            o.zero_grad()
        scaler.scale(base.loss_of(model, rank, step) * (float("inf") if poison and rank == 1 else 1.0)).backward()
        scaler.step(optimizers[0])
        scaler.update()
        if poison:
            assert base.flat(model) == before
            assert base.same(handle.state_dict()[f"rank{rank}"]["first"], states)  # only the step number has moved
            reference.engine.step += 1
        else:
            base.loss_of(plain, rank, step).backward()
            optimizers[1].step()
        trace.append((base.flat(model), base.flat(plain), scaler.get_scale()))
    return [*trace, handle.report()["steps/dropped"]]


def job_accumulate() -> list[dict[str, Any]]:
    """The state after one batch of eight, and after two halves of it."""
    found = []
    for halves in (1, 2):
        model = base.wrap(base.net())
        handle = ddp.attach(model, VGC, **GROUPS)
        x, y = base.batch(dist.get_rank(), 0)
        for k, (a, b) in enumerate(zip(x.chunk(halves), y.chunk(halves))):
            loss = nn.functional.cross_entropy(model.module(a) if k + 1 < halves else model(a), b) / halves
            with model.no_sync() if k + 1 < halves else warnings.catch_warnings():
                loss.backward()
        found.append(handle.state_dict()[f"rank{dist.get_rank()}"]["first"])
    return found


def job_schedule() -> list[Any]:
    """Warm-up, then error feedback, then variance, then error feedback again."""
    model = base.wrap(base.net())
    texts = {2: base.FEEDBACK, 3: VGC, 5: base.FEEDBACK}
    handle = ddp.attach(model, "identity", "all_gather", warmup_steps=2, schedule=texts.get, **GROUPS)
    seen = []
    model.module.register_forward_pre_hook(lambda *_: seen.append("forward" in model.module.inp.__dict__))  # observed or not
    for step in range(6):
        base.steps(model, step, step + 1)
    return [seen, str(handle.compressor), base.flat(model)]


def job_learn(text: str, seed: int) -> tuple[float, float, float, bytes]:
    """Loss before and after training with Adam, bits per coordinate, and the parameters."""
    torch.manual_seed(seed)
    model = base.wrap(nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 10)))
    handle = ddp.attach(model, text)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    g = torch.Generator().manual_seed(1000 + dist.get_rank())
    teacher = torch.randn(20, 10, generator=torch.Generator().manual_seed(7))
    losses = []
    for _ in range(120):
        x = torch.randn(32, 20, generator=g)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), (x @ teacher).argmax(1))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return sum(losses[:5]) / 5, sum(losses[-10:]) / 10, float(handle.report()["bits_per_coordinate"]), base.flat(model)


def job_unbound() -> str:
    model = base.wrap(base.net())
    state, hook = ddp.make_hook(VGC, process_group=dist.group.WORLD)
    model.register_comm_hook(state, hook)
    try:
        base.loss_of(model, dist.get_rank(), 0).backward()
    except MissingStatistics as error:
        return str(error)
    return "no error"


# ---------------------------------------------------------------------------------------------------------------------- tests


@pytest.mark.parametrize(
    "situation", ["plain", "unused", "static", "view", "no_sync", "bf16", "fp16", "join", "clip"]
)  # compiled models are refused or handled by the collector: tests/moments
def test_ranks_agree_bit_for_bit(workers: Pool, situation: str) -> None:
    results = workers.run(base.job_train, "vgc(alpha=0.8)", "all_gather", situation, 3, True)
    assert len({bits for bits, _, _ in results}) == 1
    report = results[0][2]
    assert 0 < report["bits_per_coordinate"] < 16
    assert report["moments/fallbacks"] == 0


@pytest.mark.parametrize(
    ("exchange", "text"),
    [
        (None, VGC),
        (None, "vgc(alpha=1, wire=paper, residual=keep)"),
        (None, "vgc(alpha=1, values=qsgd)"),
        (None, HYBRID),
        (NODES, VGC),
    ],
)
def test_equals_virtual_ranks(workers: Pool, exchange: str | None, text: str) -> None:
    count = 4
    real = workers.run(job_gradients, text, exchange, count)
    model = base.net()
    groups = make_groups({n: p for n, p in model.named_parameters() if p.requires_grad}, GROUPS["group_bytes"])
    made = scheme(exchange or "all_gather").make(tersegrad.parse(text))
    states = [virtual.init(made, g.spec, SIZE) for g in groups]
    sent = 0
    with Collector(model) as collector:
        for step in range(count):
            gradients: list[dict[str, Tensor]] = []
            moments: list[dict[str, Tensor]] = []
            for rank in range(SIZE):
                model.zero_grad()
                base.loss_of(model, rank, step).backward()
                taken = collector.take()
                gradients.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
                moments.append({n: taken[p] for n, p in model.named_parameters() if p.requires_grad})
            means: dict[str, Tensor] = {}
            for number, group in enumerate(groups):
                xs = [torch.cat([g[name].reshape(-1) for name in group.names]) for g in gradients]
                stats = [tersegrad.Stats(torch.cat([m[name].reshape(-1) for name in group.names])) for m in moments]
                ctx = tersegrad.Context(seed=9, step=step, buffer=number)
                outcome = virtual.run(made, xs, states[number], group.spec, ctx, stats)
                states[number] = list(outcome.states)
                sent += int((outcome.mean != 0).sum())
                means |= zip(group.names, torch.split(outcome.mean, [p.numel for p in group.spec.pieces]))
            expected = b"".join(means[n].numpy().tobytes() for n, p in model.named_parameters() if p.requires_grad)
            assert {gradients[step] for gradients, _ in real} == {expected}
    assert sent > 0


@pytest.mark.parametrize("text", [VGC, HYBRID])
def test_resuming_is_bit_identical(workers: Pool, text: str) -> None:
    hows = ("torch", "dcp")
    for whole, resumed in workers.run(base.job_resume, text, "all_gather", hows):
        assert resumed == dict.fromkeys(hows, whole)


@pytest.mark.parametrize("size", [1, 2])
def test_another_world_size_keeps_the_means_of_r_and_v(workers: Pool, size: int) -> None:
    saved = workers.run(base.job_states, VGC, "all_gather", 3)
    loaded = [s for s in workers.run(base.job_resized, saved, VGC, "all_gather", size) if s is not None]
    old = [s[f"rank{r}"]["first"] for r, s in enumerate(saved)]
    new = [s[f"rank{r}"]["first"] for r, s in enumerate(loaded)]
    seen: set[str] = set()
    for name, ranges in old[0].items():
        ((whole, entries),) = ranges.items()
        for key in entries:
            seen.add(key.rpartition(".")[2])
            before = torch.stack([o[name][whole][key] for o in old]).mean(0)
            after = torch.stack([n[name][whole][key] for n in new]).mean(0)
            torch.testing.assert_close(after, before)
    assert seen == {"r", "v"}


def test_a_loss_scale_changes_neither_r_nor_v_and_an_overflow_is_skipped(workers: Pool) -> None:
    for trace in workers.run(job_scaled):
        assert trace[-1] == 1
        assert [scale for _, _, scale in trace[:-1]] == [1024.0, 512.0, 512.0, 512.0]
        # A power of two scales exactly, its square does too: the scaled run is the unscaled one bit for bit.
        assert all(scaled == plain for scaled, plain, _ in trace[:-1])


def test_accumulated_batches_have_the_moments_of_the_whole(workers: Pool) -> None:
    for once, twice in workers.run(job_accumulate):
        for name, ranges in once.items():
            for at, entries in ranges.items():
                for key, value in entries.items():
                    torch.testing.assert_close(twice[name][at][key], value, rtol=1e-4, atol=1e-7)


def test_a_schedule_collects_moments_from_the_forward_pass_on(workers: Pool) -> None:
    results = workers.run(job_schedule)
    for seen, last, _ in results:
        assert seen == [False, False, False, True, True, False]
        assert last == base.FEEDBACK
    assert len({parameters for _, _, parameters in results}) == 1


def test_it_learns_and_sends_little(workers: Pool) -> None:
    results = workers.run(job_learn, "vgc(alpha=1)", 0)
    assert len({parameters for _, _, _, parameters in results}) == 1
    before, after, bits, _ = results[0]
    assert after < 0.6 * before
    assert bits < 4


def test_a_pair_without_a_model_says_what_to_do(workers: Pool) -> None:
    for message in workers.run(job_unbound):
        assert "handle.bind(model)" in message


def test_means_are_not_compressed_again() -> None:
    for exchange in ("two_shot", "hierarchical(ranks_per_node=2)"):
        with pytest.raises(BadConfiguration, match="all_gather"):
            ddp.make_hook(VGC, exchange)
    settings = Settings.make(VGC, None, collects=True)
    assert (str(settings.scheme), settings.dense_below) == ("all_gather", 0)
    settings = Settings.make("qsgd", None)
    assert (str(settings.scheme), settings.dense_below) == ("two_shot", 1024)
    with pytest.raises(BadConfiguration, match=r"only integrations\.ddp collects"):
        Settings.make(VGC, None)

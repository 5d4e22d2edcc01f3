"""Published outer steps on real processes, a gate that says whom it left out, and outer rates that change."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tersegrad.core.errors import BadConfiguration
from tersegrad.integrations import local_sgd, outer
from tersegrad.integrations.methods import method
from tests.exchange.pool import Pool, pool
from tests.wrappers.test_named import sparse_loco

SIZE = 3


@pytest.fixture(scope="module")
def workers() -> Iterator[Pool]:
    with pool(SIZE) as p:
        yield p


def net() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(40, 96), nn.ReLU(), nn.Linear(96, 5))


def local_steps(model: nn.Module, optimizer: Any, rank: int, first: int, last: int) -> Iterator[int]:
    for step in range(first, last):
        g = torch.Generator().manual_seed(100 * step + rank)
        optimizer.zero_grad()
        x, y = torch.randn(8, 40, generator=g), torch.randint(0, 5, (8,), generator=g)
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        yield step


def vector(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def job_train(changes: dict[str, str], count: int, broken: int | None) -> tuple[Tensor, dict[str, Any]]:
    """Train by SparseLoCo; rank 1's parameters are spoilt after step ``broken``."""
    model = net()
    handle = local_sgd.attach(model, **outer.published("sparse_loco", **changes))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in local_steps(model, optimizer, dist.get_rank(), 0, count):
        if step == broken and dist.get_rank() == 1:
            with torch.no_grad():
                next(model.parameters()).fill_(torch.nan)
        handle.step()
    handle.check_replicas()
    return vector(model), handle.report()


def plainly(rates: list[float], every: int) -> Tensor:
    """The same in one loop, from the description of SparseLoCo."""
    model = net()
    residuals = [{n: torch.zeros_like(p) for n, p in model.named_parameters()} for _ in range(SIZE)]
    for round_, rate in enumerate(rates):
        sent: dict[str, list[Tensor]] = {n: [] for n, _ in model.named_parameters()}
        for rank in range(SIZE):
            mine = copy.deepcopy(model)
            for _ in local_steps(mine, torch.optim.SGD(mine.parameters(), lr=0.1), rank, round_ * every, (round_ + 1) * every):
                pass
            for (n, before), after in zip(model.named_parameters(), mine.parameters()):
                e = 0.95 * residuals[rank][n] + (before.detach() - after.detach())
                sent[n].append(sparse_loco(e))
                residuals[rank][n] = e - sent[n][-1]
        for n, p in model.named_parameters():
            updates = torch.stack(sent[n])
            norms = updates.flatten(1).norm(dim=1)
            factors = (norms.median() / norms).clamp(max=1.0)
            scaled = updates * factors.view(-1, *[1] * (updates.dim() - 1))
            p.data -= rate * scaled.sum(0) / (updates != 0).sum(0).clamp(min=1)
    return vector(model)


def test_sparse_loco_trains_as_published_with_a_rate_that_falls(workers: Pool) -> None:
    how = "sparse_loco(every=3, schedule=stages([2], [0.4]))"
    results = workers.run(job_train, {"how": how}, 9, None)
    expected = plainly([1.0, 1.0, 0.4], 3)
    for trained, report in results:
        torch.testing.assert_close(trained, expected, rtol=1e-4, atol=1e-6)
        assert "workers/left_out" not in report


def test_a_worker_that_sends_nonsense_is_left_out_and_named(workers: Pool) -> None:
    changes = {"how": "sparse_loco(every=3)", "exchange": "all_gather(mean=senders, clip=median, gate=10)"}
    results = workers.run(job_train, changes, 9, 4)
    for trained, report in results:
        assert bool(torch.isfinite(trained).all())
        assert torch.equal(trained, results[0][0])
        assert report["workers/left_out"] == "rank 1: 1"
        assert report["exchanges/dropped"] == 0


def test_schedules_and_published_methods_by_name() -> None:
    assert [method("local_sgd(every=2, schedule=linear(rounds=4))").rate(step) for step in (2, 4, 6, 10, 20)] == [
        1.0,
        0.75,
        0.5,
        0.0,
        0.0,
    ]
    assert method("diloco(schedule=cosine(rounds=10, least=0.1))").rate(550) == pytest.approx(0.07)
    assert (
        str(method("sparse_loco(schedule=stages([900], [0.4]))")) == "sparse_loco(schedule=stages(after=[900], factors=[0.4]))"
    )
    for bad in (
        "sparse_loco(schedule=stages([2, 1], [0.5, 0.1]))",
        "sparse_loco(schedule=linear(rounds=0))",
        "cosine(rounds=3)",
    ):
        with pytest.raises(BadConfiguration):
            method(bad)
    with pytest.raises(BadConfiguration, match="sparse_loco, streaming_diloco, demo, distro"):
        outer.published("diloco")
    for name in outer.METHODS:
        assert outer.published(name)["dense_below"] == 0

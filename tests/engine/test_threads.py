"""Workers as threads: collectives, failures that end everybody, and integrations that give every rank the same parameters."""

from __future__ import annotations

import struct
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tersegrad.core.errors import BadConfiguration, RanksDisagree
from tersegrad.engine import threads
from tersegrad.engine.threads import Member
from tersegrad.exchange import AllGather
from tersegrad.integrations import local_sgd, plain

FEEDBACK = "error_feedback(top_k(fraction=0.1))"
SMALL: dict[str, Any] = {"group_bytes": 2000, "dense_below": 20, "seed": 3}


@pytest.mark.parametrize("at_once", [1, 3])
def test_collectives(at_once: int) -> None:
    def work(member: Member) -> tuple[Any, ...]:
        member.barrier()
        x = torch.full((2,), float(member.rank))
        member.broadcast(x)
        y = torch.full((2,), float(member.rank))
        member.all_reduce(y)
        rows = [struct.unpack("<q", row)[0] for row in member.gather(struct.pack("<q", 7 * member.rank))]
        _, arrived = member.launch(AllGather(torch.tensor([member.rank], dtype=torch.uint8)))
        return x.tolist(), y.tolist(), rows, arrived.tolist(), member.share([member.rank])

    for found in threads.run(3, work, at_once):
        assert found == ([0, 0], [3, 3], [0, 7, 14], [0, 1, 2], [0])


def test_no_more_than_so_many_run_at_once() -> None:
    running, most, lock = 0, 0, threading.Lock()

    def work(member: Member) -> None:
        nonlocal running, most
        for _ in range(5):
            with lock:
                running += 1
                most = max(most, running)
            torch.randn(50, 50) @ torch.randn(50, 50)
            with lock:
                running -= 1
            member.barrier()

    threads.run(6, work, 2)
    assert 1 <= most <= 2


def test_the_first_failure_ends_all() -> None:
    def work(member: Member) -> None:
        member.barrier()
        if member.rank == 2:
            raise BadConfiguration("rank 2 does not like it")
        member.barrier()

    with pytest.raises(BadConfiguration, match="does not like it"):
        threads.run(4, work)


@pytest.mark.parametrize("early", [0, 3])
def test_a_rank_that_ends_early_is_named(early: int) -> None:
    def work(member: Member) -> None:
        if member.rank != early:
            member.barrier()

    with pytest.raises(RuntimeError, match=f"rank {early} has ended"):
        threads.run(4, work)


def test_ranks_that_differ_are_told() -> None:
    def work(member: Member) -> None:
        plain.attach(net(), FEEDBACK, process_group=member, seed=member.rank)

    with pytest.raises(RanksDisagree, match="another seed"):
        threads.run(2, work)


GLOBAL_GENERATOR = threading.Lock()  # all threads share it, and modules draw from it


def net(seed: int = 3) -> nn.Module:
    with GLOBAL_GENERATOR, torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(10, 24), nn.ReLU(), nn.Linear(24, 24), nn.ReLU(), nn.Linear(24, 5))


def loss_of(model: nn.Module, rank: int, step: int) -> Tensor:
    g = torch.Generator().manual_seed(100 * step + rank)
    return nn.functional.cross_entropy(model(torch.randn(8, 10, generator=g)), torch.randint(0, 5, (8,), generator=g))


def train(member: Member, text: str | None, exchange: str, how: str | None, count: int = 6) -> tuple[Tensor, dict[str, Any]]:
    rank = member.rank
    model = net(seed=rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle: Any
    if how is None:
        handle = plain.attach(model, text, exchange, process_group=member, **SMALL)
    else:
        handle = local_sgd.attach(model, text, exchange, how, process_group=member, **SMALL)
    for step in range(count):
        optimizer.zero_grad()
        loss_of(model, rank, step).backward()
        if how is None:
            handle.reduce()
        optimizer.step()
        if how is not None:
            handle.step()
    if how is not None:
        handle.finish()
    handle.check_replicas()
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()]), handle.report()


@pytest.mark.parametrize(
    ("text", "exchange", "how"),
    [
        (FEEDBACK, "all_gather", None),
        ("error_feedback(sparse_dithering(alpha=0.1))", "two_shot", None),
        (None, "power_sgd(rank=2)", None),
        ("vgc(alpha=1.0)", "all_gather", None),
        ("int8", "hierarchical(ranks_per_node=2)", None),
        (FEEDBACK, "two_shot", "diloco(every=4, fragments=2, overlap=1)"),
    ],
)
def test_all_ranks_end_with_the_same_parameters(text: str | None, exchange: str, how: str | None) -> None:
    one, at_once = (threads.run(4, lambda m: train(m, text, exchange, how), k) for k in (1, 2))
    for parameters, report in one:
        assert torch.equal(parameters, one[0][0])
        assert float(report["bytes/sent"]) > 0
    assert torch.equal(one[0][0], at_once[0][0])
    assert not torch.equal(one[0][0], torch.cat([p.detach().reshape(-1) for p in net(0).parameters()]))


def test_reduce_asks_for_gradients() -> None:
    with pytest.raises(BadConfiguration, match="no gradient"):
        threads.run(2, lambda m: plain.attach(net(), FEEDBACK, process_group=m).reduce())

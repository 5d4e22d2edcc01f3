"""The link between real ranks: the same answer on all of them, and one that explains the time of a collective."""

from __future__ import annotations

import functools
import os
import statistics
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from tersegrad.core.errors import BadConfiguration
from tersegrad.engine import engine
from tersegrad.exchange import ProcessGroup
from tersegrad.integrations import ddp
from tersegrad.planner import Link, link, measure_link, predict
from tests.exchange.pool import Pool, pool


@pytest.fixture(scope="module")
def ranks() -> Iterator[Pool]:
    with pool(3) as p:
        yield p


def job_measure() -> list[tuple[Link, float]]:
    """A link and the time of an all-reduce, in turn, so that a slow moment of the machine meets both."""
    found, x = [], torch.zeros(1 << 20)
    for _ in range(3):
        one, taken = measure_link(rounds=3, enough=0.01), []
        for _ in range(5):
            dist.barrier()
            begin = time.perf_counter()
            dist.all_reduce(x)
            taken.append(time.perf_counter() - begin)
        found.append((one, statistics.median(taken)))
    return found


def test_all_ranks_measure_the_same_link(ranks: Pool) -> None:
    found = ranks.run(job_measure)
    measured = found[0][0][0]
    assert all(len({one for one, _ in turn}) == 1 for turn in zip(*found))
    assert 1e7 < measured.bits_per_second < 1e13
    assert 0 < measured.latency < 0.5
    assert 0.05 <= measured.direct <= 1
    assert 0.05 <= measured.gathered <= 1
    assert measured.collectives == "ring"
    # Three ranks with a thread each: up to three cores leave none for sending, from six on each has one.
    cores = len(os.sched_getaffinity(0))
    assert 0 <= measured.toll < 1e-6
    assert cores > 3 or measured.toll > 0
    assert cores < 6 or measured.toll == 0
    # Loopback on a shared machine: the order of magnitude is what can be asked for.
    ratios = [predict("all_reduce", 1 << 20, 3, turn[0][0]).seconds / max(taken for _, taken in turn) for turn in zip(*found)]
    assert 0.05 < statistics.median(ratios) < 20


def job_lengths() -> tuple[int, int]:
    reduced, sent = [0], [0]

    class Watched(ProcessGroup):
        def all_reduce(self, x: torch.Tensor) -> None:
            reduced.append(4 * x.numel())
            super().all_reduce(x)

        def launch(self, request: Any) -> Any:
            sent.append(request.data.numel())
            return super().launch(request)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(link, "ProcessGroup", Watched)
        patched.setattr(link, "LAST", 1 << 23)
        measure_link(rounds=1, enough=1e9)
    return max(reduced), max(sent)


def test_messages_are_as_long_as_those_of_gradients(ranks: Pool) -> None:
    """However long an all-reduce must be to last: an all-gather of that length would time fresh memory."""
    for reduced, sent in ranks.run(job_lengths):
        assert reduced == 1 << 23
        assert sent <= 2 * link.MESSAGE  # to each of the two others


def job_part() -> Link | None:
    group = dist.new_group([0, 2])
    return measure_link(group, rounds=1, enough=0.001) if dist.get_rank() != 1 else None


def test_some_of_the_ranks(ranks: Pool) -> None:
    first, nothing, second = ranks.run(job_part)
    assert first == second
    assert nothing is None


def job_report(text: str = "qsgd(bits=4, norm=max)", dense_below: int = 1024) -> dict[str, float | str]:
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(300, 100))
    handle = ddp.attach(model, text, dense_below=dense_below)
    model(torch.randn(2, 300)).square().sum().backward()
    before = handle.report()
    with pytest.MonkeyPatch.context() as patched:  # a short measurement is enough for the report
        patched.setattr(engine, "measure_link", functools.partial(measure_link, rounds=2, enough=0.01))
        handle.measure_link()
    return {**handle.report(), "before": str(before["verdict"])}


def test_the_report_uses_the_measured_link(ranks: Pool) -> None:
    for found in ranks.run(job_report):
        assert "by the cost model" in str(found["verdict"])
        assert "compare() tells" in str(found["before"])
        assert float(found["seconds/step/bf16/predicted"]) > 0
        assert float(found["link/bits_per_second"]) > 1e6
        # 3 ranks: an all_gather sends 2 messages, a two_shot 4/3.
        assert float(found["bytes/step/all_gather"]) == pytest.approx(1.5 * float(found["bytes/step/two_shot"]))


def test_the_report_counts_both_rounds_where_they_differ(ranks: Pool) -> None:
    # A float32 and an index for one coordinate in a hundred, then means in a few bits for each that is not zero.
    for found in ranks.run(job_report, "error_feedback(top_k(fraction=0.01))", 0):
        sent = float(found["bytes/sent"]) / float(found["steps"])
        assert float(found["bytes/step/two_shot"]) == pytest.approx(sent, rel=0.1)
        assert float(found["bytes/step/all_gather"]) > 1.7 * sent  # 1.5 if both rounds were alike


def job_alone() -> str:
    group = [dist.new_group([r]) for r in range(3)][dist.get_rank()]
    try:
        measure_link(group)
    except BadConfiguration as mistake:
        return str(mistake)
    return ""


def test_one_worker_has_no_link(ranks: Pool) -> None:
    assert all("at least two workers" in words for words in ranks.run(job_alone))

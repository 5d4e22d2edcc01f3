"""Exchanges in a thread beside the backward pass: the same bits, and a failure there is a failure of the step."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tersegrad.compressors import TopK
from tersegrad.engine import Engine
from tersegrad.engine.aside import Aside
from tersegrad.exchange import ProcessGroup
from tersegrad.integrations import ddp
from tests.exchange.pool import Pool

CPU = torch.device("cpu")


def test_jobs_run_in_order_and_a_failure_ends_those_after_it() -> None:
    aside, seen = Aside(CPU), list[int]()

    def fails() -> None:
        raise ValueError("no")

    for number in range(20):
        aside.do(lambda number=number: seen.append(number))  # type: ignore[misc]
    aside.join()
    assert seen == list(range(20))
    aside.do(fails)
    aside.do(lambda: seen.append(99))
    with pytest.raises(ValueError, match="no"):
        aside.join()
    assert 99 not in seen
    # What failed is forgotten with its step.
    aside.do(lambda: seen.append(100))
    aside.join()
    assert seen[-1] == 100


def test_gradients_are_not_recorded_in_the_thread() -> None:
    aside, modes = Aside(CPU), list[bool]()
    aside.do(lambda: modes.append(torch.is_grad_enabled()))
    aside.join()
    assert torch.is_grad_enabled()
    assert modes == [False]


@contextlib.contextmanager
def beside(yes: bool) -> Iterator[None]:
    """On the CPU, where engines work in the thread of the backward pass, make them use another, as on a GPU whose bytes go by the host."""
    kept: dict[int, Aside] = {}

    def aside(self: Engine) -> Aside:
        found = kept.setdefault(id(self), Aside(CPU))
        self._aside = found
        return found

    with contextlib.ExitStack() as stack:
        if yes:
            stack.enter_context(mock.patch.object(Engine, "aside", aside))
            stack.enter_context(mock.patch.object(ProcessGroup, "by_host", return_value=True))
        yield


def _model() -> Any:
    torch.manual_seed(0)
    layers = [nn.Linear(60, 60) for _ in range(6)]
    setattr(dist, "_DEFAULT_FIRST_BUCKET_BYTES", 2000)  # noqa: B010 - not exported; several buckets for a small model
    return DistributedDataParallel(nn.Sequential(*layers), bucket_cap_mb=0.02)


def job_train(text: str, exchange: str, yes: bool) -> tuple[bytes, int, int]:
    """Five steps; the parameters, the bytes sent and the number of groups."""
    with beside(yes):
        model = _model()
        handle = ddp.attach(model, text, exchange, group_bytes=15_000)
        optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(5):
            generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
            optimiser.zero_grad()
            model(torch.randn(8, 60, generator=generator)).square().mean().backward()
            optimiser.step()
        assert (handle.engine._aside is not None) == yes
        weights = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
        return weights.numpy().tobytes(), int(handle.report()["bytes/sent"]), len(handle.groups)


@pytest.mark.parametrize("exchange", ["two_shot", "all_gather"])
@pytest.mark.parametrize(
    "text", ["error_feedback(top_k(fraction=0.05))", "error_feedback(sparse_dithering(nu=0.1))", "qsgd(bits=4, bucket=64)"]
)
def test_the_same_bits_beside_the_backward_pass(ranks: Pool, text: str, exchange: str) -> None:
    usual, aside = ranks.run(job_train, text, exchange, False), ranks.run(job_train, text, exchange, True)
    assert usual == aside
    assert len({weights for weights, _, _ in aside}) == 1
    assert aside[0][2] > 3


def job_fail() -> str:
    """One rank's compressor fails in the second step; what the step ends with, and the step's number after that."""
    with beside(True):
        model = _model()
        group: Any = dist.new_group(timeout=timedelta(seconds=3))
        model = DistributedDataParallel(model.module, process_group=group, bucket_cap_mb=0.02)
        handle = ddp.attach(model, "error_feedback(top_k(fraction=0.05))", "all_gather", group_bytes=15_000)
        encode = TopK.encode

        def broken(self: TopK, *given: Any, **options: Any) -> Any:
            if handle.step == 2 and dist.get_rank() == 1:
                raise ArithmeticError("this rank cannot")
            return encode(self, *given, **options)

        model(torch.randn(8, 60)).square().mean().backward()
        begun = time.perf_counter()
        with mock.patch.object(TopK, "encode", broken):
            try:
                model(torch.randn(8, 60)).square().mean().backward()
            except Exception as error:
                assert time.perf_counter() - begun < 15
                return f"{type(error).__name__}: {error}, {handle.step}"
    return "nothing"


def test_a_failure_in_the_thread_ends_the_step_on_every_rank(ranks: Pool) -> None:
    said = ranks.run(job_fail)
    assert "this rank cannot" in said[1]
    assert all(text != "nothing" for text in said)
    assert all(text.endswith(", 1") for text in said)

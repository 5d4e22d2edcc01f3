"""Ranks that were set up differently: every rank says which rank and which field, at once."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.engine.models import FEEDBACK, KINDS, caught, start
from tests.exchange.pool import Pool

SECONDS = 10.0  # less than the timeout of the process group

# field -> what one rank says instead of what all others say
OTHERS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "seed": ({"compressor": "random_k(fraction=0.1)", "seed": 1}, {"seed": 2}),
    "compressor": ({"compressor": "qsgd(bits=4)"}, {"compressor": "qsgd(bits=8)"}),
    "compressor ": ({"compressor": "int8(block=64)"}, {"compressor": "int8(block=128)"}),
    "compressor  ": ({"compressor": "top_k(fraction=0.1)"}, {"compressor": "top_k(fraction=0.2)"}),
    "exchange": ({"exchange": "two_shot"}, {"exchange": "all_gather"}),
    "warmup_steps": ({"warmup_steps": 0}, {"warmup_steps": 3}),
    "dense_below": ({"dense_below": 20}, {"dense_below": 30}),
    "dense": ({"dense": None}, {"dense": "bf16"}),
    "schedule": ({}, {"schedule": lambda step: None}),
    "check_every": ({}, {"check_every": 2}),
    "measure_every": ({}, {"measure_every": 2}),
    "number of groups": ({"group_bytes": 1500}, {"group_bytes": 1 << 20}),
    "layout of the model": ({"group_bytes": 1500}, {"group_bytes": 2400}),
    "scaler": ({}, {"scaler": torch.amp.GradScaler("cpu")}),
    "scaler ": (
        {"scaler": torch.amp.GradScaler("cpu", init_scale=2.0)},
        {"scaler": torch.amp.GradScaler("cpu", init_scale=8.0)},
    ),
    "method": ({"how": "local_sgd(every=2)"}, {"how": "local_sgd(every=3)"}),
}
ONLY = {
    "exchange": ("ddp", "nodes", "local_sgd"),
    "number of groups": ("ddp", "local_sgd"),
    "layout of the model": ("ddp", "local_sgd"),
    "scaler": ("ddp", "fsdp", "nodes"),
    "method": ("local_sgd",),
}


def job_attach(kind: str, odd: int) -> list[tuple[str, str, str, float]]:
    found = []
    for field, (usual, other) in OTHERS.items():
        if kind not in ONLY.get(field.strip(), KINDS):
            continue
        options = {**usual, **(other if dist.get_rank() == odd else {})}
        begin = time.monotonic()
        found.append((field.strip(), *caught(lambda options=options: start(kind, **options)), time.monotonic() - begin))  # type: ignore[misc]
    return found


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("odd", [1, 3])
def test_a_rank_that_was_attached_differently_is_named(ranks: Pool, kind: str, odd: int) -> None:
    for answers in ranks.run(job_attach, kind, odd):
        assert len(answers) >= 10
        for field, error, text, seconds in answers:
            assert error == "RanksDisagree", (field, error, text)
            assert f"rank {odd} has another {field} than rank" in text
            assert seconds < SECONDS


def job_change(kind: str, odd: int) -> list[tuple[str, str, float]]:
    """Calls of change that differ on one rank; afterwards all go on from what they had."""
    exchanges = kind in ("ddp", "local_sgd", "nodes")
    calls: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({"compressor": "qsgd(bits=4)"}, {"compressor": "qsgd(bits=8)"}),
        ({"compressor": FEEDBACK}, {"compressor": "no such thing"}),
        ({"compressor": "qsgd", "groups": [0]}, {"compressor": "qsgd", "groups": [1]}),
        ({"compressor": "qsgd", "groups": [0]}, {"compressor": "qsgd"}),
    ]
    calls += [({"exchange": "all_gather"}, {"exchange": "two_shot"})] if exchanges else []
    calls += [({"exchange": "all_gather"}, {"exchange": "power_sgd"})] if exchanges else []
    run = start(kind)
    run.steps(0, 1)
    found = []
    for usual, other in calls:
        begin = time.monotonic()
        arguments = other if dist.get_rank() == odd else usual
        found.append((*caught(lambda arguments=arguments: run.handle.change(**arguments)), time.monotonic() - begin))  # type: ignore[misc]
    run.steps(1, 2)
    return [*found, (str(run.handle.compressor), run.bits().hex(), 0.0)]


@pytest.mark.parametrize("kind", KINDS)
def test_a_change_that_differs_is_named_and_changes_nothing(ranks: Pool, kind: str) -> None:
    results = ranks.run(job_change, kind, 1)
    assert len({answers[-1] for answers in results}) == 1
    for answers in results:
        assert answers[-1][0] == FEEDBACK
        for error, text, seconds in answers[:-1]:
            assert error == "RanksDisagree", text
            assert "rank 1 has another " in text
            assert seconds < SECONDS


def job_schedule(kind: str, odd: int) -> tuple[int, str, str, float]:
    rank = dist.get_rank()
    run = start(kind, schedule=lambda step: "qsgd(bits=8)" if step == 2 and rank == odd else None)
    run.steps(0, 2)
    begin = time.monotonic()
    error, text = caught(lambda: run.steps(2, 3))
    return run.exchanged, error, text, time.monotonic() - begin


@pytest.mark.parametrize("kind", KINDS)
def test_a_schedule_that_differs_is_named(ranks: Pool, kind: str) -> None:
    for exchanged, error, text, seconds in ranks.run(job_schedule, kind, 3):
        assert exchanged == 2
        assert error == "RanksDisagree", text
        assert "rank 3 has another choice of the schedule than rank" in text
        assert seconds < SECONDS


def job_loaded(kind: str, odd: int) -> tuple[str, str]:
    """One rank goes on from an older checkpoint than the others."""
    run = start(kind)
    run.steps(0, 1)
    old = run.handle.state_dict()
    run.steps(1, 2)
    new = run.handle.state_dict()
    again = start(kind)
    again.handle.load_state_dict(old if dist.get_rank() == odd else new)
    return caught(lambda: again.steps(2, 3))


@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_with_another_checkpoint_is_named(ranks: Pool, kind: str) -> None:
    for error, text in ranks.run(job_loaded, kind, 2):
        assert error == "RanksDisagree", text
        assert "rank 2 has another step than rank" in text

"""Changes of compressor and exchange between unlike states: what is carried, what is left behind, and when schedules are asked."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tersegrad.core import state as states
from tersegrad.engine import Lane
from tests.engine.models import FEEDBACK, caught, group_of, start
from tests.exchange.pool import Pool
from tests.integrations.test_ddp import same

NODES = "hierarchical(ranks_per_node=2)"
VGC = "vgc(alpha=1.5)"
HALF = "error_feedback(top_k(fraction=0.1), residual=bfloat16)"
# from, to, whether everything that was carried has a place afterwards
CHANGES: dict[str, tuple[tuple[Any, str], tuple[Any, str], bool]] = {
    "two_shot to all_gather": ((FEEDBACK, "two_shot"), (None, "all_gather"), True),
    "all_gather to two_shot": ((FEEDBACK, "all_gather"), (None, "two_shot"), True),
    "another fraction": ((FEEDBACK, "two_shot"), ("error_feedback(top_k(fraction=0.3))", "two_shot"), True),
    "error_feedback to vgc": ((FEEDBACK, "all_gather"), (VGC, "all_gather"), True),
    "vgc to error_feedback": ((VGC, "all_gather"), (FEEDBACK, "all_gather"), True),
    "two_shot to vgc": ((FEEDBACK, "two_shot"), (VGC, "all_gather"), True),
    "error_feedback to power_sgd": ((FEEDBACK, "two_shot"), (None, "power_sgd(rank=2)"), True),
    "power_sgd to error_feedback": ((None, "power_sgd(rank=2)"), (FEEDBACK, "two_shot"), True),
    "nodes to two_shot": ((FEEDBACK, NODES), (None, "two_shot"), True),
    "two_shot to nodes": ((FEEDBACK, "two_shot"), (None, NODES), True),
    "nodes to larger nodes": ((FEEDBACK, NODES), (None, "hierarchical(ranks_per_node=3)"), True),
    "to one node, which keeps nothing": ((FEEDBACK, "two_shot"), (None, "hierarchical(ranks_per_node=4)"), False),
    "to a compressor without state": ((FEEDBACK, "all_gather"), ("qsgd", "all_gather"), False),
    "to another exchange without state": ((FEEDBACK, "two_shot"), ("qsgd", "all_gather"), False),
    "to a residual of sixteen bits": ((FEEDBACK, "two_shot"), (HALF, "two_shot"), False),
    "to a residual of eight bits": (
        (FEEDBACK, "all_gather"),
        ("error_feedback(top_k(fraction=0.1), residual=int8)", "all_gather"),
        False,
    ),
    "to one of sixteen bits elsewhere": ((FEEDBACK, "two_shot"), (HALF, "all_gather"), False),
    "to one of all bits": ((HALF, "two_shot"), (FEEDBACK, "two_shot"), True),
}


def carried(lanes: list[Lane]) -> list[Tensor]:
    """By group, this rank's share of what the mean over ranks will still get."""
    found = []
    for lane in lanes:
        share = torch.zeros(lane.group.spec.numel)
        for part in lane.parts():
            amount = states.carried(part.state, states.slice_spec(lane.group.spec, part.start, part.stop))
            if amount is not None:
                share[part.start : part.stop] += amount / part.holders
        found.append(share)
    return found


def job_change(name: str, kind: str) -> dict[str, Any]:
    (compressor, exchange), (later, other), _ = CHANGES[name]
    run = start(kind, compressor, exchange, dense_below=20)
    run.steps(0, 2)
    before = carried(run.handle.engine.lanes)
    left = run.handle.change(later, other)
    after = carried(run.handle.engine.lanes)
    report = run.handle.report()
    run.steps(2, 3)
    lost = {n: r for one in left.values() for n, r in one.residuals.items()}
    return {
        "before": before,
        "after": after,
        "left": lost,
        "names": [[(p.name, p.numel) for p in g.spec.pieces] for g in run.handle.groups],
        "renewed": {r for one in left.values() for r in one.renewed},
        "report": report,
        "bits": run.bits(),
        "now": (str(run.handle.compressor), run.handle.exchange),
    }


# Others than DDP, where a few pairs tell whether states get where they belong.
ELSEWHERE = [
    ("local_sgd", "two_shot to all_gather"),
    ("local_sgd", "error_feedback to power_sgd"),
    ("local_sgd", "nodes to two_shot"),
    ("local_sgd", "to another exchange without state"),
    ("nodes", "two_shot to all_gather"),
    ("nodes", "all_gather to two_shot"),
    ("nodes", "another fraction"),
    ("nodes", "to a compressor without state"),
]


@pytest.mark.parametrize(("kind", "name"), [*(("ddp", name) for name in CHANGES), *ELSEWHERE])
def test_the_mean_of_what_is_carried_is_kept_or_returned(ranks: Pool, kind: str, name: str) -> None:
    found = ranks.run(job_change, name, kind)
    assert len({r["bits"] for r in found}) == 1
    # Between nodes, ranks of one shard exchange with one another.
    for results in (found[::2], found[1::2]) if kind == "nodes" else (found,):
        mean_of_what_is_carried(results, name)


def mean_of_what_is_carried(results: list[dict[str, Any]], name: str) -> None:
    whole = CHANGES[name][2]
    for number, pieces in enumerate(results[0]["names"]):
        old, new = (torch.stack([r[k][number] for r in results]).double().sum(0) for k in ("before", "after"))
        assert old.any()
        rows = [torch.cat([r["left"].get(n, torch.zeros(count)) for n, count in pieces]) for r in results]
        left = torch.stack(rows).double().sum(0)
        torch.testing.assert_close(new + left, old, rtol=1e-5, atol=1e-6)
        if not name.endswith("power_sgd"):  # what it sends exactly has no place for a residual
            assert bool(left.any()) != whole
    for result in results:
        power = sum(float(r.double().square().sum()) for r in result["left"].values())
        assert result["report"]["changes"] == 1
        assert result["report"]["changes/left_behind"] == pytest.approx(power)
    assert results[0]["renewed"] == ({"v"} if name.startswith("vgc") else {"q"} if name.startswith("power") else set())


def job_some_groups() -> dict[str, Any]:
    """Group 0 alone gets another compressor and exchange; a checkpoint keeps that."""
    run = start("ddp", FEEDBACK, "two_shot", seed=3)
    run.steps(0, 2)
    others = [lane.state for lane in run.handle.engine.lanes[1:]]
    left = run.handle.change("error_feedback(top_k(fraction=0.5))", "all_gather", groups=[0])
    run.handle.change("qsgd(bits=8)", groups=[1])
    kept = all(a is b.state for a, b in zip(others[1:], run.handle.engine.lanes[2:]))
    saved, weights = run.handle.state_dict(), {k: v.clone() for k, v in run.model.state_dict().items()}
    run.steps(2, 4)
    again = start("ddp", FEEDBACK, "two_shot", seed=0)
    again.model.load_state_dict(weights)
    again.handle.load_state_dict(saved)
    again.steps(2, 4)
    lanes = again.handle.engine.lanes
    return {
        "left": left,
        "kept": kept,
        "lanes": [(str(lane.compressor), str(lane.scheme)) for lane in lanes],
        "bits": [run.bits(), again.bits()],
        "same": same(run.handle.state_dict(), again.handle.state_dict()),
        "report": run.handle.report()["compressor"],
    }


def test_some_groups_alone_change_and_a_checkpoint_keeps_it(ranks: Pool) -> None:
    results = ranks.run(job_some_groups)
    assert len({b for r in results for b in r["bits"]}) == 1
    for result in results:
        assert result["left"] == {}
        assert result["kept"]
        assert result["same"]
        assert result["lanes"][:3] == [
            ("error_feedback(top_k(fraction=0.5))", "all_gather"),
            ("qsgd(bits=8)", "two_shot"),
            (FEEDBACK, "two_shot"),
        ]
        assert result["report"].count(";") == 2


def job_all_reduce() -> dict[str, Any]:
    """Ways into torch's all-reduce and out of it: by a schedule, and group by group."""
    plan: dict[int, Any] = {2: (None, "all_reduce"), 4: ("qsgd", "two_shot"), 6: (None, "all_reduce"), 7: ("qsgd", "two_shot")}
    seen: list[tuple[str, int]] = []
    run = start("ddp", "qsgd", "two_shot", schedule=plan.get)
    for step in range(8):
        run.handle.reset_report()
        run.steps(step, step + 1)
        seen.append((run.handle.exchange, int(run.handle.report()["bytes/sent"])))
    begun = start("ddp", None, "all_reduce", schedule={1: ("qsgd", "two_shot")}.get)
    begun.steps(0, 2)
    alone = start("ddp", FEEDBACK, "two_shot")
    alone.steps(0, 1)
    for number in range(len(alone.handle.groups)):
        alone.handle.change(None, "all_reduce(dtype=float32)", groups=[number])
    alone.steps(1, 2)
    mixed = start("ddp", None, "all_reduce(dtype=float32)")
    mixed.steps(0, 1)
    mixed.handle.change(None, "all_reduce(dtype=bf16)", groups=[0])
    mixed.handle.reset_report()
    mixed.steps(1, 2)
    return {
        "seen": seen,
        "begun": begun.handle.exchange,
        "schemes": [str(lane.scheme) for lane in mixed.handle.engine.lanes],
        "numels": [g.spec.numel for g in mixed.handle.groups],
        "mixed": mixed.handle.report()["bytes/sent"],
        "bits": [r.bits() for r in (run, begun, alone, mixed)],
    }


def test_schedules_and_groups_change_to_all_reduce_and_back(ranks: Pool) -> None:
    results = ranks.run(job_all_reduce)
    for result in results:
        assert [exchange for exchange, _ in result["seen"]] == ["two_shot"] * 2 + ["all_reduce"] * 2 + ["two_shot"] * 2 + [
            "all_reduce",
            "two_shot",
        ]
        sent = [nbytes for _, nbytes in result["seen"]]
        assert min(sent[2], sent[3], sent[6]) > 1.5 * max(sent[0], sent[1], sent[4], sent[5], sent[7]), sent
        assert result["begun"] == "two_shot"
        assert result["schemes"][:2] == ["all_reduce", "all_reduce(dtype=float32)"]
    size = len(results)
    half, *whole = results[0]["numels"]
    assert sum(r["mixed"] for r in results) == pytest.approx(2 * (size - 1) * (2 * half + 4 * sum(whole)), rel=0.01)
    assert all(len({r["bits"][k] for r in results}) == 1 for k in range(4))


def job_counted(kind: str, how: str) -> tuple[list[int], int, bytes]:
    asked: list[int] = []
    texts = {1: VGC if kind == "ddp" else "qsgd", 3: FEEDBACK, 4: ("qsgd", "all_gather")}

    def schedule(step: int) -> Any:
        asked.append(step)
        return texts.get(step)

    run = start(kind, FEEDBACK, None if kind == "fsdp" else "all_gather", how=how, schedule=schedule)
    run.steps(0, 8 if kind == "local_sgd" else 6)
    if kind == "local_sgd":
        run.handle.finish()  # type: ignore[attr-defined]
    return asked, run.exchanged, run.bits()


@pytest.mark.parametrize(
    ("kind", "how"),
    [("ddp", ""), ("nodes", ""), ("local_sgd", "local_sgd(every=1)"), ("local_sgd", "diloco(every=4, fragments=2, overlap=2)")],
)
def test_a_schedule_is_asked_once_per_step(ranks: Pool, kind: str, how: str) -> None:
    results = ranks.run(job_counted, kind, how)
    for asked, exchanged, _ in results:
        # DDP asks for the next step when a forward pass begins, and at attach.
        assert asked == list(range(exchanged))
        assert exchanged >= 4
    assert len({bits for _, _, bits in results}) == 1


def job_failing_schedule(kind: str, timeout: float) -> tuple[str, int, float]:
    rank, group = dist.get_rank(), group_of(timeout)

    def schedule(step: int) -> Any:
        if step == 2 and rank == 1:
            raise ArithmeticError("a schedule that fails")

    run = start(kind, schedule=schedule, group=group)
    run.steps(0, 2)
    begin = time.monotonic()
    error, _ = caught(lambda: run.steps(2, 3))
    return error, run.exchanged, time.monotonic() - begin


@pytest.mark.parametrize("kind", ["ddp", "fsdp", "local_sgd"])
def test_a_schedule_that_fails_on_one_rank_ends_the_step_on_all(ranks: Pool, kind: str) -> None:
    results = ranks.run(job_failing_schedule, kind, 3.0)
    for rank, (error, exchanged, seconds) in enumerate(results):
        assert (error == "ArithmeticError") == (rank == 1)
        assert error
        assert exchanged == 2
        assert seconds < 10


def job_pairs() -> list[tuple[str, str]]:
    """Changes that make no sense are refused on all ranks, and change nothing."""
    run = start("ddp", FEEDBACK, "two_shot")
    run.steps(0, 1)
    before = run.handle.state_dict()
    calls: list[dict[str, Any]] = [
        {"compressor": VGC},
        {"exchange": "power_sgd", "compressor": "qsgd"},
        {"compressor": "no_such_thing"},
        {"exchange": "ring"},
        {"compressor": "qsgd", "groups": [99]},
        {"compressor": "qsgd", "groups": [-1]},
    ]
    found = [caught(lambda arguments=arguments: run.handle.change(**arguments)) for arguments in calls]  # type: ignore[misc]
    assert same(run.handle.state_dict(), before)
    return found


def test_changes_that_make_no_sense_are_refused(ranks: Pool) -> None:
    for answers in ranks.run(job_pairs):
        assert [error for error, _ in answers] == ["BadConfiguration"] * 6, answers

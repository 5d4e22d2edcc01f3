"""Which option works in which integration: one test per cell, each with an effect that can be seen."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from tersegrad.integrations import fsdp
from tests.engine.models import FEEDBACK, KINDS, Run, caught, loss_of, net, sharded, split, start, whole
from tests.engine.test_change import carried
from tests.exchange.pool import Pool
from tests.integrations.test_ddp import same


def option_dense_below(kind: str) -> None:
    run = start(kind, dense_below=100)
    assert set(run.handle.sent_dense()) == {"0.bias", "2.bias", "4.bias"}
    assert run.handle.report()["dense/parameters"] == 3
    all_of_it = start(kind, dense_below=1 << 20)
    run.steps(0, 1)
    all_of_it.steps(0, 1)
    assert float(all_of_it.handle.report()["bytes/sent"]) > 3 * float(run.handle.report()["bytes/sent"])


def option_dense(kind: str) -> None:
    sent = []
    for dense in ("identity", "bf16"):
        run = start(kind, dense_below=1 << 20, dense=dense)
        run.steps(0, 1)
        sent.append(float(run.handle.report()["bits_per_coordinate"]))
    assert sent[1] < 0.6 * sent[0]


def option_warmup_steps(kind: str) -> None:
    run = start(kind, warmup_steps=2)
    assert "warm-up until step 2" in run.handle.sent_dense().values()
    run.steps(0, 2)
    warm = float(run.handle.report()["bytes/sent"])
    run.handle.reset_report()
    run.steps(2, 4)
    assert float(run.handle.report()["bytes/sent"]) < 0.7 * warm
    assert "warm-up until step 2" not in run.handle.sent_dense().values()


def option_schedule(kind: str) -> None:
    asked: list[int] = []

    def schedule(step: int) -> str | None:
        asked.append(step)
        return "qsgd(bits=8)" if step == 1 else None

    run = start(kind, schedule=schedule)
    seen = []
    for step in range(3):
        run.steps(step, step + 1)
        seen.append(str(run.handle.compressor))
    assert seen == [FEEDBACK, "qsgd(bits=8)", "qsgd(bits=8)"]
    assert asked == [0, 1, 2]
    assert run.handle.report()["changes"] == 1
    assert float(run.handle.report()["changes/left_behind"]) > 0


def option_schedule_in_the_warm_up(kind: str) -> None:
    """What it says there holds from the first compressed step on."""
    asked: list[int] = []

    def schedule(step: int) -> str | None:
        asked.append(step)
        return "qsgd(bits=8)" if step == 1 else None

    run = start(kind, schedule=schedule, warmup_steps=3)
    run.steps(0, 4)
    assert asked == [0, 1, 2, 3]
    assert str(run.handle.compressor) == "qsgd(bits=8)"
    assert run.handle.report()["steps/warmup" if kind != "local_sgd" else "exchanges/warmup"] == 3


def option_change(kind: str) -> None:
    run = start(kind)
    run.steps(0, 2)
    left = run.handle.change("error_feedback(top_k(fraction=0.5))")
    assert left == {}
    assert str(run.handle.compressor) == "error_feedback(top_k(fraction=0.5))"
    before = run.handle.report()["bytes/sent"]
    run.steps(2, 3)
    assert 2 * (float(run.handle.report()["bytes/sent"]) - float(before)) > 1.5 * float(before)
    lost = run.handle.change("qsgd(bits=8)", groups=[0])
    assert set(lost) == {0}
    assert lost[0].residuals
    assert float(run.handle.report()["changes/left_behind"]) > 0
    run.steps(3, 4)


def option_seed(kind: str) -> None:
    bits = []
    for seed in (1, 1, 2):
        run = start(kind, "random_k(fraction=0.3)", seed=seed)
        run.steps(0, 1)
        bits.append(run.bits())
        assert run.handle.seed == seed
    assert bits[0] == bits[1] != bits[2]


def option_check_every(kind: str) -> None:
    run = start(kind, check_every=2)
    run.steps(0, 2)
    if dist.get_rank() == 2:
        with torch.no_grad():
            if kind == "local_sgd":
                run.handle._outer._anchors[0][3] += 1e-3  # type: ignore[attr-defined]
            else:
                parameter = next(run.model.parameters())
                (parameter.to_local() if isinstance(parameter, DTensor) else parameter).view(-1)[0] += 1e-3
    error, _ = caught(lambda: run.steps(2, 5))
    # Every parameter of plain FSDP2 exists once, so there is nothing to compare.
    assert error == ("" if kind == "fsdp" else "ReplicasDiffer")


def reference_error(kind: str, bits: int) -> float:
    """The squared error of the means of one step against the mean over ranks of the squared gradients, from plain autograd."""
    model, gradients = net(), []
    for rank in range(dist.get_world_size()):
        model.zero_grad()
        loss_of(model, rank, 0).backward()
        gradients.append(torch.cat([p.grad.reshape(-1) for p in model.parameters() if p.grad is not None]))
    rows = torch.stack(gradients).double()
    if kind == "nodes":
        rows = rows.view(2, 2, -1).mean(1)  # what the exchange between nodes gets
    run = start(kind, f"qsgd(bits={bits}, bucket=64)", seed=1, dense_below=0)
    if kind == "local_sgd":
        before = torch.cat([p.detach().reshape(-1).clone() for p in run.model.parameters()])
        run.steps(0, 1)
        after = torch.cat([p.detach().reshape(-1) for p in run.model.parameters()])
        mean = (before - after).double() / 0.1  # the pseudo-gradient of one inner step is the learning rate times the gradient
    else:
        loss_of(run.model, dist.get_rank(), 0).backward()
        found = [p.grad for p in run.model.parameters()]
        mean = torch.cat([whole(g).reshape(-1) for g in found if g is not None]).double()
    return float((mean - rows.mean(0)).square().sum() / rows.square().sum(1).mean())


def option_measure_every(kind: str) -> None:
    run = start(kind, "qsgd(bits=4, bucket=64)", seed=1, dense_below=0, measure_every=3)
    run.steps(0, 1)
    measured = float(run.handle.report()["relative_error"])
    message = float(run.handle.report()["message_error"])
    if kind == "nodes":  # each rank sees its own shard
        totals = torch.tensor([run.handle.engine.totals.error, run.handle.engine.totals.power], dtype=torch.float64)
        dist.all_reduce(totals)
        assert float(totals[0] / totals[1]) == pytest.approx(reference_error(kind, 4), rel=0.02)
    else:
        assert measured == pytest.approx(reference_error(kind, 4), rel=0.02)
    assert 0 < message < 1
    run.steps(1, 3)
    assert run.handle.report()["relative_error"] == measured  # steps 1 and 2 are not measured
    run.steps(3, 4)
    assert run.handle.report()["relative_error"] != measured


def option_compare(kind: str) -> None:
    run = start(kind)
    run.steps(0, 1)
    assert "compare() tells" in str(run.handle.report()["verdict"]) or "does not pay" in str(run.handle.report()["verdict"])
    found = run.handle.compare(rounds=1)
    assert found.keys() == {"float32", "bf16"}
    assert all(seconds > 0 for seconds in found.values())
    assert run.handle.report()["seconds/step/bf16"] == found["bf16"]
    assert "here: " in str(run.handle.report()["verdict"])


def option_state_dict(kind: str) -> None:
    run = start(kind, seed=5)
    run.steps(0, 2)
    saved, weights = run.handle.state_dict(), {k: v.clone() for k, v in run.model.state_dict().items()}
    run.steps(2, 3)
    again: Run = start(kind, seed=6)
    again.model.load_state_dict(weights)
    again.handle.load_state_dict(saved)
    assert same(again.handle.state_dict(), saved)
    again.steps(2, 3)
    assert again.bits() == run.bits()
    assert same(again.handle.state_dict(), run.handle.state_dict())


def option_reset_report(kind: str) -> None:
    run = start(kind)
    run.steps(0, 2)
    each = float(run.handle.report()["bytes/sent"]) / 2
    assert each > 0
    run.handle.reset_report()
    assert run.handle.report()["bytes/sent"] == run.handle.report()["steps"] == 0
    run.steps(2, 3)
    assert run.handle.report()["steps"] == 1
    assert float(run.handle.report()["bytes/sent"]) == pytest.approx(each, rel=0.3)


def option_log_to(kind: str) -> None:
    run, lines = start(kind), []
    run.handle.log_to(lambda numbers, step: lines.append((step, numbers)), every=2, layers=True)
    silent = start(kind)
    run.steps(0, 4)
    silent.steps(0, 4)
    # Rank 0 alone writes, and what is exchanged does not change for it.
    assert run.bits() == silent.bits()
    assert run.handle.report()["bytes/sent"] == silent.handle.report()["bytes/sent"]
    assert [step for step, _ in lines] == ([2, 4] if dist.get_rank() == 0 else [])
    for _, numbers in lines:
        assert 0 < numbers["message_error"] < 1
        assert numbers["residual_norm"] > 0
        assert numbers["layer/2.weight/bits_per_coordinate"] < numbers["layer/2.bias/bits_per_coordinate"]


def option_variance(kind: str) -> None:
    if kind != "ddp":
        error, text = caught(lambda: start(kind, "vgc(alpha=1.5)"))
        assert error == "BadConfiguration"
        assert "variance over samples" in text
        return
    run = start(kind, "vgc(alpha=1.5)", dense_below=0)
    run.steps(0, 3)
    assert run.handle.exchange == "all_gather"
    assert any(bool(share.any()) for share in carried(run.handle.engine.lanes))


def option_power_sgd(kind: str) -> None:
    if kind in ("fsdp", "nodes"):
        mesh, peers = split(1 if kind == "fsdp" else 2)
        between = None if kind == "fsdp" else peers
        call: Any = fsdp.attach
        error, text = caught(lambda: call(sharded(mesh), None, "power_sgd(rank=2)", between=between))
        assert error == "BadConfiguration"
        assert ("go with between=" if kind == "fsdp" else "needs whole matrices") in text
        return
    run = start(kind, None, "power_sgd(rank=2)")
    run.steps(0, 3)
    assert any(bool(share.any()) for share in carried(run.handle.engine.lanes))
    assert 0 < float(run.handle.report()["bits_per_coordinate"]) < 16


def option_scaler(kind: str) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    if kind == "local_sgd":
        assert caught(lambda: start(kind, scaler=scaler))[0] == "TypeError"
        return
    kept = []
    for given in (None, scaler):
        run = start(kind, scaler=given)
        loss = loss_of(run.model, dist.get_rank(), 0)
        (loss if given is None else given.scale(loss)).backward()
        assert run.handle.loss_scale() == (1.0 if given is None else 64.0)
        kept.append(carried(run.handle.engine.lanes))
    # A power of two is taken out without rounding.
    assert any(bool(share.any()) for share in kept[0])
    assert all(torch.equal(a, b) for a, b in zip(*kept))


OPTIONS: dict[str, Any] = {name.removeprefix("option_"): f for name, f in dict(globals()).items() if name.startswith("option_")}


def job(option: str, kind: str) -> None:
    OPTIONS[option](kind)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("option", OPTIONS)
def test_option(ranks: Pool, option: str, kind: str) -> None:
    ranks.run(job, option, kind)

"""Detaching, and the mistakes around attaching that used to pass in silence."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

from tersegrad.core.errors import BadConfiguration
from tersegrad.integrations import ddp, fsdp, local_sgd, plain
from tests.engine.models import FEEDBACK, KINDS, Run, caught, loss_of, net, sharded, start, whole
from tests.exchange.pool import Pool


def gradients(run: Run, step: int) -> torch.Tensor:
    run.optimizer.zero_grad()
    loss_of(run.model, dist.get_rank(), step).backward()
    found = [p.grad for p in run.model.parameters()]
    return torch.cat([whole(g).reshape(-1) for g in found if g is not None])


def exact(run: Run, step: int) -> torch.Tensor:
    """The mean over ranks of the gradients of the same parameters."""
    model = net()
    for mine, theirs in zip(model.parameters(), run.model.parameters()):
        mine.data.copy_(whole(theirs.detach()).reshape(mine.shape))
    rows = []
    for rank in range(dist.get_world_size()):
        model.zero_grad()
        loss_of(model, rank, step).backward()
        rows.append(torch.cat([p.grad.reshape(-1) for p in model.parameters() if p.grad is not None]))
    return torch.stack(rows).mean(0)


def detach(kind: str) -> None:
    run, lines = start(kind), []
    run.handle.log_to(lambda numbers, step: lines.append(step), every=1, all_ranks=True)
    run.steps(0, 2)
    wanted = exact(run, 2)
    if kind != "nodes":  # whose reduction inside a node is all that FSDP does itself
        assert not torch.allclose(gradients(run, 2), wanted, rtol=1e-3, atol=1e-6) or kind == "local_sgd"
    before = run.handle.report()
    run.handle.detach()
    run.handle.detach()  # twice does no harm
    assert run.handle.detached
    assert "was detached" in caught(lambda: run.handle.change("qsgd(bits=8)"))[1]
    if kind == "local_sgd":
        assert "was detached" in caught(run.handle.step)[1]  # type: ignore[arg-type]
    elif kind != "nodes":
        torch.testing.assert_close(gradients(run, 2), wanted, rtol=1e-4, atol=1e-6)
    assert run.handle.report()["bytes/sent"] == before["bytes/sent"]
    assert lines == list(range(1, len(lines) + 1))
    again = attached(kind, run)
    assert again.step == 0 or kind == "local_sgd"
    told = len(lines)
    other = Run(kind, run.model, again, run.optimizer)
    other.steps(3, 5)
    assert other.handle.engine.step == 2
    assert len(lines) == told  # the old log has ended


def attached(kind: str, run: Run, compressor: str = "qsgd(bits=8)") -> Any:
    """A second handle of the same kind."""
    if kind == "ddp":
        return ddp.attach(run.model, compressor)
    if kind == "fsdp":
        return fsdp.attach(run.model, compressor)
    if kind == "nodes":
        return fsdp.attach(run.model, compressor, between=run.handle._between.group)  # type: ignore[attr-defined]
    return local_sgd.attach(run.model, compressor, how="local_sgd(every=1)")


def twice(kind: str) -> None:
    run = start(kind)
    error, words = caught(lambda: attached(kind, run))
    assert error == "BadConfiguration"
    assert f"attached already, with {FEEDBACK}" in words
    assert "handle.detach() first" in words
    run.steps(0, 1)  # and the first one goes on


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("job", [detach, twice])
def test_handles_come_and_go(ranks: Pool, kind: str, job: Any) -> None:
    ranks.run(job, kind)


def late() -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = net()
    for module in (model[0], model[2]):
        fully_shard(module, mesh=mesh)
    handle = fsdp.attach(model, FEEDBACK)
    fully_shard(model, mesh=mesh)
    error, words = caught(lambda: loss_of(model, dist.get_rank(), 0).backward())
    assert error == "BadConfiguration"
    assert "fully_shard was called after attach: the unit that begins with 4.weight would stay uncompressed" in words
    assert handle.report()["steps"] == 0


def test_fully_shard_after_attach_is_refused(ranks: Pool) -> None:
    ranks.run(late)


def fsdp1() -> None:
    model = FullyShardedDataParallel(net(), device_id=torch.device("cpu"))
    for attach in (ddp.attach, fsdp.attach):
        error, words = caught(lambda attach=attach: attach(model, FEEDBACK))  # type: ignore[misc]
        assert error == "BadConfiguration"
        assert "FSDP1" in words
        assert "fully_shard" in words
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    assert "tersegrad.integrations.fsdp" in caught(lambda: ddp.attach(sharded(mesh), FEEDBACK))[1]


def test_the_other_fsdp_is_named(ranks: Pool) -> None:
    ranks.run(fsdp1)


@pytest.mark.usefixtures("single")
def test_a_plain_module_is_attached_once() -> None:
    model = nn.Linear(64, 64)
    handle = plain.attach(model, FEEDBACK)
    with pytest.raises(BadConfiguration, match="attached already"):
        plain.attach(model, FEEDBACK)
    with pytest.raises(BadConfiguration, match="attached already"):
        local_sgd.attach(model, FEEDBACK)
    handle.detach()
    with pytest.raises(BadConfiguration, match="was detached"):
        handle.reduce()
    again = plain.attach(model, FEEDBACK)
    del again  # nobody keeps it
    plain.attach(model, FEEDBACK)


@pytest.mark.usefixtures("single")
def test_a_schedule_and_moments_end_with_the_handle() -> None:
    model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2)))
    asked: list[int] = []
    handle = ddp.attach(model, "vgc(alpha=1.5)", schedule=lambda step: asked.append(step))
    model(torch.randn(4, 8)).sum().backward()
    handle.detach()
    told = list(asked)
    model(torch.randn(4, 8)).sum().backward()
    assert asked == told
    assert "moments/fallbacks" not in handle.report()


@pytest.mark.usefixtures("single")
@pytest.mark.parametrize("enabled", [True, False])
def test_a_gradscaler_that_attach_was_not_told_of(enabled: bool) -> None:
    model = DistributedDataParallel(nn.Linear(64, 64))
    handle = ddp.attach(model, FEEDBACK)
    scaler = torch.amp.GradScaler("cpu", enabled=enabled)
    loss = scaler.scale(model(torch.randn(4, 64)).sum())
    if not enabled:
        loss.backward()
        return
    with pytest.raises(BadConfiguration, match=r"attach\(\.\.\., scaler=scaler\), or handle\.set_scale\(1\.0\)"):
        loss.backward()
    with pytest.raises(BadConfiguration, match="not told of"):  # and so every time
        handle.loss_scale()
    told = ddp.attach(DistributedDataParallel(nn.Linear(64, 64)), FEEDBACK, scaler=scaler)
    assert told.loss_scale() == scaler.get_scale()
    other = ddp.attach(DistributedDataParallel(nn.Linear(64, 64)), FEEDBACK)
    other.set_scale(1.0)
    assert other.loss_scale() == 1.0
    # Without residuals a message is as good at any scale.
    assert ddp.attach(DistributedDataParallel(nn.Linear(64, 64)), "qsgd(bits=4)").loss_scale() == 1.0
    del scaler
    assert handle.report()["steps"] == 0

"""What long runs meet: other numbers and arrangements of ranks, ranks that fail or die, sub-groups, mixed dtypes, many tensors."""

from __future__ import annotations

import gc
import os
import re
import signal
import sys
import time
import types
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from tersegrad.core import buffers
from tersegrad.core.errors import BadConfiguration
from tersegrad.integrations import ddp, fsdp, local_sgd
from tests.engine.models import FEEDBACK, KINDS, Run, caught, group_of, loss_of, net, split, start, whole
from tests.exchange.pool import Pool, pool

# --------------------------------------------------------------------------------------------- other numbers and arrangements


def job_saved(kind: str, nodes: int) -> dict[str, Any]:
    run = start(kind, nodes=nodes, seed=3)
    run.steps(0, 3)
    return run.handle.state_dict()


def job_loaded(kind: str, nodes: int, saved: list[dict[str, Any]]) -> tuple[dict[str, Any], int, bytes]:
    run = start(kind, nodes=nodes)
    run.handle.load_state_dicts(saved)
    state = run.handle.state_dict()
    run.steps(3, 5)
    return state, run.exchanged, run.bits()


def residuals(saved: list[dict[str, Any]], rounds: tuple[str, ...]) -> dict[str, Tensor]:
    """By parameter, the mean over the ranks that have it of every element's residual."""
    total: dict[str, Tensor] = {}
    count: dict[str, Tensor] = {}
    for one in saved:
        for part in one.values():
            for name, ranges in ((n, r) for round_ in rounds for n, r in part.get(round_, {}).items()):
                for key, entries in ranges.items():
                    a, b = map(int, key.split(":"))
                    for table in (total, count):
                        table.setdefault(name, torch.zeros(1000, dtype=torch.float64))
                    total[name][a:b] += entries["0.residual"].double()
                    count[name][a:b] += 1
    return {name: value / count[name].clamp(min=1) for name, value in total.items()}


@pytest.mark.usefixtures("single")
@pytest.mark.parametrize("kind", ["ddp", "fsdp", "local_sgd"])
def test_one_rank_becomes_four_and_four_become_one(ranks: Pool, kind: str) -> None:
    alone = job_saved(kind, 1)
    # One rank of FSDP2 holds all shards: torch reduces nothing, so nothing is exchanged.
    exchanges = kind != "fsdp"
    four = ranks.run(job_loaded, kind, 1, [alone])
    assert {exchanged for _, exchanged, _ in four} == {5 if exchanges else 2}
    assert len({bits for _, _, bits in four}) == 1
    for rounds in (("first", "reduce"), ("second",)):
        before, after = residuals([alone], rounds), residuals([state for state, *_ in four], rounds)
        assert before.keys() == after.keys()
        for name, value in before.items():
            torch.testing.assert_close(after[name], value, rtol=1e-6, atol=1e-9)
    saved = ranks.run(job_saved, kind, 1)
    back, exchanged, _ = job_loaded(kind, 1, saved)
    assert exchanged == (5 if exchanges else 3)
    for name, value in residuals(saved, ("first", "reduce")).items():
        torch.testing.assert_close(residuals([back], ("first", "reduce"))[name], value, rtol=1e-6, atol=1e-9)


def job_rearranged(old: int, new: int) -> tuple[Any, Any, Any, int, bytes]:
    saved: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(saved, job_saved("nodes", old))
    own = start("nodes", nodes=new)
    error, text = caught(lambda: own.handle.load_state_dict(saved[dist.get_rank()]))
    assert error == "BadCheckpoint", text
    assert "load_state_dicts" in text
    state, exchanged, bits = job_loaded("nodes", new, saved)
    return saved[dist.get_rank()], state, dist.get_rank(), exchanged, bits


@pytest.mark.parametrize(("old", "new"), [(2, 4), (2, 1), (4, 2)])
def test_another_split_of_nodes_and_shards_of_one_size(ranks: Pool, old: int, new: int) -> None:
    results = ranks.run(job_rearranged, old, new)
    before, after = (residuals([r[k] for r in results], ("first",)) for k in (0, 1))
    assert {exchanged for *_, exchanged, _ in results} == {5}
    assert len({bits for *_, bits in results}) == 1
    assert before.keys() == after.keys() != set()
    for name, value in before.items():
        torch.testing.assert_close(after[name], value, rtol=1e-6, atol=1e-9)


# ------------------------------------------------------------------------------------------------------ ranks that fail or die


def breaking(run: Run, action: Any) -> None:
    """Let ``action`` happen in the middle of the run's next step, with exchanges under way."""
    submit = run.handle.engine.begin

    def begin(scale: float = 1.0, take: Any = None) -> Any:
        step = submit(scale, take)
        inner, calls = step.submit, []

        def counting(*arguments: Any, **options: Any) -> None:
            calls.append(1)
            if len(calls) == 2:
                action()
            inner(*arguments, **options)

        step.submit = counting  # type: ignore[method-assign]
        return step

    run.handle.engine.begin = begin  # type: ignore[method-assign]


def fail() -> None:
    raise ArithmeticError("a rank that fails")


def job_fails(kind: str, timeout: float) -> tuple[str, str, int, bool, float]:
    run = start(kind, timeout=timeout)
    run.steps(0, 2)
    before = [lane.state for lane in run.handle.engine.lanes]
    if dist.get_rank() == 1:
        breaking(run, fail)
    begin = time.monotonic()
    error, text = caught(lambda: run.steps(2, 3))
    kept = all(a is lane.state for a, lane in zip(before, run.handle.engine.lanes))
    return error, text, run.exchanged, kept, time.monotonic() - begin


def says_who_left(kind: str, error: str, text: str) -> bool:
    """Whether an error is ours, of step 2; a rank may also wait in a collective of FSDP's own, whose error is torch's."""
    # gloo says it in many ways: timed out, timeout caused pair closure, connection closed by peer, connection reset by peer.
    told = re.search(r"timed out|timeout|closed|reset", text.split("torch says: ")[-1], re.IGNORECASE) is not None
    if kind in ("fsdp", "nodes") and error == "RuntimeError":
        return told
    return told and error == "RankLost" and text.startswith("the exchange of step 2 broke off: another rank failed or left")


@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_that_fails_in_mid_step_ends_it_on_all(ranks: Pool, kind: str) -> None:
    results = ranks.run(job_fails, kind, 3.0)
    assert results[1][:2] == ("ArithmeticError", "a rank that fails")
    for rank, (error, text, exchanged, kept, seconds) in enumerate(results):
        assert rank == 1 or says_who_left(kind, error, text), (error, text)
        assert kept
        # Whoever fails in a collective of FSDP's own has begun the step; its states are those before it all the same.
        assert exchanged == 2 or error == "RuntimeError"
        assert seconds < 3.0 + 2
    # Whoever exchanges with the rank that failed hears it from us.
    assert any(error == "RankLost" for error, *_ in results)


def job_spoilt(kind: str, timeout: float) -> tuple[str, str, bool, float]:
    """Rank 1 sends bytes that mean nothing to rank 0, the only one that reads them."""
    run = start(kind, group=group_of(timeout))
    run.steps(0, 2)
    before = [lane.state for lane in run.handle.engine.lanes]
    rounds: Any = sys.modules["tersegrad.exchange.reduce_scatter"]

    def spoilt(messages: list[Tensor]) -> Tensor:
        return buffers.cat([torch.full_like(messages[0], 255), *messages[1:]])

    begin, rounds.buffers = time.monotonic(), buffers
    if dist.get_rank() == 1:
        rounds.buffers = types.SimpleNamespace(empty=buffers.empty, cat=spoilt)
    try:
        error, text = caught(lambda: run.steps(2, 3))
    finally:
        rounds.buffers = buffers
    kept = all(a is lane.state for a, lane in zip(before, run.handle.engine.lanes))
    return error, text, kept, time.monotonic() - begin


@pytest.mark.parametrize("kind", ["ddp", "local_sgd"])
def test_a_message_that_one_rank_cannot_read_ends_the_step_on_all(ranks: Pool, kind: str) -> None:
    for rank, (error, text, kept, seconds) in enumerate(ranks.run(job_spoilt, kind, 30.0)):
        assert error in ("CorruptMessage", "Unreadable"), text
        assert ("rank 0 could not read" in text) == (rank != 0)
        assert kept
        # Nobody waits until the time of the process group is over.
        assert seconds < 20


def job_dies(kind: str) -> tuple[str, str, float]:
    run = start(kind, timeout=5.0)
    run.steps(0, 2)
    if dist.get_rank() == 1:
        breaking(run, lambda: os.kill(os.getpid(), signal.SIGKILL))
    begin = time.monotonic()
    error, text = caught(lambda: run.steps(2, 3))
    return error, text, time.monotonic() - begin


@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_that_dies_in_mid_step_ends_it_on_all(kind: str) -> None:
    with pool(4 if kind == "nodes" else 3, timeout=10.0) as victims:
        answers = victims.outcomes(job_dies, kind, within=60.0)
        for process in victims._processes:
            process.kill()
    assert answers[1] is None
    for good, (error, text, seconds) in (a for a in answers if a is not None):
        assert good
        assert says_who_left(kind, error, text), (error, text)
        assert seconds < 5.0 + 2
    assert any(a is not None and a[1][0] == "RankLost" for a in answers)


# -------------------------------------------------------------------------------------------------------------- DDP by itself


def job_sub_group(how: str) -> Any:
    """Ranks 1 and 3 train alone."""
    members = [1, 3]
    group: Any = dist.new_group(members)
    if dist.get_rank() not in members:
        return None
    model = DistributedDataParallel(net(), process_group=group)
    if how == "attach":
        handle = ddp.attach(model, FEEDBACK)
    else:
        handle, hook = ddp.make_hook(FEEDBACK, process_group=group if how == "pair with a group" else None)
        if how == "bound pair":
            handle.bind(model)
        model.register_comm_hook(handle, hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train() -> None:
        for step in range(3):
            optimizer.zero_grad()
            loss_of(model, dist.get_rank(), step).backward()
            optimizer.step()

    error = caught(train)
    return error, [p.detach().numpy().tobytes() for p in model.parameters()], handle.size if not error[0] else 0


@pytest.mark.parametrize("how", ["attach", "pair with a group", "bound pair", "pair without a group"])
def test_ddp_on_a_sub_group(ranks: Pool, how: str) -> None:
    _, one, _, other = ranks.run(job_sub_group, how)
    if how == "pair without a group":
        for answer in (one, other):
            assert answer[0][0] == "BadConfiguration"
            assert "process_group=group" in answer[0][1]
        return
    assert one == other
    assert one[0] == ("", "")
    assert one[2] == 2


class Mixed(nn.Module):
    """Layers in float32 and bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.inp, self.hidden, self.out = nn.Linear(10, 24), nn.Linear(24, 24).bfloat16(), nn.Linear(24, 5)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.out(torch.relu(self.hidden(torch.relu(self.inp(x)).bfloat16())).float())
        return result


def job_mixed(kind: str, text: str) -> tuple[list[bytes], list[str], int]:
    torch.manual_seed(3)
    core = Mixed()
    model: nn.Module = DistributedDataParallel(core) if kind == "ddp" else core
    if kind == "fsdp":
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for module in (core.inp, core.hidden, core.out, core):  # parameters of a unit have one dtype
            fully_shard(module, mesh=mesh)
    attach: Any = {"ddp": ddp, "fsdp": fsdp, "local_sgd": local_sgd}[kind].attach
    handle = attach(model, text, **({"how": "local_sgd(every=2)"} if kind == "local_sgd" else {}), dense_below=20)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        optimizer.zero_grad()
        loss_of(model, dist.get_rank(), step).backward()
        optimizer.step()
        if kind == "local_sgd":
            handle.step()
    handle.load_state_dict(handle.state_dict())
    dtypes = [str(group.dtype) for group in handle.groups]
    return [whole(p.detach()).float().numpy().tobytes() for p in core.parameters()], dtypes, handle.engine.step


@pytest.mark.parametrize("kind", ["ddp", "fsdp", "local_sgd"])
@pytest.mark.parametrize("text", ["identity", FEEDBACK])
def test_a_model_of_two_dtypes(ranks: Pool, kind: str, text: str) -> None:
    results = ranks.run(job_mixed, kind, text)
    assert all(r == results[0] for r in results)
    assert set(results[0][1]) == {"torch.float32", "torch.bfloat16"}


@pytest.mark.usefixtures("single")
@pytest.mark.parametrize(
    "text", ["vgc(alpha=1.5)", "hybrid(alpha=1.5, tau=0.01)", "error_feedback(vgc(alpha=1.5), force=true)"]
)
def test_compressors_by_variance_are_refused_at_attach_where_nobody_collects(text: str) -> None:
    for kind in KINDS[1:]:
        with pytest.raises(BadConfiguration, match="variance over samples"):
            start(kind, text)
    mesh, peers = split(1)
    model = nn.Linear(4, 4)
    fully_shard(model, mesh=mesh)
    with pytest.raises(BadConfiguration, match="variance over samples"):
        fsdp.attach(model, "qsgd", between=peers, reduce_compressor=text)


# --------------------------------------------------------------------------------------------------------------- time and memory


class Many(nn.Module):
    """A sum of very many small vectors."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.vectors = nn.ParameterList(nn.Parameter(torch.ones(8)) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        return sum((v.sum() * x for v in self.vectors), x * 0)


@pytest.mark.usefixtures("single")
@pytest.mark.parametrize("exchange", ["two_shot", "all_gather"])
def test_saving_takes_time_in_proportion_to_the_number_of_tensors(exchange: str) -> None:
    seconds = {}
    for count in (500, 2000):
        model = DistributedDataParallel(Many(count))
        handle = ddp.attach(model, FEEDBACK, exchange, dense_below=0)
        taken = []
        gc.collect()
        gc.disable()  # its pauses grow with what the whole test session holds
        for _ in range(5):
            begin = time.process_time()
            saved = handle.state_dict()
            taken.append(time.process_time() - begin)
        gc.enable()
        seconds[count] = min(taken)
        assert len(saved["rank0"]["first"]) == count
        begin = time.process_time()
        handle.load_state_dict(saved)
        assert time.process_time() - begin < 3
    assert seconds[2000] < 1.0
    assert seconds[2000] < 6 * seconds[500]

"""Local SGD and DiLoCo on real processes: against plain loops, bit for bit among ranks and through checkpoints."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from tersegrad.core.errors import BadConfiguration
from tersegrad.engine.replicas import ReplicasDiffer
from tersegrad.integrations import local_sgd
from tersegrad.integrations.anchors import Outer, divide
from tersegrad.integrations.local_sgd import DiLoCo, LocalSGD
from tersegrad.integrations.methods import method
from tests.exchange.pool import Pool, pool
from tests.integrations.test_ddp import same

SIZE = 3
FEEDBACK = "error_feedback(top_k(fraction=0.2))"
SMALL: dict[str, Any] = {"group_bytes": 2000, "dense_below": 20, "seed": 3}


@pytest.fixture(scope="module")
def workers() -> Iterator[Pool]:
    with pool(SIZE) as p:
        yield p


def net(seed: int = 3) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(10, 24), nn.ReLU(), nn.Linear(24, 24), nn.ReLU(), nn.Linear(24, 5))


class Written(TorchDispatchMode):
    """Counts the elements that operations write, in new tensors or in given ones; views and empty memory are no writing."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        written = args[0] if result is None and func._schema.is_mutable else result  # as _foreach_copy_ does
        given = {t.untyped_storage().data_ptr() for t in pytree.tree_leaves(args) if isinstance(t, Tensor)}
        for made in pytree.tree_leaves(written):
            view = made.untyped_storage().data_ptr() in given and not func._schema.is_mutable
            self.elements += 0 if view or "empty" in func.name() else made.numel()
        return result


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_pseudo_gradient_is_written_once(dtype: torch.dtype) -> None:
    parameters = dict(net().to(dtype).named_parameters())
    groups, _ = divide(parameters, 1, 1 << 20)
    outer = Outer(parameters, groups, method("diloco"))
    with torch.no_grad():
        for p in parameters.values():
            p.add_(0.25)
    with Written() as written:
        [progress] = [outer.progress(group.number) for group in groups]
    assert written.elements == progress.numel() == sum(p.numel() for p in parameters.values())
    own = torch.cat([parameters[n].detach().reshape(-1).float() for n in groups[0].names])
    anchors = torch.cat([outer.common()[n].reshape(-1) for n in groups[0].names])
    assert torch.equal(progress, anchors - own)


@pytest.mark.parametrize("kept", [0.0, 0.25, 1.0])
def test_parameters_are_pulled_to_the_anchor_in_one_pass(kept: float) -> None:
    parameters = dict(net().named_parameters())
    groups, _ = divide(parameters, 1, 1 << 20)
    outer = Outer(parameters, groups, method("diloco"))
    anchors = {name: value.clone() for name, value in outer.common().items()}
    with torch.no_grad():
        for p in parameters.values():
            p.add_(torch.randn(p.shape))
    own = {name: p.detach().clone() for name, p in parameters.items()}
    with Written() as written:
        outer.pull(groups[0].number, kept)
    assert written.elements == (0 if kept == 1 else sum(p.numel() for p in parameters.values()))
    for name, p in parameters.items():
        assert torch.equal(p.detach(), torch.lerp(anchors[name], own[name], kept))
        assert torch.equal(outer.common()[name], anchors[name])


def loss_of(model: nn.Module, rank: int, step: int) -> Tensor:
    g = torch.Generator().manual_seed(100 * step + rank)
    return nn.functional.cross_entropy(model(torch.randn(8, 10, generator=g)), torch.randint(0, 5, (8,), generator=g))


def vector(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().float().reshape(-1) for p in model.parameters()])


def train(model: nn.Module, optimizer: Any, handle: local_sgd.Handle, first: int, last: int) -> list[int]:
    moved = []
    for step in range(first, last):
        optimizer.zero_grad()
        loss_of(model, dist.get_rank(), step).backward()
        optimizer.step()
        if handle.step():
            moved.append(step + 1)
    return moved


def inner(model: nn.Module, kind: str = "sgd") -> Any:
    return torch.optim.AdamW(model.parameters(), lr=0.01) if kind == "adamw" else torch.optim.SGD(model.parameters(), lr=0.1)


# ------------------------------------------------------------------------------------------------------------ jobs for workers


def job_train(text: str | None, exchange: str, how: Any, kind: str, count: int) -> tuple[Tensor, list[int], dict[str, Any]]:
    model = net(seed=dist.get_rank())  # rank 0's is what all start from
    handle = local_sgd.attach(model, text, exchange, how, measure_every=1, **SMALL)
    moved = train(model, inner(model, kind), handle, 0, count)
    handle.finish()
    handle.check_replicas()
    return vector(model), moved, handle.report()


def job_plain_ddp(count: int) -> Tensor:
    model = DistributedDataParallel(net(seed=dist.get_rank()))
    optimizer = inner(model)
    for step in range(count):
        optimizer.zero_grad()
        loss_of(model, dist.get_rank(), step).backward()
        optimizer.step()
    return vector(model)


def job_resume(text: str | None, exchange: str, how: str, at: int, last: int) -> tuple[Tensor, Tensor, Any, Any]:
    """``last`` steps at once, and through a checkpoint after ``at``."""
    whole = net()
    optimizer = inner(whole, "adamw")
    first = local_sgd.attach(whole, text, exchange, how, **SMALL)
    train(whole, optimizer, first, 0, last)
    model = net()
    optimizer = inner(model, "adamw")
    handle = local_sgd.attach(model, text, exchange, how, **SMALL)
    train(model, optimizer, handle, 0, at)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict(), handle.state_dict()))
    train(model, optimizer, handle, at, at + 2)  # saving has not changed what happens next
    again = net(seed=77)
    optimizer = inner(again, "adamw")
    resumed = local_sgd.attach(again, text, exchange, how, **SMALL | {"seed": 0})
    again.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    resumed.load_state_dict(saved[2])
    train(again, optimizer, resumed, at, at + 2)
    assert torch.equal(vector(again), vector(model))
    train(again, optimizer, resumed, at + 2, last)
    own = f"rank{dist.get_rank()}"
    return vector(whole), vector(again), first.state_dict()[own], resumed.state_dict()[own]


def job_states(how: str, count: int) -> dict[str, Any]:
    model = net()
    handle = local_sgd.attach(model, FEEDBACK, "two_shot", how, **SMALL)
    train(model, inner(model), handle, 0, count)
    return handle.state_dict()


def job_resized(saved: list[dict[str, Any]], how: str, size: int) -> dict[str, Any] | None:
    group = dist.new_group(list(range(size)))
    if dist.get_rank() >= size:
        return None
    handle = local_sgd.attach(net(), FEEDBACK, "two_shot", how, process_group=group, **SMALL)
    handle.load_state_dicts(saved)
    return handle.state_dict()


def job_poisoned() -> tuple[Tensor, Tensor, float, bool]:
    model = net()
    handle = local_sgd.attach(model, FEEDBACK, "two_shot", "diloco(every=2)", **SMALL)
    optimizer = inner(model)
    train(model, optimizer, handle, 0, 4)
    before, residual = vector(model), handle.state_dict()[f"rank{dist.get_rank()}"]["first"]
    train(model, optimizer, handle, 4, 5)
    if dist.get_rank() == 1:
        with torch.no_grad():
            next(model.parameters())[0, 0] = float("nan")
    train(model, optimizer, handle, 5, 6)
    kept = same(handle.state_dict()[f"rank{dist.get_rank()}"]["first"], residual)
    return before, vector(model), float(handle.report()["exchanges/dropped"]), kept


def job_anchors() -> tuple[Tensor, Tensor, Tensor]:
    model = net()
    handle = local_sgd.attach(model, FEEDBACK, "all_gather", "local_sgd(every=4)", **SMALL)
    train(model, inner(model), handle, 0, 6)
    before = vector(model)
    with handle.anchors():
        common = vector(model)
    return before, common, vector(model)


def job_broken() -> str:
    handle = local_sgd.attach(net(), "identity", "two_shot", "local_sgd(every=4)", **SMALL)
    if dist.get_rank() == 2:
        handle._outer._anchors[0][3] += 1e-6
    try:
        handle.check_replicas()
    except ReplicasDiffer as error:
        return str(error)
    return ""


# ---------------------------------------------------------------------------------------------------------------------- tests


def test_averaging_every_step_is_plain_ddp(workers: Pool) -> None:
    ours = workers.run(job_train, "identity", "two_shot", LocalSGD(every=1), "sgd", 4)
    plain = workers.run(job_plain_ddp, 4)
    torch.testing.assert_close(ours[0][0], plain[0], rtol=1e-5, atol=1e-6)


def test_equals_a_plain_diloco_loop(workers: Pool) -> None:
    """All workers in one process, written out; the exchange is exact."""
    how = DiLoCo(every=3, lr=0.6, momentum=0.8)
    theta, momentum = vector(net(seed=0)), torch.zeros_like(vector(net()))
    replicas = [net(seed=0) for _ in range(SIZE)]
    optimizers = [inner(m, "adamw") for m in replicas]
    for step in range(9):
        for rank, (model, optimizer) in enumerate(zip(replicas, optimizers)):
            optimizer.zero_grad()
            loss_of(model, rank, step).backward()
            optimizer.step()
        if (step + 1) % how.every == 0:
            delta = theta - torch.stack([vector(m) for m in replicas]).mean(0)
            momentum = how.momentum * momentum + delta
            theta = theta - how.lr * (delta + how.momentum * momentum)
            for model in replicas:
                nn.utils.vector_to_parameters(theta.clone(), model.parameters())
    ours = workers.run(job_train, "identity", "two_shot", how, "adamw", 9)
    torch.testing.assert_close(ours[0][0], theta, rtol=1e-4, atol=1e-5)
    assert ours[0][1] == [3, 6, 9]


@pytest.mark.parametrize(
    ("text", "exchange", "how"),
    [
        (FEEDBACK, "two_shot", "local_sgd(every=3)"),
        (FEEDBACK, "all_gather", "diloco(every=4, fragments=2)"),
        ("qsgd", "two_shot", "diloco(every=4, overlap=2)"),
        (FEEDBACK, "hierarchical(ranks_per_node=2)", "diloco(every=6, fragments=3, overlap=3)"),
        (None, "power_sgd(rank=2)", "diloco(every=4)"),
    ],
)
def test_ranks_agree_bit_for_bit_and_bytes_are_counted(workers: Pool, text: str | None, exchange: str, how: str) -> None:
    results = workers.run(job_train, text, exchange, how, "adamw", 12)
    assert all(torch.equal(v, results[0][0]) for v, _, _ in results)
    report = results[0][2]
    assert report["steps"] == 12
    assert report["exchanges"] > 2
    assert float(report["bytes/sent"]) > 0
    if text is not None:
        assert 0 < float(report["bits_per_coordinate"]) < 32
        assert 0 < float(report["message_error"]) < 1


def test_fragments_take_turns(workers: Pool) -> None:
    """Every parameter is exchanged once in a period, and never all at once."""
    whole = workers.run(job_train, "identity", "two_shot", "local_sgd(every=6)", "sgd", 6)[0]
    parts = workers.run(job_train, "identity", "two_shot", "local_sgd(every=6, fragments=3)", "sgd", 6)[0]
    assert whole[1] == [6]
    assert parts[1] == [2, 4, 6]
    assert [DiLoCo(every=6, fragments=3).turn(s) for s in (2, 4, 6)] == [[2], [1], [0]]
    assert whole[2]["exchanges"] == 1
    assert parts[2]["exchanges"] == 3 + 2  # finish() exchanges what was not exchanged in the last step


@pytest.mark.parametrize(
    ("text", "exchange", "how", "at"),
    [
        (FEEDBACK, "two_shot", "diloco(every=4)", 6),
        (FEEDBACK, "all_gather", "diloco(every=6, fragments=2, overlap=2)", 7),  # an exchange is under way
        (FEEDBACK, "hierarchical(ranks_per_node=2)", "local_sgd(every=3)", 4),
        (None, "power_sgd(rank=2)", "diloco(every=4)", 5),
    ],
)
def test_resumes_bit_for_bit(workers: Pool, text: str | None, exchange: str, how: str, at: int) -> None:
    for whole, again, first, second in workers.run(job_resume, text, exchange, how, at, 14):
        assert torch.equal(whole, again)
        assert first["public"].replace('"seed": 3', "") == second["public"].replace('"seed": 3', "")
        assert same({k: v for k, v in first.items() if k != "public"}, {k: v for k, v in second.items() if k != "public"})


def test_another_world_size_starts_from_the_mean_of_residuals(workers: Pool) -> None:
    how = "diloco(every=3)"
    saved = workers.run(job_states, how, 6)
    parts = [one[f"rank{r}"] for r, one in enumerate(saved)]
    resized = [one for one in workers.run(job_resized, saved, how, 2) if one is not None]
    after = resized[1]["rank1"]
    for name, ranges in after["first"].items():
        (whole,) = ranges.values()
        expected = torch.stack([next(iter(p["first"][name].values()))["0.residual"] for p in parts]).double().mean(0).float()
        assert torch.equal(whole["0.residual"], expected)
    for name, anchor in after["anchors"].items():
        assert torch.equal(anchor, parts[0]["anchors"][name])
    assert after["momenta"].keys() == parts[0]["momenta"].keys() != set()


def test_a_poisoned_round_is_dropped_everywhere(workers: Pool) -> None:
    for before, after, dropped, kept in workers.run(job_poisoned):
        assert torch.equal(before, after)  # back to the anchor of the round before
        assert dropped == 1
        assert kept


def test_anchors_are_common_and_parameters_come_back(workers: Pool) -> None:
    results = workers.run(job_anchors)
    for before, common, after in results:
        assert torch.equal(before, after)
        assert not torch.equal(before, common)
        assert torch.equal(common, results[0][1])


def test_differing_anchors_are_named(workers: Pool) -> None:
    assert all("on rank 2 differs" in text for text in workers.run(job_broken))


def job_refused() -> list[str]:
    messages = []

    def attempt(action: Any) -> None:
        with pytest.raises(BadConfiguration) as caught:
            action()
        messages.append(str(caught.value))

    handle = local_sgd.attach(net(), FEEDBACK, "two_shot", "diloco(every=4)", **SMALL)
    saved = handle.state_dict()
    attempt(lambda: local_sgd.attach(DistributedDataParallel(net()), FEEDBACK))
    attempt(lambda: local_sgd.attach(net(), None, "two_shot"))
    attempt(lambda: local_sgd.attach(net(), FEEDBACK, "power_sgd"))
    attempt(lambda: local_sgd.attach(net(), FEEDBACK, "two_shot", "diloco(every=5)", **SMALL).load_state_dict(saved))
    attempt(lambda: local_sgd.attach(net(), "qsgd", "two_shot", "diloco(every=4)", **SMALL).load_state_dict(saved))
    attempt(lambda: handle.load_state_dict({"rank0": {"step": 3}}))
    attempt(lambda: handle.load_state_dict({}))
    return messages


def test_refusals_say_what_to_do(workers: Pool) -> None:
    expected = [
        "plain module",
        "needs a compressor",
        "compresses by itself",
        "saved with method=diloco(every=4)",
        "saved with compressor=error_feedback",
        "has no facts: is it ours",
        "no state",
    ]
    for messages in workers.run(job_refused):
        assert all(part in message for part, message in zip(expected, messages, strict=True)), messages


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("diloco(every=0)", "at least 1"),
        ("diloco(every=4, fragments=5)", "between 1 and every"),
        ("diloco(every=4, overlap=4)", "less than every"),
        ("local_sgd(mixing=1)", "mixing"),
        ("diloco(momentum=1)", "momentum"),
        ("dilco", "did you mean 'diloco'"),
    ],
)
def test_bad_methods_are_refused(text: str, expected: str) -> None:
    with pytest.raises(BadConfiguration, match=expected):
        local_sgd.method(text)

"""FSDP2 on real processes: equal to plain FSDP2, among nodes, over checkpoints and other world sizes."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

import tersegrad
from tersegrad.core.errors import BadConfiguration
from tersegrad.core.private import TESTED
from tersegrad.core.protocol import Context
from tersegrad.engine import ReplicasDiffer
from tersegrad.integrations import fsdp
from tersegrad.integrations.fsdp_units import Layout, Slot
from tersegrad.wrappers import ByTensor
from tests.exchange.pool import Pool, as_in_a_rank, pool
from tests.integrations.test_ddp import carry, same

SIZE = 4
FEEDBACK = "error_feedback(top_k(fraction=0.1))"


@pytest.fixture(scope="module")
def workers() -> Iterator[Pool]:
    with pool(SIZE) as p:
        yield p


class Net(nn.Module):
    """Layers whose sizes four ranks do not divide, one frozen, one that is used only for some inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(10, 23)
        self.frozen = nn.Linear(23, 23).requires_grad_(False)
        self.hidden = nn.Sequential(nn.Linear(23, 30), nn.ReLU(), nn.Linear(30, 24))
        self.sometimes = nn.Linear(24, 24)
        self.out = nn.Linear(24, 5)

    def forward(self, x: Tensor, skip: bool = False) -> Tensor:
        h = self.hidden(self.frozen(torch.relu(self.inp(x))))
        result: Tensor = self.out(h if skip else torch.relu(self.sometimes(h)))
        return result


def shard(mesh: DeviceMesh, seed: int = 3, dtype: torch.dtype = torch.float32, **options: Any) -> Net:
    torch.manual_seed(seed)
    model = Net().to(dtype)
    for module in (model.inp, model.hidden, model.sometimes, model):
        fully_shard(module, mesh=mesh, **options)
    return model


def loss_of(model: nn.Module, rank: int, step: int, skip: bool = False) -> Tensor:
    g = torch.Generator().manual_seed(100 * step + rank)
    x, y = torch.randn(8, 10, generator=g), torch.randint(0, 5, (8,), generator=g)
    parameter = next(model.parameters())
    return nn.functional.cross_entropy(model(x.to(parameter.dtype), skip=skip).float(), y)


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)


def steps(model: nn.Module, first: int, last: int, **kwargs: Any) -> None:
    optimizer = optimizer_of(model)
    for step in range(first, last):
        optimizer.zero_grad()
        loss_of(model, dist.get_rank(), step, **kwargs).backward()
        optimizer.step()


def whole(model: nn.Module) -> Tensor:
    return torch.cat([p.full_tensor().detach().float().reshape(-1) for p in model.parameters() if isinstance(p, DTensor)])


def gradients(model: nn.Module) -> dict[str, Tensor]:
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {name: g.full_tensor().clone() for name, g in found.items() if isinstance(g, DTensor)}


def flat_mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (SIZE,))


def grid() -> tuple[DeviceMesh, Any]:
    """Two nodes of two ranks: the shard mesh of this rank's node, and the group of its peers."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    return mesh["shard"], mesh["replicate"].get_group()


# ------------------------------------------------------------------------------------------------------------ jobs for workers

OPTIONS: dict[str, dict[str, Any]] = {
    "mixed": {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)},
    "bf16": {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)},
    "fp16": {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.float16)},
    "columns": {"shard_placement_fn": lambda p: Shard(1) if tuple(p.shape) == (24, 24) else None},
    "keep": {"reshard_after_forward": False},
}


def job_train(text: str | None, situation: str) -> tuple[Tensor, dict[str, Any]]:
    """Train in one situation; ``text`` None is plain FSDP2."""
    rank = dist.get_rank()
    model = shard(flat_mesh(), **OPTIONS.get(situation, {}))
    handle = fsdp.attach(model, text, dense_below=30, seed=5) if text else None
    if situation == "sum":
        for module in (model.inp, model.hidden, model.sometimes, model):
            module.set_force_sum_reduction_for_comms(True)  # type: ignore[operator]
    if situation == "thawed":
        model.frozen.requires_grad_(True)
    optimizer = optimizer_of(model)
    for step in range(2):
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        for micro in range(3 if situation in ("accumulate", "reduce_each") else 1):
            if situation == "accumulate":
                model.set_requires_gradient_sync(micro == 2)  # type: ignore[operator]
            loss_of(model, rank, 10 * micro + step, skip=situation == "unused").backward()
        if situation == "clip":
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
    return whole(model), handle.report() if handle else {}


def job_gradients(text: str, count: int) -> list[dict[str, Tensor]]:
    model = shard(flat_mesh())
    fsdp.attach(model, text, dense_below=30, seed=9)
    results = []
    for step in range(count):
        model.zero_grad()
        loss_of(model, dist.get_rank(), step).backward()
        results.append(gradients(model))
    return results


def job_resume(text: str, hows: tuple[str, ...], nodes: bool) -> tuple[Tensor, dict[str, Tensor]]:
    """Four steps at once, and two plus two through each kind of checkpoint."""
    mesh, peers = grid() if nodes else (flat_mesh(), None)

    def make(seed: int) -> tuple[Net, fsdp.Handle]:
        model = shard(mesh)
        return model, fsdp.attach(
            model, text, between=peers, reduce_compressor=text if nodes else None, dense_below=30, seed=seed
        )

    model, _ = make(4)
    steps(model, 0, 4)
    first, handle = make(4)
    steps(first, 0, 2)
    found = {}
    for how in hows:
        again, resumed = make(0)
        again.load_state_dict(copy.copy(first.state_dict()))
        carry(handle, resumed, sharded=how == "dcp")
        steps(again, 2, 4)
        found[how] = whole(again)
    return whole(model), found


def job_nodes(text: str | None, situation: str) -> Tensor:
    """Two nodes of two ranks, through hooks or native HSDP."""
    if text is None:
        model = shard(init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))
    else:
        mesh, peers = grid()
        model = shard(mesh)
        fsdp.attach(
            model, text, between=peers, exchange="all_gather" if situation == "all_gather" else "two_shot", dense_below=30
        )
    steps(model, 0, 2)
    return whole(model)


def job_divided(factors: tuple[float | None, ...], nodes: bool) -> list[dict[str, Tensor]]:
    """Gradients with divide factors of the user's: PREMUL_SUM, which gloo itself does not have."""
    mesh, peers = grid() if nodes else (flat_mesh(), None)
    model, found = shard(mesh), []
    fsdp.attach(model, "identity", between=peers, reduce_compressor="identity" if nodes else None)
    for factor in factors:
        for module in (model.inp, model.hidden, model.sometimes, model):
            if factor is not None:
                module.set_gradient_divide_factor(factor)  # type: ignore[operator]
        model.zero_grad()
        loss_of(model, dist.get_rank(), 0).backward()
        found.append(gradients(model))
    return found


def job_states(text: str, count: int) -> dict[str, Any]:
    model = shard(flat_mesh())
    handle = fsdp.attach(model, text, dense_below=30)
    steps(model, 0, count)
    return handle.state_dict()


def job_sized(saved: list[dict[str, Any]], text: str) -> dict[str, Any]:
    """Load the states of all ranks as if of another world size: sharded over the two ranks of a node."""
    mesh, _ = grid()
    model = shard(mesh)
    handle = fsdp.attach(model, text, dense_below=30)
    handle.load_state_dicts(saved)
    return handle.state_dict()


def poisoned(x: Tensor) -> Tensor:
    y = x * 1
    y.register_hook(lambda g: g.index_fill(0, torch.tensor([0]), float("inf")))
    return y


def job_not_finite(text: str, nodes: bool) -> list[Any]:
    rank, round_ = dist.get_rank(), "first" if nodes else "reduce"
    mesh, peers = grid() if nodes else (flat_mesh(), None)
    model = shard(mesh)
    handle = fsdp.attach(model, text, between=peers, dense_below=30)
    steps(model, 0, 2)
    before = handle.state_dict()[f"rank{rank}"][round_]
    model.zero_grad()
    if rank == 1:  # in one element, so in one rank's shard
        model.out.forward = lambda h: nn.functional.linear(h, model.out.weight, poisoned(model.out.bias))  # type: ignore[assignment]
    loss_of(model, rank, 2).backward()
    model.out.__dict__.pop("forward", None)
    found = any(not bool(torch.isfinite(g).all()) for g in gradients(model).values())
    kept = same(handle.state_dict()[f"rank{rank}"][round_], before)
    steps(model, 3, 4)
    moved = not same(handle.state_dict()[f"rank{rank}"][round_], before)
    return [found, kept, moved, handle.report()["steps/dropped"]]


def job_scaled(text: str) -> tuple[bool, bool]:
    """A power of two as loss scale changes nothing but the exponent of the gradients."""
    rank = dist.get_rank()
    plain, scaled = shard(flat_mesh()), shard(flat_mesh())
    handles = [
        fsdp.attach(plain, text, dense_below=30),
        fsdp.attach(scaled, text, dense_below=30, scaler=torch.amp.GradScaler("cpu", init_scale=256.0)),
    ]
    handles[1].scaler.scale(torch.ones(()))  # makes the scale known
    for step in range(2):
        plain.zero_grad()
        scaled.zero_grad()
        loss_of(plain, rank, step).backward()
        (loss_of(scaled, rank, step) * 256).backward()
    ours, theirs = gradients(plain), gradients(scaled)
    equal = all(torch.equal(ours[n] * 256, theirs[n]) for n in ours)
    return equal, same(handles[0].state_dict(), handles[1].state_dict())


def job_errors() -> list[str]:
    messages = []

    def failing(call: Any, kind: type[Exception]) -> None:
        try:
            call()
        except kind as error:
            messages.append(str(error))

    native = shard(init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))
    failing(lambda: fsdp.attach(native, "qsgd"), BadConfiguration)
    failing(lambda: fsdp.attach(nn.Linear(3, 3), "qsgd"), BadConfiguration)
    mesh, peers = grid()
    failing(lambda: fsdp.attach(shard(mesh), "qsgd", reduce_compressor="qsgd"), BadConfiguration)
    failing(lambda: fsdp.attach(shard(mesh), "qsgd", between=peers, exchange="power_sgd"), BadConfiguration)
    different = shard(mesh, seed=3 + dist.get_rank() // 2)
    fsdp.attach(different, "qsgd", between=peers)
    failing(lambda: loss_of(different, 0, 0).backward(), ReplicasDiffer)
    one, other = shard(flat_mesh()), shard(flat_mesh())
    handle, second = fsdp.attach(one, FEEDBACK), fsdp.attach(other, "qsgd")
    failing(lambda: second.load_state_dict(handle.state_dict()), BadConfiguration)
    failing(lambda: handle.load_state_dict({"rank9": handle.state_dict()[f"rank{dist.get_rank()}"]}), BadConfiguration)
    return messages


def job_unused(flag: bool) -> str:
    """A parameter of a unit gets no gradient on any rank."""

    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(10, 7), nn.Linear(10, 7)

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.a(x)
            return result

    torch.manual_seed(0)
    model = Pair()
    fully_shard(model, mesh=flat_mesh())
    handle = fsdp.attach(model, FEEDBACK, dense_below=0)
    if flag:
        model.set_reduce_scatter_unused_params(True)  # type: ignore[operator]
    try:
        model(torch.ones(4, 10)).sum().backward()
    except BadConfiguration as error:
        return str(error)
    return f"{handle.report()['steps']} step"


def job_report() -> dict[str, Any]:
    model = shard(flat_mesh())
    handle = fsdp.attach(model, FEEDBACK, dense_below=30)
    steps(model, 0, 2)
    before = handle.report()
    handle.reset_report()
    after = handle.report()
    steps(model, 2, 3)
    return {"before": before, "after": after, "dense": handle.sent_dense(), "again": handle.report()}


# ---------------------------------------------------------------------------------------------------------------------- tests

SITUATIONS = (
    "plain",
    "mixed",
    "bf16",
    "fp16",
    "columns",
    "keep",
    "accumulate",
    "reduce_each",
    "sum",
    "unused",
    "clip",
    "thawed",
)


@pytest.mark.parametrize("situation", SITUATIONS)
def test_identity_equals_plain_fsdp(workers: Pool, situation: str) -> None:
    ours = workers.run(job_train, "identity", situation)
    plain = workers.run(job_train, None, situation)
    loose = situation in ("bf16", "fp16", "mixed")
    for mine, theirs in zip(ours, plain):
        torch.testing.assert_close(mine[0], theirs[0], rtol=2e-2 if loose else 1e-5, atol=1e-2 if loose else 1e-6)


@pytest.mark.parametrize("nodes", [False, True])
def test_a_divide_factor_is_honoured(workers: Pool, nodes: bool) -> None:
    factors = (2.0, 4.0, 6.0)  # two is a node's size, for which FSDP asks for AVG
    (means, *results), *_ = workers.run(job_divided, (None, *factors), nodes)
    for factor, divided in zip(factors, results, strict=True):
        for name, mean in means.items():
            torch.testing.assert_close(divided[name], mean * (SIZE / factor))


@pytest.mark.parametrize("situation", ["plain", "mixed", "fp16", "columns", "accumulate", "reduce_each"])
def test_compressed_training_is_the_same_on_every_rank(workers: Pool, situation: str) -> None:
    results = workers.run(job_train, FEEDBACK, situation)
    assert all(torch.equal(results[0][0], r[0]) for r in results)
    for _, report in results:
        assert report["steps"] == (6 if situation == "reduce_each" else 2)
        assert 0 < report["bits_per_coordinate"] < 16
        assert report["bytes/sent"] > 0
        assert report["state/bytes"] > 0


@pytest.mark.parametrize("text", ["sparse_dithering(alpha=0.1)", "qsgd", FEEDBACK])
@as_in_a_rank()
def test_gradients_are_sums_of_decoded_messages(workers: Pool, text: str) -> None:
    """The shards that FSDP holds, from the protocol alone: encode every rank's rows, decode, add up."""
    count = 2
    real = workers.run(job_gradients, text, count)
    torch.manual_seed(3)
    model = Net()
    names = {id(p): n for n, p in model.named_parameters()}
    children = {"inp": model.inp, "hidden": model.hidden, "sometimes": model.sometimes}
    taken = {n for prefix in children for n in names.values() if n.startswith(prefix)}
    units = [[n for n in names.values() if n not in taken]] + [[n for n in names.values() if n.startswith(c)] for c in children]
    units = [[n for n in unit if not n.startswith("frozen")] for unit in units]
    compressor = ByTensor(tersegrad.parse(text), small=tersegrad.Identity(), below=30)
    shapes = {n: tuple(p.shape) for n, p in model.named_parameters()}
    layouts = [
        Layout(
            tuple(
                Slot(n, shapes[n], numel := torch.Size(shapes[n]).numel(), -(-shapes[n][0] // SIZE) * (numel // shapes[n][0]))
                for n in unit
            ),
            SIZE,
        )
        for unit in units
    ]
    kept = [[[compressor.init(lay.spec(j), "cpu") for j in range(SIZE)] for _ in range(SIZE)] for lay in layouts]
    for step in range(count):
        each = []
        for rank in range(SIZE):
            model.zero_grad()
            loss_of(model, rank, step).backward()
            each.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
        for number, layout in enumerate(layouts):
            expected = {s.name: torch.zeros(s.numel) for s in layout.slots}
            for j in range(SIZE):
                spec, ctx = layout.spec(j), Context(seed=9, step=step, buffer=number).child(j)
                total = torch.zeros(spec.numel)
                for rank in range(SIZE):
                    x = torch.cat([torch.zeros(0), *(each[rank][p.name].reshape(-1)[p.start : p.stop] for p in spec.pieces)])
                    at = Context(ctx.seed, ctx.step, ctx.buffer, rank)
                    message, kept[number][rank][j] = compressor.encode(x, spec, kept[number][rank][j], at)
                    total += compressor.decode(message, spec, at)
                for piece, value in zip(spec.pieces, (total * (1 / SIZE)).split([p.numel for p in spec.pieces])):
                    expected[piece.name][piece.start : piece.stop] = value
            for name, value in expected.items():
                for rank in range(SIZE):
                    assert torch.equal(real[rank][step][name].reshape(-1), value), name


@pytest.mark.parametrize(
    ("hows", "nodes", "text"),
    [
        (("torch", "dcp"), False, FEEDBACK),
        (("dcp",), True, FEEDBACK),
        (("torch",), True, "random_sparse_dithering(omega=0.5)"),
    ],
)
def test_resuming_is_bit_identical(workers: Pool, hows: tuple[str, ...], nodes: bool, text: str) -> None:
    for straight, resumed in workers.run(job_resume, text, hows, nodes):
        assert tuple(resumed) == hows
        assert all(torch.equal(straight, one) for one in resumed.values())


def test_identity_between_nodes_equals_native_hsdp(workers: Pool) -> None:
    plain = workers.run(job_nodes, None, "")
    for situation in ("two_shot", "all_gather"):
        ours = workers.run(job_nodes, "identity", situation)
        torch.testing.assert_close(ours[0], plain[0], rtol=1e-5, atol=1e-6)
        assert all(torch.equal(ours[0], o) for o in ours)


def test_nodes_agree_when_compressed(workers: Pool) -> None:
    results = workers.run(job_nodes, FEEDBACK, "two_shot")
    assert all(torch.equal(results[0], r) for r in results)


def test_another_world_size_starts_from_the_mean_of_residuals(workers: Pool) -> None:
    saved = workers.run(job_states, FEEDBACK, 2)
    loaded = workers.run(job_sized, saved, FEEDBACK)
    old = [s[f"rank{r}"]["reduce"] for r, s in enumerate(saved)]
    assert old[0]
    for r, state in enumerate(loaded):
        new = state[f"rank{r}"]["reduce"]
        assert new.keys() == old[0].keys()
        for name, ranges in new.items():
            ((key, entries),) = ranges.items()
            (residual,) = entries.values()
            mean = torch.stack([next(iter(o[name][key].values())) for o in old]).mean(0)
            torch.testing.assert_close(residual, mean)


@pytest.mark.parametrize("nodes", [False, True])
def test_a_step_that_is_not_finite_leaves_all_residuals(workers: Pool, nodes: bool) -> None:
    for answer in workers.run(job_not_finite, FEEDBACK, nodes):
        assert answer == [True, True, True, 1]


def test_a_loss_scale_does_not_change_residuals(workers: Pool) -> None:
    assert workers.run(job_scaled, FEEDBACK) == [(True, True)] * SIZE


def test_clear_errors(workers: Pool) -> None:
    for messages in workers.run(job_errors):
        wanted = (
            "native HSDP",
            "fully_shard applied",
            "reduce_compressor= go with",
            "whole matrices",
            "differs from rank",
            "saved with",
            "is stored under 'rank9'",
        )
        assert len(messages) == len(wanted)
        for message, part in zip(messages, wanted):
            assert part in message


def test_a_parameter_without_gradient_in_a_unit(workers: Pool) -> None:
    assert all("set_reduce_scatter_unused_params(True)" in m for m in workers.run(job_unused, False))
    assert workers.run(job_unused, True) == ["1 step"] * SIZE


def test_report_is_flat(workers: Pool) -> None:
    for result in workers.run(job_report):
        before = result["before"]
        assert all(isinstance(v, (int, float, str)) for v in before.values())
        assert before["steps"] == 2
        assert before["exchange"] == "reduce_scatter"
        assert before["dense/parameters"] == len(result["dense"]) > 0
        assert "fewer than dense_below=30" in result["dense"]["inp.bias"]
        assert result["after"]["bytes/sent"] == result["after"]["steps"] == 0
        assert result["again"]["steps"] == 1
        assert result["again"]["bits_per_coordinate"] > 0


def _attach_to_another_torch() -> list[str]:
    """What attach says when private names of FSDP are not where they were."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = shard(mesh)
    state: Any = model._get_fsdp_state()  # type: ignore[operator]
    group = state._fsdp_param_groups[0]
    said = []
    first = group.fsdp_params[0]
    for name, owners in (("mp_policy", (group, first)), ("_orig_size", (first,)), ("mesh_info", (group,))):
        kept = [(owner, vars(owner).pop(name)) for owner in owners if name in vars(owner)]
        with pytest.raises(BadConfiguration) as caught:
            fsdp.attach(model, "qsgd(bits=4)")
        for owner, value in kept:
            setattr(owner, name, value)
        said.append(str(caught.value))
    fsdp.attach(model, "qsgd(bits=4)")
    return said


def test_a_torch_with_other_private_names_is_refused_in_one_line(workers: Pool) -> None:
    for said in workers.run(_attach_to_another_torch):
        for line, name in zip(said, ("mp_policy", "_orig_size", "mesh_info")):
            assert f".{name}, which compressed FSDP2 relies on; it is tested with torch {' to '.join(TESTED)}" in line
            assert "\n" not in line

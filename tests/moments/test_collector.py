"""What the collector promises beyond the rules: passes, sharing, checkpoints, autocast, fallbacks, and leaving no trace."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from typing import cast

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tersegrad.core.errors import BadConfiguration, MissingStatistics
from tersegrad.moments import Collector, worker_batch_norm
from tests.moments.networks import vgg
from tests.moments.reference import check, relative_error


def small() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3))


def moments(model: nn.Module, x: Tensor) -> list[Tensor]:
    with Collector(model) as collector:
        model(x).square().sum().backward()
    return [collector.second_moment(p) for p in model.parameters()]


def test_moments_add_up_over_backward_calls_until_taken() -> None:
    model, x = small(), torch.randn(8, 5)
    once = moments(model, x)
    collector = Collector(model)
    for half in x.chunk(2):
        model(half).square().sum().backward()
    taken = collector.take()
    for a, b in zip([taken[p] for p in model.parameters()], once, strict=True):
        torch.testing.assert_close(a, b)
    assert collector.take() == {}
    with pytest.raises(MissingStatistics, match=r"2\.weight has taken part in no backward pass"):
        collector.second_moment(model[2].weight)  # type: ignore[arg-type]
    with pytest.raises(MissingStatistics, match="no parameter of the model"):
        collector.second_moment(nn.Parameter(torch.zeros(3)))


def test_two_forward_passes_before_one_backward_are_different_samples() -> None:
    model, x = small(), torch.randn(8, 5)
    once = moments(model, x)
    with Collector(model) as collector:
        (model(x[:3]).square().sum() + model(x[3:]).square().sum()).backward()
    for a, b in zip([collector.second_moment(p) for p in model.parameters()], once, strict=True):
        torch.testing.assert_close(a, b)


class Shared(nn.Module):
    """One linear layer used three times, its weight also by a second one."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4, bias=False)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.second(torch.tanh(self.first(torch.tanh(self.first(x)))))
        return out


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("chunk_bytes", [None, 1])
def test_shares_of_a_shared_weight_are_summed_before_squaring(workers: int, chunk_bytes: int | None) -> None:
    torch.manual_seed(1)
    check(Shared(), torch.randn(6, 4), workers=workers, chunk_bytes=chunk_bytes)


def test_a_shared_weight_over_several_steps_and_without_the_models_own_call() -> None:
    torch.manual_seed(1)
    model, x = Shared(), torch.randn(6, 4)
    expected = moments(model, x)
    collector = Collector(model)
    for part in x.chunk(2):
        model.forward(part).square().sum().backward()  # the hook of the model does not run
    for a, b in zip([collector.second_moment(p) for p in model.parameters()], expected, strict=True):
        torch.testing.assert_close(a, b)


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.body, self.reentrant = Shared(), reentrant
        self.norm, self.out = nn.BatchNorm1d(4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = checkpoint(self.body, x, use_reentrant=self.reentrant)
        out: Tensor = self.out(checkpoint(self.norm, self.body.first(x), use_reentrant=self.reentrant))
        return out


def test_activation_checkpointing() -> None:
    torch.manual_seed(1)
    model, x = Checkpointed(reentrant=False).eval(), torch.randn(6, 4).requires_grad_()
    check(model, x)
    expected = moments(model, x)
    model.reentrant = True
    for a, b in zip(moments(model, x), expected, strict=True):
        torch.testing.assert_close(a, b)


def test_checkpointing_keeps_no_activations() -> None:
    model = small()
    seen: list[weakref.ref[Tensor]] = []
    model[1].register_forward_hook(lambda m, a, out: seen.append(weakref.ref(out)))
    with Collector(model):
        out = checkpoint(model, torch.randn(8, 5), use_reentrant=False)
        gc.collect()
        assert seen[0]() is None
        out.sum().backward()


def test_frozen_parameters_and_inputs_that_need_no_gradient() -> None:
    model, x = small(), torch.randn(8, 5)
    with Collector(model) as collector:
        model(x).square().sum().backward()
    before = collector.take()
    model.zero_grad()
    model[0].weight.requires_grad_(False)
    model[2].bias.requires_grad_(False)
    with Collector(model) as collector:
        model(x).square().sum().backward()
    taken = collector.take()
    assert model[0].weight.grad is None
    assert set(taken) == {model[0].bias, model[2].weight}
    for p, moment in taken.items():
        torch.testing.assert_close(moment, before[p])
    model.requires_grad_(False)
    with Collector(model) as collector:
        assert not model(x).requires_grad
        model(x.clone().requires_grad_()).sum().backward()
    assert collector.take() == {}


def test_nothing_keeps_the_graph() -> None:
    model = small()
    collector = Collector(model)
    x = torch.randn(8, 5)
    alive = weakref.ref(x)
    model(x).sum().backward()
    assert all(not m.requires_grad for m in collector.take().values())
    del x
    gc.collect()
    assert alive() is None


def test_removing_restores_the_model_and_copies_are_plain() -> None:
    model, x = small(), torch.randn(8, 5)
    collector = Collector(model)
    twin = copy.deepcopy(model)
    again = pickle.loads(pickle.dumps(model))
    assert torch.equal(again(x), model(x))
    twin(x).sum().backward()
    assert collector.take() == {}
    assert twin[0].weight.grad is not None
    collector.remove()
    assert "forward" not in model[0].__dict__
    model(x).sum().backward()
    assert collector.take() == {}


def test_paused_and_evaluated_passes_are_plain() -> None:
    model, x = small(), torch.randn(8, 5)
    with Collector(model) as collector:
        with collector.paused():
            model(x).sum().backward()
        with torch.no_grad():
            model(x)
    assert collector.take() == {}


@pytest.mark.parametrize("momentum", [0.1, None])
def test_batch_norm_keeps_the_same_running_statistics(momentum: float | None) -> None:
    torch.manual_seed(1)
    plain = nn.BatchNorm2d(3, momentum=momentum)
    watched = copy.deepcopy(plain)
    with Collector(watched):
        for _ in range(3):
            x = torch.randn(4, 3, 5, 5) + 1
            torch.testing.assert_close(watched(x), plain(x))
    for a, b in zip(watched.buffers(), plain.buffers(), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("momentum", [0.1, None])
def test_worker_batch_norm_is_what_workers_compute_alone(dtype: torch.dtype, momentum: float | None) -> None:
    torch.manual_seed(1)
    alone = nn.BatchNorm2d(3, momentum=momentum)
    alone.weight.data.uniform_(0.5, 2)
    workers = [copy.deepcopy(alone) for _ in range(4)]
    together = worker_batch_norm(copy.deepcopy(alone), 4)
    for _ in range(2):
        x = (torch.randn(16, 3, 5, 4) * 3 + 1).to(dtype).requires_grad_()
        y = x.detach().clone().to(memory_format=torch.channels_last).requires_grad_()
        expected = torch.cat([w(part) for w, part in zip(workers, x.chunk(4), strict=True)])
        found = together(y)
        scale = torch.randn(found.shape).to(dtype)
        expected.backward(scale)
        found.backward(scale)
        tolerance = 1e-5 if dtype == torch.float32 else 2e-2
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
        assert x.grad is not None
        assert y.grad is not None
        torch.testing.assert_close(y.grad, x.grad, rtol=tolerance, atol=tolerance)
    for name, p in together.named_parameters():
        total = torch.zeros(3)
        for w in workers:
            gradient = w.get_parameter(name).grad
            assert gradient is not None
            total += gradient
        assert p.grad is not None
        assert relative_error(p.grad, total) < (1e-5 if dtype == torch.float32 else 1e-2)
    for name in ("running_mean", "running_var"):
        mean = torch.stack([w.get_buffer(name) for w in workers]).mean(0)
        assert relative_error(together.get_buffer(name), mean) < 1e-5
    x = torch.randn(5, 3, 4, 4)
    alone.load_state_dict(together.state_dict())
    torch.testing.assert_close(together.eval()(x), alone.eval()(x))
    assert type(worker_batch_norm(together, 1)) is nn.BatchNorm2d


def test_worker_batch_norm_says_what_is_wrong() -> None:
    model = worker_batch_norm(nn.BatchNorm1d(3), 4)
    with pytest.raises(BadConfiguration, match="6 samples do not split into 4"):
        model(torch.randn(6, 3))
    with pytest.raises(BadConfiguration, match="more than one value"):
        model(torch.randn(4, 3))
    with pytest.raises(BadConfiguration, match="SyncBatchNorm"):
        worker_batch_norm(nn.SyncBatchNorm(3), 2)


@pytest.mark.parametrize("workers", [1, 2])
def test_autocast(workers: int) -> None:
    torch.manual_seed(1)
    model, x = worker_batch_norm(vgg(width=8), workers), torch.randn(16, 3, 8, 8)
    found: dict[bool, dict[nn.Parameter, Tensor]] = {}
    for enabled in (False, True):
        with Collector(model, workers) as collector:
            model.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
                loss = torch.nn.functional.cross_entropy(model(x).float(), torch.arange(16) % 10)
            loss.backward()
        assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in model.parameters())
        found[enabled] = collector.take()
    for name, p in model.named_parameters():
        a, b = found[True][p], found[False][p]
        assert a.dtype == torch.float32
        assert float((a.sum() - b.sum()).abs() / b.sum()) < 0.2, name


def test_low_precision_models() -> None:
    for dtype in (torch.bfloat16, torch.float64):
        torch.manual_seed(1)
        model = small().to(dtype)
        found = moments(model, torch.ones(8, 5, dtype=dtype))
        assert all(m.dtype == torch.float32 for m in found)


# ---- fallbacks ----


class Recurrent(nn.Module):
    def __init__(self, batch_first: bool = True) -> None:
        super().__init__()
        self.lstm, self.out = nn.LSTM(4, 3, batch_first=batch_first), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        states, (last, _) = self.lstm(x)
        out: Tensor = self.out(states) + last.sum()
        return out


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("workers", [1, 2])
def test_micro_batches_of_one_are_exact(workers: int, batch_first: bool) -> None:
    torch.manual_seed(1)
    model = Recurrent(batch_first)
    x = torch.randn((6, 5, 4) if batch_first else (5, 6, 4))

    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model.lstm

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.inner(x)[0]
            return out

    with pytest.warns(UserWarning, match=r"no rule for inner\.weight_ih_l0.*LSTM"):
        check(Wrapped(), x, workers=workers, batch_dim=0 if batch_first else 1)


class Token(nn.Module):
    """A parameter of the model itself, as in a vision transformer."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.randn(1, 4))
        self.out, self.dropout = nn.Linear(4, 2), nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.out(self.dropout(torch.tanh(x * self.token)))
        return out


def test_parameter_without_a_module_of_its_own() -> None:
    torch.manual_seed(1)
    with pytest.warns(UserWarning, match="no rule for token"):
        check(Token(), torch.randn(8, 4), workers=2)


def test_fewer_micro_batches_and_the_list_of_fallbacks() -> None:
    torch.manual_seed(1)
    model, x = Token(), torch.randn(8, 4)
    with pytest.warns(UserWarning, match="no rule"):
        collector = Collector(model, micro_batches=2)
    model(x).sum().backward()
    expected = torch.zeros(1, 4)
    for half in x.chunk(2):
        with collector.paused():
            expected += torch.autograd.grad(model(half).sum(), model.token)[0].square()
    torch.testing.assert_close(collector.take()[model.token], expected)
    assert collector.fallbacks == {"token": "Token has no rule: 2 micro-batches"}


def test_where_samples_cannot_be_split_a_backward_call_is_one_share() -> None:
    torch.manual_seed(1)
    model = Token(dropout=0.5)
    with pytest.warns(UserWarning, match="no rule"):
        collector = Collector(model)
    total = torch.zeros(1, 4)
    for k in range(3):
        model.zero_grad()
        if k == 0:
            with pytest.warns(UserWarning, match="draws random numbers"):
                out = model(torch.randn(8, 4))
        else:
            out = model(torch.randn(8, 4))
        out.sum().backward()
        assert model.token.grad is not None
        total += model.token.grad.square()
    torch.testing.assert_close(collector.second_moment(model.token), total)
    assert "one share" in collector.fallbacks["token"]
    collector.remove()
    with pytest.warns(UserWarning, match="no rule"):
        collector = Collector(model, workers=2)
    with pytest.raises(BadConfiguration, match="cannot be split by worker"):
        model(torch.randn(8, 4))


def test_positions_have_no_samples() -> None:
    class Positions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.places = nn.Embedding(7, 4), nn.Embedding(5, 4)

        def forward(self, ids: Tensor) -> Tensor:
            out: Tensor = self.embedding(ids) + self.places(torch.arange(ids.shape[1]))
            return out

    model = Positions()
    with Collector(model) as collector:
        with pytest.warns(UserWarning, match="got 5 rows where the model's batch has 8 samples"):
            out = model(torch.randint(7, (8, 5)))
        out.square().sum().backward()
    assert model.places.weight.grad is not None
    torch.testing.assert_close(collector.second_moment(model.get_parameter("places.weight")), model.places.weight.grad.square())


def test_rows_flattened_into_the_batch() -> None:
    class Frames(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm, self.out = nn.Conv2d(2, 3, 3), nn.GroupNorm(1, 3), nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            rows = self.norm(self.conv(x.flatten(0, 1))).mean((2, 3))
            out: Tensor = self.out(rows).unflatten(0, (x.shape[0], -1))
            return out

    torch.manual_seed(1)
    check(Frames(), torch.randn(6, 4, 2, 5, 5), workers=3)


def test_parametrised_weights_and_own_forwards_have_no_rule() -> None:
    torch.manual_seed(1)
    model = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(4, 3)), nn.Tanh(), nn.Linear(3, 2))
    with pytest.warns(UserWarning, match=r"0\.parametrizations\.weight\.original0"):
        check(model, torch.randn(6, 4))

    class Doubled(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * 2 + self.weight.sum()

    with pytest.warns(UserWarning, match="Doubled"):
        check(nn.Sequential(Doubled(4, 3)), torch.randn(6, 4))


def test_bad_arguments() -> None:
    for options in ({"workers": 0}, {"chunk_bytes": 0}, {"micro_batches": 0}):
        with pytest.raises(BadConfiguration):
            Collector(small(), **options)
    model = small()
    with Collector(model, workers=3) as collector, pytest.raises(BadConfiguration, match="8 samples do not split into 3"):
        model(torch.randn(8, 5)).sum().backward()
    with Collector(model) as collector, pytest.raises(BadConfiguration, match=r"parameter\.grad"):
        collector.gradient(model[0].weight)  # type: ignore[arg-type]


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
@pytest.mark.parametrize("compiled_first", [True, False])
def test_compiled_models_run_their_watched_modules_as_they_are(compiled_first: bool) -> None:
    model, x = small(), torch.randn(8, 5)
    expected = moments(model, x)
    if compiled_first:
        compiled = torch.compile(model, backend="eager")
        compiled(x)
        collector = Collector(cast(nn.Module, compiled))
    else:
        collector = Collector(model)
        compiled = torch.compile(model, backend="eager")
    for _ in range(2):
        compiled(x).square().sum().backward()
    for p, b in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(collector.second_moment(p), 2 * b)

"""Joint launches: several modules' squares found at once. On a CPU the reference stands in for the kernels."""

from __future__ import annotations

import functools
import gc
import importlib
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tersegrad import kernels
from tersegrad.core import private
from tersegrad.moments import Collector, joint, tap
from tests.moments.networks import vgg
from tests.moments.reference import Copies, check, relative_error


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """The GPU's way on a CPU; gets (operation, modules) of every joint launch."""
    for rules in ("convolution", "linear", "normalisation"):
        monkeypatch.setattr(importlib.import_module(f"tersegrad.moments.rules.{rules}"), "accelerated", lambda *tensors: True)
    made: list[tuple[str, int]] = []
    operations: Any = kernels.get(torch.device("cpu"))
    for name in ("share_linear_squares", "share_norm_squares"):
        monkeypatch.setattr(operations, name, functools.partial(_counted, made, name, getattr(operations, name)))
    return made


def _counted(made: list[tuple[str, int]], name: str, operation: Any, parts: Any) -> Any:
    made.append((name, len(parts)))
    return operation(parts)


def layers(count: int) -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(*[nn.Sequential(nn.Linear(5, 5), nn.Tanh()) for _ in range(count)])


def test_layers_of_a_kind_share_launches(launches: list[tuple[str, int]]) -> None:
    check(layers(joint.MOST + 3), torch.randn(6, 5))
    assert launches == [("share_linear_squares", joint.MOST), ("share_linear_squares", 3)]


def test_networks_get_what_the_loop_gets(launches: list[tuple[str, int]]) -> None:
    torch.manual_seed(1)
    model, x, labels = vgg().train(), torch.randn(8, 3, 8, 8), torch.arange(8)
    shares = Copies(model, 8).shares(x, lambda out: F.cross_entropy(out, labels))
    model.zero_grad()
    with Collector(model) as collector:
        F.cross_entropy(model(x), labels).backward()
    assert sorted(launches) == [("share_linear_squares", 3), ("share_norm_squares", 8)]
    for name, p in model.named_parameters():
        assert p.grad is not None
        expected = shares[p].double().square().sum(0)
        assert relative_error(collector.second_moment(p), expected) < (1e-4 if expected.max() < 1e-12 else 1e-5), name
        size = float(expected.sqrt().max())
        assert float((p.grad - shares[p].sum(0)).abs().max()) < 1e-5 * max(size, 1e-6), name


def test_evaluated_norms_frozen_parameters_and_no_bias(launches: list[tuple[str, int]]) -> None:
    torch.manual_seed(1)
    model = nn.Sequential(
        nn.Linear(5, 6, bias=False), nn.BatchNorm1d(6), nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)
    ).eval()
    model[2].bias.requires_grad_(False)
    model[3].weight.requires_grad_(False)
    model[4].weight.requires_grad_(False)
    check(model, torch.randn(6, 5))
    assert sorted(launches) == [("share_linear_squares", 2), ("share_norm_squares", 1)]


def test_a_shared_layer_does_not_wait(launches: list[tuple[str, int]]) -> None:
    torch.manual_seed(1)
    twice = nn.Linear(5, 5)
    check(nn.Sequential(twice, nn.Tanh(), nn.Linear(5, 5), nn.Tanh(), twice), torch.randn(6, 5))
    assert launches == [("share_linear_squares", 1)]


def test_little_is_held(launches: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joint, "HELD", 2 * 6 * 5 * 4 + 1)  # the input and output gradient of one layer
    check(layers(4), torch.randn(6, 5))
    assert launches == [("share_linear_squares", 2)] * 2


def test_nothing_is_held_after_the_pass(launches: list[tuple[str, int]]) -> None:
    model, seen = layers(3), []
    model[1].register_forward_hook(lambda m, given, out: seen.append(weakref.ref(given[0])))
    with Collector(model) as collector:
        model(torch.randn(6, 5)).sum().backward()
        gc.collect()
        assert seen[0]() is None
        assert launches == [("share_linear_squares", 3)]
        assert len(collector.take()) == 6


def test_a_second_pass_through_a_kept_graph_counts_again(launches: list[tuple[str, int]]) -> None:
    model, x = layers(2), torch.randn(6, 5)
    with Collector(model) as collector:
        loss = model(x).square().sum()
        loss.backward(retain_graph=True)
        once = {p: m.clone() for p, m in collector.take().items()}
        loss.backward()
        for p, moment in collector.take().items():
            torch.testing.assert_close(moment, once[p])


def test_batches_of_different_sizes_wait_apart(launches: list[tuple[str, int]]) -> None:
    model, x = layers(2), torch.randn(9, 5)
    with Collector(model) as collector:
        model(x).square().sum().backward()
    expected = collector.take()
    launches.clear()
    with Collector(model) as collector:
        (model(x[:3]).square().sum() + model(x[3:]).square().sum()).backward()
    assert launches == [("share_linear_squares", 2)] * 2
    for p, moment in collector.take().items():
        torch.testing.assert_close(moment, expected[p])


class _Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, delta: Tensor) -> Tensor:
        raise RuntimeError("on purpose")


def test_after_a_pass_that_failed(launches: list[tuple[str, int]]) -> None:
    model, x = layers(2), torch.randn(6, 5)
    with Collector(model) as collector:
        model(x).square().sum().backward()
        expected = {p: m.clone() for p, m in collector.take().items()}
        with pytest.raises(RuntimeError, match="on purpose"):
            model[1](_Fails.apply(model[0](x))).sum().backward()  # type: ignore[no-untyped-call]
        collector.clear()
        model(x).square().sum().backward()
        for p, moment in collector.take().items():
            torch.testing.assert_close(moment, expected[p])


def test_inside_a_hook_of_the_pass(launches: list[tuple[str, int]]) -> None:
    """As DDP's communication hook does: what is taken while the pass still runs is all there."""
    model, taken = layers(2), []
    with Collector(model) as collector:
        first = model.get_parameter("0.0.weight")
        first.register_post_accumulate_grad_hook(lambda p: taken.append(collector.take()))
        model(torch.randn(6, 5)).sum().backward()
    assert len(taken[0]) == 4


@pytest.mark.parametrize("missing", ["_function", "SAVED"])
def test_where_torch_cannot_say_what_it_saved(
    missing: str, launches: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tap, missing, None if missing == "_function" else {})
    check(layers(2), torch.randn(6, 5))
    assert launches == [("share_linear_squares", 2)]


def test_a_gradient_of_a_gradient(launches: list[tuple[str, int]]) -> None:
    """The moments are of the first derivative, and torch's second derivative is right or refused."""
    torch.manual_seed(1)
    model, x = nn.BatchNorm1d(5).eval(), torch.randn(6, 5, requires_grad=True)
    with Collector(model) as collector:
        (inner,) = torch.autograd.grad(model(x).pow(3).sum(), x, create_graph=True)
        (outer,) = torch.autograd.grad(inner.sum(), x)
        assert all(not m.requires_grad for m in collector.take().values())
    assert model.running_var is not None
    scale = model.weight * torch.rsqrt(model.running_var + model.eps)
    torch.testing.assert_close(outer, 6 * (x * scale + model.bias) * scale**2)


def test_the_quick_way_into_a_function() -> None:
    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return 2 * x

        @staticmethod
        def backward(ctx: Any, delta: Tensor) -> Tensor:
            return 2 * delta

    x = torch.ones(3, requires_grad=True)
    out = private.applied(Twice)(x)
    out.sum().backward()
    assert torch.equal(out, torch.full((3,), 2.0))
    torch.testing.assert_close(x.grad, torch.full((3,), 2.0))
    with pytest.raises(RuntimeError, match="setup_context"):
        torch.func.grad(lambda t: private.applied(Twice)(t).sum())(torch.ones(3))

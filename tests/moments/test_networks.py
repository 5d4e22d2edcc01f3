"""Whole networks: batch norm couples the samples, weights are tied, activations work in place."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tersegrad.moments import Collector, worker_batch_norm
from tests.moments.networks import Transformer, resnet, vgg
from tests.moments.reference import Copies, check, relative_error


def compare(model: nn.Module, x: Tensor, reduction: str, workers: int, own: bool, channels_last: bool = False) -> None:
    labels = torch.arange(x.shape[0]) % 10
    model.train()

    def loss(out: Tensor) -> Tensor:
        return F.cross_entropy(out, labels, reduction=reduction)

    shares = Copies(model, x.shape[0], workers if own else 1).shares(x, loss)
    if own:
        worker_batch_norm(model, workers)
    if channels_last:
        x = x.to(memory_format=torch.channels_last)
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    collector = Collector(model, workers)
    loss(model(x)).backward()
    assert not collector.fallbacks
    for name, p in model.named_parameters():
        parts = shares[p].double().unflatten(0, (workers, -1))
        expected = parts.square().sum(1)
        scale = 1e-4 if expected.max() < 1e-12 else 1e-5  # a bias before batch norm has no gradient but rounding
        found = collector.second_moment(p)
        assert relative_error(found, expected if workers > 1 else expected[0]) < max(scale, 1e-5), name
        if workers > 1:
            gradient = collector.gradient(p)
            size = parts.square().sum(1).sqrt().max()
            assert float((gradient - parts.sum(1)).abs().max()) < 1e-5 * max(float(size), 1e-7), name
    collector.remove()


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize(("workers", "own"), [(1, False), (2, False), (2, True)])
@pytest.mark.parametrize("network", [vgg, resnet])
def test_network_with_batch_norm(network: type[nn.Module], workers: int, own: bool, reduction: str) -> None:
    torch.manual_seed(1)
    compare(network(), torch.randn(8, 3, 8, 8), reduction, workers, own)


def test_channels_last_network() -> None:
    torch.manual_seed(1)
    compare(vgg(), torch.randn(8, 3, 8, 8), "mean", 2, True, channels_last=True)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("batch_first", [True, False])
def test_transformer(tied: bool, workers: int, batch_first: bool) -> None:
    torch.manual_seed(1)
    model = Transformer(tied, batch_first)
    ids = torch.randint(11, (6, 5))
    check(model, ids if batch_first else ids.t().contiguous(), workers=workers, batch_dim=0 if batch_first else 1)

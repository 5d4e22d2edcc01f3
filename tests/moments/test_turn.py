"""The counters of batch normalisations, which a model's call adds up at its end, are what plain torch's would be."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tersegrad.core import private
from tersegrad.moments import Collector


class Net(nn.Module):
    """Some norms, one of them used twice, one that averages all its batches, one under a checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.BatchNorm1d(3)
        self.twice = nn.BatchNorm1d(3)
        self.average = nn.BatchNorm1d(3, momentum=None)
        self.again = nn.BatchNorm1d(3)
        self.fails = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.twice(self.twice(self.first(x)))
        if self.fails:
            raise RuntimeError("on purpose")
        out: Tensor = self.average(checkpoint(self.again, x, use_reentrant=False))
        return out


def counted(model: nn.Module) -> dict[str, int]:
    return {name: int(b) for name, b in model.named_buffers() if name.endswith("num_batches_tracked")}


def whole(net: Net) -> None:
    net(torch.randn(5, 3)).sum().backward()


def parts(net: Net) -> None:
    net.first(torch.randn(5, 3)).sum().backward()
    net.first(net.twice(torch.randn(5, 3))).sum().backward()


def only_forward(net: Net) -> None:
    for _ in range(2):
        net(torch.randn(5, 3))
    net.eval()(torch.randn(5, 3))
    net.train()


def failing(net: Net) -> None:
    net.fails = True
    with pytest.raises(RuntimeError, match="on purpose"):
        net(torch.randn(5, 3))
    net.fails = False
    net(torch.randn(5, 3)).sum().backward()


def backward_inside(net: Net) -> None:
    def inner(module: nn.Module, given: tuple[Tensor, ...], out: Tensor) -> None:
        torch.autograd.grad(out.square().sum(), net.first.weight, retain_graph=True)

    hook = net.twice.register_forward_hook(inner)
    net(torch.randn(5, 3)).sum().backward()
    hook.remove()


@pytest.mark.parametrize("use", [whole, parts, only_forward, failing, backward_inside])
def test_counters_are_those_of_plain_torch(use: Callable[[Net], None]) -> None:
    torch.manual_seed(1)
    plain = Net()
    watched = copy.deepcopy(plain)
    use(plain)
    with Collector(watched):
        use(watched)
        assert counted(watched) == counted(plain)
    assert counted(watched) == counted(plain)


def test_one_addition_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    plain = torch._foreach_add_

    def added(tensors: list[Tensor], number: int) -> None:
        seen.append(len(tensors))
        plain(tensors, number)

    monkeypatch.setattr(torch, "_foreach_add_", added)
    assert private.of("_foreach_add_") is added
    model = nn.Sequential(*[nn.BatchNorm1d(3) for _ in range(4)])
    with Collector(model):
        model(torch.randn(5, 3)).sum().backward()
    assert seen == [4]
    assert set(counted(model).values()) == {1}

"""On a GPU: the Triton kernels are in use, and autocast's moments are those of float32 up to bfloat16's rounding."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter
from torch.nn import functional as F

from tersegrad.moments import Collector, worker_batch_norm
from tersegrad.moments.shares import accelerated
from tests.moments.networks import vgg

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def test_kernels_agree_with_plain_torch() -> None:
    x = torch.zeros(2, 3, 4, 4, device="cuda", dtype=torch.bfloat16).to(memory_format=torch.channels_last)
    assert accelerated(x)  # after comparing itself with plain torch


@pytest.mark.parametrize(("workers", "own"), [(1, False), (4, False), (4, True)])
def test_autocast_on_a_gpu(workers: int, own: bool) -> None:
    torch.manual_seed(1)
    model = vgg(width=16).cuda().train()
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    if own:
        worker_batch_norm(model, workers)
    x = torch.randn(32, 3, 8, 8, device="cuda").to(memory_format=torch.channels_last)
    labels = torch.arange(32, device="cuda") % 10
    found: list[tuple[dict[Parameter, Tensor | None], dict[Parameter, Tensor]]] = []
    for enabled in (False, True):
        model.zero_grad()
        with Collector(model, workers) as collector:
            with torch.autocast("cuda", torch.bfloat16, enabled=enabled):
                loss = F.cross_entropy(model(x), labels)
            loss.backward()
        found.append(({p: p.grad for p in model.parameters()}, collector.take()))
    for name, p in model.named_parameters():
        if ".bias" in name and p.ndim == 1 and found[0][1][p].sum() < 1e-9:
            continue  # a bias before batch norm has no gradient but rounding
        for a, b in ((found[0][0][p], found[1][0][p]), (found[0][1][p], found[1][1][p])):
            assert a is not None
            assert b is not None
            assert float((a - b).norm() / a.norm()) < 0.25, name

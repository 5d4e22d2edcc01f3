"""Every rule against the per-sample loop."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from tests.moments.reference import check

CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear": (lambda: nn.Linear(5, 7), (8, 5)),
    "linear without bias": (lambda: nn.Linear(5, 7, bias=False), (8, 5)),
    "linear on a sequence": (lambda: nn.Linear(5, 7), (8, 3, 5)),
    "linear on a grid": (lambda: nn.Linear(5, 7), (8, 2, 3, 5)),
    "conv1d": (lambda: nn.Conv1d(3, 6, 3, padding=1), (8, 3, 9)),
    "conv1d stride dilation": (lambda: nn.Conv1d(3, 6, 3, stride=2, dilation=2), (8, 3, 12)),
    "conv2d": (lambda: nn.Conv2d(3, 6, 3, padding=1), (8, 3, 6, 7)),
    "conv2d groups": (lambda: nn.Conv2d(4, 6, 3, groups=2), (8, 4, 6, 7)),
    "conv2d depthwise": (lambda: nn.Conv2d(4, 8, 3, groups=4, padding=1), (8, 4, 6, 7)),
    "conv2d uneven": (lambda: nn.Conv2d(3, 4, (2, 3), stride=(2, 1), dilation=(1, 2), padding=(1, 2)), (8, 3, 7, 8)),
    "conv2d same": (lambda: nn.Conv2d(3, 4, (2, 4), padding="same"), (8, 3, 7, 8)),
    "conv2d valid": (lambda: nn.Conv2d(3, 4, (2, 4), padding="valid", bias=False), (8, 3, 7, 8)),
    "conv2d 1x1": (lambda: nn.Conv2d(3, 4, 1, stride=2), (8, 3, 7, 8)),
    "conv2d reflect": (lambda: nn.Conv2d(3, 4, 3, padding=(1, 2), padding_mode="reflect"), (8, 3, 7, 8)),
    "conv2d circular": (lambda: nn.Conv2d(3, 4, 3, padding=1, padding_mode="circular"), (8, 3, 7, 8)),
    "conv2d replicate": (lambda: nn.Conv2d(3, 4, 3, padding=1, padding_mode="replicate"), (8, 3, 7, 8)),
    "conv3d": (lambda: nn.Conv3d(2, 4, (1, 2, 3), padding=(0, 1, 1)), (8, 2, 3, 4, 5)),
    "batchnorm1d evaluated": (lambda: nn.BatchNorm1d(5).eval(), (8, 5)),
    "batchnorm1d on a sequence": (lambda: nn.BatchNorm1d(5).eval(), (8, 5, 3)),
    "batchnorm2d evaluated": (lambda: nn.BatchNorm2d(5).eval(), (8, 5, 3, 4)),
    "batchnorm3d evaluated": (lambda: nn.BatchNorm3d(5).eval(), (8, 5, 2, 3, 2)),
}


def settle(model: nn.Module) -> nn.Module:
    """Affine parameters and running statistics away from 1 and 0."""
    generator = torch.Generator().manual_seed(3)
    for tensor in [*model.parameters(), *model.buffers()]:
        if tensor.is_floating_point() and tensor.ndim == 1:
            tensor.data.copy_(torch.rand(tensor.shape, generator=generator) + 0.5)
    return model


@pytest.mark.parametrize("workers", [1, 4])
@pytest.mark.parametrize("name", CASES)
def test_rule_against_the_loop(name: str, workers: int) -> None:
    torch.manual_seed(1)
    make, shape = CASES[name]
    check(settle(make()), torch.randn(shape), workers=workers)


@pytest.mark.parametrize("chunk_bytes", [1, 700, 3000])
@pytest.mark.parametrize("name", ["linear on a sequence", "conv2d", "conv2d groups", "batchnorm2d evaluated"])
def test_chunks_change_nothing(name: str, chunk_bytes: int) -> None:
    torch.manual_seed(1)
    make, shape = CASES[name]
    check(settle(make()), torch.randn(shape), workers=2, chunk_bytes=chunk_bytes)


def test_channels_last() -> None:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), nn.ReLU(inplace=True), nn.Conv2d(6, 4, 3, stride=2, padding=1))
    model = model.to(memory_format=torch.channels_last)
    check(model, torch.randn(8, 3, 7, 8).to(memory_format=torch.channels_last), workers=2)


def reference_batch_norm(x: Tensor, model: nn.Module, delta: Tensor) -> Tensor:
    return x * delta

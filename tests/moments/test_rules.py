"""Every rule against the per-sample loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tersegrad.moments import Collector
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
    "conv_transpose2d": (lambda: nn.ConvTranspose2d(3, 4, 3), (8, 3, 5, 6)),
    "conv_transpose2d strided": (
        lambda: nn.ConvTranspose2d(4, 6, (2, 3), stride=2, padding=(1, 0), output_padding=1, groups=2, dilation=(1, 2)),
        (8, 4, 5, 6),
    ),
    "conv_transpose1d": (lambda: nn.ConvTranspose1d(3, 4, 3, stride=2, bias=False), (8, 3, 5)),
    "conv_transpose3d": (lambda: nn.ConvTranspose3d(2, 3, 2, stride=2), (8, 2, 2, 3, 2)),
    "layer norm": (lambda: nn.LayerNorm(6), (8, 6)),
    "layer norm on a sequence": (lambda: nn.LayerNorm(6), (8, 3, 6)),
    "layer norm over two axes": (lambda: nn.LayerNorm((3, 6)), (8, 2, 3, 6)),
    "layer norm without bias": (lambda: nn.LayerNorm(6, bias=False), (8, 3, 6)),
    "rms norm": (lambda: nn.RMSNorm(6), (8, 3, 6)),
    "rms norm with eps": (lambda: nn.RMSNorm(6, eps=0.1), (8, 6)),
    "group norm": (lambda: nn.GroupNorm(2, 6), (8, 6, 3, 4)),
    "group norm without positions": (lambda: nn.GroupNorm(2, 6), (8, 6)),
    "instance norm": (lambda: nn.InstanceNorm2d(6, affine=True), (8, 6, 3, 4)),
    "instance norm evaluated": (lambda: nn.InstanceNorm1d(6, affine=True, track_running_stats=True).eval(), (8, 6, 3)),
    "prelu": (lambda: nn.PReLU(), (8, 3, 4)),
    "prelu by channel": (lambda: nn.PReLU(3), (8, 3, 4)),
    "gelu between": (lambda: nn.Sequential(nn.Linear(5, 6), nn.GELU(), nn.Linear(6, 3)), (8, 5)),
}


def settle(model: nn.Module) -> nn.Module:
    """Affine parameters and running statistics away from 1 and 0."""
    generator = torch.Generator().manual_seed(3)
    for tensor in [*model.parameters(), *model.buffers()]:
        if tensor.is_floating_point() and tensor.ndim == 1:
            tensor.data.copy_(torch.rand(tensor.shape, generator=generator) + 0.5)
    return model


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
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
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    check(model, torch.randn(8, 3, 7, 8).to(memory_format=torch.channels_last), workers=2)


IDS = torch.tensor([[1, 2, 1], [0, 0, 0], [3, 2, 1], [4, 4, 0]])


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("padding", [None, 0])
def test_embedding_sums_repeated_ids_before_squaring(workers: int, padding: int | None) -> None:
    torch.manual_seed(1)
    check(nn.Embedding(6, 3, padding_idx=padding), IDS, workers=workers)
    check(nn.Sequential(nn.Embedding(6, 3, padding_idx=padding), nn.Linear(3, 2)), IDS[:, 0], workers=workers)


def test_embedding_scaled_by_frequency() -> None:
    torch.manual_seed(1)
    model = nn.Embedding(6, 3, scale_grad_by_freq=True)
    with Collector(model) as collector:
        (model(IDS) * torch.randn(4, 3, 3)).sum().backward()
    assert model.weight.grad is not None
    found = collector.take()[model.get_parameter("weight")]
    assert found[5].abs().max() == 0
    # Id 3 was looked up once: its share is its gradient. Id 4 was looked up twice, by one sample: likewise.
    torch.testing.assert_close(found[3:5], model.weight.grad[3:5].square())


def test_embedding_with_max_norm_and_sparse_gradient() -> None:
    torch.manual_seed(1)
    model = nn.Embedding(6, 3, max_norm=0.5)
    check(model, IDS)
    assert model.weight[IDS.unique()].norm(dim=1).max() < 0.51
    sparse = nn.Embedding(6, 3, sparse=True)
    with Collector(sparse) as collector:
        sparse(IDS).sum().backward()
    expected = torch.stack([torch.bincount(row, minlength=6) for row in IDS]).float().square().sum(0)
    torch.testing.assert_close(collector.take()[sparse.get_parameter("weight")], expected.unsqueeze(1).expand(6, 3))


class Attend(nn.Module):
    """Attention over one, two or three different inputs made from one."""

    def __init__(self, kind: str, batch_first: bool, weights: bool, **options: Any) -> None:
        super().__init__()
        self.kind, self.weights = kind, weights
        self.attention = nn.MultiheadAttention(8, 2, batch_first=batch_first, **options)

    def forward(self, x: Tensor) -> Tensor:
        key = x if self.kind == "self" else x.flip(-1)
        value = key if self.kind != "all" else x * 2
        out: Tensor = self.attention(x, key, value, need_weights=self.weights)[0]
        return out


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("weights", [True, False])
@pytest.mark.parametrize("kind", ["self", "pair", "all"])
def test_attention(kind: str, weights: bool, batch_first: bool) -> None:
    torch.manual_seed(1)
    model = settle(Attend(kind, batch_first, weights))
    check(model, torch.randn((4, 5, 8) if batch_first else (5, 4, 8)), batch_dim=0 if batch_first else 1, workers=2)


def test_attention_with_separate_widths_and_without_bias() -> None:
    torch.manual_seed(1)
    check(Attend("self", True, False, kdim=8, vdim=8, bias=False), torch.randn(4, 5, 8))

    class Cross(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(8, 2, kdim=6, vdim=7, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.attention(x[..., :8], x[..., :6], x[..., 1:])[0]
            return out

    check(settle(Cross()), torch.randn(4, 5, 8))

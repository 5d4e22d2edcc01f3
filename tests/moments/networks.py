"""The networks that the moments are checked on: a VGG, a ResNet with batch norm, a small transformer."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def vgg(width: int = 4, size: int = 8) -> nn.Sequential:
    """conv-BN-ReLU blocks of width, 2 width and 4 width channels, then three linear layers; dropout left out."""
    layers: list[nn.Module] = []
    channels = 3
    for block in ((1, 1), (2, 2), (4, 4, 4, 4)):
        for k in block:
            layers += [nn.Conv2d(channels, k * width, 3, padding=1), nn.BatchNorm2d(k * width), nn.ReLU(inplace=True)]
            channels = k * width
        layers.append(nn.MaxPool2d(2))
    features = channels * (size // 8) ** 2
    head = [nn.Flatten(), nn.Linear(features, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 10)]
    return nn.Sequential(*layers, *head)


class Block(nn.Module):
    """A residual block with a strided shortcut."""

    def __init__(self, inside: int, outside: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inside, outside, 3, stride=2, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(outside)
        self.second = nn.Conv2d(outside, outside, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(outside)
        self.shortcut = nn.Sequential(nn.Conv2d(inside, outside, 1, stride=2, bias=False), nn.BatchNorm2d(outside))

    def forward(self, x: Tensor) -> Tensor:
        out = torch.relu_(self.norm1(self.first(x)))
        return torch.relu_(self.norm2(self.second(out)) + self.shortcut(x))


def resnet() -> nn.Sequential:
    stem = [nn.Conv2d(3, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6), nn.ReLU(inplace=True)]
    return nn.Sequential(*stem, Block(6, 8), Block(8, 12), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(12, 10))


class Transformer(nn.Module):
    """Tokens to logits with tied embedding and output weights: one parameter, two uses."""

    def __init__(self, tied: bool = True, batch_first: bool = True) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=batch_first)
        self.body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.out = nn.Linear(8, 11, bias=False)
        if tied:
            self.out.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.out(self.body(self.embedding(ids)))
        return out

"""A residual network of bottleneck blocks (He et al. 2016); :func:`resnet50` has ResNet-50's 25.6 million parameters."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

EXPANSION = 4


class Bottleneck(nn.Module):
    """1 x 1, 3 x 3 and 1 x 1 convolutions, added to what came in; the 3 x 3 one has the stride."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        out = EXPANSION * width
        self.body = nn.Sequential(
            nn.Conv2d(channels, width, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True),
            nn.Conv2d(width, width, 3, stride, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True),
            nn.Conv2d(width, out, 1, bias=False), nn.BatchNorm2d(out),
        )  # fmt: skip
        self.short: nn.Module = nn.Identity()
        if stride != 1 or channels != out:
            self.short = nn.Sequential(nn.Conv2d(channels, out, 1, stride, bias=False), nn.BatchNorm2d(out))

    def forward(self, x: Tensor) -> Tensor:
        added: Tensor = self.body(x) + self.short(x)
        return added.relu()


class ResNet(nn.Module):
    """Images (batch, 3, height, width) to logits (batch, classes)."""

    def __init__(self, blocks: Sequence[int], width: int, classes: int) -> None:
        super().__init__()
        stem = [nn.Conv2d(3, width, 7, 2, padding=3, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True)]
        self.stem = nn.Sequential(*stem, nn.MaxPool2d(3, 2, padding=1))
        layers, channels = [], width
        for stage, count in enumerate(blocks):
            for k in range(count):
                layers.append(Bottleneck(channels, width << stage, 2 if k == 0 and stage else 1))
                channels = EXPANSION * (width << stage)
        self.body = nn.Sequential(*layers)
        self.head = nn.Linear(channels, classes)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.body(self.stem(x)).mean((2, 3)))
        return logits


def resnet50() -> ResNet:
    """ResNet-50 for 1000 classes."""
    return ResNet((3, 4, 6, 3), 64, 1000)

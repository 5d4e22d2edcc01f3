"""ResNet-50 (He et al. 2016) as a sequence of ordinary modules."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn


class Bottleneck(nn.Module):
    """1 x 1, 3 x 3 (with the stride) and 1 x 1 convolutions around a shortcut."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * width
        self.conv1, self.norm1 = nn.Conv2d(inputs, width, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.norm2 = nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width)
        self.conv3, self.norm3 = nn.Conv2d(width, outputs, 1, bias=False), nn.BatchNorm2d(outputs)
        nn.init.zeros_(self.norm3.weight)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.norm1(self.conv1(x)))
        y = torch.relu(self.norm2(self.conv2(y)))
        return torch.relu(self.norm3(self.conv3(y)) + self.shortcut(x))


def resnet(classes: int, depths: Sequence[int] = (3, 4, 6, 3), width: int = 64, stem: int = 7) -> nn.Sequential:
    """ResNet-50 with the default arguments: 25,557,032 parameters for 1,000 classes.

    A ``stem`` of 3 is for small images: its convolution leaves their size, so that the first blocks see 32 x 32 of 64 x 64.
    """
    layers: list[nn.Module] = [
        nn.Conv2d(3, width, stem, 2 if stem == 7 else 1, stem // 2, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(),
        nn.MaxPool2d(3, 2, 1),
    ]
    inputs = width
    for stage, depth in enumerate(depths):
        for i in range(depth):
            layers.append(Bottleneck(inputs, width << stage, 2 if stage and not i else 1))
            inputs = 4 * (width << stage)
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, classes)]
    model = nn.Sequential(*layers)
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    nn.init.normal_(layers[-1].weight, std=0.01)  # type: ignore[arg-type]
    nn.init.zeros_(layers[-1].bias)  # type: ignore[arg-type]
    return model

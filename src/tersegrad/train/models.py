"""Networks and optimisers by text form: ``mlp(width=512)``, ``cnn``, ``sgd(lr=0.1)``, ``adamw``."""

from __future__ import annotations

import dataclasses
import itertools
import math
import types
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import torch
from torch import nn

from tersegrad.core.text import Configuration, require
from tersegrad.recipes import parse_form


@dataclasses.dataclass(frozen=True)
class MLP(Configuration):
    """``depth`` hidden layers of ``width`` units."""

    name: ClassVar[str] = "mlp"

    width: int = 512
    depth: int = 2

    def __post_init__(self) -> None:
        require(
            self.width > 0 and self.depth >= 0, f"mlp: width is positive and depth not negative, got {self.width}, {self.depth}"
        )

    def build(self, shape: tuple[int, ...], classes: int) -> nn.Module:
        """The network for images of ``shape``."""
        sizes = [math.prod(shape), *[self.width] * self.depth]
        hidden = [layer for a, b in itertools.pairwise(sizes) for layer in (nn.Linear(a, b), nn.ReLU())]
        return nn.Sequential(nn.Flatten(), *hidden, nn.Linear(sizes[-1], classes))


@dataclasses.dataclass(frozen=True)
class CNN(Configuration):
    """Two stages of 3 x 3 convolutions, with group normalisation, then the mean over the image."""

    name: ClassVar[str] = "cnn"

    width: int = 32

    def __post_init__(self) -> None:
        require(self.width > 0 and self.width % 8 == 0, f"cnn: width is a positive multiple of 8, got {self.width}")

    def build(self, shape: tuple[int, ...], classes: int) -> nn.Module:
        """The network for images of ``shape``."""
        layers: list[nn.Module] = []
        channels = shape[0]
        for stage, width in enumerate((self.width, 2 * self.width)):
            for k in range(2):
                layers += [nn.Conv2d(channels, width, 3, padding=1), nn.GroupNorm(8, width), nn.ReLU()]
                channels = width
                if k == 0 and min(shape[1:]) >= 4 << stage:
                    layers.append(nn.MaxPool2d(2))
        return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(4 * channels, classes))


@dataclasses.dataclass(frozen=True)
class SGD(Configuration):
    """Momentum and weight decay; ``decay``: how the learning rate falls to zero."""

    name: ClassVar[str] = "sgd"

    lr: float = 0.1
    momentum: float = 0.9
    weight_decay: float = 0.0
    decay: Literal["cosine", "none"] = "cosine"

    def __post_init__(self) -> None:
        require(
            self.lr > 0 and 0 <= self.momentum < 1 and self.weight_decay >= 0,
            "sgd: lr > 0, 0 <= momentum < 1, weight_decay >= 0",
        )

    def build(self, model: nn.Module) -> torch.optim.Optimizer:
        """The optimiser of a network."""
        return torch.optim.SGD(model.parameters(), lr=self.lr, momentum=self.momentum, weight_decay=self.weight_decay)


@dataclasses.dataclass(frozen=True)
class AdamW(Configuration):
    """Adam with decoupled weight decay; ``decay``: how the learning rate falls to zero."""

    name: ClassVar[str] = "adamw"

    lr: float = 0.001
    weight_decay: float = 0.01
    decay: Literal["cosine", "none"] = "cosine"

    def __post_init__(self) -> None:
        require(self.lr > 0 and self.weight_decay >= 0, "adamw: lr > 0, weight_decay >= 0")

    def build(self, model: nn.Module) -> torch.optim.Optimizer:
        """The optimiser of a network."""
        return torch.optim.AdamW(model.parameters(), lr=self.lr, weight_decay=self.weight_decay)


MODELS: Mapping[str, type[Any]] = types.MappingProxyType({c.name: c for c in (MLP, CNN)})
OPTIMIZERS: Mapping[str, type[Any]] = types.MappingProxyType({c.name: c for c in (SGD, AdamW)})


def network(text: str) -> MLP | CNN:
    """The network that a text form describes.

    >>> network("mlp(width=64)")
    MLP(width=64, depth=2)
    """
    made: MLP | CNN = parse_form(text, MODELS, "model")
    return made


def optimizer(text: str) -> SGD | AdamW:
    """The optimiser that a text form describes.

    >>> optimizer("sgd(lr=0.05)").momentum
    0.9
    """
    made: SGD | AdamW = parse_form(text, OPTIMIZERS, "optimizer")
    return made


def learning_rate(base: float, decay: str, progress: float) -> float:
    """The rate after a share ``progress`` of all steps: a warm-up over the first twentieth, then the decay.

    >>> learning_rate(1.0, "cosine", 0.0) < 0.1, learning_rate(1.0, "none", 0.5), round(learning_rate(1.0, "cosine", 1.0), 9)
    (True, 1.0, 0.0)
    """
    warm = min(1.0, 0.02 + progress / 0.05)
    return base * warm * (0.5 * (1 + math.cos(math.pi * progress)) if decay == "cosine" else 1.0)

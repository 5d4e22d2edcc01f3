"""Networks, optimisers and learning-rate schedules by text form: ``mlp(width=512)``, ``gpt(layers=8)``, ``adamw(warmup=100)``."""

from __future__ import annotations

import dataclasses
import itertools
import math
import types
import typing
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import torch
from torch import nn

from tersegrad.core.text import Configuration, require
from tersegrad.integrations import outer
from tersegrad.recipes import parse_form
from tersegrad.train import gpt


@dataclasses.dataclass(frozen=True)
class MLP(Configuration):
    """``depth`` hidden layers of ``width`` units."""

    name: ClassVar[str] = "mlp"
    reads: ClassVar[str] = "images"

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
    reads: ClassVar[str] = "images"

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
class GPT(Configuration):
    """A decoder-only transformer of ``layers`` blocks; heads of 64 unless told otherwise.

    ``deviation``: of the first weights. 0.02 is GPT-2's, for a width of 768; narrow networks learn faster from larger ones, about
    0.5 / sqrt(width).
    """

    name: ClassVar[str] = "gpt"
    reads: ClassVar[str] = "text"

    layers: int = 4
    width: int = 128
    context: int = 128
    heads: int | None = None
    deviation: float = 0.02

    def __post_init__(self) -> None:
        require(self.deviation > 0, f"gpt: deviation is positive, got {self.deviation}")
        require(min(self.layers, self.width, self.context) > 0, "gpt: layers, width and context are positive")
        heads = self.heads_or_usual
        fits = heads > 0 and self.width % heads == 0 and self.width // heads % 2 == 0
        require(fits, f"gpt: {heads} heads do not cut a width of {self.width} into equal parts of even size")

    @property
    def heads_or_usual(self) -> int:
        return self.heads if self.heads is not None else max(1, self.width // 64)

    def build(self, shape: tuple[int, ...], classes: int) -> nn.Module:
        """The network for windows of ``shape`` tokens, over ``classes`` of them."""
        return gpt.GPT(classes, self.layers, self.width, self.heads_or_usual, self.deviation)


Decay = Literal["cosine", "linear", "late"]


@dataclasses.dataclass(frozen=True)
class Schedule(Configuration):
    """How a learning rate rises and falls; the base of every optimiser.

    ``warmup``: steps, or a share of all steps if less than 1, in which the rate rises. ``decay``: it falls as a cosine or a line over the
    whole run, as a line over the last fifth ("late"), or not at all; ``floor``: to this share of ``lr``.
    """

    lr: float = 0.1
    decay: Decay | None = "cosine"
    warmup: float = 0.05
    floor: float = 0.0

    def __post_init__(self) -> None:
        require(self.lr > 0, f"{self.name}: lr > 0, got {self.lr}")
        require(self.warmup >= 0 and 0 <= self.floor <= 1, f"{self.name}: warmup >= 0 and 0 <= floor <= 1")
        known = (*typing.get_args(Decay), None)
        require(self.decay in known, f"{self.name}: decay is one of {', '.join(map(str, known))}, got {self.decay}")

    def rate(self, step: int, steps: int) -> float:
        """The learning rate of a step of a run of so many.

        >>> SGD(lr=1.0).rate(0, 100) < 0.1, SGD(lr=1.0, decay=None).rate(50, 100), round(SGD(lr=1.0).rate(100, 100), 9)
        (True, 1.0, 0.0)
        >>> [round(AdamW(lr=1.0, decay="late", warmup=10, floor=0.1).rate(s, 100), 2) for s in (5, 10, 79, 90, 100)]
        [0.52, 1.0, 1.0, 0.55, 0.1]
        """
        rising = self.warmup if self.warmup >= 1 else self.warmup * steps
        warm = min(1.0, 0.02 + step / rising) if rising else 1.0
        done = min(1.0, step / steps)
        left = {None: 1.0, "linear": 1 - done, "late": min(1.0, 5 * (1 - done))}
        falling = 0.5 * (1 + math.cos(math.pi * done)) if self.decay == "cosine" else left[self.decay]
        return self.lr * warm * (self.floor + (1 - self.floor) * falling)


@dataclasses.dataclass(frozen=True)
class SGD(Schedule):
    """Momentum and weight decay."""

    name: ClassVar[str] = "sgd"

    momentum: float = 0.9
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        require(0 <= self.momentum < 1 and self.weight_decay >= 0, "sgd: 0 <= momentum < 1, weight_decay >= 0")

    def build(self, model: nn.Module) -> torch.optim.Optimizer:
        """The optimiser of a network."""
        return torch.optim.SGD(model.parameters(), lr=self.lr, momentum=self.momentum, weight_decay=self.weight_decay)


@dataclasses.dataclass(frozen=True)
class AdamW(Schedule):
    """Adam with decoupled weight decay, which leaves vectors (biases, gains of norms) as they are."""

    name: ClassVar[str] = "adamw"

    lr: float = 0.001
    weight_decay: float = 0.01
    beta1: float = 0.9
    beta2: float = 0.999

    def __post_init__(self) -> None:
        super().__post_init__()
        inside = 0 <= self.beta1 < 1 and 0 <= self.beta2 < 1
        require(inside and self.weight_decay >= 0, "adamw: 0 <= beta1, beta2 < 1, weight_decay >= 0")

    def build(self, model: nn.Module) -> torch.optim.Optimizer:
        """The optimiser of a network."""
        groups = [
            {"params": [p for p in model.parameters() if p.dim() >= 2], "weight_decay": self.weight_decay},
            {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
        ]
        # One kernel for all parameters on a GPU; on the CPU torch's usual loops, whose bits stay as they were.
        fused = True if all(p.is_cuda for p in model.parameters()) else None
        return torch.optim.AdamW(groups, lr=self.lr, betas=(self.beta1, self.beta2), fused=fused)


@dataclasses.dataclass(frozen=True)
class SignSGD(Schedule):
    """Steps along the sign of every coordinate of the gradient, with decoupled weight decay: how DeMo and DisTrO step."""

    name: ClassVar[str] = "sign_sgd"

    lr: float = 0.001
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.weight_decay >= 0, "sign_sgd: weight_decay >= 0")

    def build(self, model: nn.Module) -> torch.optim.Optimizer:
        """The optimiser of a network."""
        return outer.sign_updates(torch.optim.SGD(model.parameters(), lr=self.lr, weight_decay=self.weight_decay))


MODELS: Mapping[str, type[Any]] = types.MappingProxyType({c.name: c for c in (MLP, CNN, GPT)})
OPTIMIZERS: Mapping[str, type[Any]] = types.MappingProxyType({c.name: c for c in (SGD, AdamW, SignSGD)})


def network(text: str) -> MLP | CNN | GPT:
    """The network that a text form describes.

    >>> network("mlp(width=64)")
    MLP(width=64, depth=2)
    """
    made: MLP | CNN | GPT = parse_form(text, MODELS, "model")
    return made


def optimizer(text: str) -> SGD | AdamW | SignSGD:
    """The optimiser that a text form describes.

    >>> optimizer("sgd(lr=0.05)").momentum
    0.9
    """
    made: SGD | AdamW | SignSGD = parse_form(text, OPTIMIZERS, "optimizer")
    return made

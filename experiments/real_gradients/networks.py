"""Small networks of five kinds, trained for some hundred steps, and their gradients early, in the middle and late.

Text is byte-level: a file, or the pages of this repository. Images are scikit-learn's digits, or a folder as ``tersegrad train`` takes it.
"""

from __future__ import annotations

import dataclasses
import lzma
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from tersegrad.core.protocol import Piece, Spec
from tersegrad.train import data

ROOT = Path(__file__).parents[2]
Batch = tuple[Tensor, Tensor]


@dataclasses.dataclass(frozen=True)
class Gradient:
    """All gradients of one step in one buffer."""

    network: str
    step: int
    values: Tensor
    spec: Spec


class Block(nn.Module):
    """Attention and a feed-forward part, each after a normalisation."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mix, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, time, width = x.shape
        parts = self.mix(self.first(x)).view(batch, time, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(parts[0], parts[1], parts[2], is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(batch, time, width))
        more: Tensor = self.down(functional.gelu(self.up(self.second(x))))
        return x + more


class Transformer(nn.Module):
    """A language model on bytes."""

    def __init__(self, width: int = 160, depth: int = 3, heads: int = 5, time: int = 48) -> None:
        super().__init__()
        self.symbols, self.places = nn.Embedding(256, width), nn.Embedding(time, width)
        self.blocks = nn.Sequential(*[Block(width, heads) for _ in range(depth)])
        self.norm, self.out = nn.LayerNorm(width), nn.Linear(width, 256, bias=False)
        for table in (self.symbols, self.places):
            nn.init.normal_(table.weight, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.out(self.norm(self.blocks(self.symbols(x) + self.places.weight[: x.shape[1]])))
        return scores


class Recurrent(nn.Module):
    """Two layers of LSTM on bytes."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.symbols, self.cells, self.out = (
            nn.Embedding(256, 48),
            nn.LSTM(48, width, 2, batch_first=True),
            nn.Linear(width, 256),
        )

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.out(self.cells(self.symbols(x))[0])
        return scores


class Residual(nn.Module):
    """Two convolutions beside a shortcut."""

    def __init__(self, inner: int, outer: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(inner, outer, 3, stride, 1, bias=False), nn.GroupNorm(8, outer), nn.ReLU())
        self.second = nn.Sequential(nn.Conv2d(outer, outer, 3, 1, 1, bias=False), nn.GroupNorm(8, outer))
        self.short = nn.Conv2d(inner, outer, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return functional.relu(self.second(self.first(x)) + self.short(x))


def resnet(channels: int, classes: int) -> nn.Module:
    """Convolutions with shortcuts and normalisation."""
    return nn.Sequential(
        nn.Conv2d(channels, 24, 3, 1, 1),
        Residual(24, 48, 1),
        Residual(48, 96, 2),
        Residual(96, 128, 2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(128, classes),
    )


def plain_cnn(channels: int, classes: int) -> nn.Module:
    """Without normalisation, so that some units fall silent."""
    layers: list[nn.Module] = []
    for width in (32, 64, 128):
        layers += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
        channels = width
    return nn.Sequential(
        *layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, classes)
    )


def mlp(pixels: int, classes: int) -> nn.Module:
    """Two hidden layers."""
    return nn.Sequential(
        nn.Flatten(), nn.Linear(pixels, 300), nn.ReLU(), nn.Linear(300, 300), nn.ReLU(), nn.Linear(300, classes)
    )


def text(path: str | None) -> Tensor:
    """Bytes of a file (plain or .xz), or of this repository's pages."""
    if path is None:
        raw = b"".join(page.read_bytes() for page in sorted((ROOT / "docs").glob("*.md")))
    else:
        raw = Path(path).read_bytes()
        raw = lzma.decompress(raw) if path.endswith(".xz") else raw
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8).long()


def sequences(symbols: Tensor, batch: int, time: int, g: torch.Generator) -> Callable[[], Batch]:
    """Random excerpts, and the same one byte later."""

    def draw() -> Batch:
        starts = torch.randint(0, symbols.numel() - time - 1, (batch, 1), generator=g)
        rows = symbols[starts + torch.arange(time + 1)]
        return rows[:, :-1], rows[:, 1:]

    return draw


def pictures(images: data.Images, batch: int, g: torch.Generator) -> Callable[[], Batch]:
    """Random images and their classes."""

    def draw() -> Batch:
        chosen = torch.randint(0, images.train.shape[0], (batch,), generator=g)
        return images.train[chosen], images.train_labels[chosen]

    return draw


def gradients(
    names: tuple[str, ...], words: str | None, source: str, steps: tuple[int, ...], seed: int = 0
) -> Iterator[Gradient]:
    """The gradients of each network after these steps of training."""
    symbols, images = text(words), data.load(source)
    channels, pixels = images.shape[0], images.train[0].numel()
    for name in names:
        torch.manual_seed(seed)
        g = torch.Generator().manual_seed(seed)
        model: nn.Module
        if name in ("transformer", "lstm"):
            model = Transformer() if name == "transformer" else Recurrent()
            draw = sequences(symbols, 8, 48 if name == "transformer" else 32, g)
            optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
        else:
            build = {"resnet": lambda: resnet(channels, images.classes), "cnn": lambda: plain_cnn(channels, images.classes)}
            model = build[name]() if name in build else mlp(pixels, images.classes)
            draw = pictures(images, 32, g)
            optimizer = torch.optim.SGD(model.parameters(), 0.05 if name == "resnet" else 0.02, momentum=0.9)
        parameters = list(model.parameters())
        spec = Spec(tuple(Piece(tuple(p.shape), 0, p.numel(), n) for n, p in model.named_parameters()))
        for step in range(1, max(steps) + 1):
            x, y = draw()
            loss = functional.cross_entropy(model(x).flatten(0, -2), y.flatten())
            optimizer.zero_grad()
            loss.backward()
            if step in steps:
                yield Gradient(name, step, torch.cat([p.grad.flatten() for p in parameters if p.grad is not None]), spec)
            optimizer.step()

"""What is learned. Settings are chosen on the tasks of ``CHOOSE``, and what was chosen is held against the others on those of ``REPORT``.

digits comes with scikit-learn (a third is held out); *source* is the text of ``torch.nn``, whose version is pinned. The others are read
from a folder: ``FOLDER/mnist`` (the four idx files, gzipped or not) and ``FOLDER/tinyshakespeare`` (``input.txt``, plain or .xz).
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import lzma
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from tersegrad.train import data, models
from tersegrad.train.data import Images
from tersegrad.train.text import Text

WORKERS = 4


@dataclasses.dataclass(frozen=True)
class Task:
    """A network, its data and how long it is trained. ``rates``: learning rates, tuned without compression (results/rates.md)."""

    name: str
    words: str
    load: Callable[[Path], Images | Text]
    build: Callable[[Images | Text], nn.Module]
    batch: int  # examples of each worker in a step
    rates: Mapping[str, float]
    steps: int = 300
    held_out: int = 10_000  # examples of an evaluation at most

    def optimizer(self, name: str, rate: float | None = None) -> models.Schedule:
        """An optimiser with its schedule: a short warm-up, then a cosine to zero."""
        lr = self.rates[name] if rate is None else rate
        return models.SGD(lr=lr) if name == "momentum" else models.AdamW(lr=lr)


class Strided(nn.Sequential):
    """Two strided convolutions and two linear layers."""

    def __init__(self, channels: int, classes: int) -> None:
        super().__init__(
            nn.Conv2d(channels, 16, 5, 2, 2), nn.ReLU(), nn.Conv2d(16, 32, 5, 2, 2), nn.ReLU(), nn.Flatten(),
            nn.LazyLinear(64), nn.ReLU(), nn.Linear(64, classes),
        )  # fmt: skip


class Recurrent(nn.Module):
    """One layer of LSTM on bytes."""

    def __init__(self, symbols: int, width: int = 112) -> None:
        super().__init__()
        self.symbols, self.cells, self.out = (
            nn.Embedding(symbols, 48),
            nn.LSTM(48, width, batch_first=True),
            nn.Linear(width, symbols),
        )

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.out(self.cells(self.symbols(x))[0])
        return scores


def _digits(folder: Path) -> Images:
    whole = data.digits()
    x, y = torch.cat([whole.train, whole.test]), torch.cat([whole.train_labels, whole.test_labels])
    return Images("digits", x[600:], y[600:], x[:600], y[:600])


def _mlp(found: Images | Text) -> nn.Module:
    return models.MLP(width=128).build(found.shape, found.classes)


def _gpt(found: Images | Text) -> nn.Module:
    return models.GPT(layers=2, width=48, context=48, heads=2, deviation=0.07).build(found.shape, found.classes)


def _cnn(found: Images | Text) -> nn.Module:
    made = Strided(found.shape[0], found.classes)
    made(torch.zeros(1, *found.shape))
    return made


def _lstm(found: Images | Text) -> nn.Module:
    return Recurrent(found.classes)


def text_of(name: str, raw: bytes, context: int) -> Text:
    """Bytes in windows, the last tenth held out."""
    symbols = torch.from_numpy(np.frombuffer(raw, dtype=np.uint8).copy())
    cut = len(symbols) * 9 // 10
    return Text(name, symbols[:cut], symbols[cut:], 256, 1.0).cut(context)


def _source(folder: Path) -> Text:
    files = sorted(Path(nn.__file__).parent.rglob("*.py"))
    # An order that mixes the packages, so that what is held out is of the same kind.
    mixed = sorted(files, key=lambda path: hashlib.blake2b(path.name.encode()).digest())
    return text_of("source", b"\0".join(path.read_bytes() for path in mixed), 48)


def _shakespeare(folder: Path) -> Text:
    for path in (folder / "tinyshakespeare" / "input.txt", folder / "tinyshakespeare" / "input.txt.xz"):
        if path.exists():
            raw = path.read_bytes()
            return text_of("shakespeare", lzma.decompress(raw) if path.suffix == ".xz" else raw, 32)
    raise FileNotFoundError(f"{folder / 'tinyshakespeare' / 'input.txt'} (or .xz) is missing: --data names the folder above it")


CHOOSE = ("digits", "source")
REPORT = ("mnist", "shakespeare")
TASKS = {
    task.name: task
    for task in (
        Task("digits", "MLP, digits", _digits, _mlp, 16, {"adam": 4e-3, "momentum": 0.1}),
        Task("source", "GPT, Python source", _source, _gpt, 2, {"adam": 6e-3, "momentum": 0.075}, held_out=512),
        Task("mnist", "CNN, MNIST", lambda folder: data.mnist(folder / "mnist"), _cnn, 16, {"adam": 4e-3, "momentum": 0.05}),
        Task("shakespeare", "LSTM, Shakespeare", _shakespeare, _lstm, 8, {"adam": 0.024, "momentum": 1.0}, held_out=512),
    )
}  # fmt: skip
OPTIMIZERS = ("adam", "momentum")


@functools.cache
def loaded(name: str, folder: Path) -> Images | Text:
    """The data of a task, read once."""
    return TASKS[name].load(folder)

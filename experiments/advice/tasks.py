"""What is learned. Settings are chosen on the tasks of ``CHOOSE``, and what was chosen is held against the others on those of ``REPORT``.

All rows of the advice were first chosen on digits and *source* and held against others on MNIST and Shakespeare (``FIRST_REPORT``), where
all but one stood. That one, Adam at 20 times fewer bytes, was chosen again on those four, by the same rule, and is held against
others on ``REPORT``, two tasks that nobody had looked at. There momentum at 100 times failed, and was chosen again on all six.
The part *stages* (``stages.py``) chooses every row again on all six (``SEEN``) and holds it against others on ``UNSEEN``.

digits comes with scikit-learn (a third is held out); *source* is the text of ``torch.nn``, whose version is pinned, *headers* that of its
C++ core (``c10``), and *help* that of Python's own help topics (``pydoc_data``). The others are read from a folder: ``FOLDER/mnist`` (the
four idx files, gzipped or not), ``FOLDER/tinyshakespeare`` (``input.txt``, plain or .xz), ``FOLDER/cifar10`` (the binary version) and
``FOLDER/tiny.npz`` (``python -m experiments.variance_based.data``). A file
``FOLDER/NAME.small.npz`` (``small.py``) comes before all these.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import lzma
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import avg_pool2d, pad

from tersegrad.advice import Who
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


class Residual(nn.Module):
    """Of images at half their size: patches of 4 x 4 pixels, three residual convolutions with group norms, and a linear layer."""

    def __init__(self, channels: int, classes: int, width: int = 48) -> None:
        super().__init__()
        self.patches = nn.Sequential(nn.AvgPool2d(2), nn.Conv2d(channels, width, 4, 4))
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.GroupNorm(8, width), nn.ReLU(), nn.Conv2d(width, width, 3, padding=1)) for _ in range(3)
        )
        self.out = nn.Sequential(nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(4 * width, classes))

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x)
        for block in self.blocks:
            x = x + block(x)
        scores: Tensor = self.out(x)
        return scores


class Recurrent(nn.Module):
    """One layer of LSTM or GRU on bytes."""

    def __init__(self, symbols: int, width: int = 112, cells: type[nn.LSTM | nn.GRU] = nn.LSTM) -> None:
        super().__init__()
        self.symbols, self.cells, self.out = (
            nn.Embedding(symbols, 48),
            cells(48, width, batch_first=True),
            nn.Linear(width, symbols),
        )

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.out(self.cells(self.symbols(x))[0])
        return scores


class Mix(nn.Module):
    """A residual perceptron over places or over channels."""

    def __init__(self, width: int, size: int, hidden: int, over_places: bool) -> None:
        super().__init__()
        self.norm, self.over_places = nn.LayerNorm(width), over_places
        self.mix = nn.Sequential(nn.Linear(size, hidden), nn.GELU(), nn.Linear(hidden, size))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        mixed: Tensor = self.mix(y.transpose(1, 2)).transpose(1, 2) if self.over_places else self.mix(y)
        return x + mixed


class Mixer(nn.Module):
    """Patches of 4 x 4 pixels, mixed over places and over channels by turns (Tolstikhin et al., MLP-Mixer, 2021)."""

    def __init__(self, shape: tuple[int, ...], classes: int, width: int = 64, blocks: int = 3) -> None:
        super().__init__()
        places = shape[1] * shape[2] // 16
        self.patches = nn.Conv2d(shape[0], width, 4, 4)
        self.mixes = nn.Sequential(
            *(Mix(width, *sizes) for _ in range(blocks) for sizes in ((places, 32, True), (width, 128, False)))
        )
        self.out = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, classes))

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)  # (n, places, width)
        scores: Tensor = self.out(self.mixes(x).mean(1))
        return scores


class Causal(nn.Module):
    """On bytes: gated convolutions that look back 1, 2, 4 and 8 places (van den Oord et al., WaveNet, 2016)."""

    def __init__(self, symbols: int, width: int = 48) -> None:
        super().__init__()
        self.symbols = nn.Embedding(symbols, width)
        self.layers = nn.ModuleList(nn.Conv1d(width, 2 * width, 2, dilation=2**k) for k in range(4))
        self.mixes = nn.ModuleList(nn.Conv1d(width, width, 1) for _ in self.layers)
        self.out = nn.Sequential(nn.ReLU(), nn.Linear(width, symbols))

    def forward(self, x: Tensor) -> Tensor:
        x = self.symbols(x).transpose(1, 2)  # (n, width, places)
        for k, (layer, mix) in enumerate(zip(self.layers, self.mixes)):
            value, gate = layer(pad(x, (2**k, 0))).chunk(2, 1)
            x = x + mix(value.tanh() * gate.sigmoid())
        scores: Tensor = self.out(x.transpose(1, 2))
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


def _residual(found: Images | Text) -> nn.Module:
    return Residual(found.shape[0], found.classes)


def _lstm(found: Images | Text) -> nn.Module:
    return Recurrent(found.classes)


def _gru(found: Images | Text) -> nn.Module:
    return Recurrent(found.classes, 96, nn.GRU)


def _mixer(found: Images | Text) -> nn.Module:
    return Mixer(found.shape, found.classes)


def _causal(found: Images | Text) -> nn.Module:
    return Causal(found.classes)


def text_of(name: str, raw: bytes, context: int) -> Text:
    """Bytes in windows, the last tenth held out."""
    symbols = torch.from_numpy(np.frombuffer(raw, dtype=np.uint8).copy())
    cut = len(symbols) * 9 // 10
    return Text(name, symbols[:cut], symbols[cut:], 256, 1.0).cut(context)


def _mixed(files: Iterable[Path]) -> bytes:
    """Files in an order that mixes the packages, so that what is held out is of the same kind."""
    mixed = sorted(sorted(files), key=lambda path: hashlib.blake2b(path.name.encode()).digest())
    return b"\0".join(path.read_bytes() for path in mixed)


def _source(folder: Path) -> Text:
    return text_of("source", _mixed(Path(nn.__file__).parent.rglob("*.py")), 48)


def _headers(folder: Path) -> Text:
    return text_of("headers", _mixed((Path(torch.__file__).parent / "include" / "c10").rglob("*.h")), 32)


def _help(folder: Path) -> Text:
    topics = importlib.import_module("pydoc_data.topics").topics
    return text_of("help", "\n\n".join(topics[name] for name in sorted(topics)).encode(), 32)


def _shakespeare(folder: Path) -> Text:
    for path in (folder / "tinyshakespeare" / "input.txt", folder / "tinyshakespeare" / "input.txt.xz"):
        if path.exists():
            raw = path.read_bytes()
            return text_of("shakespeare", lzma.decompress(raw) if path.suffix == ".xz" else raw, 32)
    raise FileNotFoundError(f"{folder / 'tinyshakespeare' / 'input.txt'} (or .xz) is missing: --data names the folder above it")


def tiny(folder: Path, classes: int = 20, held_out: int = 5000) -> Images:
    """The first classes of Tiny-ImageNet at a quarter of their size; its 50 validation images of each are too few a test."""
    with np.load(folder / "tiny.npz") as held:
        x, y = (np.concatenate([held[name], held[f"{name}_test"]]) for name in ("x", "y"))
    x, y = x[y < classes], y[y < classes]
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(0)).numpy()
    pixels, y = avg_pool2d(torch.from_numpy(x[order].transpose(0, 3, 1, 2).copy()).float(), 4).numpy(), y[order]
    return data.scaled("tiny", pixels[held_out:], y[held_out:], pixels[:held_out], y[:held_out])


CHOOSE = ("digits", "source", "mnist", "shakespeare")
FIRST_REPORT = CHOOSE[2:]
REPORT = ("cifar10", "help")
SEEN = CHOOSE + REPORT
UNSEEN = ("tiny", "headers")
TASKS = {
    task.name: task
    for task in (
        Task("digits", "MLP, digits", _digits, _mlp, 16, {"adam": 4e-3, "momentum": 0.1}),
        Task("source", "GPT, Python source", _source, _gpt, 2, {"adam": 6e-3, "momentum": 0.075}, held_out=512),
        Task("mnist", "CNN, MNIST", lambda folder: data.mnist(folder / "mnist"), _cnn, 16, {"adam": 4e-3, "momentum": 0.05}),
        Task("shakespeare", "LSTM, Shakespeare", _shakespeare, _lstm, 8, {"adam": 0.024, "momentum": 1.0}, held_out=512),
        Task("cifar10", "residual network, CIFAR-10", lambda folder: data.cifar10(folder / "cifar10"), _residual, 16,
             {"adam": 8e-3, "momentum": 0.05}),
        Task("help", "GRU, Python's help", _help, _gru, 8, {"adam": 0.012, "momentum": 1.0}, held_out=1024),
        Task("tiny", "mixer, Tiny-ImageNet", tiny, _mixer, 16, {"adam": 4e-3, "momentum": 0.05}),
        Task("headers", "causal convolutions, C++ headers", _headers, _causal, 8, {"adam": 0.016, "momentum": 0.8}, held_out=2048),
    )
}  # fmt: skip
OPTIMIZERS: tuple[Who, ...] = ("adam", "momentum")

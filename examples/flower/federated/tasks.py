"""What is learned: data in natural parts, a model, a loss and a score.

digits comes with scikit-learn. The others are read from a folder: mnist (the four idx files, gzipped), shakespeare (``input.txt``,
plain or .xz: the tiny-Shakespeare text, one client a speaker), parkinsons (``parkinsons_updrs.data``, plain or .xz, from the UCI
collection: one client a patient), a9a (``a9a`` and ``a9a.t``, plain or .xz, from the LIBSVM collection: census data, who earns more
than 50,000).
"""

from __future__ import annotations

import csv
import dataclasses
import functools
import gzip
import itertools
import lzma
import re
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

SPEAKER_CHARACTERS = 2000  # speakers who say less are left out
CONTEXT = 12  # characters that the text model sees


@dataclasses.dataclass(frozen=True)
class Share:
    """One client's examples."""

    x: Tensor
    y: Tensor


@dataclasses.dataclass(frozen=True)
class Task:
    """Everything about one task; ``score`` is in percent, higher is better."""

    name: str
    model: Callable[[], nn.Module]
    loss: Callable[[Tensor, Tensor], Tensor]
    score: Callable[[nn.Module], float]
    natural: tuple[Share, ...] = ()  # one a speaker or patient
    pool: Share | None = None  # to be split by label otherwise

    def shares(self, clients: int, skew: float, seed: int = 0) -> list[Share]:
        """The examples of each client: natural parts dealt out, or a Dirichlet split by label."""
        if self.natural:
            dealt = [list(self.natural[n::clients]) for n in range(clients)]
            return [Share(torch.cat([s.x for s in d]), torch.cat([s.y for s in d])) for d in dealt if d]
        assert self.pool is not None
        rng = np.random.default_rng(seed)
        labels = self.pool.y.numpy()
        parts: list[list[int]] = [[] for _ in range(clients)]
        for label in np.unique(labels):
            rows = rng.permutation(np.flatnonzero(labels == label))
            cuts = (np.cumsum(rng.dirichlet([skew] * clients))[:-1] * len(rows)).astype(int)
            for part, chunk in zip(parts, np.split(rows, cuts)):
                part.extend(chunk.tolist())
        for part in parts:  # nobody is left without examples
            while len(part) < 2:
                donor = max(parts, key=len)
                part.append(donor.pop())
        return [Share(self.pool.x[part], self.pool.y[part]) for part in parts]


def load(name: str, folder: str | Path = "") -> Task:
    """A task by name."""
    loaders: dict[str, Callable[[Path], Task]] = {
        "digits": _digits,
        "digits-small": functools.partial(_digits, hidden=(32,)),
        "mnist": _mnist,
        "shakespeare": _shakespeare,
        "parkinsons": _parkinsons,
        "a9a": _a9a,
    }
    if name not in loaders:
        raise ValueError(f"there is no task {name!r}: choose among {', '.join(loaders)}")
    return loaders[name](Path(folder))


def train(model: nn.Module, task: Task, share: Share, epochs: int, rate: float, batch: int, seed: int) -> float:
    """SGD on one client; returns the last epoch's mean loss."""
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    model.train()
    total = 0.0
    for _ in range(epochs):
        total = 0.0
        for rows in torch.randperm(len(share.y), generator=generator).split(batch):
            optimizer.zero_grad()
            loss = task.loss(model(share.x[rows]), share.y[rows])
            loss.backward()
            optimizer.step()
            total += float(loss.detach()) * len(rows)
    return total / len(share.y)


def _perceptron(*sizes: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for a, b in itertools.pairwise(sizes):
        layers += [nn.Linear(a, b), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def _accuracy(model: nn.Module, test: Share) -> float:
    model.eval()
    with torch.no_grad():
        return 100 * float((model(test.x).argmax(1) == test.y).float().mean())


def _classification(name: str, model: Callable[[], nn.Module], pool: Share, test: Share) -> Task:
    return Task(name, model, nn.functional.cross_entropy, functools.partial(_accuracy, test=test), pool=pool)


def _digits(folder: Path, hidden: tuple[int, ...] = (400, 400)) -> Task:
    from sklearn.datasets import load_digits

    found = load_digits()
    order = np.random.default_rng(0).permutation(len(found.target))
    x, y = torch.tensor(found.data[order] / 16, dtype=torch.float32), torch.tensor(found.target[order])
    return _classification(
        "digits", functools.partial(_perceptron, 64, *hidden, 10), Share(x[:1437], y[:1437]), Share(x[1437:], y[1437:])
    )


def _mnist(folder: Path) -> Task:
    def read(name: str) -> Tensor:
        path = folder / f"{name}.gz"
        if not path.exists():
            raise FileNotFoundError(f"{path} is missing: MNIST's four idx files, gzipped, belong into folder=")
        data = gzip.decompress(path.read_bytes())
        kind, dims = data[2], data[3]
        shape = struct.unpack(f">{dims}I", data[4 : 4 + 4 * dims])
        assert kind == 8, "idx files of MNIST hold bytes"
        return torch.frombuffer(bytearray(data[4 + 4 * dims :]), dtype=torch.uint8).reshape(shape)

    def images(name: str) -> Tensor:
        return (read(name).reshape(-1, 784).float() / 255 - 0.1307) / 0.3081

    pool = Share(images("train-images-idx3-ubyte"), read("train-labels-idx1-ubyte").long())
    test = Share(images("t10k-images-idx3-ubyte"), read("t10k-labels-idx1-ubyte").long())
    return _classification("mnist", functools.partial(_perceptron, 784, 200, 10), pool, test)


def _text(folder: Path, name: str) -> str:
    for path in (folder / name, folder / f"{name}.xz"):
        if path.exists():
            data = path.read_bytes()
            return (lzma.decompress(data) if path.suffix == ".xz" else data).decode()
    raise FileNotFoundError(f"{folder / name} (or .xz) is missing: give folder=")


class NextCharacter(nn.Module):
    """Embeddings of the last characters, one hidden layer, the next character's logits."""

    def __init__(self, symbols: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(symbols, 16)
        self.net = _perceptron(16 * CONTEXT, 384, symbols)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.net(self.embed(x).flatten(1))
        return logits


def _shakespeare(folder: Path) -> Task:
    text = _text(folder, "input.txt")
    symbols = sorted(set(text))
    number = {c: i for i, c in enumerate(symbols)}
    spoken: dict[str, list[str]] = {}
    for block in text.split("\n\n"):
        match = re.match(r"([^\n:]+):\n(.*)", block, re.DOTALL)
        if match:
            spoken.setdefault(match[1], []).append(match[2])
    train_, test_ = [], []
    for lines in spoken.values():
        speech = "\n".join(lines)
        if len(speech) < SPEAKER_CHARACTERS:
            continue
        codes = torch.tensor([number[c] for c in speech])
        windows = codes.unfold(0, CONTEXT + 1, 1)
        cut = int(0.9 * len(windows))
        train_.append(Share(windows[:cut, :-1].contiguous(), windows[:cut, -1].contiguous()))
        test_.append(Share(windows[cut:, :-1].contiguous(), windows[cut:, -1].contiguous()))
    test = Share(torch.cat([s.x for s in test_])[::5], torch.cat([s.y for s in test_])[::5])
    score = functools.partial(_accuracy, test=test)
    return Task(
        "shakespeare", functools.partial(NextCharacter, len(symbols)), nn.functional.cross_entropy, score, tuple(train_)
    )


def _explained(model: nn.Module, test: Share) -> float:
    model.eval()
    with torch.no_grad():
        left = (model(test.x) - test.y).square().sum(0)
    return 100 * float((1 - left / (test.y - test.y.mean(0)).square().sum(0)).mean())


def _parkinsons(folder: Path) -> Task:
    rows = list(csv.DictReader(_text(folder, "parkinsons_updrs.data").splitlines()))
    targets = ("motor_UPDRS", "total_UPDRS")
    names = [n for n in rows[0] if n not in (*targets, "subject#")]
    patient = np.array([int(r["subject#"]) for r in rows])
    x = np.array([[float(r[n]) for n in names] for r in rows])
    y = np.array([[float(r[t]) for t in targets] for r in rows])
    held_out = np.arange(len(rows)) % 5 == 4
    x = (x - x[~held_out].mean(0)) / x[~held_out].std(0)
    y = (y - y[~held_out].mean(0)) / y[~held_out].std(0)
    xs, ys = torch.tensor(x, dtype=torch.float32), torch.tensor(y, dtype=torch.float32)
    natural = tuple(Share(xs[(patient == p) & ~held_out], ys[(patient == p) & ~held_out]) for p in np.unique(patient))
    score = functools.partial(_explained, test=Share(xs[held_out], ys[held_out]))
    model = functools.partial(_perceptron, len(names), 256, 256, 2)
    return Task("parkinsons", model, nn.functional.mse_loss, score, natural)


def _a9a(folder: Path) -> Task:
    def read(name: str) -> Share:
        rows = [line.split() for line in _text(folder, name).splitlines() if line.strip()]
        x = torch.zeros(len(rows), 123)
        for row, (_, *fields) in enumerate(rows):
            for index, _, value in (field.partition(":") for field in fields):
                x[row, int(index) - 1] = float(value)
        return Share(x, torch.tensor([int(float(label) > 0) for label, *_ in rows]))

    return _classification("a9a", functools.partial(_perceptron, 123, 256, 256, 2), read("a9a"), read("a9a.t"))

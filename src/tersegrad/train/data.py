"""Images to train on: scikit-learn's digits (embedded), MNIST's idx files, or CIFAR-10's binary files in a folder.

Nothing is downloaded. Pixels are scaled to mean 0 and variance 1 of the training images.
"""

from __future__ import annotations

import dataclasses
import gzip
import importlib.util
import struct
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from tersegrad.core.errors import BadConfiguration, MissingExtra
from tersegrad.train import text

HELD_OUT = 297  # of the 1797 digits


@dataclasses.dataclass(frozen=True)
class Images:
    """Training and test images (n, channels, height, width) as float32, with their classes."""

    name: str
    train: Tensor
    train_labels: Tensor  # (n,) int64
    test: Tensor
    test_labels: Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        """Of one image."""
        return tuple(self.train.shape[1:])

    @property
    def classes(self) -> int:
        return int(self.train_labels.max()) + 1

    @property
    def count(self) -> int:
        """Examples to train on."""
        return len(self.train)

    @property
    def count_held_out(self) -> int:
        return len(self.test)

    @property
    def evaluated(self) -> int:
        """Examples of an evaluation, unless told otherwise."""
        return len(self.test)

    def examples(self, chosen: Tensor) -> tuple[Tensor, Tensor]:
        """Training images and their classes."""
        return self.train[chosen], self.train_labels[chosen]

    def held_out(self, chosen: Tensor) -> tuple[Tensor, Tensor]:
        """Test images and their classes."""
        return self.test[chosen], self.test_labels[chosen]

    def to(self, device: torch.device) -> Images:
        """The same on a device."""
        return Images(
            self.name,
            self.train.to(device),
            self.train_labels.to(device),
            self.test.to(device),
            self.test_labels.to(device),
        )


def load(source: str) -> Images:
    """``digits``, or a folder that holds MNIST's idx files (plain or .gz) or CIFAR-10's binary files."""
    if source == "digits":
        return digits()
    folder = Path(source)
    if not folder.is_dir():
        raise BadConfiguration(
            f"data is 'digits', 'text:FOLDER' or a folder of MNIST's or CIFAR-10's files; there is no folder {source!r}"
        )
    if _find(folder, "train-images"):
        return mnist(folder)
    if cifar := next((f for f in (folder, folder / "cifar-10-batches-bin") if (f / "data_batch_1.bin").exists()), None):
        return cifar10(cifar)
    raise BadConfiguration(
        f"{source} holds neither MNIST's train-images-idx3-ubyte nor CIFAR-10's data_batch_1.bin (the binary version)"
    )


def check(source: str) -> None:
    """Raise what :func:`load` would raise for a source that is not there, before any process is started."""
    if source.startswith(text.PREFIX):
        text.check(Path(source.removeprefix(text.PREFIX)))
    elif source == "digits":
        load_digits()
    elif not Path(source).is_dir():
        load(source)


def load_digits() -> tuple[np.ndarray, np.ndarray]:
    """scikit-learn's digits as they are: (1797, 64) pixels from 0 to 16, and their classes."""
    # Read from where scikit-learn keeps them: importing it and scipy would take longer than the rest of a short training.
    found = importlib.util.find_spec("sklearn")
    if found is None or not found.submodule_search_locations:
        raise MissingExtra("digits are scikit-learn's: pip install 'tersegrad[experiments]', or pass a folder of MNIST files")
    path = Path(found.submodule_search_locations[0]) / "datasets" / "data" / "digits.csv.gz"
    if not path.exists():
        from sklearn import datasets

        pixels, classes = datasets.load_digits(return_X_y=True)
        return pixels, classes
    with gzip.open(path, "rt", encoding="ascii") as lines:
        table = np.loadtxt(lines, delimiter=",")
    return table[:, :-1], table[:, -1].astype(np.int64)


def digits() -> Images:
    """scikit-learn's 1797 handwritten digits of 8 x 8 pixels, a part of them held out for the test."""
    pixels, classes = load_digits()
    order = torch.randperm(len(pixels), generator=torch.Generator().manual_seed(0)).numpy()
    images, labels = pixels[order].reshape(-1, 1, 8, 8), classes[order]
    cut = len(images) - HELD_OUT
    return scaled("digits", images[:cut], labels[:cut], images[cut:], labels[cut:])


def mnist(folder: Path) -> Images:
    """MNIST, or anything in its format (Fashion-MNIST, KMNIST): four idx files."""
    names = ("train-images", "train-labels", "t10k-images", "t10k-labels")
    found = {name: _find(folder, name) for name in names}
    if missing := [name for name, path in found.items() if path is None]:
        raise BadConfiguration(f"{folder} lacks the idx files {', '.join(missing)}")
    images, labels, test, test_labels = (_idx(path) for path in found.values() if path is not None)
    return scaled(folder.name, images[:, None], labels, test[:, None], test_labels)


def cifar10(folder: Path) -> Images:
    """CIFAR-10's binary version: records of one class and 3 x 32 x 32 pixels."""
    names = [*(f"data_batch_{k}.bin" for k in range(1, 6)), "test_batch.bin"]
    parts = []
    for path in (folder / name for name in names):
        if not path.exists():
            raise BadConfiguration(f"{folder} lacks {path.name}")
        raw = np.frombuffer(path.read_bytes(), dtype=np.uint8)
        if raw.size == 0 or raw.size % 3073:
            raise BadConfiguration(f"{path} is no CIFAR-10 file: its size is not a multiple of 3073 bytes")
        parts.append(raw.reshape(-1, 3073))
    train, test = np.concatenate(parts[:5]), parts[5]
    return scaled("cifar10", train[:, 1:].reshape(-1, 3, 32, 32), train[:, 0], test[:, 1:].reshape(-1, 3, 32, 32), test[:, 0])


def _find(folder: Path, stem: str) -> Path | None:
    """An idx file by the beginning of its name, in the folder or in ``raw``, where torchvision puts it."""
    for place in (folder, folder / "raw"):
        if found := sorted(p for p in place.glob(f"{stem}*ubyte*") if p.suffix in ("", ".gz") or p.name.endswith("ubyte")):
            return found[0]
    return None


def _idx(path: Path) -> np.ndarray:
    """An idx file of bytes: two zeros, the type 8, the number of dimensions, the dimensions, the bytes."""
    data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    if len(data) < 4 or data[:3] != b"\0\0\x08" or len(data) < 4 + 4 * data[3]:
        raise BadConfiguration(f"{path} is no idx file of bytes")
    shape = struct.unpack(f">{data[3]}I", data[4 : 4 + 4 * data[3]])
    body = np.frombuffer(data, dtype=np.uint8, offset=4 + 4 * data[3])
    if body.size != int(np.prod(shape)):
        raise BadConfiguration(f"{path} announces {shape}, and holds {body.size} bytes")
    return body.reshape(shape)


def scaled(name: str, train: np.ndarray, labels: np.ndarray, test: np.ndarray, test_labels: np.ndarray) -> Images:
    """Pixels (n, channels, height, width) of any scale, and their classes."""
    if len(train) != len(labels) or len(test) != len(test_labels) or not len(train) or not len(test):
        raise BadConfiguration(f"{name}: {len(train)} + {len(test)} images with {len(labels)} + {len(test_labels)} labels")
    x, y = (torch.from_numpy(np.ascontiguousarray(a, dtype=np.float32)) for a in (train, test))
    mean, deviation = x.mean(), x.std().clamp(min=1e-6)
    labelled = (torch.from_numpy(np.ascontiguousarray(a, dtype=np.int64)) for a in (labels, test_labels))
    return Images(name, (x - mean) / deviation, next(labelled), (y - mean) / deviation, next(labelled))

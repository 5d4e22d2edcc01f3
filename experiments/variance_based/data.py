"""Images: CIFAR-10 from a folder in a published form, a file of arrays, the digits of scikit-learn, and made images for smoke tests.

``cifar10(folder)`` reads ``data_batch_1.bin`` ... ``test_batch.bin`` (the binary version) or ``data_batch_1`` ... ``test_batch`` (the
python version) from the folder or the subfolder that the archives unpack to, and checks every batch by its SHA-256.

    python -m experiments.variance_based.data tiny-imagenet-200 tiny.npz     # the first 100 classes of Tiny-ImageNet as arrays
"""

from __future__ import annotations

import dataclasses
import hashlib
import pickle
import sys
import tarfile
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

URL = "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"
MD5 = "c32a1d4ab5d03f1284b67883e8d87530"  # as published beside the archive
RECORDS = {  # SHA-256 of each file of the binary version
    "data_batch_1": "cee916563c9f80d84e3cc88e17fdc0941787f1244f00a67874d45b261883ada5",
    "data_batch_2": "a591ca11fa1708a91ee40f54b3da4784ccd871ecf2137de63f51ada8b3fa57ed",
    "data_batch_3": "bbe8596564c0f86427f876058170b84dac6670ddf06d79402899d93ceea26f67",
    "data_batch_4": "014e562d6e23c72197cc727519169a60359f5eccd8945ad5a09d710285ff4e48",
    "data_batch_5": "755304fc0b379caeae8c14f0dac912fbc7d6cd469eb67a1029a08a39453a9add",
    "test_batch": "8e2eb146ae340b09e24670f29cabc6326dba54da8789dab6768acf480273f65b",
}
BATCHES = ("data_batch_1", "data_batch_2", "data_batch_3", "data_batch_4", "data_batch_5", "test_batch")


@dataclasses.dataclass(frozen=True)
class Images:
    """Training and test images, (n, height, width, channels) uint8, with labels and what to normalise by."""

    name: str
    x: Tensor
    y: Tensor
    x_test: Tensor
    y_test: Tensor
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def to(self, device: torch.device | str) -> Images:
        parts = {k: getattr(self, k).to(device) for k in ("x", "y", "x_test", "y_test")}
        return dataclasses.replace(self, **parts)


def _statistics(x: np.ndarray[Any, Any]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and deviation of every channel of uint8 images."""
    values = x.reshape(-1, x.shape[-1])
    counts = [np.bincount(values[:, c], minlength=256) / len(values) for c in range(values.shape[1])]
    levels = np.arange(256)
    means = [float((c * levels).sum()) for c in counts]
    spreads = [float(np.sqrt((c * (levels - m) ** 2).sum())) for c, m in zip(counts, means)]
    return tuple(means), tuple(spreads)


def _images(name: str, x: Any, y: Any, x_test: Any, y_test: Any) -> Images:
    mean, std = _statistics(x)
    tensors = [torch.from_numpy(np.ascontiguousarray(a)) for a in (x, y, x_test, y_test)]
    return Images(name, tensors[0], tensors[1].long(), tensors[2], tensors[3].long(), mean, std)


def _batch(folder: Path, name: str) -> np.ndarray[Any, Any]:
    """One batch as the records of the binary version, (10000, 3073) uint8."""
    for place in (folder, folder / "cifar-10-batches-bin", folder / "cifar-10-batches-py"):
        if (place / f"{name}.bin").is_file():
            records = np.fromfile(place / f"{name}.bin", dtype=np.uint8).reshape(-1, 3073)
            break
        if (place / name).is_file():
            with open(place / name, "rb") as file:
                content = pickle.load(file, encoding="bytes")
            labels = np.asarray(content[b"labels"], dtype=np.uint8)
            records = np.concatenate([labels[:, None], np.asarray(content[b"data"], dtype=np.uint8)], axis=1)
            break
    else:
        raise FileNotFoundError(
            f"{folder} holds neither {name}.bin nor {name}: give the folder of the unpacked CIFAR-10 archive"
        )
    found = hashlib.sha256(np.ascontiguousarray(records).tobytes()).hexdigest()
    if name in RECORDS and found != RECORDS[name]:
        raise ValueError(f"{name} in {folder} is not the published batch: its SHA-256 is {found}")
    return records


def cifar10(folder: Path) -> Images:
    """CIFAR-10 from a folder."""
    batches = [_batch(folder, name) for name in BATCHES]
    train, test = np.concatenate(batches[:5]), batches[5]

    def pictures(records: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        return records[:, 1:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)

    return _images("cifar10", pictures(train), train[:, 0], pictures(test), test[:, 0])


def download(folder: Path) -> None:
    """Fetch and unpack the binary version unless the folder has it; the archive's MD5 is checked first."""
    try:
        _batch(folder, "test_batch")
        return
    except FileNotFoundError:
        folder.mkdir(parents=True, exist_ok=True)
    archive = folder / "cifar-10-binary.tar.gz"
    if not archive.is_file():
        print(f"downloading {URL} (162 MB)", flush=True)
        urllib.request.urlretrieve(URL, archive)
    found = hashlib.md5(archive.read_bytes(), usedforsecurity=False).hexdigest()
    if found != MD5:
        raise ValueError(f"{archive} has MD5 {found}, published is {MD5}: delete it and try again")
    with tarfile.open(archive) as tar:
        tar.extractall(folder, filter="data")


def digits() -> Images:
    """scikit-learn's 8 x 8 digits, 1,437 for training and 360 for testing."""
    from sklearn.datasets import load_digits

    found = load_digits()
    order = np.random.default_rng(0).permutation(len(found.target))
    x = (found.images[order] * 15).astype(np.uint8)[..., None]
    y = found.target[order]
    images = _images("digits", x[:1437], y[:1437], x[1437:], y[1437:])
    return dataclasses.replace(images, mean=(0.0,), std=(240.0,))


def arrays(path: Path) -> Images:
    """Images (n, height, width, channels) uint8 and labels from an .npz file with x, y, x_test and y_test."""
    with np.load(path) as held:
        lacking = {"x", "y", "x_test", "y_test"} - set(held.files)
        if lacking:
            raise ValueError(f"{path} lacks {', '.join(sorted(lacking))}")
        return _images(path.stem, *(held[name] for name in ("x", "y", "x_test", "y_test")))


def tiny_imagenet(folder: Path, classes: int = 100) -> dict[str, np.ndarray[Any, Any]]:
    """The first classes of Tiny-ImageNet, in the order of their names, from the folder that its archive unpacks to."""
    from PIL import Image

    names = sorted(p.name for p in (folder / "train").iterdir() if p.is_dir())[:classes]
    rows = [line.split("\t")[:2] for line in (folder / "val" / "val_annotations.txt").read_text().splitlines()]

    def pixels(path: Path) -> np.ndarray[Any, Any]:
        with Image.open(path) as opened:
            return np.asarray(opened.convert("RGB"), dtype=np.uint8)

    train = [(path, names.index(n)) for n in names for path in sorted((folder / "train" / n / "images").iterdir())]
    test = [(folder / "val" / "images" / file, names.index(n)) for file, n in rows if n in names]
    found: dict[str, np.ndarray[Any, Any]] = {}
    for end, items in (("", train), ("_test", test)):
        found[f"x{end}"] = np.stack([pixels(path) for path, _ in items])
        found[f"y{end}"] = np.array([label for _, label in items])
    return found


def made(count: int = 4096, seed: int = 0, side: int = 32) -> Images:
    """Images that a network can learn, for smoke tests: a class is a coarse random pattern, with noise."""
    rng = np.random.default_rng(seed)
    patterns = rng.normal(size=(10, 4, 4, 3)).repeat(side // 4, 1).repeat(side // 4, 2) * 40 + 128

    def draw(n: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        y = rng.integers(0, 10, n)
        return np.clip(patterns[y] + rng.normal(size=(n, side, side, 3)) * 60, 0, 255).astype(np.uint8), y

    return _images("made", *draw(count), *draw(max(500, count // 5)))


def load(name: str) -> Images:
    """``digits``, ``made`` (or ``made256``: so many), an .npz file of arrays, or a folder with CIFAR-10."""
    if name == "digits":
        return digits()
    if name.endswith(".npz"):
        return arrays(Path(name))
    if name.startswith("made") and not Path(name).is_dir():
        return made(int(name[4:] or 4096))
    return cifar10(Path(name))


if __name__ == "__main__":
    source, target = map(Path, sys.argv[1:])
    np.savez(target, **tiny_imagenet(source))  # type: ignore[arg-type]

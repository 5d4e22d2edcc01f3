"""Data folders: MNIST's and CIFAR-10's formats, read back exactly; damaged files are refused with their name."""

from __future__ import annotations

import gzip
import struct
from pathlib import Path

import numpy as np
import pytest
import torch

from tersegrad.core.errors import BadConfiguration, MissingExtra
from tersegrad.train import data, models


def idx(array: np.ndarray) -> bytes:
    return b"\0\0\x08" + bytes([array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()


def mnist(folder: Path, packed: bool, count: int = 20) -> np.ndarray:
    folder.mkdir(parents=True, exist_ok=True)
    images = np.random.default_rng(0).integers(0, 256, (count, 28, 28), dtype=np.uint8)
    labels = (np.arange(count) % 10).astype(np.uint8)
    for stem, array in (("images-idx3", images), ("labels-idx1", labels)):
        for part in ("train", "t10k"):
            name = f"{part}-{stem}-ubyte" + (".gz" if packed else "")
            (folder / name).write_bytes(gzip.compress(idx(array)) if packed else idx(array))
    return images


@pytest.mark.parametrize("packed", [False, True])
def test_mnist(tmp_path: Path, packed: bool) -> None:
    images = mnist(tmp_path if packed else tmp_path / "raw", packed)
    found = data.load(str(tmp_path))
    assert found.shape == (1, 28, 28)
    assert found.classes == 10
    assert found.test_labels.tolist() == found.train_labels.tolist() == [k % 10 for k in range(20)]
    back = found.train[:, 0] * float(images.std(ddof=1)) + float(images.mean())
    torch.testing.assert_close(back, torch.from_numpy(images).float(), rtol=1e-3, atol=1e-2)


def test_cifar10(tmp_path: Path) -> None:
    folder = tmp_path / "cifar-10-batches-bin"
    folder.mkdir()
    rows = np.random.default_rng(0).integers(0, 256, (6, 3073), dtype=np.uint8)
    rows[:, 0] = np.arange(6)
    for k in range(1, 6):
        (folder / f"data_batch_{k}.bin").write_bytes(rows.tobytes())
    (folder / "test_batch.bin").write_bytes(rows[:2].tobytes())
    found = data.load(str(tmp_path))
    assert found.shape == (3, 32, 32)
    assert len(found.train) == 30
    assert found.test_labels.tolist() == [0, 1]
    (folder / "test_batch.bin").write_bytes(b"short")
    with pytest.raises(BadConfiguration, match="test_batch"):
        data.load(str(tmp_path))


@pytest.mark.parametrize("moved", [False, True])
def test_digits_are_those_of_scikit_learn(monkeypatch: pytest.MonkeyPatch, moved: bool) -> None:
    from sklearn import datasets

    pixels, classes = datasets.load_digits(return_X_y=True)
    if moved:  # a release that keeps its files elsewhere
        monkeypatch.setattr(datasets, "load_digits", lambda return_X_y: (pixels, classes))
        monkeypatch.setattr(Path, "exists", lambda self: False)
    found = data.load_digits()
    assert np.array_equal(found[0], pixels)
    assert np.array_equal(found[1], classes)
    assert [a.dtype for a in found] == [pixels.dtype, classes.dtype]


def test_digits_are_scaled_and_split() -> None:
    found = data.load("digits")
    assert (len(found.train), len(found.test), found.classes) == (1500, 297, 10)
    assert abs(float(found.train.mean())) < 1e-5
    assert abs(float(found.train.std()) - 1) < 1e-3


@pytest.mark.parametrize("damage", ["missing", "truncated", "other"])
def test_damaged_mnist_is_named(tmp_path: Path, damage: str) -> None:
    mnist(tmp_path, packed=False)
    path = tmp_path / "t10k-labels-idx1-ubyte"
    if damage == "missing":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:-3] if damage == "truncated" else b"\0\0\x0d\1" + bytes(100))
    with pytest.raises(BadConfiguration, match="t10k-labels"):
        data.load(str(tmp_path))


def test_unknown_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BadConfiguration, match="no folder"):
        data.check(str(tmp_path / "none"))
    with pytest.raises(BadConfiguration, match="neither"):
        data.load(str(tmp_path))
    monkeypatch.setitem(__import__("sys").modules, "sklearn", None)
    with pytest.raises(MissingExtra, match=r"tersegrad\[experiments\]"):
        data.check("digits")


@pytest.mark.parametrize(
    ("text", "shape"), [("mlp(width=16, depth=0)", (1, 8, 8)), ("cnn(width=8)", (1, 8, 8)), ("cnn", (3, 32, 32))]
)
def test_networks_fit_their_images(text: str, shape: tuple[int, ...]) -> None:
    network = models.network(text).build(shape, 7)
    assert network(torch.zeros(3, *shape)).shape == (3, 7)

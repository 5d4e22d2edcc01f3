"""The tasks' data in small files, for a machine that has nothing but a checkout: ``python -m experiments.advice.small FOLDER OUT``.

``OUT/NAME.small.npz`` holds the text of a task as it is here, so that another version of torch or Python does not change it, or the first
of its images as bytes: enough that 300 steps go through them at most four times, but for digits. CIFAR-10's are at half their size, at
which its network looks at them anyway. Wherever a folder has such a file, it is the task's data; all runs that are compared with
one another read the same.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import avg_pool2d

from experiments.advice.tasks import TASKS
from tersegrad.train import data
from tersegrad.train.data import Images
from tersegrad.train.text import Text


@dataclasses.dataclass(frozen=True)
class Kept:
    """How many images are kept, and of how many pixels the mean is taken each way."""

    train: int
    test: int
    pixels: int = 1


KEPT: Mapping[str, Kept] = {"mnist": Kept(10_000, 8_000), "cifar10": Kept(6_000, 4_000, 2)}
END = ".small.npz"


@functools.cache
def loaded(name: str, folder: Path) -> Images | Text:
    """The data of a task, read once: from its small file if there is one."""
    path = folder / f"{name}{END}"
    return read(path) if path.exists() else TASKS[name].load(folder)


def write(path: Path, found: Images | Text, kept: Kept | None = None) -> None:
    """Data as a small file."""
    if isinstance(found, Text):
        np.savez_compressed(path, train=found.train.numpy(), test=found.test.numpy(), context=np.int64(found.context))
        return
    kept = kept or Kept(found.count, found.count_held_out)
    low, high = found.train.min(), found.train.max()

    def levels(images: Tensor) -> np.ndarray:
        means = avg_pool2d((images - low) / (high - low), kept.pixels)
        return (255 * means).round().clamp(0, 255).to(torch.uint8).numpy()

    np.savez_compressed(
        path,
        x=levels(found.train[: kept.train]),
        y=found.train_labels[: kept.train].numpy().astype(np.uint8),
        x_test=levels(found.test[: kept.test]),
        y_test=found.test_labels[: kept.test].numpy().astype(np.uint8),
        pixels=np.int64(kept.pixels),
    )


def read(path: Path) -> Images | Text:
    """Data from a small file; images have the size that they had."""
    name = path.name.removesuffix(END)
    with np.load(path) as held:
        if "context" in held:
            train, test = (torch.from_numpy(held[part]) for part in ("train", "test"))
            return Text(name, train, test, 256, 1.0).cut(int(held["context"]))
        x, test = (held[part].repeat(held["pixels"], 2).repeat(held["pixels"], 3) for part in ("x", "x_test"))
        return data.scaled(name, x, held["y"], test, held["y_test"])


def main() -> None:
    """Write the small files of tasks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="the folder of the tasks' folders")
    parser.add_argument("out", type=Path, help="where the small files go")
    parser.add_argument("--task", default=",".join(TASKS), help="tasks, separated by commas; else all")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    for name in args.task.split(","):
        path = args.out / f"{name}{END}"
        write(path, TASKS[name].load(args.folder), KEPT.get(name))
        print(f"{path}: {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()

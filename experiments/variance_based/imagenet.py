"""ResNet-50 on ImageNet with 16 workers x 32 images: the second experiment, from a folder of images.

    python -m experiments.variance_based.imagenet --data FOLDER --method vgc_2

``FOLDER/train`` and ``FOLDER/val`` hold one folder of images a class. Schedule: momentum 0.9, weight decay 1e-4 (not on BatchNorm or
biases), learning rate 0.1 * 512/256 after 5 epochs of linear growth from a sixteenth of it, divided by 10 after epochs 30, 60 and 80 of 90;
random crops and flips; the last BatchNorm of every block starts at zero (Goyal et al. 2017). Gradients and squares come from the
package's collector on an ordinary model, compression from the batched methods, bytes from the package's compressors.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from experiments.variance_based import batched, wire
from experiments.variance_based.batched import Buffers
from experiments.variance_based.engine import Collected
from experiments.variance_based.methods import LABELS, METHODS
from experiments.variance_based.resnet import resnet
from experiments.variance_based.train import machine, prepare

SUFFIXES = {".jpg", ".jpeg", ".png", ".bmp", ".webp"}
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


class Folder(torch.utils.data.Dataset[tuple[Tensor, int]]):
    """Images of a folder with one subfolder a class, cropped and flipped at random or in the middle."""

    def __init__(self, root: Path, size: int, train: bool) -> None:
        if not root.is_dir():
            raise FileNotFoundError(f"{root} is not there: --data needs a folder with train/CLASS/*.jpg and val/CLASS/*.jpg")
        self.classes = sorted(p.name for p in root.iterdir() if p.is_dir())
        self.items = [
            (path, label)
            for label, name in enumerate(self.classes)
            for path in sorted((root / name).iterdir())
            if path.suffix.lower() in SUFFIXES
        ]
        if not self.items:
            raise FileNotFoundError(f"{root} holds no images in folders of classes")
        self.size, self.train = size, train

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        import numpy as np
        from PIL import Image

        path, label = self.items[index]
        with Image.open(path) as opened:
            image = opened.convert("RGB")
        box = self._random_box(*image.size) if self.train else self._middle_box(*image.size)
        image = image.resize((self.size, self.size), Image.Resampling.BILINEAR, box=box)
        array = torch.from_numpy(np.array(image))  # (size, size, 3) uint8
        return (array.flip(1) if self.train and random.random() < 0.5 else array), label

    def _random_box(self, width: int, height: int) -> tuple[float, float, float, float]:
        """8 to 100 % of the area, with an aspect of 3/4 to 4/3."""
        for _ in range(10):
            area = width * height * random.uniform(0.08, 1.0)
            aspect = math.exp(random.uniform(math.log(3 / 4), math.log(4 / 3)))
            w, h = math.sqrt(area * aspect), math.sqrt(area / aspect)
            if w <= width and h <= height:
                x, y = random.uniform(0, width - w), random.uniform(0, height - h)
                return x, y, x + w, y + h
        return self._middle_box(width, height)

    def _middle_box(self, width: int, height: int) -> tuple[float, float, float, float]:
        side = min(width, height) * 224 / 256
        return (width - side) / 2, (height - side) / 2, (width + side) / 2, (height + side) / 2


@dataclasses.dataclass(frozen=True)
class Schedule:
    """The learning rate over training; epochs are scaled with the length of the run."""

    epochs: int = 90
    lr: float = 0.2
    warmup: float = 5.0
    drops: tuple[int, ...] = (30, 60, 80)

    def rate(self, epoch: float) -> float:
        """At a time in epochs.

        >>> [round(Schedule().rate(e), 5) for e in (0, 5, 30, 60, 80)]
        [0.0125, 0.2, 0.02, 0.002, 0.0002]
        """
        at = epoch * 90 / self.epochs
        if at < self.warmup:
            return self.lr * (1 / 16 + 15 / 16 * at / self.warmup)
        return self.lr * float(0.1 ** sum(at >= d for d in self.drops))


def batches(folder: Folder, size: int, workers: int, device: str, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Normalised channels-last batches; the last short one is left out in training, padded by nothing in testing."""
    loader: Any = torch.utils.data.DataLoader(
        folder,
        batch_size=size,
        shuffle=folder.train,
        drop_last=folder.train,
        num_workers=workers,
        pin_memory=device.startswith("cuda"),
        generator=torch.Generator().manual_seed(seed),
    )
    mean, rstd = 255 * torch.tensor(MEAN, device=device), 1 / (255 * torch.tensor(STD, device=device))
    for pictures, labels in loader:
        x = (pictures.to(device, non_blocking=True).float() - mean) * rstd
        yield x.permute(0, 3, 1, 2), labels.to(device, non_blocking=True)


def decays(engine: Collected, weight_decay: float) -> Tensor:
    """Weight decay of every coordinate: none for biases and BatchNorm."""
    flat = torch.zeros(engine.layout.padded)
    for name, view in engine.layout.views(flat).items():
        if dict(engine.model.named_parameters())[name].ndim > 1:
            view.fill_(weight_decay)
    return flat


def accuracy(engine: Collected, folder: Folder, options: argparse.Namespace) -> float:
    """Per cent of the test images that are classified correctly."""
    right = 0
    for x, labels in batches(folder, options.workers * options.batch, options.loaders, options.device, 0):
        right += int((engine.forward(x).argmax(1) == labels).sum())
    return 100.0 * right / len(folder)


def encoded_bytes(
    method: batched.Method, buffers: Buffers, before: dict[str, Tensor], worker: int, step: int
) -> dict[str, Any]:
    """Bytes of one worker's message of the step that has just been made."""

    def take(flat: Tensor) -> Any:
        return buffers.layout.packed(flat[worker]).cpu().numpy()

    given = {name: tensor.cpu().numpy() for name, tensor in before.items()} | {"x": take(buffers.gradient)}
    if buffers.squares is not None:
        given["s"] = take(buffers.squares)
    return wire.encode(method.forms(), buffers.layout.spec, given, step, worker, 0)


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Train and write one JSON."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--data", type=Path, required=True)
    p.add_argument("--out", type=Path, default=Path("out") / "variance_based")
    p.add_argument("--method", choices=sorted(LABELS), default="vgc_2")
    p.add_argument("--epochs", type=int, default=90)
    p.add_argument("--workers", type=int, default=16)
    p.add_argument("--batch", type=int, default=32, help="of one worker")
    p.add_argument("--lr", type=float, default=None, help="0.1 for every 256 images of a step")
    p.add_argument("--size", type=int, default=224)
    p.add_argument("--depths", type=int, nargs=4, default=(3, 4, 6, 3), help="blocks of the four stages")
    p.add_argument("--width", type=int, default=64)
    p.add_argument("--loaders", type=int, default=8, help="processes that read images")
    p.add_argument("--encode-every", type=int, default=500)
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = p.parse_args(arguments)
    prepare()
    torch.manual_seed(options.seed)
    random.seed(options.seed)
    train, test = Folder(options.data / "train", options.size, True), Folder(options.data / "val", options.size, False)
    size = options.workers * options.batch
    schedule = Schedule(options.epochs, options.lr or 0.1 * size / 256)
    engine = Collected(resnet(len(train.classes), options.depths, options.width))
    method = METHODS[options.method]
    if isinstance(method, (batched.Dense, batched.PowerSGD)):
        method = dataclasses.replace(method, workers=options.workers)
    rows = 1 if method.mode == "mean" else options.workers
    layout, device = engine.layout, options.device

    def zeros(*shape: int) -> Tensor:
        return torch.zeros(shape, device=device)

    squares = zeros(rows, layout.padded) if method.mode == "moments" else None
    words = torch.zeros(1, dtype=torch.int64, device=device)
    buffers = Buffers(layout, zeros(rows, layout.padded), squares, zeros(layout.padded), words)
    params = engine.initial().to(device)
    engine.bind(params, buffers, options.workers, method.mode)
    state = method.init(buffers, options.seed)
    decay, velocity, total = decays(engine, 1e-4).to(device), zeros(layout.padded), torch.zeros_like(words)
    steps = len(train) // size
    if not steps:
        raise ValueError(
            f"{len(train)} images do not fill one step of {options.workers} x {options.batch}: lower --workers or --batch"
        )
    samples: list[dict[str, Any]] = []
    curve: dict[str, list[float]] = {"loss": [], "accuracy": [], "ratio": []}  # by epoch
    begun, done, counted = time.perf_counter(), 0, 0
    for epoch in range(options.epochs):
        loss_sum = torch.zeros((), device=device)
        for i, (x, labels) in enumerate(batches(train, size, options.loaders, device, options.seed * 1000 + epoch)):
            lr = schedule.rate(epoch + i / steps)
            loss_sum += engine.step(x, labels)
            worker = done // options.encode_every % options.workers
            due = bool(method.forms()) and done % options.encode_every == options.encode_every - 1
            before: dict[str, Tensor] = {k: layout.packed(state[k][worker]) for k in state if due and k in ("r", "v")}
            with torch.no_grad():
                method.step(buffers, state)
                velocity.mul_(0.9).add_(buffers.mean).addcmul_(params, decay)
                params.sub_(velocity, alpha=lr)
                total += words
            if due:
                samples.append(encoded_bytes(method, buffers, before, worker, done))
            done += 1
        sent = (int(total) - counted) / (steps * options.workers)
        counted = int(total)
        curve["loss"].append(round(float(loss_sum) / steps, 5))
        curve["accuracy"].append(round(accuracy(engine, test, options), 3))
        curve["ratio"].append(round(layout.numel / sent, 2) if sent else 0.0)
        now = ", ".join(f"{name} {values[-1]:g}" for name, values in curve.items())
        print(f"epoch {epoch + 1}: {now}, {time.perf_counter() - begun:.0f} s", flush=True)
    encoded: dict[str, Any] = {"every": options.encode_every, "forms": method.forms(), "samples": samples}
    for form in method.forms():
        if samples:
            mean = sum(s[form] for s in samples) / len(samples)
            encoded[form] = {"bytes": mean, "ratio": 4 * layout.numel / mean}
    result = {
        "method": batched.describe(method),
        "kind": "imagenet",
        "config": {k: str(v) if isinstance(v, Path) else v for k, v in vars(options).items()},
        "parameters": layout.numel,
        "accuracy": curve["accuracy"][-1],
        "ratio_words": layout.numel * done * options.workers / counted if counted else None,
        "encoded": encoded,
        "curve": curve,
        "machine": machine(device),
    }
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / f"imagenet_{options.method}_s{options.seed}.json").write_text(json.dumps(result) + "\n")
    return result


if __name__ == "__main__":
    main()

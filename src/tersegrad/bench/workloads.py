"""Models to plan for: the parameters' sizes and the seconds of a step, of known models or of a user's own.

For the known models the seconds follow from their multiply-adds and the speed of a matrix product here, of which a training step is
assumed to reach a half; a user's own model is run.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import math
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tersegrad.core.errors import BadConfiguration
from tersegrad.core.text import require
from tersegrad.planner import Workload
from tersegrad.planner.coding import waiting
from tersegrad.planner.plan import GPU_GROUP

REACHED = 0.5  # share of a matrix product's speed that a training step reaches


@dataclasses.dataclass(frozen=True)
class Model:
    """A workload, how its seconds were found, and a gradient if there is one."""

    workload: Workload
    how: str
    gradient: Tensor | None = None


def resnet50() -> list[int]:
    """The parameters of ResNet-50, in the order of torchvision's.

    >>> sum(resnet50())
    25557032
    """
    sizes, wide = [64 * 3 * 49, 64, 64], 64
    for blocks, width in zip((3, 4, 6, 3), (64, 128, 256, 512)):
        for block in range(blocks):
            for a, b, area in ((wide, width, 1), (width, width, 9), (width, 4 * width, 1)):
                sizes += [a * b * area, b, b]
            if block == 0:
                sizes += [wide * 4 * width, 4 * width, 4 * width]
            wide = 4 * width
    return [*sizes, 2048 * 1000, 1000]


def gpt2() -> list[int]:
    """The parameters of the smallest GPT-2, output tied to the embedding.

    >>> sum(gpt2())
    124439808
    """
    d = 768
    block = [d, d, d * 3 * d, 3 * d, d * d, d, d, d, d * 4 * d, 4 * d, 4 * d * d, d]
    return [50257 * d, 1024 * d, *(12 * block), d, d]


# Sizes, multiply-adds of one sample's forward pass, and what a sample is.
KNOWN: dict[str, tuple[Callable[[], list[int]], float, str]] = {
    "resnet50": (resnet50, 4.1e9, "image of 224 x 224"),
    "gpt2": (gpt2, 1024 * (124_439_808 - 1024 * 768) + 12 * 2 * 1024 * 1024 * 768, "sequence of 1024 tokens"),
}


def model(text: str, batch: int = 32, device: str = "cpu", backward: float | None = None) -> Model:
    """The model that ``text`` names: resnet50, gpt2, or PATH:FUNCTION.

    The function takes nothing and returns a module, or a pair of a module and a function that computes a loss; the latter is run
    here, so that the seconds and the gradient are its own. ``backward``: seconds, where they are known; the forward pass takes half of it.
    """
    require(batch >= 1, f"a batch has at least one sample, got {batch}")
    if text in KNOWN:
        sizes, operations, sample = KNOWN[text]
        if backward is None:
            forward = batch * operations / (REACHED * multiply_adds(device))
            return Model(
                Workload(text, tuple(sizes()), forward, 2 * forward),
                f"{batch} samples (one: {sample}) per worker and step, at half the speed of a matrix product here",
            )
        return Model(Workload(text, tuple(sizes()), backward / 2, backward), "the time of the backward pass was given")
    path, colon, name = text.rpartition(":")
    if not colon or not name.isidentifier():
        raise BadConfiguration(f"a model is {', '.join(KNOWN)} or PATH:FUNCTION, as in train.py:build, got {text!r}")
    made = _call(Path(path), name)
    module, loss = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not isinstance(module, nn.Module) or not (loss is None or callable(loss)):
        raise BadConfiguration(
            f"{text} returns a module, or a pair of a module and a function that computes a loss, got {made!r}"
        )
    return own(module, loss, text, backward, device)


def on(device: str, found: Model) -> Model:
    """The same model on a device: groups are larger on a GPU."""
    if not device.startswith("cuda"):
        return found
    return dataclasses.replace(found, workload=dataclasses.replace(found.workload, group_bytes=GPU_GROUP))


def own(
    module: nn.Module, loss: Callable[[], Tensor] | None, name: str, backward: float | None = None, device: str = "cpu"
) -> Model:
    """A module of the user's; with a loss it is run for some steps."""
    parameters = [p for p in module.parameters() if p.requires_grad]
    sizes = tuple(p.numel() for p in parameters)
    require(bool(sizes), f"{name}: the module has no parameters to train")
    if loss is None:
        require(
            backward is not None,
            f"{name} gives no loss to run: return (module, loss) with a function that computes it, or say --backward-ms",
        )
        assert backward is not None
        return Model(Workload(name, sizes, backward / 2, backward), "the time of the backward pass was given")
    wait = waiting(torch.device(device))
    samples: list[tuple[float, float]] = []
    begin = time.perf_counter()
    while len(samples) < 4 or (len(samples) < 20 and time.perf_counter() - begin < 3):
        module.zero_grad()
        wait()
        start = time.perf_counter()
        value = loss()
        wait()
        middle = time.perf_counter()
        value.backward()
        wait()
        samples.append((middle - start, time.perf_counter() - middle))
    gradient = torch.cat(
        [torch.zeros_like(p).reshape(-1) if p.grad is None else p.grad.reshape(-1).float() for p in parameters]
    )
    forward, measured = (statistics.median(times) for times in zip(*samples[1:]))
    how = "forward and backward were run here" if backward is None else "the forward pass was run here"
    return Model(Workload(name, sizes, forward, measured if backward is None else backward), how, gradient.detach())


def _call(path: Path, name: str) -> Any:
    """What a function of a file returns."""
    require(path.is_file(), f"there is no file {path}")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    require(spec is not None and spec.loader is not None, f"{path} is not a Python file")
    assert spec is not None
    assert spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(loaded)
    except Exception as error:
        raise BadConfiguration(f"{path} cannot be imported: {type(error).__name__}: {error}") from error
    function = getattr(loaded, name, None)
    require(callable(function), f"{path} has no function {name}")
    assert callable(function)
    try:
        return function()
    except Exception as error:
        raise BadConfiguration(f"{path}:{name}() failed: {type(error).__name__}: {error}") from error


def multiply_adds(device: str = "cpu", side: int = 1024, budget: float = 0.5) -> float:
    """Multiply-adds per second of a matrix product: float32 on a CPU, bfloat16 on a GPU."""
    dtype = torch.bfloat16 if device.startswith("cuda") else torch.float32
    side = 8192 if device.startswith("cuda") else side
    a = torch.ones(side, side, dtype=dtype, device=device)
    wait = waiting(torch.device(device))
    taken: list[float] = []
    begin = time.perf_counter()
    while len(taken) < 4 or (len(taken) < 30 and time.perf_counter() - begin < budget):
        wait()
        start = time.perf_counter()
        a @ a
        wait()
        taken.append(time.perf_counter() - start)
    return math.pow(side, 3) / statistics.median(taken[1:])

"""Whole training steps on one GPU: ``python -m benchmarks.gpu_steps alone [--only PATTERN] [--tiny] [--json FILE]``.

``alone``: one process, DistributedDataParallel over a group of one rank, a ResNet-50 and a transformer of 124 million parameters, in
bfloat16 autocast. Every method codes as it does among many ranks: it encodes, and decodes what it has sent. The methods take turns, a
few steps each, and medians are shown: milliseconds per step, the ratio to a step without a hook, what the hook adds, what the same
exchange takes by itself (the same gradients, from a backward pass that only copies them), hence how much was hidden; host
synchronisations, message bytes, the error of the first gradient, and memory.

Methods are texts, ``compressor + exchange`` (:mod:`benchmarks.methods`). ``float32`` is DDP without a hook, ``bf16`` torch's own hook.
``--tiny`` takes small networks on the CPU. Needs torch, Triton and this package's sources on the path, nothing else.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import fnmatch
import gc
import itertools
import json
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.gpu import operations, overlaid, synchronisations
from benchmarks.methods import Method
from benchmarks.resnet import ResNet, resnet50
from tersegrad.report.tables import Column, Table
from tersegrad.train.gpt import GPT

DENSE = "float32"
COMPRESSORS = (
    "bf16", "qsgd(bits=4, norm=max)", "error_feedback(sparse_dithering(nu=0.1))", "top_k(fraction=0.01)",
    "error_feedback(top_k(fraction=0.01))",
)  # fmt: skip
ALONE = (
    DENSE, "bf16", *(f"{c} + {e}" for e in ("all_gather", "two_shot") for c in COMPRESSORS), "power_sgd(rank=4)",
    "vgc(alpha=2) + all_gather",
)  # fmt: skip


def say(text: str) -> None:
    """Progress."""
    print(text, file=sys.stderr, flush=True)


# ------------------------------------------------------------------------------------------------------------------ what is trained


@dataclasses.dataclass(frozen=True)
class Task:
    """A network, its batch and its optimiser."""

    name: str
    build: Callable[[], nn.Module]
    batch: Callable[[], tuple[Tensor, Tensor]]
    optimiser: Callable[[Sequence[Tensor]], torch.optim.Optimizer]


def channels_last(value: Any) -> Any:
    """A network or images in the layout that convolutions are fastest in."""
    return value.to(memory_format=torch.channels_last)


def images(build: Callable[[], nn.Module], batch: int, side: int) -> Task:
    """Random images in 10 classes, with momentum."""
    return Task(
        f"resnet, {batch} images of {side} x {side}",
        lambda: channels_last(build()),
        lambda: (channels_last(torch.randn(batch, 3, side, side)), torch.randint(10, (batch,))),
        lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9, fused=True),
    )


def language(vocabulary: int, layers: int, width: int, heads: int, batch: int, length: int) -> Task:
    """Random tokens, with AdamW; the head shares the embedding's weights."""

    def build() -> nn.Module:
        model = GPT(vocabulary, layers, width, heads)
        model.head.weight = model.embedding.weight
        return model

    def tokens() -> Tensor:
        return torch.randint(vocabulary, (batch, length))

    return Task(
        f"transformer, {batch} x {length} tokens",
        build,
        lambda: (tokens(), tokens()),
        lambda parameters: torch.optim.AdamW(parameters, lr=1e-4, fused=True),
    )


def tasks(tiny: bool, batch: int) -> dict[str, Task]:
    """The networks by short name; ``batch`` is that of the large transformer."""
    if tiny:
        return {"resnet": images(lambda: ResNet((1, 1, 1, 1), 8, 10), 4, 32), "transformer": language(257, 2, 64, 2, 2, 32)}
    return {"resnet": images(resnet50, 64, 224), "transformer": language(50257, 12, 768, 12, batch, 1024)}


class Copies(nn.Module):
    """Parameters whose gradients are given: a backward pass that only copies."""

    def __init__(self, gradients: Sequence[Tensor]) -> None:
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(torch.zeros_like(g)) for g in gradients])
        self.given = list(gradients)

    def forward(self) -> Tensor:
        return torch.stack([(w * g).sum() for w, g in zip(self.weights, self.given)]).sum()


class Training:
    """One network that one method trains."""

    def __init__(self, task: Task, text: str, device: torch.device, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.device = device
        self.model = DistributedDataParallel(task.build().to(device), gradient_as_bucket_view=True)
        self.handle = Method.parse(text).attach(self.model, 0)
        self.parameters = list(self.model.module.parameters())
        self.optimiser = task.optimiser(self.parameters)
        torch.manual_seed(1000 + dist.get_rank())
        self.inputs, self.targets = (x.to(device) for x in task.batch())

    def backward(self) -> None:
        self.optimiser.zero_grad()
        with torch.autocast(self.device.type, torch.bfloat16):
            logits = self.model(self.inputs)
            self.loss = nn.functional.cross_entropy(logits.flatten(0, -2), self.targets.flatten())
        self.loss.backward()

    def step(self) -> None:
        self.backward()
        self.optimiser.step()

    def check(self) -> None:
        """Raise unless the loss is a number and no step was dropped."""
        if not bool(torch.isfinite(self.loss)):
            raise ArithmeticError(f"the loss is {float(self.loss)}")
        if self.handle is not None and self.handle.report().get("steps/dropped"):
            raise ArithmeticError("steps were dropped: a mean was not finite")


# ------------------------------------------------------------------------------------------------------------------------- clocks


def lap(step: Callable[[], object], count: int, device: torch.device) -> list[float]:
    """Seconds of so many steps after one that is not counted; a GPU is waited for after the last one alone."""
    step()
    if device.type != "cuda":
        times = [time.perf_counter()]
        for _ in range(count):
            step()
            times.append(time.perf_counter())
        return [b - a for a, b in itertools.pairwise(times)]
    events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    events[0].record()
    for event in events[1:]:
        step()
        event.record()
    torch.cuda.synchronize(device)
    return [a.elapsed_time(b) / 1e3 for a, b in itertools.pairwise(events)]


def waits(step: Callable[[], object], device: torch.device) -> int:
    """Host synchronisations of a step; none where there is no device to wait for."""
    return synchronisations(step) if device.type == "cuda" else 0


def allocated(device: torch.device) -> int:
    """Device memory in use, from where :func:`peak` begins to look."""
    if device.type != "cuda":
        return 0
    torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.memory_allocated(device)


def peak(device: torch.device) -> int:
    """The most device memory in use since :func:`allocated`."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0


# -------------------------------------------------------------------------------------------------------------------------- alone


@dataclasses.dataclass
class Row:
    """One line of the table of ``alone``; seconds and bytes. ``by_itself`` is None for what needs a real network."""

    network: str
    method: str
    parameters: int
    step: float
    ratio: float
    added: float
    by_itself: float | None
    hidden: float | None
    waits: int
    groups: int
    message: float
    error: float
    state: int
    buffers: int
    peak: int
    samples: list[float]


@dataclasses.dataclass
class Entry:
    """A method while it is measured."""

    text: str
    training: Training
    error: float
    peak: int
    samples: list[float] = dataclasses.field(default_factory=list)
    by_itself: float | None = None


def relative_error(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> float:
    error = sum((a.double() - b.double()).square().sum() for a, b in zip(found, wanted))
    return float(error / sum(b.double().square().sum() for b in wanted))


def first_gradients(task: Task, device: torch.device) -> list[Tensor]:
    """What every method exchanges in its first step."""
    training = Training(task, DENSE, device)
    training.backward()
    return [p.grad.detach().clone() for p in training.parameters if p.grad is not None]


def prepare(task: Task, text: str, device: torch.device, warm: int, exact: Sequence[Tensor]) -> Entry:
    """A method after ``warm`` steps, with the error of its first gradients and the memory that the others took."""
    before = allocated(device)
    training = Training(task, text, device)
    training.backward()
    error = relative_error([p.grad for p in training.parameters if p.grad is not None], exact)
    training.optimiser.step()
    allocated(device)
    for _ in range(warm - 1):
        training.step()
    training.check()
    if not math.isfinite(error):
        raise ArithmeticError(f"the first gradients have an error of {error}")
    return Entry(text, training, error, peak(device) - before)


def by_itself(text: str, gradients: Sequence[Tensor], device: torch.device, count: int) -> float:
    """Seconds of an exchange of these gradients while nothing is computed."""
    model = DistributedDataParallel(Copies(gradients).to(device), gradient_as_bucket_view=True)
    Method.parse(text).attach(model, 0)

    def step() -> None:
        model.zero_grad()
        model().backward()

    for _ in range(3):
        step()
    return statistics.median(lap(step, count, device))


def measure(
    task: Task, texts: Sequence[str], device: torch.device, *, warm: int, rounds: int, steps: int
) -> tuple[list[Row], list[str]]:
    """The rows of one network, and the methods that failed with the reason."""
    entries: list[Entry] = []
    exact = first_gradients(task, device)
    failed: list[str] = []
    for text in texts:
        say(f"{task.name}: {text}")
        try:
            entries.append(prepare(task, text, device, warm, exact))
        except Exception as error:
            failed.append(f"{task.name}: {text}: {type(error).__name__}: {error}")
            say(failed[-1])
        gc.collect()
    for number in range(rounds):
        say(f"{task.name}: round {number + 1} of {rounds}")
        for entry in entries:
            if entry.training.handle is not None and number == 0:
                entry.training.handle.reset_report()
            entry.samples += lap(entry.training.step, steps, device)
    rows = [row(task, entry, exact, entries[0], device, steps) for entry in entries]
    return rows, failed


def row(task: Task, entry: Entry, exact: Sequence[Tensor], dense: Entry, device: torch.device, steps: int) -> Row:
    """The line of a method, from its samples and its handle."""
    training, seconds = entry.training, statistics.median(entry.samples)
    training.check()
    counted = waits(training.step, device)
    numel = sum(p.numel() for p in training.parameters)
    report: dict[str, Any] = {} if training.handle is None else dict(training.handle.report())
    bits = float(report.get("bits_per_coordinate", 32 if entry.text == DENSE else 16))
    added = seconds - statistics.median(dense.samples)
    # What decides by variance needs the second moments of a real backward pass.
    if training.handle is None or not any(lane.by_variance for lane in training.handle.engine.lanes):
        entry.by_itself = by_itself(entry.text, exact, device, steps)
    alone = None
    if entry.by_itself is not None and dense.by_itself is not None:
        alone = entry.by_itself - dense.by_itself
    return Row(
        network=task.name, method=str(Method.parse(entry.text)), parameters=numel, step=seconds,
        ratio=seconds / statistics.median(dense.samples), added=added, by_itself=alone,
        hidden=None if alone is None else alone - added, waits=counted, groups=int(report.get("groups", 0)),
        message=bits * numel / 8, error=entry.error, state=int(report.get("state/bytes", 0)),
        buffers=int(report.get("buffers/bytes", 0)), peak=entry.peak - dense.peak, samples=entry.samples,
    )  # fmt: skip


def table(rows: Sequence[Row]) -> str:
    """The rows of one network as Markdown."""
    titles = [
        "ms per step",
        "x no hook",
        "ms added",
        "ms by itself",
        "ms hidden",
        "host waits",
        "groups",
        "message MB",
        "error",
    ]
    titles += ["state MB", "buffers MB", "peak MB more"]
    columns = [Column("method", number=False), *map(Column, titles)]
    lines = []
    for r in rows:
        times = [f"{1e3 * r.step:.2f}", f"{r.ratio:.3f}", f"{1e3 * r.added:.2f}"]
        times += ["-" if t is None else f"{1e3 * t:.2f}" for t in (r.by_itself, r.hidden)]
        sizes = [f"{r.message / 1e6:.2f}", f"{r.error:.2e}", *(f"{n / 1e6:.1f}" for n in (r.state, r.buffers, r.peak))]
        lines.append((f"`{r.method}`", *times, str(r.waits), str(r.groups), *sizes))
    title = f"{rows[0].network}, {rows[0].parameters:,} parameters" if rows else "nothing was measured"
    return Table(tuple(columns), tuple(lines), title).markdown()


def alone(options: argparse.Namespace, device: torch.device) -> tuple[list[Any], list[str]]:
    """The tables of one process."""
    rows: list[Row] = []
    failed: list[str] = []
    warm, rounds, steps = (2, 1, 2) if options.tiny else (5, 4, 5)
    with group_of_one(device):
        for name, task in tasks(options.tiny, options.batch).items():
            if name not in options.networks:
                continue
            found, broken = measure(task, chosen(ALONE, options.only), device, warm=warm, rounds=rounds, steps=steps)
            print(table(found), end="\n\n", flush=True)
            rows += found
            failed += broken
            gc.collect()
    return rows, failed


@contextlib.contextmanager
def group_of_one(device: torch.device) -> Iterator[None]:
    """A process group of this process alone: NCCL on a GPU, else gloo."""
    with tempfile.TemporaryDirectory() as folder:
        where: dict[str, Any] = {"init_method": f"file://{Path(folder) / 'store'}", "rank": 0, "world_size": 1}
        if device.type == "cuda":
            dist.init_process_group("nccl", device_id=device, **where)
        else:
            dist.init_process_group("gloo", **where)
        try:
            yield
        finally:
            dist.destroy_process_group()


def chosen(texts: Sequence[str], only: Sequence[str]) -> list[str]:
    """The first method, which others are compared with, and those whose text contains or globs one of ``only`` (all without any)."""
    return [t for t in texts if not only or t == texts[0] or any(p in t or fnmatch.fnmatch(t, p) for p in only)]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("part", choices=["alone"])
    parser.add_argument("--only", nargs="*", default=[], help="methods whose text contains or globs one of these")
    parser.add_argument("--networks", nargs="*", default=["resnet", "transformer"], choices=["resnet", "transformer"])
    parser.add_argument("--batch", type=int, default=12, help="sequences of 1024 tokens per step of the transformer")
    parser.add_argument("--tiny", action="store_true", help="small networks on the CPU")
    parser.add_argument("--json", default="")
    options = parser.parse_args(arguments)
    if not options.tiny and not torch.cuda.is_available():
        print("torch sees no CUDA device; --tiny runs small networks on the CPU", file=sys.stderr)
        return 2
    device = torch.device("cpu") if options.tiny else torch.device("cuda", torch.cuda.current_device())
    begin = time.perf_counter()
    with contextlib.ExitStack() as stack:
        machine = f"{'CPU' if options.tiny else torch.cuda.get_device_name()}, torch {torch.__version__}"
        if device.type == "cuda":
            made = operations()
            stack.enter_context(overlaid(made))
            machine += f", {len(made.sources)} operations overlaid"
        print(machine, flush=True)
        rows, failed = alone(options, device)
    if options.json:
        document = {"machine": machine, "part": options.part, "rows": [dataclasses.asdict(r) for r in rows], "failed": failed}
        Path(options.json).write_text(json.dumps(document, indent=1), encoding="utf-8")
    for line in failed:
        say(line)
    say(f"{time.perf_counter() - begin:.0f} s")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

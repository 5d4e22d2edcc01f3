"""Whole training steps on one GPU: ``python -m benchmarks.gpu_steps alone|links [--only PATTERN] [--tiny] [--json FILE]``.

``alone``: one process, DistributedDataParallel over a group of one rank, a ResNet-50 and a transformer of 124 million parameters, in
bfloat16 autocast. Every method codes as it does among many ranks: it encodes, and decodes what it has sent. The methods take turns, a
few steps each, and medians are shown: milliseconds per step, the ratio to a step without a hook, what the hook adds, what the same
exchange takes by itself (the same gradients, from a backward pass that only copies them), hence how much was hidden; host
synchronisations, message bytes, the error of the first gradient, and memory.

``links``: four processes share the GPU and a gloo group; each is in a network namespace whose link has a limited rate
(:mod:`benchmarks.network`, as root), or limits itself where the kernel cannot (:mod:`benchmarks.throttle`). Seconds per step of the
transformer, from the first process's begin to the last one's end, how many times faster that is than bfloat16 and PowerSGD, and the
bytes that left a process.

Methods are texts, ``compressor + exchange`` (:mod:`benchmarks.methods`). ``float32`` is DDP without a hook, ``bf16`` torch's own hook.
``--tiny`` takes small networks on the CPU. Needs torch, Triton and this package's sources on the path, nothing else.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import fnmatch
import functools
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
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.gpu import synchronisations
from benchmarks.methods import Method
from benchmarks.network import HEADERS, Hosts, Network, NoNetwork, interruptible, parse_rate, rate_text, why_not
from benchmarks.resnet import ResNet, resnet50
from benchmarks.throttle import NoCompiler, Throttled
from tersegrad.report.tables import Column, Table, number
from tersegrad.train.gpt import GPT

T = TypeVar("T")
MODULE = "benchmarks.gpu_steps"  # by which the processes of links know it
SLOW = 0.5  # seconds; a step that takes longer is timed once
DENSE = "float32"
COMPRESSORS = (
    "bf16", "qsgd(bits=4, norm=max)", "error_feedback(sparse_dithering(nu=0.1))", "top_k(fraction=0.01)",
    "error_feedback(top_k(fraction=0.01))",
)  # fmt: skip
LARGE = 1 << 27  # bytes of gradient per message, where the usual 25 MiB cost the host too many launches


def alone_methods(sizes: Sequence[int]) -> list[str]:
    """What one process measures, in groups of the usual size and of these."""
    exchanges = ["all_gather", *(f"all_gather(group_bytes={size})" for size in sizes)]
    return [
        DENSE,
        "bf16",
        *(f"{c} + {e}" for e in exchanges for c in COMPRESSORS),
        "power_sgd(rank=4)",
        "vgc(alpha=2) + all_gather",
    ]


LINKS = (
    "bf16", "power_sgd(rank=4)", "qsgd(bits=4, norm=max)", "error_feedback(sparse_dithering(nu=0.1))",
    "error_feedback(top_k(fraction=0.01))",
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
        with device:
            network = task.build()
        self.model = DistributedDataParallel(network, gradient_as_bucket_view=True)
        self.handle = Method.parse(text).attach(self.model, 0)
        self.parameters = list(self.model.module.parameters())
        self.optimiser = task.optimiser(self.parameters)
        torch.manual_seed(1000 + dist.get_rank())
        with device:
            self.inputs, self.targets = task.batch()

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
    slow: bool
    samples: list[float] = dataclasses.field(default_factory=list)
    by_itself: float | None = None

    def turn(self, number: int, steps: int) -> int:
        """Take this method's turn; how many samples there are now."""
        if self.training.handle is not None and number == 0:
            self.training.handle.reset_report()
        if not (number and self.slow):
            self.samples += lap(self.training.step, 1 if self.slow else steps, self.training.device)
        return len(self.samples)


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
        begun = time.perf_counter()
        training.step()
        # The check waits for the device.
        training.check()
    if not math.isfinite(error):
        raise ArithmeticError(f"the first gradients have an error of {error}")
    return Entry(text, training, error, peak(device) - before, time.perf_counter() - begun > SLOW)


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
    failed: list[str] = []

    def attempt(text: str, body: Callable[[], T]) -> T | None:
        try:
            return body()
        except Exception as error:
            if text == DENSE:
                raise
            failed.append(f"{task.name}: {text}: {type(error).__name__}: {error}")
            say(failed[-1])
            return None

    exact = first_gradients(task, device)
    entries: dict[str, Entry] = {}
    for text in texts:
        say(f"{task.name}: {text}")
        entry = attempt(text, functools.partial(prepare, task, text, device, warm, exact))
        if entry is not None:
            entries[text] = entry
        gc.collect()
    for turn in range(rounds):
        say(f"{task.name}: round {turn + 1} of {rounds}")
        for text, entry in list(entries.items()):
            if attempt(text, functools.partial(entry.turn, turn, steps)) is None:
                del entries[text]
    rows = [attempt(text, functools.partial(row, task, e, exact, entries[DENSE], steps)) for text, e in entries.items()]
    return [r for r in rows if r is not None], failed


def row(task: Task, entry: Entry, exact: Sequence[Tensor], dense: Entry, steps: int) -> Row:
    """The line of a method, from its samples and its handle."""
    training, seconds = entry.training, statistics.median(entry.samples)
    device = training.device
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
            texts = chosen(alone_methods(options.group_bytes), options.only)
            found, broken = measure(task, texts, device, warm=warm, rounds=rounds, steps=steps)
            print(table(found), end="\n\n", flush=True)
            rows += found
            failed += broken
            gc.collect()
    return rows, failed


# -------------------------------------------------------------------------------------------------------------------------- links

# What begin has made in this process.
NOW: dict[str, Training] = {}


def begin(size: int, text: str, tiny: bool, batch: int, warm: int) -> None:
    """A job of every process: make network and method, and take ``warm`` steps."""
    device = device_of(tiny)
    NOW.clear()
    gc.collect()
    NOW["training"] = Training(tasks(tiny, batch)["transformer"], text, device)
    for _ in range(warm):
        NOW["training"].step()
    NOW["training"].check()


def timed(size: int, count: int, exchange: bool) -> dict[str, Any]:
    """A job of every process: begin and end of so many steps, each begun together, with or without the exchange."""
    training, times = NOW["training"], []
    if training.handle is not None:
        training.handle.reset_report()
    with contextlib.nullcontext() if exchange else training.model.no_sync():
        for _ in range(count):
            if training.device.type == "cuda":
                torch.cuda.synchronize()
            dist.barrier()
            begun = time.perf_counter()
            training.step()
            if training.device.type == "cuda":
                torch.cuda.synchronize()
            times.append((begun, time.perf_counter()))
    training.check()
    if training.handle is not None and exchange:
        training.handle.check_replicas()
    return {"times": times, "report": None if training.handle is None else training.handle.report()}


@dataclasses.dataclass
class LinkRow:
    """One line of the table of ``links``; seconds and bytes."""

    method: str
    ranks: int
    rate: float | None
    step: float
    sent: float
    message: float
    drops: int
    samples: list[float]
    report: dict[str, Any] | None


class Links:
    """Processes on limited links; those that have failed are replaced."""

    def __init__(self, options: argparse.Namespace, network: Network | Throttled) -> None:
        self.options, self.network, self.rate = options, network, parse_rate(options.rate)
        self._hosts: Hosts | None = None

    def run(self, job: str, *arguments: Any) -> list[Any]:
        """Do a job in every process."""
        if self._hosts is None:
            self._hosts = Hosts(self.network, timeout=180).__enter__()
        try:
            return self._hosts.run(job, *arguments)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        if self._hosts is not None:
            self._hosts.close()
        self._hosts = None

    def measured_rate(self) -> float:
        """Bits per second that plain TCP moves when every process sends to the next."""
        nbytes = round((self.rate or 4e9) / 16)
        addresses = [self.network.address(k) for k in range(self.network.size)]
        return float(8 * nbytes / max(self.run("raw", addresses, nbytes)))

    def start(self, text: str) -> None:
        """Make the networks, and warm up, without a limit."""
        self.network.limit(None)
        self.run(f"{MODULE}.begin", text, self.options.tiny, self.options.batch, 2)

    def steps(self, count: int, exchange: bool = True) -> tuple[list[float], list[Any]]:
        """Seconds of so many steps, and what the processes report."""
        found = self.run(f"{MODULE}.timed", count, exchange)
        times = [max(e for _, e in together) - min(b for b, _ in together) for together in zip(*(f["times"] for f in found))]
        return times, [f["report"] for f in found]

    def measure(self, text: str) -> LinkRow:
        """One line of the table: after one step over the limited link, as many as fit into a few seconds."""
        self.start(text)
        self.network.limit(self.rate)
        (first,), _ = self.steps(1)
        count = min(10, max(2, int((1 if self.options.tiny else 6) / first)))
        before, drops = self.network.sent(), self.network.drops()
        times, reports = self.steps(count)
        sent = statistics.median(b - a for a, b in zip(before, self.network.sent())) / count
        report = reports[0]
        message = 16.0 if report is None else float(report["bits_per_coordinate"])
        lost = self.network.drops() - drops
        return LinkRow(
            str(Method.parse(text)), self.network.size, self.rate, statistics.median(times), sent, message, lost, times, report
        )


def links(options: argparse.Namespace) -> tuple[list[Any], list[str], dict[str, Any]]:
    """The table of several processes on limited links."""
    rows: list[LinkRow] = []
    failed: list[str] = []
    reason = "asked for" if options.throttle else why_not()
    limit = "namespaces, token buckets of the kernel" if reason is None else f"token buckets in the processes ({reason})"
    kind = Network if reason is None else Throttled
    with interruptible(), kind(options.ranks) as network, contextlib.closing(Links(options, network)) as made:
        say(f"{options.ranks} processes at {rate_text(made.rate)}: {limit}")
        network.limit(made.rate)
        moved = made.measured_rate()
        say(f"plain TCP moves {rate_text(float(f'{moved:.3g}'))}")
        if made.rate is not None and not 0.7 * made.rate / HEADERS <= moved <= 1.1 * made.rate / HEADERS:
            failed.append(
                f"the limit of {rate_text(made.rate)} gives {rate_text(float(f'{moved:.3g}'))}: the table means little"
            )
        made.start(DENSE)
        compute = statistics.median(made.steps(3, exchange=False)[0])
        say(f"without an exchange: {compute:.3f} s per step")
        for text in chosen(LINKS, options.only):
            try:
                rows.append(made.measure(text))
                say(f"{text}: {rows[-1].step:.3f} s per step")
            except (RuntimeError, ArithmeticError) as error:
                failed.append(f"{text}: {error}")
                say(failed[-1])
    facts = {"limit": limit, "rate": made.rate, "plain TCP": moved, "without an exchange": compute}
    print(link_table(rows, tasks(options.tiny, options.batch)["transformer"].name, facts), end="\n\n", flush=True)
    return rows, failed, facts


def link_table(rows: Sequence[LinkRow], network: str, facts: dict[str, Any]) -> str:
    """The rows of ``links`` as Markdown."""
    steps = {r.method: r.step for r in rows}
    columns = [Column("method", number=False)]
    columns += map(Column, ["s per step", "x bf16", "x PowerSGD", "bits per coordinate", "MB sent", "packets dropped"])
    lines = []
    for r in rows:
        ratios = [number(steps[str(Method.parse(m))] / r.step if str(Method.parse(m)) in steps else None) for m in LINKS[:2]]
        cells = (f"{r.step:.3f}", *ratios, number(r.message), number(r.sent / 1e6), str(r.drops))
        lines.append((f"`{r.method}`", *cells))
    ranks = rows[0].ranks if rows else 0
    moved, compute = rate_text(float(f"{facts['plain TCP']:.3g}")), facts["without an exchange"]
    title = f"{network}, {ranks} processes at {rate_text(facts['rate'])}"
    note = f"Links: {facts['limit']}; plain TCP moves {moved}. Without an exchange: {compute:.3f} s."
    return Table(tuple(columns), tuple(lines), title, note).markdown()


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


def device_of(tiny: bool) -> torch.device:
    return torch.device("cpu") if tiny else torch.device("cuda", torch.cuda.current_device())


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("part", choices=["alone", "links"])
    parser.add_argument("--only", nargs="*", default=[], help="methods whose text contains or globs one of these")
    parser.add_argument("--networks", nargs="*", default=["resnet", "transformer"], choices=["resnet", "transformer"])
    parser.add_argument("--batch", type=int, default=12, help="sequences of 1024 tokens per step of the transformer")
    parser.add_argument("--group-bytes", type=int, nargs="*", default=[LARGE], help="of gradient per message, beside the usual")
    parser.add_argument("--ranks", type=int, default=4, help="processes of links")
    parser.add_argument("--rate", default="", help="of a link: 100mbit, 1gbit, ... or unlimited (1gbit; 20mbit with --tiny)")
    parser.add_argument("--throttle", action="store_true", help="limit links in the processes, not by the kernel")
    parser.add_argument("--tiny", action="store_true", help="small networks on the CPU")
    parser.add_argument("--json", default="")
    options = parser.parse_args(arguments)
    options.rate = options.rate or ("20mbit" if options.tiny else "1gbit")
    if not options.tiny and not torch.cuda.is_available():
        print("torch sees no CUDA device; --tiny runs small networks on the CPU", file=sys.stderr)
        return 2
    begun = time.perf_counter()
    facts: dict[str, Any] = {}
    machine = f"{'CPU' if options.tiny else torch.cuda.get_device_name()}, torch {torch.__version__}"
    print(machine, flush=True)
    try:
        if options.part == "alone":
            rows, failed = alone(options, device_of(options.tiny))
        else:
            rows, failed, facts = links(options)
    except (NoCompiler, NoNetwork, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("stopped; what was made is removed", file=sys.stderr)
        return 130
    if options.json:
        document = {"machine": machine, "part": options.part, **facts, "rows": [dataclasses.asdict(r) for r in rows]}
        Path(options.json).write_text(json.dumps({**document, "failed": failed}, indent=1), encoding="utf-8")
    for line in failed:
        say(line)
    say(f"{time.perf_counter() - begun:.0f} s")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

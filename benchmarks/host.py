"""What one host of ``benchmarks.cluster`` runs: a process in its own network namespace that is told what to measure.

All hosts are on one machine and read the same monotonic clock, so a time is taken from the first host's start to the last one's
end. Jobs are functions that take a group size first; the caller gives their names, in full where they are not below.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import gzip
import importlib
import itertools
import os
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

import tersegrad
from benchmarks.methods import Call, Method, all_reduce
from benchmarks.vectors import What, describe, vectors
from tersegrad.core import buffers
from tersegrad.core.protocol import Compressor, Context, Message, Piece, Spec, Stats, needs_second_moment
from tersegrad.core.state import slice_spec
from tersegrad.core.sums import decode_sum
from tersegrad.engine import GROUP_BYTES, Settings
from tersegrad.engine.meter import Meter, TimedGroup, Watched, watch
from tersegrad.exchange import AllGather, AllToAll, Pipeline, ProcessGroup, start
from tersegrad.exchange.two_shot import for_means, layout
from tersegrad.integrations import ddp
from tersegrad.kernels import native
from tersegrad.moments import Collector
from tersegrad.planner import Link, Measured, measure_coding, measure_link
from tersegrad.planner.coding import measure_cast
from tersegrad.wrappers import ErrorFeedback

PORT = 29400
SETTLED = 40  # steps of a new network after which its messages are about as long as later on


@dataclasses.dataclass(frozen=True)
class Sample:
    """One timed exchange on one host."""

    begin: float
    end: float
    sent: int
    encode: float = 0.0
    decode: float = 0.0
    waited: float = 0.0


TRAINING: dict[str, Training] = {}  # what begin_training made


class World:
    """The process groups that this host is in."""

    rank = 0
    groups: dict[int, dist.ProcessGroup] = {}  # noqa: RUF012

    @classmethod
    def barrier(cls, size: int) -> None:
        dist.barrier(group=cls.groups[size])


# --------------------------------------------------------------------------------------------------------------- raw transfer


def raw(size: int, addresses: list[str], nbytes: int) -> float:
    """Every host sends ``nbytes`` to the next one over plain TCP at the same time; seconds until all that it receives is there."""
    rank = World.rank
    with socket.create_server((addresses[rank], PORT)) as server, contextlib.ExitStack() as stack:
        World.barrier(size)
        out = stack.enter_context(socket.create_connection((addresses[(rank + 1) % size], PORT), timeout=60))
        into, _ = server.accept()
        stack.enter_context(into)
        out.setblocking(False)
        into.setblocking(False)
        block = memoryview(bytearray(1 << 16))
        buffer = bytearray(1 << 18)
        World.barrier(size)
        begin = time.perf_counter()
        sent = received = 0
        while sent < nbytes or received < nbytes:
            idle = True
            with contextlib.suppress(BlockingIOError):
                if sent < nbytes:
                    sent += out.send(block[: min(len(block), nbytes - sent)])
                    idle = False
            with contextlib.suppress(BlockingIOError):
                if received < nbytes:
                    received += into.recv_into(buffer)
                    idle = False
            if idle:
                time.sleep(0.0005)
        seconds = time.perf_counter() - begin
        World.barrier(size)
    return seconds


# --------------------------------------------------------------------------------------------------------------- one all-reduce


class Audited(Watched):
    """A compressor that decodes its own messages and notes their errors. With error feedback, against the corrected vector."""

    def __init__(self, inner: Compressor[Any], errors: list[float]) -> None:
        super().__init__(inner, Meter())
        self.errors = errors

    def encode(self, x: Tensor, spec: Spec, state: Any, ctx: Context, **options: Any) -> tuple[Message, Any]:
        target = x.double() + (state.residual.double() if isinstance(self.inner, ErrorFeedback) else 0.0)
        message, after = super().encode(x, spec, state, ctx, **options)
        decoded = self.inner.decode(message, spec, ctx).double()
        self.errors.append(float((decoded - target).square().sum() / target.square().sum()))
        return message, after


def cut(spec: Spec, group_bytes: int) -> list[tuple[int, Spec]]:
    """Parts of about equal size and at most ``group_bytes`` (one layer at least), with where they begin: what a handle's groups are."""
    layers = [p.numel for p in spec.pieces]
    count = max(1, min(len(layers), -(-4 * spec.numel // group_bytes)))
    ends = [0]
    for k in range(count):
        ends.append(sum(layers[: len(layers) * (k + 1) // count]))
    return [(a, slice_spec(spec, a, b)) for a, b in itertools.pairwise(ends)]


class Reduction:
    """One method's all-reduce of vectors, with its state."""

    def __init__(self, text: str, size: int, what: What) -> None:
        self.method, self.size, self.spec = Method.parse(text), size, describe(what)
        self.group = TimedGroup(World.groups[size])
        self.meter = Meter()
        self.step = 0
        self.buffer = torch.zeros(self.spec.numel) if self.method.dense else torch.empty(0)
        if not self.method.dense:
            self.exchange = self.method.make_exchange(lambda c: watch(c, self.meter))
            self.parts = cut(self.spec, self.method.options.get("group_bytes", GROUP_BYTES))
            self.states = [self.exchange.init(part, "cpu", World.rank, size) for _, part in self.parts]

    def once(self, x: Tensor) -> tuple[Tensor, Sample]:
        if self.method.dense:
            self.buffer.copy_(x)
        World.barrier(self.size)
        before = (self.meter.encode, self.meter.decode, self.group.waited)
        begin = time.perf_counter()
        if self.method.dense:
            mean = all_reduce(self.buffer, self.method.compressor, World.groups[self.size], self.size)
            end = time.perf_counter()
            width = 4 if self.method.compressor == "float32" else 2
            return mean, Sample(begin, end, 2 * (self.size - 1) * width * x.numel() // self.size, waited=end - begin)
        pipeline: Pipeline[Any] = Pipeline()
        for number, (at, part) in enumerate(self.parts):
            share, ctx = x[at : at + part.numel], Context(seed=1, step=self.step, buffer=number)
            pipeline.add(start(self.exchange, share, self.states[number], part, ctx, self.group))
        results = pipeline.finish()
        end = time.perf_counter()
        self.states = [state for _, state in results]
        mean = torch.cat([part for part, _ in results])
        sent = sum(pending.sent for pending in pipeline.pendings)
        self.step += 1
        after = (self.meter.encode, self.meter.decode, self.group.waited)
        encode, decode, waited = (b - a for a, b in zip(before, after))
        return mean, Sample(begin, end, sent, encode, decode, waited)


@functools.lru_cache(maxsize=32)
def reduction(text: str, size: int, what: What) -> Reduction:
    return Reduction(text, size, what)


def audit(size: int, text: str, what: What, rounds: int) -> dict[str, Any]:
    """Errors of every message and of the mean, over a few exchanges that are not timed."""
    method, spec, errors, whole = Method.parse(text), describe(what), list[float](), list[float]()
    if method.dense:
        exchange: Any = None
    else:
        exchange = method.make_exchange(lambda c: Audited(c, errors))
        state = exchange.init(spec, "cpu", World.rank, size)
    for step in range(rounds):
        x = vectors(what, World.rank)[step % 2]
        exact = torch.cat([x.double(), x.double().square().sum().reshape(1)])
        dist.all_reduce(exact, group=World.groups[size])
        exact /= size
        if exchange is None:
            mean = all_reduce(x.clone(), method.compressor, World.groups[size], size)
        else:
            group = TimedGroup(World.groups[size])
            mean, state = start(exchange, x, state, spec, Context(seed=1, step=step), group).wait()
        whole.append(float((mean.double() - exact[:-1]).square().sum() / exact[-1]))
    return {"messages": len(errors), "worst": max(errors, default=0.0), "first": whole[0], "last": whole[-1]}


def exchange_rounds(size: int, texts: list[str], what: What, rounds: int, alike: bool = False) -> dict[str, list[Sample]]:
    """Time the methods in turn, ``rounds`` times."""
    samples: dict[str, list[Sample]] = {text: [] for text in texts}
    for number in range(rounds):
        for text in texts:
            samples[text].append(reduction(text, size, what).once(vectors(what, World.rank, alike)[number % 2])[1])
    return samples


def forget(size: int) -> None:
    """Free the memory of earlier jobs."""
    for cached in (reduction, vectors):
        cached.cache_clear()
    TRAINING.clear()


# --------------------------------------------------------------------------------------------------- coding alone, wires alone

Span = tuple[float, float]  # begin and end of what one host does, by the clock that all of them read


def coding(size: int, text: str, numel: int, rounds: int) -> list[list[Span]]:
    """Seconds of the encoding and decoding in a handle's step, without an exchange, on all hosts at once.

    What a handle does: small tensors apart, the vectors of two steps in turn, memory that is used again. In each round the begin and end
    of what comes before the first messages travel, of what happens between the two, and of what follows the second: no host can
    begin with one of them before all have ended the one before.
    """
    settings = Settings.make(Method.parse(text).compressor, "two_shot")
    compressor, (at, parts) = settings.effective(settings.compressor, torch.float32), layout(describe(numel), size)
    again = for_means(compressor)
    xs = vectors(numel, World.rank)
    states = [compressor.init(p, "cpu") for p in parts]
    second = again.init(parts[0], "cpu")
    # What the other owners' means look like: one message per part, made beforehand.
    theirs = [again.encode(xs[0][at[j] : at[j + 1]], p, again.init(p, "cpu"), Context(seed=2))[0] for j, p in enumerate(parts)]
    spans = list[list[Span]]()
    for step in range(rounds):
        x, ctx = xs[step % 2], Context(seed=2, step=step)
        times = list[Span]()
        World.barrier(size)
        begin = time.perf_counter()
        messages = []
        for j in range(size):
            message, states[j] = compressor.encode(x[at[j] : at[j + 1]], parts[j], states[j], ctx)
            messages.append(message)
        times.append((begin, time.perf_counter()))
        World.barrier(size)
        begin = time.perf_counter()
        total = buffers.empty(parts[0].numel, torch.float32, "cpu")
        decode_sum(compressor, [messages[0]] * size, parts[0], [ctx] * size, total)
        _, second = again.encode(total, parts[0], second, ctx)
        times.append((begin, time.perf_counter()))
        World.barrier(size)
        begin = time.perf_counter()
        out = buffers.empty(numel, torch.float32, "cpu")
        for j in range(size):
            again.decode(theirs[j], parts[j], Context(seed=2), out[at[j] : at[j + 1]])
        spans.append([*times, (begin, time.perf_counter())])
    return spans


def wires(size: int, nbytes: int, rounds: int) -> list[list[Span]]:
    """Begin and end of the bare collectives of one two-shot exchange in which a host sends ``nbytes`` in all."""
    group = TimedGroup(World.groups[size])
    share = nbytes // (2 * (size - 1))
    lengths = tuple(0 if r == World.rank else share for r in range(size))
    data = torch.zeros(sum(lengths), dtype=torch.uint8)
    spans = list[list[Span]]()
    for _ in range(rounds):
        World.barrier(size)
        begin = time.perf_counter()
        for _ in range(2):
            for request in (AllGather(torch.zeros(8 * size, dtype=torch.uint8)), AllToAll(data, lengths, lengths)):
                work, _ = group.launch(request)
                work.wait()
        spans.append([(begin, time.perf_counter())])
    return spans


def directly(size: int, nbytes: int, rounds: int) -> dict[str, list[float]]:
    """Seconds in which every host sends ``nbytes`` to each other host: by our exchanges and by gloo's collectives, in turn."""
    group, theirs = ProcessGroup(World.groups[size]), World.groups[size]
    lengths = tuple(0 if r == World.rank else nbytes for r in range(size))
    data, out = torch.zeros(2, (size - 1) * nbytes, dtype=torch.uint8)
    mine, everyone = torch.zeros(nbytes, dtype=torch.uint8), list(torch.zeros(size, nbytes, dtype=torch.uint8).unbind())
    ways: dict[str, Callable[[], Any]] = {
        "to all": lambda: group.launch(AllToAll(data, lengths, lengths))[0].wait(),
        "gloo's all-to-all": lambda: dist.all_to_all_single(out, data, list(lengths), list(lengths), group=theirs),
        "gather": lambda: group.launch(AllGather(mine))[0].wait(),
        "gloo's all-gather": lambda: dist.all_gather(everyone, mine, group=theirs),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for name, run in [*ways.items()] * rounds:
        World.barrier(size)
        begin = time.perf_counter()
        run()
        seconds[name].append(time.perf_counter() - begin)
    return seconds


# ------------------------------------------------------------------------------------------------------------------- training


def read_idx(path: Path) -> np.ndarray[Any, Any]:
    """An MNIST file, gzipped or not."""
    opener: Callable[..., Any] = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rb") as file:
        data = file.read()
    rank = data[3]
    shape = [int.from_bytes(data[4 + 4 * k : 8 + 4 * k], "big") for k in range(rank)]
    return np.frombuffer(data, dtype=np.uint8, offset=4 + 4 * rank).reshape(shape)


@functools.lru_cache(maxsize=2)
def mnist(folder: str | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Images and labels for training and for the test; made-up ones without a folder (enough to time steps)."""
    if folder is None:
        g = torch.Generator().manual_seed(0)
        images, labels = torch.randn(4096, 784, generator=g), torch.randint(10, (4096,), generator=g)
        return images, labels, images[:512], labels[:512]
    parts = []
    for stem in ("train-images", "train-labels", "t10k-images", "t10k-labels"):
        found = sorted(p for p in Path(folder).iterdir() if p.name.startswith(stem))
        if not found:
            raise FileNotFoundError(f"{folder} has no {stem}*: give the folder with MNIST's four idx files, gzipped or not")
        parts.append(torch.from_numpy(read_idx(found[0]).copy()))
    images, labels, test, truth = parts
    scale = [(t.reshape(len(t), -1).float() / 255 - 0.1307) / 0.3081 for t in (images, test)]
    return scale[0], labels.long(), scale[1], truth.long()


def network(seed: int, width: int) -> torch.nn.Module:
    """784-width-width-10."""
    torch.manual_seed(seed)
    layers = [torch.nn.Linear(784, width), torch.nn.ReLU(), torch.nn.Linear(width, width), torch.nn.ReLU()]
    return torch.nn.Sequential(*layers, torch.nn.Linear(width, 10))


@dataclasses.dataclass(frozen=True)
class Task:
    """What is trained, the same for every method."""

    data: str | None = None
    width: int = 1024
    batch: int = 64  # a host
    optimiser: str = "sgd(lr=0.5)"
    seed: int = 0


class Training:
    """One model in training by one method."""

    def __init__(self, text: str, size: int, task: Task) -> None:
        self.size, self.task, self.method = size, task, Method.parse(text)
        self.images, self.labels, self.test, self.truth = mnist(task.data)
        self.model = DistributedDataParallel(
            network(task.seed, task.width), process_group=World.groups[size], gradient_as_bucket_view=True
        )
        self.handle = self.method.attach(self.model, task.seed)
        self.optimiser = self.method.make_optimiser(self.model, Call.parse(task.optimiser))
        self.batches = self._batches()
        self.steps, self.seconds = 0, 0.0

    def _batches(self) -> Iterator[Tensor]:
        """Indices of this host's samples, epoch by epoch in another order; the same order whatever the method."""
        g, whole = torch.Generator().manual_seed(self.task.seed), self.size * self.task.batch
        while True:
            order = torch.randperm(len(self.images), generator=g)
            for at in range(0, len(order) - whole + 1, whole):
                yield order[at + World.rank * self.task.batch : at + (World.rank + 1) * self.task.batch]

    def step(self) -> None:
        chosen = next(self.batches)
        self.optimiser.zero_grad(set_to_none=False)
        torch.nn.functional.cross_entropy(self.model(self.images[chosen]), self.labels[chosen]).backward()
        self.optimiser.step()

    def run(self, count: int) -> None:
        """So many steps on the clock."""
        World.barrier(self.size)
        begin = time.perf_counter()
        for _ in range(count):
            self.step()
        self.seconds += time.perf_counter() - begin
        self.steps += count

    def accuracy(self) -> float:
        """On the whole test set, in per cent; every host looks at its share."""
        with torch.no_grad():
            mine = slice(World.rank, None, self.size)
            right = (self.model.module(self.test[mine]).argmax(1) == self.truth[mine]).sum().reshape(1)
        dist.all_reduce(right, group=World.groups[self.size])
        return 100 * float(right) / len(self.test)


def begin_training(size: int, text: str, task: Task, warm: int) -> None:
    """Make model and method; ``warm`` steps on a throw-away copy touch all memory first."""
    TRAINING.clear()
    if warm:
        Training(text, size, task).run(warm)
    TRAINING["now"] = Training(text, size, task)


def train(size: int, steps: int, every: int, target: float | None) -> dict[str, Any]:
    """Train until ``target`` per cent are reached or ``steps`` steps are done in all; looks every ``every`` steps."""
    training, history = TRAINING["now"], []
    reached = None
    while training.steps < steps and reached is None:
        training.run(min(every, steps - training.steps))
        accuracy = training.accuracy()
        history.append((training.steps, training.seconds, accuracy))
        if target is not None and accuracy >= target:
            reached = accuracy
    report = None if training.handle is None else training.handle.report()
    return {"steps": training.steps, "seconds": training.seconds, "reached": reached, "history": history, "report": report}


def step_times(size: int, count: int) -> dict[str, Any]:
    """When so many steps began and ended: the time before the first, and after each."""
    training = TRAINING["now"]
    if training.handle is not None:
        training.handle.reset_report()
    World.barrier(size)
    marks = [time.perf_counter()]
    for _ in range(count):
        training.step()
        marks.append(time.perf_counter())
    report = None if training.handle is None else training.handle.report()
    return {"marks": marks, "report": report}


def laps(marks: Sequence[Sequence[float]]) -> list[float]:
    """Seconds of every step from the marks of all hosts: it ends when the last host has ended it, and then the next one begins.

    (A host's own steps are longer and shorter in turn, as hosts on the same cores overtake one another; the longest of them would count
    the same wait twice.)
    """
    return [b - a for a, b in itertools.pairwise(max(times) for times in zip(*marks))]


def decide(size: int, name: str = "now") -> list[float]:
    """Step until auto has decided; seconds of the steps."""
    training, samples = TRAINING[name], list[float]()
    assert training.handle is not None
    World.barrier(size)
    while not training.handle.report()["auto/decisions"] and len(samples) < 100:
        begin = time.perf_counter()
        training.step()
        samples.append(time.perf_counter() - begin)
    return samples


def compute_times(size: int, task: Task, count: int) -> list[float]:
    """Seconds of steps without any exchange, all hosts busy."""
    training = Training("float32", size, task)
    samples = []
    with training.model.no_sync():
        for number in range(count + 2):
            World.barrier(size)
            begin = time.perf_counter()
            training.step()
            if number >= 2:
                samples.append(time.perf_counter() - begin)
    return samples


def collectives(size: int, nbytes: int, rounds: int) -> dict[str, list[float]]:
    """Seconds of each collective in which a host sends about ``nbytes``."""
    group = TimedGroup(World.groups[size])
    shares = tuple(0 if r == World.rank else nbytes // (size - 1) for r in range(size))
    reduced = torch.zeros(nbytes * size // (8 * (size - 1)), dtype=torch.float32)
    bodies: dict[str, Callable[[], Any]] = {
        "all_reduce": lambda: dist.all_reduce(reduced, group=World.groups[size]),
        "all_to_all": lambda: group.launch(AllToAll(torch.zeros(sum(shares), dtype=torch.uint8), shares, shares))[0].wait(),
        "all_gather": lambda: group.launch(AllGather(torch.zeros(nbytes // (size - 1), dtype=torch.uint8)))[0].wait(),
    }
    found: dict[str, list[float]] = {name: [] for name in bodies}
    for _ in range(rounds):
        for name, body in bodies.items():
            World.barrier(size)
            begin = time.perf_counter()
            body()
            found[name].append(time.perf_counter() - begin)
    return found


def link(size: int) -> Link:
    """What the planner measures of the link."""
    return measure_link(World.groups[size])


def phases(size: int, task: Task, count: int, moments: bool) -> list[list[float]]:
    """Begin of steps without any exchange, all hosts busy, and ends of their forward, backward and optimiser."""
    training = Training("float32", size, task)
    collector = Collector(training.model.module) if moments else None
    samples = []
    with training.model.no_sync():
        for _ in range(count + 2):
            World.barrier(size)
            chosen = next(training.batches)
            times = [time.perf_counter()]
            training.optimiser.zero_grad(set_to_none=False)
            loss = torch.nn.functional.cross_entropy(training.model(training.images[chosen]), training.labels[chosen])
            times.append(time.perf_counter())
            loss.backward()
            if collector is not None:
                collector.take()
            times.append(time.perf_counter())
            training.optimiser.step()
            times.append(time.perf_counter())
            samples.append(times)
    if collector is not None:
        collector.remove()
    return samples[2:]


def gradients(size: int, task: Task) -> Iterator[tuple[Tensor, Stats]]:
    """Gradients of the task and their second moments, step by step, without any exchange."""
    training = Training("float32", size, task)
    collector = Collector(training.model.module)
    parameters = list(training.model.module.parameters())
    with training.model.no_sync(), contextlib.ExitStack() as stack:
        stack.callback(collector.remove)
        for _ in range(SETTLED):
            training.step()
            moments = collector.take()
            x = torch.cat([p.grad.reshape(-1) for p in parameters if p.grad is not None])
            yield x, Stats(torch.cat([moments[p].reshape(-1) for p in parameters]))


def codings(size: int, texts: list[str], task: Task) -> dict[str, Measured]:
    """What the planner measures of coding: on a gradient of the task, when messages have settled, all hosts at the same method."""
    ((x, stats),) = collections.deque(gradients(size, task), maxlen=1)
    shapes = [p.shape for p in network(task.seed, task.width).parameters()]
    spec = Spec(tuple(Piece(tuple(shape), 0, shape.numel(), f"p{k}") for k, shape in enumerate(shapes)))
    found = {}
    for text in texts:
        method = Method.parse(text)
        World.barrier(size)
        if method.dense:
            dtype = torch.float32 if method.compressor == "float32" else torch.bfloat16
            found[text] = measure_cast(dtype, x.numel(), in_job=True)
        else:
            compressor = tersegrad.parse(method.compressor)
            given = stats if needs_second_moment(compressor) else None
            earlier = itertools.islice(gradients(size, task), SETTLED - 1)
            found[text] = measure_coding(compressor, x, given, spec, history=earlier, in_job=True)
    return found


def handle_times(size: int, text: str, numel: int, rounds: int) -> dict[str, Any]:
    """Begin and end of what a handle does in a step, in DDP on a model with ``numel`` parameters that computes next to nothing.

    Hosts wait for one another before and after the handle sees a bucket: on few cores they reach it one after another, and while one of
    them is in the handle the others would go on with their backward pass and the next step on its core, and count as the handle's.
    """
    model = DistributedDataParallel(Cheap(numel), process_group=World.groups[size], gradient_as_bucket_view=True)
    handle = ddp.make_hook(Method.parse(text).compressor)[0]
    handle.bind(model)
    model.register_comm_hook(handle, _together)
    x, spans = vectors(numel, World.rank), list[list[Span]]()
    for step in range(3 + rounds):
        if step == 3:
            handle.reset_report()
        model.zero_grad(set_to_none=False)
        BUCKETS.clear()
        model(x[step % 2]).backward()
        spans.append(list(BUCKETS))
    handle.compare()
    return {"spans": spans[3:], "report": handle.report()}


BUCKETS: list[Span] = []  # of the step under way


def _together(handle: ddp.Handle, bucket: GradBucket) -> Future[Tensor]:
    """The handle's hook, entered by all hosts at once, and left."""
    group = handle.engine.links[0].group
    dist.barrier(group=group)
    begin = time.perf_counter()
    future = handle.on_bucket(bucket)
    BUCKETS.append((begin, time.perf_counter()))
    dist.barrier(group=group)
    return future


_together.__annotations__ = {"bucket": GradBucket, "return": Future[Tensor]}  # DDP compares types, not their names


class Cheap(torch.nn.Module):
    """Parameters whose gradient is the input: a backward pass that only copies."""

    def __init__(self, numel: int) -> None:
        super().__init__()
        shapes = [p.shape for p in describe(numel).pieces]
        self.weights = torch.nn.ParameterList([torch.nn.Parameter(torch.zeros(s)) for s in shapes])

    def forward(self, x: Tensor) -> Tensor:
        parts = torch.split(x, [w.numel() for w in self.weights])
        total = torch.zeros(())
        for weight, part in zip(self.weights, parts):
            total = total + torch.dot(weight.view(-1), part)
        return total


# ------------------------------------------------------------------------------------------------------------------- the host

JOBS: dict[str, Callable[..., Any]] = {
    f.__name__: f
    for f in (
        raw, audit, exchange_rounds, forget, coding, wires, begin_training, train, step_times, decide, compute_times, handle_times,
        collectives, directly, link, phases, codings,
    )
}  # fmt: skip


def job_named(name: str) -> Callable[..., Any]:
    """One of the jobs above, or a function of another module by its full name."""
    module, _, function = name.rpartition(".")
    found: Callable[..., Any] = getattr(importlib.import_module(module), function) if module else JOBS[name]
    return found


def serve(connection: Connection[Any, Any], rank: int, size: int, store: str, groups: list[int]) -> None:
    """Join the group, then do what the connection asks for until it says None."""
    torch.set_num_threads(1)
    World.rank = rank
    with contextlib.ExitStack() as stack:
        if native.available():
            stack.enter_context(native.using(threads=1))
        dist.init_process_group(
            "gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=timedelta(minutes=10)
        )
        World.groups = {n: dist.new_group(list(range(n))) for n in groups}
        connection.send((True, os.getpid()))
        while (job := connection.recv()) is not None:
            name, members, arguments = job
            try:
                connection.send((True, job_named(name)(members, *arguments)))
            except Exception:
                connection.send((False, traceback.format_exc()))
        dist.destroy_process_group()


def main() -> None:
    descriptor, rank, size, store, groups = sys.argv[1:]
    with contextlib.suppress(EOFError, ConnectionResetError, KeyboardInterrupt):
        serve(Connection(int(descriptor)), int(rank), int(size), store, [int(n) for n in groups.split(",")])


if __name__ == "__main__":
    from benchmarks import host  # so that what is sent back belongs to the module, not to __main__

    host.main()

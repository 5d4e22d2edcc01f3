"""One run: virtual workers train a task, and every message is encoded, handed over and decoded by the library's exchanges.

All tensors are compressed, also the small ones (``dense_below=0`` in ``attach``): in networks this small they would else be most of the
bytes. Losses are those at the end, on examples held out.
"""

from __future__ import annotations

import copy
import dataclasses
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from experiments.advice.late import Ages
from experiments.advice.settings import Setting
from experiments.advice.small import loaded
from experiments.advice.tasks import TASKS, WORKERS, Task
from tersegrad import Context, Piece, Spec, Stats
from tersegrad.core.protocol import needs_second_moment
from tersegrad.exchange import scheme, virtual
from tersegrad.integrations import local_sgd
from tersegrad.moments import Collector
from tersegrad.train.data import Images
from tersegrad.train.text import Text


@dataclasses.dataclass(frozen=True)
class Run:
    """What a run gave; bytes are those that left an average worker."""

    task: str
    optimizer: str
    setting: Setting
    seed: int
    rate: float
    steps: int
    parameters: int
    loss: float
    accuracy: float  # in percent
    sent: float
    exchanges: int
    age: float  # in exchanges
    age_first: float  # of the first round alone
    age_estimate: float  # of the first round, from sizes
    seconds: float

    @property
    def bits(self) -> float:
        """Per parameter and step, sent by one worker."""
        return 8 * self.sent / (self.parameters * self.steps)


class _Exchanges:
    """The exchange of all parameters, in one message or in one per tensor."""

    def __init__(self, setting: Setting, model: nn.Module, seed: int) -> None:
        named = [(name, p) for name, p in model.named_parameters()]
        pieces = [Piece(tuple(p.shape), 0, p.numel(), name) for name, p in named]
        groups = [[piece] for piece in pieces] if setting.per_tensor else [pieces]
        self.specs = [Spec(tuple(group)) for group in groups]
        compressor = setting.made()
        self.wants_moments = needs_second_moment(compressor)
        self.exchange = scheme(setting.exchange).make(compressor)
        self.states = [virtual.init(self.exchange, spec, WORKERS) for spec in self.specs]
        self.ages = [Ages(self.exchange, spec, WORKERS) for spec in self.specs]
        self.seed, self.count, self.sent = seed, 0, 0.0

    def mean(self, vectors: list[Tensor], moments: list[Tensor] | None = None) -> Tensor:
        """The mean over workers, as all of them decode it."""
        means, at = [], 0
        for number, spec in enumerate(self.specs):
            xs = [v[at : at + spec.numel] for v in vectors]
            stats = None if moments is None else [Stats(m[at : at + spec.numel]) for m in moments]
            ctx = Context(seed=self.seed, step=self.count, buffer=number)
            found = virtual.run(self.exchange, xs, self.states[number], spec, ctx, stats)
            self.ages[number].step(xs, self.states[number], list(found.states))
            self.states[number] = list(found.states)
            self.sent += sum(found.sent) / WORKERS
            means.append(found.mean)
            at += spec.numel
        self.count += 1
        return torch.cat(means)


def _flat(tensors: Any) -> Tensor:
    return torch.cat([t.detach().reshape(-1) for t in tensors])


def _write(parameters: list[nn.Parameter], flat: Tensor, gradient: bool) -> None:
    """Parameters, or their gradients, from one vector."""
    for parameter, part in zip(parameters, flat.split([p.numel() for p in parameters])):
        if gradient:
            parameter.grad = part.view(parameter.shape).clone()
        else:
            parameter.data.copy_(part.view(parameter.shape))


def train(
    task: Task,
    optimizer: str,
    setting: Setting,
    seed: int,
    folder: Path = Path(),
    rate: float | None = None,
    steps: int | None = None,
) -> Run:
    """Train; the same seed gives every setting the same first weights and the same order of examples."""
    begin, found, steps = time.process_time(), loaded(task.name, folder), steps or task.steps
    torch.manual_seed(seed)
    model = task.build(found)
    settings = task.optimizer(optimizer, rate)
    exchanges = _Exchanges(setting, model, seed)
    batches = list(_batches(found, task.batch, seed, steps))
    if setting.local:
        _local_steps(model, found, batches, settings, exchanges, local_sgd.method(setting.local))
    else:
        _every_step(model, found, batches, settings, exchanges)
    loss, accuracy = evaluate(model, found, task.held_out)
    return Run(
        task=task.name,
        optimizer=optimizer,
        setting=setting,
        seed=seed,
        rate=settings.lr,
        steps=steps,
        parameters=sum(p.numel() for p in model.parameters()),
        loss=loss,
        accuracy=accuracy,
        sent=exchanges.sent,
        exchanges=exchanges.count,
        age=_mean(exchanges, lambda ages: ages.mean),
        age_first=_mean(exchanges, lambda ages: ages.first_mean),
        age_estimate=_mean(exchanges, lambda ages: ages.estimate),
        seconds=time.process_time() - begin,
    )


def _mean(exchanges: _Exchanges, number: Callable[[Ages], float]) -> float:
    whole = sum(spec.numel for spec in exchanges.specs)
    return sum(number(ages) * spec.numel for ages, spec in zip(exchanges.ages, exchanges.specs)) / whole


Batches = list[tuple[Tensor, ...]]  # for every step the examples of each worker


def _batches(found: Images | Text, batch: int, seed: int, steps: int) -> Iterator[tuple[Tensor, ...]]:
    """For every step the examples of each worker."""
    per_step, order, at = WORKERS * batch, torch.empty(0, dtype=torch.int64), 0
    generator = torch.Generator().manual_seed(1_000_003 * seed)
    for _ in range(steps):
        if at + per_step > len(order):
            order, at = torch.randperm(found.count, generator=generator), 0
        yield order[at : at + per_step].split(batch)
        at += per_step


def _gradient(model: nn.Module, found: Images | Text, chosen: Tensor) -> None:
    inputs, targets = found.examples(chosen)
    cross_entropy(model(inputs).flatten(0, -2), targets.flatten()).backward()


def _every_step(model: nn.Module, found: Images | Text, batches: Batches, settings: Any, exchanges: _Exchanges) -> None:
    parameters, optimizer = list(model.parameters()), settings.build(model)
    collector = Collector(model) if exchanges.wants_moments else None
    for step, shares in enumerate(batches):
        vectors, moments = [], []
        for chosen in shares:
            optimizer.zero_grad()
            _gradient(model, found, chosen)
            vectors.append(_flat(p.grad for p in parameters))
            if collector is not None:
                taken = collector.take()
                moments.append(_flat(taken[p] for p in parameters))
        _write(parameters, exchanges.mean(vectors, moments or None), gradient=True)
        for group in optimizer.param_groups:
            group["lr"] = settings.rate(step, len(batches))
        optimizer.step()
    if collector is not None:
        collector.remove()


def _local_steps(
    model: nn.Module, found: Images | Text, batches: Batches, settings: Any, exchanges: _Exchanges, how: Any
) -> None:
    workers = [copy.deepcopy(model) for _ in range(WORKERS)]
    optimizers = [settings.build(worker) for worker in workers]
    anchor = _flat(model.parameters())
    velocity = torch.zeros_like(anchor)
    for step, shares in enumerate(batches):
        for worker, optimizer, chosen in zip(workers, optimizers, shares):
            optimizer.zero_grad()
            _gradient(worker, found, chosen)
            for group in optimizer.param_groups:
                group["lr"] = settings.rate(step, len(batches))
            optimizer.step()
        if (step + 1) % how.every == 0 or step + 1 == len(batches):
            mean = exchanges.mean([anchor - _flat(worker.parameters()) for worker in workers])
            velocity = how.momentum * velocity + mean
            anchor = anchor - how.rate(step + 1) * (mean + how.momentum * velocity)
            for worker in workers:
                _write(list(worker.parameters()), anchor, gradient=False)
    _write(list(model.parameters()), anchor, gradient=False)


@torch.no_grad()
def evaluate(model: nn.Module, found: Images | Text, limit: int) -> tuple[float, float]:
    """Loss, and accuracy in percent, on examples held out, spread over all of them."""
    count = min(limit, found.count_held_out)
    chosen = torch.tensor([k * found.count_held_out // count for k in range(count)])
    loss = right = seen = 0.0
    for part in chosen.split(256):
        inputs, targets = found.held_out(part)
        outputs, targets = model(inputs).flatten(0, -2), targets.flatten()
        loss += float(cross_entropy(outputs, targets, reduction="sum"))
        right += int((outputs.argmax(1) == targets).sum())
        seen += targets.numel()
    return loss / seen, 100 * right / seen


def quick(name: str, setting: Setting, optimizer: str = "adam", steps: int = 6) -> Run:
    """A few steps of a task that needs no folder."""
    return train(TASKS[name], optimizer, setting, 0, steps=steps)

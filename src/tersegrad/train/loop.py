"""The trainer: one :class:`~tersegrad.train.jobs.Job` run by every worker of a group.

Everything that is random follows from the job's seed and the position in the data, so a run that continues from a checkpoint ends with the
same parameters, bit for bit, as one that was never interrupted; and virtual workers end with those of as many processes.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from tersegrad import engine
from tersegrad.core.errors import BadConfiguration
from tersegrad.core.text import require
from tersegrad.integrations import all_reduce, ddp, local_sgd, plain
from tersegrad.integrations.processes import Worker, restarts
from tersegrad.train import data, models, snapshots, text
from tersegrad.train.data import Images
from tersegrad.train.jobs import END, Job, Progress, Result
from tersegrad.train.logs import Log
from tersegrad.train.text import Text

MEASURED = 12  # steps of a run in which the error of messages is measured; they are not timed
LOGGED = 40  # lines of a log that tell of the exchange
EVALUATED = 1 << 15  # tokens, or images, that are evaluated at once at most

_GLOBAL_GENERATOR = threading.Lock()


def load(source: str, worker: Worker, vocabulary: int = 256) -> Images | Text:
    """The data of a source on every worker (a collective call)."""
    # Importing scikit-learn and learning tokens take longer than handing over what they give; virtual workers share everything.
    if worker.virtual or source == "digits" or vocabulary > 256:
        found: Images | Text = worker.share(_read(source, vocabulary) if worker.leads else None)
        return found
    return _read(source, vocabulary)


def _read(source: str, vocabulary: int) -> Images | Text:
    if source.startswith(text.PREFIX):
        return text.load(Path(source.removeprefix(text.PREFIX)), vocabulary)
    return data.load(source)


def run(
    job: Job, worker: Worker, on_step: Callable[[Progress], None] | None = None, given: Images | Text | None = None
) -> Result:
    """Train on every worker of the group (the same call on each); continues from the job's checkpoint if told or restarted."""
    begin = time.perf_counter()
    require(not worker.virtual or job.exchange not in ("all_reduce", "auto"), _NO_RING)
    found = given or load(job.data, worker, job.vocabulary)
    config = models.network(job.model)
    if isinstance(found, Text) and isinstance(config, models.GPT):
        found = found.cut(config.context)
    found = found.to(worker.device)
    per_step = job.batch * worker.size
    require(found.count >= per_step, f"{worker.size} workers x {job.batch} examples are more than the {found.count} there are")
    trainer = _Trainer(job, worker, found)
    if job.checkpoint is not None:
        trainer.begin(job.checkpoint)
    log = _log(trainer) if job.log is not None and worker.leads else None
    clock = time.thread_time if worker.virtual else time.process_time
    # Seconds of each step: those in which errors were measured, which takes longer, and the others.
    spent: dict[bool, list[float]] = {False: [], True: []}
    recent = torch.zeros(())
    while trainer.steps < trainer.total_steps:
        measured = trainer.measured
        before = clock()
        recent = 0.9 * recent + 0.1 * trainer.step() if spent[False] or spent[True] else trainer.step()
        spent[measured].append(clock() - before)
        due = trainer.steps % job.evaluate_every == 0 if job.evaluate_every else trainer.position == 0
        test_loss, accuracy = trainer.evaluate() if due else (None, None)
        if job.check_every and trainer.steps % job.check_every == 0:
            trainer.handle.check_replicas()
        if job.checkpoint is not None and (trainer.steps % job.save_every == 0 if job.save_every else trainer.position == 0):
            trainer.save(job.checkpoint)
        if worker.leads and (on_step is not None or log is not None):
            sent = float(trainer.handle.report()["bytes/sent"])
            now = Progress(trainer.steps, trainer.total_steps, float(recent), accuracy, sent, test_loss, trainer.rate)
            if on_step is not None:
                on_step(now)
            if log is not None:
                log.write(**vars(now))
    if job.local is not None:
        trainer.handle.finish()
    if job.checkpoint is not None:
        trainer.save(job.checkpoint)
    # A short run may have measured all of them.
    timed = spent[False] or spent[True] or [0.0]
    result = _result(trainer, sum(timed) / len(timed), float(recent), time.perf_counter() - begin)
    if log is not None:
        dense = trainer.handle.sent_dense() if isinstance(trainer.handle, engine.Handle) else {}
        log.write(result=result, dense=dense)
        log.close()
    return result


def _log(trainer: _Trainer) -> Log:
    """The log of a run, with its first line; steps and exchanges follow as they come."""
    job, named = trainer.job, trainer.network.named_parameters()
    assert job.log is not None
    layers = {name: p.numel() for name, p in named if p.requires_grad}
    log = Log(job.log, run=job.label, workers=trainer.worker.size, layers=layers, **job.facts())
    if isinstance(trainer.handle, engine.Handle):
        trainer.handle.log_to(
            lambda numbers, step: log.write(exchanged=step, numbers=numbers), every=trainer.logged_every, layers=True
        )
    return log


_NO_RING = "virtual workers exchange through an exchange of ours: bf16 with two_shot sends as much as a bf16 all_reduce"


def _result(trainer: _Trainer, cpu: float, loss: float, wall: float) -> Result:
    """What a run gave (a collective call)."""
    job, worker, found, report = trainer.job, trainer.worker, trainer.data, trainer.handle.report()
    error = float(report.get("message_error", -1.0))
    means = worker.mean([float(report["bytes/sent"]), float(report["bits_per_coordinate"]), error, cpu, loss])
    test_loss, accuracy = trainer.evaluate()
    is_text = isinstance(found, Text)
    return Result(
        job=job,
        workers=worker.size,
        parameters=sum(p.numel() for p in trainer.network.parameters()),
        steps=trainer.steps,
        accuracy=accuracy,
        loss=means[4],
        bytes_sent=means[0],
        bits_per_coordinate=means[1],
        error=means[2] if means[2] >= 0 else None,
        cpu_seconds=means[3],
        wall_seconds=wall,
        report=report,
        test_loss=test_loss,
        bits_per_byte=test_loss / math.log(2) / found.bytes_per_token if isinstance(found, Text) else None,
        tokens=trainer.steps * job.batch * worker.size * math.prod(found.shape) if is_text else None,
    )


class _Trainer:
    """A network, its optimiser and its exchange, somewhere in the data."""

    def __init__(self, job: Job, worker: Worker, found: Images | Text) -> None:
        self.job, self.worker, self.data = job, worker, found
        # Position: examples of this epoch that all workers have used.
        self.steps, self.epoch, self.position = 0, 0, 0
        self.total_steps, self.rate = self._end(), 0.0  # the learning rate of the latest step
        self.every = max(2, self.total_steps // MEASURED)
        self.settings = models.optimizer(job.optimizer)
        # torch's layers draw from the global generator, which virtual workers share: leave it as it was.
        with _GLOBAL_GENERATOR, torch.random.fork_rng(devices=[]):
            torch.manual_seed(job.seed)
            self.network: nn.Module = models.network(job.model).build(found.shape, found.classes)
        self.network.to(worker.device)
        self.optimizer = self.settings.build(self.network)
        self.model, self.handle = self._attach()

    def _end(self) -> int:
        """The step that the run ends with: as many as the examples that are left allow."""
        if self.job.steps:
            return self.job.steps
        per_step = self.job.batch * self.worker.size
        left = (self.job.epochs - self.epoch) * (self.data.count // per_step) - self.position // per_step
        return self.steps + left

    def _attach(self) -> tuple[nn.Module, Any]:
        """The model that computes gradients, and the handle of its exchange."""
        job, device = self.job, self.worker.device
        exchange = None if job.exchange == "auto" else job.exchange
        model: nn.Module = torch.compile(self.network) if job.compile else self.network  # type: ignore[assignment]
        if job.local is not None:
            how = local_sgd.method(job.local)
            every = max(1, self.total_steps * how.fragments // how.every // MEASURED)
            handle = local_sgd.attach(
                self.network,
                job.compressor,
                exchange,
                how,
                group_bytes=job.group_bytes,
                seed=job.seed,
                measure_every=every,
                process_group=self.worker.link,
            )
            return model, handle
        if self.worker.virtual:
            options: Any = {"group_bytes": job.group_bytes, "seed": job.seed, "measure_every": self.every}
            return model, plain.attach(self.network, job.compressor, job.exchange, process_group=self.worker.link, **options)
        model = DistributedDataParallel(model, device_ids=[device] if device.type == "cuda" else None)
        if job.exchange == "all_reduce":
            return model, all_reduce.attach(model, str(job.compressor), measure_every=self.every)
        options = {"group_bytes": job.group_bytes, "seed": job.seed, "measure_every": self.every}
        return model, ddp.attach(model, job.compressor, exchange, **options)

    @property
    def measured(self) -> bool:
        """Whether the error is measured in the next step, which takes time that a run otherwise would not."""
        logged = self.job.log is not None and (self.steps + 1) % self.logged_every == 0
        return self.job.local is None and (self.steps % self.every == 0 or logged)

    @property
    def logged_every(self) -> int:
        """Exchanges between two lines of the log that tell of them."""
        how = None if self.job.local is None else local_sgd.method(self.job.local)
        exchanges = self.total_steps if how is None else self.total_steps * how.fragments // how.every
        return max(1, exchanges // LOGGED)

    def step(self) -> Tensor:
        """One step of all workers; the loss of this one."""
        job = self.job
        self.rate = self.settings.rate(self.steps, self.total_steps)
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate
        self.optimizer.zero_grad()
        loss = torch.zeros((), device=self.worker.device)
        parts = self._batch().chunk(job.accumulate)
        for number, part in enumerate(parts):
            waits = number < len(parts) - 1 and isinstance(self.model, DistributedDataParallel)
            with self.model.no_sync() if waits else contextlib.nullcontext():  # type: ignore[operator]
                inputs, targets = self.data.examples(part)
                share = self._loss(inputs, targets) / len(parts)
                share.backward()
            loss += share.detach()
        if isinstance(self.handle, plain.Handle):
            self.handle.reduce()
        if job.clip:
            nn.utils.clip_grad_norm_(self.network.parameters(), job.clip)
        self.optimizer.step()
        if job.local is not None:
            self.handle.step()
        self.steps += 1
        self.position += job.batch * self.worker.size
        if self.position + job.batch * self.worker.size > self.data.count:
            self.epoch, self.position = self.epoch + 1, 0
        return loss

    def _autocast(self) -> Any:
        return torch.autocast(self.worker.device.type, torch.bfloat16, enabled=self.job.precision == "bf16")

    def _loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        with self._autocast():
            outputs = self.model(inputs)
        return nn.functional.cross_entropy(outputs.flatten(0, -2).float(), targets.flatten())

    def _batch(self) -> Tensor:
        """The numbers of this worker's next examples."""
        if self.position == 0 or not hasattr(self, "_order"):
            generator = torch.Generator().manual_seed(1_000_003 * self.job.seed + self.epoch)
            self._order = torch.randperm(self.data.count, generator=generator)
        at = self.position + self.worker.rank * self.job.batch
        return self._order[at : at + self.job.batch].to(self.worker.device)

    def evaluate(self) -> tuple[float, float]:
        """Loss and accuracy on examples held out; every worker looks at its part (a collective call)."""
        rank, size, found = self.worker.rank, self.worker.size, self.data
        count = min(self.job.held_out or found.evaluated, found.count_held_out)
        # Spread evenly over all of them.
        mine = [k * found.count_held_out // count for k in range(rank, count, size)]
        at_once = max(1, EVALUATED // math.prod(found.shape)) if isinstance(found, Text) else 1024
        loss = right = seen = 0.0
        with torch.no_grad(), self.handle.anchors() if self.job.local else contextlib.nullcontext():
            for start in range(0, len(mine), at_once):
                inputs, targets = found.held_out(torch.tensor(mine[start : start + at_once], device=self.worker.device))
                with self._autocast():
                    outputs = self.network(inputs).flatten(0, -2).float()
                targets = targets.flatten()
                loss += float(nn.functional.cross_entropy(outputs, targets, reduction="sum"))
                right += int((outputs.argmax(1) == targets).sum())
                seen += targets.numel()
        loss, right, seen = self.worker.mean([loss, right, seen])
        return loss / seen, right / seen

    # --------------------------------------------------------------------------------------------------------- checkpoints

    def begin(self, folder: Path) -> None:
        """Continue from the newest snapshot if the job says so or the workers were restarted; refuse to write over another run."""
        place = snapshots.newest(folder, self.worker)
        if place is None:
            return
        if not self.job.resume and not restarts():
            raise BadConfiguration(f"{folder} holds a run already: continue it with --resume, or choose another folder")
        facts, shared, own = snapshots.read(place)
        for name, value in self.job.facts().items():
            if name not in END and facts.get(name) != value:
                raise BadConfiguration(f"the checkpoint was written with {name} = {facts.get(name)}, this run has {value}")
        learned = own[self.worker.rank % len(own)] if self.job.local else shared
        self.network.load_state_dict(learned["model"])
        self.optimizer.load_state_dict(learned["optimizer"])
        self.steps, self.epoch, self.position = (int(facts[k]) for k in ("step", "epoch", "position"))
        self.handle.load_state_dicts([one["exchange"] for one in own])
        self.total_steps = self._end()
        if self.total_steps < self.steps:
            raise BadConfiguration(
                f"the checkpoint has {self.steps} steps, the run was to end after {self.total_steps}: give more --epochs or --steps"
            )

    def save(self, folder: Path) -> None:
        """A snapshot of this moment (a collective call)."""
        facts = {**self.job.facts(), "epoch": self.epoch, "position": self.position}
        learned = {"model": self.network.state_dict(), "optimizer": self.optimizer.state_dict()}
        exchange = {"exchange": self.handle.state_dict()}
        shared, own = (
            ({}, learned | exchange) if self.job.local else (learned, exchange)
        )  # local steps differ from rank to rank
        snapshots.write(folder, self.steps, facts, shared, own, self.worker)

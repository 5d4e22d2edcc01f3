"""The trainer: one :class:`Job` run by every worker of a group, and the :class:`Result` it gives.

Everything that is random follows from the job's seed and the position in the data, so a run that continues from a checkpoint ends with the
same parameters, bit for bit, as one that was never interrupted.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from tersegrad.bench.rate import limit_at
from tersegrad.core.errors import BadConfiguration
from tersegrad.core.protocol import Guarantee, Spec
from tersegrad.core.text import require
from tersegrad.exchange import scheme
from tersegrad.integrations import all_reduce, ddp, local_sgd
from tersegrad.integrations.processes import Worker, restarts
from tersegrad.planner import Link
from tersegrad.recipes import parse
from tersegrad.train import data, models, snapshots

MEASURED = 12  # steps of a run in which the error of messages is measured; they are not timed


@dataclasses.dataclass(frozen=True)
class Job:
    """What to train, and how gradients are exchanged. Everything is text or a number, and is checked here."""

    data: str = "digits"
    model: str = "mlp"
    optimizer: str = "sgd"
    compressor: str | None = "error_feedback(sparse_dithering(alpha=0.1))"
    exchange: str = "two_shot"
    local: str | None = None  # local_sgd(...) or diloco(...): exchange only now and then
    epochs: int = 20
    batch: int = 32  # images of each worker in a step
    seed: int = 0
    checkpoint: Path | None = None
    save_every: int = 0  # steps; 0: at the end of every epoch
    resume: bool = False
    check_every: int = 0

    def __post_init__(self) -> None:
        models.network(self.model)
        models.optimizer(self.optimizer)
        if self.local is not None:
            local_sgd.method(self.local)
            require(
                self.exchange != "all_reduce", "local steps go through an exchange of ours: bf16 with two_shot sends as much"
            )
        if self.exchange == "all_reduce":
            known = self.compressor in all_reduce.HOOKS
            require(known, f"all_reduce takes one of {', '.join(all_reduce.HOOKS)} as compressor, got {self.compressor}")
        else:
            compresses = scheme(self.exchange).compresses
            require(compresses == (self.compressor is None), _pairing(self.exchange, compresses))
            if self.compressor is not None:
                parse(self.compressor)
        for name in ("epochs", "batch"):
            require(getattr(self, name) > 0, f"{name} must be positive, got {getattr(self, name)}")
        for name in ("save_every", "check_every"):
            require(getattr(self, name) >= 0, f"{name} must not be negative, got {getattr(self, name)}")
        require(not self.resume or self.checkpoint is not None, "resume from where? give the checkpoint folder")

    @property
    def label(self) -> str:
        """Compressor and exchange in one text."""
        return ", ".join(part for part in (self.compressor, self.exchange, self.local) if part)

    @property
    def guarantee(self) -> Guarantee:
        """Of one message; none for exchanges that compress by themselves."""
        return parse(self.compressor).guarantee(Spec.flat(1 << 16)) if self.compressor else Guarantee("none")

    def facts(self) -> dict[str, Any]:
        """What a checkpoint must agree in with the run that continues it."""
        names = ("data", "model", "optimizer", "compressor", "exchange", "local", "epochs", "batch", "seed")
        return {name: getattr(self, name) for name in names}


def _pairing(exchange: str, compresses: bool) -> str:
    return f"{exchange} compresses by itself: give no compressor" if compresses else f"{exchange} needs a compressor"


@dataclasses.dataclass(frozen=True)
class Progress:
    """Where a run stands; given to the leading worker's callback after every step."""

    step: int
    steps: int
    loss: float
    accuracy: float | None  # on the test images, at the end of an epoch
    sent: float  # bytes, by this worker so far


@dataclasses.dataclass(frozen=True)
class Result:
    """What a run gave. Bytes, bits and seconds are those of an average worker."""

    job: Job
    workers: int
    parameters: int
    steps: int  # in all, those before a resume included
    accuracy: float  # share of the test images
    loss: float  # of the last steps
    bytes_sent: float
    bits_per_coordinate: float  # of a worker's message
    error: float | None  # of a message, against what it was to say
    cpu_seconds: float  # a step: gradient, coding and the transport's own work, as if a worker had a core of its own
    wall_seconds: float
    report: dict[str, float | str] = dataclasses.field(default_factory=dict)

    @property
    def bytes_per_step(self) -> float:
        return self.bytes_sent / max(1, int(self.report.get("steps", self.steps)))

    @property
    def above_limit(self) -> float | None:
        """Bits per coordinate above what no compressor can beat at this error on the hardest data."""
        if not self.error:
            return None
        return self.bits_per_coordinate - limit_at(self.error, self.job.guarantee)[0]

    def step_seconds(self, bits_per_second: float) -> float:
        """A step on a link of this speed: the processor's time, then the bytes that a worker sends, nothing overlapped."""
        return self.cpu_seconds + Link(bits_per_second).seconds(self.bytes_per_step)


def load(source: str, worker: Worker) -> data.Images:
    """The images of a source on every worker (a collective call)."""
    if source != "digits":
        return data.load(source)
    found: data.Images = worker.share(data.load(source) if worker.leads else None)  # small, and importing scikit-learn is not
    return found


def run(
    job: Job, worker: Worker, on_step: Callable[[Progress], None] | None = None, images: data.Images | None = None
) -> Result:
    """Train on every worker of the group (the same call on each); continues from the job's checkpoint if told or restarted."""
    begin = time.perf_counter()
    images = (images or load(job.data, worker)).to(worker.device)
    total = len(images.train) // (job.batch * worker.size)
    require(total > 0, f"{worker.size} workers x {job.batch} images are more than the {len(images.train)} there are")
    trainer = _Trainer(job, worker, images, total)
    if job.checkpoint is not None:
        trainer.begin(job.checkpoint)
    cpu, timed, recent = 0.0, 0, torch.zeros(())
    while trainer.epoch < job.epochs:
        measured = trainer.measured
        before = time.process_time()
        recent = 0.9 * recent + 0.1 * trainer.step() if timed else trainer.step()
        if not measured:
            cpu, timed = cpu + time.process_time() - before, timed + 1
        accuracy = trainer.accuracy() if trainer.position == 0 else None
        if job.check_every and trainer.steps % job.check_every == 0:
            trainer.handle.check_replicas()
        if job.checkpoint is not None and (trainer.steps % job.save_every == 0 if job.save_every else trainer.position == 0):
            trainer.save(job.checkpoint)
        if on_step is not None and worker.leads:
            sent = float(trainer.handle.report()["bytes/sent"])
            on_step(Progress(trainer.steps, trainer.total_steps, float(recent), accuracy, sent))
    if job.local is not None:
        trainer.handle.finish()
    if job.checkpoint is not None:
        trainer.save(job.checkpoint)
    report = trainer.handle.report()
    error = float(report.get("message_error", -1.0))
    keys = ("bytes/sent", "bits_per_coordinate")
    found = worker.mean([float(report[k]) for k in keys] + [error, cpu / max(1, timed), float(recent)])
    return Result(
        job=job,
        workers=worker.size,
        parameters=sum(p.numel() for p in trainer.network.parameters()),
        steps=trainer.steps,
        accuracy=trainer.accuracy(),
        loss=found[4],
        bytes_sent=found[0],
        bits_per_coordinate=found[1],
        error=found[2] if found[2] >= 0 else None,
        cpu_seconds=found[3],
        wall_seconds=time.perf_counter() - begin,
        report=report,
    )


class _Trainer:
    """A network, its optimiser and its exchange, somewhere in the data."""

    def __init__(self, job: Job, worker: Worker, images: data.Images, steps_per_epoch: int) -> None:
        self.job, self.worker, self.images = job, worker, images
        self.steps, self.epoch, self.position = 0, 0, 0  # position: images of this epoch that all workers have used
        self.total_steps = job.epochs * steps_per_epoch
        self.every = max(2, self.total_steps // MEASURED)
        self.settings = models.optimizer(job.optimizer)
        with torch.random.fork_rng(devices=[]):  # torch's layers draw from the global generator: leave it as it was
            torch.manual_seed(job.seed)
            self.network: nn.Module = models.network(job.model).build(images.shape, images.classes).to(worker.device)
        self.optimizer = self.settings.build(self.network)
        self.model, self.handle = self._attach()

    def _attach(self) -> tuple[nn.Module, Any]:
        """The model that computes gradients, and the handle of its exchange."""
        job, device = self.job, self.worker.device
        if job.local is not None:
            how = local_sgd.method(job.local)
            every = max(1, self.total_steps * how.fragments // how.every // MEASURED)
            handle = local_sgd.attach(self.network, job.compressor, job.exchange, how, seed=job.seed, measure_every=every)
            return self.network, handle
        model = DistributedDataParallel(self.network, device_ids=[device] if device.type == "cuda" else None)
        if job.exchange == "all_reduce":
            return model, all_reduce.attach(model, str(job.compressor), measure_every=self.every)
        return model, ddp.attach(model, job.compressor, job.exchange, seed=job.seed, measure_every=self.every)

    @property
    def measured(self) -> bool:
        """Whether the error is measured in the next step, which takes time that a run otherwise would not."""
        return self.job.local is None and self.steps % self.every == 0

    def step(self) -> Tensor:
        """One step of all workers; the loss of this one."""
        rate = models.learning_rate(self.settings.lr, self.settings.decay, self.steps / self.total_steps)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        images, labels = self._batch()
        self.optimizer.zero_grad()
        loss = nn.functional.cross_entropy(self.model(images), labels)
        loss.backward()
        self.optimizer.step()
        if self.job.local is not None:
            self.handle.step()
        self.steps += 1
        self.position += self.job.batch * self.worker.size
        if self.position + self.job.batch * self.worker.size > len(self.images.train):
            self.epoch, self.position = self.epoch + 1, 0
        return loss.detach()

    def _batch(self) -> tuple[Tensor, Tensor]:
        if self.position == 0 or not hasattr(self, "_order"):
            generator = torch.Generator().manual_seed(1_000_003 * self.job.seed + self.epoch)
            self._order = torch.randperm(len(self.images.train), generator=generator)
        at = self.position + self.worker.rank * self.job.batch
        chosen = self._order[at : at + self.job.batch].to(self.worker.device)
        return self.images.train[chosen], self.images.train_labels[chosen]

    def accuracy(self) -> float:
        """The share of test images that are recognised; every worker looks at its part (a collective call)."""
        rank, size = self.worker.rank, self.worker.size
        right = 0
        with torch.no_grad(), self.handle.anchors() if self.job.local else contextlib.nullcontext():
            mine = range(rank, len(self.images.test), size)
            for start in range(0, len(mine), 1024):
                chosen = torch.tensor(mine[start : start + 1024], device=self.worker.device)
                guess = self.network(self.images.test[chosen]).argmax(1)
                right += int((guess == self.images.test_labels[chosen]).sum())
        return self.worker.mean([float(right)])[0] * size / len(self.images.test)

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
            if facts[name] != value:
                raise BadConfiguration(f"the checkpoint was written with {name} = {facts[name]}, this run has {value}")
        learned = own[self.worker.rank % len(own)] if self.job.local else shared
        self.network.load_state_dict(learned["model"])
        self.optimizer.load_state_dict(learned["optimizer"])
        self.steps, self.epoch, self.position = (int(facts[k]) for k in ("step", "epoch", "position"))
        self.handle.load_state_dicts([one["exchange"] for one in own])
        if facts["size"] != self.worker.size:  # as many steps as the images that are left allow
            per_step = self.job.batch * self.worker.size
            left = (self.job.epochs - self.epoch) * (len(self.images.train) // per_step) - self.position // per_step
            self.total_steps = self.steps + left

    def save(self, folder: Path) -> None:
        """A snapshot of this moment (a collective call)."""
        facts = {**self.job.facts(), "epoch": self.epoch, "position": self.position}
        learned = {"model": self.network.state_dict(), "optimizer": self.optimizer.state_dict()}
        exchange = {"exchange": self.handle.state_dict()}
        shared, own = (
            ({}, learned | exchange) if self.job.local else (learned, exchange)
        )  # local steps differ from rank to rank
        snapshots.write(folder, self.steps, facts, shared, own, self.worker)

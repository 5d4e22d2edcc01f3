"""What a run is told (:class:`Job`), how it stands (:class:`Progress`) and what it gave (:class:`Result`)."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any, Literal

from tersegrad import advice
from tersegrad.bench.rate import limit_at
from tersegrad.core.protocol import Guarantee, Spec
from tersegrad.core.text import require
from tersegrad.exchange import scheme
from tersegrad.integrations import all_reduce, local_sgd
from tersegrad.planner import Link
from tersegrad.recipes import parse
from tersegrad.train import models, text

FACTS = (
    "data", "model", "optimizer", "compressor", "exchange", "local", "epochs", "steps", "batch", "accumulate", "clip", "precision",
    "vocabulary", "seed",
)  # fmt: skip
END = ("epochs", "steps")  # what a run that continues may have more of


@dataclasses.dataclass(frozen=True)
class Job:
    """What to train, and how gradients are exchanged. Everything is text or a number, and is checked here."""

    data: str = "digits"
    model: str = "mlp"
    optimizer: str = "sgd"
    compressor: str | None = advice.DEFAULT  # "auto": chosen by measuring
    exchange: str = "two_shot"  # "auto", with the compressor: chosen too
    local: str | None = None  # local_sgd(...) or diloco(...): exchange only now and then
    group_bytes: int | None = None  # of float32 that one message serves; None: what is usual for the device
    epochs: int = 20
    steps: int = 0  # in all; 0: as many as the epochs have
    batch: int = 32  # examples of each worker in a step
    accumulate: int = 1  # parts of a batch, one after another, whose gradients are added up
    clip: float = 0.0  # the largest norm of a gradient; 0: any
    precision: Literal["float32", "bf16"] = "float32"  # of matrix products, by autocast
    compile: bool = False
    vocabulary: int = 256  # of text: bytes, or as many tokens, learned from the data
    evaluate_every: int = 0  # steps; 0: at the end of every epoch
    held_out: int = 0  # examples of an evaluation; 0: all images, or 256 windows of text
    seed: int = 0
    checkpoint: Path | None = None
    save_every: int = 0  # steps; 0: at the end of every epoch
    resume: bool = False
    check_every: int = 0
    log: Path | None = None  # JSON lines

    def __post_init__(self) -> None:
        reads = models.network(self.model).reads
        given = "text" if self.data.startswith(text.PREFIX) else "images"
        require(reads == given, f"{self.model} reads {reads}, and {self.data} is {given}: gpt(...) goes with text:FOLDER")
        models.optimizer(self.optimizer)
        if self.local is not None:
            local_sgd.method(self.local)
            require(
                self.exchange != "all_reduce", "local steps go through an exchange of ours: bf16 with two_shot sends as much"
            )
        if self.exchange == "auto":
            require(self.compressor == "auto", "the exchange is chosen together with the compressor: --compressor auto")
        elif self.exchange == "all_reduce":
            known = self.compressor in all_reduce.HOOKS
            require(known, f"all_reduce takes one of {', '.join(all_reduce.HOOKS)} as compressor, got {self.compressor}")
        else:
            compresses = scheme(self.exchange).compresses
            require(compresses == (self.compressor is None), _pairing(self.exchange, compresses))
            if self.compressor not in (None, "auto"):
                parse(str(self.compressor))
        for name in ("epochs", "batch", "accumulate"):
            require(getattr(self, name) > 0, f"{name} must be positive, got {getattr(self, name)}")
        require(self.group_bytes is None or self.group_bytes > 0, f"group_bytes must be positive, got {self.group_bytes}")
        for name in ("save_every", "check_every", "steps", "clip", "evaluate_every", "held_out"):
            require(getattr(self, name) >= 0, f"{name} must not be negative, got {getattr(self, name)}")
        require(self.batch % self.accumulate == 0, f"a batch of {self.batch} cannot be cut into {self.accumulate} equal parts")
        require(self.precision in ("float32", "bf16"), f"precision is float32 or bf16, got {self.precision}")
        require(256 <= self.vocabulary <= 65536, f"a vocabulary has 256 (bytes) to 65536 tokens, got {self.vocabulary}")
        require(not self.resume or self.checkpoint is not None, "resume from where? give the checkpoint folder")

    @property
    def label(self) -> str:
        """Compressor and exchange in one text."""
        exchange = None if self.exchange == "auto" else self.exchange
        return ", ".join(part for part in (self.compressor, exchange, self.local) if part)

    @property
    def guarantee(self) -> Guarantee:
        """Of one message; none for exchanges that compress by themselves, and where the compressor is chosen as the run goes."""
        fixed = self.compressor not in (None, "auto")
        return parse(str(self.compressor)).guarantee(Spec.flat(1 << 16)) if fixed else Guarantee("none")

    def facts(self) -> dict[str, Any]:
        """What a checkpoint must agree in with the run that continues it."""
        return {name: getattr(self, name) for name in FACTS}


def _pairing(exchange: str, compresses: bool) -> str:
    return f"{exchange} compresses by itself: give no compressor" if compresses else f"{exchange} needs a compressor"


@dataclasses.dataclass(frozen=True)
class Progress:
    """Where a run stands; given to the leading worker's callback after every step."""

    step: int
    steps: int
    loss: float
    accuracy: float | None  # on examples held out, where there was an evaluation
    sent: float  # bytes, by this worker so far
    test_loss: float | None = None  # on the same examples
    rate: float = 0.0  # of learning


@dataclasses.dataclass(frozen=True)
class Result:
    """What a run gave. Bytes, bits and seconds are those of an average worker."""

    job: Job
    workers: int
    parameters: int
    steps: int  # in all, those before a resume included
    accuracy: float  # share of the examples held out (of text: of their tokens)
    loss: float  # of the last steps
    bytes_sent: float
    bits_per_coordinate: float  # of a worker's message
    error: float | None  # of a message, against what it was to say
    cpu_seconds: float  # a step: gradient, coding and the transport's own work, as if a worker had a core of its own
    wall_seconds: float
    report: dict[str, float | str] = dataclasses.field(default_factory=dict)
    test_loss: float = math.nan  # on examples held out, in nats
    bits_per_byte: float | None = None  # the same of text, in bits per byte
    tokens: int | None = None  # of text that all workers were trained on

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

"""How large: model, data per step and steps of each form, and what one run gave."""

from __future__ import annotations

import dataclasses
from typing import Any

from experiments.low_communication.methods import Method
from tersegrad.train import Job


@dataclasses.dataclass(frozen=True)
class Plan:
    """A model and how long it is trained; the same tokens for every method."""

    model: str
    optimizer: str
    workers: int
    every: int  # steps of a round, H
    steps: int
    batch: int  # windows of each worker in a step
    held_out: int  # windows of an evaluation
    evaluate_every: int
    accumulate: int = 1
    precision: str = "float32"
    compile: bool = False
    stacked: bool = False  # local steps with all workers in one stack, see stacked.py

    def job(self, method: Method, data: str, seed: int) -> Job:
        """What the trainer is told."""
        return Job(
            data=data,
            model=self.model,
            optimizer=method.optimizer or self.optimizer,
            compressor=method.compressor,
            exchange=method.exchange,
            local=method.local_steps(self.every),
            group_bytes=1 << 27,  # the large model in one message
            steps=self.steps,
            batch=self.batch,
            accumulate=self.accumulate,
            clip=1.0,
            precision=self.precision,  # type: ignore[arg-type]
            compile=self.compile,
            held_out=self.held_out,
            evaluate_every=self.evaluate_every,
            seed=seed,
        )


ADAMW = "adamw(lr={lr}, beta2=0.95, weight_decay=0.1, warmup={warmup}, floor=0.1)"
PLANS = {
    # 28,768 parameters, seconds: to see that everything runs.
    "quick": Plan("gpt(layers=1, width=32, context=32)", ADAMW.format(lr=0.01, warmup=3), 8, 5, 20, 2, 16, 10),
    # 131,392 parameters; 720 steps of 2,048 tokens, 24 rounds: one to four minutes per run on a core.
    "small": Plan(
        "gpt(layers=2, width=64, context=64, deviation=0.07)", ADAMW.format(lr=0.004, warmup=60), 8, 30, 720, 4, 256, 120, stacked=True
    ),
    # 1.25 million parameters; 720 steps of 32,768 tokens, 24 rounds: where strengths are chosen, all workers in one stack.
    "search": Plan(
        "gpt(layers=6, width=128, context=256)", ADAMW.format(lr=0.002, warmup=90), 8, 30, 720, 16, 512, 90,
        precision="bf16", stacked=True,
    ),
    # 25.4 million parameters; 960 steps of 32,768 tokens, 32 rounds: one GPU.
    "large": Plan(
        "gpt(layers=8, width=512, context=512)", ADAMW.format(lr=0.001, warmup=90), 8, 30, 960, 8, 1024, 120,
        precision="bf16", compile=True,
    ),
}  # fmt: skip
# The same two with first weights of the deviation that GPT-2 has at a width of 768, scaled with the root of the width.
for _name, _deviation in (("search", 0.049), ("large", 0.0245)):
    _model = PLANS[_name].model.replace(")", f", deviation={_deviation})")
    PLANS[f"{_name}-start"] = dataclasses.replace(PLANS[_name], model=_model)


@dataclasses.dataclass(frozen=True)
class Point:
    """An evaluation on the way: validation loss, and the bytes that a worker had sent."""

    step: int
    loss: float
    sent: float


@dataclasses.dataclass(frozen=True)
class Run:
    """What a method gave. Bytes and seconds are those of one worker."""

    method: Method
    seed: int
    workers: int
    parameters: int
    steps: int
    tokens: int
    exchanges: int
    loss: float  # on the validation packages, nats per byte
    sent: float  # bytes in the whole run, of an average worker
    message_bits: float  # per parameter and message
    error: float | None  # of a message
    coding: float  # seconds that the first worker encoded and decoded in the whole run
    encode: float  # seconds per parameter, of one message that is long enough
    decode: float
    wall: float
    points: tuple[Point, ...]

    @property
    def bits(self) -> float:
        """Bits that a worker sends per parameter and exchange, both rounds of a two-shot exchange counted."""
        return 8 * self.sent / (self.parameters * self.exchanges)


def read_run(saved: dict[str, Any]) -> Run:
    """A run from its JSON form."""
    points = tuple(Point(**point) for point in saved["points"])
    return Run(**{**_fields(Run, saved), "method": Method(**_fields(Method, saved["method"])), "points": points})


def _fields(kind: type[Any], saved: dict[str, Any]) -> dict[str, Any]:
    """The fields alone: JSON holds properties too, for its readers."""
    return {field.name: saved[field.name] for field in dataclasses.fields(kind)}

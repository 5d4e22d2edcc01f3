"""Hours of communication in a whole training run, from measured bits and coding speeds.

Assumptions. Workers, the rounds' length H and the bits per parameter are those of the measured run, whatever the model's size. Each worker
has a link of its own, of the given rate each way, with Ethernet's framing; latency and the competition of all-to-all traffic are
left out. Coding takes the seconds per parameter of one message of a million coordinates, on one thread or the GPU of the machine
that measured; a worker that has more threads codes faster. Nothing overlaps with the computation, whose own time is not counted. The
model of the run takes the steps of the run; 1 and 70 billion parameters see 20 tokens per parameter, in steps of half a million and of
four million tokens.
"""

from __future__ import annotations

import dataclasses

from experiments.low_communication.plans import Run
from tersegrad.planner import ETHERNET, Link, direct_all_gather, two_shot

LINKS = (("100 Mbit/s", 100e6), ("1 Gbit/s", 1e9))


@dataclasses.dataclass(frozen=True)
class Scale:
    """A model and the steps of its training."""

    name: str
    parameters: float
    steps: float


BILLIONS = (Scale("1 B", 1e9, 20e9 / 0.5e6), Scale("70 B", 70e9, 1.4e12 / 4e6))


def scales(run: Run) -> tuple[Scale, ...]:
    """The model of the run, and the two larger ones."""
    return (Scale("this model", run.parameters, run.steps), *BILLIONS)


def exchange(run: Run, parameters: float, bits_per_second: float) -> tuple[float, float]:
    """Seconds on the wire and seconds of coding, of one exchange of a model of so many parameters."""
    link, p, nbytes = Link(bits_per_second, framing=ETHERNET), run.workers, parameters * run.message_bits / 8
    if run.method.gathers:  # one message encoded, p decoded
        return direct_all_gather([nbytes] * p, link), parameters * (run.encode + p * run.decode)
    # p parts and a mean of one encoded, p parts decoded twice.
    return two_shot(p, nbytes, link), parameters * ((1 + 1 / p) * run.encode + 2 * run.decode)


def hours(run: Run, scale: Scale, bits_per_second: float) -> float:
    """Of sending and coding, one after the other."""
    return scale.steps * run.exchanges / run.steps * sum(exchange(run, scale.parameters, bits_per_second)) / 3600

"""``attach(model, "auto")`` against the clock: its steps beside those of every setting that it chooses from, and what choosing costs.

Every setting trains a network of its own, all of them live at once and take turns of some steps, in another order each time: a slow
moment of the machine meets all of them. Where bf16 wins or is chosen, auto and bf16 go on by themselves, turn by turn: a few percent
are asked for there. Only auto's steps after its decision are compared. What the decision costs is told by itself: the seconds in
which it measured, and those that the steps before took longer than as many steps of the setting that it chose.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
import statistics
import time
from collections.abc import Sequence
from typing import Any

from benchmarks.host import TRAINING, Task, Training, World
from benchmarks.methods import Method
from benchmarks.network import Hosts, rate_text
from tersegrad.advice import LADDER
from tersegrad.report.tables import Column, Table

FIXED = ("bf16", *(f"{text} + {exchange}" for text in LADDER for exchange in ("two_shot", "all_gather")))
TARGETS = {"times the best": 1.10, "times bf16": 1.03}
LONGEST, MOST = 8, 200  # steps in a turn, and turns


@dataclasses.dataclass(frozen=True)
class Cell:
    """All settings at one rate with one number of hosts. Samples are medians of turns: those of one index belong together."""

    hosts: int
    rate: float | None
    choice: str
    decisions: int
    samples: dict[str, tuple[float, ...]]  # seconds of a step; "auto" is among them
    measuring: float  # seconds in which auto measured and decided
    before: tuple[float, ...]  # seconds of the steps until then, measuring included
    duel: tuple[tuple[float, float], ...] = ()  # of a step of auto and of bf16, where these two took turns by themselves

    def times(self, text: str) -> float:
        """How many times as long as a setting's steps auto's take: the median over turns."""
        pairs = self.duel if text == "bf16" and self.duel else zip(self.samples["auto"], self.samples[text])
        return statistics.median(a / b for a, b in pairs)

    @property
    def doubt(self) -> tuple[float, float]:
        """Between which values the ratio to bf16 lies, for 95 of 100 drawings of as many turns out of those of the duel."""
        ratios, draw = [a / b for a, b in self.duel], random.Random(0)
        medians = sorted(statistics.median(draw.choices(ratios, k=len(ratios))) for _ in range(1000))
        return medians[25], medians[-26]

    @property
    def costs(self) -> float:
        """Seconds that steps took longer until the decision than as many take after it, measuring included."""
        return sum(self.before) - len(self.before) * statistics.median(self.samples["auto"])

    @property
    def best(self) -> str:
        """The fastest setting."""
        return min(FIXED, key=lambda text: statistics.median(self.samples[text]))

    @property
    def compresses(self) -> bool:
        """Whether auto compresses, and compression is faster than bf16: elsewhere it must not be slower than that."""
        return self.best != "bf16" and not self.choice.startswith("bf16")

    @property
    def passed(self) -> bool:
        own = self.times(self.best) <= TARGETS["times the best"]
        return own and (self.compresses or self.times("bf16") <= TARGETS["times bf16"])


# ------------------------------------------------------------------------------------------------------------- jobs of a host


def begin(size: int, texts: list[str], task: Task) -> None:
    """One training for each setting."""
    TRAINING.clear()
    TRAINING.update({text: Training(text, size, task) for text in texts})


def turn(size: int, text: str, count: int) -> list[float]:
    """Seconds of so many steps with one setting."""
    samples = []
    World.barrier(size)
    for _ in range(count):
        start = time.perf_counter()
        TRAINING[text].step()
        samples.append(time.perf_counter() - start)
    return samples


def told(size: int) -> dict[str, Any]:
    """What auto says of itself."""
    handle = TRAINING["auto"].handle
    assert handle is not None
    return {name: value for name, value in handle.report().items() if name.startswith("auto/")}


# ------------------------------------------------------------------------------------------------------------------- one cell


def measure(hosts: Hosts, limit: Any, rate: float | None, size: int, task: Task, seconds: float, least: int) -> Cell:
    """Let auto decide on the link that it will have, then all settings take turns; ``limit``: sets the rate of the links."""
    texts = ["auto", *FIXED]

    def steps(text: str, count: int) -> list[float]:
        return [max(times) for times in zip(*hosts.run("benchmarks.chosen.turn", text, count, size=size))]

    hosts.run("benchmarks.chosen.begin", texts, task, size=size)
    limit(None)
    for text in FIXED:
        steps(text, 3)  # touches all memory
    limit(rate)
    before = [max(times) for times in zip(*hosts.run("decide", "auto", size=size))]
    once = {text: statistics.median(steps(text, 1)) for text in texts}
    count = max(1, min(LONGEST, int(seconds / (5 * least) / sum(once.values()))))
    samples: dict[str, list[float]] = {text: [] for text in texts}
    begun = time.monotonic()
    for number in itertools.count():
        if number == MOST or (number >= least and time.monotonic() - begun > seconds):
            break
        # Any of them may come before any other: what a setting leaves in caches and connections meets all of them alike.
        for text in random.Random(number).sample(texts, len(texts)):
            found = steps(text, count + (count > 2))
            samples[text].append(
                statistics.median(found[count > 2 :])
            )  # the first of several meets the caches of another network

    def so_far(duel: Sequence[tuple[float, float]] = ()) -> Cell:
        report = hosts.run("benchmarks.chosen.told", size=size)[0]
        return Cell(
            size, rate, report["auto/choice"], int(report["auto/decisions"]), {text: tuple(s) for text, s in samples.items()},
            report["auto/seconds"], tuple(before), tuple(duel),
        )  # fmt: skip

    cell, duel, begun = so_far(), list[tuple[float, float]](), time.monotonic()
    while not cell.compresses and time.monotonic() - begun < seconds:
        # One after the other, then the other way round.
        taken = {
            text: statistics.median(steps(text, 3)[1:]) for text in (("auto", "bf16") if len(duel) % 2 else ("bf16", "auto"))
        }
        duel.append((taken["auto"], taken["bf16"]))
    return so_far(duel) if duel else cell


def table(cells: Sequence[Cell], title: str) -> Table:
    """Auto beside the fastest setting and bf16, and a note that says whether the targets were met."""
    columns = [
        Column("hosts"),
        Column("rate", number=False),
        Column("auto chose", number=False),
        Column("auto"),
        Column("bf16"),
    ]
    columns += [Column("fastest", number=False), Column("x fastest"), Column("x bf16"), Column("choosing"), Column("turns")]
    rows = []
    for c in cells:
        middle = {text: statistics.median(s) for text, s in c.samples.items()}
        row = [
            str(c.hosts),
            rate_text(c.rate),
            _short(c.choice),
            f"{middle['auto']:.4f}",
            f"{middle['bf16']:.4f}",
            _label(c.best),
        ]
        row += [f"{c.times(c.best):.3f}", f"{c.times('bf16'):.3f}", f"{c.costs:.1f}", str(len(c.samples["auto"]))]
        rows.append(tuple(row))
    missed = [f"{c.hosts} hosts, {rate_text(c.rate)}" for c in cells if not c.passed]
    again = [f"{c.hosts} hosts, {rate_text(c.rate)}" for c in cells if c.decisions > 1]
    slower = max((c.times("bf16") for c in cells if not c.compresses), default=math.nan)
    sure = "; ".join(f"{c.doubt[0]:.3f} to {c.doubt[1]:.3f} with {c.hosts} hosts, {len(c.duel)} turns" for c in cells if c.duel)
    note = (
        f"Seconds of a step after the decision; ratios are medians over turns. Auto takes at most "
        f"{max(c.times(c.best) for c in cells):.3f} times as long as the fastest setting (target {TARGETS['times the best']:.2f})"
        + ("" if math.isnan(slower) else f", and {slower:.3f} times as long as bf16 where that is the fastest or its choice (target "
           f"{TARGETS['times bf16']:.2f}; 95 % of drawings lie in {sure})")
        + (f"; missed with {'; '.join(missed)}" if missed else "")
        + (f"; decided again with {'; '.join(again)}" if again else "")
        + ". Choosing: seconds that the steps until the decision took longer than as many after it; of them, measuring took "
        f"{min(c.measuring for c in cells):.1f} to {max(c.measuring for c in cells):.1f}; {min(len(c.before) for c in cells)} to "
        f"{max(len(c.before) for c in cells)} steps."
    )  # fmt: skip
    return Table(tuple(columns), tuple(rows), title, note)


def _label(text: str) -> str:
    """A name that tells exchanges apart."""
    method = Method.parse(text)
    return text if method.dense else f"{method.label.partition(', ' + method.exchange.name)[0]}, {method.exchange.name}"


def _short(choice: str) -> str:
    """A choice as a report tells it, named like the settings."""
    return next((_label(text) for text in FIXED if str(_setting(text)) == choice), choice)


def _setting(text: str) -> str:
    method = Method.parse(text)
    return f"{method.compressor}, {method.exchange.name}"

"""The planner against the clock: what it is given, what it says of a step, and how far that is off."""

from __future__ import annotations

import dataclasses
import itertools
import statistics
from collections.abc import Sequence
from typing import Any

import tersegrad
from benchmarks.host import Task
from benchmarks.methods import Method
from benchmarks.network import Hosts, rate_text
from tersegrad.core.protocol import needs_second_moment
from tersegrad.planner import Forecast, Link, Measured, Setting, Topology, Workload, forecast
from tersegrad.planner.plan import WORTH
from tersegrad.report.tables import Column, Table

METHODS = [
    "float32", "bf16", "qsgd(bits=4, norm=max)", "error_feedback(sparse_dithering(alpha=0.1))",
    "error_feedback(top_k(fraction=0.01)) + all_gather", "vgc(alpha=2) + all_gather",
]  # fmt: skip
RIGHT = 1.1  # a winner that is at most so many times slower than the fastest is right
TARGETS = {"median": 0.12, "worst": 0.30}


@dataclasses.dataclass(frozen=True)
class Cell:
    """One method at one rate with one number of hosts."""

    method: str
    hosts: int
    rate: float | None
    predicted: float
    measured: float
    told: tuple[float, ...] = ()  # turn by turn
    samples: tuple[float, ...] = ()

    @property
    def label(self) -> str:
        return Method.parse(self.method).label

    @property
    def off(self) -> float:
        return self.predicted / self.measured - 1


@dataclasses.dataclass(frozen=True)
class Known:
    """What a planner would find in a job, without a limit to the link."""

    workload: Workload
    moments: float  # seconds that second moments add
    codings: dict[str, Measured]  # by method


def learn(hosts: Hosts, texts: Sequence[str], task: Task, size: int) -> Known:
    """Forward, backward and coding, all hosts busy."""

    def phases(moments: bool) -> list[float]:
        # A step begins with the first host, and each of its phases ends with the last one.
        rounds = list(zip(*hosts.run("phases", task, 8, moments, size=size)))
        ends = [[min(first), *map(max, others)] for first, *others in (zip(*together) for together in rounds)]
        return [statistics.median(times) for times in zip(*([b - a for a, b in itertools.pairwise(marks)] for marks in ends))]

    forward, backward, optimiser = phases(False)
    more = sum(phases(True)) - forward - backward - optimiser
    found = hosts.run("codings", list(texts), task, size=size)
    codings = {text: sorted((f[text] for f in found), key=lambda m: m.coding.encode)[size // 2] for text in texts}
    w = task.width
    sizes = (784 * w, w, w * w, w, 10 * w, 10)
    # What reports say of a message's bits includes small tensors.
    work = Workload(f"784-{w}-{w}-10", sizes, forward + optimiser, backward, dense_below=0)
    return Known(work, max(more, 0.0), codings)


def foresee(text: str, known: Known, link: Link, size: int, bits: float | None = None, sent: float | None = None) -> Forecast:
    """What the planner says of a method on a link; ``bits``: per coordinate of a message, ``sent``: by a host, as a few steps say."""
    method, measured = Method.parse(text), known.codings[text]
    if bits is not None:
        means = measured.means
        if means is not None and sent is not None:
            # A two-shot sends (p-1)/p messages in either round.
            means = dataclasses.replace(means, bits=max(0.0, sent * size / (size - 1) - bits))
        measured = dataclasses.replace(measured, bits=bits, means=means)
    name: Any = method.exchange.name
    by_variance = not method.dense and needs_second_moment(tersegrad.parse(method.compressor))
    setting = Setting(method.compressor, name)
    return forecast(setting, known.workload, Topology(size, link), measured, by_variance=by_variance, moments=known.moments)


def summary(cells: Sequence[Cell]) -> dict[str, Any]:
    """The figures that the targets are about."""
    off = sorted(abs(c.off) for c in cells)
    groups: dict[tuple[int, float | None], list[Cell]] = {}
    for c in cells:
        groups.setdefault((c.hosts, c.rate), []).append(c)
    lost = {}
    for (hosts, rate), row in groups.items():
        named, fastest = min(row, key=lambda c: c.predicted), min(row, key=lambda c: c.measured)
        lost[f"{hosts} hosts, {rate_text(rate)}"] = {
            "named": named.label,
            "times the fastest": named.measured / fastest.measured,
        }
    free = {f"{hosts} hosts": advice(row) for (hosts, rate), row in groups.items() if rate is None}
    return {"median": statistics.median(off), "worst": off[-1], "winners": lost, "without a limit": free}


def advice(row: Sequence[Cell]) -> dict[str, Any]:
    """What a plan would say: compress where that is worth it (``WORTH``), else not; and what the clock says of the same method."""
    dense = min((c for c in row if Method.parse(c.method).dense), key=lambda c: c.predicted)
    named = min(row, key=lambda c: c.predicted)
    against = named.predicted >= (1 - WORTH) * dense.predicted
    return {"against": against, "named": named.label, "dense": dense.label, "times as fast": dense.measured / named.measured}


def table(cells: Sequence[Cell], links: Sequence[dict[str, Any]], title: str) -> Table:
    """Predicted beside measured seconds, with a note that says whether the targets were met."""
    columns = [Column("hosts"), Column("rate", number=False), Column("method", number=False)]
    columns += [Column("predicted"), Column("measured"), Column("off by")]
    rows = tuple(
        (str(c.hosts), rate_text(c.rate), c.label, f"{c.predicted:.4f}", f"{c.measured:.4f}", f"{100 * c.off:+.0f} %")
        for c in cells
    )
    told = summary(cells)
    wrong = {where: w for where, w in told["winners"].items() if w["times the fastest"] > RIGHT}
    found = "; ".join(
        f"{k['hosts']} hosts, {rate_text(k['rate'])}: {k['bits_per_second'] / 1e6:.4g} Mbit/s, {1e3 * k['latency']:.2g} ms, direct "
        f"{k['direct']:.2f}"
        for k in {(k["hosts"], k["rate"]): k for k in links}.values()
    )
    note = (
        f"Seconds of a step, medians. Off by {100 * told['median']:.0f} % in the median (target {100 * TARGETS['median']:.0f}), "
        f"{100 * told['worst']:.0f} % at worst (target {100 * TARGETS['worst']:.0f}). The method that it names is the fastest, or within "
        f"{100 * (RIGHT - 1):.0f} % of it, in {len(told['winners']) - len(wrong)} of {len(told['winners'])} cells"
        + "".join(f"; not with {where}: {w['named']}, {w['times the fastest']:.2f} times" for where, w in wrong.items())
        + "".join(f". Without a limit, with {where}, it {advised(a)}" for where, a in told["without a limit"].items())
        + f". Measured links: {found}."
    )
    return Table(tuple(columns), rows, title, note)


def advised(found: dict[str, Any]) -> str:
    """``advice`` in words."""
    if found["against"]:
        return "advises against compression"
    return f"advises {found['named']}, by the clock {found['times as fast']:.2f} times as fast as {found['dense']}"

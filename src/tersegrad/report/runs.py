"""Runs from their logs (``tersegrad train --log``, ``tersegrad demo``): what a page about them shows.

A log is JSON lines: one with ``run`` begins a run, those with ``step`` and ``exchanged`` tell how it went, and one with ``result`` ends it.
A run that was continued is one run, and one that has not ended is shown as far as it has come.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tersegrad.core.errors import BadConfiguration
from tersegrad.core.protocol import has_fixed_size
from tersegrad.planner import Link, Topology, predict, trip
from tersegrad.planner.plan import WORTH, rate_text, seconds_text
from tersegrad.recipes import parse

POINT = 0.01  # of accuracy: less than that counts as equal
RATES = tuple(10 ** (6 + k / 12) for k in range(61))  # 1 Mbit/s to 100 Gbit/s
MOST = 400  # points of a line in a figure

Row = Mapping[str, Any]


@dataclasses.dataclass
class Run:
    """One run of a log, as it was written."""

    first: dict[str, Any]  # its job
    steps: list[Row] = dataclasses.field(default_factory=list)
    exchanges: list[Row] = dataclasses.field(default_factory=list)
    result: Row | None = None
    sent_dense: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @property
    def label(self) -> str:
        return str(self.first["run"])

    @property
    def facts(self) -> dict[str, Any]:
        """What a run that continues this one has in common with it."""
        return {k: v for k, v in self.first.items() if k not in ("seconds", "epochs", "steps")}

    @property
    def report(self) -> dict[str, Any]:
        return dict((self.result or {}).get("report") or {})

    def number(self, name: str) -> float | None:
        """A number of the result, if the run has ended with one."""
        value = (self.result or {}).get(name)
        return float(value) if isinstance(value, int | float) and math.isfinite(value) else None

    def step_seconds(self, link: Link) -> float | None:
        """A step on this link: the processor's time, the bytes that a worker sends, and the latency of messages; nothing overlapped."""
        cpu, sent = self.number("cpu_seconds"), self.number("bytes_per_step")
        if cpu is None or sent is None:
            return None
        return cpu + link.seconds(sent) + (link.latency * self.messages if link.latency else 0.0)

    @property
    def messages(self) -> float:
        """Messages of a step that wait for one another, by the cost model; 0 for an exchange that it does not know (PowerSGD)."""
        report, size = self.report, int(self.first.get("workers", 1))
        name = report.get("exchange")
        if name not in ("all_reduce", "two_shot", "all_gather"):
            return 0.0
        fixed = False
        with contextlib.suppress(BadConfiguration):
            fixed = has_fixed_size(parse(str(report.get("compressor"))))
        one = trip(name, 1, Topology(size, Link(1.0, latency=1.0)), fixed_size=fixed)
        steps = self.number("steps") or 1.0
        often = float(report.get("exchanges", steps)) / steps  # local steps exchange now and then
        return sum(leg.delay for leg in one.legs) * float(report.get("groups", 1)) * often

    def predicted_bf16(self, link: Link) -> float | None:
        """The same step with a bf16 all-reduce instead: the processor's time without coding, and the bytes of a ring."""
        cpu, steps = self.number("cpu_seconds"), self.report.get("steps") or 0
        if cpu is None or not steps:
            return None
        coding = (float(self.report.get("seconds/encode", 0)) + float(self.report.get("seconds/decode", 0))) / steps
        numel, size = int(self.number("parameters") or 0), int(self.first.get("workers", 1))
        return max(0.0, cpu - coding) + predict("all_reduce", numel, size, link, 16, fixed_size=True).seconds


def read(paths: Sequence[Path]) -> list[Run]:
    """The runs of some logs; of a folder, those of all its ``.jsonl`` files."""
    files: list[Path] = []
    for path in paths:
        if not path.exists():
            raise BadConfiguration(f"there is no {path}: a log is what tersegrad train --log writes")
        files += sorted(path.glob("*.jsonl")) if path.is_dir() else [path]
    runs: list[Run] = []
    for file in files:
        runs += _read(file)
    if not runs:
        raise BadConfiguration(
            f"{', '.join(map(str, paths))} holds no run: tersegrad train --log FILE.jsonl and tersegrad demo write one"
        )
    return runs


def _read(file: Path) -> list[Run]:
    found: list[Run] = []
    lines = file.read_bytes().splitlines()
    for number, line in enumerate(lines):
        try:
            row = json.loads(line)
            if not isinstance(row, dict):
                raise ValueError
        except ValueError:
            if number == len(lines) - 1:
                # A run that is being written, or was stopped while it wrote.
                continue
            raise BadConfiguration(f"line {number + 1} of {file} is no JSON object: is it the log of a run?") from None
        _take(found, row, file, number)
    return found


def _take(found: list[Run], row: dict[str, Any], file: Path, number: int) -> None:
    if "run" in row:
        found.append(Run(row))
        return
    if not found:
        raise BadConfiguration(f"line {number + 1} of {file} belongs to no run: is it the log of a run?")
    run = found[-1]
    if "result" in row:
        run.result, run.sent_dense = row["result"], row.get("dense") or {}
    elif "exchanged" in row:
        run.exchanges.append(row)
    elif "step" in row:
        if not run.steps and row["step"] > 1 and len(found) > 1 and found[-2].facts == run.facts:
            # It goes on where the one before was at this step.
            before = found.pop(-2)
            run.steps = [r for r in before.steps if r["step"] < row["step"]]
            run.exchanges = [r for r in before.exchanges if r["exchanged"] < row["step"]] + run.exchanges
        run.steps.append(row)


def chosen(report: Mapping[str, Any], instead: str = "") -> str:
    """What auto chose, or what it had in use when a run ended before it had decided; ``instead`` where nothing was to be chosen.

    >>> chosen({"auto/choice": "bf16, all_reduce", "auto/decided": 1}), chosen({"auto/choice": "bf16, all_reduce", "auto/decided": 0})
    ('chose bf16, all_reduce', 'had not decided, used bf16, all_reduce')
    """
    if "auto/choice" not in report:
        return instead
    return f"{'chose' if report.get('auto/decided', 1) else 'had not decided, used'} {report['auto/choice']}"


def thin(rows: Sequence[Row], most: int = MOST) -> list[Row]:
    """At most so many rows, evenly, with the last."""
    if len(rows) <= most:
        return list(rows)
    return [rows[round(k * (len(rows) - 1) / (most - 1))] for k in range(most)]


def columns(rows: Sequence[Row], names: Sequence[str], step: str = "step") -> dict[str, list[Any]]:
    """Rows as lists by name, the step among them; None where a row has no number."""
    table: dict[str, list[Any]] = {"step": [row[step] for row in rows]}
    for name in names:
        table[name] = [_finite(row.get(name)) for row in rows]
    return table


def _finite(value: Any) -> float | None:
    good = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return float(f"{value:.6g}") if good else None


def baseline(runs: Sequence[Run]) -> Run | None:
    """The first run whose gradients went through torch's own all-reduce."""
    return next((run for run in runs if run.first.get("exchange") == "all_reduce" and run.result), None)


def measured_link(runs: Sequence[Run]) -> Link | None:
    """The link that one of the runs measured (auto does, and ``handle.measure_link()``)."""
    for run in runs:
        rate, latency = (_finite(run.report.get(f"link/{name}")) for name in ("bits_per_second", "latency"))
        if rate is not None and rate > 0:
            return Link(rate, max(latency or 0.0, 0.0))
    return None


def at(runs: Sequence[Run], rate: float) -> Link:
    """A link of this rate, with the latency that one of the runs measured."""
    found = measured_link(runs)
    return Link(rate, found.latency if found else 0.0)


def verdict(runs: Sequence[Run], rate: float) -> str:
    """Whether compression pays at a link's speed, by the runs that have ended: it must be faster by ``WORTH``, and as accurate."""
    link = at(runs, rate)
    # What auto chose is for the link that it found.
    ended = [run for run in runs if run.step_seconds(link) is not None and run.first.get("compressor") != "auto"]
    if not ended:
        return ""
    base, where = baseline(ended), f"At {rate_text(rate)}"
    if base is None:
        best = min(ended, key=lambda run: run.step_seconds(link) or math.inf)
        reference, words = best.predicted_bf16(link), "a bf16 all-reduce, as predicted,"
        others = [best]
        if reference is None:
            return ""
    else:
        reference, words = base.step_seconds(link), base.label
        accuracy = base.number("accuracy") or 0.0
        others = [run for run in ended if run is not base and (run.number("accuracy") or 0.0) >= accuracy - POINT]
    assert reference is not None
    times = [(run.step_seconds(link) or math.inf, run) for run in others]
    taken, fastest = min(times, key=lambda pair: pair[0], default=(math.inf, None))
    if fastest is None:
        return f"{where}, do not compress: no compressed run came within {100 * POINT:.0f} point of the accuracy of {words}"
    if taken < (1 - WORTH) * reference:
        return (
            f"{where}, compress with {fastest.label}: {reference / taken:.2g} times as fast as {words} "
            f"({seconds_text(taken)} per step instead of {seconds_text(reference)})"
        )
    return (
        f"{where}, do not compress: {words} takes {seconds_text(reference)} per step, and {fastest.label} {seconds_text(taken)}"
    )

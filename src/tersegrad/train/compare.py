"""Runs side by side: the settings of the demonstration, and the table of any list of results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tersegrad import advice
from tersegrad.planner.plan import WORTH, seconds_text
from tersegrad.report.runs import POINT, chosen
from tersegrad.report.tables import Column, Table, number, signed
from tersegrad.train.jobs import Job, Result

_EVERY_STEP = (advice.row("momentum", 4), advice.row("momentum", 10), advice.row("adam", 10))
_ALONE = advice.row("momentum", 100)
# compressor, exchange, method of local steps; the first is what the others are compared with
_SETTINGS: tuple[tuple[str | None, str, str | None], ...] = (
    ("bf16", "all_reduce", None),
    *((row.compressor, row.exchange, None) for row in _EVERY_STEP),
    ("vgc(alpha=1.5)", "all_gather", None),
    (None, "power_sgd(rank=4)", None),
    (_ALONE.compressor, _ALONE.exchange, _ALONE.local),
    ("auto", "auto", None),
)
NEVER = "none: compression does not pay"
LINKS: tuple[tuple[str, float], ...] = (("10 Mbit/s", 1e7), ("100 Mbit/s", 1e8), ("1 Gbit/s", 1e9), ("10 Gbit/s", 1e10))


NOTE = """\
sent: bytes that left a worker in the whole run. bits/coord: of a worker's message, real bytes. error: what a message leaves out,
as a share of what it was to say (||C(y) - y||^2 / ||y||^2). above limit: bits more than the best conceivable compressor needs at this
error on the hardest data; below 0 the gradients were easier than that. Then the time of a step on links of that speed: the
processor time that a worker used, plus the bytes it sent at the link's speed, nothing overlapped. all_reduce is torch's own; its
bytes are those of a ring.""".replace("\n", " ")


def megabytes(value: float) -> str:
    """Bytes for a cell.

    >>> megabytes(12_345_678), megabytes(123_456)
    ('12.3 MB', '0.123 MB')
    """
    return f"{number(value / 1e6)} MB"


def demonstration(**options: Any) -> list[Job]:
    """The jobs of the demonstration, with the same options for all."""
    return [Job(compressor=c, exchange=e, local=local, **options) for c, e, local in _SETTINGS]


def comparison_table(results: Sequence[Result], title: str = "", note: str = "") -> Table:
    """Accuracy, bytes, bits, distance from the limit, and the step time on every link; one row per run."""
    columns = [Column("compressor", number=False), Column("exchange", number=False), Column("accuracy"), Column("sent")]
    columns += [Column("bits/coord"), Column("error"), Column("above limit"), *(Column(name) for name, _ in LINKS)]
    rows = []
    for r in results:
        taken = chosen(r.report, r.job.exchange)
        exchange = f"{taken}, {r.job.local}" if r.job.local else taken
        row = [r.job.compressor or "none", exchange, f"{100 * r.accuracy:.1f} %", megabytes(r.bytes_sent)]
        row += [f"{r.bits_per_coordinate:.2f}", number(r.error, 2), signed(r.above_limit)]
        rows.append((*row, *(seconds_text(r.step_seconds(speed)) for _, speed in LINKS)))
    return Table(tuple(columns), tuple(rows), title, note)


def closing(results: Sequence[Result]) -> str:
    """What the comparison shows, in words: on each link the fastest runs that are as accurate as the first, and what auto chose."""
    base = results[0]
    # What auto chose is for the link that it found.
    equals = [r for r in results if r.accuracy >= base.accuracy - POINT and r.job.compressor != "auto"]
    lines = [f"Within {100 * POINT:.0f} point of the accuracy of {base.job.label}, the fastest are"]
    for words, runs in (
        ("exchanging in every step", [r for r in equals if r.job.local is None]),
        ("exchanging now and then", [r for r in equals if r.job.local is not None]),
    ):
        lines += [f"  {words}:", *_fastest(base, runs)] if runs else []
    for r in results:
        if "auto/choice" in r.report:
            lines += [f"auto {chosen(r.report)}:", f"  {r.report['auto/why']}"]
    return "\n".join(lines)


def _fastest(base: Result, runs: Sequence[Result]) -> list[str]:
    """The fastest run on each link, and how many times as fast as the first it is; links of one winner share a line."""
    won: dict[str, list[str]] = {}
    for name, speed in LINKS:
        best, usual = min(runs, key=lambda r: r.step_seconds(speed)), base.step_seconds(speed)
        pays = best.step_seconds(speed) < (1 - WORTH) * usual
        words, times = (best.job.label, f" (x{usual / best.step_seconds(speed):.1f})") if pays else (NEVER, "")
        won.setdefault(words, []).append(name + times)
    return [f"    {words}\n      at {', '.join(places)}" for words, places in won.items()]


def result_table(result: Result, note: str = "") -> Table:
    """One run in full: what it reached and what it cost."""
    r = result
    rows = [
        ("compressor", r.job.compressor or "-"),
        ("exchange", r.job.exchange),
        *([("auto", f"{chosen(r.report)}: {r.report['auto/why']}")] if "auto/choice" in r.report else []),
        *([("local", r.job.local)] if r.job.local else []),
        ("workers", str(r.workers)),
        ("parameters", f"{r.parameters:,}"),
        ("steps", f"{r.steps:,}"),
        ("test accuracy", f"{100 * r.accuracy:.2f} %" + (" of tokens" if r.tokens else "")),
        ("test loss", f"{r.test_loss:.4f}" + (f", {r.bits_per_byte:.4f} bits per byte" if r.bits_per_byte else "")),
        *([("tokens", f"{r.tokens:,}")] if r.tokens else []),
        ("training loss", f"{r.loss:.4f}"),
        ("sent by a worker", f"{megabytes(r.bytes_sent)}, {r.bytes_per_step:,.0f} bytes per step"),
        ("bits per coordinate", f"{r.bits_per_coordinate:.3f} per message"),
        ("error of a message", number(r.error)),
        ("above the limit", f"{signed(r.above_limit)} bits per coordinate"),
        *((f"step at {name}", seconds_text(r.step_seconds(speed))) for name, speed in LINKS),
        ("time of this run", f"{r.wall_seconds:.1f} s"),
    ]
    return Table((Column("", number=False), Column("", number=False)), tuple(rows), f"Trained on {r.job.data}", note)

"""Runs side by side: the settings of the demonstration, and the table of any list of results."""

from __future__ import annotations

from collections.abc import Sequence

from tersegrad.report.tables import Column, Table, number, signed
from tersegrad.train.loop import Result

# compressor and exchange; the first is what the others are compared with
SETTINGS: tuple[tuple[str | None, str], ...] = (
    ("bf16", "all_reduce"),
    ("qsgd(bits=4, norm=max)", "two_shot"),
    ("error_feedback(sparse_dithering(alpha=0.1))", "two_shot"),
    ("error_feedback(sparse_dithering(alpha=0.5))", "two_shot"),
    ("error_feedback(top_k(fraction=0.01))", "all_gather"),
    (None, "power_sgd(rank=4)"),
)
LINKS: tuple[tuple[str, float], ...] = (("10 Mbit/s", 1e7), ("100 Mbit/s", 1e8), ("1 Gbit/s", 1e9), ("10 Gbit/s", 1e10))


def seconds(value: float) -> str:
    """A duration for a cell.

    >>> seconds(0.00123), seconds(0.0456), seconds(0.789), seconds(12.3)
    ('1.2 ms', '46 ms', '789 ms', '12.3 s')
    """
    if value >= 1:
        return f"{value:.1f} s"
    return f"{1000 * value:.1f} ms" if value < 0.01 else f"{1000 * value:.0f} ms"


def megabytes(value: float) -> str:
    """Bytes for a cell.

    >>> megabytes(12_345_678), megabytes(123_456)
    ('12.3 MB', '0.123 MB')
    """
    return f"{number(value / 1e6)} MB"


def comparison_table(results: Sequence[Result], title: str = "", note: str = "") -> Table:
    """Accuracy, bytes, bits, distance from the limit, and the step time on every link; one row a run."""
    columns = [Column("compressor", number=False), Column("exchange", number=False), Column("accuracy"), Column("sent")]
    columns += [Column("bits/coord"), Column("error"), Column("above limit"), *(Column(name) for name, _ in LINKS)]
    rows = []
    for r in results:
        row = [r.job.compressor or "-", r.job.exchange, f"{100 * r.accuracy:.1f} %", megabytes(r.bytes_sent)]
        row += [f"{r.bits_per_coordinate:.2f}", number(r.error, 2), signed(r.above_limit)]
        rows.append((*row, *(seconds(r.step_seconds(speed)) for _, speed in LINKS)))
    return Table(tuple(columns), tuple(rows), title, note)

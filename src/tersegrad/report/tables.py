"""Tables that can be printed (rich) and written (Markdown) from the same rows."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from tersegrad.core.errors import BadConfiguration
from tersegrad.report.layout import Fitted

if TYPE_CHECKING:
    from tersegrad.bench.rate import Rate
    from tersegrad.bench.speed import Speed


@dataclasses.dataclass(frozen=True)
class Column:
    """A heading; numbers are set flush right."""

    title: str
    number: bool = True


@dataclasses.dataclass(frozen=True)
class Table:
    """Rows of text under named columns, with a title above and a note below."""

    columns: tuple[Column, ...]
    rows: tuple[tuple[str, ...], ...]
    title: str = ""
    note: str = ""

    def __post_init__(self) -> None:
        if any(len(row) != len(self.columns) for row in self.rows):
            raise ValueError(f"every row needs {len(self.columns)} cells")

    def rich(self) -> Fitted:
        """The rows for a terminal of any width, without title and note."""
        return Fitted(self.columns, self.rows)

    def markdown(self) -> str:
        """The table for a file.

        >>> print(Table((Column("name", number=False), Column("bits")), (("sign", "1"),)).markdown())
        | name | bits |
        |:-----|-----:|
        | sign |    1 |
        """
        cells = [tuple(c.title for c in self.columns), *self.rows]
        cells = [tuple(cell.replace("|", "\\|").replace("\n", " ") for cell in row) for row in cells]
        widths = [max(3, *(len(row[k]) for row in cells)) for k in range(len(self.columns))]

        def line(row: tuple[str, ...]) -> str:
            padded = (c.rjust(w) if col.number else c.ljust(w) for c, w, col in zip(row, widths, self.columns))
            return "| " + " | ".join(padded) + " |"

        rule = (
            "|"
            + "|".join("-" * (w + 1) + ":" if col.number else ":" + "-" * (w + 1) for w, col in zip(widths, self.columns))
            + "|"
        )
        parts = [line(cells[0]), rule, *map(line, cells[1:])]
        if self.title:
            parts = [f"**{self.title}**", "", *parts]
        if self.note:
            parts = [*parts, "", self.note]
        return "\n".join(parts)


def number(value: float | None, digits: int = 3) -> str:
    """A number for a cell: ``digits`` significant ones, a dash where there is none.

    >>> number(0.01234), number(12.0), number(1670.4), number(1234567.0), number(None), number(0.0), number(2e-7)
    ('0.0123', '12', '1,670', '1,230,000', '-', '0', '2e-07')
    """
    if value is None or not math.isfinite(value):
        return "-"
    short = f"{value:.{digits}g}"
    return f"{float(short):,.0f}" if "e+" in short and abs(value) < 1e12 else short


def signed(value: float | None) -> str:
    """A distance with its sign, two decimals.

    >>> signed(0.5), signed(-0.0312), signed(None)
    ('+0.50', '-0.03', '-')
    """
    return "-" if value is None or not math.isfinite(value) else f"{value:+.2f}"


def size(numel: int) -> str:
    """A number of coordinates in binary units.

    >>> size(1 << 26), size(65536), size(1000)
    ('64 Mi', '64 Ki', '1000')
    """
    for unit, step in (("Gi", 30), ("Mi", 20), ("Ki", 10)):
        if numel >= 1 << step and numel % (1 << step) == 0:
            return f"{numel >> step} {unit}"
    return str(numel)


def parse_size(text: str) -> int:
    """A number of coordinates as users write it.

    >>> parse_size("64Ki"), parse_size("1_000"), parse_size("4 Mi")
    (65536, 1000, 4194304)
    """
    found = re.fullmatch(r"([0-9][0-9_]*)\s*(?:([KMG])i)?", text.strip())
    if not found or int(found[1]) == 0:
        raise BadConfiguration(f"a size is a positive number such as 65536, 64Ki or 4Mi, got {text!r}")
    return int(found[1]) << {None: 0, "K": 10, "M": 20, "G": 30}[found[2]]


def rate_table(rates: Sequence[Rate], title: str = "", note: str = "") -> Table:
    """Bits, error, guarantee and distance from the limit."""
    several = len({r.source for r in rates}) > 1
    known = any(r.source_limit is not None and r.source_limit != r.limit for r in rates)
    columns = [Column("compressor", number=False)]
    columns += [Column("data", number=False)] if several else []
    columns += [
        Column("bits/coord"),
        Column("32/bits"),
        Column("error"),
        Column("guarantee", number=False),
        Column("above limit"),
    ]
    columns += [Column("above data's limit")] if known else []
    rows = []
    for r in rates:
        row = [r.compressor, *([r.source] if several else [])]
        row += [f"{r.bits_per_coordinate:.3f}", f"{r.ratio:.1f}", number(r.error), str(r.guarantee), signed(r.gap)]
        if known:
            row.append(signed(None if r.source_limit is None else r.bits_per_coordinate - r.source_limit))
        rows.append(tuple(row))
    return Table(tuple(columns), tuple(rows), title, note)


def speed_table(speeds: Sequence[Speed], title: str = "", note: str = "") -> Table:
    """Ratios to memmove, and the absolute figure that they were measured against."""
    columns = (
        Column("compressor", number=False),
        Column("coords"),
        Column("threads"),
        Column("bits/coord"),
        Column("encode"),
        Column("decode"),
        Column("decode+add"),
        Column("memmove GB/s"),
    )
    rows = tuple(
        (
            s.compressor,
            size(s.numel),
            str(s.threads),
            f"{s.bits_per_coordinate:.3f}",
            f"{s.encode.ratio:.2f}",
            f"{s.decode.ratio:.2f}",
            "-" if s.decode_add is None else f"{s.decode_add.ratio:.2f}",
            f"{s.memmove.gigabytes:.1f}",
        )
        for s in speeds
    )
    return Table(columns, rows, title, note)

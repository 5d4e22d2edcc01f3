"""How rows are laid out on a terminal of any width: no number and no word of a name is ever cut.

The first of three forms that fits is taken: a table; a table whose first column stands on lines of its own above the others; and,
where even that is too wide, one block per row, every cell after its heading.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions
    from rich.text import Text

    from tersegrad.report.tables import Column

Row = tuple[str, ...]
GAP = 3  # spaces between columns
TALL = 4  # lines that a cell may take in a table


def lines(columns: Sequence[Column], rows: Sequence[Row], width: int) -> list[tuple[str, str]]:
    """Lines of at most ``width`` columns, each with its style: "bold" for headings and names."""
    for indent in (0, 2):
        shown = columns[1:] if indent else columns
        cells = [row[1:] if indent else row for row in rows]
        widths = _widths(shown, cells, width - indent - 1)
        if widths is not None and all(len(_wrap(cell, w)) <= TALL for row in cells for cell, w in zip(row, widths)):
            return list(_table(columns, rows, widths, indent, width))
    return list(_blocks(columns, rows, width))


def _word(text: str) -> int:
    return max((len(word) for word in text.split()), default=0)


def _widths(columns: Sequence[Column], rows: Sequence[Row], width: int) -> list[int] | None:
    """A width for each column, or None where they do not fit: texts and headings may be broken between words, numbers nowhere."""
    cells = [[row[k] for row in rows] for k in range(len(columns))]
    least = [
        max(_word(column.title), *(len(cell) if column.number else _word(cell) for cell in found), 0)
        for column, found in zip(columns, cells)
    ]
    widths = [max(len(column.title), *map(len, found), 0) for column, found in zip(columns, cells)]
    excess = sum(widths) + GAP * (len(widths) - 1) - width
    if excess > sum(widths) - sum(least):
        return None
    for _ in range(excess):
        widest = max((k for k in range(len(widths)) if widths[k] > least[k]), key=lambda k: widths[k])
        widths[widest] -= 1
    return widths


def _wrap(text: str, width: int) -> list[str]:
    return textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False) or [""]


def _cells(columns: Sequence[Column], row: Row, widths: Sequence[int], indent: int) -> Iterator[str]:
    """One row as lines, its cells side by side."""
    parts = [_wrap(cell, width) for cell, width in zip(row, widths)]
    for k in range(max(map(len, parts))):
        line = [
            (part[k] if k < len(part) else "").rjust(width)
            if column.number
            else (part[k] if k < len(part) else "").ljust(width)
            for part, width, column in zip(parts, widths, columns)
        ]
        yield " " * (indent + 1) + (" " * GAP).join(line).rstrip()


def _table(
    columns: Sequence[Column], rows: Sequence[Row], widths: list[int], indent: int, width: int
) -> Iterator[tuple[str, str]]:
    above, rest = (1, columns[1:]) if indent else (0, columns)
    if above and columns[0].title:
        yield f" {columns[0].title}", "bold"
    if any(column.title for column in rest):
        for line in _cells(rest, tuple(column.title for column in rest), widths, indent):
            yield line, "bold"
    yield " " + "─" * (indent + sum(widths) + GAP * (len(widths) - 1)), ""
    for row in rows:
        if above:
            yield from _name(row[0], width)
        for line in _cells(rest, row[above:], widths, indent):
            yield line, ""


def _name(text: str, width: int) -> Iterator[tuple[str, str]]:
    for line in textwrap.wrap(text, width - 1, break_long_words=False, break_on_hyphens=False, subsequent_indent="  "):
        yield f" {line}", "bold"


def _blocks(columns: Sequence[Column], rows: Sequence[Row], width: int) -> Iterator[tuple[str, str]]:
    """Cells after their headings, as many on a line as fit and, for numbers, at the same place in every block."""
    aligned = [max((len(row[k]) for row in rows), default=0) for k in range(len(columns))]
    for number, row in enumerate(rows):
        if number:
            yield "", ""
        yield from _name(row[0], width)
        line = ""
        for column, cell, most in list(zip(columns, row, aligned))[1:]:
            item = f"{column.title} {cell.rjust(most)}" if column.number else f"{column.title}: {cell.ljust(most)}".rstrip()
            padded = f"{column.title} " + " " * (most + (not column.number))
            if line and len(line) + GAP + len(padded) <= width:
                line += " " * GAP + item.ljust(len(padded))
                continue
            if line:
                yield line.rstrip(), ""
            line = f"   {item.ljust(len(padded))}"
            if len(line.rstrip()) > width:
                *full, line = textwrap.wrap(item, width - 3, break_long_words=False, break_on_hyphens=False)
                yield from ((f"   {part}", "") for part in full)
                line = f"   {line}".ljust(width)
        yield line.rstrip(), ""


class Fitted:
    """Rows that lay themselves out for the console that prints them."""

    def __init__(self, columns: Sequence[Column], rows: Sequence[Row]) -> None:
        self._columns, self._rows = columns, rows

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        from rich.text import Text

        for line, style in lines(self._columns, self._rows, options.max_width):
            yield Text(line.replace("─", "-") if options.ascii_only else line, style=style, no_wrap=True, overflow="ignore")

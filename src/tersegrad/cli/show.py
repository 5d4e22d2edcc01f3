"""Tables on terminals, in pipes and in files."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console

from tersegrad.core.errors import BadConfiguration

if TYPE_CHECKING:
    from tersegrad.report import Table

WIDE = 150  # columns when the output is not a terminal: a file or a log should not break lines


def console_of(wide: int = WIDE) -> Console:
    """For a terminal as wide as it is; elsewhere ``wide`` columns, or what the variable COLUMNS asks for."""
    console = Console()
    return console if console.is_terminal or "COLUMNS" in os.environ else Console(width=wide)


def show(table: Table, wide: int = WIDE) -> None:
    """Title, rows and note; the two texts are not squeezed into the table's width."""
    console = console_of(wide)
    if table.title:
        console.print(table.title + "\n", style="bold", markup=False, highlight=False)
    console.print(table.rich())
    if table.note:
        console.print()
        console.print(table.note, style="dim", markup=False, highlight=False)


def finish(table: Table, results: list[Any], json_path: Path | None, **facts: object) -> None:
    """Show a table, and write its numbers where they are wanted; '-' prints these alone."""
    from tersegrad import bench
    from tersegrad.report import as_json

    document = json.dumps({"machine": bench.describe(), **facts, "results": as_json(results)}, indent=2, allow_nan=False) + "\n"
    if json_path == Path("-"):
        typer.echo(document, nl=False)
        return
    show(table)
    if json_path is not None:
        try:
            json_path.parent.mkdir(parents=True, exist_ok=True)
            json_path.write_text(document)
        except OSError as error:
            raise BadConfiguration(f"cannot write {json_path}: {error.strerror}") from None
        console_of().print(f"written: {json_path}", highlight=False)

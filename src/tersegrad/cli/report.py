"""``tersegrad report``: one page about runs, from their logs."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from tersegrad.cli.show import console_of


def report(
    logs: Annotated[list[Path], typer.Argument(help="Logs of runs (tersegrad train --log FILE), or folders that hold them.")],
    out: Annotated[Path, typer.Option(help="Where the page is written.")] = Path("report.html"),
    title: Annotated[str, typer.Option(help="Of the page; by default model and data.")] = "",
    show: Annotated[bool, typer.Option("--open/--no-open", help="Open it where there is a display.")] = True,
) -> None:
    """One page about runs, from their logs: bits and error, bytes, step time and bandwidth, layers. It needs no network."""
    from tersegrad.report import page

    written = page.write(logs, out, title)
    console_of().print(f"report: {written}", markup=False, highlight=False)
    if show:
        display(written)


def display(path: Path) -> bool:
    """Open a page in the user's browser: only from a terminal, and only where there is a display."""
    seen = sys.platform in ("darwin", "win32") or bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))
    if not seen or "CI" in os.environ or not sys.stdout.isatty():
        return False
    import webbrowser

    return webbrowser.open(path.resolve().as_uri())

"""Run the benchmarks: ``python -m benchmarks.run [--only PATTERN] [--quick] [--out FOLDER]``.

Prints a table with targets, and writes the same as JSON and Markdown with the date and the machine. Exits with 1 when a
benchmark could not run or was refused; a missed target is shown but is no failure, because machines differ.
"""

from __future__ import annotations

import datetime
import fnmatch
import gc
import json
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from benchmarks.registry import Benchmark, Result, execute, load, runnable
from tersegrad import bench
from tersegrad.bench.machine import processor
from tersegrad.core.errors import TersegradError
from tersegrad.kernels import native
from tersegrad.report.plain import as_json
from tersegrad.report.tables import Column, Table, number, size

RESULTS = Path(__file__).parent / "results"


def matching(cases: dict[str, Benchmark], patterns: list[str]) -> list[Benchmark]:
    """Benchmarks whose name contains or globs one of ``patterns``; all when there are none."""
    return [c for c in cases.values() if not patterns or any(p in c.name or fnmatch.fnmatch(c.name, p) for p in patterns)]


def table(results: list[Result], title: str, note: str) -> Table:
    columns = (
        Column("benchmark", number=False),
        Column("coords"),
        Column("quantity", number=False),
        Column("value"),
        Column("unit", number=False),
        Column("target"),
        Column("reached", number=False),
    )
    rows = []
    for r in results:
        target = "-" if r.target is None else f"{'>=' if r.unit.startswith('x ') else '<='} {r.target:g}"
        verdict = "" if r.reached is None else "yes" if r.reached else "NO"
        value = f"{r.value:.2f}" if r.unit.startswith("x ") else number(r.value, 4)
        rows.append((r.benchmark, size(r.numel), r.quantity, value, r.unit, target, verdict))
    return Table(columns, tuple(rows), title, note)


def commit() -> str:
    """The commit that was measured, with a mark when files differ from it; empty outside a checkout."""
    folder = Path(__file__).parent
    try:
        name = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=folder, capture_output=True, text=True, check=True)
        dirty = subprocess.run(["git", "status", "--porcelain", "-uno"], cwd=folder, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return ""
    return name.stdout.strip() + ("+changes" if dirty.stdout.strip() else "")


def main(
    only: Annotated[list[str] | None, typer.Option(help="Names to run: a part of the name or a glob; repeatable.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="1/64 of the coordinates: to see that all run, not how fast.")] = False,
    out: Annotated[Path, typer.Option(help="Folder for the JSON and Markdown files.")] = RESULTS,
    names: Annotated[bool, typer.Option("--list", help="Only list the benchmarks.")] = False,
) -> None:
    """Run the benchmarks and compare them with their targets."""
    console = Console() if sys.stdout.isatty() else Console(width=140)
    chosen = matching(load(), only or [])
    if not chosen:
        console.print(f"no benchmark matches {', '.join(only or [])}; --list shows all", style="red")
        raise typer.Exit(2)
    if names:
        for case in chosen:
            console.print(case.name, highlight=False, markup=False)
        return
    start = time.perf_counter()
    results: list[Result] = []
    failures: list[str] = []
    skipped: list[str] = []
    with console.status("") as status:
        for k, case in enumerate(chosen):
            status.update(f"{k + 1}/{len(chosen)} {case.name}")
            reason = runnable(case)
            if reason is not None:
                skipped.append(f"{case.name}: {reason}")
                continue
            try:
                found = execute(case, quick=quick)
                results += found
                parts = ", ".join(f"{r.quantity} {r.value:.3g} {r.unit}" for r in found)
                console.print(f"{case.name}: {parts}", style="dim", highlight=False, markup=False)
            except (TersegradError, RuntimeError, ValueError) as error:
                failures.append(f"{case.name}: {error}")
            gc.collect()  # each case holds up to a gigabyte
    now = datetime.datetime.now(datetime.UTC)
    machine = bench.describe()
    judged = [r for r in results if r.reached is not None]
    seconds = time.perf_counter() - start
    reached = sum(bool(r.reached) for r in judged)
    note = f"{reached} of {len(judged)} targets reached. {machine}. Commit {commit() or 'unknown'}. {seconds:.0f} s."
    shown = table(
        results,
        f"Benchmarks of {now:%Y-%m-%d}{' (quick: too small for speeds, most targets not judged)' if quick else ''}",
        note,
    )
    console.print(shown.title, style="bold")
    console.print(shown.rich())
    console.print(shown.note, style="dim", highlight=False)
    for line in skipped:
        console.print(f"skipped {line}", style="yellow", markup=False)
    for line in failures:
        console.print(f"FAILED {line}", style="red", markup=False)
    slug = re.sub(r"[^a-z0-9]+", "-", f"{processor()} {native.isa()}".lower()).strip("-")
    path = out / f"{now:%Y-%m-%d}-{slug}{'-quick' if quick else ''}.json"
    out.mkdir(parents=True, exist_ok=True)
    document = {
        "date": now.isoformat(timespec="seconds"),
        "machine": machine,
        "commit": commit(),
        "quick": quick,
        "seconds": round(seconds, 1),
        "results": as_json(results),
        "skipped": skipped,
        "failed": failures,
    }
    path.write_text(json.dumps(document, indent=1, allow_nan=False) + "\n")
    path.with_suffix(".md").write_text(shown.markdown() + "\n")
    console.print(f"written: {path} and {path.with_suffix('.md').name}", highlight=False)
    if failures:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)

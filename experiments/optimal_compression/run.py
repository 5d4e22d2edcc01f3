"""Run the experiments: ``python -m experiments.optimal_compression.run [--only PART] [--data FOLDER] [--quick] [--out FOLDER]``.

Writes JSON, Markdown and figures, with the date, the machine and the seed. Everything but date and machine is deterministic.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import datetime
import enum
import json
import multiprocessing
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from experiments.optimal_compression import convergence, figures, problems, rate_error, worst_case
from tersegrad import bench
from tersegrad.bench.machine import cores
from tersegrad.report.plain import as_json
from tersegrad.report.tables import Table

RESULTS = Path(__file__).parent / "results"
J = TypeVar("J")
R = TypeVar("R")


class Part(enum.StrEnum):
    """What can be run on its own; iterations is a table of the convergence runs."""

    rate_error = "rate_error"
    worst_case = "worst_case"
    convergence = "convergence"
    iterations = "iterations"


def _single_threaded() -> None:
    """One thread a process: the parallelism is in the jobs."""
    import threadpoolctl
    import torch

    torch.set_num_threads(1)
    threadpoolctl.threadpool_limits(1)


def work(
    console: Console, title: str, function: Callable[[J], R], jobs: Sequence[J], name: Callable[[J], str], quick: bool
) -> list[R]:
    """Results in the order of the jobs, computed by one process a core, with a progress bar."""
    if quick:  # starting processes would take longer than the work
        return [function(job) for job in jobs]
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    # Fresh processes: forking one that has threads is not safe.
    context = multiprocessing.get_context("spawn")
    with (
        Progress(*columns, console=console, transient=True) as progress,
        concurrent.futures.ProcessPoolExecutor(min(cores(), len(jobs)), context, _single_threaded) as pool,
    ):
        task = progress.add_task(title, total=len(jobs))
        futures = [pool.submit(function, job) for job in jobs]
        for future in concurrent.futures.as_completed(futures):
            progress.update(task, advance=1, description=f"{title}: {name(jobs[futures.index(future)])}")
            future.result()  # a failure ends the run here
        return [f.result() for f in futures]


class Writer:
    """Writes the files of one part and prints its tables."""

    def __init__(self, console: Console, out: Path, quick: bool) -> None:
        self.console, self.out, self.quick = console, out, quick
        self.start = time.perf_counter()
        self.head = {
            "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
            "machine": bench.describe(),
            "seed": 0,
            "quick": quick,
        }

    def write(self, name: str, values: Any, tables: Iterable[Table], intro: str, pictures: Sequence[Path] = ()) -> None:
        """``name``.json and ``name``.md, and the tables on the terminal."""
        self.out.mkdir(parents=True, exist_ok=True)
        (self.out / f"{name}.json").write_text(json.dumps({**self.head, "results": _rounded(as_json(values))}) + "\n")
        parts = [f"# {name.replace('_', ' ').capitalize()}", intro]
        parts += [f"![{p.stem}]({p.name})" for p in pictures if p.suffix == ".png"]
        for table in tables:
            self.console.print(table.title, style="bold")
            self.console.print(table.rich())
            parts += [f"## {table.title}", dataclasses.replace(table, title="").markdown()]
        parts.append(f"{self.head['date']}, seed {self.head['seed']}, {self.head['machine']}{', quick' if self.quick else ''}")
        (self.out / f"{name}.md").write_text("\n\n".join(parts) + "\n")


def _rounded(value: Any) -> Any:
    """Five significant digits are enough, and keep the files small."""
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, dict):
        return {k: _columns(_rounded(v)) if k == "points" else _rounded(v) for k, v in value.items()}
    return [_rounded(v) for v in value] if isinstance(value, list) else value


def _columns(rows: list[dict[str, Any]]) -> dict[str, list[Any]]:
    """Rows with the same keys, each key once."""
    return {k: [row[k] for row in rows] for k in rows[0]}


def run_rate_error(writer: Writer) -> None:
    """The rate-error plane."""
    numel = 1 << 12 if writer.quick else 1 << 18
    jobs = [(source, numel, writer.quick) for source in ("gradients", *rate_error.SOURCES)]
    found = work(writer.console, "rate and error", rate_error.execute, jobs, lambda j: j[0], writer.quick)
    found = [*found[1:], found[0]]
    everything = [m for part in found for m in part]
    pictures = figures.rate_error_plane(everything, writer.out / "rate_error")
    intro = "Bits per coordinate are whole messages, decoded again; the limits are those at the error that was reached."
    writer.write("rate_error", everything, [rate_error.table(part) for part in found], intro, pictures)


def run_worst_case(writer: Writer) -> None:
    """The adversarial vectors."""
    numel = 1 << 12 if writer.quick else 1 << 20
    jobs = [(nu, numel) for nu in (*worst_case.NUS, None)]
    found = work(writer.console, "worst-case vectors", worst_case.execute, jobs, lambda j: f"nu = {j[0]}", writer.quick)
    deterministic = [m for part in found[:-1] for m in part]
    pictures = figures.worst_vectors(deterministic, writer.out / "worst_case")
    tables = [
        worst_case.table(deterministic, f"Deterministic Sparse Dithering, d = {numel:,}"),
        worst_case.table(found[-1], f"Randomised Sparse Dithering, d = {numel:,}"),
    ]
    intro = "What the codes cost on the vectors that cost them most."
    writer.write("worst_case", [m for part in found for m in part], tables, intro, pictures)


def run_convergence(writer: Writer, folder: Path | None, parts: set[Part]) -> None:
    """Distance to the optimum against bytes, and the iteration counts of the same runs."""
    targets = convergence.QUICK_TARGETS if writer.quick else convergence.TARGETS
    jobs = convergence.jobs(folder, quick=writer.quick)
    if Part.convergence not in parts:
        jobs = [job for job in jobs if job.workers == 1]
    curves = work(
        writer.console,
        "convergence",
        convergence.execute,
        jobs,
        lambda j: f"{j.problem}, {j.workers} workers, {j.label}",
        writer.quick,
    )
    curves.sort(key=convergence.order)
    if Part.convergence in parts:
        embedded = [c for c in curves if c.run.problem in problems.EMBEDDED]
        others = [c for c in curves if c.run.problem not in problems.EMBEDDED]
        pictures = figures.single_node(embedded, writer.out / "convergence_single", targets)
        pictures += figures.distributed(embedded, writer.out / "convergence_distributed", targets[-1])
        if others:
            pictures += figures.single_node(others, writer.out / "convergence_libsvm", targets[:1], columns=3)
        tables = [
            convergence.claims(curves, targets),
            *convergence.bytes_tables(curves, targets),
            *convergence.distributed_tables(curves, targets),
        ]
        intro = "Every message was encoded to bytes and decoded from them; bytes are those of a worker's messages."
        writer.write("convergence", curves, tables, intro, pictures)
    if Part.iterations in parts:
        tables = [convergence.iteration_table(curves, target) for target in targets]
        keep = [
            {"problem": c.run.problem, "curve": c.label, "compressor": c.run.compressor, "factor": c.run.factor,
             "condition": c.run.condition, "reached": c.run.reached}
            for c in curves if c.run.workers == 1
        ]  # fmt: skip
        writer.write("iterations", keep, tables, "Iterations of single-node compressed gradient descent against theory.")


def main(
    only: Annotated[list[Part] | None, typer.Option(help="Parts to run; repeatable. All when left out.")] = None,
    data: Annotated[Path | None, typer.Option(help="Folder with LIBSVM files, plain or .xz; those it has are added.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Small and rough: to see that everything runs.")] = False,
    out: Annotated[Path | None, typer.Option(help="Folder for the results.")] = None,
) -> None:
    """Run the experiments on optimal gradient compression."""
    if data is not None and not data.is_dir():
        raise typer.BadParameter(f"{data} is not a folder", param_hint="--data")
    parts = set(only or list(Part))
    console = Console() if sys.stdout.isatty() else Console(width=200)
    # Rough results must not replace the real ones.
    writer = Writer(console, out or (Path("out") / "optimal_compression" if quick else RESULTS), quick)
    if Part.rate_error in parts:
        run_rate_error(writer)
    if Part.worst_case in parts:
        run_worst_case(writer)
    if parts & {Part.convergence, Part.iterations}:
        run_convergence(writer, data, parts)
    console.print(f"results are in {writer.out} ({time.perf_counter() - writer.start:.0f} s)", highlight=False)


if __name__ == "__main__":
    typer.run(main)

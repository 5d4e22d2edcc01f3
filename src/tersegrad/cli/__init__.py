"""The command line: parsing and printing only. What the commands do lives in ``train``, ``bench``, ``report`` and ``demo``.

Everything heavy is imported inside the commands, so that ``tersegrad --help`` answers at once.
"""

from __future__ import annotations

import dataclasses
import io
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from typer.core import TyperGroup

from tersegrad import __version__, advice
from tersegrad.cli import options
from tersegrad.cli.plan import plan
from tersegrad.cli.report import display, report
from tersegrad.cli.show import WIDE, console_of, finish, show
from tersegrad.core.errors import MissingExtra, TersegradError

if TYPE_CHECKING:
    from tersegrad.bench import Rate
    from tersegrad.train import Job, Result


def _told(error: BaseException) -> bool:
    """A worker leaves its error to the agent that started it, which prints one line for all workers."""
    if "TORCHELASTIC_ERROR_FILE" not in os.environ:
        return False
    from tersegrad.integrations import agent

    return agent.tell(error)


class Guarded(TyperGroup):
    """A mistake of the user's ends in one line and exit code 2, never in a traceback."""

    # Contexts are Any: older releases of typer take them from click, newer ones have a click of their own inside.
    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        ctx.meta["words"] = list(args)  # what torchrun's workers are started with
        return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except TersegradError as error:
            if not _told(error):
                Console(stderr=True, width=None if Console(stderr=True).is_terminal else WIDE, soft_wrap=True).print(
                    f"[red]error:[/] {escape(str(error).partition(chr(10))[0])}", highlight=False
                )
            raise typer.Exit(2) from None


app = typer.Typer(cls=Guarded, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
bench_app = typer.Typer(no_args_is_help=True, help="Measure compressors on this machine.")
app.add_typer(bench_app, name="bench")
app.command()(plan)
app.command()(report)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"tersegrad {__version__}")
        raise typer.Exit


@app.callback()
def overall(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")] = False,
) -> None:
    """Gradient compression with real bytes and written guarantees."""


@app.command()
def demo(
    ctx: typer.Context,
    out: Annotated[Path, typer.Option(help="Folder for the report, the figure and the numbers.")] = Path("out"),
    workers: Annotated[int, typer.Option(min=2, max=64, help="Worker processes.")] = 4,
    epochs: Annotated[int, typer.Option(min=1, help="Passes over the digits.")] = 20,
    quick: Annotated[bool, typer.Option("--quick", help="See that everything runs: a short training, small tensors.")] = False,
    compressors: Annotated[
        bool, typer.Option("--compressors", help="Instead of training, measure every compressor on real gradients.")
    ] = False,
) -> None:
    """Train a network with several worker processes and compare what they send: a table, and a page with figures."""
    if compressors:
        _demo_compressors(out, quick)
        return
    from tersegrad.integrations import processes
    from tersegrad.train import demonstration

    log = out / "demo.jsonl"
    jobs = demonstration(log=log, **({"epochs": 1, "model": "mlp(width=64)"} if quick else {"epochs": epochs}))
    if not processes.spawned():
        log.unlink(missing_ok=True)
        _relaunch(ctx, workers)
    results = _train(jobs)
    if processes.leads():
        _show_comparison(results, out, log)


def _show_comparison(results: list[Result], out: Path, log: Path) -> None:
    from tersegrad import bench
    from tersegrad.report import as_json, figures, page
    from tersegrad.train import compare

    console, first = console_of(), results[0]
    title = (
        f"{first.workers} workers learn handwritten digits: {first.parameters:,} parameters, {first.steps} steps each, "
        f"{sum(r.wall_seconds for r in results):.0f} s in all"
    )
    console.print()
    show(compare.comparison_table(results, title, f"{compare.NOTE}\n{bench.describe()}"), wide=190)
    console.print(f"\n{compare.closing(results)}\n", markup=False, highlight=False)
    document = {"machine": bench.describe(), "results": as_json(results)}
    (out / "demo.json").write_text(json.dumps(document, indent=2, allow_nan=False) + "\n")
    made = page.write([log], out / "report.html", f"{first.workers} workers learn handwritten digits")
    try:
        figure = str(figures.seconds_against_link([(r.job.label, r.step_seconds) for r in results], out / "demo"))
    except MissingExtra as missing:
        figure = f"none, {missing}"
    for what, where in (("report", made), ("figure", figure), ("numbers", out / "demo.json")):
        console.print(f"{what}: {where}", markup=False, highlight=False, soft_wrap=True)
    console.print("every compressor: tersegrad demo --compressors", highlight=False)
    display(made)


def _demo_compressors(out: Path, quick: bool) -> None:
    import time

    from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bars

    from tersegrad import demo as demonstration

    console, start = console_of(), time.perf_counter()
    if not console.is_terminal:
        console.print("training a small network and measuring every compressor on its gradients; this takes a minute or two")
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Bars(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("starting", total=None)

        def progress(what: str, done: int, total: int) -> None:
            bar.update(task, description=escape(f"{what:<50}"), completed=done, total=total)

        small = {"steps": (1, 20), "hidden": 64, "speed_numel": 1 << 16, "budget": 0.02} if quick else {}
        found = demonstration.run(out, progress=progress, **small)  # type: ignore[arg-type]
    console.print(
        f"A network learned handwritten digits ({found.accuracy:.1%} of unseen ones right); these are its gradients.\n"
    )
    show(found.table())
    console.print()
    console.print(demonstration.CLOSING, highlight=False, width=min(console.width, 120))
    console.print(f"\nfigure: {found.figure}   ({time.perf_counter() - start:.0f} s in all)", highlight=False)


@app.command()
def train(
    ctx: typer.Context,
    data: options.Data = "digits",
    model: options.Model = "mlp",
    optimizer: options.Optimizer = "sgd",
    compressor: options.Compressor = advice.DEFAULT,
    exchange: options.Exchange = "two_shot",
    local: options.Local = None,
    group_bytes: options.GroupBytes = None,
    workers: options.Workers = 4,
    virtual: options.Virtual = 0,
    epochs: options.Epochs = 20,
    steps: options.Steps = 0,
    batch: options.Batch = 32,
    accumulate: options.Accumulate = 1,
    clip: options.Clip = 0.0,
    precision: options.Precision = "float32",
    compile: options.Compile = False,
    vocabulary: options.Vocabulary = 256,
    evaluate_every: options.EvaluateEvery = 0,
    held_out: options.HeldOut = 0,
    seed: options.Seed = 0,
    checkpoint: options.Checkpoint = None,
    save_every: options.SaveEvery = 0,
    resume: options.Resume = False,
    restarts: options.Restarts = 0,
    check_every: options.CheckEvery = 0,
    log: options.Log = None,
    json_path: options.Json = None,
) -> None:
    """Train with compressed gradients on several worker processes, here or (under torchrun) on many machines."""
    given = dict(locals())
    from tersegrad import bench
    from tersegrad.integrations import processes
    from tersegrad.train import Job, result_table
    from tersegrad.train import data as sources

    given["compressor"] = None if compressor == "none" else compressor
    job = Job(**{field.name: given[field.name] for field in dataclasses.fields(Job)})
    if not processes.spawned():
        sources.check(data)
        if not virtual:
            _relaunch(ctx, workers, restarts)
    (result,) = _train([job], virtual)
    if not processes.leads():
        return
    finish(result_table(result, bench.describe()), [result], json_path)


def _relaunch(ctx: typer.Context, workers: int, restarts: int = 0) -> None:
    """Run this command again under torchrun, and end as it ends."""
    from tersegrad.integrations import processes

    words = ctx.find_root().meta["words"]
    if sys.stderr.isatty():
        typer.echo(f"starting {workers} worker processes", err=True)
    raise typer.Exit(processes.launch(["-m", "tersegrad.cli", *words], workers, restarts))


def _train(jobs: list[Job], virtual: int = 0) -> list[Result]:
    """Run jobs one after another on this worker, or on virtual ones; the leading one shows how they go, on standard error."""
    from tersegrad.integrations import processes
    from tersegrad.train import load, run
    from tersegrad.train.progress import progress

    def work(worker: processes.Worker) -> list[Result]:
        with progress(jobs, worker.leads) as watchers:
            found = {(job.data, job.vocabulary): load(job.data, worker, job.vocabulary) for job in jobs}
            return [run(job, worker, watch, found[job.data, job.vocabulary]) for job, watch in zip(jobs, watchers)]

    if virtual:
        return processes.virtual(virtual, work)[0]
    with processes.join() as worker:
        return work(worker)


@bench_app.command("speed")
def bench_speed(
    names: options.Names = None,
    json_path: options.Json = None,
    size: options.Size = "4Mi",
    threads: Annotated[int, typer.Option(min=1, help="Threads for the kernels.")] = 1,
    rounds: Annotated[int, typer.Option(min=3, help="Alternating rounds whose median is taken.")] = 9,
) -> None:
    """Encode and decode speed, as a ratio to memmove of the float32 tensor in the same run."""
    from tersegrad import bench, recipes
    from tersegrad.report import parse_size, speed_table
    from tersegrad.report.catalog import CONFIGURATIONS

    compressors = {name: recipes.parse(name) for name in names or CONFIGURATIONS}  # all mistakes before any work
    x = bench.draw("gaussian", parse_size(size))
    results = []
    with console_of().status("measuring") as status:
        for name, compressor in compressors.items():
            status.update(escape(f"measuring {name}"))
            found = bench.measure_speed(compressor, x, threads=threads, rounds=rounds, budget=5)
            results.append(dataclasses.replace(found, compressor=name))
    note = "ratios to memmove of the same float32 bytes (1 is as fast as copying), Gaussian data, touched buffers\n"
    note += bench.describe()
    finish(speed_table(results, "Speed", note), results, json_path, data="gaussian")


@bench_app.command("rate")
def bench_rate(
    names: options.Names = None,
    json_path: options.Json = None,
    size: options.Size = "1Mi",
    threads: Annotated[int, typer.Option(min=1, help="Threads for the kernels.")] = 1,
    data: Annotated[
        list[str] | None, typer.Option("--data", help="gaussian, laplace, student_t, or a file of torch.save; repeatable.")
    ] = None,
) -> None:
    """Bits per coordinate, error and distance from the limit."""
    from tersegrad import bench, recipes
    from tersegrad.report import parse_size, rate_table
    from tersegrad.report.catalog import CONFIGURATIONS

    compressors = {name: recipes.parse(name) for name in names or CONFIGURATIONS}
    numel = parse_size(size)
    tensors = {source: bench.load(source, numel) for source in data or ["gaussian"]}
    results: list[Rate] = []
    with console_of().status("measuring") as status, bench.thread_count(threads):
        for source, x in tensors.items():
            for name, compressor in compressors.items():
                status.update(escape(f"measuring {name} on {source}"))
                results.append(dataclasses.replace(bench.measure_rate(compressor, x, source=source), compressor=name))
    note = (
        "bits of real messages; above limit: more bits than the best conceivable compressor needs at this error on\n"
        "the hardest data (Gaussian), negative where the data is easier than that"
    )
    finish(rate_table(results, "Rate", note), results, json_path, size=numel)


@app.command()
def bounds(
    dim: Annotated[int, typer.Option("--dim", min=2, help="Coordinates of the vector.")] = 1_000_000,
    alpha: Annotated[float | None, typer.Option(help="Contraction: error at most alpha, between 0 and 1.")] = None,
    omega: Annotated[float | None, typer.Option(help="Unbiased: variance at most omega.")] = None,
) -> None:
    """How few bits are possible at an error: every bound at that point."""
    from tersegrad.report import bounds_at

    show(bounds_at(dim=dim, alpha=alpha, omega=omega))


@app.command()
def inspect(
    file: Annotated[Path, typer.Argument(exists=True, dir_okay=False, readable=True, help="A file that holds one frame.")],
    json_path: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Explain a frame: every header field, its sizes, and whether it decodes."""
    from tersegrad.report import explain

    found = explain(file.read_bytes())
    if json_path:
        typer.echo(
            json.dumps({"file": str(file), **found.fields(), "decodes": found.decodes, "verdict": found.verdict}, indent=2)
        )
    else:
        show(found.table(str(file)))
        console_of().print(f"[{'green' if found.decodes else 'red'}]{escape(found.verdict)}[/]", highlight=False)
    if not found.decodes:
        raise typer.Exit(1)


@app.command("list")
def list_command(
    json_output: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Every compressor and wrapper: parameters, guarantee and what it does."""
    from tersegrad.report import as_json, catalog, catalog_table

    entries = catalog()
    if json_output:
        typer.echo(json.dumps(as_json(list(entries)), indent=2, allow_nan=False))
    else:
        show(catalog_table(entries))


@app.command()
def doctor(json_output: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """What this installation runs on and why: versions, kernels, threads, GPU, and what is missing."""
    from tersegrad.report import doctor as examination

    if json_output:
        typer.echo(json.dumps(examination.doctor(), indent=2))
    else:
        show(examination.doctor_table(), wide=80)


def main() -> None:
    """Entry point of the ``tersegrad`` command."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # A terminal that lacks a character gets a question mark, not a traceback.
            stream.reconfigure(errors="replace")
    try:
        app()
    except SystemExit as end:
        _leave(int(end.code or 0))
        raise
    except Exception as error:
        if _told(error):
            _leave(1)
        raise


def _leave(status: int) -> None:
    """End a worker at once; other processes end as Python does."""
    processes = sys.modules.get("tersegrad.integrations.processes")
    if processes is not None and processes.spawned():
        processes.leave(status)

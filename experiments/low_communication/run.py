"""Validation loss against bytes: ``python -m experiments.low_communication.run FOLDER [--plan small|large|quick] [--only NAMES]``.

FOLDER: what ``experiments.low_communication.corpus`` made, or any folder of text. Every method trains the same network on the same tokens
with virtual workers: each encodes, hands over and decodes real messages. Writes JSON, a table and a figure, with the date and the machine;
what the JSON file holds already is not computed again unless ``--fresh`` says so.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console

import tersegrad
from experiments.low_communication import predict
from experiments.low_communication.figure import draw
from experiments.low_communication.methods import METHODS, Method
from experiments.low_communication.plans import PLANS, Plan, Point, Run, read_run
from tersegrad import bench
from tersegrad.integrations import processes
from tersegrad.report.plain import as_json
from tersegrad.report.tables import Column, Table, number
from tersegrad.train import Progress, Text, run, text

RESULTS = Path(__file__).parent / "results"
LONG = 1 << 20  # coordinates of the message that coding is timed with


def execute(method: Method, plan: Plan, seed: int, data: str, corpus: Text) -> Run:
    """One method, with virtual workers."""
    job, points = plan.job(method, data, seed), []

    def watch(now: Progress) -> None:
        if now.test_loss is not None:
            points.append(Point(now.step, now.test_loss, now.sent))

    found = processes.virtual(plan.workers, lambda worker: run(job, worker, watch, corpus))[0]
    exchanges = int(found.report.get("exchanges", found.steps))
    encode, decode = speed(method)
    made = Run(
        method=method,
        seed=seed,
        workers=found.workers,
        parameters=found.parameters,
        steps=found.steps,
        tokens=found.tokens or 0,
        exchanges=exchanges,
        loss=found.test_loss,
        sent=found.bytes_sent,
        message_bits=found.bits_per_coordinate,
        error=found.error,
        coding=sum(float(found.report[f"seconds/{name}"]) for name in ("encode", "decode")),
        encode=encode,
        decode=decode,
        wall=found.wall_seconds,
        points=tuple(points),
    )
    if torch.cuda.is_available():  # a step sees the time to launch kernels only
        return dataclasses.replace(made, coding=exchanges * predict.exchange(made, made.parameters, 1e9)[1])
    return made


def speed(method: Method, numel: int = LONG) -> tuple[float, float]:
    """Seconds per coordinate to encode and to decode one long message, on the GPU if there is one, else on one thread."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    compressor, spec, ctx = tersegrad.parse(method.compressor), tersegrad.Spec.flat(numel), tersegrad.Context()
    x = torch.randn(numel, device=device, generator=torch.Generator(device).manual_seed(0))
    # Compressors by variance send what is large against its deviation: few of these coordinates, as in training.
    state, stats, taken = compressor.init(spec, device), tersegrad.Stats(9 * torch.ones_like(x)), []
    wait: Callable[[], None] = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    with bench.thread_count(1):
        for _ in range(4):
            wait()
            begin = time.perf_counter()
            message, _ = compressor.encode(x, spec, state, ctx, stats=stats)
            wait()
            middle = time.perf_counter()
            compressor.decode(message, spec, ctx)
            wait()
            taken.append((middle - begin, time.perf_counter() - middle))
    return min(e for e, _ in taken[1:]) / numel, min(d for _, d in taken[1:]) / numel


def _hours(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else number(value)


def table(runs: Sequence[Run], plan: Plan, note: str = "") -> Table:
    """One row per method: means over seeds."""
    base = next((r for r in runs if r.method == METHODS[0]), runs[0])
    alone = next((r for r in runs if r.method.label == "float32, local"), None)
    rows = []
    for method in dict.fromkeys(r.method for r in runs):
        mine = [r for r in runs if r.method == method]

        def mean(values: Any) -> float:
            return float(statistics.fmean(values))

        loss, sent = mean(r.loss for r in mine), mean(r.sent for r in mine)
        worse = "" if alone is None else f"{100 * (loss / alone.loss - 1):+.2f}"
        row = [method.label, f"{loss:.4f}", worse, f"{sent / 1e6:,.3f}", number(mean(r.message_bits for r in mine))]
        row += [number(mean(r.bits for r in mine)), f"{base.sent / sent:,.1f}", number(mean(r.coding for r in mine))]
        for scale in predict.scales(mine[0]):
            row += [_hours(mean(predict.hours(r, scale, rate) for r in mine)) for _, rate in predict.LINKS]
        rows.append(tuple(row))
    columns = [Column("method", number=False), Column("loss"), Column("% above float32, local"), Column("MB sent")]
    columns += [Column("bits per message"), Column("bits sent"), Column("times fewer than bf16"), Column("coding s")]
    names = [scale.name for scale in predict.scales(runs[0])]
    columns += [Column(f"hours, {name}, {link}") for name in names for link, _ in predict.LINKS]
    seeds = len({r.seed for r in runs})
    title = (
        f"{plan.model}: {runs[0].parameters:,} parameters, {plan.workers} virtual workers, {plan.steps} steps, "
        f"{runs[0].tokens:,} tokens, H = {plan.every}, {f'mean of {seeds} seeds' if seeds > 1 else 'one seed'}"
    )
    return Table(tuple(columns), tuple(rows), title, note)


NOTE = """\
loss: nats per byte of the validation text. MB sent: by one worker in the whole run, real messages. bits per message: per parameter; bits
sent: per parameter and exchange, by one worker, both rounds counted. coding s: seconds that one worker encoded and decoded in the whole
run, which small models spend on calls rather than on coordinates. hours: sending and coding in a whole training run, predicted from bits
and from the speed on long messages; the assumptions stand in predict.py.""".replace("\n", " ")


def read(path: Path, plan: Plan) -> list[Run]:
    """The runs in a file that had this plan."""
    if not path.exists():
        return []
    document = json.loads(path.read_text())
    return [read_run(saved) for saved in document["results"]] if document["plan"] == as_json([plan])[0] else []


def write(out: Path, name: str, plan: Plan, runs: Sequence[Run], lacking: Sequence[str]) -> Table:
    """JSON, table and figure."""
    out.mkdir(parents=True, exist_ok=True)
    head = {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "machine": bench.describe(),
        "plan": as_json([plan])[0],
    }
    (out / f"{name}.json").write_text(json.dumps({**head, "results": as_json(list(runs))}, indent=1) + "\n")
    left_out = f" Left out: {'; '.join(lacking)}." if lacking else ""
    shown = table(runs, plan, f"{NOTE}{left_out}\n\n{head['date']}, {head['machine']}")
    (out / f"{name}.md").write_text(shown.markdown() + "\n")
    draw(runs, shown.title, out / name)
    return shown


def main(
    folder: Annotated[Path, typer.Argument(help="The corpus, or any folder of text.")],
    plan: Annotated[str, typer.Option(help=f"One of {', '.join(PLANS)}.")] = "small",
    only: Annotated[str, typer.Option(help="Parts of methods' labels, separated by semicolons; all methods by default.")] = "",
    seeds: Annotated[int, typer.Option(min=1, help="Runs per method.")] = 1,
    steps: Annotated[int, typer.Option(min=0, help="Another number of steps than the plan's.")] = 0,
    fresh: Annotated[bool, typer.Option("--fresh", help="Compute again what is there already.")] = False,
    out: Annotated[Path, typer.Option(help="Folder for JSON, table and figure.")] = RESULTS,
) -> None:
    """Train with every method and compare."""
    console = Console(stderr=True)
    if plan not in PLANS:
        raise SystemExit(f"there is no plan {plan!r}: choose one of {', '.join(PLANS)}")
    chosen = dataclasses.replace(PLANS[plan], steps=steps) if steps else PLANS[plan]
    wanted = [m for m in METHODS if not only or any(part.strip() in m.label for part in only.split(";"))]
    lacking = [f"{m.label} ({why})" for m in wanted if (why := m.lacking())]
    for line in lacking:
        console.print(f"left out: {line}", highlight=False, markup=False)
    corpus, name = text.load(folder), plan if not steps else f"{plan}-{steps}"
    runs = [] if fresh else read(out / f"{name}.json", chosen)
    for method in (m for m in wanted if not m.lacking()):
        for seed in range(seeds):
            if any((r.method, r.seed) == (method, seed) for r in runs):
                continue
            done = execute(method, chosen, seed, f"text:{folder}", corpus)
            runs = sorted([*runs, done], key=lambda r: (METHODS.index(r.method) if r.method in METHODS else 99, r.seed))
            write(out, name, chosen, runs, lacking)
            said = f"{method.label}, seed {seed}: loss {done.loss:.4f}, {done.sent / 1e6:.3f} MB, {done.wall:.0f} s"
            console.print(said, highlight=False, markup=False)
    if not runs:
        raise SystemExit(f"no method matches {only!r}")
    print(write(out, name, chosen, runs, lacking).markdown())


if __name__ == "__main__":
    typer.run(main)

"""Validation loss against bytes: ``python -m experiments.low_communication.run FOLDER [--plan small|large|quick] [--only NAMES]``.

FOLDER: what ``experiments.low_communication.corpus`` made, or any folder of text. Every method trains the same network on the same tokens
with virtual workers: each encodes, hands over and decodes real messages. Writes JSON, a table and a figure, with the date and the machine;
what the JSON file holds already is not computed again unless ``--fresh`` says so. JSON is written after every run, so that a command that
is stopped loses only what was running. ``--beside 4`` makes four runs at a time, each in a process of its own. Only the standard
library and torch are needed; the figure needs matplotlib.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import datetime
import functools
import json
import multiprocessing
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

import tersegrad
from experiments.low_communication import predict, stacked
from experiments.low_communication.figure import draw
from experiments.low_communication.methods import CANDIDATES, METHODS, Method
from experiments.low_communication.plans import PLANS, Plan, Point, Run, read_run
from tersegrad import bench
from tersegrad.core.errors import MissingExtra
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


def above(mine: Sequence[Run], base: Sequence[Run]) -> float | None:
    """Per cent of loss above another method's, over the seeds that both have."""
    pairs = [(a.loss, b.loss) for a in mine for b in base if a.seed == b.seed]
    return 100 * (sum(a for a, _ in pairs) / sum(b for _, b in pairs) - 1) if pairs else None


def table(runs: Sequence[Run], plan: Plan, note: str = "") -> Table:
    """One row per method: means over its seeds."""

    def of(label: str) -> list[Run]:
        return [r for r in runs if r.method.label == label]

    def fewer(base: Sequence[Run], sent: float) -> str:
        return f"{statistics.fmean(r.sent for r in base) / sent:,.1f}" if base else ""

    every_step, alone, rows = of(METHODS[0].label), of("float32, local"), []
    for method in dict.fromkeys(r.method for r in runs):
        mine = [r for r in runs if r.method == method]

        def mean(name: str, mine: list[Run] = mine) -> float:
            return float(statistics.fmean(getattr(r, name) for r in mine))

        losses, worse = [r.loss for r in mine], above(mine, alone)
        spread = f"{min(losses):.4f} to {max(losses):.4f}" if len(losses) > 1 else ""
        row = [method.label, str(len(mine)), f"{mean('loss'):.4f}", spread, "" if worse is None else f"{worse:+.2f}"]
        row += [f"{mean('sent') / 1e6:,.3f}", number(mean("message_bits")), number(mean("bits"))]
        row += [fewer(alone, mean("sent")), fewer(every_step, mean("sent")), number(mean("coding")) if mean("coding") else ""]
        for scale in predict.scales(mine[0]):
            row += [_hours(statistics.fmean(predict.hours(r, scale, rate) for r in mine)) for _, rate in predict.LINKS]
        rows.append(tuple(row))
    columns = [Column("method", number=False), Column("seeds"), Column("loss"), Column("lowest to highest")]
    columns += [Column("% above float32, local"), Column("MB sent"), Column("bits per message"), Column("bits sent")]
    columns += [Column("times fewer than float32, local"), Column("than bf16"), Column("coding s")]
    names = [scale.name for scale in predict.scales(runs[0])]
    columns += [Column(f"hours, {name}, {link}") for name in names for link, _ in predict.LINKS]
    title = (
        f"{plan.model}: {runs[0].parameters:,} parameters, {plan.workers} virtual workers, {plan.steps} steps, "
        f"{runs[0].tokens:,} tokens, H = {plan.every} unless told otherwise"
    )
    return Table(tuple(columns), tuple(rows), title, note)


NOTE = """\
loss: nats per byte of the validation text, mean over the seeds. % above float32, local: over the seeds that both have. MB sent: by one
worker in the whole run, real messages. bits per message: per parameter; bits sent: per parameter and exchange, by one worker, both rounds
counted. coding s: seconds that one worker encoded and decoded in the whole run, which small models spend on calls rather than on
coordinates. hours: sending and coding in a whole training run, predicted from bits and from the speed on long messages; the
assumptions stand in predict.py.""".replace("\n", " ")


def read(path: Path, plan: Plan) -> list[Run]:
    """The runs in a file that had this plan."""
    if not path.exists():
        return []
    document = json.loads(path.read_text())
    return [read_run(saved) for saved in document["results"]] if document["plan"] == as_json([plan])[0] else []


def write(path: Path, plan: Plan, runs: Sequence[Run]) -> dict[str, Any]:
    """The JSON file, complete or as it was before; returns what it says about date, machine and plan."""
    path.parent.mkdir(parents=True, exist_ok=True)
    head = {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "machine": machine(),
        "plan": as_json([plan])[0],
    }
    part = path.with_suffix(".part")
    part.write_text(json.dumps({**head, "results": as_json(list(runs))}, indent=1) + "\n")
    part.replace(path)
    return head


def show(path: Path, plan: Plan, runs: Sequence[Run], lacking: Sequence[str]) -> Table:
    """Table and figure beside the JSON file."""
    head = json.loads(path.read_text())
    left_out = f" Left out: {'; '.join(lacking)}." if lacking else ""
    shown = table(runs, plan, f"{NOTE}{left_out}\n\n{head['date']}, {head['machine']}")
    path.with_suffix(".md").write_text(shown.markdown() + "\n")
    try:
        draw(runs, shown.title, path.with_suffix(""))
    except MissingExtra as missing:
        say(f"no figure: {missing}")
    return shown


def machine() -> str:
    """What computed."""
    return f"{torch.cuda.get_device_name()}, {bench.describe()}" if torch.cuda.is_available() else bench.describe()


def say(line: str) -> None:
    """A line of progress, at once."""
    print(line, file=sys.stderr, flush=True)


@functools.cache
def corpus_of(folder: Path) -> Text:
    """Read once per process."""
    return text.load(folder)


def one(method: Method, plan: Plan, seed: int, folder: Path) -> Run:
    """A run, wherever it is made."""
    if plan.stacked and method.local is not None:
        return stacked.execute(method, plan, seed, corpus_of(folder))
    return execute(method, plan, seed, f"text:{folder}", corpus_of(folder))


def complete(
    jobs: Sequence[tuple[Method, int]], plan: Plan, folder: Path, beside: int, budget: float
) -> Iterator[tuple[Method, int, Run | BaseException]]:
    """Runs as they end, ``beside`` at a time, or their failures. None is started that would probably outlast the budget."""
    begin, took, waiting = time.perf_counter(), dict[Method, float](), list(jobs)
    # Processes that are started anew: CUDA does not survive a fork.
    pool: Any = concurrent.futures.ThreadPoolExecutor(1)
    if beside > 1:
        pool = concurrent.futures.ProcessPoolExecutor(beside, multiprocessing.get_context("spawn"))
    running: dict[Any, tuple[Method, int, float]] = {}
    with pool:
        while waiting or running:
            while waiting and len(running) < beside:
                now, (method, seed) = time.perf_counter(), waiting.pop(0)
                # As long as the same method took, or else the slowest one.
                if budget and now - begin + took.get(method, max(took.values(), default=0.0)) > budget:
                    say(f"{method.label}, seed {seed}: not started, {now - begin:.0f} of {budget:.0f} s have passed")
                    continue
                running[pool.submit(one, method, plan, seed, folder)] = method, seed, now
            if not running:
                continue
            ended, _ = concurrent.futures.wait(running, return_when=concurrent.futures.FIRST_COMPLETED)
            for future in ended:
                method, seed, started = running.pop(future)
                took[method] = time.perf_counter() - started
                failure = future.exception()
                yield method, seed, future.result() if failure is None else failure


def named(text: str, known: Sequence[Method]) -> list[Method]:
    """The methods with these labels, or with these parts of labels, which semicolons separate.

    >>> [m.label for m in named("float32, local; bf16", METHODS)]
    ['bf16, every step', 'float32, local']
    """
    labels, parts = {m.label for m in known}, [part.strip() for part in text.split(";")]
    return [m for m in known if any(part == m.label if part in labels else part in m.label for part in parts)]


def main(words: Sequence[str] | None = None) -> int:
    """Train with every method and compare; the exit status says whether a run failed."""
    parser = argparse.ArgumentParser(description="Validation loss against bytes.")
    parser.add_argument("folder", type=Path, help="the corpus, or any folder of text")
    parser.add_argument("--plan", choices=PLANS, default="small")
    parser.add_argument(
        "--only", default="", help="labels of methods, or parts of them, separated by semicolons; all by default"
    )
    parser.add_argument("--seeds", type=int, default=1, help="runs per method")
    parser.add_argument("--claims", default="", help="parts of the labels that are repeated with all seeds; all by default")
    parser.add_argument("--steps", type=int, default=0, help="another number of steps than the plan's")
    parser.add_argument("--beside", type=int, default=1, help="runs at a time, each in a process of its own")
    parser.add_argument("--budget", type=float, default=0.0, help="seconds; no run is started that would probably outlast them")
    parser.add_argument("--tables", action="store_true", help="no runs: table and figure of what is there")
    parser.add_argument("--fresh", action="store_true", help="compute again what is there already")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for JSON, table and figure")
    options = parser.parse_args(words)
    for option, least in (("seeds", 1), ("steps", 0), ("beside", 1), ("budget", 0)):
        if getattr(options, option) < least:
            parser.error(f"--{option} is at least {least}")
    plan, name = PLANS[options.plan], options.plan
    if options.steps:
        plan, name = dataclasses.replace(plan, steps=options.steps), f"{name}-{options.steps}"
    known = (*METHODS, *CANDIDATES)
    wanted = named(options.only, known if options.only or plan.stacked else METHODS)
    claims = named(options.claims, known)
    lacking = [f"{m.label} ({why})" for m in wanted if (why := m.lacking())]
    for line in lacking:
        say(f"left out: {line}")
    text.check(options.folder)
    path = options.out / f"{name}.json"
    runs = [] if options.fresh else read(path, plan)
    there = {(r.method, r.seed) for r in runs}
    can = [m for m in wanted if not m.lacking()]
    every = [(m, s) for s in range(options.seeds) for m in can if s == 0 or m in claims]
    jobs, failed = [job for job in every if job not in there and not options.tables], False
    for method, seed, done in complete(jobs, plan, options.folder, options.beside, options.budget):
        if isinstance(done, BaseException):
            failed = True
            say(f"{method.label}, seed {seed}: failed, {type(done).__name__}: {done}")
            options.out.mkdir(parents=True, exist_ok=True)
            with path.with_suffix(".log").open("a") as log:
                log.write("".join(traceback.format_exception(done)))
        else:
            order = {m: k for k, m in enumerate(known)}
            runs = sorted([*runs, done], key=lambda r: (order.get(r.method, len(order)), r.seed))
            write(path, plan, runs)
            say(f"{method.label}, seed {seed}: loss {done.loss:.4f}, {done.sent / 1e6:.3f} MB, {done.wall:.0f} s")
    if not runs:
        raise SystemExit(f"no run of {options.only!r} is there")
    print(show(path, plan, runs, lacking).markdown())
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())

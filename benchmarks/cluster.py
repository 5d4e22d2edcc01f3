"""Compressed exchanges between real hosts with slow links: ``python -m benchmarks.cluster COMMAND`` (as root).

Hosts are processes in network namespaces of this machine (:mod:`benchmarks.network`), joined by links of a given rate.

- ``allreduce``: one all-reduce of 25 MB of float32, method against method, over rates and numbers of hosts;
- ``steps``: whole training steps, likewise;
- ``train``: time to 97.5 % test accuracy on MNIST (``--data``: the folder with its four files);
- ``bytes``: how what a host sends grows with the number of hosts;
- ``predict``: the planner's step times against the clock's;
- ``auto``: what ``attach(model, "auto")`` chooses, beside every setting that it could have chosen;
- ``overhead``: what a handle adds to coding and collectives, on a link without a limit;
- ``direct``: the share of a link's rate that direct exchanges reach.

Methods are texts, ``compressor + exchange + optimiser`` (:mod:`benchmarks.methods`). They are timed in turn, and medians are shown.
Every run prints a table and writes it, with the raw samples as JSON and a figure, to ``--out``.
"""

from __future__ import annotations

import dataclasses
import datetime
import itertools
import json
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from benchmarks import chosen, planned
from benchmarks.host import SETTLED, Sample, Span, Task, laps
from benchmarks.methods import Method
from benchmarks.network import HEADERS, Hosts, Network, NoNetwork, interruptible, parse_rate, rate_text
from benchmarks.vectors import TRANSFORMER, What, describe
from tersegrad import bench
from tersegrad.core.errors import BadConfiguration
from tersegrad.report.figures import require_matplotlib
from tersegrad.report.tables import Column, Table, number

RESULTS = Path(__file__).parent / "results"
OURS = "error_feedback(sparse_dithering(alpha=0.1))"
METHODS = ["float32", "bf16", "power_sgd(rank=4)", OURS]
LAYERS = "two_shot(group_bytes=4300000)"  # every large layer of the network travels by itself, while others are computed
TRAINING = [
    "float32", "bf16", "power_sgd(rank=1)", "power_sgd(rank=2)", "power_sgd(rank=4)",
    *(f"error_feedback(sparse_dithering(alpha={alpha})) + {LAYERS}" for alpha in (0.5, 0.7, 0.8, 0.9)),
]  # fmt: skip
SGD = "sgd(lr=0.5)"  # without momentum, which would multiply what error feedback sends late
RATES = ["10mbit", "100mbit", "1gbit", "unlimited"]

MethodsOption = Annotated[list[str] | None, typer.Option("--method", help="compressor + exchange + optimiser; repeatable.")]
RatesOption = Annotated[list[str] | None, typer.Option("--rate", help="10mbit, 1gbit, ... or unlimited; repeatable.")]
HostsOption = Annotated[list[int] | None, typer.Option("--hosts", help="Numbers of hosts; repeatable.")]
OutOption = Annotated[Path, typer.Option(help="Folder for the tables, JSON files and figures.")]
app = typer.Typer(add_completion=False, no_args_is_help=True, help=__doc__, pretty_exceptions_show_locals=False)


# ------------------------------------------------------------------------------------------------------------------- one cell


@dataclasses.dataclass(frozen=True)
class Cell:
    """One method at one rate with one number of hosts: medians over rounds."""

    method: str
    label: str
    hosts: int
    rate: float | None  # bits per second
    seconds: float
    encode: float = 0.0  # seconds, of the median host
    decode: float = 0.0
    waited: float = 0.0
    sent: int = 0  # bytes per host
    samples: tuple[float, ...] = ()


def merge(method: str, hosts: int, rate: float | None, rounds: Sequence[Sequence[Sample]]) -> Cell:
    """A cell from samples[host][round]: a round lasts from the first host's begin to the last one's end."""
    times = [max(s.end for s in together) - min(s.begin for s in together) for together in zip(*rounds)]
    flat = [s for samples in rounds for s in samples]

    def middle(name: str) -> float:
        return float(statistics.median(getattr(s, name) for s in flat))

    return Cell(
        str(Method.parse(method)),
        Method.parse(method).label,
        hosts,
        rate,
        statistics.median(times),
        middle("encode"),
        middle("decode"),
        middle("waited"),
        round(middle("sent")),
        tuple(times),
    )


def faster(cells: Sequence[Cell], cell: Cell, baseline: str) -> float | None:
    """How many times faster ``cell`` is than the method ``baseline`` under the same conditions (median of ratios by round)."""
    for other in cells:
        if (other.method, other.hosts, other.rate) == (str(Method.parse(baseline)), cell.hosts, cell.rate):
            if len(other.samples) == len(cell.samples) > 0:
                return statistics.median(b / a for a, b in zip(cell.samples, other.samples))
            return other.seconds / cell.seconds
    return None


def cell_table(cells: Sequence[Cell], title: str, note: str, *, coding: bool = True) -> Table:
    """Cells under each other, with how many times faster they are than the dense baselines."""
    columns = [Column("hosts"), Column("rate", number=False), Column("method", number=False), Column("seconds")]
    columns += [Column("x float32"), Column("x bf16"), Column("MB sent")]
    columns += [Column("encode"), Column("decode"), Column("wire")] if coding else []
    rows = []
    for c in cells:
        row = [str(c.hosts), rate_text(c.rate), c.label, f"{c.seconds:.3f}"]
        row += [number(faster(cells, c, "float32")), number(faster(cells, c, "bf16")), number(c.sent / 1e6)]
        row += [number(c.encode), number(c.decode), number(c.waited)] if coding else []
        rows.append(tuple(row))
    return Table(tuple(columns), tuple(rows), title, note)


# ------------------------------------------------------------------------------------------------------------------ the cluster


class Cluster:
    """Network and hosts, for as long as the context lasts."""

    def __init__(self, size: int, groups: Sequence[int], console: Console) -> None:
        self.size, self.groups, self.console = size, groups, console

    def __enter__(self) -> Cluster:
        self._stack = ExitStack()
        try:
            self._stack.enter_context(interruptible())
            self.network = self._stack.enter_context(Network(self.size))
            self.hosts = self._stack.enter_context(Hosts(self.network, self.groups))
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def limit(self, rate: float | None, size: int) -> float:
        """Set the rate, and measure it by plain TCP with every host sending to the next: bits per second of payload, the slowest."""
        self.network.limit(rate)
        addresses = [self.network.address(k) for k in range(size)]
        nbytes = round((rate or 4e9) / 8)
        slowest = max(self.hosts.run("raw", addresses, nbytes, size=size))
        measured = float(8 * nbytes / slowest)
        self.console.print(
            f"{size} hosts, {rate_text(rate)}: plain TCP moves {rate_text(float(f'{measured:.3g}'))} a host", style="dim"
        )
        if rate is not None and not 0.7 * rate / HEADERS <= measured <= 1.1 * rate / HEADERS:
            self.console.print(
                f"the limit of {rate_text(rate)} gives {rate_text(float(f'{measured:.3g}'))}: results at this rate mean little",
                style="red",
            )
        return measured


def commit() -> str | None:
    done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return done.stdout.strip() or None


def save(name: str, out: Path, document: dict[str, Any], tables: Sequence[Table], console: Console) -> Path:
    """Print the tables, write them and the JSON; returns the path without suffix."""
    out.mkdir(parents=True, exist_ok=True)
    now = datetime.datetime.now(datetime.UTC)
    stem = out / f"{now:%Y-%m-%d}-cluster-{name}"
    machine = f"{bench.describe()}; all hosts share it"
    facts = {"date": now.isoformat(timespec="seconds"), "machine": machine, "commit": commit(), **document}
    stem.with_suffix(".json").write_text(json.dumps(facts, indent=1, allow_nan=False, default=_plain) + "\n")
    written = []
    for table in tables:
        shown = dataclasses.replace(
            table, note=" ".join(filter(None, [table.note, f"{machine}. Commit {facts['commit'] or 'unknown'}."]))
        )
        console.print(shown.title, style="bold")
        console.print(shown.rich())
        console.print(shown.note, style="dim", highlight=False, markup=False)
        written.append(shown.markdown())
    stem.with_suffix(".md").write_text("\n\n".join(written) + "\n")
    console.print(f"written: {stem.with_suffix('.json')}, .md", highlight=False)
    return stem


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    raise TypeError(f"cannot write {type(value).__name__}")


def figure(cells: Sequence[Cell], stem: Path, title: str) -> None:
    """Seconds against the rate with most hosts in the middle, and against the number of hosts at a middle rate."""
    matplotlib = require_matplotlib()
    counts = sorted({c.hosts for c in cells})
    rates = sorted({c.rate for c in cells}, key=lambda r: math.inf if r is None else r)
    hosts = 4 if 4 in counts else counts[-1]
    rate = 1e8 if 1e8 in rates else rates[0]
    labels = list(dict.fromkeys(c.label for c in cells))
    styles = [("o", "-"), ("s", "--"), ("^", ":"), ("D", "-."), ("v", "-"), ("P", "--"), ("X", ":"), ("*", "-.")]
    with matplotlib.rc_context({"font.size": 9, "svg.fonttype": "none", "svg.hashsalt": "tersegrad", "axes.linewidth": 0.8}):
        drawn = matplotlib.figure.Figure(figsize=(11, 4.6), layout="constrained", dpi=150)
        left, right = drawn.subplots(1, 2, sharey=False)
        for k, label in enumerate(labels):
            marker, line = styles[k % len(styles)]
            by_rate = {c.rate: c.seconds for c in cells if c.label == label and c.hosts == hosts}
            at = [k for k, r in enumerate(rates) if r in by_rate]
            left.plot(at, [by_rate[rates[k]] for k in at], marker=marker, linestyle=line, label=label)
            by_hosts = {c.hosts: c.seconds for c in cells if c.label == label and c.rate == rate}
            some = sorted(by_hosts)
            right.plot(some, [by_hosts[n] for n in some], marker=marker, linestyle=line, label=label)
        left.set(yscale="log", xlabel="link of every host", ylabel="seconds", title=f"{hosts} hosts")
        left.set_xticks(range(len(rates)), [rate_text(r) for r in rates])
        right.set(yscale="log", xlabel="hosts (they share this machine's cores)", title=rate_text(rate))
        right.set_xticks(counts, [str(n) for n in counts])
        for axes in (left, right):
            axes.grid(True, which="major", alpha=0.3)
        left.legend(fontsize=8)
        drawn.suptitle(title)
        for suffix in (".png", ".svg"):
            drawn.savefig(stem.with_suffix(suffix), metadata={"Date": None} if suffix == ".svg" else None)


def guarded(body: Callable[[Console], None]) -> None:
    """Run a command; what a user can mend is told in one line."""
    console = Console() if sys.stdout.isatty() else Console(width=150)
    try:
        body(console)
    except NoNetwork as reason:
        console.print(f"cannot make hosts: {reason}", style="red", markup=False)
        raise typer.Exit(2) from None
    except (ValueError, BadConfiguration) as mistake:
        console.print(str(mistake), style="red", markup=False)
        raise typer.Exit(2) from None
    except KeyboardInterrupt:
        console.print("stopped; the namespaces are removed", style="yellow")
        raise typer.Exit(130) from None


# -------------------------------------------------------------------------------------------------------------------- commands


@app.command()
def allreduce(
    method: MethodsOption = None,
    rate: RatesOption = None,
    hosts: HostsOption = None,
    megabytes: Annotated[float, typer.Option(help="float32 in a vector, in 10^6 bytes.")] = 25.0,
    vectors: Annotated[
        str, typer.Option(help="normal, or transformer: a small language model's gradients, of 25 MB.")
    ] = "normal",
    rounds: Annotated[int, typer.Option(help="At least 3; at least 9 where a round is short.")] = 3,
    out: OutOption = RESULTS,
) -> None:
    """Time one all-reduce, method against method."""
    if vectors not in ("normal", TRANSFORMER):
        raise typer.BadParameter(f"normal or {TRANSFORMER}, got {vectors!r}", param_hint="--vectors")

    def body(console: Console) -> None:
        texts, counts = method or METHODS, sorted(set(hosts or [2, 4, 8]))
        rates = [parse_rate(r) for r in rate or RATES]
        what: What = round(megabytes * 1e6 / 4) if vectors == "normal" else vectors
        numel = describe(what).numel
        cells: list[Cell] = []
        audits: list[dict[str, Any]] = []
        measured: list[dict[str, Any]] = []
        with Cluster(max(counts), counts, console) as cluster:
            for size in counts:
                cluster.network.limit(None)
                for text in texts:
                    found = cluster.hosts.run("audit", text, what, 3, size=size)
                    worst = {key: max(f[key] for f in found) for key in ("messages", "worst", "first", "last")}
                    audits.append({"method": text, "hosts": size, **worst})
                cluster.hosts.run("exchange_rounds", texts, what, 2, size=size)  # touches all memory
                for limit in rates:
                    got = cluster.limit(limit, size)
                    begin = time.monotonic()
                    found = cluster.hosts.run("exchange_rounds", texts, what, 1, size=size)
                    once = time.monotonic() - begin
                    more = max(rounds, min(15, int(20 / once)))
                    found = cluster.hosts.run("exchange_rounds", texts, what, more, size=size)
                    row = [merge(text, size, limit, [f[text] for f in found]) for text in texts]
                    cells += row
                    measured.append({"hosts": size, "rate": limit, "plain_tcp": got, "drops": cluster.network.drops()})
                    for c in row:
                        console.print(f"  {c.label}: {c.seconds:.3f} s", style="dim", highlight=False, markup=False)
                cluster.hosts.run("forget", size=size)
        checks = " ".join(
            f"{Method.parse(a['method']).label}: worst message error {a['worst']:.4f}, mean's error {a['first']:.3f} at first, "
            f"{a['last']:.3f} with what was left out before."
            for a in audits
            if a["hosts"] == (4 if 4 in counts else counts[-1]) and a["messages"]
        )
        title = f"One all-reduce of {4e-6 * numel:.3g} MB of float32" + ("" if what == numel else f", gradients of a {what}")
        table = cell_table(cells, title, f"Seconds, medians in one run, methods in turn. {checks}")
        document = {"vectors": vectors, "numel": numel, "cells": cells, "audits": audits, "measured": measured}
        stem = save("allreduce" if what == numel else f"allreduce-{what}", out, document, [table], console)
        figure(cells, stem, title)

    guarded(body)


@app.command()
def steps(
    method: MethodsOption = None,
    rate: RatesOption = None,
    hosts: HostsOption = None,
    count: Annotated[int, typer.Option(help="Steps in a turn.")] = 5,
    turns: Annotated[int, typer.Option(help="Turns of every method.")] = 3,
    width: Annotated[int, typer.Option(help="Of the two hidden layers.")] = 1024,
    batch: Annotated[int, typer.Option(help="Samples per host.")] = 64,
    out: OutOption = RESULTS,
) -> None:
    """Time whole training steps of a 784-width-width-10 network, method against method."""

    def body(console: Console) -> None:
        texts, counts = method or METHODS, sorted(set(hosts or [2, 4, 8]))
        rates = [parse_rate(r) for r in rate or RATES]
        task = Task(None, width, batch)
        cells: list[Cell] = []
        compute: list[dict[str, Any]] = []
        choices: list[dict[str, Any]] = []
        with Cluster(max(counts), counts, console) as cluster:
            for size in counts:
                cluster.network.limit(None)
                alone = statistics.median(max(t) for t in zip(*cluster.hosts.run("compute_times", task, 15, size=size)))
                compute.append({"hosts": size, "seconds": alone})
                for limit in rates:
                    cluster.limit(limit, size)
                    gathered: dict[str, list[float]] = {text: [] for text in texts}
                    reports: dict[str, Any] = {}
                    for _ in range(turns):
                        for text in texts:
                            cluster.network.limit(None)
                            cluster.hosts.run("begin_training", text, task, 0, size=size)
                            cluster.hosts.run("train", 3, 3, None, size=size)
                            cluster.network.limit(limit)
                            if Method.parse(text).compressor == "auto":  # it decides on the link that it will have
                                cluster.hosts.run("decide", size=size)
                            found = cluster.hosts.run("step_times", count, size=size)
                            gathered[text] += laps([f["marks"] for f in found])
                            reports[text] = found[0]["report"]
                    for text in texts:
                        report, made = reports[text], Method.parse(text)
                        if report and "auto/choice" in report:
                            choices.append(
                                {"hosts": size, "rate": limit, "choice": report["auto/choice"], "why": report["auto/why"]}
                            )
                            console.print(f"  auto: {report['auto/choice']} ({report['auto/why']})", style="dim", markup=False)
                        sent = report["bytes/sent"] / report["steps"] if report else _dense_bytes(made, width, size)
                        encode, decode, wire = (
                            report[f"seconds/{p}"] / report["steps"] if report else 0.0 for p in ("encode", "decode", "wire")
                        )
                        times = tuple(gathered[text])
                        middle = statistics.median(times)
                        cells.append(Cell(str(made), made.label, size, limit, middle, encode, decode, wire, round(sent), times))
                        console.print(f"  {made.label}: {cells[-1].seconds:.4f} s", style="dim", highlight=False, markup=False)
        shares = ", ".join(f"{c['seconds'] * 1e3:.0f} ms with {c['hosts']} hosts" for c in compute)
        title = f"One training step, 784-{width}-{width}-10, {batch} samples per host"
        table = cell_table(cells, title, f"Seconds, medians in one run, methods in turn. Computing alone takes {shares}.")
        document = {"task": task, "cells": cells, "compute": compute, "choices": choices}
        stem = save("steps", out, document, [table], console)
        figure(cells, stem, title)

    guarded(body)


def _dense_bytes(method: Method, width: int, size: int) -> float:
    numel = 784 * width + width + width * width + width + 10 * width + 10
    return 2 * (size - 1) / size * numel * (4 if method.compressor == "float32" else 2)


@app.command()
def train(
    data: Annotated[Path, typer.Option(help="Folder with MNIST's four idx files, gzipped or not.")],
    method: MethodsOption = None,
    rate: Annotated[str, typer.Option(help="Of every link.")] = "100mbit",
    hosts: Annotated[int, typer.Option(help="Number of hosts.")] = 4,
    target: Annotated[float, typer.Option(help="Test accuracy in per cent.")] = 97.5,
    most: Annotated[int, typer.Option(help="Steps of a finished run; the limit is lifted once the target is reached.")] = 1200,
    every: Annotated[int, typer.Option(help="Steps between two looks at the test set (off the clock).")] = 10,
    seeds: Annotated[int, typer.Option(help="Repetitions with other first weights and orders.")] = 3,
    optimiser: Annotated[str, typer.Option(help="For methods that name none.")] = SGD,
    width: Annotated[int, typer.Option(help="Of the two hidden layers.")] = 1024,
    batch: Annotated[int, typer.Option(help="Samples per host.")] = 64,
    timed: Annotated[
        int | None, typer.Option(help="Steps on the link of methods whose every step sends the same bytes.")
    ] = None,
    out: OutOption = RESULTS,
) -> None:
    """Time to a test accuracy, method against method.

    With --timed K, float32, bf16 and power_sgd take K steps over the limited link and the rest without the limit: training is the
    same either way, and the steps up to the target are counted at the mean time of those K.
    """

    def body(console: Console) -> None:
        texts, limit = method or TRAINING, parse_rate(rate)
        runs: list[dict[str, Any]] = []
        with Cluster(hosts, [hosts], console) as cluster:
            task = Task(str(data), width, batch, optimiser)
            alone = statistics.median(max(t) for t in zip(*cluster.hosts.run("compute_times", task, 15)))
            measured = cluster.limit(limit, hosts)
            for seed in range(seeds):
                for text in texts:
                    task = Task(str(data), width, batch, optimiser, seed)
                    cluster.network.limit(None)
                    cluster.hosts.run("begin_training", text, task, 3)
                    cluster.network.limit(limit)
                    made = Method.parse(text)
                    brief = timed is not None and (made.dense or made.exchange.name == "power_sgd")
                    first = cluster.hosts.run("train", timed if brief else most, timed if brief else every, target)
                    if made.compressor != "auto":  # which would choose anew
                        cluster.network.limit(None)
                    second = cluster.hosts.run("train", most, every, target) if brief else None
                    rest = cluster.hosts.run("train", most, every, None)
                    runs.append(_run(text, seed, first, second, rest))
                    r = runs[-1]
                    got = "reached" if r["reached"] is not None else "missed"
                    console.print(
                        f"seed {seed}, {Method.parse(text).label}: {target:g} % {got} after {r['steps']} steps, {r['seconds']:.1f} s "
                        f"({r['seconds'] / r['steps'] * 1e3:.0f} ms per step); in the end {r['final']:.2f} %",
                        style="dim", highlight=False, markup=False,
                    )  # fmt: skip
        table = train_table(runs, texts, target, alone, f"Time to {target:g} % on MNIST, {hosts} hosts, {rate_text(limit)}")
        document = {"target": target, "rate": limit, "plain_tcp": measured, "hosts": hosts, "most": most, "every": every}
        save(f"train-{rate}", out, {**document, "compute": alone, "optimiser": optimiser, "runs": runs}, [table], console)

    guarded(body)


def _run(
    text: str,
    seed: int,
    timed: Sequence[dict[str, Any]],
    untimed: Sequence[dict[str, Any]] | None,
    rest: Sequence[dict[str, Any]],
) -> dict[str, Any]:
    """One run; the steps of ``untimed``, up to the target, count at the mean time of those of ``timed``."""
    first, last = timed[0], (untimed or timed)[0]
    history = [entry for part in (timed, untimed or [], rest) if part for entry in part[0]["history"]]
    report = first["report"] or {}
    step = max(t["seconds"] for t in timed) / first["steps"]
    return {
        "method": text,
        "seed": seed,
        "reached": last["reached"],
        "steps": last["steps"],
        "timed_steps": first["steps"],
        "seconds": step * last["steps"],
        "final": statistics.mean(accuracy for _, _, accuracy in history[-5:]),  # of the last looks: one alone is noisy
        "sent": report.get("bytes/sent", 0) / max(report.get("steps", 0), 1),
        "report": report,
        "history": history,
    }


def train_table(runs: Sequence[dict[str, Any]], texts: Sequence[str], target: float, compute: float, title: str) -> Table:
    """Medians over seeds; a method that missed the target in any of them shows no time."""
    columns = [Column("method", number=False), Column("s"), Column("steps"), Column("ms/step"), Column("compute %")]
    columns += [Column("x float32"), Column("x bf16"), Column("final %"), Column("kB/step")]
    by = {text: [r for r in runs if r["method"] == text] for text in texts}

    def times(text: str) -> list[float] | None:
        found = by.get(text, [])
        return [r["seconds"] for r in found] if found and all(r["reached"] is not None for r in found) else None

    def ratio(text: str, baseline: str) -> float | None:
        base = next((t for t in texts if str(Method.parse(t)) == str(Method.parse(baseline))), None)
        ours, theirs = times(text), times(base) if base else None
        return statistics.median(b / a for a, b in zip(ours, theirs)) if ours and theirs else None

    rows = []
    for text in texts:
        took, found = times(text), by[text]
        per_step = statistics.median(r["seconds"] / r["steps"] for r in found)
        row = [Method.parse(text).label, number(statistics.median(took)) if took else "missed"]
        row += [f"{statistics.median(r['steps'] for r in found):g}", f"{per_step * 1e3:.0f}", f"{100 * compute / per_step:.0f}"]
        row += [
            number(ratio(text, "float32")),
            number(ratio(text, "bf16")),
            f"{statistics.median(r['final'] for r in found):.2f}",
        ]
        sent = statistics.median(r["sent"] for r in found)
        rows.append((*row, number(sent / 1e3) if sent else "-"))
    note = (
        f"Medians over {len({r['seed'] for r in runs})} seeds; looks at the test set are off the clock; computing alone takes "
        f"{compute * 1e3:.0f} ms per step."
    )
    brief = sorted({r["timed_steps"] for r in runs if r["timed_steps"] < r["steps"]})
    if brief:
        note += f" Methods whose steps all send the same bytes were timed for {brief[0]} steps, the others to the target."
    return Table(tuple(columns), tuple(rows), title, note)


@app.command(name="bytes")
def bytes_(
    method: Annotated[str, typer.Option(help="The compressor whose exchanges are compared.")] = OURS,
    hosts: HostsOption = None,
    megabytes: Annotated[float, typer.Option(help="float32 in a vector, in 10^6 bytes.")] = 25.0,
    out: OutOption = RESULTS,
) -> None:
    """Bytes that a host sends, against the formulas: two_shot 2(p-1)/p messages, all_gather p-1."""

    def body(console: Console) -> None:
        counts, numel = sorted(set(hosts or [2, 4, 8])), round(megabytes * 1e6 / 4)
        rows: list[dict[str, Any]] = []
        with Cluster(max(counts), counts, console) as cluster:
            for size, alike in itertools.product(counts, (True, False)):
                for exchange, factor in (("all_gather", size - 1.0), ("two_shot", 2 * (size - 1) / size)):
                    text = f"{method} + {exchange}"
                    before = cluster.network.sent()
                    found = cluster.hosts.run("exchange_rounds", [text], numel, 3, alike, size=size)
                    wire = [(b - a) / 3 for a, b in zip(before, cluster.network.sent())][:size]
                    sent = [statistics.mean(s.sent for s in f[text]) for f in found]
                    row = {"hosts": size, "alike": alike, "exchange": exchange, "messages": factor}
                    rows.append({**row, "sent": max(sent), "interface": max(wire)})
                cluster.hosts.run("forget", size=size)
        title = f"Bytes a host sends in one all-reduce of {megabytes:g} MB, {Method.parse(method).label}"
        save("bytes", out, {"method": method, "numel": numel, "rows": rows}, [bytes_table(rows, title)], console)

    guarded(body)


def bytes_table(rows: Sequence[dict[str, Any]], title: str) -> Table:
    """Bytes against what the formulas say, in messages of the whole vector."""
    columns = [Column("layers", number=False), Column("hosts"), Column("exchange", number=False), Column("messages by formula")]
    columns += [Column("messages sent"), Column("MB sent"), Column("MB on the interface")]
    ordered = sorted(rows, key=lambda r: (not r["alike"], r["hosts"]))
    message = {
        a: r["sent"] / r["messages"] for a in (True, False) for r in rows if r["alike"] is a and r["exchange"] == "all_gather"
    }
    lines = tuple(
        (
            "of one scale" if r["alike"] else "of scales 1 to 16",
            str(r["hosts"]),
            r["exchange"],
            f"{r['messages']:.3f}",
            f"{r['sent'] / message[r['alike']]:.3f}",
            f"{r['sent'] / 1e6:.3f}",
            f"{r['interface'] / 1e6:.3f}",
        )
        for r in ordered
    )
    note = (
        f"The busiest host. A message of the whole vector has {message[True] / 1e6:.3f} MB where all layers have one scale, "
        f"{message[False] / 1e6:.3f} MB where they differ: it spends its error on the small ones. Parts of two_shot are held to their "
        "error one by one, so the small layers of a part cost bits of their own. Up to two hosts both exchanges send the same and "
        "all_gather compresses once only; from three on two_shot sends less. The interface counts headers and acknowledgements too."
    )
    return Table(tuple(columns), lines, title, note)


@app.command()
def predict(
    method: MethodsOption = None,
    rate: RatesOption = None,
    hosts: HostsOption = None,
    count: Annotated[int, typer.Option(help="Steps in a turn.")] = 4,
    turns: Annotated[int, typer.Option(help="Turns of every method.")] = 3,
    width: Annotated[int, typer.Option(help="Of the two hidden layers.")] = 1024,
    batch: Annotated[int, typer.Option(help="Samples of each host.")] = 64,
    out: OutOption = RESULTS,
) -> None:
    """The planner against the clock: predicted and measured training steps, and whether it names the fastest method.

    The planner is given what it would find in a job: the link by measure_link, coding by measure_coding on a gradient, all hosts
    busy, and the time of forward and backward and the size of a message by a few steps on a link without a limit.
    """

    def body(console: Console) -> None:
        texts, counts = method or planned.METHODS, sorted(set(hosts or [2, 4]))
        rates = [parse_rate(r) for r in rate or RATES]
        task = Task(None, width, batch)
        cells: list[planned.Cell] = []
        links: list[dict[str, Any]] = []
        with Cluster(max(counts), counts, console) as cluster:
            for size, limit in itertools.product(counts, rates):
                cluster.limit(limit, size)
                told: dict[str, list[float]] = {text: [] for text in texts}
                taken: dict[str, list[float]] = {text: [] for text in texts}
                # What the planner learns and what it foretells take turns, so that a slow moment of the machine meets both.
                for _ in range(turns):
                    cluster.network.limit(None)
                    known = planned.learn(cluster.hosts, texts, task, size)
                    cluster.network.limit(limit)
                    link = cluster.hosts.run("link", size=size)[0]
                    links.append({"hosts": size, "rate": limit, **dataclasses.asdict(link)})
                    for text in texts:
                        cluster.network.limit(None)
                        cluster.hosts.run("begin_training", text, task, 0, size=size)
                        # Compressors that look at the variance send less in every step, for some dozens of steps.
                        cluster.hosts.run("train", SETTLED, SETTLED, None, size=size)
                        trial = cluster.hosts.run("step_times", 4, size=size)[0]["report"]
                        cluster.network.limit(limit)
                        # Connections that were fast a moment ago share a slow link unevenly at first.
                        cluster.hosts.run("step_times", 3, size=size)
                        found = cluster.hosts.run("step_times", count, size=size)
                        taken[text] += laps([f["marks"] for f in found])
                        said = [None if trial is None else trial[f"bits_per_coordinate{end}"] for end in ("", "/sent")]
                        told[text].append(planned.foresee(text, known, link, size, *said).seconds)
                for text in texts:
                    middle = statistics.median(told[text]), statistics.median(taken[text])
                    c = planned.Cell(text, size, limit, *middle, tuple(told[text]), tuple(taken[text]))
                    cells.append(c)
                    console.print(
                        f"  {c.label}: {c.predicted:.4f} s predicted, {c.measured:.4f} s measured ({100 * c.off:+.0f} %)",
                        style="dim", highlight=False, markup=False,
                    )  # fmt: skip
        title = f"Predicted and measured training steps, 784-{width}-{width}-10, {batch} samples of each host"
        summary = planned.summary(cells)
        save(
            "predict",
            out,
            {"task": task, "cells": cells, "links": links, "summary": summary},
            [planned.table(cells, links, title)],
            console,
        )

    guarded(body)


@app.command()
def auto(
    rate: RatesOption = None,
    hosts: HostsOption = None,
    seconds: Annotated[float, typer.Option(help="Of turns, for each rate and number of hosts.")] = 40.0,
    turns: Annotated[int, typer.Option(help="At least so many.")] = 4,
    width: Annotated[int, typer.Option(help="Of the two hidden layers.")] = 1024,
    batch: Annotated[int, typer.Option(help="Samples of each host.")] = 64,
    out: OutOption = RESULTS,
) -> None:
    """Steps of attach(model, "auto") beside those of every setting that it chooses from, in turn."""

    def body(console: Console) -> None:
        counts, rates = sorted(set(hosts or [2, 4])), [parse_rate(r) for r in rate or RATES]
        task, cells = Task(None, width, batch), list[chosen.Cell]()
        with Cluster(max(counts), counts, console) as cluster:
            for size, limit in itertools.product(counts, rates):
                cluster.limit(limit, size)
                cells.append(chosen.measure(cluster.hosts, cluster.network.limit, limit, size, task, seconds, turns))
                c = cells[-1]
                console.print(
                    f"  {c.choice}: {c.times(c.best):.3f} times as long as {c.best}, {c.times('bf16'):.3f} as bf16",
                    style="dim", highlight=False, markup=False,
                )  # fmt: skip
        title = f"Training steps with auto and with each of its choices, 784-{width}-{width}-10, {batch} samples of each host"
        save("auto", out, {"task": task, "cells": cells}, [chosen.table(cells, title)], console)

    guarded(body)


@app.command()
def overhead(
    method: Annotated[str, typer.Option(help="A compressor; its two-shot exchange is measured.")] = OURS,
    hosts: Annotated[int, typer.Option(help="Number of hosts.")] = 4,
    megabytes: Annotated[float, typer.Option(help="float32 in the gradients, in 10^6 bytes.")] = 25.0,
    rounds: Annotated[int, typer.Option(help="Of each measurement, in turn.")] = 15,
    out: OutOption = RESULTS,
) -> None:
    """What a handle's step takes on a link without a limit, against coding plus bare collectives."""

    def body(console: Console) -> None:
        numel = round(megabytes * 1e6 / 4)
        taken: dict[str, list[float]] = {"handle": [], "coding": [], "collectives": [], "float32": [], "bf16": []}
        report: dict[str, Any] = {}
        with Cluster(hosts, [hosts], console) as cluster:
            for _ in range(rounds):
                found = cluster.hosts.run("handle_times", method, numel, 5)
                taken["handle"] += until_the_last([f["spans"] for f in found])
                report = found[0]["report"]
                sent = int(report["bytes/sent"] / report["steps"])
                taken["coding"] += until_the_last(cluster.hosts.run("coding", method, numel, 6))[1:]
                taken["collectives"] += until_the_last(cluster.hosts.run("wires", sent, 5))
                dense = cluster.hosts.run("exchange_rounds", ["float32", "bf16"], numel, 3)
                for kind in ("float32", "bf16"):
                    taken[kind] += list(merge(kind, hosts, None, [f[kind] for f in dense]).samples)
        medians = {name: statistics.median(times) for name, times in taken.items()}
        table = overhead_table(medians, report, f"A handle's step on an unlimited link, {hosts} hosts, {megabytes:g} MB")
        save(
            "overhead",
            out,
            {"method": method, "numel": numel, "hosts": hosts, "medians": medians, "samples": taken, "report": report},
            [table],
            console,
        )

    guarded(body)


@app.command()
def direct(
    rate: RatesOption = None,
    hosts: HostsOption = None,
    busy: Annotated[float, typer.Option(help="Seconds for which a host's bytes fill its link.")] = 0.8,
    rounds: Annotated[int, typer.Option(help="Of each way, in turn.")] = 5,
    out: OutOption = RESULTS,
) -> None:
    """The share of a link's rate that direct exchanges and gathers reach, all hosts sending to all others: ours, and gloo's own."""

    def body(console: Console) -> None:
        counts, rates = sorted(set(hosts or [2, 4])), [parse_rate(r) for r in rate or ["10mbit", "100mbit", "1gbit"]]
        found: list[dict[str, Any]] = []
        with Cluster(max(counts), counts, console) as cluster:
            for size, limit in itertools.product(counts, rates):
                if limit is None:
                    raise BadConfiguration("a link without a limit has no rate to share")
                cluster.limit(limit, size)
                nbytes = int(limit / 8 * busy / (size - 1))
                times = cluster.hosts.run("directly", nbytes, rounds, size=size)
                taken = {way: [max(t) for t in zip(*(f[way] for f in times))] for way in times[0]}
                shares = {way: 8 * nbytes * (size - 1) / limit / statistics.median(t) for way, t in taken.items()}
                found.append({"hosts": size, "rate": limit, "bytes": nbytes, "seconds": taken, "shares": shares})
        ways = list(found[0]["shares"])
        columns = (Column("hosts"), Column("rate", number=False), Column("MB to each"), *map(Column, ways))
        rows = tuple(
            (str(f["hosts"]), rate_text(f["rate"]), number(f["bytes"] / 1e6), *(f"{f['shares'][way]:.2f}" for way in ways))
            for f in found
        )
        title = "Share of the link's rate that exchanges reach"
        save("direct", out, {"cells": found}, [Table(columns, rows, title, "Medians, ways in turn.")], console)

    guarded(body)


def until_the_last(spans: Sequence[Sequence[Sequence[Span]]]) -> list[float]:
    """Seconds of each round from spans[host][round][part]: every part lasts from the first host's begin to the last one's end.

    >>> until_the_last([[[(0.0, 2.0), (3.0, 4.0)]], [[(1.0, 3.0), (3.5, 4.5)]]])
    [4.5]
    """
    rounds = zip(*spans)
    return [sum(max(e for _, e in part) - min(b for b, _ in part) for part in zip(*together)) for together in rounds]


def overhead_table(medians: dict[str, float], report: dict[str, Any], title: str) -> Table:
    """The handle beside its parts and the dense all-reduces."""
    parts = medians["coding"] + medians["collectives"]
    rows = [
        ("handle, one step", f"{medians['handle'] * 1e3:.1f}", f"{medians['handle'] / parts:.2f}"),
        ("encode and decode, all hosts busy", f"{medians['coding'] * 1e3:.1f}", f"{medians['coding'] / parts:.2f}"),
        ("bare collectives", f"{medians['collectives'] * 1e3:.1f}", f"{medians['collectives'] / parts:.2f}"),
        ("float32 all-reduce", f"{medians['float32'] * 1e3:.1f}", f"{medians['float32'] / parts:.2f}"),
        ("bf16 all-reduce", f"{medians['bf16'] * 1e3:.1f}", f"{medians['bf16'] / parts:.2f}"),
    ]
    least = min(medians["float32"], medians["bf16"])
    verdict = "does not pay" if medians["handle"] > least else "pays"
    note = f"Compression {verdict} on this link. The handle says: {report.get('verdict', '')}"
    return Table((Column("what", number=False), Column("ms"), Column("x parts")), tuple(rows), title, note)


if __name__ == "__main__":
    app()

"""Score against bytes: ``python -m experiments.federated.run [--task NAME] [--folder FOLDER] [--seeds N] [--quick] [--out FOLDER]``.

Writes JSON, Markdown and a figure, with the date and the machine. Everything but those two is deterministic.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import datetime
import json
import multiprocessing
import re
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console

from experiments.federated.methods import METHODS, SMALL
from experiments.federated.simulate import Method, Point, Run, Setting, simulate
from tersegrad import bench
from tersegrad.bench.machine import cores
from tersegrad.report.figures import require_matplotlib
from tersegrad.report.plain import as_json
from tersegrad.report.tables import Column, Table

RESULTS = Path(__file__).parent / "results"
SETTINGS = {
    "digits": Setting(clients=20, fraction=0.5, rounds=40, epochs=2, rate=0.1, batch=20),
    "digits-small": Setting(task="digits-small", clients=20, fraction=0.5, rounds=40, epochs=2, rate=0.1, batch=20),
    "mnist": Setting(task="mnist", clients=100, fraction=0.1, rounds=100, epochs=1, rate=0.05, batch=20, every=10),
    "shakespeare": Setting(task="shakespeare", clients=99, fraction=0.1, rounds=30, epochs=1, rate=0.3, batch=50),
    "parkinsons": Setting(task="parkinsons", clients=42, fraction=0.25, rounds=60, epochs=2, rate=0.03, batch=20),
    "a9a": Setting(task="a9a", clients=100, fraction=0.1, rounds=60, epochs=1, rate=0.05, batch=20, skew=10.0, every=10),
}


def execute(job: tuple[Method, Setting, int]) -> Run:
    """One job, on one thread: the parallelism is in the jobs."""
    torch.set_num_threads(1)
    return simulate(*job)


def table(runs: Sequence[Run], setting: Setting) -> Table:
    """One row a method: medians over seeds, losses from the same seed without compression."""
    plain = {r.seed: r for r in runs if r.method.uplink is None}
    rows = []
    for method in dict.fromkeys(r.method for r in runs):
        mine = [r for r in runs if r.method == method]

        def median(values: Any) -> float:
            return float(statistics.median(values))

        up, down = median(r.uplink_message for r in mine), median(r.downlink_message for r in mine)
        dense_up, dense_down = (
            median(r.uplink_message for r in plain.values()),
            median(r.downlink_message for r in plain.values()),
        )
        lost = median(plain[r.seed].last.score - r.last.score for r in mine)
        rows.append(
            (
                method.label, method.uplink or "", f"{median(r.last.score for r in mine):.2f}", f"{lost:+.2f}", f"{up:,.0f}",
                f"{dense_up / up:.1f}", f"{down:,.0f}", f"{dense_down / down:.1f}", f"{median(r.seconds for r in mine):.0f}",
            )
        )  # fmt: skip
    columns = (
        Column("method", number=False), Column("uplink", number=False), Column("score %"), Column("points lost"),
        Column("bytes up"), Column("times smaller"), Column("bytes down"), Column("times smaller"), Column("CPU s"),
    )  # fmt: skip
    seeds, numel = len({r.seed for r in runs}), runs[0].parameters
    title = (
        f"{setting.task}: {setting.clients} clients, {setting.fraction:.0%} a round, {setting.rounds} rounds, "
        f"{numel:,} parameters, {f'median of {seeds} paired seeds' if seeds > 1 else 'one seed'}"
    )
    return Table(columns, tuple(rows), title)


FAMILIES = {  # colour and marker; told apart without colour too
    "none (Flower's default)": ("black", "o"), "fp16": ("#7f7f7f", "D"), "int8": ("#7f7f7f", "s"), "QSGD": ("#8c564b", "P"),
    "rotation + sign (EDEN-like)": ("#9467bd", "X"), "top-k + feedback": ("#ff7f0e", "v"),
    "Sparse Dithering + feedback": ("#1f77b4", "^"), "subtractive dithering": ("#2ca02c", "h"),
    "Spherical + feedback": ("#d62728", "*"),
}  # fmt: skip
GOALS = ((15.0, 0.5), (100.0, 1.5))  # times smaller, points lost


def figure(runs: Sequence[Run], setting: Setting, stem: Path) -> list[Path]:
    """Left: what each method loses for what it saves; right: how the score grows with the bytes sent (first seed)."""
    matplotlib = require_matplotlib()
    style = {"font.size": 9, "svg.fonttype": "none", "svg.hashsalt": "tersegrad", "axes.linewidth": 0.8}
    with matplotlib.rc_context(style):
        drawn = matplotlib.figure.Figure(figsize=(11.5, 5.6), layout="constrained", dpi=130)
        matplotlib.backends.backend_agg.FigureCanvasAgg(drawn)
        left, right = drawn.subplots(1, 2, width_ratios=(1.15, 1))
        _draw_losses(left, runs)
        _draw_curves(right, runs)
        for axis in (left, right):
            axis.set_xscale("log")
            axis.grid(color="#e8e8e8", linewidth=0.6)
            axis.set_axisbelow(True)
            axis.xaxis.set_major_formatter(matplotlib.ticker.FuncFormatter(lambda x, _: f"{x:g}"))
        drawn.suptitle(table(runs, setting).title, x=0.01, ha="left", fontsize=10.5)
        handles, labels = right.get_legend_handles_labels()
        drawn.legend(handles, labels, loc="outside lower center", ncols=5, frameon=False, fontsize=8.5)
        stem.parent.mkdir(parents=True, exist_ok=True)
        paths = [stem.with_suffix(".png"), stem.with_suffix(".svg")]
        drawn.savefig(paths[0])
        drawn.savefig(paths[1], metadata={"Date": None})
        return paths


def _draw_losses(axis: Any, runs: Sequence[Run]) -> None:
    """Points lost against times smaller: medians, with bars from the best to the worst seed."""
    plain = {r.seed: r for r in runs if r.method.uplink is None}
    drawn: dict[str, list[tuple[float, float]]] = {}
    for method in dict.fromkeys(r.method for r in runs if r.method.uplink is not None):
        mine = [r for r in runs if r.method == method]
        lost = sorted(plain[r.seed].last.score - r.last.score for r in mine)
        smaller = statistics.median(plain[r.seed].uplink_message / r.uplink_message for r in mine)
        middle = statistics.median(lost)
        colour, marker = FAMILIES.get(method.family, ("black", "."))
        axis.plot([smaller, smaller], [lost[0], lost[-1]], color=colour, linewidth=0.8, alpha=0.6)
        axis.plot([smaller], [middle], color=colour, marker=marker, markersize=6.5, linestyle="none")
        strength = (method.label.partition(", ")[2] or method.label).replace("alpha ", "\u03b1 ").replace("omega ", "\u03c9 ")
        below = "Sparse" in method.family or "top-k" in method.family  # else the families' labels meet
        place = {"xytext": (0, -6), "ha": "center", "va": "top"} if below else {"xytext": (5, 4)}
        box = {"boxstyle": "square,pad=0.1", "facecolor": "white", "edgecolor": "none", "alpha": 0.8}
        axis.annotate(strength, (smaller, middle), textcoords="offset points", fontsize=7.5, color=colour, bbox=box, **place)
        drawn.setdefault(method.family, []).append((smaller, middle))
    for family, points in drawn.items():
        x, y = zip(*sorted(points))
        axis.plot(x, y, color=FAMILIES.get(family, ("black", "."))[0], linewidth=1.1)
    edge = max(400.0, 1.3 * axis.get_xlim()[1])
    corners = [(GOALS[0][0], -9.0), GOALS[0], (GOALS[1][0], GOALS[0][1]), GOALS[1], (edge, GOALS[1][1])]
    top = axis.get_ylim()
    axis.plot(*zip(*corners), color="black", linewidth=1.0, linestyle=(0, (4, 3)))
    aside = {"textcoords": "offset points", "fontsize": 7.5, "va": "top"}
    axis.annotate("goals: above this line", (edge, GOALS[1][1]), (-4, -4), ha="right", **aside)
    axis.set_xlim(1.5, edge)
    axis.set_ylim(max(top[1], 2.0), min(top[0], -0.3))  # upside down: better is higher
    axis.set_xlabel("uplink message, times smaller than Flower's (log scale)")
    axis.set_ylabel("points lost against no compression" + (" (bars: all seeds)" if len(plain) > 1 else ""))


def _draw_curves(axis: Any, runs: Sequence[Run]) -> None:
    first, named = min(r.seed for r in runs), set()
    for r in (r for r in runs if r.seed == first):
        colour, marker = FAMILIES.get(r.method.family, ("black", "."))
        points = [p for p in r.points if p.uplink]
        label = None if r.method.family in named else r.method.family
        named.add(r.method.family)
        x, y = [p.uplink / 1e6 for p in points], [p.score for p in points]
        axis.plot(x, y, color=colour, marker=marker, markersize=3.5, linewidth=1.1, label=label)
    axis.set_xlabel("bytes sent by all clients together, millions (log scale)")
    axis.set_ylabel(f"score on held-out data, % (seed {first})")


def write(out: Path, task: str, found: Sequence[Run], quick: bool) -> dict[str, Any]:
    """Every run as JSON, under a head with date and machine, which is returned."""
    out.mkdir(parents=True, exist_ok=True)
    head = {"date": datetime.datetime.now(datetime.UTC).date().isoformat(), "machine": bench.describe(), "quick": quick}
    plain = as_json([dataclasses.replace(r, setting=dataclasses.replace(r.setting, folder="")) for r in found])
    (out / f"{task}.json").write_text(json.dumps({**head, "results": plain}) + "\n")
    return head


def read(path: Path, setting: Setting) -> list[Run]:
    """The runs in a file that had this setting; where the data lay does not matter."""
    if not path.exists():
        return []
    found = []
    for facts in json.loads(path.read_text())["results"]:
        made = {
            "method": Method(**{f.name: facts["method"][f.name] for f in dataclasses.fields(Method)}),
            "setting": dataclasses.replace(Setting(**facts["setting"]), folder=setting.folder),
            "points": tuple(Point(**p) for p in facts["points"]),
        }
        plain = {field.name: facts[field.name] for field in dataclasses.fields(Run)}
        found.append(Run(**{**plain, **made}))
    return [r for r in found if r.setting == setting and r.method in METHODS]


def main(
    task: Annotated[str, typer.Option(help="digits, digits-small, mnist, shakespeare, parkinsons or a9a")] = "digits",
    folder: Annotated[Path | None, typer.Option(help="where the files of all but digits lie")] = None,
    seeds: Annotated[int, typer.Option(help="how many; the table has their median")] = 0,
    clients: Annotated[int, typer.Option(help="how many; 0: as usual for the task")] = 0,
    only: Annotated[str, typer.Option(help="methods whose label contains one of these words, separated by commas")] = "",
    jobs: Annotated[int, typer.Option(help="processes; 0: one per core")] = 0,
    fresh: Annotated[bool, typer.Option(help="compute everything again, not only what the results lack")] = False,
    quick: Annotated[bool, typer.Option(help="few rounds and clients, to see that it runs")] = False,
    out: Annotated[Path, typer.Option(help="folder for the results")] = RESULTS,
) -> None:
    """Compare the methods on one task."""
    console = Console(width=max(Console().width, 160))
    setting = dataclasses.replace(SETTINGS[task], folder=str(folder or ""))
    if clients:
        setting = dataclasses.replace(setting, clients=clients)
    if quick:
        setting = dataclasses.replace(setting, clients=6, fraction=0.5, rounds=4, every=2)
    chosen = range(1 if quick else seeds or (5 if "digits" in task else 1))
    words = [w for w in only.split(",") if w]
    methods = [m for m in METHODS if not words or m.uplink is None or any(_names(w, m.label) for w in words)]
    methods = [m for m in methods if "spherical" not in (m.uplink or "") or _parameters(setting) <= SMALL]
    known = [] if fresh or quick else read(out / f"{task}.json", setting)
    have = {(r.method, r.seed) for r in known}
    work = [(method, setting, seed) for seed in chosen for method in methods if (method, seed) not in have]
    found = list(known)
    if quick:
        found += [execute(job) for job in work]
    elif work:
        context = multiprocessing.get_context("spawn")
        with concurrent.futures.ProcessPoolExecutor(jobs or min(cores(), len(work)), context) as pool:
            for future in concurrent.futures.as_completed([pool.submit(execute, job) for job in work]):
                r = future.result()
                found.append(r)
                console.print(f"{r.method.label}, seed {r.seed}: {r.last.score:.2f} %, {r.uplink_message:,.0f} bytes up")
                write(out, task, found, quick)
    shown = publish(out, task, found, setting, quick)
    console.print(shown.title, style="bold")
    console.print(shown.rich())


def publish(out: Path, task: str, found: Sequence[Run], setting: Setting, quick: bool = False) -> Table:
    """Write JSON, figure and Markdown; returns the table."""
    place = {method: number for number, method in enumerate(METHODS)}
    found = sorted(found, key=lambda r: (place.get(r.method, len(place)), r.seed))
    shown = table(found, setting)
    head = write(out, task, found, quick)
    pictures = figure(found, setting, out / task)
    text = [
        f"# {task}",
        "Bytes are means of whole Flower messages, headers included, after serialisation; a loss is against the run without "
        "compression of the same seed. All but the first row also compress the downlink, with "
        f"`{METHODS[1].downlink}` and snapshots by `{METHODS[1].snapshot}`. CPU times include the training.",
        f"![{task}]({pictures[0].name})",
        f"## {shown.title}",
        dataclasses.replace(shown, title="").markdown(),
        f"{head['date']}, {head['machine']}{', quick' if quick else ''}",
    ]
    (out / f"{task}.md").write_text("\n\n".join(text) + "\n")
    return shown


def _names(word: str, label: str) -> bool:
    """Whether a label contains a word; "omega 1" is not part of "omega 128".

    >>> _names("omega 1", "dithering, omega 1"), _names("omega 1", "dithering, omega 128"), _names("top", "top-k")
    (True, False, True)
    """
    return re.search(rf"{re.escape(word)}(?![0-9.])", label) is not None


def _parameters(setting: Setting) -> int:
    from examples.flower.federated import tasks

    return sum(p.numel() for p in tasks.load(setting.task, setting.folder).model().parameters())


if __name__ == "__main__":
    typer.run(main)

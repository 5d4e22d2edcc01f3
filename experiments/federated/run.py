"""Score against bytes: ``python -m experiments.federated.run [--task NAME] [--folder FOLDER] [--seeds N] [--quick] [--out FOLDER]``.

Writes JSON, Markdown and a figure, with the date and the machine. Everything but those two is deterministic.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import datetime
import json
import multiprocessing
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
    "digits": Setting(clients=20, fraction=0.5, rounds=60, epochs=2, rate=0.1, batch=20),
    "digits-small": Setting(task="digits-small", clients=20, fraction=0.5, rounds=60, epochs=2, rate=0.1, batch=20),
    "mnist": Setting(task="mnist", clients=100, fraction=0.1, rounds=100, epochs=1, rate=0.05, batch=20, every=10),
    "shakespeare": Setting(task="shakespeare", clients=99, fraction=0.1, rounds=30, epochs=1, rate=0.3, batch=50),
    "parkinsons": Setting(task="parkinsons", clients=42, fraction=0.25, rounds=60, epochs=2, rate=0.03, batch=20),
}
MARKERS = "oDsX^vPp<>h*d"


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
        f"{numel:,} parameters, median of {seeds} paired seed{'s' if seeds > 1 else ''}"
    )
    return Table(columns, tuple(rows), title)


def figure(runs: Sequence[Run], setting: Setting, stem: Path) -> list[Path]:
    """Score against the total uplink, one line a method (the first seed), marks every evaluation."""
    matplotlib = require_matplotlib()
    with matplotlib.rc_context({"font.size": 9, "svg.fonttype": "none", "svg.hashsalt": "tersegrad", "axes.linewidth": 0.8}):
        drawn = matplotlib.figure.Figure(figsize=(9.6, 5.6), layout="constrained", dpi=130)
        matplotlib.backends.backend_agg.FigureCanvasAgg(drawn)
        axis = drawn.subplots()
        first = min(r.seed for r in runs)
        for number, r in enumerate(r for r in runs if r.seed == first):
            points = [p for p in r.points if p.uplink]
            style = {"color": "black", "linewidth": 2.0} if r.method.uplink is None else {"linewidth": 1.2}
            x, y = [p.uplink / 1e6 for p in points], [p.score for p in points]
            axis.plot(x, y, marker=MARKERS[number % len(MARKERS)], markersize=4.5, label=r.method.label, **style)
        axis.set_xscale("log")
        axis.set_xlabel("bytes sent by all clients together, millions (whole Flower messages, log scale)")
        axis.set_ylabel("score on held-out data, %")
        axis.grid(color="#e4e4e4", linewidth=0.6)
        axis.set_title(table(runs, setting).title, loc="left", fontsize=10)
        drawn.legend(loc="outside right upper", frameon=False, fontsize=8.5)
        stem.parent.mkdir(parents=True, exist_ok=True)
        paths = [stem.with_suffix(".png"), stem.with_suffix(".svg")]
        drawn.savefig(paths[0])
        drawn.savefig(paths[1], metadata={"Date": None})
        return paths


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
            "method": Method(**facts["method"]),
            "setting": dataclasses.replace(Setting(**facts["setting"]), folder=setting.folder),
            "points": tuple(Point(**p) for p in facts["points"]),
        }
        plain = {field.name: facts[field.name] for field in dataclasses.fields(Run)}
        found.append(Run(**{**plain, **made}))
    return [r for r in found if r.setting == setting and r.method in METHODS]


def main(
    task: Annotated[str, typer.Option(help="digits, digits-small, mnist, shakespeare or parkinsons")] = "digits",
    folder: Annotated[Path | None, typer.Option(help="where the files of the last three lie")] = None,
    seeds: Annotated[int, typer.Option(help="how many; the table has their median")] = 0,
    clients: Annotated[int, typer.Option(help="how many; 0: as usual for the task")] = 0,
    only: Annotated[str, typer.Option(help="methods whose label contains one of these words, separated by commas")] = "",
    jobs: Annotated[int, typer.Option(help="processes; 0: one a core")] = 0,
    fresh: Annotated[bool, typer.Option(help="compute everything again, not only what the results lack")] = False,
    quick: Annotated[bool, typer.Option(help="few rounds and clients, to see that it runs")] = False,
    out: Annotated[Path, typer.Option(help="folder for the results")] = RESULTS,
) -> None:
    """Compare the methods on one task."""
    console = Console()
    setting = dataclasses.replace(SETTINGS[task], folder=str(folder or ""))
    if clients:
        setting = dataclasses.replace(setting, clients=clients)
    if quick:
        setting = dataclasses.replace(setting, clients=6, fraction=0.5, rounds=4, every=2)
    chosen = range(1 if quick else seeds or (5 if "digits" in task else 1))
    words = [w for w in only.split(",") if w]
    methods = [m for m in METHODS if not words or m.uplink is None or any(w in m.label for w in words)]
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
    place = {method: number for number, method in enumerate(METHODS)}
    found.sort(key=lambda r: (place.get(r.method, len(place)), r.seed))
    shown = table(found, setting)
    console.print(shown.title, style="bold")
    console.print(shown.rich())
    head = write(out, task, found, quick)
    pictures = figure(found, setting, out / task)
    text = [
        f"# {task}",
        "Bytes are means of whole Flower messages, headers included, after serialisation; a loss is against the run without "
        "compression of the same seed. All but the first row also compress the downlink, with "
        f"`{METHODS[1].downlink}` and snapshots by `{METHODS[1].snapshot}`.",
        f"![{task}]({pictures[0].name})",
        f"## {shown.title}",
        dataclasses.replace(shown, title="").markdown(),
        f"{head['date']}, {head['machine']}{', quick' if quick else ''}",
    ]
    (out / f"{task}.md").write_text("\n\n".join(text) + "\n")


def _parameters(setting: Setting) -> int:
    from examples.flower.federated import tasks

    return sum(p.numel() for p in tasks.load(setting.task, setting.folder).model().parameters())


if __name__ == "__main__":
    typer.run(main)

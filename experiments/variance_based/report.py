"""Tables and figures from the result files: ``python -m experiments.variance_based.report [FOLDER]``.

Writes ``table.md``, ``curves.png``, ``scatter.png`` (and ``.svg``) beside the JSON files of the runs.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments.variance_based.methods import LABELS, PUBLISHED

Result = dict[str, Any]
TITLES = {"adam": "Adam", "momentum": "Momentum SGD"}
FAMILIES = {  # marker and colour: shapes tell them apart without colour
    "none": ("*", "#000000"),
    "strom": ("s", "#b3541e"),
    "vgc": ("o", "#1f4e79"),
    "hybrid": ("D", "#7a3b8f"),
    "qsgd": ("^", "#3a7d44"),
    "top": ("v", "#a67c00"),
    "power": ("P", "#0f8b8d"),
    "dithering": ("X", "#8c1c3a"),
}
FAMILY_NAMES = {
    "none": "no compression",
    "strom": "Strom (tau)",
    "vgc": "VGC (alpha)",
    "hybrid": "hybrid (tau), alpha = 2",
    "qsgd": "QSGD (bits)",
    "top": "error feedback, top-k (fraction)",
    "power": "PowerSGD (rank)",
    "dithering": "error feedback, Sparse Dithering (error)",
}
DASHES: tuple[Any, ...] = ("-", (0, (5, 2)), (0, (1, 1.2)), (0, (5, 1.5, 1, 1.5)))
SETTINGS = {"font.size": 9, "svg.fonttype": "none", "svg.hashsalt": "tersegrad", "axes.linewidth": 0.8, "lines.linewidth": 1.2}


def read(folder: Path) -> list[Result]:
    """All result files of a folder."""
    found = [json.loads(p.read_text()) for p in sorted(folder.glob("*.json"))]
    return [r for r in found if "row" in r]


def _number(value: float | None, digits: int = 1) -> str:
    return "" if value is None else f"{value:,.{digits}f}"


def _median(values: Sequence[float]) -> float:
    ordered = sorted(values)
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2


def chosen(results: Sequence[Result], optimiser: str) -> dict[str, list[Result]]:
    """The runs of every row, seeds in order; of momentum without compression only the best learning rate."""
    rows: dict[str, list[Result]] = {}
    for r in results:
        if r["config"]["optimiser"] == optimiser:
            rows.setdefault(r["row"], []).append(r)
    if optimiser == "momentum" and rows.get("none"):
        usable = [r for r in rows["none"] if not r["diverged"]] or rows["none"]
        best = max(usable, key=lambda r: r["accuracy"])
        rows["none"] = [r for r in usable if r["config"]["lr"] == best["config"]["lr"]]
    return {row: sorted(rows[row], key=lambda r: r["config"]["seed"]) for row in LABELS if row in rows}


def known(run: Result) -> dict[str, tuple[float | None, float | None]]:
    """The published numbers that a run can be compared with: those of its optimiser, on CIFAR-10 only."""
    if run["data"] != "cifar10":
        return {}
    return PUBLISHED["adam" if run["config"]["optimiser"] == "adam" else "momentum"]


def middle_run(runs: Sequence[Result]) -> Result:
    """The run with the median accuracy (the lower of two)."""
    return sorted(runs, key=lambda r: r["accuracy"])[(len(runs) - 1) // 2]


def bits_per_sent(run: Result) -> tuple[float, float] | None:
    """Bits of the compact form for each value sent, and those of an ideal code for which coordinates they are plus a sign."""
    samples = [s for s in run["encoded"]["samples"] if s.get("sent") and "compact" in s]
    if not samples:
        return None
    sent = sum(s["sent"] for s in samples)
    n = run["parameters"]
    places = sum(
        (math.lgamma(n + 1) - math.lgamma(s["sent"] + 1) - math.lgamma(n - s["sent"] + 1)) / math.log(2) for s in samples
    )
    return 8 * sum(s["compact"] for s in samples) / sent, places / sent


def table(results: Sequence[Result]) -> str:
    """The table of both optimisers, ours beside the published numbers, as Markdown."""
    lines: list[str] = []
    for optimiser, title in TITLES.items():
        rows = chosen(results, optimiser)
        if not rows:
            continue
        one = next(iter(rows.values()))[0]
        lines += [
            f"## {title}: {one['data']}, {one['config']['epochs']} epochs, learning rate {one['config']['lr']:g}",
            "",
            "| method | accuracy % | seeds | ratio, words | words, last epoch | ratio, bytes: paper's form | ratio, bytes: compact "
            "| compact/paper | bits per value sent (for its place alone) | s/epoch | published: accuracy % | published: ratio |",
            "|---|---|---|---|---|---|---|---|---|---|---|---|",
        ]
        for row, runs in rows.items():
            accuracies = [r["accuracy"] for r in runs]
            accuracy = f"{_median(accuracies):.2f}"
            if len(runs) > 1:
                accuracy += f" [{min(accuracies):.2f} {max(accuracies):.2f}]"
            if any(r["diverged"] for r in runs):
                accuracy += " (diverged)"
            run = middle_run(runs)
            encoded, bits = run["encoded"], bits_per_sent(run)
            sizes = {form: encoded[form]["ratio"] if form in encoded else None for form in ("paper", "compact")}
            share = sizes["paper"] / sizes["compact"] if sizes["paper"] and sizes["compact"] else None
            published = known(run).get(row, (None, None))
            cells = [
                LABELS[row],
                accuracy,
                str(len(runs)),
                _number(run["ratio_words"]),
                _number(run["curve"][-1]["ratio"]),
                _number(sizes["paper"]),
                _number(sizes["compact"]),
                "" if share is None else f"{100 * share:.0f} %",
                "" if bits is None else f"{bits[0]:.2f} ({bits[1]:.2f})",
                f"{_median([r['seconds']['epoch'] for r in runs]):.2f}",
                *(_number(value) for value in published),
            ]
            lines.append("| " + " | ".join(cells) + " |")
        lines.append("")
    return "\n".join(lines)


def notes(results: Sequence[Result]) -> str:
    """What the numbers are, and where they were made."""
    one = results[0]
    every = sorted({r["encoded"]["every"] for r in results if r["encoded"]["samples"]})
    differing = sum(s.get("differing", 0) for r in results for s in r["encoded"]["samples"])
    messages = sum(len(r["encoded"]["samples"]) for r in results)
    sweep = [r for r in results if r["config"]["optimiser"] == "momentum" and r["row"] == "none"]
    rates = ", ".join(
        f"{r['config']['lr']:g}: {'diverged' if r['diverged'] else format(r['accuracy'], '.2f')}"
        for r in sorted(sweep, key=lambda r: r["config"]["lr"])
    )
    steps = " or ".join(map(str, every)) or "-"
    lines = [
        "Accuracy is that of the last epoch: the median over seeds [lowest, highest]; ratios are those of the run with the median "
        "accuracy. Ratio in words: parameters divided by those that a worker sends in a step on average, counted in every step. "
        f"Ratios in bytes: 32 bits a parameter against whole messages, encoded and decoded on every {steps}th step for one worker in turn.",
        "",
        f"{messages} messages were encoded; the states they left differ from the batched step's in {differing} coordinates.",
    ]
    lines += ["", f"Momentum without compression by learning rate: {rates}."] if rates else []
    return "\n".join(
        [*lines, "", f"{one['date']}, {one['machine']}, {one['config']['workers']} workers x {one['config']['batch']}"]
    )


def _style(row: str) -> dict[str, Any]:
    family = row.partition("_")[0]
    marker, colour = FAMILIES[family]
    number = [r for r in LABELS if r.partition("_")[0] == family].index(row)
    return {"marker": marker, "color": colour, "linestyle": DASHES[number % len(DASHES)]}


def _figure(columns: int, rows: int) -> tuple[Any, Any]:
    from tersegrad.report.figures import require_matplotlib

    matplotlib = require_matplotlib()
    figure = matplotlib.figure.Figure(figsize=(6.6 * columns, 4.4 * rows), layout="constrained", dpi=130)
    matplotlib.backends.backend_agg.FigureCanvasAgg(figure)
    return figure, figure.subplots(rows, columns, squeeze=False)


def _save(figure: Any, stem: Path) -> None:
    figure.savefig(stem.with_suffix(".png"))
    figure.savefig(stem.with_suffix(".svg"), metadata={"Date": None})


def curves(results: Sequence[Result], stem: Path) -> None:
    """Accuracy and ratio over training, one column an optimiser."""
    from tersegrad.report.figures import require_matplotlib

    with require_matplotlib().rc_context(SETTINGS):
        present = [o for o in TITLES if chosen(results, o)]
        figure, axes = _figure(len(present), 2)
        for column, optimiser in enumerate(present):
            top, bottom = axes[0][column], axes[1][column]
            for number, (row, runs) in enumerate(chosen(results, optimiser).items()):
                run = middle_run(runs)
                epochs = [c["epoch"] for c in run["curve"]]
                style = {**_style(row), "markersize": 4.5, "markevery": (number % 7, 7), "label": LABELS[row]}
                top.plot(epochs, [c["accuracy"] for c in run["curve"]], **style)
                bottom.plot(epochs, [c["ratio"] or math.nan for c in run["curve"]], **style)
            best = max(r["accuracy"] for runs in chosen(results, optimiser).values() for r in runs)
            top.set_ylim(max(0.0, best - 45), min(100.0, best + 2))
            top.set_title(TITLES[optimiser], loc="left", fontweight="bold")
            top.set_ylabel("test accuracy, %")
            bottom.set_yscale("log")
            bottom.set_ylabel("parameters per word sent, in that epoch")
            bottom.set_xlabel("epoch")
            for axis in (top, bottom):
                axis.grid(color="#e4e4e4", linewidth=0.6)
        widest = max(range(len(present)), key=lambda column: len(chosen(results, present[column])))
        handles, labels = axes[0][widest].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False, fontsize=8)
        _save(figure, stem)


def scatter(results: Sequence[Result], stem: Path) -> None:
    """Accuracy against ratio in words: ours filled, published hollow, joined by a thin line."""
    from tersegrad.report.figures import require_matplotlib

    with require_matplotlib().rc_context(SETTINGS):
        present = [o for o in TITLES if chosen(results, o)]
        figure, axes = _figure(len(present), 1)
        for axis, optimiser in zip(axes[0], present):
            rows = chosen(results, optimiser)
            published = known(next(iter(rows.values()))[0])
            for row, runs in rows.items():
                run = middle_run(runs)
                marker, colour = FAMILIES[row.partition("_")[0]]
                if not run["ratio_words"]:
                    continue
                axis.plot(run["ratio_words"], run["accuracy"], marker=marker, color=colour, markersize=8, linestyle="none")
                place = (run["ratio_words"], run["accuracy"])
                axis.annotate(row.rpartition("_")[2], place, fontsize=7, xytext=(6, 3), textcoords="offset points")
                accuracy, ratio = published.get(row, (None, None))
                if accuracy is not None and ratio is not None:
                    axis.plot(
                        ratio, accuracy, marker=marker, color=colour, markersize=8, linestyle="none", markerfacecolor="white"
                    )
                    axis.plot([run["ratio_words"], ratio], [run["accuracy"], accuracy], color=colour, linewidth=0.5, alpha=0.6)
            shown = [r["accuracy"] for runs in rows.values() for r in runs]
            shown += [a for row, (a, _) in published.items() if a and row in rows]
            axis.set_ylim(max(0.0, min(shown) - 3), max(shown) + 2)
            axis.set_xlim(0.5, 3 * max(axis.get_xlim()[1], 10.0))
            axis.set_xscale("log")
            axis.set_xlabel("parameters per word sent, mean over the run")
            axis.set_ylabel("test accuracy, %")
            legend = ": filled ours, hollow published (300 epochs)" if published else ""
            axis.set_title(TITLES[optimiser] + legend, loc="left", fontweight="bold")
            axis.grid(color="#e4e4e4", linewidth=0.6)
        handles = [
            axes[0][0].plot([], [], marker=marker, color=colour, linestyle="none", label=FAMILY_NAMES[family])[0]
            for family, (marker, colour) in FAMILIES.items()
        ]
        figure.legend(handles=handles, loc="outside lower center", ncols=4, frameon=False)
        _save(figure, stem)


def main(folder: Path) -> None:
    """Write the table and the figures of a folder."""
    results = read(folder)
    if not results:
        raise SystemExit(f"{folder} holds no results: run `python -m experiments.variance_based.run` first")
    curves(results, folder / "curves")
    scatter(results, folder / "scatter")
    parts = ["# Variance-based compression", notes(results), table(results)]
    parts += ["![Accuracy and ratio over training](curves.png)", "![Accuracy against ratio](scatter.png)"]
    (folder / "table.md").write_text("\n\n".join(parts) + "\n")
    print(table(results))


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent / "results")

"""Figures of the results: accuracy and ratio over training, and accuracy against ratio beside the published points."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from experiments.variance_based.methods import LABELS
from experiments.variance_based.report import TITLES, Result, accuracy, chosen, known, middle_run
from tersegrad.report.figures import require_matplotlib

FAMILIES = {  # marker and colour: shapes tell them apart without colour
    "none": ("*", "#000000"),
    "strom": ("s", "#b3541e"),
    "vgc": ("o", "#1f4e79"),
    "hybrid": ("D", "#7a3b8f"),
    "qsgd": ("^", "#3a7d44"),
    "top": ("v", "#a67c00"),
    "power": ("P", "#0f8b8d"),
    "dithering": ("X", "#8c1c3a"),
    "local": ("h", "#4a4a8a"),
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
    "local": "local steps (their number)",
}
DASHES: tuple[Any, ...] = ("-", (0, (5, 2)), (0, (1, 1.2)), (0, (5, 1.5, 1, 1.5)))
SETTINGS = {"font.size": 9, "svg.fonttype": "none", "svg.hashsalt": "tersegrad", "axes.linewidth": 0.8, "lines.linewidth": 1.2}
TICKS = (10, 30, 50, 60, 70, 75, 80, 82, 84, 85, 86, 87, 88, 89, 90, 91, 92, 93, 94, 95, 96, 97, 98, 99)
GREY = "#e4e4e4"


def family(row: str) -> str:
    """The kind of method of a row."""
    return row.partition("_")[0]


def short(row: str) -> str:
    """What tells a row from others of its family."""
    return {"2bit": "2", "3bit": "3", "4bit": "4", "none": ""}.get(row.rpartition("_")[2], row.rpartition("_")[2])


def draw(results: Sequence[Result], folder: Path, tag: str = "") -> list[str]:
    """The figures of one setting; returns their names. An optimiser with one row only is left out."""
    present = {o: rows for o in TITLES if len(rows := chosen(results, o)) > 1}
    if not present:
        present = {o: rows for o in TITLES if (rows := chosen(results, o))}
    with require_matplotlib().rc_context(SETTINGS):
        curves(present, folder / f"curves{tag}")
        scatter(present, folder / f"scatter{tag}")
    return [f"curves{tag}", f"scatter{tag}"]


def _figure(columns: int, heights: Sequence[float]) -> tuple[Any, Any]:
    matplotlib = require_matplotlib()
    figure = matplotlib.figure.Figure(figsize=(6.6 * columns, sum(heights)), layout="constrained", dpi=130)
    matplotlib.backends.backend_agg.FigureCanvasAgg(figure)
    return figure, figure.subplots(len(heights), columns, squeeze=False, height_ratios=heights)


def _save(figure: Any, stem: Path) -> None:
    figure.savefig(stem.with_name(stem.name + ".png"))
    figure.savefig(stem.with_name(stem.name + ".svg"), metadata={"Date": None})


def _style(row: str) -> dict[str, Any]:
    marker, colour = FAMILIES[family(row)]
    number = [r for r in LABELS if family(r) == family(row)].index(row)
    return {"marker": marker, "color": colour, "linestyle": DASHES[number % len(DASHES)]}


def _smooth(values: Sequence[float], window: int) -> list[float]:
    """The mean of the last ``window`` values at every place."""
    return [sum(part) / len(part) for part in (values[max(0, i + 1 - window) : i + 1] for i in range(len(values)))]


def curves(present: dict[str, dict[str, list[Result]]], stem: Path) -> None:
    """Accuracy (smoothed: with a constant rate single epochs jump) and ratio over training, one column an optimiser."""
    figure, axes = _figure(len(present), (4.6, 3.6))
    legend: dict[str, Any] = {}
    for column, (optimiser, rows) in enumerate(present.items()):
        top, bottom = axes[0][column], axes[1][column]
        for number, (row, runs) in enumerate(rows.items()):
            run = middle_run(runs)
            curve = run["curve"]
            epochs = range(1, len(curve["accuracy"]) + 1)
            gap, window = max(1, len(epochs) // 7), max(1, len(epochs) // 20)
            style = {**_style(row), "markersize": 4.5, "markevery": (number * 3 % gap, gap)}
            legend[LABELS[row]] = top.plot(epochs, _smooth(curve["accuracy"], window), **style)[0]
            bottom.plot(epochs, [ratio or math.nan for ratio in curve["ratio"]], **style)
        drawn = [r["curve"]["accuracy"] for runs in rows.values() for r in runs]
        best = max(map(max, drawn))
        top.set_ylim(max(0.0, best - 32), min(100.0, best + 1.5))
        top.set_title(TITLES[optimiser], loc="left", fontweight="bold")
        top.set_ylabel(f"test accuracy, %, mean of the last {window} epochs" if window > 1 else "test accuracy, %")
        bottom.set_yscale("log")
        bottom.set_ylabel("parameters per word sent")
        bottom.set_xlabel("epoch")
        for axis in (top, bottom):
            axis.set_xlim(0, max(map(len, drawn)) + 0.5)
            axis.grid(color=GREY, linewidth=0.6)
            axis.spines[["top", "right"]].set_visible(False)
    order = [label for label in LABELS.values() if label in legend]
    figure.legend(
        [legend[label] for label in order], order, loc="outside lower center", ncols=3 * len(present) - 1, frameon=False
    )
    _save(figure, stem)


def _height(accuracy: Any) -> Any:
    return -np.log(np.maximum(100.0 - accuracy, 1e-3))


def _accuracy(height: Any) -> Any:
    return 100.0 - np.exp(-height)


def scatter(present: dict[str, dict[str, list[Result]]], stem: Path) -> None:
    """Accuracy against ratio in words: ours filled with the range over seeds, published hollow, joined by a thin line."""
    figure, axes = _figure(len(present), (6.0,))
    shown: set[str] = set()
    for axis, (optimiser, rows) in zip(axes[0], present.items()):
        published = known(next(iter(rows.values()))[0])
        points: list[tuple[float, float]] = []
        for row, runs in rows.items():
            marker, colour = FAMILIES[family(row)]
            look = {"marker": marker, "color": colour, "linestyle": "none", "markersize": 11 if marker == "*" else 8}
            ratio, here = middle_run(runs)["ratio_words"], accuracy(runs)
            if not ratio:
                continue
            shown.add(family(row))
            points.append((ratio, here))
            if len(runs) > 1:
                axis.plot(
                    [ratio] * 2, [f(r["accuracy"] for r in runs) for f in (min, max)], color=colour, linewidth=2.2, alpha=0.5
                )
            axis.plot(ratio, here, **look, zorder=3)
            axis.annotate(short(row), (ratio, here), fontsize=7.5, xytext=(7, -3), textcoords="offset points")
            there, there_ratio = published.get(row, (None, None))
            if there is not None and there_ratio is not None:
                points.append((there_ratio, there))
                axis.plot(there_ratio, there, **look, markerfacecolor="white", zorder=2)
                axis.plot([ratio, there_ratio], [here, there], color=colour, linewidth=0.6, alpha=0.7, zorder=1)
        if "none" in rows:
            plain = accuracy(rows["none"])
            axis.axhline(plain, color="#000000", linewidth=0.8, linestyle=(0, (4, 3)), zorder=0)
            axis.annotate(
                "none, ours", (1.0, plain), xycoords=("axes fraction", "data"), xytext=(-3, 3), textcoords="offset points",
                fontsize=7.5, ha="right",
            )  # fmt: skip
        axis.set_xscale("log")
        axis.set_xlim(0.7, 4 * max(x for x, _ in points))
        # Logarithmic in the error, so that a point near the top and a failure (10 % is chance) are both seen.
        low, high = min(y for _, y in points), max(y for _, y in points)
        axis.set_yscale("function", functions=(_height, _accuracy))
        axis.set_ylim(_accuracy(_height(low) - 0.06), _accuracy(_height(high) + 0.06))
        axis.set_yticks([y for y in TICKS if low - 1 <= y <= high + 0.5])
        axis.yaxis.set_major_formatter("{x:g}")
        axis.set_xlabel("parameters per word sent, mean over the run")
        axis.set_ylabel("test accuracy, %")
        axis.set_title(
            TITLES[optimiser] + (": filled ours, hollow published (300 epochs)" if published else ""),
            loc="left",
            fontweight="bold",
        )
        axis.grid(color=GREY, linewidth=0.6)
        axis.spines[["top", "right"]].set_visible(False)
    names = [name for name in FAMILIES if name in shown]
    handles = [
        axes[0][0].plot([], [], marker=marker, color=colour, linestyle="none", label=FAMILY_NAMES[name])[0]
        for name, (marker, colour) in FAMILIES.items()
        if name in names
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=4, frameon=False)
    _save(figure, stem)

"""The figures. Every curve and family has a marker or dash pattern of its own, so that colour is not needed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments.optimal_compression import convergence, problems, rate_error, worst_case
from experiments.optimal_compression.convergence import Curve
from experiments.optimal_compression.rate_error import Measured
from tersegrad import theory
from tersegrad.report.figures import require_matplotlib

MARKERS = "osD^v<>Pp*Xhd8H"
LETTERS = {"random_k": "$R$", "ternary": "$3$", "threshold": "$T$", "top_k": "$K$"}  # more families than filled markers
COLOURS = ("#1f4e79", "#b3541e", "#3a7d44", "#7a3b8f", "#000000", "#a67c00", "#0f8b8d", "#8c1c3a")
LEFT, RIGHT = 1e-5, 10.0  # errors shown
DASHES: tuple[Any, ...] = ("-", (0, (5, 2)), (0, (1, 1.2)), (0, (5, 1.5, 1, 1.5)))
SETTINGS = {"font.size": 9, "svg.fonttype": "none", "svg.hashsalt": "tersegrad", "axes.linewidth": 0.8, "lines.linewidth": 1.2}


def _new(columns: int, rows: int, size: tuple[float, float]) -> tuple[Any, Any]:
    matplotlib = require_matplotlib()
    figure = matplotlib.figure.Figure(figsize=(size[0] * columns, size[1] * rows), layout="constrained", dpi=130)
    matplotlib.backends.backend_agg.FigureCanvasAgg(figure)
    return figure, figure.subplots(rows, columns, squeeze=False)


def _save(figure: Any, stem: Path) -> list[Path]:
    stem.parent.mkdir(parents=True, exist_ok=True)
    png, svg = stem.with_suffix(".png"), stem.with_suffix(".svg")
    figure.savefig(png)
    figure.savefig(svg, metadata={"Date": None})
    return [png, svg]


def _style(index: int) -> dict[str, Any]:
    return {
        "marker": MARKERS[index % len(MARKERS)],
        "color": COLOURS[index % len(COLOURS)],
        "linestyle": DASHES[index % len(DASHES)],
    }


def rate_error_plane(measured: Sequence[Measured], stem: Path) -> list[Path]:
    """One panel a source; a family's configurations are joined by a line."""
    with require_matplotlib().rc_context(SETTINGS):
        sources = list(dict.fromkeys(m.rate.source for m in measured))
        families = list(dict.fromkeys(m.family for m in measured))
        figure, axes = _new(2, -(-len(sources) // 2), (6.4, 5.2))
        errors = [LEFT * (RIGHT / LEFT) ** (k / 400) for k in range(401)]
        for axis, source in zip(axes.flat, sources):
            axis.set_xscale("log")
            axis.set_yscale("log", base=2)
            axis.set_xlim(LEFT, RIGHT)
            axis.set_ylim(1 / 128, 40)
            ticks = [2.0**k for k in range(-7, 6)]
            axis.set_yticks(ticks, [f"{t:g}" if t >= 1 else f"1/{round(1 / t)}" for t in ticks])
            axis.grid(color="#e4e4e4", linewidth=0.6, zorder=0)
            axis.set_axisbelow(True)
            inside = [e for e in errors if e < 0.995]
            axis.plot(inside, [theory.gaussian_rate(e) for e in inside], color="black", linewidth=2.2, zorder=1,
                      label="limit: worst case = average case = Gaussian, ½ log2(1/error)")  # fmt: skip
            axis.plot(errors, [theory.gaussian_rate(e / (1 + e)) for e in errors], color="black", linewidth=1.4, zorder=1,
                      linestyle=(0, (4, 2)), label="limit for unbiased ones, ½ log2(1 + 1/error)")  # fmt: skip
            nus = [10 ** (-3 + 3 * k / 60) for k in range(61)]
            axis.plot(nus, [theory.beta_det(nu) for nu in nus], color="#888888", linewidth=1.6, linestyle=(0, (1, 1)), zorder=1,
                      label="the paper's bound for SD at any vector, beta_det(nu)")  # fmt: skip
            if source == "laplace":
                axis.plot(inside, [theory.laplace_rate(e) for e in inside], color="#777777", linewidth=2.0, zorder=1,
                          label="rate-distortion function of this source (Laplace)")  # fmt: skip
            for index, family in enumerate(families):
                mine = sorted(
                    (m.rate for m in measured if m.family == family and m.rate.source == source and m.rate.error > 0),
                    key=lambda r: r.bits_per_coordinate,
                )
                if mine:
                    style = {**_style(index), "linestyle": "none"}
                    unbiased = mine[0].guarantee.kind == "unbiased"
                    style["marker"] = LETTERS.get(family, style["marker"])
                    axis.plot([min(max(r.error, LEFT), RIGHT) for r in mine], [r.bits_per_coordinate for r in mine], markersize=6.5,
                              zorder=3, clip_on=False, markerfacecolor="white" if unbiased and family not in LETTERS else style["color"],
                              label=family, **style)  # fmt: skip
            numel = next(m.rate.numel for m in measured if m.rate.source == source)
            axis.set_title(f"{rate_error.TITLES[source]}, {numel:,} coordinates", loc="left", fontsize=10)
            axis.set_xlabel("relative squared error ||C(x) - x||² / ||x||²")
            axis.set_ylabel("bits per coordinate (whole message)")
        _shared_legend(figure, axes, 3)
        figure.suptitle(
            "What is sent, and what is lost (open markers: unbiased; errors beyond the axis stand at its ends)",
            fontsize=12,
            fontweight="bold",
        )
        return _save(figure, stem)


def _shared_legend(figure: Any, axes: Any, columns: int) -> None:
    seen: dict[str, Any] = {}
    for axis in axes.flat:
        for handle, label in zip(*axis.get_legend_handles_labels()):
            seen.setdefault(label, handle)
    figure.legend(seen.values(), seen.keys(), loc="outside lower center", ncols=columns, frameon=False, fontsize=8.5)


def worst_vectors(found: Sequence[worst_case.Length], stem: Path) -> list[Path]:
    """Measured bits on the adversarial vectors against nu, with the bounds as lines."""
    with require_matplotlib().rc_context(SETTINGS):
        figure, axes = _new(1, 1, (7.0, 5.0))
        axis = axes[0][0]
        nus = [10 ** (-2.1 + 2.1 * k / 80) for k in range(81)]
        lines = (
            ("paper's bound beta_det", theory.beta_det, DASHES[0], "#000000", 1.6),
            ("exact worst case of the paper's code", theory.beta_star, DASHES[1], "#1f4e79", 1.4),
            ("worst case of an ideal code", theory.beta_ideal, DASHES[3], "#b3541e", 1.4),
            ("nobody can do with less, ½ log2(1/nu)", theory.gaussian_rate, DASHES[2], "#000000", 1.8),
        )
        for label, function, dash, colour, width in lines:
            inside = [nu for nu in nus if nu < 0.9999]
            axis.plot(inside, [function(nu) for nu in inside], linestyle=dash, color=colour, linewidth=width, label=label)
        marks = {
            ("longest for the paper's code", "paper"): ("o", True),
            ("longest for an ideal code", "auto"): ("s", True),
            ("Gaussian", "paper"): ("o", False),
            ("Gaussian", "auto"): ("s", False),
        }
        for (vector, coder), (marker, filled) in marks.items():
            mine = [
                m for m in found if m.vector == vector and f"coder={coder}" in m.compressor and not m.compressor.startswith("r")
            ]
            axis.plot([m.nu for m in mine], [m.per_coordinate for m in mine], marker=marker, linestyle="none", markersize=7,
                      color="#333333", markerfacecolor="#333333" if filled else "white",
                      label=f"measured, {coder} coder: {vector}")  # fmt: skip
        axis.set_xscale("log")
        axis.set_xlabel("nu: the error that is guaranteed")
        axis.set_ylabel("bits per coordinate, beyond the header")
        axis.set_ylim(0, 7)
        axis.grid(color="#e4e4e4", linewidth=0.6)
        axis.legend(frameon=False, fontsize=8.5)
        axis.set_title(f"Deterministic Sparse Dithering on its worst vectors, d = {found[0].numel:,}", loc="left", fontsize=10)
        return _save(figure, stem)


def _curves(axis: Any, curves: Sequence[Curve], labels: Sequence[str], floor: float) -> None:
    for c in curves:
        index = labels.index(c.label)
        style = {**_style(index), "color": "#000000"} if c.label in ("none", "GD, none") else _style(index)
        points = c.run.points
        every = max(1, len(points) // 7)
        offset = (index * every) // max(1, len(labels))
        heavy = 1.9 if c.label.startswith(("none", "GD", "best")) else 1.1
        axis.plot([p.nbytes / 1000 for p in points], [max(p.distance, floor / 10) for p in points], markersize=4.5,
                  markevery=(offset, every), linewidth=heavy, label=c.label, **style)  # fmt: skip
    axis.set_yscale("log")
    axis.set_ylim(floor, 3)
    axis.grid(color="#e4e4e4", linewidth=0.6)


def single_node(curves: Sequence[Curve], stem: Path, targets: Sequence[float], columns: int = 2) -> list[Path]:
    """Distance against bytes, one panel a problem and target."""
    with require_matplotlib().rc_context(SETTINGS):
        names = list(dict.fromkeys(c.run.problem for c in curves if c.run.workers == 1))
        labels = [s[0] for s in convergence.SINGLE]
        figure, axes = _new(columns, -(-len(names) * len(targets) // columns), (6.4 if columns == 2 else 5.0, 4.0))
        panels = [(name, target) for name in names for target in targets]
        for axis in axes.flat[len(panels) :]:
            axis.set_axis_off()
        for axis, (name, target) in zip(axes.flat, panels):
            mine = [c for c in curves if c.run.problem == name and c.run.workers == 1]
            kind = problems.EMBEDDED.get(name) or problems.LIBSVM[name][0]
            _curves(axis, mine, labels, target)
            sent = [p.nbytes for c in mine if (p := c.run.reached[f"{target:g}"]) and c.label == "none"]
            axis.set_xlim(0, (max(sent) if sent else 1.0) * 1.05 / 1000)
            axis.set_xlabel("bytes sent, thousands")
            axis.set_ylabel("||x - x*||² / ||x⁰ - x*||²")
            axis.set_title(f"{name}, {kind}: to {target:g}", loc="left", fontsize=10)
        _shared_legend(figure, axes, 4)
        figure.suptitle("One node: compressed gradient descent with theoretical step sizes", fontsize=12, fontweight="bold")
        return _save(figure, stem)


def distributed(curves: Sequence[Curve], stem: Path, floor: float) -> list[Path]:
    """Distance against bytes per worker; one panel a problem and number of workers."""
    with require_matplotlib().rc_context(SETTINGS):
        mine = [c for c in curves if c.run.workers > 1]
        names = list(dict.fromkeys(c.run.problem for c in mine))
        counts = sorted({c.run.workers for c in mine})
        labels = [s[0] for s in convergence.DISTRIBUTED]
        figure, axes = _new(len(counts), len(names), (4.6, 3.8))
        for row, name in zip(axes, names):
            for axis, n in zip(row, counts):
                here = [c for c in mine if c.run.problem == name and c.run.workers == n]
                if not here:
                    axis.set_axis_off()
                    continue
                _curves(axis, here, labels, floor)
                axis.set_xscale("log")
                axis.set_xlabel("bytes sent by each worker, thousands")
                axis.set_ylabel("||x - x*||² / ||x⁰ - x*||²")
                axis.set_title(f"{name}, {n} workers", loc="left", fontsize=10)
                for c in here:
                    if c.run.predicted is not None and math.isfinite(c.run.predicted):
                        axis.axhline(c.run.predicted, color="#888888", linewidth=0.9, linestyle=(0, (2, 2)),
                                     label="plateau predicted for DCGD")  # fmt: skip
        _shared_legend(figure, axes, 4)
        figure.suptitle("Workers with rows sorted by label: who stalls and who does not", fontsize=12, fontweight="bold")
        return _save(figure, stem)

"""Figures. matplotlib is imported when one is drawn, so that nobody pays for it who does not need it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tersegrad.core.errors import MissingExtra

if TYPE_CHECKING:
    from tersegrad.bench.rate import Rate

# kind of guarantee: marker, filled, colour, words. Shape and filling tell them apart without colour.
STYLES = {
    "contractive": ("o", True, "#1f4e79", "contractive: error at most alpha"),
    "unbiased": ("D", False, "#b3541e", "unbiased: right on average, variance at most omega"),
    "none": ("X", True, "#555555", "no guarantee"),
}


@dataclasses.dataclass(frozen=True)
class Panel:
    """One set of axes: a title and what was measured on one kind of data."""

    title: str
    rates: tuple[Rate, ...]
    floor: bool = True  # whether the limit is a floor for this data, or only for the hardest data


def require_matplotlib() -> Any:
    """matplotlib, or :class:`MissingExtra` with the command that installs it."""
    try:
        import matplotlib
        import matplotlib.backends.backend_agg
        import matplotlib.figure
    except ImportError as e:
        raise MissingExtra("figures need matplotlib: pip install 'tersegrad[report]'") from e
    return matplotlib


def bits_against_error(panels: Sequence[Panel], stem: Path, title: str = "") -> tuple[Path, Path]:
    """Draw every compressor as a point, with the limits as lines; writes ``stem``.png and ``stem``.svg."""
    matplotlib = require_matplotlib()
    # The fixed salt and the missing date make the same measurements the same file.
    with matplotlib.rc_context({"font.size": 9, "svg.fonttype": "none", "svg.hashsalt": "tersegrad", "axes.linewidth": 0.8}):
        figure = matplotlib.figure.Figure(figsize=(6.6 * len(panels) + 0.6, 6.6), layout="constrained", dpi=150)
        matplotlib.backends.backend_agg.FigureCanvasAgg(figure)
        axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
        everything = [r for p in panels for r in p.rates]
        box = _range(everything)
        for k, (axis, panel) in enumerate(zip(axes, panels)):
            _draw(axis, panel, box)
            if k == 0:
                axis.set_ylabel("bits per coordinate (bytes on the wire, log scale)")
        if title:
            figure.suptitle(title, fontsize=12, fontweight="bold")
        _legend(figure, axes[0], {r.guarantee.kind for r in everything})
        # Fixes the layout: labels are placed in pixels.
        figure.draw_without_rendering()
        for axis, panel in zip(axes, panels):
            _label(axis, panel, box)
        stem.parent.mkdir(parents=True, exist_ok=True)
        png, svg = stem.with_suffix(".png"), stem.with_suffix(".svg")
        figure.savefig(png)
        figure.savefig(svg, metadata={"Date": None})
    return png, svg


@dataclasses.dataclass(frozen=True)
class Mark:
    """A link to mark: bits per second, and what to call it."""

    rate: float
    words: str


def seconds_against_link(
    rows: Sequence[tuple[str, Callable[[float], float]]],
    path: Path,
    title: str = "A step of every worker: its processor time, then its bytes over the link",
    mark: Mark | None = None,
) -> Path:
    """Draw the time of a step against the link's speed (bit/s), one line per name; without a suffix, as .png and as .svg."""
    matplotlib = require_matplotlib()
    speeds = _spread(1e6, 1e11, 60)
    dashes = ("-", (0, (5, 2)), (0, (1, 1.3)), (0, (5, 2, 1, 2)), (0, (8, 2)), (0, (3, 1, 1, 1, 1, 1)), (0, (2, 4)))
    with matplotlib.rc_context({"font.size": 9, "svg.fonttype": "none", "svg.hashsalt": "tersegrad", "axes.linewidth": 0.8}):
        figure = matplotlib.figure.Figure(figsize=(8, 5.4), layout="constrained", dpi=150)
        matplotlib.backends.backend_agg.FigureCanvasAgg(figure)
        axis = figure.subplots()
        for k, (name, step) in enumerate(rows):
            axis.plot(speeds, [1000 * step(s) for s in speeds], label=name, linewidth=2.2 if k == 0 else 1.5,
                      color="black" if k == 0 else f"C{k - 1}", linestyle=dashes[k % len(dashes)])  # fmt: skip
        axis.set_xscale("log")
        axis.set_yscale("log")
        axis.set_xlabel("speed of a worker's link (log scale)")
        axis.set_ylabel("time of a training step in ms (log scale)")
        words = ["1 Mbit/s", "10 Mbit/s", "100 Mbit/s", "1 Gbit/s", "10 Gbit/s", "100 Gbit/s"]
        axis.set_xticks([10.0**k for k in range(6, 12)], words)
        axis.grid(color="#dddddd", linewidth=0.6)
        axis.set_axisbelow(True)
        axis.set_title(title, loc="left", fontsize=10)
        if mark is not None:
            axis.axvline(mark.rate, color="#888888", linewidth=1.0, linestyle=(0, (2, 2)), zorder=1)
            right = mark.rate < 3e10
            axis.annotate(mark.words, (mark.rate, 0.02), xycoords=("data", "axes fraction"), textcoords="offset points",
                          xytext=(4 if right else -4, 0), ha="left" if right else "right", color="#555555")  # fmt: skip
        axis.legend(frameon=False, fontsize=8)
        path.parent.mkdir(parents=True, exist_ok=True)
        written = [path] if path.suffix else [path.with_suffix(".png"), path.with_suffix(".svg")]
        for file in written:
            figure.savefig(file, metadata={"Date": None} if file.suffix == ".svg" else None)
    return written[0]


def _range(rates: Sequence[Rate]) -> tuple[float, float, float, float]:
    """Axis limits (error, error, bits, bits) that hold every point, with room for labels."""
    errors = [r.error for r in rates if r.error > 0] or [0.1]
    bits = [r.bits_per_coordinate for r in rates if r.bits_per_coordinate > 0] or [1.0]
    return min(errors) / 12, max(errors) * 100, min(0.06, min(bits) / 1.7), 48.0


def _place(rate: Rate, box: tuple[float, float, float, float]) -> tuple[float, float]:
    """Where the point lies; exact codecs sit on the left edge, because a log axis has no zero."""
    return (rate.error if rate.error > 0 else box[0] * 1.6), max(rate.bits_per_coordinate, box[2])


def _draw(axis: Any, panel: Panel, box: tuple[float, float, float, float]) -> None:
    axis.set_xscale("log")
    axis.set_yscale("log", base=2)
    axis.set_xlim(box[0], box[1])
    axis.set_ylim(box[2], box[3])
    axis.set_title(panel.title, loc="left", fontsize=10)
    axis.set_xlabel("relative squared error  ||C(x) - x||² / ||x||²  (log scale)")
    ticks = [2.0**k for k in range(math.ceil(math.log2(box[2])), 6)]
    axis.set_yticks(ticks, [f"{t:g}" if t >= 1 else f"1/{round(1 / t)}" for t in ticks])
    axis.minorticks_off()
    axis.grid(color="#dddddd", linewidth=0.6)
    axis.set_axisbelow(True)

    steps = 400
    errors = [box[0] * (box[1] / box[0]) ** (k / steps) for k in range(steps + 1)]
    below = [max(0.5 * math.log2(1 / e), box[2] / 4) if e < 1 else box[2] / 4 for e in errors]
    axis.plot(errors, below, color="black", linewidth=1.6, label="limit for any compressor", zorder=2)
    axis.plot(errors, [0.5 * math.log2(1 + 1 / e) for e in errors], color="black", linewidth=1.2, linestyle=(0, (4, 2)),
              label="limit for unbiased ones", zorder=2)  # fmt: skip
    axis.fill_between(errors, [box[2] / 4] * len(errors), below, color="#000000", alpha=0.07, linewidth=0)
    words = "no compressor\ngets here" if panel.floor else "below the limit: only for\ndata easier than Gaussian"
    at = math.exp(math.log(box[0]) + 0.06 * math.log(box[1] / box[0]))
    axis.text(at, box[2] * 1.35, words, color="#555555", fontstyle="italic", va="bottom")
    for r in panel.rates:
        marker, filled, colour, _ = STYLES[r.guarantee.kind]
        x, y = _place(r, box)
        axis.plot([x], [y], marker=marker, markersize=7, color=colour, linestyle="none", markeredgewidth=1.4,
                  markerfacecolor=colour if filled else "white", zorder=4)  # fmt: skip


def _legend(figure: Any, axis: Any, kinds: set[str]) -> None:
    from matplotlib.lines import Line2D

    handles, names = axis.get_legend_handles_labels()
    for kind, (marker, filled, colour, words) in STYLES.items():
        if kind in kinds:
            handles.append(Line2D([], [], marker=marker, linestyle="none", color=colour, markersize=7, markeredgewidth=1.4,
                                  markerfacecolor=colour if filled else "white"))  # fmt: skip
            names.append(words)
    figure.legend(handles, names, loc="outside lower center", ncols=3, frameon=False, fontsize=9)


def _label(axis: Any, panel: Panel, box: tuple[float, float, float, float]) -> None:
    """Write each name near its point, at the free place that is nearest; a thin line leads to names that had to move away."""
    renderer = axis.figure.canvas.get_renderer()
    transform = axis.transData
    frame = axis.get_window_extent(renderer)
    scale = axis.figure.dpi / 72  # pixels a point
    points = [tuple(transform.transform(_place(r, box))) for r in panel.rates]
    taken = [(x - 6 * scale, y - 6 * scale, x + 6 * scale, y + 6 * scale) for x, y in points]
    errors = _spread(box[0], box[1], 150)
    curves = [(e, 0.5 * math.log2(1 / e)) for e in errors if e < 0.999] + [(e, 0.5 * math.log2(1 + 1 / e)) for e in errors]
    lines = [tuple(transform.transform((e, max(bits, box[2])))) for e, bits in curves]
    order = sorted(range(len(points)), key=lambda k: (-points[k][0], points[k][1]))
    for k in order:
        name = panel.rates[k].compressor + ("  (exact)" if panel.rates[k].error <= 0 else "")
        sketch = axis.text(0, 0, name, fontsize=7.5, transform=None)
        extent = sketch.get_window_extent(renderer)
        sketch.remove()
        width, height = extent.width + 2 * scale, extent.height + 1 * scale
        x, y = points[k]
        best, cost = (x, y), math.inf
        for radius in (9, 14, 20, 28, 38, 50, 64, 80, 100, 125):
            for turn in range(16):
                angle = math.pi * turn / 8
                cx = x + math.cos(angle) * (radius * scale + width / 2)
                cy = y + math.sin(angle) * radius * scale
                area = (cx - width / 2, cy - height / 2, cx + width / 2, cy + height / 2)
                if area[0] < frame.x0 or area[2] > frame.x1 or area[1] < frame.y0 or area[3] > frame.y1:
                    continue
                mine = taken[:k] + taken[k + 1 :]
                crossing = sum(area[0] < px < area[2] and area[1] < py < area[3] for px, py in lines)
                price = radius + 40 * crossing + sum(_overlap(area, other) for other in mine) * 2 + 3 * abs(math.sin(angle))
                if price < cost:
                    best, cost = (cx, cy), price
        cx, cy = best
        taken.append((cx - width / 2, cy - height / 2, cx + width / 2, cy + height / 2))
        if math.hypot(max(abs(cx - x) - width / 2, 0), cy - y) > 12 * scale:
            end = (min(max(x, cx - width / 2), cx + width / 2), cy)
            (sx, sy), (ex, ey) = (tuple(transform.inverted().transform(p)) for p in ((x, y), end))
            axis.plot([sx, ex], [sy, ey], color="#999999", linewidth=0.6, zorder=3)
        px, py = transform.inverted().transform((cx, cy))
        # A pale box, not a stroke around the letters: strokes would turn the SVG's text into curves.
        pale = {"facecolor": "white", "alpha": 0.6, "linewidth": 0, "pad": 0.3}
        axis.text(px, py, name, fontsize=7.5, ha="center", va="center", zorder=3.5, bbox=pale)


def _spread(low: float, high: float, count: int) -> list[float]:
    return [low * (high / low) ** (k / (count - 1)) for k in range(count)]


def _overlap(a: tuple[float, float, float, float], b: tuple[float, float, float, float]) -> float:
    return max(0.0, min(a[2], b[2]) - max(a[0], b[0])) * max(0.0, min(a[3], b[3]) - max(a[1], b[1]))

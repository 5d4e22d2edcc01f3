"""The figure: validation loss against the bytes that a worker has sent."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments.low_communication.plans import Run
from tersegrad.report.figures import require_matplotlib

STYLES = (  # colour, marker and dashes by family: told apart without colour too
    ("black", "o", "-"), ("#7f7f7f", "s", "--"), ("#8c564b", "P", ":"), ("#9467bd", "X", "-."), ("#ff7f0e", "v", "--"),
    ("#1f77b4", "^", "-"), ("#2ca02c", "D", "-."), ("#d62728", "*", ":"),
)  # fmt: skip


def draw(runs: Sequence[Run], title: str, stem: Path) -> list[Path]:
    """Left: loss at the end against all bytes; right: how it falls with the bytes sent (first seed)."""
    matplotlib = require_matplotlib()
    least, most = min(r.sent for r in runs), max(r.sent for r in runs)
    families = list(dict.fromkeys(r.method.family for r in runs))
    with matplotlib.rc_context({"font.size": 9, "svg.fonttype": "none", "svg.hashsalt": "tersegrad", "axes.linewidth": 0.8}):
        drawn = matplotlib.figure.Figure(figsize=(11.5, 5.6), layout="constrained", dpi=130)
        matplotlib.backends.backend_agg.FigureCanvasAgg(drawn)
        left, right = drawn.subplots(1, 2)
        for family in families:
            colour, marker, dash = STYLES[families.index(family) % len(STYLES)]
            mine = [r for r in runs if r.method.family == family]
            points = sorted((r.sent / 1e6, r.loss) for r in mine)
            left.plot(*zip(*points), color=colour, marker=marker, linestyle="none", markersize=6.5, label=family)
            for r in mine:
                if r.seed == min(q.seed for q in mine):
                    _annotate(left, r, colour, inwards=r.sent**2 > most * least, below=families.index(family) % 2 == 0)
                    curve = [(p.sent / 1e6, p.loss) for p in r.points if p.sent] or [(r.sent / 1e6, r.loss)]
                    right.plot(*zip(*curve), color=colour, marker=marker, linestyle=dash, markersize=3.5, linewidth=1.1)
        for axis in (left, right):
            axis.set_xscale("log")
            axis.grid(color="#e8e8e8", linewidth=0.6)
            axis.set_axisbelow(True)
            axis.set_xlabel("sent by one worker, MB (log scale)")
            axis.xaxis.set_major_formatter(matplotlib.ticker.FuncFormatter(lambda x, _: f"{x:g}"))
        left.margins(x=0.18)
        left.set_ylabel("validation loss at the end, nats per byte")
        right.set_ylabel("validation loss on the way, nats per byte (first seed)")
        drawn.suptitle(title, x=0.01, ha="left", fontsize=10)
        handles, labels = left.get_legend_handles_labels()
        drawn.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False, fontsize=8.5)
        stem.parent.mkdir(parents=True, exist_ok=True)
        paths = [stem.with_suffix(".png"), stem.with_suffix(".svg")]
        drawn.savefig(paths[0])
        drawn.savefig(paths[1], metadata={"Date": None})
        return paths


def _annotate(axis: Any, r: Run, colour: str, inwards: bool, below: bool) -> None:
    """The label beside a mark; of those in the right half to the left of it, so that it stays inside."""
    up = -10 if below else 4
    place: dict[str, Any] = {"xytext": (-5, up), "ha": "right"} if inwards else {"xytext": (5, up)}
    axis.annotate(r.method.label, (r.sent / 1e6, r.loss), textcoords="offset points", fontsize=7, color=colour, **place)

"""Tables and figures from the result files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from experiments.variance_based.methods import LABELS, PUBLISHED

Result = dict[str, Any]


def read(folder: Path) -> list[Result]:
    """All result files of a folder."""
    found = [json.loads(p.read_text()) for p in sorted(folder.glob("*.json"))]
    return [r for r in found if "row" in r]


def _number(value: float | None, digits: int = 1) -> str:
    return "" if value is None else f"{value:,.{digits}f}"


def _median(values: list[float]) -> float:
    ordered = sorted(values)
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2


def chosen(results: list[Result], optimiser: str) -> dict[str, list[Result]]:
    """The runs of every row; of momentum without compression only the best learning rate."""
    rows: dict[str, list[Result]] = {}
    for r in results:
        if r["config"]["optimiser"] == optimiser:
            rows.setdefault(r["row"], []).append(r)
    if optimiser == "momentum" and rows.get("none"):
        usable = [r for r in rows["none"] if not r["diverged"]] or rows["none"]
        best = max(usable, key=lambda r: r["accuracy"])
        rows["none"] = [r for r in usable if r["config"]["lr"] == best["config"]["lr"]]
    return rows


def table(results: list[Result]) -> str:
    """The table of both optimisers, ours beside the published numbers, as Markdown."""
    lines: list[str] = []
    for optimiser in ("adam", "momentum"):
        rows = chosen(results, optimiser)
        if not rows:
            continue
        one = next(iter(rows.values()))[0]
        title = "Adam" if optimiser == "adam" else "Momentum SGD"
        lines += [
            f"## {title}: {one['data']}, {one['config']['epochs']} epochs, learning rate {one['config']['lr']:g}",
            "",
            "| method | accuracy % | seeds | ratio, words | last epoch | ratio, bytes (paper form) | ratio, bytes (compact) "
            "| s/epoch | published accuracy % | published ratio |",
            "|---|---|---|---|---|---|---|---|---|---|",
        ]
        for row in LABELS:
            runs = rows.get(row)
            if not runs:
                continue
            accuracies = [r["accuracy"] for r in runs]
            accuracy = f"{_median(accuracies):.2f}"
            if len(runs) > 1:
                accuracy += f" [{min(accuracies):.2f} {max(accuracies):.2f}]"
            words = [r["ratio_words"] for r in runs if r["ratio_words"]]
            sizes = {form: [r["encoded"][form]["ratio"] for r in runs if form in r["encoded"]] for form in ("paper", "compact")}
            published = PUBLISHED["adam" if optimiser == "adam" else "momentum"].get(row, (None, None))
            cells = [
                LABELS[row],
                accuracy + (" (diverged)" if any(r["diverged"] for r in runs) else ""),
                str(len(runs)),
                _number(_median(words)) if words else "",
                _number(_median([r["curve"][-1]["ratio"] for r in runs])),
                *(_number(_median(sizes[form])) if sizes[form] else "" for form in ("paper", "compact")),
                f"{_median([r['seconds']['epoch'] for r in runs]):.2f}",
                *(_number(value) for value in published),
            ]
            lines.append("| " + " | ".join(cells) + " |")
        lines.append("")
    return "\n".join(lines)

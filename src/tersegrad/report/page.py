"""One HTML page about some runs: tables, and figures that answer. It is whole in itself: nothing is loaded from anywhere."""

from __future__ import annotations

import datetime
import html
import json
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from tersegrad import __version__
from tersegrad.core.errors import BadConfiguration
from tersegrad.planner import Link
from tersegrad.planner.plan import rate_text, seconds_text
from tersegrad.report import runs
from tersegrad.report.runs import RATES, Run, columns, thin, verdict
from tersegrad.report.tables import Column, Table, number, signed

LAYERS = 300  # of a run that are drawn and listed, the largest
SHOWN = (1e7, 1e8, 1e9, 1e10)  # links of the table
START = 24  # the link that is marked at first: 100 Mbit/s
EXCHANGED = (
    "bits_per_coordinate", "message_error", "residual_norm", "seconds/step", "seconds/encode", "seconds/decode", "seconds/wire",
)  # fmt: skip
MEANINGS = {"bits": "bits_per_coordinate", "error": "message_error", "residual": "residual_norm"}

NOTE = (
    "sent: bytes that left a worker in the whole run. bits/coord: of a worker's message, real bytes. error: what a message leaves "
    "out, as a share of what it was to say. above limit: bits more than the best conceivable compressor needs at this error on the "
    "hardest data. Then the time of a step on links of that speed, with the latency that a run measured, if one did."
)


def write(logs: Sequence[Path], out: Path, title: str = "") -> Path:
    """Make the page about the runs of some logs, and write it."""
    text = page(runs.read(logs), title)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(text, encoding="utf-8")
    except OSError as error:
        raise BadConfiguration(f"cannot write {out}: {error.strerror}") from None
    return out


def page(found: Sequence[Run], title: str = "") -> str:
    """The page as text."""
    first = found[0].first
    title = title or f"{first.get('model', 'A model')} on {first.get('data', 'data')}: {len(found)} run{'s' * (len(found) > 1)}"
    folder = resources.files("tersegrad.report") / "web"
    parts = {
        "title": html.escape(title),
        "facts": html.escape(_facts(found)),
        "table": _html(_table(found)),
        "note": html.escape(NOTE),
        "verdicts": _html(_verdicts(found)),
        "footer": html.escape(
            f"tersegrad {__version__}, {datetime.date.today().isoformat()}. Every rate is the length of real messages."
        ),
        "style": (folder / "page.css").read_text(encoding="utf-8"),
        "script": "\n".join((folder / name).read_text(encoding="utf-8") for name in ("chart.js", "page.js")),
        # No text of a log can end the script that holds it.
        "data": json.dumps(document(found), allow_nan=False, separators=(",", ":")).replace("<", "\\u003c"),
    }
    template = (folder / "page.html").read_text(encoding="utf-8")
    pieces = template.split("{{")
    return pieces[0] + "".join(parts[name] + rest for name, _, rest in (piece.partition("}}") for piece in pieces[1:]))


def document(found: Sequence[Run]) -> dict[str, Any]:
    """The numbers of the figures."""
    ended, links = [run for run in found if run.result], [runs.at(found, rate) for rate in RATES]
    predicted, measured = None, runs.measured_link(found)
    if runs.baseline(found) is None and ended:
        line = [ended[0].predicted_bf16(link) for link in links]
        predicted = None if None in line else [_short(v) for v in line]
    verdicts = [verdict(found, rate) for rate in RATES]
    told = {"rates": [_short(r) for r in RATES], "verdicts": verdicts, "predicted": predicted, "start": START}
    if measured is not None:
        told |= {"measured": _short(measured.bits_per_second), "latency": seconds_text(measured.latency)}
    return {"runs": [_run(run, links) for run in found], "links": told}


def _short(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.5g}")


def _run(run: Run, links: Sequence[Link]) -> dict[str, Any]:
    seconds = [run.step_seconds(link) for link in links]
    exchanges = [{"step": row["exchanged"], **row["numbers"]} for row in run.exchanges]
    return {
        "label": run.label,
        "guarantee": ((run.result or {}).get("job") or {}).get("guarantee", {}).get("kind", "none"),
        "bits": run.number("bits_per_coordinate"),
        "error": run.number("error"),
        "above": run.number("above_limit"),
        "seconds": None if None in seconds else [_short(v) for v in seconds],
        "progress": columns(thin(run.steps), ("loss", "rate")),
        "evaluations": columns(
            thin([r for r in run.steps if r.get("accuracy") is not None]), ("sent", "accuracy", "test_loss")
        ),
        "exchanges": columns(thin(exchanges), EXCHANGED),
        "layer_steps": [row["step"] for row in thin(exchanges, 100)],
        "layers": _layers(run, thin(exchanges, 100)),
    }


def _layers(run: Run, rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    sizes: Mapping[str, int] = run.first.get("layers") or {}
    if not rows:
        return []
    out = []
    for name, numel in sorted(sizes.items(), key=lambda item: -item[1])[:LAYERS]:
        lines = {short: columns(rows, (f"layer/{name}/{long}",))[f"layer/{name}/{long}"] for short, long in MEANINGS.items()}
        known = {short: [v for v in line if v is not None] for short, line in lines.items()}
        means = {short: _short(sum(line) / len(line)) if line else None for short, line in known.items()}
        out.append({"name": name, "numel": numel, "dense": run.sent_dense.get(name), **means, "over_time": lines})
    return out


# -------------------------------------------------------------------------------------------------------------------- tables


def _facts(found: Sequence[Run]) -> str:
    first = found[0]
    same = {k: v for k, v in first.facts.items() if all(run.facts.get(k) == v for run in found)}
    words = [f"{same['workers']} workers"] if "workers" in same else []
    words += [f"{int(first.number('parameters') or 0):,} parameters"] if first.result else []
    words += [f"{name} {same[name]}" for name in ("data", "model", "optimizer", "batch", "seed") if name in same]
    unfinished = sum(run.result is None for run in found)
    return ", ".join(words) + (
        f". {unfinished} of {len(found)} runs had not ended when this page was made" if unfinished else ""
    )


def _table(found: Sequence[Run]) -> Table:
    heads = ["compressor", "exchange", "accuracy", "sent", "bits/coord", "error", "above limit"]
    heads += [rate_text(rate) for rate in SHOWN]
    rows = []
    for run in found:
        accuracy, sent = run.number("accuracy"), run.number("bytes_sent")
        last = run.steps[-1] if run.steps else {}
        through = runs.chosen(run.report, str(run.first.get("exchange") or ""))
        exchange = ", ".join(str(part) for part in (through, run.first.get("local")) if part)
        row = [str(run.first.get("compressor") or "none"), exchange]
        row += ["not ended" if accuracy is None else f"{100 * accuracy:.1f} %"]
        row += [f"{number((sent if sent is not None else float(last.get('sent', 0))) / 1e6)} MB"]
        row += [number(run.number("bits_per_coordinate")), number(run.number("error"), 2), signed(run.number("above_limit"))]
        row += ["-" if (taken := run.step_seconds(runs.at(found, rate))) is None else seconds_text(taken) for rate in SHOWN]
        rows.append(tuple(row))
    return Table(tuple(Column(head, number=k > 1) for k, head in enumerate(heads)), tuple(rows))


def _verdicts(found: Sequence[Run]) -> Table:
    """What the cost model says of each run, and what was sent dense in it."""
    rows = []
    for run in found:
        told = run.report
        dense = f"{told['dense/parameters']} tensors: {told['dense/why']}" if told.get("dense/parameters") else "nothing"
        below = told.get("pays_below")
        pays = rate_text(float(below)) if isinstance(below, int | float) and below > 0 else "-"
        rows.append((run.label, pays, str(told.get("verdict", "-")), dense if "dense/parameters" in told else "-"))
    heads = ("run", "pays below", "verdict of the cost model", "sent dense")
    return Table(tuple(Column(head, number=k == 1) for k, head in enumerate(heads)), tuple(rows))


def _html(table: Table) -> str:
    def cells(kind: str, values: Sequence[str]) -> str:
        named = zip(table.columns, values)
        return "".join(f"<{kind}{'' if c.number else ' class=text'}>{html.escape(v)}</{kind}>" for c, v in named)

    head = cells("th", [c.title for c in table.columns])
    body = "".join(f"<tr>{cells('td', row)}</tr>" for row in table.rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"

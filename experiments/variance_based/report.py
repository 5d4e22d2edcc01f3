"""Tables and figures from the result files: ``python -m experiments.variance_based.report [FOLDER]``.

Without a folder it reads ``results/`` (a JSON a run, and ``digits.jsonl``, a run a line), and fills the block between the marks of
``README.md``, and that of the second experiment from ``results/tiny``; with one, it writes ``table.md`` there. Figures lie beside the
result files. Runs of another length or initialisation than the usual get tables of their own.
"""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from experiments.variance_based.methods import LABELS, PUBLISHED, VARIANTS

Result = dict[str, Any]
TITLES = {"adam": "Adam", "momentum": "Momentum SGD"}
HERE = Path(__file__).parent
ENOUGH = 3  # messages whose mean size is worth a number
MARKS = ("<!-- results: filled by report.py -->", "<!-- end of results -->")
SECOND = ("<!-- second experiment: filled by report.py -->", "<!-- end of second experiment -->")
REDUCED = ("none", "power", "local")  # families whose messages are added on the way or in parts: they do not go to every worker


def read(folder: Path) -> list[Result]:
    """All runs of a folder's result files."""
    texts = [path.read_text() for path in sorted(folder.glob("*.json"))]
    texts += [line for path in sorted(folder.glob("*.jsonl")) for line in path.read_text().splitlines()]
    return [run for run in map(json.loads, texts) if "row" in run]


@dataclasses.dataclass(frozen=True)
class Setting:
    """What runs must share to stand in one table."""

    data: str
    epochs: int
    init: str

    @staticmethod
    def of(run: Result) -> Setting:
        return Setting(run["data"], run["config"]["epochs"], run["config"].get("init", "lecun"))

    @property
    def title(self) -> str:
        return f"{self.data}, {self.epochs} epochs" + (f", {self.init}'s initialisation" if self.init != "lecun" else "")

    @property
    def tag(self) -> str:
        """What distinguishes the names of its figures; nothing for the usual one."""
        usual = Setting("cifar10", 50, "lecun")
        parts = [
            str(getattr(self, f.name)) for f in dataclasses.fields(self) if getattr(self, f.name) != getattr(usual, f.name)
        ]
        return "".join(f"_{part}" for part in parts)


def settings(results: Iterable[Result]) -> dict[Setting, list[Result]]:
    """The runs of every setting; the one with most runs first, CIFAR-10 before others."""
    found: dict[Setting, list[Result]] = {}
    for run in results:
        found.setdefault(Setting.of(run), []).append(run)
    return dict(sorted(found.items(), key=lambda item: (item[0].data != "cifar10", -len(item[1]))))


def by_row(results: Iterable[Result], optimiser: str) -> dict[str, list[Result]]:
    """The runs of every row and variant, seeds in order; of momentum without compression only the best learning rate."""
    rows: dict[str, list[Result]] = {}
    for r in results:
        if r["config"]["optimiser"] == optimiser:
            rows.setdefault(r["row"], []).append(r)
    if optimiser == "momentum" and rows.get("none"):
        usable = [r for r in rows["none"] if not r["diverged"]] or rows["none"]
        best = max(usable, key=lambda r: r["accuracy"])
        rows["none"] = [r for r in usable if r["config"]["lr"] == best["config"]["lr"]]
    return {row: sorted(runs, key=lambda r: r["config"]["seed"]) for row, runs in rows.items()}


def chosen(results: Iterable[Result], optimiser: str) -> dict[str, list[Result]]:
    """The runs of every row of the main table, in its order."""
    rows = by_row(results, optimiser)
    return {row: rows[row] for row in LABELS if row in rows}


def known(run: Result) -> dict[str, tuple[float | None, float | None]]:
    """The published numbers that a run can be compared with: those of its optimiser, on CIFAR-10 only."""
    if run["data"] != "cifar10":
        return {}
    return PUBLISHED["adam" if run["config"]["optimiser"] == "adam" else "momentum"]


def middle_run(runs: Sequence[Result]) -> Result:
    """The run with the median accuracy (the lower of two)."""
    return sorted(runs, key=lambda r: r["accuracy"])[(len(runs) - 1) // 2]


def accuracy(runs: Sequence[Result]) -> float:
    """The median over seeds."""
    return float(statistics.median(r["accuracy"] for r in runs))


def late(run: Result) -> float:
    """The mean accuracy of the last ten epochs: with a constant rate that of one epoch moves by a point."""
    return statistics.fmean(run["curve"]["accuracy"][-10:])


@dataclasses.dataclass(frozen=True)
class Bits:
    """What one sent value costs in the compact form, headers included, and what an ideal code would take; over a run's samples."""

    messages: int
    sent: float  # values per message
    bits: float
    places: float
    values: float
    places_by_tensor: float

    @staticmethod
    def of(run: Result) -> Bits | None:
        samples = [s for s in run["encoded"]["samples"] if s.get("entropy") and "compact" in s]
        if len(samples) < ENOUGH:
            return None
        sent = sum(s["sent"] for s in samples)
        ideal = [sum(s["entropy"][part] for s in samples) / sent for part in ("places", "values", "places_by_tensor")]
        return Bits(len(samples), sent / len(samples), 8 * sum(s["compact"] for s in samples) / sent, *ideal)

    @property
    def above(self) -> float:
        """Bits sent against the entropy of places and values."""
        return self.bits / (self.places + self.values) - 1

    @property
    def above_by_tensor(self) -> float:
        """The same, where how many values each tensor sends is given."""
        return self.bits / (self.places_by_tensor + self.values) - 1


def _number(value: float | None, digits: int = 1) -> str:
    return "" if value is None else f"{value:,.{digits}f}"


def _range(runs: Sequence[Result], digits: int = 2) -> str:
    """Median accuracy, lowest and highest."""
    values = [r["accuracy"] for r in runs]
    text = f"{accuracy(runs):.{digits}f}"
    text += f" [{min(values):.{digits}f} {max(values):.{digits}f}]" if len(runs) > 1 else ""
    return text + (" (diverged)" if any(r["diverged"] for r in runs) else "")


def _markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table, without the columns that have nothing to say."""
    rows = list(rows)
    used = [i for i in range(len(head)) if any(row[i] for row in rows)]
    head, rows = [head[i] for i in used], [[row[i] for i in used] for row in rows]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


def _sizes(run: Result) -> tuple[float | None, float | None]:
    """Ratios in bytes: the paper's form and the compact one; nothing from fewer messages than are enough."""
    encoded = run["encoded"]
    if encoded["samples"] and len(encoded["samples"]) < ENOUGH:
        return None, None
    paper, compact = (encoded.get(form, {}).get("ratio") for form in ("paper", "compact"))
    return paper, compact


def _leaves(run: Result) -> float | None:
    """How many times fewer bytes leave a worker than with a float32 all-reduce, which sends 2 (p - 1)/p times the gradient.

    A message that all workers get leaves p - 1 times. Values are those counted in every step, and only their bytes come from the samples:
    the first steps, which send most, are seldom among them.
    """
    compact, samples = _sizes(run)[1], run["encoded"]["samples"]
    if compact is None:
        return None
    if samples and run["ratio_words"]:
        compact *= run["ratio_words"] * statistics.fmean(s["sent"] for s in samples) / run["parameters"]
    return compact if run["row"].partition("_")[0] in REDUCED else compact * 2 / run["config"]["workers"]


def _share(run: Result) -> float | None:
    """Bytes of the compact form by those of the paper's."""
    paper, compact = _sizes(run)
    return paper / compact if paper and compact else None


MAIN = (
    "method",
    "accuracy %",
    "published accuracy %",
    "last ten epochs %",
    "against none",
    "published gain",
    "parameters per word",
    "published ratio",
    "last epoch",
    "bytes: paper's form",
    "bytes: compact",
    "leaves a worker",
    "compact / paper",
    "bits per value (above entropy)",
    "s per epoch",
    "seeds",
)


def _gain(runs: Sequence[Result], base: Sequence[Result]) -> float:
    """Difference of the medians of the last ten epochs."""
    return float(statistics.median(map(late, runs)) - statistics.median(map(late, base)))


def main_table(rows: dict[str, list[Result]]) -> str:
    """One optimiser's rows, ours beside the published numbers."""
    lines = []
    for row, runs in rows.items():
        run = middle_run(runs)
        published = known(run)
        there = published.get(row, (None, None))
        gain = _gain(runs, rows["none"]) if "none" in rows and row != "none" else None
        base = published.get("none", (None, None))[0]
        gain_there = there[0] - base if there[0] is not None and base is not None and row != "none" else None
        share, bits = _share(run), Bits.of(run)
        lines.append(
            [
                LABELS[row],
                _range(runs),
                _number(there[0]),
                f"{statistics.median(map(late, runs)):.2f}",
                "" if gain is None else f"{gain:+.2f}",
                "" if gain_there is None else f"{gain_there:+.1f}",
                _number(run["ratio_words"]),
                _number(there[1]),
                _number(run["curve"]["ratio"][-1] or None),
                *map(_number, _sizes(run)),
                _number(_leaves(run)),
                "" if share is None else f"{100 * share:.0f} %",
                "" if bits is None else f"{bits.bits:.2f} ({100 * bits.above:+.1f} %)",
                f"{statistics.median(r['seconds']['epoch'] for r in runs):.2f}",
                str(len(runs)),
            ]
        )
    return _markdown(MAIN, lines)


def table(results: Sequence[Result]) -> str:
    """The main tables of all settings and both optimisers."""
    parts = []
    for setting, runs in settings(results).items():
        for optimiser, title in TITLES.items():
            rows = chosen(runs, optimiser)
            if rows:
                rate = next(iter(rows.values()))[0]["config"]["lr"]
                parts += [f"### {title}: {setting.title}, learning rate {rate:g}", main_table(rows)]
    return "\n\n".join(parts)


def entropy_table(results: Sequence[Result]) -> str:
    """Bits sent for a value against the entropy of what is sent, every run that stored it in one line a row."""
    lines = []
    for setting, runs in settings(results).items():
        for optimiser, title in TITLES.items():
            for row, found in chosen(runs, optimiser).items():
                bits = Bits.of(middle_run(found))
                if bits is not None and not row.startswith("qsgd"):
                    ideal = bits.places + bits.values
                    lines.append(
                        [
                            f"{LABELS[row]}; {title}, {setting.title}",
                            str(bits.messages),
                            f"{bits.sent:,.0f}",
                            f"{bits.bits:.2f}",
                            f"{ideal:.2f} = {bits.places:.2f} + {bits.values:.2f}",
                            f"{100 * bits.above:+.1f} %",
                            f"{100 * bits.above_by_tensor:+.1f} %",
                        ]
                    )
    head = (
        "run",
        "messages",
        "values per message",
        "bits per value",
        "entropy = places + values",
        "above it",
        "above it by tensor",
    )
    return _markdown(head, lines) if lines else "No run has stored the entropy of its messages yet."


def _paired(runs: Sequence[Result], base: Sequence[Result]) -> str:
    """Mean difference in accuracy (of the last ten epochs) over common seeds, and its standard error."""
    before = {r["config"]["seed"]: late(r) for r in base}
    gaps = [late(r) - before[r["config"]["seed"]] for r in runs if r["config"]["seed"] in before]
    if not gaps:
        return ""
    error = f" ± {statistics.stdev(gaps) / math.sqrt(len(gaps)):.2f}" if len(gaps) > 1 else ""
    return f"{statistics.mean(gaps):+.2f}{error}"


def _factor(runs: Sequence[Result], base: Sequence[Result]) -> float:
    """Mean quotient of the ratios in words over common seeds."""
    before = {r["config"]["seed"]: r["ratio_words"] for r in base}
    found = [r["ratio_words"] / before[r["config"]["seed"]] for r in runs if r["config"]["seed"] in before]
    return statistics.fmean(found) if found else math.nan


def variants_table(results: Sequence[Result]) -> str:
    """Every variant below the row it belongs to, with its difference from that over the same seeds."""
    parts = []
    for setting, runs in settings(results).items():
        rows = {optimiser: by_row(runs, optimiser) for optimiser in TITLES}
        tried = [name for name in VARIANTS if any(name in found for found in rows.values())]
        if not tried:
            continue
        bases = list(dict.fromkeys(VARIANTS[name].row for name in tried))
        order: list[tuple[str, str, str]] = [("none", "**none**", "none")]
        for base in bases:
            if base.startswith("hybrid"):
                strom = base.replace("hybrid", "strom")
                order.append((strom, f"**{LABELS[strom]}**", strom))
            order.append((base, f"**{LABELS[base]}**", base))
            order += [(name, VARIANTS[name].label, base) for name in tried if VARIANTS[name].row == base]
        lines = []
        for name, label, base in order:
            cells = [label]
            for optimiser in TITLES:
                mine = rows[optimiser].get(name)
                reference = rows[optimiser].get(base)
                if not mine:
                    cells += ["", "", ""]
                    continue
                compared = bool(reference) and name != base
                cells += [_range(mine, 1), _paired(mine, reference or []) if compared else ""]
                factor = f" ({_factor(mine, reference or []):.2f})" if compared else ""
                cells.append(_number(statistics.median(r["ratio_words"] for r in mine)) + factor)
            if setting.data == "cifar10":
                there = [PUBLISHED["adam"].get(name, (None, None)), PUBLISHED["momentum"].get(name, (None, None))]
                cells += [f"{_number(a)} at {_number(b)}" if a and b else "" for a, b in there]
            lines.append(cells)
        columns = ("accuracy %", "difference", "parameters per word (of the default's)")
        head = ["reading", *(f"{name}: {column}" for name in ("Adam", "momentum") for column in columns)]
        head += ["published, Adam", "published, momentum"] if setting.data == "cifar10" else []
        seeds = max(len(found) for part in rows.values() for found in part.values())
        parts += [f"### {setting.title}, {seeds} seed{'s' if seeds > 1 else ''}", _markdown(head, lines)]
    return "\n\n".join(parts)


def checks(results: Sequence[Result]) -> str:
    """What must be shown on CIFAR-10, and what was found in every setting."""
    columns = {s: runs for s, runs in settings(results).items() if s.data == "cifar10"}
    lines: dict[str, list[str]] = {}

    def judge(text: str, value: str | None, good: bool = False) -> None:
        lines.setdefault(text, []).append("" if value is None else f"{value}: {'yes' if good else '**no**'}")

    for runs in columns.values():
        adam, momentum = chosen(runs, "adam"), chosen(runs, "momentum")
        vgc, none = adam.get("vgc_1.5"), adam.get("none")
        middle = middle_run(vgc) if vgc else None
        ours, plain = accuracy(vgc) if vgc else None, accuracy(none) if none else None
        both = ours is not None and plain is not None
        judge("VGC 1.5 (Adam) is as accurate as none", f"{ours:.2f} / {plain:.2f}" if both else None, both and ours >= plain)  # type: ignore[operator]
        words = middle["ratio_words"] if middle else None
        judge("VGC 1.5: 445 parameters per word", f"{words:.1f}" if words else None, bool(words and words >= 445))
        compact = _sizes(middle)[1] if middle else None
        judge("VGC 1.5: 1,000 times fewer bytes", f"{compact:,.0f}" if compact else None, bool(compact and compact >= 1000))
        rising = [middle_run(adam[row])["ratio_words"] for row in ("vgc_1", "vgc_1.5", "vgc_2") if row in adam]
        text = " < ".join(f"{r:.0f}" for r in rising) if len(rising) == 3 else None
        judge("ratios rise with alpha", text, rising == sorted(rising))
        hybrid = middle_run(adam["hybrid_0.1"])["ratio_words"] if "hybrid_0.1" in adam else None
        judge("hybrid 0.1: 5,000 parameters per word", f"{hybrid:,.0f}" if hybrid else None, bool(hybrid and hybrid > 5000))
        own = [middle_run(found) for row, found in [*adam.items(), *momentum.items()] if row.startswith("vgc")]
        shares = [share for share in map(_share, own) if share]
        judge(
            "VGC: compact / paper at most 45 %",
            f"{100 * max(shares):.0f} %" if shares else None,
            max(shares, default=1) <= 0.45,
        )
        above = [bits.above for bits in map(Bits.of, own) if bits]
        judge(
            "VGC: bits within 5 % of the entropy",
            f"{100 * max(above):+.1f} %" if above else None,
            max(above, default=1) <= 0.05,
        )
        tuned = accuracy(momentum["none"]) if "none" in momentum else None
        pair = tuned is not None and plain is not None
        judge("none: momentum as accurate as Adam", f"{tuned:.2f} / {plain:.2f}" if pair else None, pair and tuned >= plain)  # type: ignore[operator]
        second = max((r["seconds"]["epoch"] for r in own), default=None)
        judge("an epoch with VGC in 3.0 s", f"{second:.2f} s" if second else None, bool(second and second <= 3.0))
    return _markdown(["wanted", *(s.title for s in columns)], [[text, *found] for text, found in lines.items()])


def notes(results: Sequence[Result]) -> str:
    """What the numbers are, and where they were made."""
    every = sorted({r["encoded"]["every"] for r in results if len(r["encoded"]["samples"]) >= ENOUGH})
    messages = sum(len(r["encoded"]["samples"]) for r in results)
    exact = [r for r in results if not r["row"].startswith("dithering")]  # whose steps come from a coarser grid
    differing = sum(s.get("differing", 0) for r in exact for s in r["encoded"]["samples"])
    coordinates = sum(len(r["encoded"]["samples"]) * r["parameters"] for r in exact)
    steps = " to ".join(map(str, sorted({every[0], every[-1]}))) if every else "-"
    lines = [
        "What the columns are:",
        "- *Accuracy*: that of the last epoch, the median over seeds [lowest, highest]. With a constant learning rate it moves by a point "
        "from epoch to epoch, so differences (*against none*) are taken between means of the last ten.\n"
        "- *Ratios*: those of the run with the median accuracy. In words (*parameters per word*): parameters divided by those that a "
        "worker sends in a step on average, counted in every step.\n"
        "- *Bytes*: 32 bits per parameter against whole messages, encoded and decoded on every "
        f"{steps}th step for a worker in turn (not shown where fewer than {ENOUGH} were).\n"
        "- *Leaves a worker*: bytes in the compact form against a float32 all-reduce, where a message counts once for every worker that "
        "gets it. Values are those counted in every step, bytes per value those of the messages.\n"
        "- *Bits per value*: those of the whole compact message. The entropy is log2 C(N, k) for the places and the order-0 entropy of the "
        "values, each message by itself.",
        f"{messages:,} messages were encoded; the states they left differ from the batched step's in {differing:,} of "
        f"{coordinates / 1e9:,.1f} billion coordinates (Sparse Dithering apart, whose step is searched more closely in messages).",
    ]
    for setting, runs in settings(results).items():
        sweep = [r for r in runs if r["config"]["optimiser"] == "momentum" and r["row"] == "none" and not r["config"]["seed"]]
        rates = ", ".join(
            f"{r['config']['lr']:g}: {'diverged' if r['diverged'] else format(r['accuracy'], '.2f')}"
            for r in sorted(sweep, key=lambda r: r["config"]["lr"])
        )
        tuned = f" Momentum without compression by learning rate: {rates}." if len(sweep) > 1 else ""
        machines = " or ".join(sorted({r["machine"] for r in runs}))
        days = sorted({r["date"] for r in runs})
        days = days if len(days) == 1 else [f"{days[0]} to {days[-1]}"]
        one = runs[0]["config"]
        size = f"{one['workers']} workers x {one['batch']}"
        lines.append(f"{setting.title}: {len(runs)} runs, {days[0]}, {machines}, {size}.{tuned}")
    return "\n\n".join(lines)


def write_up(results: Sequence[Result], folder: str, drawn: Iterable[str]) -> str:
    """Everything that is made from the results, as Markdown; ``folder`` is where the figures are, seen from the text."""
    parts = [notes(results)]
    if any(r["data"] == "cifar10" for r in results):
        parts += ["### Wanted and found", checks(results)]
    parts.append(table(results))
    parts += [f"![{stem.replace('_', ' ')}]({folder}{stem}.png)" for stem in drawn]
    parts += ["### Bits against entropy", entropy_table(results)]
    tried = variants_table(results)
    parts += ["## Variants", tried] if tried else []
    return "\n\n".join(parts)


def second(results: Sequence[Result]) -> str:
    """The tables of the second experiment, ResNet-50."""
    tried = variants_table(results)
    machines = " or ".join(sorted({r["machine"] for r in results}))
    days = sorted({r["date"] for r in results})
    lines = [f"{len(results)} runs, {' to '.join(sorted({days[0], days[-1]}))}, {machines}."]
    return "\n\n".join([*lines, table(results), *([tried] if tried else [])])


def fill(text: str, block: str, marks: tuple[str, str] = MARKS) -> str:
    """``text`` with another block between the marks."""
    before, start, rest = text.partition(marks[0])
    _, end, after = rest.partition(marks[1])
    if not start or not end:
        raise ValueError(f"the text has no marks {marks[0]} and {marks[1]}")
    return f"{before}{start}\n\n{block}\n\n{end}{after}"


def main(folder: Path, readme: Path | None = None) -> None:
    """Write the figures of a folder, and the tables into ``readme`` or beside them."""
    from experiments.variance_based import figures

    results = read(folder)
    if not results:
        raise SystemExit(f"{folder} holds no results: run `python -m experiments.variance_based.run` first")
    found = settings(results)
    first = next(iter(found)).data  # the small form stays without figures where the large one has some
    drawn = [stem for s, runs in found.items() if s.data == first for stem in figures.draw(runs, folder, s.tag)]
    if readme is None:
        (folder / "table.md").write_text(f"# Variance-based compression\n\n{write_up(results, '', drawn)}\n")
    else:
        block = write_up(results, f"{folder.relative_to(readme.parent)}/", drawn)
        text = fill(readme.read_text(), block)
        tiny = read(folder / "tiny")
        readme.write_text(fill(text, second(tiny), SECOND) if tiny else text)
    print(table(results))


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(Path(sys.argv[1]))
    else:
        main(HERE / "results", HERE / "README.md")

"""Tables of the runs, and the rule by which settings are chosen.

A setting belongs to a budget (20, 100, 1,000 times fewer bytes than bf16 in every step) if it sends at least ``ABOUT`` times that much
less, on every task. What a setting costs on a task is the accuracy that it loses, in units of 0.2 points, or, where text is learned,
the loss that it gains, in units of 0.5 %. Of a budget's settings the one is chosen that costs least on average over the tasks of
the part *choose*. On a task of the part *report* it is held against all settings that belong to the budget there.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Callable, Mapping, Sequence

from experiments.advice.loop import Run
from experiments.advice.settings import BASE, BEFORE, BY_LABEL, RUNGS, Setting
from experiments.advice.tasks import FIRST_REPORT, OPTIMIZERS, REPORT, TASKS, UNSEEN
from tersegrad.advice import Row, Who
from tersegrad.report.tables import Column, Table

BUDGETS = (20, 100, 1000)
ABOUT = 0.75
NEAR_POINTS, NEAR_LOSS = 0.2, 0.5  # points of accuracy, per cent of loss
TEXTS = ("source", "shakespeare", "help", "headers")

# What runs on the tasks that played no part in choosing: by optimiser the rows of the table, and the strongest others of each budget.
REPORTED: Mapping[str, tuple[Setting, ...]] = {
    "adam": tuple(
        BY_LABEL[label]
        for label in (
            "bf16", "feedback 0.25", "H 2, trellis 0.25", "feedback 0.1", "trellis 0.5",
            "H 8, trellis 1", "H 4, trellis 4", "H 60, trellis 1", "H 120, trellis 0.25",
        )
    ),
    "momentum": tuple(
        BY_LABEL[label]
        for label in (
            "bf16", "H 2, trellis 0.25", "trellis 1",
            "H 4, trellis 4", "H 8, trellis 1", "H 60, trellis 1", "H 120, trellis 0.25",
        )
    ),
}  # fmt: skip


class Cell:
    """The runs of one setting on one task with one optimiser, over seeds, against bf16 with the same seeds."""

    def __init__(self, runs: Sequence[Run], base: Sequence[Run]) -> None:
        plain = {r.seed: r for r in base}
        self.runs = [r for r in runs if r.seed in plain]
        self.pairs = [(r, plain[r.seed]) for r in self.runs]

    def __bool__(self) -> bool:
        return bool(self.runs)

    def mean(self, name: str) -> float:
        return float(statistics.fmean(getattr(r, name) for r in self.runs))

    def span(self, name: str) -> tuple[float, float]:
        values = [getattr(r, name) for r in self.runs]
        return min(values), max(values)

    @property
    def fewer(self) -> float:
        """Times fewer bytes than bf16 in every step."""
        return sum(b.sent for _, b in self.pairs) / sum(r.sent for r, _ in self.pairs)

    @property
    def above(self) -> float:
        """Per cent of loss above bf16's."""
        return 100 * (sum(r.loss for r, _ in self.pairs) / sum(b.loss for _, b in self.pairs) - 1)

    @property
    def cost(self) -> float:
        """What it costs, in units of what is called near: points of accuracy, or of text per cent of loss."""
        cost = self.above / NEAR_LOSS if self.runs[0].task in TEXTS else self.lost / NEAR_POINTS
        # A loss that is not a number is as bad as can be.
        return cost if math.isfinite(cost) else math.inf

    @property
    def by_seed(self) -> list[float]:
        """Points of accuracy lost, or of text per cent of loss gained, with every seed."""
        if self.runs[0].task in TEXTS:
            return [100 * (r.loss / b.loss - 1) for r, b in self.pairs]
        return [b.accuracy - r.accuracy for r, b in self.pairs]

    @property
    def lost(self) -> float:
        """Points of accuracy below bf16's."""
        return statistics.fmean(b.accuracy - r.accuracy for r, b in self.pairs)


def cells(runs: Sequence[Run], task: str, optimizer: str) -> dict[Setting, Cell]:
    """By setting, fewer bytes last."""
    own = [r for r in runs if (r.task, r.optimizer) == (task, optimizer)]
    base = [r for r in own if r.setting == BASE]
    made = {s: Cell([r for r in own if r.setting == s], base) for s in dict.fromkeys(r.setting for r in own)}
    return dict(sorted(((s, c) for s, c in made.items() if c), key=lambda pair: pair[1].fewer))


def fitting(runs: Sequence[Run], optimizer: str, budget: float, about: float = ABOUT) -> dict[Setting, dict[str, Cell]]:
    """The settings of a budget that ran on every task: by task."""
    names = list(dict.fromkeys(r.task for r in runs))
    by_task = {name: cells(runs, name, optimizer) for name in names}
    shared = [s for s in by_task[names[0]] if all(s in by_task[name] for name in names)] if names else []
    found = {s: {name: by_task[name][s] for name in names} for s in shared}
    return {s: of for s, of in found.items() if all(c.fewer >= about * budget for c in of.values())}


def ranked(runs: Sequence[Run], optimizer: str, budget: float, about: float = ABOUT) -> list[tuple[float, Setting]]:
    """The settings of a budget, the best first, with the mean over tasks of what they cost."""
    found = fitting(runs, optimizer, budget, about)
    return sorted(((statistics.fmean(c.cost for c in of.values()), s) for s, of in found.items()), key=lambda pair: pair[0])


def sends(what: Row | Setting) -> tuple[str, str, str | None]:
    """What is exchanged, and how, whatever it is called."""
    return what.compressor, what.exchange, what.local


def before(who: Who, budget: int) -> Setting:
    """The row that the parts *choose* and *report* are about."""
    return BEFORE[who][BUDGETS.index(budget)]


@dataclasses.dataclass(frozen=True)
class Held:
    """The row of the advice on one task of the part *report*, against the best of what sends as few bytes there."""

    optimizer: Who
    budget: int
    task: str
    row: Cell
    best: Cell

    @property
    def behind(self) -> float:
        """In units of what is called near."""
        return self.row.cost - self.best.cost

    @property
    def near(self) -> bool:
        return self.behind <= 1

    @property
    def fits(self) -> bool:
        """Whether the row itself sends as few bytes on this task as its budget asks for."""
        return self.row.fewer >= ABOUT * self.budget


def held(runs: Sequence[Run], chosen: Callable[[Who, int], Row | Setting | None] = before) -> list[Held]:
    """Every row of the advice (or what else was chosen) that ran, by optimiser, budget and task."""
    found = []
    for optimizer in OPTIMIZERS:
        for budget in BUDGETS:
            for task in dict.fromkeys(r.task for r in runs):
                own = cells(runs, task, optimizer)
                advised = chosen(optimizer, budget)
                mine = [c for s, c in own.items() if advised is not None and sends(s) == sends(advised)]
                others = [c for c in own.values() if c.fewer >= ABOUT * budget]
                if mine and others:
                    found.append(Held(optimizer, budget, task, mine[0], min(others, key=lambda c: c.cost)))
    return found


def table(runs: Sequence[Run], task: str, optimizer: str) -> Table:
    """One row per setting."""
    rows = []
    for setting, cell in cells(runs, task, optimizer).items():
        low, high = cell.span("loss")
        low_a, high_a = cell.span("accuracy")
        rows.append((
            setting.label, f"{cell.fewer:,.1f}", f"{cell.mean('bits'):.3g}", f"{cell.mean('loss'):.4f}", f"{low:.4f} to {high:.4f}",
            f"{cell.above:+.2f}", f"{cell.mean('accuracy'):.2f}", f"{low_a:.2f} to {high_a:.2f}", f"{cell.lost:+.2f}",
            f"{cell.mean('age'):.2f}", f"{cell.mean('age_first'):.2f}", f"{cell.mean('age_estimate'):.2f}", str(len(cell.runs)),
        ))  # fmt: skip
    columns = (
        Column("setting", number=False), Column("times fewer bytes than bf16"), Column("bits sent per step"), Column("loss"),
        Column("lowest to highest"), Column("% above bf16"), Column("accuracy %"), Column("lowest to highest"), Column("points lost"),
        Column("mean age"), Column("first round"), Column("estimate"), Column("seeds"),
    )  # fmt: skip
    return Table(columns, tuple(rows))


NOTE = """\
times fewer bytes: real messages that left a worker in the whole run, against bf16 in every step through the same exchange (against
float32 it is twice as many). loss and accuracy: on examples held out, means over seeds. mean age: exchanges that what was sent had
waited in residuals, both rounds together, then in the first round, then its estimate from sizes alone (`late.py`).""".replace(
    "\n", " "
)


def page(
    part: str,
    runs: Sequence[Run],
    chosen: Callable[[Who, int], Row | Setting | None] = before,
    settled: Sequence[Run] | None = None,
) -> str:
    """The Markdown of a part; settings are ranked by the runs that are ``settled``."""
    if part == "rates":
        return _rates(runs)
    words = [f"# {part}", NOTE]
    for task in dict.fromkeys(r.task for r in runs):
        for optimizer in OPTIMIZERS:
            shown = table(runs, task, optimizer)
            if shown.rows:
                one = next(r for r in runs if r.task == task)
                rate = next(r.rate for r in runs if (r.task, r.optimizer) == (task, optimizer))
                words += [f"## {TASKS[task].words}, {optimizer}"]
                words += [
                    f"{one.parameters:,} parameters, four workers of {TASKS[task].batch}, {one.steps} steps, learning rate {rate:g}."
                ]
                words += [shown.markdown()]
    if part == "ladder":
        words[2:2] = ["## What the rungs cost", _rungs(runs)]
    unseen = {"choose": FIRST_REPORT, "report": REPORT, "stages": UNSEEN}.get(part, ())
    if unseen:
        words += ["## The advice against the others", _held([r for r in runs if r.task in unseen], chosen)]
        words += ["## By budget", _budgets(runs if settled is None else settled)]
    return "\n\n".join(words) + "\n"


def _costs(cell: Cell) -> str:
    return f"{statistics.fmean(cell.by_seed):+.2f} ({', '.join(f'{cost:+.2f}' for cost in cell.by_seed)})"


def _rungs(runs: Sequence[Run]) -> str:
    """Every rung of the ladder on every task: times fewer bytes, and its cost with each seed, beside how far bf16's seeds are apart."""
    rows = []
    for task in dict.fromkeys(r.task for r in runs):
        for optimizer in OPTIMIZERS:
            own = cells(runs, task, optimizer)
            low, high = own[BASE].span("loss" if task in TEXTS else "accuracy")
            apart = f"{100 * (high / low - 1):.2f} %" if task in TEXTS else f"{high - low:.2f} points"
            each = [f"{own[s].fewer:.1f} times: {_costs(own[s])}" for s in RUNGS]
            rows.append((TASKS[task].words, optimizer, apart, *each))
    columns = [Column("task", number=False), Column("optimiser", number=False), Column("bf16's seeds are apart by")]
    columns += [Column(s.compressor) for s in RUNGS]
    words = (
        "Points of accuracy lost (images) or per cent of loss gained (texts) against bf16 with the same seed: mean, and every seed. "
        "Less than 0 is better than bf16.\n\n"
    )
    return words + Table(tuple(columns), tuple(rows)).markdown()


def _budgets(runs: Sequence[Run]) -> str:
    """The best of every budget."""
    names = list(dict.fromkeys(r.task for r in runs))
    columns = [
        Column("optimiser", number=False),
        Column("budget"),
        Column("setting", number=False),
        Column("mean cost"),
    ]
    columns += [Column(f"{TASKS[name].words}: times fewer, % of loss, points lost") for name in names]
    rows = []
    for optimizer in OPTIMIZERS:
        for budget in BUDGETS:
            found = fitting(runs, optimizer, budget)
            for cost, setting in ranked(runs, optimizer, budget)[:8]:
                each = [f"{c.fewer:,.0f}, {c.above:+.2f} %, {c.lost:+.2f}" for c in found[setting].values()]
                rows.append((optimizer, f"{budget:,}", setting.label, f"{cost:+.2f}", *each))
    words = f"Settings that ran on every task and send at least {ABOUT:g} of the budget's times fewer bytes there, eight at most.\n\n"
    return words + Table(tuple(columns), tuple(rows)).markdown()


def _held(runs: Sequence[Run], chosen: Callable[[Who, int], Row | Setting | None] = before) -> str:
    """Every row of the advice and the best of its budget, by task."""
    rows = []
    for h in held(runs, chosen):
        unit = "%" if h.task in TEXTS else "points"
        size = NEAR_LOSS if h.task in TEXTS else NEAR_POINTS
        each = [f"{c.fewer:,.0f}, {size * c.cost:+.2f} {unit}" for c in (h.row, h.best)]
        rows.append((
            h.optimizer, f"{h.budget:,}", TASKS[h.task].words, h.row.runs[0].setting.label, each[0], h.best.runs[0].setting.label, each[1],
            f"{size * h.behind:.2f} {unit}", ("yes" if h.near else "no") + ("" if h.fits else ", at too many bytes"),
            f"{len(h.row.runs)}, {len(h.best.runs)}",
        ))  # fmt: skip
    columns = (
        Column("optimiser", number=False), Column("budget"), Column("task", number=False), Column("advice", number=False),
        Column("times fewer, cost"), Column("best", number=False), Column("times fewer, cost"), Column("behind"),
        Column("within 0.2 points or 0.5 %", number=False), Column("seeds"),
    )  # fmt: skip
    words = (
        f"On each task the setting of the table, and the best of all that ran there and send at least {ABOUT:g} of the budget's "
        "times fewer bytes. A cost is points of accuracy lost, or per cent of loss gained, against bf16 with the same seeds.\n\n"
    )
    return words + Table(columns, tuple(rows)).markdown()


def _rates(runs: Sequence[Run]) -> str:
    """Losses of bf16 by learning rate."""
    rows = []
    for r in sorted(runs, key=lambda r: (r.task, r.optimizer, r.rate)):
        rows.append((TASKS[r.task].words, r.optimizer, f"{r.rate:g}", f"{r.loss:.4f}", f"{r.accuracy:.2f}"))
    columns = (
        Column("task", number=False),
        Column("optimiser", number=False),
        Column("rate"),
        Column("loss"),
        Column("accuracy %"),
    )
    return "# rates\n\nbf16, one seed that no other part has.\n\n" + Table(columns, tuple(rows)).markdown() + "\n"

"""Convergence against the bytes that were sent: which curves, and the tables of bytes and of iterations.

Only what workers send is counted (mean a worker); what the server sends back is the same for every method.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path

from experiments.optimal_compression import methods, problems
from experiments.optimal_compression.methods import Algorithm, Run
from tersegrad import names
from tersegrad.report.tables import Column, Table, number

TARGETS = (1e-4, 1e-10)
QUICK_TARGETS = (1e-1, 1e-2)
WORKERS = (4, 20, 100)
BEST_TOP_K = "best top_k"

# The single-node curves: (name in the figure, text form with {d}/{half} filled in). Adding a method is one line.
SINGLE = (
    ("none", "identity"),
    (BEST_TOP_K, "top_k(k={k})"),
    ("random_k, half", "random_k(k={half})"),
    ("QSGD 4 bits", "qsgd(bits=4, norm=max)"),
    ("natural", "natural"),
    ("ternary", "ternary"),
    ("SC", "{spherical}"),
    ("SD nu=0.1, paper code", "sparse_dithering(nu=0.1, coder=paper)"),
    ("SD nu=0.1", "sparse_dithering(nu=0.1)"),
    ("SD alpha=0.25", "sparse_dithering(alpha=0.25)"),
    ("SD alpha=0.5", "sparse_dithering(alpha=0.5)"),
    ("random SD omega=0.25, paper code", "random_sparse_dithering(omega=0.25, coder=paper)"),
    ("random SD omega=0.25", "random_sparse_dithering(omega=0.25)"),
    ("subtractive omega=0.25", "subtractive_dithering(omega=0.25)"),
)
OURS = ("SD", "SC", "random SD")  # the paper's compressors; subtractive dithering is not among them

# The distributed curves: (algorithm, text form, iterations by number of workers, largest first wins; divisor of the step)
STALL = {1: 2000, 20: 1000, 100: 800}
LONG = {1: 5000}
FULL = {1: 20000}
DISTRIBUTED: tuple[tuple[str, Algorithm, str, dict[int, int], float], ...] = (
    ("GD, none", "cgd", "identity", FULL, 1.0),
    ("DCGD, random SD", "cgd", "random_sparse_dithering(omega=0.25)", STALL, 1.0),
    ("DIANA, random SD", "diana", "random_sparse_dithering(omega=0.25)", FULL, 1.0),
    ("DIANA, subtractive", "diana", "subtractive_dithering(omega=0.25)", FULL, 1.0),
    ("EF, SD", "ef", "sparse_dithering(nu=0.1)", LONG, 1.0),
    ("EF, SD, step/4", "ef", "sparse_dithering(nu=0.1)", {1: 16000, 5: 0}, 4.0),
    ("EF21, SD", "ef21", "sparse_dithering(nu=0.1)", FULL, 1.0),
    ("EF21, top_k half", "ef21", "top_k(k={half})", {1: 20000, 5: 0}, 1.0),
)


@dataclasses.dataclass(frozen=True)
class Job:
    """One curve to compute, in a process of its own."""

    label: str
    problem: str
    workers: int
    algorithm: Algorithm
    text: str
    iterations: int
    slower: float
    targets: tuple[float, ...]
    folder: Path | None

    @property
    def weight(self) -> float:
        """A guess of its cost: long jobs start first."""
        return self.workers * (30.0 if "spherical" in self.text else 1.0) * min(self.iterations, 2000)


@dataclasses.dataclass(frozen=True)
class Curve:
    """A finished job."""

    label: str
    run: Run


def spherical(dimension: int) -> str:
    """Spherical Compression of the whole vector where the search is affordable, else by blocks."""
    if dimension <= 14:
        return "spherical(alpha=0.2)"
    if dimension <= 32:
        return f"spherical(alpha={0.5 if dimension <= 24 else 0.6})"
    return "spherical(alpha=0.5, block=8)"


def _known(text: str) -> bool:
    return text.partition("(")[0] in names()


def jobs(folder: Path | None, *, quick: bool = False) -> list[Job]:
    """Everything to compute, the costly first."""
    targets = QUICK_TARGETS if quick else TARGETS
    out = []
    chosen = ["diabetes"] if quick else list(problems.available(folder))
    for name in chosen:
        d = problems.load(name, folder).dimension
        for label, text in SINGLE:
            filled = text.replace("{half}", str(max(1, d // 2))).replace("{spherical}", spherical(d))
            if _known(filled) and not (quick and label == "SC"):
                out.append(Job(label, name, 1, "cgd", filled, 20000, 1.0, targets, folder))
        counts: Sequence[int] = (4,) if quick or name not in problems.EMBEDDED else WORKERS
        for n in counts:
            for label, algorithm, text, limits, slower in DISTRIBUTED:
                limit = next(limits[least] for least in sorted(limits, reverse=True) if n >= least)
                limit = min(limit, 50) if quick else limit
                costly = n == 100 and label == "DIANA, subtractive"  # one DIANA curve says it
                aside = name != "diabetes" and label in ("EF, SD, step/4", "EF21, top_k half")
                filled = text.replace("{half}", str(max(1, d // 2)))
                if limit and _known(filled) and not costly and not aside:
                    out.append(Job(label, name, n, algorithm, filled, limit, slower, targets, folder))
    return sorted(out, key=lambda job: -job.weight)


def order(curve: Curve) -> tuple[int, int, int]:
    """Where a curve stands in the tables."""
    problem = [*problems.EMBEDDED, *problems.LIBSVM].index(curve.run.problem)
    labels = [s[0] for s in SINGLE] if curve.run.workers == 1 else [s[0] for s in DISTRIBUTED]
    return problem, curve.run.workers, labels.index(curve.label)


def execute(job: Job) -> Curve:
    """Compute one curve."""
    split = problems.Split(problems.load(job.problem, job.folder), job.workers)
    if job.label == BEST_TOP_K:
        return Curve(job.label, _best_top_k(split, job))
    predict = job.workers > 1 and job.algorithm == "cgd" and job.text != "identity"
    run = methods.run(
        split, job.algorithm, job.text, targets=job.targets, iterations=job.iterations, slower=job.slower, predict=predict
    )
    return Curve(job.label, run)


def _best_top_k(split: problems.Split, job: Job) -> Run:
    """The k that needs the fewest bytes to the first target, run to the last one; every k is tried up to 32 dimensions."""
    d = split.problem.dimension
    candidates = list(range(1, d + 1)) if d <= 32 else sorted({round(d ** (j / 14)) for j in range(15)})
    candidates.sort(key=lambda k: abs(k - d / 3))  # likely ones first: the others stop when they have spent as much
    best, least = candidates[0], math.inf
    for k in candidates:
        tried = methods.run(split, "cgd", f"top_k(k={k})", targets=job.targets[:1], iterations=job.iterations, most_bytes=least)
        found = tried.reached[f"{job.targets[0]:g}"]
        if found is not None and found.nbytes < least:
            best, least = k, found.nbytes
    return methods.run(split, "cgd", f"top_k(k={best})", targets=job.targets, iterations=job.iterations)


def _at(run: Run, target: float) -> methods.Point | None:
    return run.reached[f"{target:g}"]


def _of(curves: Sequence[Curve], problem: str, workers: int) -> list[Curve]:
    return [c for c in curves if c.run.problem == problem and c.run.workers == workers]


def _by_label(curves: Sequence[Curve], label: str) -> Curve | None:
    return next((c for c in curves if c.label == label), None)


def bytes_tables(curves: Sequence[Curve], targets: tuple[float, float]) -> list[Table]:
    """For each problem, the bytes and iterations of every single-node method, with the ratios to none and to the best top-k."""
    tables = []
    for problem in dict.fromkeys(c.run.problem for c in curves):
        mine = _of(curves, problem, 1)
        none, sparse = _by_label(mine, "none"), _by_label(mine, BEST_TOP_K)
        rows = []
        for c in mine:
            first, last = (_at(c.run, t) for t in targets)
            base = _at(none.run, targets[0]) if none else None
            other = _at(sparse.run, targets[0]) if sparse else None
            final = _at(none.run, targets[1]) if none else None
            rows.append(
                (
                    c.label,
                    c.run.compressor,
                    c.run.guarantee,
                    _integer(first.iteration if first else None),
                    _integer(first.nbytes if first else None),
                    number(base.nbytes / first.nbytes if base and first else None, 3),
                    number(other.nbytes / first.nbytes if other and first else None, 3),
                    _integer(last.iteration if last else None),
                    _integer(last.nbytes if last else None),
                    number(final.nbytes / last.nbytes if final and last else None, 3),
                )
            )
        columns = (
            Column("curve", number=False), Column("compressor", number=False), Column("guarantee", number=False),
            Column(f"iterations to {targets[0]:g}"), Column("bytes"), Column("times fewer than none"),
            Column("than best top_k"), Column(f"iterations to {targets[1]:g}"), Column("bytes"),
            Column("times fewer than none"),
        )  # fmt: skip
        d = problems.EMBEDDED.get(problem) or problems.LIBSVM[problem][0]
        title = f"{problem} ({d}), one node, condition number {mine[0].run.condition:.1f}"
        tables.append(Table(columns, tuple(rows), title))
    return tables


def distributed_tables(curves: Sequence[Curve], targets: tuple[float, float]) -> list[Table]:
    """For each problem, what the distributed methods reach, and the plateaus with what theory says of them."""
    tables = []
    for problem in dict.fromkeys(c.run.problem for c in curves):
        rows = []
        for c in (c for c in curves if c.run.problem == problem and c.run.workers > 1):
            first, last = (_at(c.run, t) for t in targets)
            end = c.run.points[-1]
            rows.append(
                (
                    str(c.run.workers),
                    c.label,
                    f"{c.run.gamma * c.run.smoothness:.3f}",
                    _integer(first.nbytes if first else None),
                    _integer(last.nbytes if last else None),
                    _integer(end.iteration),
                    "reached" if last else f"{c.run.plateau:.1e}" + ("" if c.run.settled else ", falling"),
                    f"{c.run.predicted:.1e}" if c.run.predicted is not None else "",
                    f"{c.run.ceiling:.1e}" if c.run.ceiling else "",
                )
            )
        columns = (
            Column("workers"), Column("curve", number=False), Column("step x L"), Column(f"bytes to {targets[0]:g}"),
            Column(f"bytes to {targets[1]:g}"), Column("iterations run"), Column("stays at"), Column("predicted"),
            Column("proven ceiling"),
        )  # fmt: skip
        if rows:
            tables.append(Table(columns, tuple(rows), f"{problem}, workers hold rows sorted by label; bytes per worker"))
    return tables


def guaranteed(condition: float, target: float) -> float:
    """Iterations after which gradient descent with step 1/L is sure to be at ``target``."""
    return math.log(1 / target) / (-2 * math.log1p(-1 / condition))


def iteration_table(curves: Sequence[Curve], target: float) -> Table:
    """Iterations of the single-node methods: ratio to gradient descent, measured and guaranteed, against the theoretical factor."""
    rows = []
    for c in (c for c in curves if c.run.workers == 1):
        none = _by_label(_of(curves, c.run.problem, 1), "none")
        base, mine = (_at(none.run, target) if none else None), _at(c.run, target)
        sure = guaranteed(c.run.condition, target)
        ratio = mine.iteration / sure if mine else math.inf
        rows.append(
            (
                c.run.problem,
                c.label,
                c.run.guarantee,
                _integer(mine.iteration if mine else None),
                number(mine.iteration / base.iteration if mine and base else None, 4),
                number(ratio if mine else None, 4),
                f"{c.run.factor:.3f}",
                "yes" if ratio <= c.run.factor else "NO",
            )
        )
    columns = (
        Column("problem", number=False), Column("curve", number=False), Column("guarantee", number=False),
        Column("iterations"), Column("/ GD measured"), Column("/ GD guaranteed"), Column("theory"),
        Column("within theory", number=False),
    )  # fmt: skip
    note = (
        "theory: 1/(1-alpha), or 1+omega. It compares guarantees, so the column to hold against it is the ratio to the iterations\n"
        "that theory guarantees for uncompressed gradient descent (kappa/2 ln(1/target), nearly). Gradient descent itself may be\n"
        "faster: from x = 0 it never meets the flattest directions, which the errors of a compressor do."
    )
    return Table(columns, tuple(rows), f"Iterations to {target:g}, one node", note)


def claims(curves: Sequence[Curve], targets: tuple[float, float]) -> Table:
    """The statements that this experiment is for, each with what was found."""
    rows = []
    wanted = {"ridge": (4.5, 1.7), "logistic": (5.0, 4.0)}
    for problem in dict.fromkeys(c.run.problem for c in curves):
        mine = _of(curves, problem, 1)
        none, sparse = _by_label(mine, "none"), _by_label(mine, BEST_TOP_K)
        base, other = (_at(c.run, targets[0]) if c else None for c in (none, sparse))
        ours = [(p.nbytes, c.label) for c in mine if c.label.startswith(OURS) and (p := _at(c.run, targets[0]))]
        kind = problems.EMBEDDED.get(problem) or problems.LIBSVM[problem][0]
        if ours and base and other:
            least, label = min(ours)
            for what, found, goal in (("none", base, wanted[kind][0]), ("best top_k", other, wanted[kind][1])):
                ratio = found.nbytes / least
                rows.append(
                    (
                        problem,
                        f"{label} needs {goal:g} times fewer bytes than {what} to {targets[0]:g}",
                        f"{ratio:.2f}",
                        "yes" if ratio >= goal else "no",
                    )
                )
        slow = [c.label for c in mine if _at(c.run, targets[1]) is None]
        rows.append((problem, f"every single-node curve reaches {targets[1]:g}", f"{len(mine) - len(slow)} of {len(mine)}",
                     "no" if slow else "yes"))  # fmt: skip
        for n in sorted({c.run.workers for c in curves if c.run.problem == problem} - {1}):
            these = _of(curves, problem, n)
            good = [c for c in these if c.run.algorithm in ("diana", "ef21")]
            bad = [c for c in these if c.label.startswith(("DCGD", "EF, "))]
            done = sum(_at(c.run, targets[1]) is not None for c in good)
            stuck = sum(_at(c.run, targets[1]) is None and c.run.settled for c in bad)
            rows.append((problem, f"n = {n}: DIANA and EF21 reach {targets[1]:g}", f"{done} of {len(good)}",
                         "yes" if done == len(good) else "no"))  # fmt: skip
            rows.append((problem, f"n = {n}: distributed compressed GD and EF stall", f"{stuck} of {len(bad)}",
                         "yes" if stuck == len(bad) else "not yet: stopped while falling"))  # fmt: skip
    columns = (
        Column("problem", number=False),
        Column("statement", number=False),
        Column("found"),
        Column("holds", number=False),
    )
    return Table(columns, tuple(rows), "Statements")


def _integer(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"

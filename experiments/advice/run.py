"""Train every setting on every task: ``python -m experiments.advice.run --data FOLDER [--part choose|report|delay|rates|ladder]``.

FOLDER holds ``mnist``, ``tinyshakespeare`` and ``cifar10`` (``tasks.py``). ``--quick`` takes a few steps. JSON is written after every run
and what it holds is not computed again, so a command that was stopped goes on where it was. Tables are written at the end, and by
``--tables`` alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console

from experiments.advice import tables
from experiments.advice.loop import train
from experiments.advice.record import RESULTS, Work, done, read, write
from experiments.advice.settings import BASE, BY_LABEL, DELAYS, RUNGS, SETTINGS
from experiments.advice.tasks import CHOOSE, OPTIMIZERS, REPORT, SEEN, TASKS
from tersegrad import bench

SPAN = (0.5, 1.0, 2.0)  # of the learning rate, in the part "rates"
QUICK = 16  # steps of the quick form
TUNED = 100  # the seed of the part "rates", which no other part has


def plan(
    part: str, seeds: int, words: Sequence[str] = (), wanted: Sequence[str] = (), optimizer: str = "", quick: bool = False
) -> Iterator[Work]:
    """The runs of a part, seed by seed, so that what there is when it is stopped is whole for the first seeds."""
    usual = {"report": REPORT, "rates": tuple(TASKS), "ladder": SEEN}.get(part, CHOOSE[:1] if quick else CHOOSE)
    names = [name for name in usual if not wanted or name in wanted]
    settings = {"choose": SETTINGS, "delay": (BASE, *DELAYS), "rates": (BASE,), "ladder": (BASE, *RUNGS)}
    for seed in [TUNED] if part == "rates" else range(seeds):
        for name in names:
            for how in (o for o in OPTIMIZERS if optimizer in ("", o)):
                for setting in (
                    s for s in settings.get(part) or tables.REPORTED[how] if s == BASE or not words or s.label in words
                ):
                    for factor in SPAN if part == "rates" else (1.0,):
                        task = TASKS[name]
                        yield Work(name, how, setting, seed, task.rates[how] * factor, QUICK if quick else task.steps)


def main(
    data: Annotated[Path, typer.Option(help="the folder of the tasks' folders")] = Path(),
    part: Annotated[str, typer.Option(help="choose, report, delay, rates or ladder")] = "choose",
    seeds: Annotated[int, typer.Option(help="how many")] = 3,
    only: Annotated[str, typer.Option(help="labels of settings, separated by semicolons")] = "",
    task: Annotated[str, typer.Option(help="tasks, separated by commas; else all of the part")] = "",
    optimizer: Annotated[str, typer.Option(help="adam or momentum; else both")] = "",
    tables_only: Annotated[bool, typer.Option("--tables", help="train nothing, write the tables")] = False,
    quick: Annotated[bool, typer.Option(help="a few steps on one task, to see that it runs")] = False,
    out: Annotated[Path, typer.Option(help="folder for the results")] = RESULTS,
) -> None:
    """Make the runs of one part, and its tables."""
    torch.set_num_threads(1)
    console, path = Console(), out / f"{part}.json"
    words = [w.strip() for w in only.split(";") if w.strip()]
    for word in words:
        if word not in BY_LABEL:
            raise typer.BadParameter(f"there is no setting {word!r}; there are {'; '.join(BY_LABEL)}")
    found = read(path)
    have = done(found)
    work = (
        []
        if tables_only
        else [w for w in plan(part, seeds, words, [w for w in task.split(",") if w], optimizer, quick) if w not in have]
    )
    for number, w in enumerate(work):
        run = train(TASKS[w.task], w.optimizer, w.setting, w.seed, data, w.rate, w.steps)
        found.append(run)
        write(path, found)
        console.print(
            f"{number + 1}/{len(work)} {w.task}, {w.optimizer}, {w.setting.label}, seed {w.seed}, rate {w.rate:g}: loss {run.loss:.4f}, "
            f"{run.accuracy:.2f} %, {run.bits:.3f} bits per step, age {run.age:.2f}, {run.seconds:.0f} s",
            highlight=False, soft_wrap=True,
        )  # fmt: skip
    if found:
        (out / f"{part}.md").write_text(tables.page(part, found) + f"\n{bench.describe()}\n")
        console.print(f"written: {out / part}.json, .md", highlight=False, soft_wrap=True)


if __name__ == "__main__":
    typer.run(main)

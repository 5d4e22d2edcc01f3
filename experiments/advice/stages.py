"""Every row chosen again and held against others, by many processes: ``python -m experiments.advice.stages --data FOLDER --processes 12``.

The rule was written down before any of these runs. All settings of ``CANDIDATES``, and the rows that the advice had before, are tried:

1. *first*: on the six tasks of ``SEEN``, one seed.
2. *seeds*: the ``SHORT`` cheapest of each budget, half as many of those that may become its row, and the rows of the advice, with two
   more seeds.
3. *unseen*: these on the two tasks of ``UNSEEN``, which played no part in any choice, three seeds.
4. *more*: the same, three more seeds, if there is time.

The row of a budget is what costs least over the six tasks and three seeds (``tables.py`` says how cost is counted) among settings that
send at least ``SURE`` of the budget's times fewer bytes on each of them; a margin, because bytes depend on gradients. On the unseen
tasks it is held against everything that ran there and sends at least ``tables.ABOUT`` of the budget's times fewer bytes.

One process writes: JSON after every run, and what it holds is not computed again, so that a command which was stopped goes on where it
was. No run is started after ``--seconds``. Only torch and numpy are needed, and the small files of the tasks (``small.py``).
"""

from __future__ import annotations

import argparse
import dataclasses
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from pathlib import Path

import torch

from experiments.advice import tables
from experiments.advice.loop import Run, train
from experiments.advice.record import RESULTS, Work, done, read, write
from experiments.advice.settings import BASE, BEFORE, BY_LABEL, CANDIDATES, Setting
from experiments.advice.tasks import OPTIMIZERS, SEEN, TASKS, UNSEEN
from tersegrad import bench
from tersegrad.advice import Who

SHORT = 4  # settings of a budget that come to the second stage
SURE = 0.8
SEEDS, MORE = (0, 1, 2), (3, 4, 5)


@dataclasses.dataclass(frozen=True)
class Plan:
    """What is run, and for how many steps if not as many as the task says."""

    candidates: Mapping[Who, tuple[Setting, ...]]
    seen: tuple[str, ...] = SEEN
    unseen: tuple[str, ...] = UNSEEN
    steps: int | None = None

    def work(self, who: Who, settings: Sequence[Setting], tasks: Sequence[str], seeds: Sequence[int]) -> Iterator[Work]:
        """Runs of one optimiser."""
        for seed in seeds:
            for name in tasks:
                for setting in dict.fromkeys((BASE, *settings)):
                    yield Work(name, who, setting, seed, TASKS[name].rates[who], self.steps or TASKS[name].steps)


FULL = Plan({who: (*CANDIDATES[who], *BEFORE[who]) for who in OPTIMIZERS})
QUICK = Plan(dict.fromkeys(OPTIMIZERS, (BY_LABEL["trellis 1"], BY_LABEL["H 8, trellis 1"])), ("digits",), ("headers",), 4)


def whole(runs: Sequence[Run], plan: Plan, seeds: Sequence[int], who: Who) -> list[Run]:
    """The runs of settings that ran on every seen task with each of these seeds, and no other runs."""
    own = [r for r in runs if r.optimizer == who and r.task in plan.seen and r.seed in seeds]
    have = {(r.setting, r.task, r.seed) for r in own}
    return [r for r in own if all((r.setting, task, seed) in have for task in plan.seen for seed in seeds)]


def best(runs: Sequence[Run], plan: Plan, seeds: Sequence[int], who: Who) -> tuple[Setting, ...]:
    """The cheapest of each budget, of those that may become its row too, and the rows of the advice before, if they are candidates."""
    own = whole(runs, plan, seeds, who)
    lists = ((SHORT, tables.ABOUT), (SHORT // 2, SURE))
    short = [
        s for budget in tables.BUDGETS for count, about in lists for _, s in tables.ranked(own, who, budget, about)[:count]
    ]
    return tuple(dict.fromkeys((*short, *(s for s in BEFORE[who] if s in plan.candidates[who]))))


def chosen(runs: Sequence[Run], plan: Plan = FULL) -> Callable[[Who, int], Setting | None]:
    """What the rule takes, by optimiser and budget; None where nothing fits or has run."""
    own = {who: whole(runs, plan, SEEDS, who) for who in OPTIMIZERS}

    def rule(who: Who, budget: int) -> Setting | None:
        found = tables.ranked(own[who], who, budget, SURE)
        return found[0][1] if found else None

    return rule


def first(runs: Sequence[Run], plan: Plan) -> list[Work]:
    """Every candidate, one seed."""
    return [w for who in OPTIMIZERS for w in plan.work(who, plan.candidates[who], plan.seen, SEEDS[:1])]


def seeds(runs: Sequence[Run], plan: Plan) -> list[Work]:
    """The best of each budget, two more."""
    return [w for who in OPTIMIZERS for w in plan.work(who, best(runs, plan, SEEDS[:1], who), plan.seen, SEEDS[1:])]


def unseen(runs: Sequence[Run], plan: Plan) -> list[Work]:
    """The best of each budget on tasks that played no part."""
    return [w for who in OPTIMIZERS for w in plan.work(who, best(runs, plan, SEEDS, who), plan.unseen, SEEDS)]


def more(runs: Sequence[Run], plan: Plan) -> list[Work]:
    """The same with further seeds."""
    return [w for who in OPTIMIZERS for w in plan.work(who, best(runs, plan, SEEDS, who), plan.unseen, MORE)]


STAGES = (first, seeds, unseen, more)
# The longest runs first, so that none is left at the end of a stage.
LONGEST = ("tiny", "help", "cifar10", "source", "shakespeare", "mnist", "headers", "digits")


def one(work: Work, folder: Path) -> Run:
    """One run, in a process of its own."""
    return train(TASKS[work.task], work.optimizer, work.setting, work.seed, folder, work.rate, work.steps)


def make(plan: Plan, folder: Path, path: Path, processes: int, seconds: float) -> bool:
    """The stages, one after the other; whether all runs are there."""
    begin, found, failed = time.monotonic(), read(path), set[Work]()
    # The processes that are started take this over: one thread each.
    os.environ["OMP_NUM_THREADS"] = "1"
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, context, torch.set_num_threads, (1,)) as pool:
        for stage in STAGES:
            have = done(found) | failed
            waiting = [w for w in dict.fromkeys(stage(found, plan)) if w not in have]
            waiting.sort(key=lambda w: (w.seed in MORE and w.seed, LONGEST.index(w.task), w.setting.local is not None))
            running: dict[Future[Run], Work] = {}
            count, of = 0, len(waiting)
            while running or waiting:
                if time.monotonic() - begin > seconds:
                    if not running:
                        print(f"{stage.__name__}: stopped after {count} of {of} runs", flush=True)
                        return False
                else:
                    while waiting and len(running) < processes:
                        work = waiting.pop(0)
                        running[pool.submit(one, work, folder)] = work
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    work, count = running.pop(future), count + 1
                    words = f"{stage.__name__} {count}/{of}, {time.monotonic() - begin:.0f} s: {work.task}, {work.optimizer}, "
                    words += f"{work.setting.label}, seed {work.seed}"
                    if (error := future.exception()) is not None:
                        failed.add(work)
                        print(f"{words}: {type(error).__name__}: {error}", flush=True)
                        continue
                    run = future.result()
                    found.append(run)
                    write(path, found)
                    words += f": loss {run.loss:.4f}, {run.accuracy:.2f} %, {run.bits:.4g} bits per step, {run.seconds:.1f} s"
                    print(words, flush=True)
            print(f"{stage.__name__}: {of} runs, {time.monotonic() - begin:.0f} s", flush=True)
    return not failed


def main() -> None:
    """Make the runs, and their tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path(), help="the folder of the tasks' folders or small files")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1, help="runs at a time")
    parser.add_argument("--seconds", type=float, default=1e9, help="no run is started after so long")
    parser.add_argument("--quick", action="store_true", help="a few steps on two tasks, to see that it runs")
    parser.add_argument("--tables", action="store_true", help="train nothing, write the tables")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the results")
    args = parser.parse_args()
    path, plan = args.out / "stages.json", QUICK if args.quick else FULL
    complete = args.tables or make(plan, args.data, path, args.processes, args.seconds)
    found = read(path)
    settled = [r for who in OPTIMIZERS for r in whole(found, plan, SEEDS, who)]
    words = tables.page("stages", found, chosen(found, plan), settled)
    path.with_suffix(".md").write_text(words + f"\n{bench.describe()}\n")
    print(f"written: {path}, .md; {'complete' if complete else 'not complete: the same command goes on'}", flush=True)


if __name__ == "__main__":
    main()

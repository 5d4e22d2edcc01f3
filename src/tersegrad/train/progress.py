"""How a run goes, shown while it does: one bar per job on a terminal, one line per finished epoch or job elsewhere."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars

from tersegrad.train.jobs import Job, Progress


@contextlib.contextmanager
def progress(jobs: list[Job], shown: bool) -> Iterator[list[Callable[[Progress], None] | None]]:
    """A watcher per job, for the leading worker; None where nothing is shown."""
    if not shown:
        yield [None] * len(jobs)
        return
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        TextColumn("{task.fields[facts]}"),
        TimeElapsedColumn(),
    )
    width = max(len(job.label) for job in jobs)
    wide = console.width if "COLUMNS" in os.environ else 150
    with Bars(*columns, console=console, disable=not console.is_terminal) as bars:

        def watcher(job: Job) -> Callable[[Progress], None]:
            task = bars.add_task(escape(f"{job.label:<{width}}"), total=None, start=False, facts="")
            held_out = ""

            def watch(now: Progress) -> None:
                nonlocal held_out
                if not bars.tasks[task].started:
                    bars.start_task(task)
                if now.accuracy is not None:
                    held_out = f"  held out {now.test_loss:.3f}, {100 * now.accuracy:5.1f} % right"
                facts = f"loss {now.loss:.3f}{held_out}  sent {now.sent / 1e6:6.1f} MB"
                bars.update(task, total=now.steps, completed=now.step, facts=facts)
                if not console.is_terminal and (now.step == now.steps or (now.accuracy is not None and len(jobs) == 1)):
                    line = f"step {now.step} of {now.steps}, {' '.join(facts.split())}"
                    gap = " " if len(job.label) + 2 + len(line) <= wide else "\n  "
                    print(f"{job.label}:{gap}{line}", file=console.file, flush=True)

            return watch

        yield [watcher(job) for job in jobs]

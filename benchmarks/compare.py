"""Compare two checkouts: ``python -m benchmarks.compare BEFORE AFTER [--only PATTERN] [--numel N] [--rounds R]``.

Each checkout runs in two processes of its own, with the Python of its ``.venv``, its own package and its own benchmarks. They time
the same line in turn, in short bursts, and what is printed is the median over bursts of before's time over after's: 1.1 says
that the second is 1.1 times as fast. Times are CPU times of one thread, so that other programs on the machine disturb less.

Long vectors take up to a sixth more time in a process whose memory was taken later, whatever it runs. So the four prepare a line in the
order after, before, before, after, and a burst's ratio is that of the geometric means.
"""

from __future__ import annotations

import argparse
import fnmatch
import gc
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

Body = Callable[[], object]
SLOWER = 0.95


class Checkout:
    """A worker process of one checkout, asked line by line."""

    def __init__(self, folder: Path) -> None:
        python = folder / ".venv" / "bin" / "python"
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{folder / 'src'}{os.pathsep}{folder}"}
        command = [str(python if python.exists() else sys.executable), str(Path(__file__).resolve()), "--worker"]
        self.process = subprocess.Popen(
            command, cwd=folder, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def ask(self, *question: Any) -> Any:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(question) + "\n")
        self.process.stdin.flush()
        answer = json.loads(self.process.stdout.readline())
        if isinstance(answer, dict) and "error" in answer:
            raise RuntimeError(answer["error"])
        return answer

    def close(self) -> None:
        if self.process.stdin is not None:
            self.process.stdin.close()
        self.process.wait()


Checkouts = tuple[Checkout, Checkout]


def index_sets() -> dict[str, Callable[[], dict[str, Body]]]:
    """Index sets, whose registered benchmarks measure sizes and not speed."""
    import torch

    from tersegrad.codecs import index

    def setup(density: float, numel: int = 1 << 21) -> dict[str, Body]:
        k = round(density * numel)
        indices = torch.randperm(numel, generator=torch.Generator().manual_seed(k))[:k].sort().values.int()
        message = index.encode(indices, numel).clone()
        return {"encode": lambda: index.encode(indices, numel), "decode": lambda: index.decode(message, k, numel)}

    return {f"index set speed/{d:g}": lambda d=d: setup(d) for d in (1e-4, 1e-3, 0.01, 0.03, 0.1, 0.3)}  # type: ignore[misc]


def worker(questions: IO[str], answers: IO[str]) -> None:
    """Answer names, setup and time until the questions end."""
    from benchmarks.registry import load
    from tersegrad.bench import thread_count
    from tersegrad.kernels import native

    # The two take turns on one core, so that neither has the better neighbours.
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    single = thread_count(1)
    single.__enter__()
    cases, extra = load(), index_sets()
    bodies: dict[str, Body] = {}

    def setup(name: str, numel: int | None) -> list[str]:
        bodies.clear()
        gc.collect()
        if name in extra:
            bodies.update(extra[name]())
        else:
            case = cases[name]
            bodies.update(case.setup(case.numel if numel is None else min(numel, case.numel)).bodies)
        return list(bodies)

    def burst(body: str, repeats: int) -> float:
        call = bodies[body]
        call()
        start = time.process_time()
        for _ in range(repeats):
            call()
        return (time.process_time() - start) / repeats

    for line in questions:
        verb, *arguments = json.loads(line)
        answer: object
        try:
            if verb == "names":
                fitting = [n for n, c in cases.items() if c.threads == 1 and c.isa in (None, native.isa())]
                answer = fitting + list(extra)
            else:
                answer = setup(*arguments) if verb == "setup" else burst(*arguments)
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def compare(befores: Checkouts, afters: Checkouts, body: str, rounds: int, shortest: float) -> tuple[float, float, float]:
    """The median ratio, its lower quartile, and the median seconds of one call of ``after``."""
    repeats = max(1, math.ceil(shortest / max(afters[0].ask("time", body, 1), 1e-7)))
    repeats = max(1, math.ceil(shortest / max(afters[0].ask("time", body, repeats), 1e-7)))
    ratios, seconds = [], []
    for k in range(rounds):
        four = (befores[0], afters[0], befores[1], afters[1])
        times = {one: one.ask("time", body, repeats) for one in (four if k % 2 == 0 else reversed(four))}
        before, after = (math.sqrt(times[one] * times[other]) for one, other in (befores, afters))
        ratios.append(before / max(after, 1e-9))
        seconds.append(after)
    return statistics.median(ratios), statistics.quantiles(ratios, n=4)[0], statistics.median(seconds)


def main() -> None:
    """Compare line by line and say which are slower."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.add_argument("--only", action="append", help="names to run: a part of the name or a glob; repeatable")
    parser.add_argument("--numel", type=int, help="at most this many coordinates")
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--shortest", type=float, default=5e-3, help="seconds of a burst")
    chosen = parser.parse_args()
    befores, afters = ((Checkout(folder.resolve()), Checkout(folder.resolve())) for folder in (chosen.before, chosen.after))
    both = set(befores[0].ask("names"))
    slow = lines = 0
    for name in afters[0].ask("names"):
        if chosen.only and not any(p in name or fnmatch.fnmatch(name, p) for p in chosen.only):
            continue
        if name not in both:
            print(f"{name}: only after", flush=True)
            continue
        try:
            for one in (afters[0], *befores):
                known = one.ask("setup", name, chosen.numel)
            bodies = [b for b in afters[1].ask("setup", name, chosen.numel) if b in known]
        except RuntimeError as error:
            print(f"{name}: not compared, {error}", flush=True)
            continue
        for body in bodies:
            ratio, quartile, seconds = compare(befores, afters, body, chosen.rounds, chosen.shortest)
            slow, lines = slow + (ratio < SLOWER), lines + 1
            mark = "  SLOWER" if ratio < SLOWER else ""
            print(f"{ratio:6.3f} (quartile {quartile:.3f}) {1e6 * seconds:10.1f} us  {name} {body}{mark}", flush=True)
    print(f"{slow} of {lines} lines below {SLOWER}")
    for one in (*befores, *afters):
        one.close()


if __name__ == "__main__":
    if sys.argv[1:] == ["--worker"]:
        # Results leave on a copy of the standard output; whatever else is printed goes to the error stream.
        answers = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)
        worker(sys.stdin, answers)
    else:
        main()

"""Run the experiment: one method, a plan of many, a smoke test or a profile.

    python -m experiments.variance_based.run --data digits                          # a small form on a CPU, about 20 s
    python -m experiments.variance_based.run --data FOLDER --method vgc_1.5         # one run on CIFAR-10
    python -m experiments.variance_based.run --data FOLDER --plan gpu --minutes 25  # the whole table, in order of importance
    python -m experiments.variance_based.run --data tiny.npz --plan resnet          # ResNet-50, 16 workers, 30 epochs (data.py)
    python -m experiments.variance_based.run --data FOLDER --smoke                  # every method for some steps, and its times
    python -m experiments.variance_based.run --data FOLDER --profile                # time per phase and the slowest kernels

A plan writes one JSON per run as soon as it is finished, skips those it finds, and ends with the table. Only the standard library and
torch are needed.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import queue
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from experiments.variance_based import data, fused, methods, wire
from experiments.variance_based.methods import ADAM_LR, METHODS, PLANS, Job
from experiments.variance_based.train import Config, Trainer, prepare, train

RESULTS = Path(__file__).parent / "results"


def say(text: str) -> None:
    """A line of progress, at once."""
    print(text, flush=True)


def write(path: Path, result: dict[str, Any]) -> None:
    """A result file, complete or not there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text(json.dumps(result) + "\n")
    part.replace(path)


def rate_of(job: Job, out: Path) -> float:
    """The learning rate of a job; momentum takes that of the best uncompressed momentum run in ``out``."""
    if job.lr:
        return job.lr
    if job.optimiser == "adam":
        return ADAM_LR
    best: tuple[bool, float, float] | None = None
    for path in out.glob("momentum_none_lr*.json"):
        found = json.loads(path.read_text())
        lr, seed = found["config"]["lr"], found["config"]["seed"]
        alike = path.stem == dataclasses.replace(job, method="none", lr=lr, seed=seed).name
        if not found["diverged"]:  # one of another length only if none is alike
            best = max(best or (False, 0.0, 0.0), (alike, found["accuracy"], lr))
    return best[2] if best else methods.SWEEP[0]


def settled(job: Job, options: argparse.Namespace) -> Job:
    """A job with the command line's initialisation and number of epochs."""
    return dataclasses.replace(job, init=options.init, epochs=0 if options.epochs in (None, options.usual) else options.epochs)


@dataclasses.dataclass
class Open:
    """A finished run whose messages may still be encoded in the background."""

    path: Path
    result: dict[str, Any]
    sampler: wire.Sampler

    def settle(self, seconds: float = 0.0) -> bool:
        """Write the file with what is encoded; wait so long for the rest. Returns whether it is complete."""
        end = time.perf_counter() + seconds
        while not self.sampler.complete and time.perf_counter() < end:
            time.sleep(0.1)
        done = self.sampler.complete
        self.result["encoded"] = self.sampler.result()
        write(self.path, self.result)
        return done


def perform(job: Job, options: argparse.Namespace, images: data.Images) -> Open:
    """Run one job and write its file."""
    changes: dict[str, Any] = {
        "graph": not options.no_graph,
        "encode_every": options.encode_every,
        "dense_warmup": options.dense_warmup,
        "engine": options.engine,
    }
    if options.halve_every is not None and job.optimiser == "momentum":
        changes["halve_every"] = options.halve_every
    if options.batch:
        changes["batch"] = options.batch
    if images.x.shape[1] == 64:
        changes |= {**methods.RESNET, "batch": options.batch or methods.RESNET["batch"]}
    config = job.config(job.epochs or options.usual, rate_of(job, options.out), **changes)
    say(f"[{job.name}] starts, lr {config.lr:g}")
    result, sampler = train(config, images, options.device, lambda text: say(f"[{job.name}] {text}"))
    result["name"], result["row"] = job.name, job.method
    found = Open(options.out / f"{job.name}.json", result, sampler)
    found.settle()
    encoded = result["encoded"]
    sizes = [f"{form} {encoded[form]['ratio']:g}x" for form in ("paper", "compact") if form in encoded]
    notes = [f"{result['seconds']['epoch']:.2f} s per epoch", f"{result['seconds']['run']:.0f} s in all"]
    notes += [] if result["graph"] else ["no graph"]
    notes += [f"REFUSED {encoded['refused']}"] if "refused" in encoded else []
    words = f"words {result['ratio_words'] or 0:.1f}x"
    say(f"[{job.name}] done: accuracy {result['accuracy']:.2f}, " + ", ".join([words, *sizes, *notes]))
    return found


def serve(options: argparse.Namespace) -> None:
    """A worker of a plan: jobs come as JSON lines, answers go as lines that start with a mark."""
    images = data.load(options.data).to(options.device)
    still: list[Open] = []
    for line in sys.stdin:
        job = Job(**json.loads(line))
        try:
            still.append(perform(job, options, images))
            still = [found for found in still if not found.settle()]
            say(f"@done {job.name}")
        except Exception as error:
            traceback.print_exc()
            say(f"@failed {job.name} {type(error).__name__}: {str(error)[:200]}")
            if "CUDA" in str(error):  # the context may be lost: a fresh process takes over
                break
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    end = time.perf_counter() + 90
    for found in still:
        found.settle(max(0.0, end - time.perf_counter()))
    wire.close()


class Worker:
    """A process that runs jobs one after another."""

    def __init__(self, arguments: list[str], events: queue.Queue[tuple[Worker, str]]) -> None:
        command = [sys.executable, "-m", "experiments.variance_based.run", *arguments, "--serve"]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)
        self.job: Job | None = None
        self.events = events
        self.started = 0.0
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("@"):
                self.events.put((self, line.strip()))
            else:
                say(line.rstrip())
        self.events.put((self, "@ended"))

    def give(self, job: Job) -> None:
        assert self.process.stdin is not None
        self.job, self.started = job, time.perf_counter()
        self.process.stdin.write(json.dumps(dataclasses.asdict(job)) + "\n")
        self.process.stdin.flush()


def plan(options: argparse.Namespace, arguments: list[str]) -> None:
    """Run the jobs of a plan in order, several at a time, until they are done or the time is over."""
    begun = time.perf_counter()
    limit = options.minutes * 60
    chosen = options.only.split(",")
    jobs = [
        settled(job, options)
        for job in PLANS[options.plan]
        if not options.only or {job.method, f"{job.optimiser}_{job.method}"} & set(chosen)
    ]
    waiting = [job for job in jobs if not (options.out / f"{job.name}.json").is_file()]
    say(
        f"plan {options.plan}: {len(jobs)} runs, {len(jobs) - len(waiting)} of them finished before, {options.minutes:g} minutes"
    )
    events: queue.Queue[tuple[Worker, str]] = queue.Queue()
    count = max(1, min(options.processes, len(waiting)))
    idle = [Worker(arguments, events) for _ in range(count)] if waiting else []
    busy: list[Worker] = []
    times: dict[str, list[float]] = {}
    failed: dict[str, int] = {}

    def expected(job: Job) -> float:
        mine = times.get(METHODS[job.method].mode) or [t for found in times.values() for t in found]
        return max(mine) if mine else 0.0

    def next_job(left: float) -> Job | None:
        """The first that fits the time left; momentum waits for its learning rate."""
        sweeping = any(w.job and w.job.optimiser == "momentum" and w.job.lr for w in busy) or any(
            j.optimiser == "momentum" and j.lr for j in waiting
        )
        for job in waiting:
            if job.optimiser == "momentum" and not job.lr and sweeping:
                continue
            if expected(job) * 1.05 < left:
                waiting.remove(job)
                return job
        return None

    while idle or busy:
        left = limit - (time.perf_counter() - begun)
        for worker in list(idle):
            job = next_job(left)
            if job is not None:
                idle.remove(worker)
                busy.append(worker)
                worker.give(job)
            elif not busy:
                break
        if not busy:
            break
        try:
            worker, event = events.get(timeout=max(1.0, min(30.0, left)))
        except queue.Empty:
            if left < 0:
                say(f"time is over: {', '.join(w.job.name for w in busy if w.job)} not finished")
                break
            continue
        job = worker.job
        if event.startswith("@done") and job:
            times.setdefault(METHODS[job.method].mode, []).append(time.perf_counter() - worker.started)
        elif event.startswith("@failed") and job:
            say(event)
            failed[job.name] = failed.get(job.name, 0) + 1
        elif event == "@ended":
            if worker in idle:
                idle.remove(worker)
            elif worker in busy:
                busy.remove(worker)
                if job and not (options.out / f"{job.name}.json").is_file():
                    failed[job.name] = failed.get(job.name, 0) + 1
                    if failed[job.name] < 2:
                        waiting.insert(0, job)
            if waiting and sum(failed.values()) < 6:
                idle.append(Worker(arguments, events))
            continue
        else:
            continue
        if worker in busy:
            busy.remove(worker)
            worker.job = None
            if worker.process.poll() is None:
                idle.append(worker)
    for worker in [*idle, *busy]:
        if worker.process.stdin is not None:
            worker.process.stdin.close()
    for worker in busy:
        worker.process.terminate()
    for worker in idle:
        try:
            worker.process.wait(timeout=100)  # the last messages are being encoded
        except subprocess.TimeoutExpired:
            worker.process.terminate()
    say(f"{(time.perf_counter() - begun) / 60:.1f} minutes; failed: {', '.join(failed) or 'none'}; left: {len(waiting)}")
    table(options.out)


def table(out: Path) -> None:
    """Print the rows that are there."""
    from experiments.variance_based import report

    say(report.table(report.read(out)))


def timed(call: Callable[[], Any], count: int, device: str) -> float:
    """Milliseconds a call."""
    if device.startswith("cuda"):
        torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(count):
        call()
    if device.startswith("cuda"):
        torch.cuda.synchronize()
    return (time.perf_counter() - start) * 1000 / count


def shortly(name: str, options: argparse.Namespace) -> Config:
    """What smoke tests and profiles run."""
    changes = methods.RESNET if options.data.endswith(".npz") else {"batch": 64, "engine": options.engine}
    changes = {**changes, **({"batch": options.batch} if options.batch else {})}
    return Config(methods.method_for(name, changes.get("workers", 8)), graph=not options.no_graph, **changes)


def try_out(name: str, options: argparse.Namespace, images: data.Images) -> str:
    """Some steps of one method, as a line: time, loss, ratio."""
    steps = 60 if options.device.startswith("cuda") else 2
    begun = time.perf_counter()
    with torch.no_grad():
        trainer = Trainer(shortly(name, options), images, options.device)
        trainer.shuffle(0)
        step = trainer.captured(trainer.step)
        ready = time.perf_counter() - begun
        duration = timed(step, steps, options.device)
        loss = float(trainer.total_loss) / steps
        words = int(trainer.total_words) / (steps * trainer.config.workers)
    ratio = trainer.buffers.layout.numel / words if words else 0.0
    memory = f", {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB" if options.device.startswith("cuda") else ""
    mark = "" if loss < 10 else "  <-- LOOK"
    return (
        f"{name:14s} {duration:7.2f} ms per step, graph {trainer.graphed!s:5s} loss {loss:.3f}, ratio {ratio:.1f}, "
        f"ready after {ready:.1f} s{memory}{mark}"
    )


def smoke(options: argparse.Namespace, images: data.Images) -> None:
    """Every method for some steps, with step times; then one epoch without compression and one with VGC."""
    prepare()
    cuda = options.device.startswith("cuda")
    for name in options.only.split(",") if options.only else METHODS:
        try:
            say(try_out(name, options, images))
        except Exception as error:
            traceback.print_exc()
            say(f"{name:14s} FAILED: {type(error).__name__}: {str(error)[:300]}")
        if cuda:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
    for name in ("none", "vgc_1.5"):
        config = dataclasses.replace(shortly(name, options), epochs=2 if cuda else 1, encode_every=98)
        result, sampler = train(config, images, options.device)
        end = time.perf_counter() + 60
        while not sampler.complete and time.perf_counter() < end:
            time.sleep(0.1)
        encoded = {k: v for k, v in sampler.result().items() if k != "forms"}
        say(f"[{name}] {result['seconds']}, words {result['ratio_words']:.1f}, encoded {encoded}")
    say(f"not compiled: {fused.failures or 'nothing'}")


def phases(name: str, options: argparse.Namespace, images: data.Images, kernels: bool) -> dict[str, float]:
    """Milliseconds of every phase of one method's step; ``kernels`` prints the slowest ones."""
    cuda = options.device.startswith("cuda")
    row: dict[str, float] = {}
    with torch.no_grad():
        trainer = Trainer(shortly(name, options), images, options.device)
        trainer.shuffle(0)
        before = 0.0
        for phase in Trainer.PHASES:
            step = trainer.captured(functools.partial(trainer.step, until=phase))
            duration = timed(step, 50 if cuda else 2, options.device)
            row[phase], before = duration - before, duration
        row["step"] = before
        if kernels and cuda:
            from torch.profiler import ProfilerActivity
            from torch.profiler import profile as record

            with record(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as recorded:
                for _ in range(3):
                    trainer.step()
                torch.cuda.synchronize()
            say(recorded.key_averages().table(sort_by="self_device_time_total", row_limit=30, max_name_column_width=70))
    return row


def profile(options: argparse.Namespace, images: data.Images) -> None:
    """Time per phase of a step (graphs that end after it, differences), the slowest kernels, the overhead of the moments."""
    prepare()
    names = options.only.split(",") if options.only else ["none", "strom_0.1", "vgc_1.5"]
    found: dict[str, dict[str, float]] = {}
    for name in names:
        found[name] = phases(name, options, images, kernels=name == names[-1])
        say(f"{name:12s} " + ", ".join(f"{k} {v:.2f} ms" for k, v in found[name].items()))
    if "none" in found:
        plain = found["none"]["forward"] + found["none"]["backward"]
        for name, row in found.items():
            say(f"{name}: forward and backward take {(row['forward'] + row['backward']) / plain:.2f} times those of none")
    write(options.out / f"profile_{options.engine}.json", {"milliseconds": found, "engine": options.engine})


def parser() -> argparse.ArgumentParser:
    """The command line."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument(
        "--data", default="digits", help="folder with CIFAR-10 (binary or python version), an .npz file, digits, or made"
    )
    p.add_argument("--download", action="store_true", help="fetch CIFAR-10 into the folder first, with checksum")
    p.add_argument("--out", type=Path, default=None, help="folder for the JSON files")
    p.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    p.add_argument("--method", choices=sorted(METHODS), help="run this one")
    p.add_argument("--optimiser", choices=("adam", "momentum"), default="adam")
    p.add_argument(
        "--lr",
        type=float,
        default=0.0,
        help="learning rate; Adam's is 0.001, momentum's that of the best run without compression",
    )
    p.add_argument(
        "--halve-every",
        type=float,
        default=None,
        help="epochs between halvings of momentum's rate; a twelfth of the run, 10 on digits",
    )
    p.add_argument("--epochs", type=int, default=None, help="50; 40 on digits; another number becomes part of the run's name")
    p.add_argument(
        "--init", choices=("lecun", "torch"), default="lecun", help="LeCun normal, or uniform as torch does (part of the name)"
    )
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--batch", type=int, default=None, help="of one worker: 64; 16 on digits")
    p.add_argument("--dense-warmup", type=int, default=0, help="epochs without compression at the start")
    p.add_argument(
        "--encode-every", type=int, default=None, help="steps between those that are encoded to real bytes: 200; 40 on digits"
    )
    p.add_argument("--plan", choices=sorted(PLANS))
    p.add_argument(
        "--only", default="", help="of a plan or profile: these methods, separated by commas; of a plan also momentum_vgc_2"
    )
    p.add_argument("--minutes", type=float, default=25.0, help="a plan ends before this")
    p.add_argument("--processes", type=int, default=1, help="runs of a plan at a time")
    p.add_argument("--smoke", action="store_true")
    p.add_argument("--profile", action="store_true")
    p.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    p.add_argument(
        "--engine", choices=("one_pass", "collector"), default="one_pass", help="who computes gradients and squares: engine.py"
    )
    p.add_argument("--no-compile", action="store_true", help="plain torch")
    p.add_argument("--no-graph", action="store_true", help="no CUDA graphs")
    return p


def main(arguments: list[str] | None = None) -> None:
    """Parse and run."""
    given = sys.argv[1:] if arguments is None else arguments
    options = parser().parse_args(given)
    small = options.data == "digits"
    if options.out is None:
        options.out = Path("out") / "variance_based" if small or options.data.startswith("made") else RESULTS
        options.out /= Path(options.data).stem if options.data.endswith(".npz") else ""
    options.usual = 40 if small else 30 if options.data.endswith(".npz") else 50
    options.halve_every = options.halve_every or (10.0 if small else None)
    options.batch = options.batch or (16 if small else None)
    options.encode_every = options.encode_every if options.encode_every is not None else (40 if small else 200)
    fused.enabled = not options.no_compile
    if options.download:
        data.download(Path(options.data))
    if options.serve:
        serve(options)
        return
    if options.plan:
        plan(options, [a for a in given if a != "--download"])
        return
    images = data.load(options.data).to(options.device)
    try:
        if options.smoke:
            smoke(options, images)
        elif options.profile:
            profile(options, images)
        elif options.method:
            job = Job(options.method, options.optimiser, options.seed, options.lr)
            perform(settled(job, options), options, images).settle(600)
        else:
            for found in [perform(settled(job, options), options, images) for job in PLANS["quick"]]:
                found.settle(600)
            table(options.out)
    finally:
        wire.close()


if __name__ == "__main__":
    main()

"""Where the time of a step goes on one GPU: ``python -m benchmarks.gpu_trace exchange|training|moments|round|message [TEXT] [--tiny]``.

``exchange``: an exchange of the gradients of gpu_steps' transformer by itself; TEXT is ``compressor + exchange``. ``training``: whole steps
of that transformer, and one by one what the device did before the optimiser began: what could not be hidden. With ``float32`` as TEXT it
tells what the backward pass takes when nothing runs beside it.
``moments``: a step with second moments, launched kernel by kernel. ``round``: one message of a sixteenth of a ResNet-50's gradients, there
and back; TEXT is a compressor. ``message``: the same of 64 Mi normal numbers without a shape, or so many as ``--numel`` says.

Tables: what the device ran and for how long; when it had nothing to run, between which kernels; what the driver was asked for; and where
the host was, by samples of all threads (a thread is seen where it lets others run, so short Python code is seen less than it takes).
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import tersegrad
from benchmarks.cases.moments import steps as moment_steps
from benchmarks.gpu_steps import Copies, Training, device_of, first_gradients, group_of_one, tasks
from benchmarks.methods import Method
from benchmarks.resnet import ResNet, resnet50
from tersegrad import Context, Message, Spec
from tersegrad.core.state import slice_spec
from tersegrad.report.tables import Column, Table

STEPS, SHOWN = 20, 14
END = 6000.0  # microseconds before the optimiser begins
OWN = str(Path(tersegrad.__file__).parent)
PAUSE = 2e-4  # seconds between samples
GAP = 5.0  # microseconds without a kernel that count
DEVICE = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
RUNTIME = frozenset({"cuda_runtime", "cuda_driver"})


def place(frame: FrameType) -> str:
    """The innermost line of this project on a stack, and what it called."""
    found: FrameType | None = frame
    while found is not None and OWN not in found.f_code.co_filename:
        found = found.f_back
    leaf = frame.f_code
    if found is None:
        return f"{Path(leaf.co_filename).stem}.{leaf.co_name}"
    code = found.f_code
    called = "" if found is frame else f" -> {leaf.co_name}"
    return f"{Path(code.co_filename).stem}.{code.co_name}:{found.f_lineno}{called}"


@contextlib.contextmanager
def sampled(found: dict[str, Counter[str]]) -> Iterator[None]:
    """Look again and again where every thread is, but the one that looks."""
    over = threading.Event()
    before = sys.getswitchinterval()

    def look() -> None:
        names = {t.ident: t.name for t in threading.enumerate()}
        while not over.wait(PAUSE):
            for thread, frame in sys._current_frames().items():
                if thread != threading.get_ident():
                    found[names.get(thread, "autograd")][place(frame)] += 1

    watcher = threading.Thread(target=look)
    sys.setswitchinterval(1e-5)
    watcher.start()
    try:
        yield
    finally:
        over.set()
        watcher.join()
        sys.setswitchinterval(before)


def exchange(text: str, tiny: bool, device: torch.device) -> Callable[[], object]:
    """A step that exchanges the transformer's first gradients and computes nothing."""
    gradients = first_gradients(tasks(tiny, 2 if tiny else 12)["transformer"], device)
    model = DistributedDataParallel(Copies(gradients).to(device), gradient_as_bucket_view=True)
    Method.parse(text).attach(model, 0)

    def step() -> None:
        model.zero_grad()
        model().backward()

    return step


def training(text: str, tiny: bool, device: torch.device) -> Callable[[], object]:
    """A whole step of the transformer."""
    return Training(tasks(tiny, 2 if tiny else 12)["transformer"], text, device).step


def sixteenth(tiny: bool) -> Spec:
    """A sixteenth of a ResNet."""
    network: nn.Module = ResNet((1, 1, 1, 1), 8, 10) if tiny else resnet50()
    whole = Spec.of(*[p.detach() for p in network.parameters()])
    return slice_spec(whole, 0, whole.numel // 16)


def coding(text: str, spec: Spec, device: torch.device) -> Callable[[], object]:
    """One message, there and back."""
    x = torch.randn(spec.numel, device=device)
    compressor = tersegrad.parse(text)
    state, at = compressor.init(spec, x.device), Counter[str]()

    def step() -> None:
        at["step"] += 1
        ctx = Context(seed=1, step=at["step"])
        message, _ = compressor.encode(x, spec, state, ctx)
        compressor.decode(Message(message.data[: int(message.nbytes)], int(message.nbytes)), spec, ctx)

    return step


def moments(device: torch.device, tiny: bool) -> Callable[[], object]:
    """A step with second moments, after which nobody waits."""
    return moment_steps(device.type, width=8 if tiny else 64, batch=4 if tiny else 64)[0]["with moments"]


def traced(step: Callable[[], object], count: int) -> list[dict[str, Any]]:
    """What the device and its driver did in so many steps."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(count):
            step()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        profile.export_chrome_trace(str(path))
        events: list[dict[str, Any]] = json.loads(path.read_text())["traceEvents"]
    return [e for e in events if e.get("cat") in DEVICE | RUNTIME and "dur" in e]


def gaps(events: list[dict[str, Any]]) -> tuple[float, Counter[str], Counter[str]]:
    """Microseconds in which the device ran something, and between which kernels it did not; how often."""
    spans = sorted((e for e in events if e["cat"] in DEVICE), key=lambda e: e["ts"])
    busy, end, last = 0.0, spans[0]["ts"], "begin"
    without, number = Counter[str](), Counter[str]()
    for e in spans:
        begin, over = e["ts"], e["ts"] + e["dur"]
        if begin - end > GAP:
            key = f"{short(last)} -> {short(e['name'])}"
            without[key] += begin - end
            number[key] += 1
        busy += max(0.0, over - max(begin, end))
        if over > end:
            end, last = over, e["name"]
    return busy, without, number


def before_the_optimiser(events: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    """The last stretch before the optimiser's kernels begin, in one step: kernels of a kind on a stream together."""
    spans = sorted((e for e in events if e["cat"] in DEVICE), key=lambda e: e["ts"])
    steps = [b for a, b in itertools.pairwise(spans) if "adam" in b["name"].lower() and "adam" not in a["name"].lower()]
    if not steps:
        return []
    first = steps[len(steps) // 2]["ts"]
    last, rows = first - END, list[list[Any]]()
    for e in (e for e in spans if first - END <= e["ts"] < first):
        key, idle = (e["tid"], short(e["name"])), max(0.0, e["ts"] - last)
        if not rows or rows[-1][0] != key or idle > GAP:
            rows.append([key, first - e["ts"], 0, 0.0, idle])
        rows[-1][2] += 1
        rows[-1][3] += e["dur"]
        last = max(last, e["ts"] + e["dur"])
    rows.append([("", "the optimiser"), 0.0, 1, 0.0, first - last])
    return [
        (name, str(stream), f"{at:.0f}", str(n), f"{busy:.0f}", f"{idle:.0f}") for (stream, name), at, n, busy, idle in rows
    ]


def short(name: str) -> str:
    """The name of a kernel without its template."""
    return name.partition("<")[0].removeprefix("void ").removeprefix("at::native::")[:40]


def table(title: str, heads: list[str], rows: Sequence[tuple[str, ...]]) -> str:
    return Table((Column(heads[0], number=False), *map(Column, heads[1:])), tuple(rows), title).markdown()


def show(step: Callable[[], object], device: torch.device) -> None:
    for _ in range(6):
        step()
    host: dict[str, Counter[str]] = defaultdict(Counter)
    times = []
    with sampled(host):
        for _ in range(STEPS):
            begun = time.perf_counter()
            step()
            if device.type == "cuda":
                torch.cuda.synchronize()
            times.append(time.perf_counter() - begun)
    print(f"{1e3 * sorted(times)[STEPS // 2]:.2f} ms per step while it was watched\n")
    if device.type == "cuda":
        events = traced(step, STEPS)
        busy, without, number = gaps(events)
        rows: list[tuple[str, ...]]
        for kinds, title in (
            (DEVICE, f"the device: busy for {busy / STEPS:.0f} us of a step"),
            (RUNTIME, "calls of the driver"),
        ):
            taken, counts = Counter[str](), Counter[str]()
            for e in events:
                if e["cat"] in kinds:
                    taken[short(e["name"])] += e["dur"]
                    counts[short(e["name"])] += 1
            rows = [(n, f"{counts[n] / STEPS:.1f}", f"{us / STEPS:.1f}") for n, us in taken.most_common(SHOWN)]
            print(table(title, ["name", "per step", "us per step"], rows), end="\n\n")
        rows = [(n, f"{number[n] / STEPS:.1f}", f"{us / STEPS:.1f}") for n, us in without.most_common(SHOWN)]
        print(
            table(f"idle for {sum(without.values()) / STEPS:.0f} us of a step", ["between", "per step", "us per step"], rows),
            end="\n\n",
        )
        on, kernels = Counter[str](), Counter[str]()
        for e in (e for e in events if e["cat"] in DEVICE):
            on[str(e["tid"])] += e["dur"]
            kernels[str(e["tid"])] += 1
        rows = [(stream, f"{kernels[stream] / STEPS:.1f}", f"{us / STEPS:.1f}") for stream, us in on.most_common(SHOWN)]
        print(table("streams, which slow one another down", ["stream", "kernels per step", "us per step"], rows), end="\n\n")
        if end := before_the_optimiser(events):
            heads = ["name", "stream", "us before the optimiser", "kernels", "us of them", "us idle before"]
            print(table("the end of the backward pass, in one step", heads, end), end="\n\n")
    for thread, counter in sorted(host.items(), key=lambda item: item[0]):
        samples = [(where, f"{100 * k / counter.total():.1f}") for where, k in counter.most_common(SHOWN)]
        print(table(f"thread {thread}", ["where", "% of its samples"], samples), end="\n\n")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("what", choices=("exchange", "training", "moments", "round", "message"))
    parser.add_argument("text", nargs="?", default="")
    parser.add_argument("--tiny", action="store_true", help="small networks on the CPU")
    parser.add_argument("--numel", type=int, default=0, help="coordinates of a message; 64 Mi, with --tiny 1 Mi")
    options = parser.parse_args(arguments)
    device = device_of(options.tiny)
    with group_of_one(device):
        usual = "error_feedback(top_k(fraction=0.01)) + all_gather"
        if options.what == "exchange":
            step = exchange(options.text or usual, options.tiny, device)
        elif options.what == "training":
            step = training(options.text or usual, options.tiny, device)
        elif options.what == "round":
            step = coding(options.text or "dithered_trellis(omega=1)", sixteenth(options.tiny), device)
        elif options.what == "message":
            spec = Spec.flat(options.numel or (1 << 20 if options.tiny else 1 << 26))
            step = coding(options.text or "sparse_dithering(nu=0.1)", spec, device)
        else:
            step = moments(device, options.tiny)
        show(step, device)
    return 0


if __name__ == "__main__":
    sys.exit(main())

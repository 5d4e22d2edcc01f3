"""Second moments: a training step with them against a plain one, on the VGG-like network for 32x32 images, batch 64.

On a GPU the step runs eagerly and as a CUDA graph: eagerly the CPU's launching is most of the time, in a graph there is none.

Where Triton and typer are but not the whole package's requirements: ``python -m benchmarks.cases.moments`` prints the ratios alone.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.registry import Body, Versus, Work, benchmark, refuse_unless
from tersegrad.moments import Collector

PARAMETERS = 7_585_482
BATCH = 64


def vgg(width: int = 64) -> nn.Sequential:
    layers: list[nn.Module] = []
    channels = 3
    for block in ((1, 1), (2, 2), (4, 4, 4, 4)):
        for k in block:
            layers += [nn.Conv2d(channels, k * width, 3, padding=1), nn.BatchNorm2d(k * width), nn.ReLU(inplace=True)]
            channels = k * width
        layers += [nn.MaxPool2d(2), nn.Dropout(0.25)]
    head = [
        nn.Linear(64 * width, 16 * width),
        nn.ReLU(),
        nn.Dropout(),
        nn.Linear(16 * width, 16 * width),
        nn.ReLU(),
        nn.Dropout(),
    ]
    return nn.Sequential(*layers, nn.Flatten(), *head, nn.Linear(16 * width, 10))


def steps(device: str, width: int = 64, batch: int = BATCH, workers: int = 1) -> tuple[dict[str, Body], Callable[[], None]]:
    """The two steps, which do not wait for the GPU, and the check of the second: moments as in a loop over samples."""
    torch.manual_seed(0)
    plain = vgg(width).to(device)
    x, labels = torch.randn(batch, 3, 32, 32, device=device), torch.randint(10, (batch,), device=device)
    if device == "cuda":
        x = x.to(memory_format=torch.channels_last)
        plain.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    watched = copy.deepcopy(plain)
    collector = Collector(watched, workers)

    def step(model: nn.Module) -> None:
        model.zero_grad(set_to_none=True)
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            loss = F.cross_entropy(model(x), labels)
        loss.backward()

    def with_moments() -> None:
        step(watched)
        collector.take()

    def alone() -> None:
        step(plain)

    def verify() -> None:
        small = copy.deepcopy(watched)  # statistics fixed, so that a sample's gradient can be computed alone
        check(small.eval(), x[:4], labels[:4], 0.05 if device == "cuda" else 1e-4, device)

    return {"plain": alone, "with moments": with_moments}, verify


def check(model: nn.Module, x: Tensor, labels: Tensor, tolerance: float, device: str) -> None:
    def backward(a: Tensor, b: Tensor, reduction: str) -> None:
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            F.cross_entropy(model(a), b, reduction=reduction).backward()

    expected = {p: torch.zeros_like(p) for p in model.parameters()}
    for z in range(len(x)):
        model.zero_grad(set_to_none=True)
        backward(x[z : z + 1], labels[z : z + 1], "sum")
        for p, total in expected.items():
            if p.grad is not None:
                total += p.grad.square()
    with Collector(model) as collector:
        backward(x, labels, "sum")
    for name, p in model.named_parameters():
        error = float((collector.second_moment(p) - expected[p]).norm() / expected[p].norm().clamp(min=1e-30))
        refuse_unless(error < tolerance, f"the moment of {name} is off by {error:.2g}")


def awaited(body: Body) -> Body:
    """``body``, over when the GPU is done too."""

    def run() -> None:
        body()
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    return run


def graph(body: Body) -> Body:
    """``body`` captured. Its warm-up compiles and allocates, on a stream of its own as capturing asks for."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            body()
    torch.cuda.synchronize()
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured, stream=stream):
        body()
    return captured.replay


def work(device: str, numel: int, as_graph: bool = False) -> Work:
    bodies, verify = steps(device, 64 if numel == PARAMETERS else 8)
    for body in bodies.values():
        body()
    verify()
    if as_graph:
        bodies = {name: graph(body) for name, body in bodies.items()}
    bodies = {name: awaited(body) for name, body in bodies.items()}
    return Work(bodies, 4 * numel, verify)


@benchmark(
    "moments/vgg, batch 64, cpu",
    numel=PARAMETERS,
    targets={"speed with moments": 1 / 1.5},
    versus={"speed with moments": Versus("with moments", "plain")},
)
def on_cpu(numel: int) -> Work:
    return work("cpu", numel)


if torch.cuda.is_available():

    @benchmark(
        "moments/vgg, batch 64, cuda",
        numel=PARAMETERS,
        targets={"speed with moments": 1 / 1.3},
        versus={"speed with moments": Versus("with moments", "plain")},
    )
    def on_cuda(numel: int) -> Work:
        return work("cuda", numel)

    @benchmark(
        "moments/vgg, batch 64, cuda, graph",
        numel=PARAMETERS,
        targets={"speed with moments": 1 / 1.3},
        versus={"speed with moments": Versus("with moments", "plain")},
    )
    def as_graph_on_cuda(numel: int) -> Work:
        return work("cuda", numel, as_graph=True)


def compare(bodies: dict[str, Body], rounds: int) -> str:
    """The ratio of a step with moments to a plain one, median over rounds in which both run, and both times."""
    seconds: dict[str, list[float]] = {name: [] for name in bodies}
    for _ in range(rounds):
        for name, body in bodies.items():
            start = time.perf_counter()
            body()
            seconds[name].append(time.perf_counter() - start)
            if torch.cuda.is_available():
                torch.cuda.synchronize()  # every step finds an idle GPU
    ratio = statistics.median(b / a for a, b in zip(seconds["plain"], seconds["with moments"], strict=True))
    times = ", ".join(f"{name} {1e3 * statistics.median(t):.2f} ms" for name, t in seconds.items())
    return f"{ratio:.3f} times plain ({times})"


def main() -> None:
    """Ratios on this machine: of whole steps, of the CPU's time to launch them, and of CUDA graphs."""
    cases = [("cpu", 64, 1)] if not torch.cuda.is_available() else [("cuda", 64, 1), ("cuda", 512, 1), ("cuda", 512, 8)]
    for device, batch, workers in cases:
        bodies, verify = steps(device, batch=batch, workers=workers)
        for body in [*bodies.values()] * 3:
            body()
        verify()
        where = f"{device}, batch {batch}, {workers} worker{'s' * (workers > 1)}"
        whole = {name: awaited(body) for name, body in bodies.items()}
        print(f"{where}: {compare(whole, 5 if device == 'cpu' else 50)}", flush=True)
        if device == "cuda":
            print(f"{where}, launching alone: {compare(bodies, 50)}", flush=True)
            graphs = {name: awaited(graph(body)) for name, body in bodies.items()}
            print(f"{where}, graph: {compare(graphs, 50)}", flush=True)


if __name__ == "__main__":
    main()

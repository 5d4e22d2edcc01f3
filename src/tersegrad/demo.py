"""``tersegrad demo --compressors``: real gradients of a small network, every compressor in one table, a figure of bits against error.

A network of 301,066 parameters learns scikit-learn's handwritten digits for a few seconds; the gradients of a few steps, from
the first to the last, are what the compressors are measured on. Speeds are measured on a larger tensor, because 1.2 MB would
fit into the cache. Everything is deterministic but the speeds.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from tersegrad import bench, recipes
from tersegrad.report import figures, tables
from tersegrad.report.catalog import CONFIGURATIONS as CONFIGURATIONS
from tersegrad.train import data

STEPS = (1, 25, 100, 300)  # the training steps whose gradients are kept
HIDDEN = 512
SPEED_NUMEL = 4 << 20

CLOSING = """\
How to read this. [bold]bits/coord[/] is the size of the message that was really written, spread over the gradient's
coordinates: float32 has 32, so [bold]32/bits[/] is how many times less is sent. [bold]error[/] is what was lost, as a share
of the gradient's squared length: 0.01 is hardly noticed in training, and even 0.9 works when what was lost is carried over
to the next step (error_feedback does that). [bold]guarantee[/] is what holds for every gradient, not just for these: C or
B(alpha) means that the error stays below alpha (always, or on average), U(omega) means right on average with variance at
most omega, so that the errors of many workers cancel. [bold]above limit[/] is how many more bits were sent than the best
conceivable compressor needs at the same error on the hardest data: near 0 nothing is left to gain, and below 0 these
gradients were easier than the hardest data, because they have zeros and a few large entries. [bold]encode[/] and
[bold]decode[/] are speeds on one core, where 1 is as fast as copying the memory. In the figure, low and left is good, and
on Gaussian data nobody gets below the line.""".replace("\n", " ")


@dataclasses.dataclass(frozen=True)
class Demo:
    """Everything that the demonstration found."""

    accuracy: float  # on digits that the network has not seen
    gradient: tuple[bench.Rate, ...]
    gaussian: tuple[bench.Rate, ...]
    speeds: tuple[bench.Speed, ...]
    figure: Path
    machine: str

    def table(self) -> tables.Table:
        """One row a compressor: rates on the gradients, speeds on the large tensor."""
        rates = tables.rate_table(self.gradient)
        speed = {s.compressor: (f"{s.encode.ratio:.2f}", f"{s.decode.ratio:.2f}") for s in self.speeds}
        columns = (*rates.columns, tables.Column("encode"), tables.Column("decode"))
        rows = tuple((*row, *speed[r.compressor]) for row, r in zip(rates.rows, self.gradient))
        numel, large = self.gradient[0].numel, self.speeds[0].numel
        memmove = sorted(s.memmove.gigabytes for s in self.speeds)[len(self.speeds) // 2]
        note = (
            f"bits, error: mean over {self.gradient[0].messages} gradients of {numel:,} coordinates, scaled to unit variance\n"
            f"encode, decode: ratio to memcpy of the float32 tensor ({memmove:.1f} GB/s here), one thread, "
            f"{tables.size(large)} Gaussian coordinates\n{self.machine}"
        )
        return tables.Table(columns, rows, "Every compressor on real gradients", note)


def digits_gradients(steps: Sequence[int] = STEPS, hidden: int = HIDDEN) -> tuple[list[Tensor], float]:
    """Flattened gradients at ``steps`` of training a network on the digits, and its accuracy on unseen ones."""
    pixels, classes = data.load_digits()
    images, labels = torch.from_numpy(pixels).float() / 16, torch.from_numpy(classes).long()
    generator = torch.Generator().manual_seed(0)
    order = torch.randperm(len(images), generator=generator)
    train, unseen = order[:1500], order[1500:]
    # torch's layers draw from the global generator: leave it as it was.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = torch.nn.Sequential(
            torch.nn.Linear(64, hidden),
            torch.nn.ReLU(),
            torch.nn.Linear(hidden, hidden),
            torch.nn.ReLU(),
            torch.nn.Linear(hidden, 10),
        )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    kept = []
    for step in range(1, max(steps) + 1):
        batch = train[torch.randint(len(train), (128,), generator=generator)]
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(images[batch]), labels[batch]).backward()
        if step in steps:
            kept.append(torch.cat([p.grad.reshape(-1) for p in model.parameters() if p.grad is not None]).clone())
        optimizer.step()
    with torch.no_grad():
        accuracy = float((model(images[unseen]).argmax(1) == labels[unseen]).float().mean())
    return kept, accuracy


def unit_variance(x: Tensor) -> Tensor:
    """``x`` scaled to mean square 1: bits and relative errors stay, and a threshold means the same on every gradient."""
    return x / x.double().square().mean().sqrt().clamp(min=1e-30).float()


def _distinct(rates: Sequence[bench.Rate]) -> tuple[bench.Rate, ...]:
    """One of those that send the same bits with the same error: error feedback's first message is that of what it wraps."""
    kept: list[bench.Rate] = []
    for rate in rates:
        same = (
            abs(rate.bits_per_coordinate - k.bits_per_coordinate) < 0.01 * k.bits_per_coordinate
            and abs(rate.error - k.error) <= 0.01 * k.error
            for k in kept
        )
        if not any(same):
            kept.append(rate)
    return tuple(kept)


def run(
    out: Path = Path("out"),
    *,
    progress: Callable[[str, int, int], None] = lambda what, done, total: None,
    configurations: Sequence[str] = CONFIGURATIONS,
    steps: Sequence[int] = STEPS,
    hidden: int = HIDDEN,
    speed_numel: int = SPEED_NUMEL,
    budget: float = 1.0,
) -> Demo:
    """Train, measure, draw. ``progress(what, done, total)`` is called before every part; ``budget`` bounds each timing."""
    figures.require_matplotlib()  # before the work, not after it
    total = len(configurations) + 2
    progress("training a network on handwritten digits", 0, total)
    # The same sums, so the same gradients, on every machine's core count.
    with bench.thread_count(1):
        gradients, accuracy = digits_gradients(steps, hidden)
    gradients = [unit_variance(g) for g in gradients]
    noise, large = bench.draw("gaussian", gradients[0].numel()), bench.draw("gaussian", speed_numel, seed=1)
    rates, ideal, speeds = [], [], []
    for k, text in enumerate(configurations):
        progress(f"measuring {text}", k + 1, total)
        compressor = recipes.parse(text)
        # Shown as it is written above, with the parameters that matter even where they are the defaults.
        rates.append(dataclasses.replace(bench.measure_rate(compressor, gradients, source="gradients"), compressor=text))
        ideal.append(dataclasses.replace(bench.measure_rate(compressor, noise, source="gaussian"), compressor=text))
        speeds.append(dataclasses.replace(bench.measure_speed(compressor, large, budget=budget), compressor=text))
    progress("drawing", total - 1, total)
    panels = (
        figures.Panel(f"Gaussian data, {noise.numel():,} coordinates", _distinct(ideal)),
        figures.Panel(f"Gradients of a network learning digits, {noise.numel():,} coordinates", _distinct(rates), floor=False),
    )
    png, _ = figures.bits_against_error(panels, out / "compressors", "What every compressor sends, and what it loses")
    progress("done", total, total)
    return Demo(accuracy, tuple(rates), tuple(ideal), tuple(speeds), png, bench.describe())

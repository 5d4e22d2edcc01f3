"""A plan as a table with its assumptions, and as a figure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from tersegrad.planner import Forecast, Plan
from tersegrad.planner.plan import LADDER, MOMENTS, rate_text, seconds_text
from tersegrad.report.figures import Mark, seconds_against_link
from tersegrad.report.tables import Column, Table, number

DIRECT = 0.7  # share of the rate that all-to-all and all-gather reach: between 0.5 and 0.75 with gloo and up to four hosts

COLUMNS = (
    Column("compressor", number=False),
    Column("exchange", number=False),
    Column("step"),
    Column("x bf16"),
    Column("waits"),
    Column("MB sent"),
    Column("bits/coord"),
    Column("error"),
    Column("iterations"),
)


def plan_table(plan: Plan, shown: Sequence[Forecast], how: str) -> Table:
    """Forecasts under each other, the fastest first."""
    rows = tuple(
        (
            "float32" if f.setting.compressor == "identity" else f.setting.compressor,
            f.setting.exchange,
            seconds_text(f.seconds),
            f"{plan.baseline.seconds / f.seconds:.2f}",
            f"{100 * f.waited / f.seconds:.0f} %",
            number(f.sent / 1e6),
            f"{f.bits:.3g}",
            number(f.error, 2),
            _iterations(f),
        )
        for f in shown
    )
    work, where = plan.workload, plan.topology
    machines = f", {where.per_node} on each machine" if where.per_node > 1 else ""
    title = (
        f"{work.name}: {work.numel:,} parameters, {where.workers} workers{machines}, {rate_text(where.link.bits_per_second)}, "
        f"latency {seconds_text(where.link.latency)}"
    )
    return Table(COLUMNS, rows, title, note(plan, how))


def _iterations(found: Forecast) -> str:
    told = found.iterations
    if told is None:
        return "-"
    value, kind = told
    return f"x{value:.3g}" if kind == "measured" or value < 1.005 else f"<= x{value:.3g}"


def note(plan: Plan, how: str) -> str:
    """What the columns mean and what was assumed."""
    work, where = plan.workload, plan.topology
    rings = where.link.collectives == "ring"
    lines = [
        "step: forward, backward and exchange of one worker. waits: the share of the step in which it waits for the link. MB sent: "
        "bytes that leave a machine in a step. error: what one message leaves out, ||C(y) - y||^2 / ||y||^2. iterations: against "
        "training without compression; '<=' is gradient descent's bound at that error, without error feedback and pessimistic, a plain "
        "number was measured.",
        f"Assumed: computing takes {seconds_text(work.forward)} forward and {seconds_text(work.backward)} backward ({how}); gradients "
        "appear last to first, evenly; coding runs on the same processor, at the speed measured here; bits are those of normal vectors "
        "unless the model gave a gradient, and gradients usually take fewer; variance-based compressors send what they sent on "
        f"CIFAR-10 and add {100 * MOMENTS:.0f} % to computing; all-to-all and all-gather reach {100 * DIRECT:.0f} % of the rate; Ethernet "
        f"frames of 1500 bytes; all-reduce and all-gather go by {'rings, as in gloo' if rings else 'trees, as in NCCL'}; no stragglers, no "
        "loss, nobody else on the link.",
        f"The verdict considers bf16, {' and '.join(LADDER)}, whose losses could not be told from the seeds' on six small networks, with "
        "Adam and with momentum (docs/plan.md), and those that you name with --compressor. Where the error is larger, accuracy was lost "
        "(docs/choose.md).",
    ]
    if where.workers > 64:
        lines.append(f"{where.workers} workers are simulated: the model was held against the clock with up to 4 hosts.")
    return "\n".join(lines)


def draw(plan: Plan, path: Path, lines: int = 7) -> Path:
    """Step time against bandwidth: bf16, and the settings of the table; the link of the plan is marked."""
    chosen = [plan.baseline, *(f for f in plan.best if f.setting != plan.baseline.setting)][:lines]

    def at(found: Forecast) -> Callable[[float], float]:
        return lambda rate: plan.again(found.setting, rate).seconds

    rows = [(str(f.setting).replace("identity,", "float32,"), at(f)) for f in chosen]
    where = plan.topology
    mark = Mark(where.link.bits_per_second, rate_text(where.link.bits_per_second))
    title = f"{plan.workload.name}, {where.workers} workers: predicted time of a training step"
    return seconds_against_link(rows, path, title=title, mark=mark)

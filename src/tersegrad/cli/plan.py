"""``tersegrad plan``: does compression pay on a link, and with which setting?"""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from tersegrad.cli.options import Json
from tersegrad.cli.show import console_of, finish
from tersegrad.core.errors import BadConfiguration
from tersegrad.core.text import require


def plan(
    model: Annotated[
        str, typer.Option(help="resnet50, gpt2, or PATH:FUNCTION: a function that returns a module or (module, loss).")
    ],
    bandwidth: Annotated[str, typer.Option(help="Of a machine's link, each way: 100Mbit, 1Gbit, ...")],
    latency: Annotated[str, typer.Option(help="Until a message arrives: 50us, 0.2ms, 80ms.")] = "0.2ms",
    workers: Annotated[int, typer.Option(min=2, help="In all.")] = 8,
    per_node: Annotated[int, typer.Option(min=1, help="Workers of one machine, which share its link.")] = 1,
    inside: Annotated[str, typer.Option(help="Bandwidth between the workers of one machine.")] = "100Gbit",
    batch: Annotated[int, typer.Option(min=1, help="Samples of one worker in a step (resnet50, gpt2).")] = 32,
    backward_ms: Annotated[str, typer.Option(help="Of one worker's backward pass; auto: measured or estimated here.")] = "auto",
    device: Annotated[str, typer.Option(help="Where the workers compute and code: cpu, cuda or cuda:1.")] = "cpu",
    compressor: Annotated[list[str] | None, typer.Option("--compressor", help="Consider this one too; repeatable.")] = None,
    everything: Annotated[
        bool, typer.Option("--all", help="Every exchange of every compressor, not only the fastest.")
    ] = False,
    measure: Annotated[
        bool, typer.Option("--measure", help="Measure coding again, whatever was kept from earlier runs.")
    ] = False,
    figure: Annotated[Path | None, typer.Option(help="Draw the step time against the bandwidth: a .svg or .png file.")] = None,
    json_path: Json = None,
) -> None:
    """Does compression pay on my link, and with which setting? Step time, bytes and error of every setting, and a verdict."""
    from tersegrad.bench import planning, workloads
    from tersegrad.planner import ETHERNET, Link, Topology
    from tersegrad.report import figures, plans

    backward = None if backward_ms == "auto" else _milliseconds(backward_ms)
    rate, delay, within = planning.bandwidth(bandwidth), planning.duration(latency), planning.bandwidth(inside)
    _check_device(device)
    require(figure is None or figure.suffix in (".svg", ".png"), f"a figure is a .svg or .png file, got {figure}")
    if figure is not None:
        figures.require_matplotlib()  # before anything is measured
    link = Link(rate, delay, ETHERNET, plans.DIRECT, "tree" if device.startswith("cuda") else "ring", plans.DIRECT)
    topology = Topology(workers, link, per_node, Link(within, latency=20e-6, collectives=link.collectives))
    console = console_of()
    with console.status("measuring") as status:
        status.update(escape(f"measuring {model}"))
        found = workloads.on(device, workloads.model(model, batch, device, backward))
        made = planning.plan(
            found,
            topology,
            tuple(compressor or ()),
            device,
            planning.Cache(fresh=measure),
            lambda text: status.update(escape(f"measuring {text}")),
        )
    shown = made.forecasts if everything else made.best
    finite = made.pays_below if made.pays_below != math.inf else None
    finish(plans.plan_table(made, shown, found.how), list(shown), json_path, verdict=made.verdict, pays_below=finite)
    if json_path != Path("-"):
        console.print(f"\n{made.verdict[:1].upper()}{made.verdict[1:]}.", style="bold", markup=False, highlight=False)
    if figure is not None:
        plans.draw(made, figure)
        if json_path != Path("-"):
            console.print(f"figure: {figure}", markup=False, highlight=False)


def _check_device(device: str) -> None:
    """Refuse what no worker could compute on here."""
    require(
        re.fullmatch(r"cpu|cuda(:[0-9]+)?", device, re.ASCII) is not None,
        f"--device is cpu, cuda, or cuda:1 and so on, got {device!r}",
    )
    if device == "cpu":
        return
    import torch

    there = torch.cuda.device_count() if torch.cuda.is_available() else 0
    require(there > 0, "there is no GPU here: plan with --device cpu")
    number = int(device.partition(":")[2] or 0)
    require(number < there, f"there is no {device} here: the last GPU is cuda:{there - 1}")


def _milliseconds(text: str) -> float:
    try:
        value = float(text) / 1000
    except ValueError:
        value = -1.0
    if not 0 <= value < 1e9:
        raise BadConfiguration(f"--backward-ms is a number of milliseconds or auto, got {text!r}")
    return value

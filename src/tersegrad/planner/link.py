"""The link of a running job: rate and latency, measured with the collectives that exchanges use."""

from __future__ import annotations

import statistics
import struct
import time
from collections.abc import Callable
from typing import Any

import torch

from tersegrad.core.text import require
from tersegrad.exchange import AllGather, AllToAll, ProcessGroup
from tersegrad.planner.costs import Link

FIRST = 1 << 16  # bytes per worker of the first long transfer; it grows until it lasts ENOUGH
LAST = 1 << 26
ENOUGH = 0.05  # seconds


def measure_link(group: ProcessGroup | Any = None, *, rounds: int = 5, enough: float = ENOUGH) -> Link:
    """Rate and latency of the slowest worker's link, between the members of a process group (a collective call).

    ``group``: of torch or of ours; by default that of all workers. The rate is that of an all-reduce, headers included; ``direct`` and
    ``gathered`` are the shares of it that an all-to-all and an all-gather reach; the latency is that of one message. All ranks
    return the same. It takes about a second.
    """
    wire = ProcessGroup(group.group if isinstance(group, ProcessGroup) else group)
    require(wire.size > 1, "a link joins at least two workers, and this process group has one member")
    bare = Link(1.0, collectives="ring" if wire.device.type == "cpu" else "tree")
    steps = 2 * bare.hops(wire.size)

    def reduce(nbytes: int) -> float:
        return _seconds(wire, rounds, lambda x: wire.all_reduce(x), torch.zeros(max(1, nbytes // 4), device=wire.device))

    def send(nbytes: int) -> float:
        shares = tuple(0 if r == wire.rank else nbytes for r in range(wire.size))
        data = torch.zeros(sum(shares), dtype=torch.uint8, device=wire.device)
        return _seconds(wire, rounds, lambda x: wire.launch(AllToAll(x, shares, shares))[0].wait(), data)

    def gather(nbytes: int) -> float:
        data = torch.zeros(nbytes, dtype=torch.uint8, device=wire.device)
        return _seconds(wire, rounds, lambda x: wire.launch(AllGather(x))[0].wait(), data)

    short, quick, passed = reduce(4), send(8), gather(8)
    # Three collectives, one latency: the exchanges need them all.
    latency = statistics.median([short / steps, quick, passed / bare.hops(wire.size)])
    nbytes = FIRST
    while (taken := reduce(nbytes) - short) < enough and nbytes < LAST:
        nbytes = min(LAST, 4 * nbytes)
    factor = 2 * (wire.size - 1) / wire.size
    rate = 8 * factor * nbytes / max(taken, 1e-9)
    share = max(1, round(factor * nbytes / (wire.size - 1)))  # as many bytes leave each worker
    direct, gathered = (
        min(1.0, max(0.05, taken / max(other, 1e-9))) for other in (send(share) - quick, gather(share) - passed)
    )
    return Link(rate, latency, direct=direct, collectives=bare.collectives, gathered=gathered)


def _seconds(wire: ProcessGroup, rounds: int, body: Callable[[torch.Tensor], object], data: torch.Tensor) -> float:
    """The median over rounds of the slowest worker's time, the same on every rank."""
    samples = []
    for _ in range(rounds + 1):
        wire.barrier()
        begin = time.perf_counter()
        body(data)
        if data.is_cuda:
            torch.cuda.synchronize(data.device)
        samples.append(time.perf_counter() - begin)
    rows = [struct.unpack(f"<{rounds}d", row) for row in wire.gather(struct.pack(f"<{rounds}d", *samples[1:]))]
    return float(statistics.median(max(together) for together in zip(*rows)))

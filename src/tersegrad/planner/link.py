"""The link of a running job: rate and latency, measured with the collectives that exchanges use."""

from __future__ import annotations

import hashlib
import os
import statistics
import struct
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tersegrad.core.text import require
from tersegrad.exchange import AllGather, AllToAll, ProcessGroup
from tersegrad.planner.costs import Link

FIRST = 1 << 16  # bytes per worker of the first long transfer; it grows until it lasts ENOUGH
LAST = 1 << 26
MESSAGE = 1 << 21  # bytes of the longest message of an all-to-all or an all-gather
ENOUGH = 0.05  # seconds


def measure_link(group: ProcessGroup | Any = None, *, rounds: int = 5, enough: float = ENOUGH) -> Link:
    """Rate and latency of the slowest worker's link, between the members of a process group (a collective call).

    ``group``: of torch or of ours; by default that of all workers. The rate is that of an all-reduce, headers included; ``direct`` and
    ``gathered`` are the shares of it that an all-to-all and an all-gather reach; the latency is that of one message. ``toll`` is what
    sending takes from computing: the processor's time of the all-reduce, where the workers of a machine have no core to spare for it.
    All ranks return the same. It takes about a second.
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
    nbytes, before = FIRST, time.process_time()
    while (taken := reduce(nbytes) - short) < enough and nbytes < LAST:
        nbytes, before = min(LAST, 4 * nbytes), time.process_time()
    factor = 2 * (wire.size - 1) / wire.size
    spent = (time.process_time() - before) / ((rounds + 1) * factor * nbytes)
    rate = 8 * factor * nbytes / max(taken, 1e-9)
    # As many bytes leave each worker, but in messages as gradients make them: longer ones lie in memory that is fresh for each.
    share = max(1, round(factor * nbytes / (wire.size - 1)))
    if wire.device.type == "cpu":
        share = min(share, MESSAGE)
    alike = 8 * (wire.size - 1) * share / rate
    direct, gathered = (
        min(1.0, max(0.05, alike / max(other, 1e-9))) for other in (send(share) - quick, gather(share) - passed)
    )
    toll = _toll(wire, spent) if wire.device.type == "cpu" else 0.0
    return Link(rate, latency, direct=direct, collectives=bare.collectives, gathered=gathered, toll=toll)


def crowding(workers: int, threads: int, cores: int) -> float:
    """Seconds that a second of sending takes from the computing of each of ``workers`` on a machine, who use ``threads`` cores each.

    None where each has a core to spare; else sending is work as any other, which all of them share among the cores.

    >>> crowding(2, 1, 2), crowding(4, 1, 2), crowding(1, 16, 16), crowding(1, 1, 2), crowding(2, 1, 3)
    (1.0, 2.0, 0.0625, 0.0, 0.3333333333333333)
    """
    spare = max(0, cores - workers * threads) / workers
    return max(0.0, 1 - spare) * workers / cores


def _toll(wire: ProcessGroup, spent: float) -> float:
    """The mean over workers of what a byte takes, from what it takes of their processors' time."""
    machine, cores = _machine(), os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    rows = [struct.unpack("<16sd", row) for row in wire.gather(struct.pack("<16sd", machine, spent))]
    here = [seconds for other, seconds in rows if other == machine]
    own = crowding(len(here), torch.get_num_threads(), len(cores)) * statistics.fmean(here)
    tolls = [struct.unpack("<d", row)[0] for row in wire.gather(struct.pack("<d", own))]
    return statistics.fmean(tolls)


def _machine() -> bytes:
    """What tells machines apart: their last start, else their network card."""
    try:
        told = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")
    except OSError:
        told = str(uuid.getnode())
    return hashlib.blake2b(told.encode(), digest_size=16).digest()


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

"""Worker processes: join the group that torchrun started, or start one on this machine.

A command that trains is written once. Started by hand it calls :func:`launch`, which runs the same command again under torchrun, one
process a worker; started by torchrun (here or on many machines) it finds itself :func:`spawned`, goes on with :func:`join`, and ends
with :func:`leave`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from tersegrad.core import private
from tersegrad.core.errors import BadConfiguration
from tersegrad.engine import TimedGroup, threads

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Worker:
    """One process in its group."""

    rank: int
    size: int
    device: torch.device
    link: TimedGroup | None = None  # None: the default process group

    @property
    def virtual(self) -> bool:
        """Whether the workers are threads of one process."""
        return self.link is not None

    @property
    def leads(self) -> bool:
        """Whether this is the worker that speaks and writes for all."""
        return self.rank == 0

    def barrier(self) -> None:
        """Wait for all workers."""
        TimedGroup.of(self.link).barrier()

    def mean(self, values: Sequence[float]) -> list[float]:
        """The mean over workers of each value."""
        rows = TimedGroup.of(self.link).gather(struct.pack(f"<{len(values)}d", *values))
        return [sum(each) / self.size for each in zip(*(struct.unpack(f"<{len(values)}d", row) for row in rows))]

    def share(self, value: Any) -> Any:
        """What the leading worker passed."""
        return TimedGroup.of(self.link).share(value)


def several_groups() -> bool:
    """Whether this process has more process groups than the default one."""
    return len(private.of("distributed.distributed_c10d._world").pg_map) > 1


def spawned() -> bool:
    """Whether torchrun (or another launcher that sets its variables) started this process."""
    return "WORLD_SIZE" in os.environ and "RANK" in os.environ


def leads() -> bool:
    """Whether this process speaks for all: the first worker, or a process that no launcher started."""
    return int(os.environ.get("RANK", "0")) == 0


def restarts() -> int:
    """How often the elastic agent has restarted the workers."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


@contextlib.contextmanager
def join(timeout: float = 600.0) -> Iterator[Worker]:
    """The group of this process, from torchrun's variables; NCCL with a GPU for each local worker, else gloo.

    A group that is already there is used and left as it is. ``timeout``: seconds until a worker that hears nothing from the
    others fails.
    """
    if dist.is_initialized():
        yield Worker(dist.get_rank(), dist.get_world_size(), _device(dist.get_backend()))
        return
    local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    backend = (
        "nccl" if dist.is_nccl_available() and torch.cuda.is_available() and torch.cuda.device_count() >= local else "gloo"
    )
    device = _device(backend)
    if backend == "nccl":
        torch.cuda.set_device(device)
    limit = timedelta(seconds=timeout)
    dist.init_process_group(
        backend,
        timeout=limit,
        store=_store(limit),
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
        device_id=device if backend == "nccl" else None,
    )
    try:
        yield Worker(dist.get_rank(), dist.get_world_size(), device)
        # Nobody leaves while another still listens to it.
        dist.barrier()
    finally:
        dist.destroy_process_group()


def virtual(size: int, work: Callable[[Worker], T]) -> list[T]:
    """``work(worker)`` on ``size`` workers that are threads of this process, on the GPU if there is one.

    On a GPU one runs at a time; on the CPU as many as there are cores, each of them with one thread, as :func:`launch` starts them
    (OMP_NUM_THREADS says otherwise).
    """
    if spawned():
        raise BadConfiguration("virtual workers live in one process: run the command itself, without torchrun")
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    before, at_once = torch.get_num_threads(), 1
    if device.type == "cpu":
        each = int(os.environ.get("OMP_NUM_THREADS", "1"))
        torch.set_num_threads(each)
        at_once = max(1, (os.cpu_count() or 1) // each)
    try:
        return threads.run(size, lambda member: work(Worker(member.rank, size, device, member)), at_once)
    finally:
        torch.set_num_threads(before)


def leave(status: int = 0) -> NoReturn:
    """End this worker now, without tearing the interpreter down.

    torch's DistributedDataParallel keeps the group alive after it was destroyed, and with it gloo's threads. One of them that frees a
    tensor while the interpreter ends aborts the process ("terminate called without an active exception"): rare, and then torchrun
    takes a finished worker for a dead one.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _store(timeout: timedelta) -> Store:
    """The store of torchrun's variables, with keys of this attempt only.

    torchrun's agent keeps one store over all restarts, where gloo would find the addresses of workers that have died.
    """
    kept = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    size = int(os.environ["WORLD_SIZE"])
    host, port, serves = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), os.environ["RANK"] == "0" and not kept
    store = TCPStore(host, port, size, is_master=serves, timeout=timeout, multi_tenant=not kept)
    return PrefixStore(f"attempt{restarts()}of{size}", store)


def _device(backend: str) -> torch.device:
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if backend == "nccl" else torch.device("cpu")


def torchrun_command(words: Sequence[str], workers: int, restarts: int = 0) -> list[str]:
    """The command that runs ``python words...`` with ``workers`` processes on loopback."""
    options = {
        "nproc-per-node": str(workers),
        "max-restarts": str(restarts),
        "rdzv-backend": "c10d",
        "rdzv-endpoint": "127.0.0.1:0",
        "local-addr": "127.0.0.1",
        "monitor-interval": "0.1",
    }
    command = [sys.executable, "-m", "tersegrad.integrations.agent"]
    command += [word for name, value in options.items() for word in (f"--{name}", value)]
    # Without the two dashes torchrun takes our --local for the beginning of one of its own options.
    return [*command, "--module", "--", *words[1:]] if words[0] == "-m" else [*command, "--", *words]


def launch(words: Sequence[str], workers: int, restarts: int = 0) -> int:
    """Run ``python words...`` under torchrun with ``workers`` processes on loopback; the exit status.

    ``restarts``: how often all workers are started anew after one of them died.
    """
    environment = dict(os.environ)
    environment.setdefault("OMP_NUM_THREADS", "1")  # the workers share the cores
    if Path("/sys/class/net/lo").exists():
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo")  # whatever the host name resolves to
    return subprocess.run(torchrun_command(words, workers, restarts), env=environment, check=False).returncode

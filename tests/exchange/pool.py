"""Real worker processes for tests: started once, given many jobs. A job is a function of a test module, called on every rank.

They are forked from a process that has imported what most jobs need: importing torch anew takes seconds for every rank.
"""

from __future__ import annotations

import contextlib
import gc
import os
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

# After so many jobs ranks are started anew.
JOBS = 5


def _serve(rank: int, size: int, store: str, timeout: float, connection: Connection) -> None:
    torch.set_num_threads(1)
    # What was imported stays as it is: collections that walk through it would copy all of its pages into every rank.
    gc.freeze()
    limit = timedelta(seconds=timeout)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=limit)
    while True:
        job = connection.recv()
        if job is None:
            break
        function, arguments = job
        try:
            connection.send((True, function(*arguments)))
        except BaseException:
            connection.send((False, traceback.format_exc()))
    dist.destroy_process_group()


@contextlib.contextmanager
def as_in_a_rank() -> Iterator[None]:
    """One thread, as ranks have: sums in the same order, so that results agree to the last bit."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class Pool:
    """``size`` gloo ranks on loopback; ``timeout``: seconds until one that hears nothing from the others fails."""

    def __init__(self, size: int, timeout: float = 60.0) -> None:
        self.size, self.timeout = size, timeout
        self._start()

    def _start(self) -> None:
        self._jobs = 0
        self._folder = tempfile.TemporaryDirectory()
        context: Any = mp.get_context("forkserver")
        context.set_forkserver_preload(["tests.exchange.preload"])
        self._connections, self._processes = [], []
        for rank in range(self.size):
            ours, theirs = context.Pipe()
            arguments = (rank, self.size, os.path.join(self._folder.name, "store"), self.timeout, theirs)
            process = context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            theirs.close()  # so that a rank that dies is seen to hang up
            self._connections.append(ours)
            self._processes.append(process)

    def _send(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        """Hand out a job, to new ranks after some: a process group that a job leaves behind wakes up 100 times per second."""
        if self._jobs == JOBS:
            self.close()
            self._start()
        self._jobs += 1
        for connection in self._connections:
            connection.send((function, arguments))

    def run(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """The results of function(*arguments) on every rank; raises with the traceback of the first that fails."""
        self._send(function, arguments)
        answers = [connection.recv() for connection in self._connections]
        for good, value in answers:
            if not good:
                raise AssertionError(value)
        return [value for _, value in answers]

    def outcomes(self, function: Callable[..., Any], *arguments: Any, within: float = 60.0) -> list[Any]:
        """Of every rank (True, result), (False, traceback), or None if it died; raises if one takes longer than ``within`` seconds."""
        self._send(function, arguments)
        found: list[Any] = []
        end = time.monotonic() + within
        for rank, connection in enumerate(self._connections):
            if not connection.poll(max(0.0, end - time.monotonic())):
                raise AssertionError(f"rank {rank} has said nothing for {within} s")
            try:
                found.append(connection.recv())
            except (EOFError, ConnectionResetError):
                found.append(None)
        return found

    def close(self) -> None:
        for connection in self._connections:
            with contextlib.suppress(BrokenPipeError):
                connection.send(None)
        for process in self._processes:
            process.join(20)
            if process.is_alive():
                process.kill()
        self._folder.cleanup()


@contextlib.contextmanager
def pool(size: int, timeout: float = 60.0) -> Iterator[Pool]:
    p = Pool(size, timeout)
    try:
        yield p
    finally:
        p.close()

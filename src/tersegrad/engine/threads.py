"""n workers in one process: every rank is a thread, and a collective is a meeting of all of them in memory.

What runs on a rank is the code of a real worker (engine, integrations, trainer), with a :class:`Member` in place of a torch process
group. The same messages are encoded, handed over and decoded, so the result has the bits of n processes, as long as the network
itself computes the same bits in both (on a CPU: with the same number of threads).

``at_once`` ranks run at a time. One is right for a GPU: the activations of one rank live at a time, and kernels do not compete. A rank that
fails, or ends while the others still exchange, ends all of them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from tersegrad.core.text import require
from tersegrad.engine.meter import TimedGroup
from tersegrad.exchange import virtual
from tersegrad.exchange.steps import Collective

T = TypeVar("T")


class _Abandoned(Exception):
    """Another rank has failed."""


class _World:
    """Where the ranks meet."""

    def __init__(self, size: int, at_once: int) -> None:
        self.size = size
        self.slots = threading.Semaphore(at_once)
        self._changed = threading.Condition()
        self._given: dict[int, Any] = {}
        self._meetings = 0
        self._answers: Sequence[Any] = ()
        self._ended: list[int] = []
        self.failure: BaseException | None = None

    def meet(self, rank: int, value: Any, answer: Callable[[list[Any]], Sequence[Any]]) -> Any:
        """Hand in a value and wait for the other ranks; this rank's item of ``answer(all values in rank order)``."""
        self.slots.release()
        try:
            with self._changed:
                self._given[rank] = value
                now = self._meetings
                if len(self._given) == self.size:
                    values = [self._given[r] for r in range(self.size)]
                    self._given, self._answers = {}, answer(values)
                    self._meetings += 1
                    self._changed.notify_all()
                elif self._ended:
                    raise RuntimeError(f"rank {self._ended[0]} has ended while rank {rank} still exchanges: their steps differ")
                self._changed.wait_for(lambda: self._meetings > now or self.failure is not None)
                if self._meetings == now:
                    raise _Abandoned
                # The next meeting needs this rank, so these are still the answers of this one.
                return self._answers[rank]
        finally:
            self.slots.acquire()

    def fail(self, failure: BaseException) -> None:
        """End all ranks."""
        with self._changed:
            self.failure = self.failure or failure
            self._changed.notify_all()

    def end(self, rank: int) -> None:
        """A rank has returned."""
        with self._changed:
            self._ended.append(rank)
            if self._given and self.failure is None:
                others = sorted(self._given)
                self.failure = RuntimeError(f"rank {rank} has ended while ranks {others} still exchange: their steps differ")
                self._changed.notify_all()


class Member(TimedGroup):
    """One rank of a world of threads, as the driver of its exchanges."""

    # What ranks hand to one another is in order because all of them use one stream.
    beside = False

    def __init__(self, world: _World, rank: int) -> None:
        # No process group of torch's, hence no super().__init__.
        self.group, self._world, self.rank, self.size = None, world, rank, world.size

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    def global_rank(self, rank: int) -> int:
        return rank

    def _meet(self, value: Any, answer: Callable[[list[Any]], Sequence[Any]]) -> Any:
        begin = time.perf_counter()
        try:
            return self._world.meet(self.rank, value, answer)
        finally:
            self.waited += time.perf_counter() - begin

    def launch(self, request: Collective) -> tuple[Any, Tensor]:
        # The bytes are counted by whoever launches.
        arrived = self._meet(request, lambda all_: virtual.deliver(all_, [0] * self.size, [0] * self.size))
        return _DONE, arrived

    def all_reduce(self, x: Tensor) -> None:
        x.copy_(self._meet(x, lambda xs: [sum(xs[1:], xs[0].clone())] * self.size))

    def barrier(self) -> None:
        self._meet(None, lambda given: given)

    def broadcast(self, x: Tensor) -> None:
        first = self._meet(x, lambda xs: [xs[0].clone()] * self.size)
        if self.rank:
            x.copy_(first)

    def share(self, value: Any) -> Any:
        """The object that rank 0 passed: the same one on every rank, not a copy."""
        return self._meet(value, lambda values: [values[0]] * self.size)


class _Done:
    def wait(self) -> None:
        """Nothing: the bytes are there."""


_DONE = _Done()


def run(size: int, work: Callable[[Member], T], at_once: int = 1) -> list[T]:
    """``work(member)`` on every rank of ``size``; their results, or the failure of the rank that failed first.

    >>> def mean(member):
    ...     x = torch.full((3,), float(member.rank))
    ...     member.all_reduce(x)
    ...     return x.tolist()
    >>> run(4, mean)[2]
    [6.0, 6.0, 6.0]
    """
    require(size >= 1 and at_once >= 1, f"there is at least one worker, and one runs at a time: got {size} and {at_once}")
    world, results = _World(size, at_once), dict[int, T]()

    def rank_runs(rank: int) -> None:
        with world.slots:
            try:
                if world.failure is None:
                    results[rank] = work(Member(world, rank))
                    world.end(rank)
            except _Abandoned:
                pass
            except BaseException as failure:
                world.fail(failure)

    threads = [threading.Thread(target=rank_runs, args=(rank,), name=f"rank {rank}", daemon=True) for rank in range(size)]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    except BaseException as interrupted:
        world.fail(interrupted)
        raise
    if world.failure is not None:
        raise world.failure
    return [results[rank] for rank in range(size)]

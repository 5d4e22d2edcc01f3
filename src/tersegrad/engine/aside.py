"""Exchanges beside the backward pass: a thread that codes on a stream of its own.

Where only the device knows how long a message is, its host waits for it. In the thread of the backward pass that would leave a GPU without
work after every message. Here another thread waits, and the coder's kernels, which fill a small part of a GPU, run beside those of
the backward pass. Jobs run one after another in the order of their coming, so the order of collectives is the same on every rank.
"""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable

import torch


class Aside:
    """One thread, and one stream where ``device`` has streams. What jobs make may be used after :meth:`join`.

    >>> aside, seen = Aside(torch.device("cpu")), []
    >>> aside.do(lambda: seen.append(1))
    >>> aside.do(lambda: seen.append(2))
    >>> aside.join()
    >>> seen
    [1, 2]
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # Blocks of the coder start before those of the backward pass that wait: bytes should be on their way.
        self._stream = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None
        self._pool = concurrent.futures.ThreadPoolExecutor(1, "tersegrad", _begin, (self._stream,))
        self._failure: BaseException | None = None
        self._last: concurrent.futures.Future[None] | None = None
        # With what they use: its memory belongs to the stream of whoever called.
        self._jobs: list[Callable[[], object]] = []

    def do(self, job: Callable[[], object]) -> None:
        """Run ``job`` after the jobs before it, and after what the caller's stream does now; not at all if one of them failed."""
        event = None if self._stream is None else torch.cuda.current_stream(self._device).record_event()
        self._jobs.append(job)
        self._last = self._pool.submit(self._run, job, event)

    def _run(self, job: Callable[[], object], event: torch.cuda.Event | None) -> None:
        if self._failure is not None:
            return
        try:
            if self._stream is not None and event is not None:
                self._stream.wait_event(event)
            job()
        except BaseException as failure:
            self._failure = failure

    def join(self) -> None:
        """Wait for all jobs; the caller's stream goes on after theirs. Raises what the first that failed has raised."""
        failure = self.drain()
        if failure is not None:
            raise failure

    def drain(self) -> BaseException | None:
        """Wait for all jobs, whatever became of them."""
        if self._last is not None:
            self._last.result()
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)
        failure, self._failure = self._failure, None
        self._last, self._jobs = None, []
        return failure


def _begin(stream: torch.cuda.Stream | None) -> None:
    """What holds in the thread for good. It holds no Aside: that of a handle nobody uses any more ends, and its thread with it."""
    torch.set_grad_enabled(False)
    if stream is not None:
        torch.cuda.set_device(stream.device)
        torch.cuda.set_stream(stream)

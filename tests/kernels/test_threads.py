"""Threads of the native kernels: as many as torch says, kept between calls, safe to share, to fork and to leave."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest
import torch

from tersegrad.kernels import native
from tersegrad.kernels.native.module import module

X = torch.randn(1 << 20, generator=torch.Generator().manual_seed(0))
WORK = """
import torch
from tersegrad.kernels import native
from tersegrad.kernels.native.module import module
x = torch.randn(1 << 20, generator=torch.Generator().manual_seed(0))
"""


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def in_python(code: str, **environment: str) -> str:
    """What a fresh interpreter prints; it must end well."""
    done = subprocess.run(
        [sys.executable, "-c", WORK + code], capture_output=True, text=True, timeout=120, env={**os.environ, **environment}
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def message() -> bytes:
    """Bytes and coordinates that several threads work on together, in phases and in parts."""
    out = torch.empty(native.dither_max_bytes(X.numel()), dtype=torch.uint8)
    nbytes = int(native.dither_encode(X, 0.1, 0.0, 0, 16, None, out)[0])
    indices, values, _ = native.select_top_k(X, 10_000)
    return out[:nbytes].numpy().tobytes() + indices.numpy().tobytes() + values.numpy().tobytes()


def test_one_thread_for_a_worker_of_torchrun() -> None:
    code = "native.select_top_k(x, 1000); native.all_finite(x); print(native.threads(), module.kept_threads())"
    assert in_python(code, OMP_NUM_THREADS="1") == "1 0\n"


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core")
def test_follows_torch_from_call_to_call() -> None:
    torch.set_num_threads(1)
    assert native.threads() == 1
    torch.set_num_threads(2)
    assert native.threads() == 2
    native.all_finite(X)
    assert module.kept_threads() >= 1
    torch.set_num_threads(1)
    assert native.threads() == 1


def test_never_more_than_the_cores() -> None:
    torch.set_num_threads(64)
    assert native.threads() == len(os.sched_getaffinity(0))
    with native.using(threads=3):
        assert native.threads() == 3
    assert native.threads() == len(os.sched_getaffinity(0))


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core")
def test_follows_torch_in_other_threads() -> None:
    seen: list[tuple[int, int]] = []

    def look(wanted: int | None) -> None:
        if wanted is not None:
            torch.set_num_threads(wanted)
        seen.append((native.threads(), torch.get_num_threads()))

    for wanted in (None, 1, 2):
        thread = threading.Thread(target=look, args=(wanted,))
        thread.start()
        thread.join()
    assert all(ours == torchs for ours, torchs in seen), seen
    assert [ours for ours, _ in seen[1:]] == [1, 2]


def test_threads_are_kept_not_started_again() -> None:
    code = """
import os
with native.using(threads=4):
    native.all_finite(x.repeat(4))
    before = set(os.listdir("/proc/self/task"))
    for _ in range(50):
        native.all_finite(x.repeat(4)); native.select_top_k(x.repeat(4), 1000)
    print(module.kept_threads(), set(os.listdir("/proc/self/task")) == before)
"""
    assert in_python(code, OMP_NUM_THREADS="1") == "3 True\n"


def test_callers_at_the_same_time() -> None:
    with native.using(threads=1):
        expected = message()
    wrong: list[int] = []

    def call(number: int) -> None:
        for _ in range(5):
            if message() != expected:
                wrong.append(number)

    with native.using(threads=3):
        callers = [threading.Thread(target=call, args=(number,)) for number in range(4)]
        for caller in callers:
            caller.start()
        for caller in callers:
            caller.join(60)
            assert not caller.is_alive()
    assert not wrong


def test_children_start_their_own_threads() -> None:
    code = """
import hashlib, os, signal, threading

def message():
    out = torch.empty(native.dither_max_bytes(x.numel()), dtype=torch.uint8)
    n = int(native.dither_encode(x, 0.1, 0.0, 0, 16, None, out)[0])
    indices, values, _ = native.select_top_k(x, 10_000)
    return hashlib.sha256(out[:n].numpy().tobytes() + indices.numpy().tobytes() + values.numpy().tobytes()).digest()

module.set_threads(3)
expected = message()
stop = threading.Event()

def busy():
    while not stop.is_set():
        message()

other = threading.Thread(target=busy)
other.start()
for _ in range(5):
    child = os.fork()
    if child == 0:
        signal.alarm(30)
        good = module.kept_threads() == 0 and message() == expected and module.kept_threads() == 2
        os._exit(0 if good else 3)
    assert os.waitpid(child, 0)[1] == 0
stop.set()
other.join()
assert message() == expected
print("good")
"""
    assert in_python(code, OMP_NUM_THREADS="1") == "good\n"


def test_leaving_while_threads_wait_or_work() -> None:
    code = """
import threading
module.set_threads(3)

def busy():
    while True:
        module.all_finite(array); module.select_top_k(array, 1000, indices, values)

array, indices, values = x.numpy(), torch.zeros(1000, dtype=torch.int32).numpy(), torch.zeros(1000).numpy()
for _ in range(2):
    threading.Thread(target=busy, daemon=True).start()
for _ in range(10):
    module.all_finite(array)
print("good")
"""
    for _ in range(2):
        assert in_python(code, OMP_NUM_THREADS="1") == "good\n"


def test_forced_threads_are_checked() -> None:
    for bad in (-1, 1025):
        with pytest.raises(ValueError, match="threads"):
            module.set_threads(bad)
    with pytest.raises(ValueError, match="at least one"), native.using(threads=0):
        pass

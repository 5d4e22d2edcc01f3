"""Threads of the native kernels: as many as torch says, kept between calls, safe to share, to fork and to leave."""

from __future__ import annotations

import json
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


ONE_THREAD = "native.select_top_k(x, 1000); native.all_finite(x); print(native.threads(), module.kept_threads())"
KEPT = """
import os
with native.using(threads=4):
    x = x.repeat(4)
    native.all_finite(x)
    before = set(os.listdir("/proc/self/task"))
    for _ in range(50):
        native.all_finite(x); native.select_top_k(x, 1000)
    print(module.kept_threads(), set(os.listdir("/proc/self/task")) == before)
"""
FORKED = """
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
LEFT = """
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
# Runs each script of the input in a fork of its own, which ends as an interpreter ends.
FORKS = (
    WORK
    + """
import json, os, sys, tempfile
answers = {}
for name, code in json.load(sys.stdin).items():
    with tempfile.TemporaryFile() as said:
        child = os.fork()
        if child == 0:
            os.dup2(said.fileno(), 1)
            break
        answers[name] = [os.waitpid(child, 0)[1]]
        said.seek(0)
        answers[name].append(said.read().decode())
else:
    code = "print(json.dumps(answers))"
exec(code)
"""
)
SCRIPTS = {
    "one thread": ONE_THREAD,
    "kept": KEPT,
    "forked": FORKED,
    "left": LEFT,
    "left again": LEFT,
}


@pytest.fixture(scope="module")
def said() -> dict[str, str]:
    """What each of the scripts prints with one thread of torch; all must end well."""
    done = subprocess.run(
        [sys.executable, "-c", FORKS],
        input=json.dumps(SCRIPTS),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    answers = json.loads(done.stdout)
    assert all(status == 0 for status, _ in answers.values()), (answers, done.stderr)
    return {name: text for name, (_, text) in answers.items()}


def message() -> bytes:
    """Bytes and coordinates that several threads work on together, in phases and in parts."""
    out = torch.empty(native.dither_max_bytes(X.numel()), dtype=torch.uint8)
    nbytes = int(native.dither_encode(X, 0.1, 0.0, 0, 16, None, out)[0])
    indices, values, _ = native.select_top_k(X, 10_000)
    return out[:nbytes].numpy().tobytes() + indices.numpy().tobytes() + values.numpy().tobytes()


def test_one_thread_for_a_worker_of_torchrun(said: dict[str, str]) -> None:
    assert said["one thread"] == "1 0\n"


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


def test_threads_are_kept_not_started_again(said: dict[str, str]) -> None:
    assert said["kept"] == "3 True\n"


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


def test_children_start_their_own_threads(said: dict[str, str]) -> None:
    assert said["forked"] == "good\n"


def test_leaving_while_threads_wait_or_work(said: dict[str, str]) -> None:
    assert said["left"] == said["left again"] == "good\n"


def test_forced_threads_are_checked() -> None:
    for bad in (-1, 1025):
        with pytest.raises(ValueError, match="threads"):
            module.set_threads(bad)
    with pytest.raises(ValueError, match="at least one"), native.using(threads=0):
        pass

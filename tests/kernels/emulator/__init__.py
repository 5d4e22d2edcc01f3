"""The CUDA sources on the CPU: compiled by the C++ compiler against a header that emulates a grid of threads."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import os
import pathlib
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator

from tersegrad.kernels.cuda import graphs, loader, replay

# Bytes of shared memory that a launch may ask for, as in the header.
SHARED = 227 << 10
HEADER = pathlib.Path(__file__).parent / "cuda_on_cpu.hpp"


def compiler() -> str | None:
    """The C++ compiler, if there is one."""
    return shutil.which(os.environ.get("CXX", "c++"))


@functools.cache
def library(name: str) -> ctypes.CDLL:
    """A source as a library with one function per kernel, compiled once for each of its versions."""
    source = loader.source(name)
    kernels = re.findall(r'extern "C" __global__ void(?: __launch_bounds__\([^)]*\))? (\w+)\(', source)
    runs = "\n".join(
        f'extern "C" void run_{k}(unsigned grid, unsigned threads, void** p) {{'
        f" emulator::run([](void** q) {{ emulator::call({k}, q); }}, grid, threads, p); }}"
        for k in kernels
    )
    text = f"{HEADER.read_text()}\n{source}\n{runs}\n"
    folder = pathlib.Path(tempfile.gettempdir()) / f"tersegrad-emulator-{os.getuid()}"
    folder.mkdir(exist_ok=True, mode=0o700)
    stem = folder / hashlib.sha256(text.encode()).hexdigest()[:24]
    made = stem.with_suffix(".so")
    if not made.exists():
        written = folder / f"{stem.name}-{os.getpid()}.cpp"
        written.write_text(text)
        partial = written.with_suffix(".so")
        command = [compiler() or "c++", "-std=c++20", "-O1", "-fPIC", "-shared", "-ffp-contract=off", "-w"]
        subprocess.run([*command, "-fwrapv", str(written), "-o", str(partial)], check=True, timeout=240)
        os.replace(partial, made)
    return ctypes.CDLL(str(made))


def _launch(name: str, kernel: str, blocks: int, threads: int, arguments: tuple[loader.Argument, ...], shared: int) -> None:
    assert shared <= SHARED
    held = ctypes.create_string_buffer(4096)
    _run(name, kernel, blocks, threads, held, loader.packed(arguments, held).offsets)


def _run(
    name: str, kernel: str, blocks: int, threads: int, parameters: ctypes.Array[ctypes.c_char], at: tuple[int, ...]
) -> None:
    pointers = (ctypes.c_void_p * len(at))(*(ctypes.addressof(parameters) + offset for offset in at))
    getattr(library(name), f"run_{kernel}")(ctypes.c_uint(blocks), ctypes.c_uint(threads), pointers)


class Emulated:
    """A graph in the emulation: it has copies of parameters, as the driver has, and runs nothing but the launches that it is made of.

    Of launches that may run side by side the last one comes first.
    """

    def __init__(self, device: int, launches: list[graphs.Launched]) -> None:
        self._launches, self._copies = launches, [launched.parameters.raw for launched in launches]

    def update(self, number: int) -> None:
        self._copies[number] = self._launches[number].parameters.raw

    def run(self, stream: int) -> None:
        left = set(range(len(self._launches)))
        while left:
            number = max(k for k in left if left.isdisjoint(self._launches[k].after))
            left.remove(number)
            launched, copy = self._launches[number], self._copies[number]
            held = ctypes.create_string_buffer(copy, len(copy))
            _run(launched.name, launched.kernel, launched.blocks, launched.threads, held, launched.layout.offsets)


@contextlib.contextmanager
def emulated() -> Iterator[None]:
    """Launch CUDA kernels on the CPU, on CPU tensors, inside the block."""
    before = loader.launcher, loader.room_of
    loader.launcher, loader.room_of = _launch, lambda index: loader.Room(2, SHARED)
    try:
        yield
    finally:
        loader.launcher, loader.room_of = before


@contextlib.contextmanager
def replaying() -> Iterator[None]:
    """The same, and launches are replayed by graphs of the emulation."""
    before = replay.kinds, replay.maker
    replay.kinds, replay.maker = frozenset({"cpu"}), Emulated
    replay.clear()
    try:
        with emulated():
            yield
    finally:
        replay.clear()
        replay.kinds, replay.maker = before

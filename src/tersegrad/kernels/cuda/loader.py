"""CUDA C++ sources to kernels that can be launched: compiled at first use, cached on disk, launched through the driver.

A cached cubin is named by a hash of its source, its architecture and NVRTC's version and options, and begins with a hash of itself: one
that was damaged, or cut short, is compiled again. Nothing of this needs ``nvcc``. Kernels run on torch's current stream.

All integer parameters of kernels are 64-bit, all real ones float32 (or :class:`Double`), and tensors are pointers. Numbers that differ from
call to call are :class:`Varying`.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import hashlib
import os
import pathlib
import re
import struct
import tempfile
import threading
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from tersegrad.core import private
from tersegrad.kernels.cuda import nvrtc

SOURCES = pathlib.Path(__file__).parent / "sources"


class Double(float):
    """A number that a kernel takes as float64."""


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class Varying:
    """An integer that differs from call to call, such as a step's number: no key of ``replay.py`` has it, kernels get it as it is."""

    value: int | float


class VaryingFloat(Varying):
    """The same, a float32."""


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class Bytes:
    """A message whose length differs from call to call."""

    data: Tensor

    def data_ptr(self) -> int:
        return self.data.data_ptr()

    def numel(self) -> int:
        return self.data.numel()


Argument = Tensor | Bytes | int | float | Varying
# Source, kernel, blocks, threads, arguments, and bytes of shared memory beside what the kernel declares.
Launcher = Callable[[str, str, int, int, tuple[Argument, ...], int], None]


@functools.cache
def source(name: str) -> str:
    """A source, with the headers beside it in place of their includes, each once."""
    seen: set[str] = set()

    def text(file: str) -> str:
        if file in seen:
            return ""
        seen.add(file)
        return re.sub(r'^#include "([^"]+)"$', lambda m: text(m[1]), (SOURCES / file).read_text(), flags=re.MULTILINE)

    return text(name)


def names() -> list[str]:
    """All sources."""
    return sorted(p.name for p in SOURCES.glob("*.cu"))


# Compiled sources, on disk


def cache_folder() -> pathlib.Path:
    """Where compiled kernels are kept."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return pathlib.Path(base) / "tersegrad" / "cuda"


def cubin(name: str, architecture: str) -> bytes:
    """The compiled source, from the cache if it is there and whole."""
    key = "\0".join((source(name), architecture, repr(nvrtc.version()), *nvrtc.OPTIONS))
    path = cache_folder() / f"{name}-{architecture}-{hashlib.sha256(key.encode()).hexdigest()[:32]}.cubin"
    with contextlib.suppress(OSError):
        kept = path.read_bytes()
        if hashlib.sha256(kept[32:]).digest() == kept[:32]:
            return kept[32:]
    made = nvrtc.compile_source(source(name), name, architecture)
    # A cache that cannot be written to costs time at the next start, nothing else.
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            file.write(hashlib.sha256(made).digest() + made)
        os.replace(file.name, path)
    return made


# The driver


class DriverError(RuntimeError):
    """What CUDA's driver refused."""


@functools.cache
def _driver() -> ctypes.CDLL | str:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        return f"CUDA's driver is not there ({error})"


def why_missing() -> str | None:
    """Why these kernels cannot run here, or nothing."""
    if not torch.cuda.is_available():
        return "torch sees no CUDA device"
    driver = _driver()
    return driver if isinstance(driver, str) else nvrtc.why_missing()


def entry(*names: str) -> Any:
    """A function of the driver: the first of these that it has."""
    driver = _driver()
    if isinstance(driver, str):
        raise DriverError(driver)
    found = next((function for name in names if (function := getattr(driver, name, None)) is not None), None)
    if found is None:
        raise DriverError(f"CUDA's driver has no {names[-1]}")
    return found


def call(function: str, *arguments: Any) -> None:
    """Call the driver."""
    code = entry(function)(*arguments)
    if code:
        raise DriverError(f"{function}: {told(code)}")


def told(code: int) -> str:
    """The driver's words for an error."""
    text, driver = ctypes.c_char_p(), _driver()
    if not isinstance(driver, str):
        driver.cuGetErrorString(code, ctypes.byref(text))
    return (text.value or b"unknown error").decode()


@functools.cache
def _module(name: str, device: int) -> ctypes.c_void_p:
    major, minor = torch.cuda.get_device_capability(device)
    module = ctypes.c_void_p()
    call("cuModuleLoadData", ctypes.byref(module), cubin(name, f"sm_{major}{minor}"))
    return module


@functools.cache
def function_of(name: str, kernel: str, device: int, shared: int = 0) -> int:
    """The driver's handle of a kernel, which may take so much shared memory."""
    function = ctypes.c_void_p()
    call("cuModuleGetFunction", ctypes.byref(function), _module(name, device), kernel.encode())
    if shared:
        # As much as there may ever be: launches differ in it.
        most = _told_of(device, _SHARED_OF_BLOCK) - _declared(function)
        call("cuFuncSetAttribute", function, _MOST_SHARED, ctypes.c_int(most))
    return function.value or 0


# The driver's numbers of what it tells of a device: its processors, the shared memory of a processor, that of a block, and what it takes
# from each block; and of a kernel: the shared memory that it declares, and the most that a launch adds to it.
_PROCESSORS, _SHARED_OF_PROCESSOR, _SHARED_OF_BLOCK, _TAKEN = 16, 81, 97, 111
_DECLARED, _MOST_SHARED = 1, 8


@functools.cache
def _told_of(device: int, attribute: int) -> int:
    size = ctypes.c_int()
    call("cuDeviceGetAttribute", ctypes.byref(size), attribute, ctypes.c_int(device))
    return size.value


def _declared(function: ctypes.c_void_p) -> int:
    size = ctypes.c_int()
    call("cuFuncGetAttribute", ctypes.byref(size), _DECLARED, function)
    return size.value


@functools.cache
def _spread(name: str, kernel: str, blocks: int, device: int) -> int:
    """Bytes of shared memory with which no processor has room for more than its share of the blocks."""
    share = -(-blocks // _told_of(device, _PROCESSORS))
    declared = _declared(ctypes.c_void_p(function_of(name, kernel, device)))
    left = _told_of(device, _SHARED_OF_PROCESSOR) // share - _told_of(device, _TAKEN) - declared
    return max(0, min(left, _told_of(device, _SHARED_OF_BLOCK) - declared)) // 16 * 16


class Room(NamedTuple):
    """How many processors a device has, and bytes of shared memory that a block may have on one."""

    processors: int
    shared: int


def _room_on_gpu(index: int) -> Room:
    return Room(_told_of(index, _PROCESSORS), _told_of(index, _SHARED_OF_BLOCK))


# What :func:`room` goes through; tests put that of the emulation in its place.
room_of: Callable[[int], Room] = _room_on_gpu


def room(device: torch.device) -> Room:
    """That of a device."""
    return room_of(current_device() if device.index is None and device.type == "cuda" else device.index or 0)


_KINDS: dict[type, str] = {int: "q", bool: "q", float: "f", Double: "d", Varying: "q", VaryingFloat: "f"}


@dataclasses.dataclass(frozen=True, slots=True)
class Layout:
    """How parameters of some types lie in memory."""

    packer: struct.Struct
    kinds: str
    # Which of them are addresses, and which are varying numbers.
    pointers: tuple[int, ...]
    varying: tuple[int, ...]
    # Each begins at a multiple of its size.
    offsets: tuple[int, ...]


_layouts: dict[tuple[type, ...], Layout] = {}


def layout_of(arguments: tuple[Argument, ...]) -> Layout:
    """That of the parameters of a kernel."""
    types = tuple(map(type, arguments))
    layout = _layouts.get(types)
    if layout is None:
        kinds = "".join([_KINDS.get(t, "P") for t in types])
        layout = _layouts[types] = Layout(
            struct.Struct(kinds),
            kinds,
            tuple(i for i, kind in enumerate(kinds) if kind == "P"),
            tuple(i for i, t in enumerate(types) if issubclass(t, Varying)),
            tuple(struct.calcsize(f"{kinds[:i]}0{kind}") for i, kind in enumerate(kinds)),
        )
    return layout


def packed(arguments: tuple[Argument, ...], into: Any) -> Layout:
    """Put the parameters of a kernel into memory as it takes them."""
    layout = layout_of(arguments)
    values: list[Any] = list(arguments)
    for i in layout.pointers:
        values[i] = values[i].data_ptr()
    for i in layout.varying:
        values[i] = values[i].value
    layout.packer.pack_into(into, 0, *values)
    return layout


# The driver's words for a launch with all parameters in one piece of memory.
_POINTER, _SIZE = 1, 2


class _Launching(threading.local):
    """A thread's memory for the parameters of a launch, which the driver copies; the device that it used; who is told of launches."""

    def __init__(self) -> None:
        self.device = -1
        self.recorder: Recorder | None = None
        self.parameters = ctypes.create_string_buffer(4096)
        self.size = ctypes.c_size_t()
        places = (_POINTER, ctypes.addressof(self.parameters), _SIZE, ctypes.addressof(self.size), None)
        self.held = (ctypes.c_void_p * 5)(*places)
        self.extra = ctypes.addressof(self.held)


class Recorder(Protocol):
    """Who keeps launches to run them again, and the memory between them (``replay.py``)."""

    def add(self, name: str, kernel: str, blocks: int, threads: int, arguments: tuple[Argument, ...], shared: int) -> None: ...

    def take(self, words: int, device: torch.device) -> Tensor:
        """So many int64, which others use once the launches are over."""
        ...

    def aside(self) -> contextlib.AbstractContextManager[None]:
        """What is launched meanwhile runs beside what is launched afterwards, until they are joined."""
        ...

    def join(self) -> None: ...


thread = _Launching()


@functools.cache
def _launches() -> Callable[..., int]:
    """The driver's launch, told the types of what it takes, so that a call converts nothing."""
    pointer, number = ctypes.c_void_p, ctypes.c_uint
    function = entry("cuLaunchKernel")
    function.argtypes = [pointer, *[number] * 7, pointer, pointer, pointer]
    return function  # type: ignore[no-any-return]


def _on_gpu(name: str, kernel: str, blocks: int, threads: int, arguments: tuple[Argument, ...], shared: int) -> None:
    mine = thread
    # Where all are addresses of memory that a launch before has used, this one runs where that did; a thread's first, where the thread is.
    index = mine.device if mine.device >= 0 else current_device()
    for value in arguments:
        if isinstance(value, Tensor):
            index = value.get_device()
            break
    if index != current_device():
        with torch.cuda.device(index):
            return _on_gpu(name, kernel, blocks, threads, arguments, shared)
    use_device(index)
    mine.size.value = packed(arguments, mine.parameters).packer.size
    function = function_of(name, kernel, index, shared)
    code = _launches()(function, blocks, 1, 1, threads, 1, 1, shared, stream_of(index), None, mine.extra)
    if code:
        raise DriverError(f"{kernel}: {told(code)}")


def use_device(index: int) -> None:
    """The driver knows no context in a thread that has not used torch's device yet."""
    if thread.device != index:
        torch.cuda.set_device(index)
        thread.device = index


current_device, stream_of = private.current_device, private.current_stream


# What :func:`launch` goes through; tests put an emulation on the CPU in its place.
launcher: Launcher = _on_gpu


def launch(
    name: str, kernel: str, blocks: int, threads: int, *arguments: Argument, shared: int = 0, spread: bool = False
) -> None:
    """Run a kernel of a source on the current stream; nothing where there are no blocks.

    ``shared``: bytes of shared memory beside what it declares. ``spread``: few blocks that run for long are divided evenly among the
    processors, even where some of these are still busy with something else when they begin.
    """
    if blocks > 0:
        if spread and launcher is _on_gpu:
            shared = _spread(name, kernel, blocks, current_device())
        launcher(name, kernel, blocks, threads, arguments, shared)
        if thread.recorder is not None:
            thread.recorder.add(name, kernel, blocks, threads, arguments, shared)


def aside() -> contextlib.AbstractContextManager[None]:
    """What is launched inside needs nothing of what is launched after it, nor the other way round, until :func:`join`.

    Where launches are replayed the two run side by side; otherwise all run one after another.
    """
    return contextlib.nullcontext() if thread.recorder is None else thread.recorder.aside()


def join() -> None:
    """What is launched from here on may need all that was launched aside, within the same :func:`aside` where this is inside of one."""
    if thread.recorder is not None:
        thread.recorder.join()


def scan(name: str, sums: Tensor | int, rows: int, n: int) -> None:
    """Sums become places (``scan.cuh``, which the source includes): each of ``rows`` has ``n - 1`` and room for the total behind them."""
    # As many warps as have eight sums for each of their threads, up to a whole block.
    launch(name, "scan_rows", rows, min(1024, 32 * -(-n // 256)), sums, n - 1)


# Of up to so many blocks, each adds up what it needs of their sums (``Place`` in ``scan.cuh``).
SUMMED = 2048


def placed(name: str, sums: Tensor | int, rows: int, blocks: int) -> int:
    """:func:`scan` for the sums of many blocks; whether there were so many."""
    if blocks > SUMMED:
        scan(name, sums, rows, blocks + 1)
    return int(blocks > SUMMED)

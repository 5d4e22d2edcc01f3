"""CUDA C++ sources to kernels that can be launched: compiled at first use, cached on disk, launched through the driver.

A cached cubin is named by a hash of its source, its architecture and NVRTC's version and options, and begins with a hash of itself: one
that was damaged, or cut short, is compiled again. Nothing of this needs ``nvcc``. Kernels run on torch's current stream.

All integer parameters of kernels are 64-bit, all real ones float32 (or :class:`Double`), and tensors are pointers.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import os
import pathlib
import re
import struct
import tempfile
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tersegrad.core import private
from tersegrad.kernels.cuda import nvrtc

SOURCES = pathlib.Path(__file__).parent / "sources"
Argument = Tensor | int | float


class Double(float):
    """A number that a kernel takes as float64."""


Launcher = Callable[[str, str, int, int, tuple[Argument, ...]], None]


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


def _call(function: str, *arguments: Any) -> None:
    driver = _driver()
    if isinstance(driver, str):
        raise DriverError(driver)
    code = getattr(driver, function)(*arguments)
    if code:
        raise DriverError(f"{function}: {_told(code)}")


def _told(code: int) -> str:
    """The driver's words for an error."""
    text, driver = ctypes.c_char_p(), _driver()
    if not isinstance(driver, str):
        driver.cuGetErrorString(code, ctypes.byref(text))
    return (text.value or b"unknown error").decode()


@functools.cache
def _module(name: str, device: int) -> ctypes.c_void_p:
    major, minor = torch.cuda.get_device_capability(device)
    module = ctypes.c_void_p()
    _call("cuModuleLoadData", ctypes.byref(module), cubin(name, f"sm_{major}{minor}"))
    return module


@functools.cache
def _function(name: str, kernel: str, device: int) -> int:
    function = ctypes.c_void_p()
    _call("cuModuleGetFunction", ctypes.byref(function), _module(name, device), kernel.encode())
    return function.value or 0


_KINDS: dict[type, str] = {int: "q", bool: "q", float: "f", Double: "d"}
_Layout = tuple[struct.Struct, tuple[int, ...], str]
# By the types of parameters: how they lie in memory, which of them are tensors, and their kinds.
_layouts: dict[tuple[type, ...], _Layout] = {}


def _laid_out(types: tuple[type, ...]) -> _Layout:
    kinds = "".join([_KINDS.get(t, "P") for t in types])
    return struct.Struct(kinds), tuple(i for i, kind in enumerate(kinds) if kind == "P"), kinds


def packed(arguments: tuple[Argument, ...], into: Any) -> tuple[str, int]:
    """Put the parameters of a kernel into memory as it takes them; their kinds in the terms of :mod:`struct`, and their bytes."""
    types = tuple(map(type, arguments))
    layout = _layouts.get(types)
    if layout is None:
        layout = _layouts[types] = _laid_out(types)
    packer, tensors, kinds = layout
    values: list[Any] = list(arguments)
    for i in tensors:
        values[i] = values[i].data_ptr()
    packer.pack_into(into, 0, *values)
    return kinds, packer.size


# The driver's words for a launch with all parameters in one piece of memory.
_POINTER, _SIZE = 1, 2


class _Launching(threading.local):
    """A thread's memory for the parameters of a launch, which the driver copies, and the device that it has used."""

    def __init__(self) -> None:
        self.device = -1
        self.parameters = ctypes.create_string_buffer(4096)
        self.size = ctypes.c_size_t()
        places = (_POINTER, ctypes.addressof(self.parameters), _SIZE, ctypes.addressof(self.size), None)
        self.held = (ctypes.c_void_p * 5)(*places)
        self.extra = ctypes.addressof(self.held)


_thread = _Launching()


@functools.cache
def _launches() -> Callable[..., int]:
    """The driver's launch, told the types of what it takes, so that a call converts nothing."""
    driver = _driver()
    if isinstance(driver, str):
        raise DriverError(driver)
    pointer, number = ctypes.c_void_p, ctypes.c_uint
    function: Any = driver.cuLaunchKernel
    function.argtypes = [pointer, *[number] * 7, pointer, pointer, pointer]
    return function  # type: ignore[no-any-return]


def _on_gpu(name: str, kernel: str, blocks: int, threads: int, arguments: tuple[Argument, ...]) -> None:
    mine = _thread
    # Where all are addresses of memory that a launch before has used, this one runs where that did.
    index = mine.device
    for value in arguments:
        if isinstance(value, Tensor):
            index = value.get_device()
            break
    if index != _current_device():
        with torch.cuda.device(index):
            return _on_gpu(name, kernel, blocks, threads, arguments)
    if mine.device != index:
        # The driver knows no context in a thread that has not used torch's device yet.
        torch.cuda.set_device(index)
        mine.device = index
    mine.size.value = packed(arguments, mine.parameters)[1]
    function = _function(name, kernel, index)
    code = _launches()(function, blocks, 1, 1, threads, 1, 1, 0, _stream(index), None, mine.extra)
    if code:
        raise DriverError(f"{kernel}: {_told(code)}")


# The ways that torch and Triton themselves go to these numbers take a tenth of the time of the public ones.
_current_device: Callable[[], int] = private.fast("_cuda_getDevice", torch.cuda.current_device)
_stream: Callable[[int], int] = private.fast(
    "_cuda_getCurrentRawStream", lambda index: torch.cuda.current_stream(index).cuda_stream
)


# What :func:`launch` goes through; tests put an emulation on the CPU in its place.
launcher: Launcher = _on_gpu


def launch(name: str, kernel: str, blocks: int, threads: int, *arguments: Argument) -> None:
    """Run a kernel of a source on the current stream; nothing where there are no blocks."""
    if blocks > 0:
        launcher(name, kernel, blocks, threads, arguments)


def scan(name: str, sums: Tensor | int, rows: int, n: int) -> None:
    """Sums become places (``scan.cuh``, which the source includes): each of ``rows`` has ``n - 1`` and room for the total behind them."""
    # As many warps as have eight sums for each of their threads, up to a whole block.
    launch(name, "scan_rows", rows, min(1024, 32 * -(-n // 256)), sums, n - 1)

"""NVRTC, which compiles CUDA C++ without a toolkit: torch's CUDA wheels bring it. Reached through ctypes."""

from __future__ import annotations

import ctypes
import ctypes.util
import functools
import pathlib
import sys


class CompileError(RuntimeError):
    """A source that does not compile; the compiler's log is its message."""


OPTIONS = ("--std=c++17", "--fmad=false", "--device-as-default-execution-space")


def _candidates() -> list[str]:
    """Where the library may lie, the newest first."""
    found: list[pathlib.Path] = []
    for folder in sys.path:
        base = pathlib.Path(folder or ".") / "nvidia"
        found += [p for p in base.glob("*/lib/libnvrtc.so.*") if "builtins" not in p.name and "alt" not in p.name]
    newest = sorted(
        found, key=lambda p: int(p.name.rpartition(".")[2]) if p.name.rpartition(".")[2].isdigit() else 0, reverse=True
    )
    known = [str(p) for p in newest]
    system = ctypes.util.find_library("nvrtc")
    return known + ([system] if system else []) + ["libnvrtc.so"]


@functools.cache
def _library() -> ctypes.CDLL | str:
    """The library, or why there is none."""
    reasons = []
    for name in _candidates():
        try:
            return ctypes.CDLL(name)
        except OSError as error:
            reasons.append(str(error))
    return f"NVRTC is not installed ({reasons[0]}); torch's CUDA wheels bring it, and so does `pip install nvidia-cuda-nvrtc`"


def why_missing() -> str | None:
    """Why sources cannot be compiled here, or nothing."""
    library = _library()
    return library if isinstance(library, str) else None


def _loaded() -> ctypes.CDLL:
    library = _library()
    if isinstance(library, str):
        raise CompileError(library)
    return library


def version() -> tuple[int, int]:
    """The version of the library."""
    major, minor = ctypes.c_int(), ctypes.c_int()
    _check(_loaded().nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)))
    return major.value, minor.value


def _check(code: int) -> None:
    if code:
        text = _loaded().nvrtcGetErrorString
        text.restype = ctypes.c_char_p
        raise CompileError(f"NVRTC says: {(text(code) or b'error').decode()}")


def compile_source(source: str, name: str, architecture: str) -> bytes:
    """The cubin of a source for an architecture such as ``sm_90``; :class:`CompileError` with the compiler's log."""
    library, program = _loaded(), ctypes.c_void_p()
    _check(library.nvrtcCreateProgram(ctypes.byref(program), source.encode(), name.encode(), 0, None, None))
    try:
        options = [option.encode() for option in (f"--gpu-architecture={architecture}", *OPTIONS)]
        code = library.nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(*options))
        if code:
            size = ctypes.c_size_t()
            _check(library.nvrtcGetProgramLogSize(program, ctypes.byref(size)))
            log = ctypes.create_string_buffer(size.value)
            _check(library.nvrtcGetProgramLog(program, log))
            raise CompileError(f"{name} does not compile for {architecture}:\n{log.value.decode(errors='replace')}")
        size = ctypes.c_size_t()
        _check(library.nvrtcGetCUBINSize(program, ctypes.byref(size)))
        cubin = ctypes.create_string_buffer(size.value)
        _check(library.nvrtcGetCUBIN(program, cubin))
        return cubin.raw
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))

"""The Triton kernels write the bytes of the reference: without a GPU in Triton's interpreter, in processes of their own."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import struct
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")


def _run(module: str, *arguments: str, **environment: str) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", f"tests.kernels.{module}", *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        timeout=280,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


def test_same_bytes_as_the_reference() -> None:
    """On short vectors; ``TRITON_INTERPRET=1 python -m tests.kernels.agree long`` has some of several tiles."""
    _run("agree", "casts", "refused", "blocks", "whole", "splits", "added", "sums", "rotations", "tiles", TRITON_INTERPRET="1")


def test_kernels_compile_for_a_gpu() -> None:
    """One of them; ``python -m tests.kernels.compile_triton`` compiles all."""
    _run("compile_triton", "_ternary_check")


def test_tables_of_tiles_are_kept_by_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are on their way when they are first used: another stream would not wait for them."""
    tiles = pytest.importorskip("tersegrad.kernels.triton.tiles")
    regions, found = torch.tensor([[0, 4, 4, 2, 2, 1]]), []
    for stream in (1, 2, 1):
        monkeypatch.setattr(tiles.host, "stream", lambda device, stream=stream: stream)
        (kind,) = tiles._kinds(regions, torch.device("cpu"))
        found.append(kind.starts.data_ptr())
    assert found[0] == found[2] != found[1]


def test_no_samples_have_squares_too() -> None:
    squares = pytest.importorskip("tersegrad.kernels.triton.squares")
    for samples, pieces in ((0, 1), (1, 1), (64, 64), (65, 33), (300, 60)):
        x, each = torch.empty(samples, 5, 2, 2), torch.empty(5)
        call, sizes = squares._norm_call([(x, x, each, each)])
        assert (call.grid, call.pieces, sizes) == ((1, pieces, 1), pieces, [5, 5])


def test_parameters_lie_where_the_driver_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A launch through the driver, which is a function of ours here."""
    launch = pytest.importorskip("tersegrad.kernels.triton.launch")
    loader, seen = launch.loader, []

    def launched(config: int, function: int, addresses: None, extra: int) -> int:
        words = (ctypes.c_void_p * 5).from_address(extra)
        size = ctypes.c_size_t.from_address(words[3] or 0).value
        seen.append((function, ctypes.string_at(config, 56), ctypes.string_at(words[1] or 0, size)))
        assert (words[0], words[2], words[4], addresses) == (1, 2, None, None)
        return 0

    monkeypatch.setattr(loader, "entry", lambda *names: launched)
    places = [(0, 8), (8, 8), (16, 4), (24, 8), (32, 4), (40, 8), (48, 8)]
    packer = launch.packer_of("PPiqf", places)
    launch._through_the_driver(77, 128, 4096, packer)((3, 2, 1), 5, 1 << 40, 2, -3, 4, 0.5)
    expected = struct.pack("<QQi4xqf4xQQ", 1 << 40, 2, -3, 4, 0.5, 0, 0)
    config = struct.pack("<7I4xQQI4x", 3, 2, 1, 128, 1, 1, 4096, 5, 0, 0)
    assert seen == [(77, config, expected)]
    # A thread that has no device yet is given torch's.
    codes, calls = [0, 201], []
    monkeypatch.setattr(loader, "entry", lambda *names: lambda *words: codes.pop())
    monkeypatch.setattr(loader, "call", lambda name, *words: calls.append(name))
    monkeypatch.setattr(launch.private, "current_device", lambda: 0)
    launch._through_the_driver(77, 128, 4096, packer)((3, 2, 1), 5, 1 << 40, 2, -3, 4, 0.5)
    assert (codes, calls) == ([], ["cuDeviceGet", "cuDevicePrimaryCtxRetain", "cuCtxSetCurrent"])
    # Other places, more parameters than scratch memory explains, fewer: not for us.
    for others in ([*places[:3], (20, 8), *places[4:]], [*places, (56, 8)], places[:4], [*places[:-1], (48, 4)]):
        assert launch.packer_of("PPiqf", others) is None


def test_which_kernels_the_driver_can_launch() -> None:
    launch = pytest.importorskip("tersegrad.kernels.triton.launch")
    plain = {"num_ctas": 1, "launch_pdl": False, "global_scratch_size": 0}
    types = {"x": "*bf16", "n": "i32", "m": "i64", "w": "fp32", "C": "constexpr"}

    def kinds(constants: int, types: dict[str, str], **metadata: Any) -> Any:
        about, source = SimpleNamespace(**{**plain, **metadata}), SimpleNamespace(signature=types)
        return launch.kinds_of(SimpleNamespace(metadata=about, src=source), constants)

    assert kinds(1, types) == "Piqf"
    assert kinds(1, {**types, "n": "constexpr"}) is None  # specialised on its value
    assert kinds(1, {**types, "C": "i32"}) is None
    assert kinds(1, {**types, "w": "fp64"}) is None
    assert kinds(1, types, num_ctas=2) is None
    assert kinds(1, types, launch_pdl=True) is None
    assert kinds(1, types, profile_scratch_size=8) is None

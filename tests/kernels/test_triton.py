"""The Triton kernels write the bytes of the reference: without a GPU in Triton's interpreter, in processes of their own."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

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
        assert (call.grid, call.shape, sizes) == ((1, pieces, 1), (pieces, 10), [5, 5])

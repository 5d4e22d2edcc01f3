"""The Triton kernels write the bytes of the reference: without a GPU in Triton's interpreter, in processes of their own."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest

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
    _run("agree", "casts", "refused", "blocks", "whole", "splits", "added", "sums", "rotations", TRITON_INTERPRET="1")


def test_kernels_compile_for_a_gpu() -> None:
    """One of them; ``python -m tests.kernels.compile_triton`` compiles all."""
    _run("compile_triton", "_ternary_check")

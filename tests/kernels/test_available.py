"""The tests beside this one skip kernels that were not built or cannot be compiled; these fail then, so that it does not go unnoticed."""

from __future__ import annotations

import importlib.util
import platform
import sys

import pytest

from tersegrad.kernels import native
from tersegrad.kernels.cuda import nvrtc
from tests.kernels.emulator import compiler


def test_the_native_kernels_are_built() -> None:
    assert native.available(), "the native kernels are not built: install the package again, with a C++ compiler at hand"


@pytest.mark.skipif(
    (sys.platform, platform.machine()) != ("linux", "x86_64"), reason="Triton and NVRTC come for Linux on x86-64"
)
def test_the_gpu_kernels_can_be_tested() -> None:
    assert importlib.util.find_spec("triton") is not None, "Triton is missing: pip install -c constraints.txt '.[dev]'"
    assert nvrtc.why_missing() is None
    assert compiler() is not None, "the CUDA sources are emulated by a C++ compiler, and there is none"

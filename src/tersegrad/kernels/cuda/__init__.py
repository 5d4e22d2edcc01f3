"""CUDA C++ kernels, compiled by NVRTC at first use, for what Triton cannot say: entropy coding, index sets, selection."""

from __future__ import annotations

from tersegrad.kernels.cuda.loader import why_missing
from tersegrad.kernels.cuda.rans import *

OPERATIONS = ("rans_decode", "rans_encode")


def available() -> bool:
    """Whether the kernels can be compiled and run here."""
    return why_missing() is None

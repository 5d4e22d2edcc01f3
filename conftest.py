"""What pytest does not collect where it cannot be imported, and the same random draws in every run."""

from __future__ import annotations

import importlib.util
import zlib

import pytest
import torch

NEED_TRITON = ["src/tersegrad/kernels/triton/*", "tests/kernels/compile_triton.py"]

collect_ignore_glob = [] if importlib.util.find_spec("triton") else NEED_TRITON


@pytest.fixture(autouse=True)
def same_draws_in_every_run(request: pytest.FixtureRequest) -> None:
    """A test that draws from torch's global generator gets other numbers than its neighbours, and the same ones next time."""
    torch.manual_seed(zlib.crc32(request.node.nodeid.encode()))

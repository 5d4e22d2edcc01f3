"""The Triton kernels without a GPU: Triton's interpreter runs them, in a process of its own, since it is chosen on import."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed: make frameworks")

PROGRAM = """
import torch
import triton.runtime.interpreter as interpreter
from tersegrad.kernels.triton import shares, squares

plain = interpreter._patch_lang_tensor

def with_bounds(tensor, *scope):  # its scalars are arrays of one element, which NumPy 2.4 no longer turns into a loop's bound
    plain(tensor, *scope)
    tensor.__index__ = lambda self: int(self.handle.data.item())

interpreter._patch_lang_tensor = with_bounds
for seed in range(2):
    shares.agree(seed, "cpu", torch.float32)  # the interpreter gets bfloat16 wrong
    squares.agree(seed, "cpu", torch.float32)
none = shares.convolution(torch.empty(0, 2, 4, 4), torch.empty(0, 3, 4, 4), (3, 3), (1, 1), (1, 1), (1, 1), 1, True)
assert none.shape == (1, 2, 3 * 18 + 3) and not none.any()
for part, workers in ((1, 1), (7, 3), (50, 1), (64, 8), (640, 1)):
    for columns, outputs, places in ((28, 64, 1024), (577, 100, 49), (2304, 256, 64)):
        chosen = shares.tiles(columns, outputs, places, part, workers)
        assert (chosen.splits - 1) * chosen.each < part <= chosen.splits * chosen.each, chosen
"""


def test_kernels_agree_with_plain_torch_in_the_interpreter() -> None:
    subprocess.run([sys.executable, "-c", PROGRAM], check=True, env={**os.environ, "TRITON_INTERPRET": "1"}, timeout=120)

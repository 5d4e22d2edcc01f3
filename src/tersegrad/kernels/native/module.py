"""The compiled module, or None where it was not built."""

from __future__ import annotations

import importlib
from typing import Any

import torch

module: Any
try:
    module = importlib.import_module("tersegrad.kernels._native")
except ImportError:
    module = None
else:
    # Kernels use as many threads as torch would where they are called.
    module.follow_threads(torch.get_num_threads)

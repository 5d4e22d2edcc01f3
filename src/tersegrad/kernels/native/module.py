"""The compiled module, or None where it was not built."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor

module: Any
try:
    module = importlib.import_module("tersegrad.kernels._native")
except ImportError:
    module = None
else:
    # Kernels use as many threads as torch would where they are called.
    module.follow_threads(torch.get_num_threads)


def array(tensor: Tensor) -> Any:
    """The memory of a CPU tensor as a numpy array, which enters the compiled module in a third of the time that a tensor takes."""
    return tensor.detach().numpy() if tensor.requires_grad else tensor.numpy()

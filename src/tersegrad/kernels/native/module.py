"""The compiled module, or None where it was not built."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor

_NAME = "tersegrad.kernels._native"
module: Any
missing = ""  # why there is no module
try:
    module = importlib.import_module(_NAME)
except ImportError as error:
    module = None
    absent = isinstance(error, ModuleNotFoundError) and error.name == _NAME
    missing = "it was installed without a C++ compiler" if absent else f"the compiled ones do not load ({error})"
else:
    # Kernels use as many threads as torch would where they are called, and take tensors as they are.
    module.follow_threads(torch.get_num_threads)
    module.take_tensors(Tensor)


NO_LAYOUT = torch.empty(0, dtype=torch.int64)


def rows_of(layout: Tensor | None) -> Tensor:
    """A layout; an empty one where there is none."""
    return NO_LAYOUT if layout is None else layout


TRUE, FALSE = torch.tensor(True), torch.tensor(False)


def flag(value: bool) -> Tensor:
    """A truth as a tensor. There are two of them, which nobody writes to: making a new one costs more than many a kernel."""
    return TRUE if value else FALSE


def number(value: int, dtype: torch.dtype = torch.int64) -> Tensor:
    """An integer as a tensor, in half the time of ``torch.tensor``."""
    return torch.scalar_tensor(value, dtype=dtype)

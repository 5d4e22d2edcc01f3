"""The compiled module, or None where it was not built."""

from __future__ import annotations

import importlib
from typing import Any

module: Any
try:
    module = importlib.import_module("tersegrad.kernels._native")
except ImportError:
    module = None

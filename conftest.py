"""What pytest does not collect where it cannot be imported."""

from __future__ import annotations

import importlib.util

NEED_TRITON = ["src/tersegrad/kernels/triton/*", "tests/kernels/compile_triton.py"]

collect_ignore_glob = [] if importlib.util.find_spec("triton") else NEED_TRITON

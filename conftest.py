"""What pytest does not collect where it cannot be imported."""

from __future__ import annotations

import importlib.util

collect_ignore_glob = [] if importlib.util.find_spec("triton") else ["src/tersegrad/kernels/triton/*"]

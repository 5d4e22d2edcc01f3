"""What pytest does not collect where it cannot be imported, and which tests stay together."""

from __future__ import annotations

import importlib.util

import pytest

collect_ignore_glob = [] if importlib.util.find_spec("triton") else ["src/tersegrad/kernels/triton/*"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of a file that share worker processes run in one of pytest's processes, so that they are started once."""
    for item in items:
        if {"workers", "ranks"} & set(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.xdist_group(item.path.stem))

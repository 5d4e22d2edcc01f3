"""A process group of one process, for tests that need no more."""

from __future__ import annotations

from tests.engine.conftest import single as single

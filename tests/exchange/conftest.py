"""Three real ranks, shared by the tests of exchanges."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.exchange.pool import Pool, pool

collect_ignore = ["preload.py"]  # for the process that ranks are forked from alone: it compiles when it is imported


@pytest.fixture(scope="session")
def workers() -> Iterator[Pool]:
    with pool(3) as p:
        yield p

"""Four real ranks for all tests of the engine; a job that breaks a process group breaks one that it made itself."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch.distributed as dist

from tests.exchange.pool import Pool, pool


@pytest.fixture(scope="session")
def ranks() -> Iterator[Pool]:
    with pool(4, timeout=20.0) as p:
        yield p


@pytest.fixture
def single() -> Iterator[None]:
    """A process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    yield
    dist.destroy_process_group()

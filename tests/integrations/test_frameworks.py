"""Lightning and Accelerate run the documentation's snippets on two real processes, where they are installed."""

from __future__ import annotations

import pytest

from tersegrad.integrations import processes


@pytest.mark.parametrize(("kind", "package"), [("lightning", "lightning"), ("pair", "lightning"), ("accelerate", "accelerate")])
def test_documented_snippets_train(kind: str, package: str) -> None:
    pytest.importorskip(package)
    assert processes.launch(["-m", "tests.integrations.frameworks", kind], 2) == 0

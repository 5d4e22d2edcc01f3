"""Lightning and Accelerate run the documentation's snippets on two real processes, where they are installed.

``make frameworks`` installs them in an environment of their own and runs this file there.
"""

from __future__ import annotations

import importlib.util

import pytest

from tersegrad.integrations import processes


@pytest.mark.parametrize(("kind", "package"), [("lightning", "lightning"), ("pair", "lightning"), ("accelerate", "accelerate")])
def test_documented_snippets_train(kind: str, package: str) -> None:
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed: make frameworks")
    assert processes.launch(["-m", "tests.integrations.frameworks", kind], 2) == 0

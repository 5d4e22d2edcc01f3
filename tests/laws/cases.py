"""The configurations that the laws run over: the examples and corners that every registered class states."""

from __future__ import annotations

import pytest

from tersegrad import recipes

CASES = recipes.cases()

every_case = pytest.mark.parametrize("text", CASES)

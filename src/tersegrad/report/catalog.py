"""Every compressor and wrapper of the registry, described from the code itself."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Sequence

from tersegrad import recipes
from tersegrad.core.errors import BadConfiguration
from tersegrad.core.protocol import Spec
from tersegrad.core.text import Configuration, literal
from tersegrad.report.tables import Column, Table

NUMEL = 1_000_000  # the guarantee may depend on the number of coordinates
INNER = "qsgd"  # what wrappers are shown around


@dataclasses.dataclass(frozen=True)
class Entry:
    """One line of the catalogue."""

    name: str
    signature: str  # the text form with every parameter and its default
    guarantee: str  # at a million coordinates
    wire_id: int | None
    description: str


def catalog() -> tuple[Entry, ...]:
    """All names that :func:`tersegrad.parse` knows, in its order."""
    return tuple(_entry(name) for name in recipes.names())

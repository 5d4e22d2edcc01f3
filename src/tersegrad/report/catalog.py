"""Every compressor and wrapper of the registry, described from the code itself."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Sequence
from typing import Any

from tersegrad import recipes
from tersegrad.core.protocol import Compressor, Spec
from tersegrad.core.text import literal
from tersegrad.report.tables import Column, Table

NUMEL = 1_000_000  # the guarantee may depend on the number of coordinates

# One sensible configuration of every compressor and wrapper; the order is that of the table.
CONFIGURATIONS: tuple[str, ...] = (
    "identity",
    "bf16",
    "fp16",
    "fp8",
    "int8",
    "int4",
    "natural",
    "natural_dithering(levels=8)",
    "qsgd(bits=4)",
    "qsgd(bits=4, norm=max)",
    "qsgd(levels=1, coder=rans)",
    "ternary",
    "sign",
    "top_k(fraction=0.01)",
    "random_k(fraction=0.01)",
    "threshold(tau=2.5)",
    "error_feedback(top_k(fraction=0.01))",
    "rotated(qsgd(bits=4))",
)


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


def _entry(name: str) -> Entry:
    kind = recipes.lookup(name)
    parameters = inspect.signature(kind).parameters.values()
    written = ", ".join(p.name if p.default is p.empty else f"{p.name}={literal(p.default)}" for p in parameters)
    example = _example(name)
    return Entry(
        name=name,
        signature=f"{name}({written})" if written else name,
        guarantee="depends" if example is None else str(example.guarantee(Spec.flat(NUMEL))),
        wire_id=None if example is None else example.wire_id,
        description=(inspect.getdoc(kind) or "").partition("\n")[0],
    )


def _example(name: str) -> Compressor[Any] | None:
    """The first configuration above that begins with ``name``."""
    for text in CONFIGURATIONS:
        if text == name or text.startswith(f"{name}("):
            return recipes.parse(text)
    return None


def catalog_table(entries: Sequence[Entry]) -> Table:
    """The catalogue for a terminal."""
    columns = (
        Column("name(parameters=defaults)", number=False),
        Column(f"guarantee, d = {NUMEL:,}", number=False),
        Column("what it does", number=False),
    )
    rows = tuple((e.signature, e.guarantee, e.description) for e in entries)
    return Table(columns, rows, "Compressors and wrappers", "")

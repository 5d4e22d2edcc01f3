"""Every compressor and wrapper of the registry, described from the code itself."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Sequence
from typing import Any

from tersegrad import recipes
from tersegrad.core.protocol import Spec, needs_second_moment
from tersegrad.core.text import literal
from tersegrad.report.tables import Column, Table

NUMEL = 1_000_000  # the guarantee may depend on the number of coordinates

EXAMPLES: tuple[str, ...] = tuple(text for name in recipes.ordered() for text in recipes.examples(name))
# What can be measured on single gradients: without statistics over samples and steps.
CONFIGURATIONS: tuple[str, ...] = tuple(text for text in EXAMPLES if not needs_second_moment(recipes.parse(text)))


@dataclasses.dataclass(frozen=True)
class Entry:
    """One line of the catalogue."""

    name: str
    kind: str  # compressor, wrapper or recipe
    signature: str  # the text form with every parameter and its default
    example: str
    guarantee: str  # the example's, at a million coordinates
    wire_id: int
    description: str


def catalog() -> tuple[Entry, ...]:
    """All names that :func:`tersegrad.parse` knows, in its order."""
    return tuple(_entry(name) for name in recipes.names())


def _entry(name: str) -> Entry:
    makers: dict[str, Callable[..., Any]] = {**recipes.COMPRESSORS, **recipes.WRAPPERS, **recipes.RECIPES}
    maker = makers[name]
    parameters = inspect.signature(maker).parameters.values()
    written = ", ".join(p.name if p.default is p.empty else f"{p.name}={literal(p.default)}" for p in parameters)
    example = recipes.parse((*recipes.examples(name), *recipes.corners(name))[0])
    return Entry(
        name=name,
        kind="compressor" if name in recipes.COMPRESSORS else "wrapper" if name in recipes.WRAPPERS else "recipe",
        signature=f"{name}({written})" if written else name,
        example=str(example),
        guarantee=str(example.guarantee(Spec.flat(NUMEL))),
        wire_id=example.wire_id,
        description=(inspect.getdoc(maker) or "").partition("\n")[0].replace("``", ""),
    )


def catalog_table(entries: Sequence[Entry]) -> Table:
    """The catalogue for a terminal."""
    columns = (
        Column("name(parameters=defaults)", number=False),
        Column("example", number=False),
        Column(f"its guarantee, d = {NUMEL:,}", number=False),
        Column("what it does", number=False),
    )
    rows = tuple((e.signature, e.example, e.guarantee, e.description) for e in entries)
    note = "C, B: error at most alpha, always or on average; U: unbiased, variance at most omega"
    return Table(columns, rows, "Compressors, wrappers and recipes", note)


def page() -> str:
    """The page of the documentation that lists everything: ``make table`` writes it."""
    entries = sorted(catalog(), key=lambda entry: recipes.ordered().index(entry.name))
    lines = [
        "# Compressors, wrappers and recipes",
        "",
        "Made from the registered classes by `make table`; [Choose a compressor](choose.md) says which one to take.",
        f"Guarantees are those of the example for {NUMEL:,} coordinates. C, B: error at most alpha, always or on average; U: unbiased,",
        "variance at most omega. They hold for magnitudes up to 2^127 and up to an absolute error of 2^-126 per coordinate.",
        "",
        "| name and parameters with defaults | what it does | example | its guarantee | wire id |",
        "|---|---|---|---|---|",
    ]
    for e in entries:
        cells = (f"`{e.signature}`", e.description, f"`{e.example}`", e.guarantee, str(e.wire_id))
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"

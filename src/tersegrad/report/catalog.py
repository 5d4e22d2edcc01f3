"""Every compressor and wrapper of the registry, described from the code itself."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Sequence
from typing import Any

from tersegrad import recipes
from tersegrad.core.protocol import Compressor, Spec, needs_second_moment
from tersegrad.core.text import literal
from tersegrad.report.tables import Column, Table

NUMEL = 1_000_000  # the guarantee may depend on the number of coordinates

# One sensible configuration of every compressor and wrapper; the order is that of the tables.
_SENSIBLE = (
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
    "sparse_dithering(alpha=0.1)",
    "random_sparse_dithering(omega=1)",
    "subtractive_dithering(omega=1)",
    "spherical(alpha=0.5, block=4)",
    "top_k(fraction=0.01)",
    "random_k(fraction=0.01)",
    "threshold(tau=2.5)",
    "vgc(alpha=1.5)",
    "hybrid(alpha=2, tau=0.1)",
    "error_feedback(top_k(fraction=0.01))",
    "rotated(qsgd(bits=4))",
    "ef_sign",
    "strom(tau=2.5)",
    "mem_sgd(fraction=0.01)",
)
EXAMPLES: tuple[str, ...] = tuple(text for text in _SENSIBLE if text.partition("(")[0] in recipes.names())
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
    example = _example(name)
    return Entry(
        name=name,
        kind="compressor" if name in recipes.COMPRESSORS else "wrapper" if name in recipes.WRAPPERS else "recipe",
        signature=f"{name}({written})" if written else name,
        example=str(example),
        guarantee=str(example.guarantee(Spec.flat(NUMEL))),
        wire_id=example.wire_id,
        description=(inspect.getdoc(maker) or "").partition("\n")[0].replace("``", ""),
    )


def _example(name: str) -> Compressor[Any]:
    """The first of the examples that begins with ``name``, else the bare name, around bf16 if it wraps something."""
    for text in EXAMPLES:
        if text == name or text.startswith(f"{name}("):
            return recipes.parse(text)
    return recipes.parse(f"{name}(bf16)" if name in recipes.WRAPPERS else name)


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

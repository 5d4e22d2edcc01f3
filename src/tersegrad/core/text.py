"""Configurations: frozen dataclasses whose ``str`` is a text form that :func:`tersegrad.parse` reads back.

A configuration is a value: equality compares parameters, ``repr`` is the constructor call, ``str`` is the short text form with
the parameters that differ from their defaults, e.g. ``qsgd(bits=3)``.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from tersegrad.core.errors import BadConfiguration


def quoted(text: str) -> str:
    """A string between double quotes; backslashes and quotes are escaped by a backslash."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def literal(value: object) -> str:
    """One parameter value as it is written in a text form."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if value is None:
        return "none"
    if isinstance(value, str):
        bare = value.isascii() and value.isidentifier() and value not in {"true", "false", "none", "inf"}
        return value if bare else quoted(value)
    if isinstance(value, tuple):
        if value and all(isinstance(v, tuple) and len(v) == 2 and isinstance(v[1], Configuration) for v in value):
            return "{" + ", ".join(f"{quoted(str(v[0]))}: {v[1]}" for v in value) + "}"
        return "[" + ", ".join(literal(v) for v in value) + "]"
    return str(value) if isinstance(value, Configuration) else repr(value)


@dataclasses.dataclass(frozen=True)
class Configuration:
    """Base of every compressor and wrapper: nothing but the text form.

    ``name`` is what the text form calls it. ``examples`` are text forms that a user
    would choose and compare on a gradient, the most usual one first: the catalogue, demo, benchmarks, laws and format vectors are
    made of them. ``corners`` are further ones that the laws and vectors try. ``slow``: benchmarks use
    shorter vectors. Subclasses are frozen dataclasses; the fields are the parameters.
    """

    name: ClassVar[str] = ""
    examples: ClassVar[tuple[str, ...]] = ()
    corners: ClassVar[tuple[str, ...]] = ()
    slow: ClassVar[bool] = False

    def __str__(self) -> str:
        parts = []
        for number, field in enumerate(dataclasses.fields(self)):
            value = getattr(self, field.name)
            if field.default is not dataclasses.MISSING and value == field.default:
                continue
            positional = number == 0 and isinstance(value, Configuration)  # what a wrapper wraps
            parts.append(literal(value) if positional else f"{field.name}={literal(value)}")
        return f"{self.name}({', '.join(parts)})" if parts else self.name


def require(condition: bool, message: str) -> None:
    """Raise :class:`BadConfiguration` with ``message`` unless ``condition`` holds."""
    if not condition:
        raise BadConfiguration(message)

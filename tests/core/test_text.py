"""Configurations: values whose text form says what differs from the defaults."""

import dataclasses
from typing import ClassVar

import pytest

from tersegrad.core.errors import BadConfiguration
from tersegrad.core.text import Configuration, literal, require


@dataclasses.dataclass(frozen=True)
class Leaf(Configuration):
    name: ClassVar[str] = "leaf"
    bits: int = 4
    norm: str = "l2"
    scale: float = 1.0
    exact: bool = False
    limit: int | None = None
    parts: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class Needed(Configuration):
    name: ClassVar[str] = "needed"
    fraction: float


@dataclasses.dataclass(frozen=True)
class Outer(Configuration):
    name: ClassVar[str] = "outer"
    inner: Configuration
    other: Configuration | None = None
    beta: float = 1.0


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (Leaf(), "leaf"),
        (Leaf(bits=3), "leaf(bits=3)"),
        (Leaf(bits=3, norm="max"), "leaf(bits=3, norm=max)"),
        (Leaf(norm="a b"), 'leaf(norm="a b")'),
        (Leaf(norm="true"), 'leaf(norm="true")'),
        (Leaf(scale=1e-05), "leaf(scale=1e-05)"),
        (Leaf(exact=True), "leaf(exact=true)"),
        (Leaf(limit=0), "leaf(limit=0)"),
        (Leaf(parts=(1, 2)), "leaf(parts=[1, 2])"),
        (Needed(0.01), "needed(fraction=0.01)"),
        (Outer(Leaf()), "outer(leaf)"),
        (Outer(Outer(Needed(0.5)), beta=0.5), "outer(outer(needed(fraction=0.5)), beta=0.5)"),
        (Outer(Leaf(bits=2), other=Leaf()), "outer(leaf(bits=2), other=leaf)"),
    ],
)
def test_text_forms(value: Configuration, text: str) -> None:
    assert str(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (True, "true"),
        (False, "false"),
        (None, "none"),
        (3, "3"),
        (0.1, "0.1"),
        ("max", "max"),
        ("none", '"none"'),
        ("", '""'),
        ((), "[]"),
        ((1, "a", (True,)), "[1, a, [true]]"),
    ],
)
def test_literals(value: object, text: str) -> None:
    assert literal(value) == text


def test_equality_is_the_configuration() -> None:
    assert Leaf(bits=3) == Leaf(bits=3)
    assert Leaf(bits=3) != Leaf()
    assert hash(Outer(Leaf())) == hash(Outer(Leaf()))
    assert eval(repr(Leaf(bits=3))) == Leaf(bits=3)  # the repr is the constructor call
    with pytest.raises(dataclasses.FrozenInstanceError):
        Leaf().bits = 5  # type: ignore[misc]


def test_floats_keep_every_digit() -> None:
    for value in (0.1, 1 / 3, 2.0**-40, 1e300):
        assert float(literal(value)) == value


def test_require() -> None:
    require(True, "fine")
    with pytest.raises(BadConfiguration, match="bits must be even"):
        require(False, "bits must be even")

"""Private names of torch are reached in one place, and a release without one of them is told in a line."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import tersegrad
from tersegrad.core import private
from tersegrad.core.errors import BadConfiguration
from tersegrad.report import doctor

SOURCE = Path(tersegrad.__file__).parent
ROOTS = {"torch", "nn", "F", "dist", "fsdp_module"}  # as the sources import torch's modules
PLACE = SOURCE / "core" / "private.py"


def chain(node: ast.expr) -> list[str]:
    """The names of ``a.b.c``, the root first; empty for what does not begin with a name."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return [node.id, *reversed(parts)] if isinstance(node, ast.Name) else []


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def reached(path: Path) -> Iterator[str]:
    """Private names of torch that a file reaches by itself."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            names = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
            yield from (f"{path.name}:{node.lineno} {name}" for name in names if is_private(name))
        if isinstance(node, ast.Import):
            for alias in node.names:
                parts = alias.name.split(".")
                if parts[0] == "torch" and any(map(is_private, parts)):
                    yield f"{path.name}:{node.lineno} {alias.name}"
        if isinstance(node, ast.Attribute):
            parts = chain(node)
            if (parts and parts[0] in ROOTS and any(map(is_private, parts))) or node.attr in private.ATTRIBUTES:
                yield f"{path.name}:{node.lineno} {ast.unparse(node)}"


def test_they_are_reached_in_one_place() -> None:
    assert [found for path in SOURCE.rglob("*.py") if path != PLACE for found in reached(path)] == []
    assert any("torch._C" in found for found in reached(PLACE))  # the search finds what there is


def test_what_is_asked_for_is_what_the_tables_tell() -> None:
    asked: set[str] = set()
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and chain(node.func) in (["private", "of"], ["private", "get"]):
                found = node.args[-1]
                assert isinstance(found, ast.Constant), (path, node.lineno)
                asked.add(str(found.value))
    assert asked == {*private.PATHS, *private.ATTRIBUTES}


def test_this_torch_has_all_of_them() -> None:
    assert private.missing() == {}


@pytest.mark.parametrize(("version", "told"), [("2.99.1", "newer than"), ("2.1.0", "older than"), (torch.__version__, "")])
def test_another_release_gets_a_clear_line(version: str, told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    assert private.standing().startswith(told)
    line = doctor.doctor()["torch"]
    assert line.startswith(version)
    assert (f"; {told}" in line) if told else line == version


def test_a_release_without_a_name_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.nn.functional, "_verify_batch_size")
    monkeypatch.setattr(torch, "__version__", "2.99.0")
    with pytest.raises(BadConfiguration, match=r"torch 2\.99\.0 has no torch\.nn\.functional\._verify_batch_size") as caught:
        private.of("nn.functional._verify_batch_size")
    assert f"pip install 'torch=={private.TESTED[1]}.*'" in str(caught.value)
    assert "without torch.nn.functional._verify_batch_size" in doctor.doctor()["torch"]
    layer = torch.nn.Conv2d(1, 1, 1)
    vars(layer).pop("_reversed_padding_repeated_twice")
    with pytest.raises(
        BadConfiguration, match=r"has no Conv2d\._reversed_padding_repeated_twice, which the second moment of conv"
    ):
        private.get(layer, "_reversed_padding_repeated_twice")

"""What the wheels are looked at for, and that the bounds of pyproject.toml are what the table of versions shows."""

from __future__ import annotations

import re
import zipfile
from pathlib import Path

import pytest

from tersegrad.core import private
from tests.install import matrix, wheels

FOUND = matrix.kept(matrix.PAGE.read_text(encoding="utf-8"))


def parts(version: str) -> list[int]:
    """Numbers of a version, without zeros at its end.

    >>> parts("2.13.0+cpu"), parts("13.0")
    ([2, 13], [13])
    """
    numbers = [int(part) for part in re.split(r"[^\d.]", version)[0].split(".")]
    while numbers and not numbers[-1]:
        numbers.pop()
    return numbers


def test_the_table_is_of_these_environments() -> None:
    known = {*(row.name for row in matrix.ROWS), matrix.EMULATED}
    assert {"newest, plain", "newest", "newest, Flower", "lowest", "lowest, Flower"} <= set(FOUND) <= known
    for versions in FOUND.values():
        assert set(versions) == set(matrix.SHOWN)
        assert versions["torch"] != "-"


@pytest.mark.parametrize("row", [row for row in matrix.ROWS if row.lowest and row.name in FOUND], ids=lambda row: row.name)
def test_lower_bounds_are_what_was_tested(row: matrix.Row) -> None:
    for pin in matrix.pins(row):
        name, _, version = pin.partition("==")
        assert parts(FOUND[row.name][name]) == parts(version), name


def test_the_pythons_that_are_promised_are_in_the_table() -> None:
    promised = {line.rpartition(" ")[2] for line in matrix.PROJECT["classifiers"] if re.search(r"Python :: 3\.\d+$", line)}
    walked = {".".join(versions["Python"].split(".")[:2]) for versions in FOUND.values()}
    assert promised
    assert promised == walked


def test_the_releases_of_torch_that_are_called_tested_are_in_the_table() -> None:
    tested = sorted({private.release(versions["torch"]) for versions in FOUND.values()})
    assert (tested[0], tested[-1]) == tuple(map(private.release, private.TESTED))


def made(folder: Path, name: str, *files: str, told: str = "License-Expression: x\nRequires-Python: y\n") -> Path:
    """A wheel of empty files."""
    path = folder / name
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("tersegrad-0.1.0.dist-info/METADATA", told)
        for file in ("tersegrad/py.typed", "tersegrad/report/web/page.html", *files):
            archive.writestr(file, "")
    return path


def test_faults_of_wheels_are_seen(tmp_path: Path) -> None:
    module, tag = (
        "tersegrad/kernels/_native.cpython-311-x86_64-linux-gnu.so",
        "tersegrad-0.1.0-cp311-cp311-manylinux_2_34_x86_64.whl",
    )
    plain = "tersegrad-0.1.0-py3-none-any.whl"
    assert wheels.faults(made(tmp_path, tag, module), compiled=True) == []
    assert wheels.faults(made(tmp_path, plain), compiled=False) == []
    for files in ((), (module, "tersegrad.libs/libgomp.so"), (module, "tests/test_x.py"), (module, "tersegrad/x.cpp")):
        assert wheels.faults(made(tmp_path, tag, *files), compiled=True), files
    assert wheels.faults(made(tmp_path, "tersegrad-0.1.0-cp311-cp311-linux_x86_64.whl", module), compiled=True)
    assert wheels.faults(made(tmp_path, tag, module, told=""), compiled=True)
    assert wheels.faults(made(tmp_path, plain, module), compiled=False)

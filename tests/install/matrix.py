"""Fresh environments, without our pins: the package is installed as a user would, and walked through (``walk.py``).

    python -m tests.install.matrix                           every row, and the table of docs/versions.md
    python -m tests.install.matrix lowest "newest, plain"    these rows
    python -m tests.install.matrix --torch 2.9.0             with another torch

A row is an environment: a wheel, compiled or built without a compiler, with the newest release of everything or the lowest that
pyproject.toml allows. torch is named, since the newest one brings gigabytes of CUDA; only the rows of other Pythons, which have to
be on this machine, take it, and build the package from the sdist. What was installed is written to docs/versions.md, and the lower
bounds of pyproject.toml are what stands there. Needs nothing but Python's standard library.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
import time
import tomllib
from pathlib import Path

from tests.install import wheels

ROOT = wheels.ROOT
FOLDER = ROOT / "build" / "matrix"
PAGE = ROOT / "docs" / "versions.md"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
TORCH = "2.13.0"
FRAMEWORKS = ("lightning", "accelerate", "transformers", "tensorboard", "wandb", "mlflow-skinny", "triton")
SHOWN = ("Python", "torch", "numpy", "typer", "rich", "matplotlib", "scikit-learn", "flwr", *FRAMEWORKS)
TESTS = (
    "tests/integrations/test_frameworks.py",
    "tests/engine/test_logs.py",
    "tests/kernels/test_add_a_kernel.py",
    "tests/moments/test_triton.py",
)
EMULATED = "lowest, aarch64"  # of aarch64.py
NEWCOMER = 180  # seconds beyond torch that installing the package and running the README's examples may take
START, END = "<!-- begin: written by tests/install/matrix.py -->\n", "<!-- end -->\n"


@dataclasses.dataclass(frozen=True)
class Row:
    """One environment."""

    name: str
    wheel: str = "native"  # or plain: built without a compiler; or sdist: built here
    extras: tuple[str, ...] = ("report", "experiments")
    lowest: bool = False
    more: tuple[str, ...] = ()
    tests: tuple[str, ...] = ()  # instead of the walk
    python: str = ""  # another Python than this one, with the newest torch


# Flower asks for an older typer than the newest and for newer packages than our lowest: it has rows of its own.
ROWS = (
    Row("newest, plain", "plain"),
    Row("newest"),
    Row("newest, Flower", extras=("report", "experiments", "flower")),
    Row("lowest", lowest=True),
    Row("lowest, Flower", extras=("report", "experiments", "flower"), lowest=True),
    Row("frameworks", extras=("dev",), more=FRAMEWORKS, tests=TESTS),
    Row("Python 3.12", "sdist", python="3.12"),
    Row("Python 3.13", "sdist", python="3.13"),
)


def lowest(requirement: str) -> str:
    """A requirement at its lower bound.

    >>> lowest("flwr>=1.38,<1.43")
    'flwr==1.38'
    """
    found = re.match(r"([\w.-]+)>=([\w.]+)", requirement)
    assert found is not None, f"{requirement} has no lower bound"
    return f"{found[1]}=={found[2]}"


def pins(row: Row) -> list[str]:
    """What a row asks for besides torch and the wheel."""
    if not row.lowest:
        return list(row.more)
    extras = PROJECT["optional-dependencies"]
    if "flower" in row.extras:  # it needs newer ones than our lowest: everything else is free
        return [lowest(text) for text in extras["flower"]]
    own = [text for text in PROJECT["dependencies"] if not text.startswith("torch")]
    return [lowest(text) for text in [*own, *(text for extra in row.extras for text in extras[extra])]]


def work(row: Row, wheel: Path, release: str) -> dict[str, str]:
    """Install one row and use it; the versions that it got."""
    start = time.perf_counter()
    python, pip = wheels.environment(FOLDER / re.sub(r"\W+", "-", row.name), row.python)
    torch = "torch" if row.python else f"torch=={release}"
    times = {"torch": _seconds(*pip, "install", torch)}
    if not pins(row):  # what a newcomer does
        times["the package"] = _seconds(*pip, "install", torch, f"tersegrad @ {wheel.as_uri()}")
        times["the README's examples"] = _seconds(python, "-m", "doctest", "README.md")
        taken = times["the package"] + times["the README's examples"]
        if taken > NEWCOMER and row.wheel != "sdist":  # which compiles
            sys.exit(f"{row.name}: a newcomer waits {taken:.0f} s beyond torch, more than {NEWCOMER}")
    times["its extras"] = _seconds(*pip, "install", torch, *pins(row), f"tersegrad[{','.join(row.extras)}] @ {wheel.as_uri()}")
    print(f"{row.name}: {', '.join(f'{what} in {seconds:.0f} s' for what, seconds in times.items())}", flush=True)
    if row.tests:
        words = ["-m", "pytest", "-q", "-rs", "-o", "pythonpath=.", *row.tests]  # of the wheel, not of src
    else:
        words = ["tests/install/walk.py", "plain" if row.wheel == "plain" else "native"]
    done = subprocess.run([str(python), *words], cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, check=False)
    if done.returncode:
        sys.exit(f"{row.name}: failed with {done.returncode}")
    found = versions(wheels.run(python, "-c", "import platform; print(platform.python_version())").strip(), python)
    print(f"{row.name}: {time.perf_counter() - start:.0f} s", flush=True)
    shutil.rmtree(python.parents[1])
    return found


def _runs(program: str) -> bool:
    """Whether a Python is on this machine: a name in the path may stand for one that is not chosen (pyenv)."""
    return (
        shutil.which(program) is not None
        and subprocess.run([program, "-c", ""], capture_output=True, check=False).returncode == 0
    )


def _seconds(*words: str | Path) -> float:
    """How long a command takes."""
    start = time.perf_counter()
    wheels.run(*words)
    return time.perf_counter() - start


def versions(release: str, python: str | Path, *where: str) -> dict[str, str]:
    """What is installed of the packages that are shown; ``release`` of Python."""
    listed = json.loads(wheels.run(python, "-m", "pip", "list", "--format", "json", *where))
    found = {"python": release} | {one["name"].lower(): one["version"] for one in listed}
    return {name: found.get(name.lower(), "-") for name in SHOWN}


def table(found: dict[str, dict[str, str]]) -> str:
    """One column per environment, one line per package."""
    lines = [f"| package | {' | '.join(found)} |", "|---|" + "---|" * len(found)]
    lines += [f"| {name} | {' | '.join(versions[name] for versions in found.values())} |" for name in SHOWN]
    return "\n".join(lines) + "\n"


def kept(page: str) -> dict[str, dict[str, str]]:
    """The columns of the table on a page."""
    head, _, *rows = page.partition(START)[2].partition(END)[0].strip().splitlines()
    cells = [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in (head, *rows)]
    return {name: {row[0]: row[k] for row in cells[1:]} for k, name in list(enumerate(cells[0]))[1:]}


def write(found: dict[str, dict[str, str]]) -> None:
    """Put the columns into the page; those of rows that were not run stay."""
    page = PAGE.read_text(encoding="utf-8")
    before, _, rest = page.partition(START)
    columns = kept(page) | found
    ordered = {name: columns[name] for name in (*(row.name for row in ROWS), EMULATED) if name in columns}
    PAGE.write_text(before + START + table(ordered) + END + rest.partition(END)[2], encoding="utf-8")


def main() -> None:
    """The rows that are named, or all."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("rows", nargs="*", default=[row.name for row in ROWS], help="names of rows")
    parser.add_argument("--torch", default=TORCH)
    parser.add_argument("--dist", type=Path, help="what was made before (make wheel), instead of new wheels")
    given = parser.parse_args()
    chosen = [row for row in ROWS if row.name in given.rows]
    if len(chosen) != len(set(given.rows)):
        parser.error(f"rows are {', '.join(repr(row.name) for row in ROWS)}")
    missing = [row.name for row in chosen if row.python and not _runs(f"python{row.python}")]
    if missing:
        parser.error(f"not on this machine: {', '.join(missing)}")
    dist = given.dist.resolve() if given.dist else FOLDER / "dist"
    made = wheels.made(dist) if given.dist else wheels.build(dist)
    wrong = [fault for kind, wheel in made.items() for fault in wheels.faults(wheel, kind == "native")]
    if wrong:
        sys.exit("\n".join(wrong))
    print(*(f"{path.stat().st_size / 1e6:.2f} MB  {path.name}" for path in made.values()), sep="\n", flush=True)
    found = {}
    for row in chosen:
        found[row.name] = work(row, wheels.sdist(dist) if row.wheel == "sdist" else made[row.wheel], given.torch)
        write(found)
    print(table(found))


if __name__ == "__main__":
    main()

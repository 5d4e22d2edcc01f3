"""The compressor of docs/add-your-own.md, registered in a copy of the package, is found everywhere that the docs say."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tersegrad.kernels import native
from tersegrad.kernels.native.module import module

ROOT = Path(__file__).parents[2]
REGISTER = ("from tersegrad.compressors.first_k import FirstK\n", '__all__ += ["FirstK"]\n')
# Without the finder of an editable installation, which would lead back to this package.
OWN_PATHS = """
import sys
sys.meta_path[:] = [f for f in sys.meta_path if "editable" not in type(f).__module__]
"""


def documented() -> str:
    """The source of the first block of the page, as a file."""
    page = (ROOT / "docs" / "add-your-own.md").read_text(encoding="utf-8")
    block = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)[0]
    lines = [line[4:] for line in block.splitlines() if line.startswith((">>>", "..."))]
    head = '"""First k: coordinates 0 .. k - 1, as float32."""\n\nfrom __future__ import annotations\n\n'
    return head + "\n".join(lines) + "\n"


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the repository with one more file and two more lines."""
    if not native.available():
        pytest.fail("the native kernels are not built")
    root = tmp_path_factory.mktemp("copy")
    for folder in ("src", "spec", "benchmarks", "tests/laws"):
        shutil.copytree(ROOT / folder, root / folder, ignore=shutil.ignore_patterns("__pycache__", "vectors", "results"))
    for name in ("__init__.py", "device.py"):
        shutil.copy(ROOT / "tests" / name, root / "tests" / name)
    (root / "sitecustomize.py").write_text(OWN_PATHS)
    shutil.copy(module.__file__, root / "src" / "tersegrad" / "kernels")
    compressors = root / "src" / "tersegrad" / "compressors"
    (compressors / "first_k.py").write_text(documented(), encoding="utf-8")
    with (compressors / "__init__.py").open("a", encoding="utf-8") as register:
        register.writelines(REGISTER)
    return root


def run(copy: Path, *arguments: str) -> str:
    found = subprocess.run(
        [sys.executable, *arguments],
        cwd=copy,
        env={"PYTHONPATH": f"{copy}:{copy / 'src'}", "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1", "COLUMNS": "300"},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert found.returncode == 0, found.stdout[-3000:] + found.stderr[-3000:]
    return found.stdout


LOOK = """
import json
import tersegrad
from benchmarks import registry
from spec import make_vectors
from tersegrad.report.catalog import CONFIGURATIONS, page
from typer.testing import CliRunner
from tersegrad.cli import app

vectors = [v.name for v in (*make_vectors.accepted(), *make_vectors.refused()) if "first_k" in v.name]
print(json.dumps({
    "file": tersegrad.__file__,
    "list": CliRunner().invoke(app, ["list"]).output,
    "configurations": str(CONFIGURATIONS),
    "page": page(),
    "vectors": vectors,
    "benchmarks": list(registry.load()),
}))
"""


@pytest.fixture(scope="module")
def seen(copy: Path) -> dict[str, Any]:
    """What one interpreter finds in the copy."""
    found: dict[str, Any] = json.loads(run(copy, "-c", LOOK))
    return found


def test_the_copy_is_what_is_imported(copy: Path, seen: dict[str, Any]) -> None:
    assert str(copy) in seen["file"]


def test_list_bench_and_table_show_it(seen: dict[str, Any]) -> None:
    assert "first_k(k=100)" in seen["list"]
    assert "first_k(k=100)" in seen["configurations"]
    assert "| `first_k(k)` | Send the first k coordinates. | `first_k(k=100)` | none | 128 |" in seen["page"]


def test_the_laws_run_over_it(copy: Path) -> None:
    options = ("-q", "-p", "no:cacheprovider", "--import-mode=importlib", "-W", "ignore::pytest.PytestConfigWarning")
    shown = run(copy, "-m", "pytest", *options, "-k", "first_k", "tests/laws")
    passed = re.search(r"(\d+) passed", shown)
    assert passed is not None
    assert int(passed[1]) >= 15


def test_vectors_are_made_of_it(seen: dict[str, Any]) -> None:
    for name in ("normal65", "nonfinite65", "normal700", "cut", "longer", "empty"):
        assert f"first_k-k-100.{name}" in seen["vectors"]


def test_benchmarks_time_it(seen: dict[str, Any]) -> None:
    assert "compressor/first_k(k=100)" in seen["benchmarks"]


def test_the_page_of_all_compressors_is_made_from_the_registry() -> None:
    from tersegrad.report.catalog import page

    assert (ROOT / "docs" / "compressors.md").read_text(encoding="utf-8") == page(), "run: make table"

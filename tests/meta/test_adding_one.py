"""The compressor of docs/add-your-own.md, registered in a copy of the package, is found everywhere that the docs say."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

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


def test_the_copy_is_what_is_imported(copy: Path) -> None:
    assert str(copy) in run(copy, "-c", "import tersegrad; print(tersegrad.__file__)")


def test_list_bench_and_table_show_it(copy: Path) -> None:
    assert "first_k(k=100)" in run(copy, "-m", "tersegrad.cli", "list")
    assert "first_k(k=100)" in run(copy, "-c", "from tersegrad.report.catalog import CONFIGURATIONS; print(CONFIGURATIONS)")
    page = run(copy, "-c", "from tersegrad.report.catalog import page; print(page())")
    assert "| `first_k(k)` | Send the first k coordinates. | `first_k(k=100)` | none | 128 |" in page


def test_the_laws_run_over_it(copy: Path) -> None:
    options = ("-q", "-p", "no:cacheprovider", "--import-mode=importlib", "-W", "ignore::pytest.PytestConfigWarning")
    shown = run(copy, "-m", "pytest", *options, "-k", "first_k", "tests/laws")
    passed = re.search(r"(\d+) passed", shown)
    assert passed is not None
    assert int(passed[1]) >= 15


def test_vectors_are_made_of_it(copy: Path) -> None:
    code = "from spec import make_vectors as m; print([v.name for v in (*m.accepted(), *m.refused()) if 'first_k' in v.name])"
    names = run(copy, "-c", code)
    for name in ("normal65", "nonfinite65", "normal700", "cut", "longer", "empty"):
        assert f"first_k-k-100.{name}" in names


def test_benchmarks_time_it(copy: Path) -> None:
    code = "from benchmarks import registry; print('compressor/first_k(k=100)' in registry.load())"
    assert run(copy, "-c", code).strip() == "True"


def test_the_page_of_all_compressors_is_made_from_the_registry() -> None:
    from tersegrad.report.catalog import page

    assert (ROOT / "docs" / "compressors.md").read_text(encoding="utf-8") == page(), "run: make table"

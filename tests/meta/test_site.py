"""The documentation's website: every page is in its navigation, and it builds without a warning."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
NAVIGATION = re.findall(r"^ +- .*: (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE)


def test_every_page_is_in_the_navigation_once() -> None:
    pages = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    assert len(NAVIGATION) == len(set(NAVIGATION))
    assert set(NAVIGATION) == pages | {"results/benchmarks.md", "results/experiments.md"}
    assert NAVIGATION[:2] == ["index.md", "plan.md"]  # what everybody asks first


def test_every_compressor_and_wrapper_is_in_the_reference() -> None:
    told = set(re.findall(r"^::: tersegrad\.(\w+)\.(\w+)$", (ROOT / "docs/api/compressors.md").read_text(), re.MULTILINE))
    files = {
        (folder, path.stem)
        for folder in ("compressors", "wrappers")
        for path in (ROOT / "src/tersegrad" / folder).glob("*.py")
        if path.stem not in ("__init__", "transformed")
    }
    assert told == files


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", str(folder)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    return folder


def test_it_builds_without_a_warning(site: Path) -> None:
    assert "Does it pay on my link?" in (site / "index.html").read_text()
    handles = (site / "api/handles/index.html").read_text()
    assert 'id="tersegrad.engine.handle.Handle.log_to"' in handles
    assert ":class:" not in handles
    assert "Accuracy along the planner's ladder" in (site / "results/benchmarks/index.html").read_text()
    assert (site / "results/images/optimal_compression-rate_error.png").stat().st_size > 10_000


def test_what_is_searched_is_found(site: Path) -> None:
    documents: list[dict[str, Any]] = json.loads((site / "search/search_index.json").read_text())["docs"]
    for word in ("log_to", "Compress", "sparse_dithering", "GradScaler"):
        assert any(word in one["title"] + one["text"] for one in documents), word

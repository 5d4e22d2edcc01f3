"""The documentation's website: every page is in its navigation, and it builds without a warning."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from benchmarks import pages

from tests.report.browser import BROWSER, needs_browser

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
    """The website, built as ``make docs`` does, elsewhere."""
    folder = tmp_path_factory.mktemp("site")
    pages.write(folder / "docs")
    settings = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").replace("docs_dir: build/docs", "docs_dir: docs")
    settings = settings.replace("paths: [src]", f"paths: [{ROOT}/src]").replace(
        "benchmarks/pages.py:", f"{ROOT}/benchmarks/pages.py:"
    )
    (folder / "mkdocs.yml").write_text(settings, encoding="utf-8")
    zensical = Path(sys.executable).with_name("zensical")
    done = subprocess.run([zensical, "build", "--strict"], cwd=folder, capture_output=True, text=True, check=False, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "No issues found" in done.stderr
    return folder / "site"


def test_it_builds_without_a_warning(site: Path) -> None:
    assert "Does it pay on my link?" in (site / "index.html").read_text()
    handles = (site / "api/handles.html").read_text()
    assert 'id="tersegrad.engine.handle.Handle.log_to"' in handles
    assert ":class:" not in handles
    assert "Accuracy along the planner's ladder" in (site / "results/benchmarks.html").read_text()
    assert (site / "results/images/optimal_compression-rate_error.png").stat().st_size > 10_000


def test_what_is_searched_is_found(site: Path) -> None:
    items: list[dict[str, Any]] = json.loads((site / "search.json").read_text())["items"]
    for word in ("log_to", "Compress", "sparse_dithering", "GradScaler"):
        assert any(word in one["title"] + one["text"] for one in items), word


def test_it_needs_no_server_and_no_network(site: Path) -> None:
    """Pages link to files, and bring their scripts, styles and fonts."""
    for page in site.rglob("*.html"):
        if page.name == "404.html":
            continue
        text = page.read_text()
        fetched = re.findall(r"<(?:script|link|img|iframe)[^>]*\b(?:src|href)=\"([^\"#]*)", text)
        linked = re.findall(r"<a [^>]*\bhref=\"(?!https?:|mailto:)([^\"#]+)", text)
        assert not [url for url in fetched if url.startswith(("http", "//"))], page
        assert [url for url in (*fetched, *linked) if url and not (page.parent / url).is_file()] == [], page


# Opens the search, types a word, and leaves the links that were found in the page.
SEARCH = """<script>
const wait = (ms) => new Promise((done) => setTimeout(done, ms));
const all = (what) => [document, ...[...document.querySelectorAll("*")].map((e) => e.shadowRoot).filter(Boolean)]
  .flatMap((root) => [...root.querySelectorAll(what)]);
addEventListener("load", async () => {
  await wait(500);
  document.querySelector(".md-search__button").click();
  await wait(1500);
  const field = all("input[type=text], input[type=search], input[role=combobox]")[0];
  field.value = "FSDP2";
  field.dispatchEvent(new InputEvent("input", { bubbles: true, composed: true }));
  await wait(2500);
  document.body.dataset.found = all("a").map((a) => a.getAttribute("href") || "").filter((h) => h.includes("?h=")).join(" ");
});
</script>"""


@needs_browser
def test_search_answers_from_a_disk(site: Path) -> None:
    assert BROWSER is not None
    page = site / "used.html"
    page.write_text((site / "index.html").read_text().replace("</body>", SEARCH + "</body>"))
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--virtual-time-budget=10000"]
    command += [f"--user-data-dir={site.parent / 'profile'}", "--window-size=1280,900", "--dump-dom", page.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True)
    page.unlink()
    found = re.search(r'data-found="([^"]*)"', done.stdout)
    assert found is not None
    assert any("fsdp.html" in link for link in found[1].split())

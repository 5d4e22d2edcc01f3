"""The Triton kernel of docs/add-a-kernel.md, run by Triton's interpreter and compared with the reference as the page says."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "add-a-kernel.md"


def files() -> dict[str, str]:
    """The files that the page shows, by name."""
    found = re.findall(r'```python title="([^"]+)"\n(.*?)```', PAGE.read_text(encoding="utf-8"), re.DOTALL)
    return dict(found)


def test_the_page_shows_a_kernel_and_its_comparison() -> None:
    shown = files()
    assert sorted(shown) == ["bf16.py", "compare.py"]
    for name, text in shown.items():
        compile(text, name, "exec")


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed: make frameworks")
@pytest.mark.parametrize("wrong", [False, True])
def test_the_kernel_of_the_page_equals_the_reference(tmp_path: Path, wrong: bool) -> None:
    for name, text in files().items():
        (tmp_path / name).write_text(text.replace("low << 16", "low << 8") if wrong else text)
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    run = [sys.executable, "compare.py"]
    done = subprocess.run(run, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert ("AssertionError" in done.stderr) == wrong, done.stderr
    assert (done.returncode != 0) == wrong

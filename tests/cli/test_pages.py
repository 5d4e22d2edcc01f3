"""The commands in the documentation run, and print what the page shows.

A block of ``console`` is a command after ``$`` and what it prints. A line of dots stands for lines that were left out. What
depends on the machine (``demo``, ``bench speed``, ``doctor`` and ``plan``) is run in a small form, and only its headings are compared.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tests.cli.test_plan import known
from typer.testing import CliRunner

import tersegrad
from tersegrad.bench import planning
from tersegrad.cli import app
from tersegrad.core import frame
from tersegrad.core.protocol import Context, Spec

PAGE = Path(__file__).parents[2] / "docs" / "command-line.md"
BLOCKS = re.findall(r"^```console\n\$ tersegrad (.*?)\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def squeezed(text: str) -> list[str]:
    """Lines without the spaces that only align."""
    return [" ".join(line.split()) for line in text.splitlines() if line.strip()]


@pytest.mark.parametrize(("command", "shown"), BLOCKS, ids=[command for command, _ in BLOCKS])
def test_page_shows_what_is_printed(command: str, shown: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("COLUMNS", raising=False)  # a page shows what a file would hold
    monkeypatch.setattr(planning, "coding_of", known)
    compressor, spec, context = tersegrad.parse("qsgd(bits=4)"), Spec.flat(100_000), Context(seed=7, step=1200, sender=3)
    x = torch.randn(100_000, generator=torch.Generator().manual_seed(0))
    message, _ = compressor.encode(x, spec, compressor.init(spec, "cpu"), context)
    Path("gradient.tgrd").write_bytes(
        frame.pack(message, wire_id=compressor.wire_id, text=str(compressor), spec=spec, context=context)
    )
    Path("run.jsonl").write_text('{"run": "bf16, all_reduce"}\n{"step": 1, "loss": 2.0, "sent": 100}\n')
    timed = command.startswith(("demo", "bench speed", "doctor", "plan"))
    words = (
        shlex.split(command) + {"demo": ["--quick"], "benc": ["--size", "16Ki", "--rounds", "3"]}.get(command[:4], []) * timed
    )
    if command == "demo" or command.startswith("train"):  # worker processes write to the real standard output
        ran = subprocess.run(
            [sys.executable, "-m", "tersegrad.cli", *words, *(["--workers", "2"] if command == "demo" else [])],
            env=os.environ | {"PYTHONPATH": str(PAGE.parents[1] / "src"), "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
        code, output = ran.returncode, ran.stdout + (ran.stderr if ran.returncode else "")
    else:
        result = CliRunner().invoke(app, words)
        code, output = result.exit_code, result.output
    assert code == 0, output
    printed = squeezed(output)
    for line in squeezed(shown):
        if line == "..." or (timed and re.search(r"\d", line)):
            continue
        assert line in printed


def test_every_command_is_on_the_page() -> None:
    assert {command.split()[0] for command, _ in BLOCKS} == {
        "demo",
        "train",
        "plan",
        "bench",
        "bounds",
        "inspect",
        "list",
        "doctor",
        "report",
    }

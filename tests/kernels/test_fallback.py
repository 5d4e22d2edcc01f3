"""Without the compiled module everything runs on plain torch, writes the same bytes and says so once; see also ``make install-check``."""

from __future__ import annotations

import ast
import os
import subprocess
import sys

import pytest
import torch

import tersegrad
from tersegrad import kernels
from tersegrad.kernels import native

SCRIPT = """
import sys
sys.modules["tersegrad.kernels._native"] = None
import torch, tersegrad
from tersegrad.kernels import native
assert not native.available()
x = torch.arange(1000.0)
for text in ("qsgd(bits=4)", "top_k(fraction=0.01)", "sparse_dithering(alpha=0.1)"):
    print(tersegrad.to_frame(text, x).hex())
"""
WARNING = "tersegrad runs on its plain-torch kernels"


# Each is forked from an interpreter that has torch but not tersegrad.
FORKS = """
import os, sys, tempfile, torch
script = sys.stdin.read()
for rank in ("", "0", "1"):
    with tempfile.TemporaryFile() as said, tempfile.TemporaryFile() as warned:
        child = os.fork()
        if child == 0:
            os.dup2(said.fileno(), 1)
            os.dup2(warned.fileno(), 2)
            if rank:
                os.environ["LOCAL_RANK"] = rank
            exec(script, {})
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0, rank
        for file in (said, warned):
            file.seek(0)
            print(ascii(file.read().decode()))
"""


@pytest.fixture(scope="module")
def runs() -> dict[str, tuple[str, str]]:
    """What a process writes and warns of: one outside of torchrun, and its workers of local rank 0 and 1."""
    words, environment = [sys.executable, "-c", FORKS], {k: v for k, v in os.environ.items() if k != "LOCAL_RANK"}
    done = subprocess.run(words, input=SCRIPT, capture_output=True, text=True, timeout=120, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    lines = [ast.literal_eval(line) for line in done.stdout.splitlines()]
    return {rank: (lines[2 * k], lines[2 * k + 1]) for k, rank in enumerate(("", "0", "1"))}


def test_the_same_bytes_and_one_warning(runs: dict[str, tuple[str, str]]) -> None:
    written, warned = runs[""]
    x = torch.arange(1000.0)
    texts = ("qsgd(bits=4)", "top_k(fraction=0.01)", "sparse_dithering(alpha=0.1)")
    assert written.split() == [tersegrad.to_frame(text, x).hex() for text in texts]
    assert warned.count(WARNING) == 1
    assert "install a C++20 compiler" in warned


def test_of_the_workers_on_a_machine_only_the_first_warns(runs: dict[str, tuple[str, str]]) -> None:
    assert runs["0"][1].count(WARNING) == 1
    assert WARNING not in runs["1"][1]


def test_the_reason_and_the_remedy_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "module", None)
    monkeypatch.setattr(native, "missing", "the compiled ones do not load (no such symbol)")
    monkeypatch.setattr(kernels, "_warned", False)
    monkeypatch.setattr(kernels, "_chosen", {})
    with pytest.warns(RuntimeWarning, match=r"do not load \(no such symbol\).*compiler"):
        kernels.get(torch.device("cpu"))
    with pytest.raises(RuntimeError, match="no such symbol"), kernels.force("native"):
        pass

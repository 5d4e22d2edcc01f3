"""Without the compiled module everything runs on plain torch, writes the same bytes and says so once; see also ``make install-check``."""

from __future__ import annotations

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


def run(**environment: str) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-c", SCRIPT]
    return subprocess.run(words, capture_output=True, text=True, timeout=120, check=True, env=os.environ | environment)


def test_the_same_bytes_and_one_warning() -> None:
    done = run()
    x = torch.arange(1000.0)
    written = [
        tersegrad.to_frame(text, x).hex() for text in ("qsgd(bits=4)", "top_k(fraction=0.01)", "sparse_dithering(alpha=0.1)")
    ]
    assert done.stdout.split() == written
    assert done.stderr.count(WARNING) == 1
    assert "install a C++20 compiler" in done.stderr


def test_of_the_workers_on_a_machine_only_the_first_warns() -> None:
    assert run(LOCAL_RANK="0").stderr.count(WARNING) == 1
    assert WARNING not in run(LOCAL_RANK="1").stderr


def test_the_reason_and_the_remedy_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "module", None)
    monkeypatch.setattr(native, "missing", "the compiled ones do not load (no such symbol)")
    monkeypatch.setattr(kernels, "_warned", False)
    monkeypatch.setattr(kernels, "_chosen", {})
    with pytest.warns(RuntimeWarning, match=r"do not load \(no such symbol\).*compiler"):
        kernels.get(torch.device("cpu"))
    with pytest.raises(RuntimeError, match="no such symbol"), kernels.force("native"):
        pass

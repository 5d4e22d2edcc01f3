"""``tersegrad inspect`` names the kind of every message as its compressor does."""

from __future__ import annotations

import math

import pytest
import torch

import tersegrad
from tersegrad.core.protocol import Context, Stats
from tersegrad.report import explain

NORMAL, ZERO, NON_FINITE = "normal", "all zero", "non-finite input"

X = torch.randn(300, generator=torch.Generator().manual_seed(1))
KINDS = {
    "qsgd": (None, None, None),
    "bf16": (None, None, None),
    "by_tensor(bf16)": (None, None, None),
    "qsgd(levels=1, coder=rans)": (NORMAL, ZERO, NON_FINITE),
    "natural(coder=rans)": (NORMAL, ZERO, NON_FINITE),
    "top_k(fraction=0.1)": (NORMAL, ZERO, NON_FINITE),
    "threshold(tau=1)": (NORMAL, ZERO, NON_FINITE),
    "sparse_dithering(nu=0.1)": ("short", ZERO, NON_FINITE),
    "sparse_dithering(nu=0.1, coder=rans)": ("rANS segments", "rANS segments", NON_FINITE),
    "random_sparse_dithering(omega=1)": ("short", ZERO, NON_FINITE),
    "subtractive_dithering(omega=0.25)": ("short", ZERO, NON_FINITE),
    "subtractive_dithering(omega=0.25, coder=rans)": ("rANS segments", ZERO, NON_FINITE),
    "spherical(alpha=0.95)": (NORMAL, ZERO, NON_FINITE),
    "spherical(alpha=0.5, block=4)": (NORMAL, ZERO, NON_FINITE),
    "vgc(alpha=1.5)": (NORMAL, ZERO, NON_FINITE),
    "vgc(alpha=1.5, wire=paper)": ("the paper's words", "the paper's words", NON_FINITE),
    "hybrid(alpha=2, tau=0.1)": (NORMAL, ZERO, NON_FINITE),
    "error_feedback(top_k(fraction=0.1))": (NORMAL, ZERO, NON_FINITE),
    "rotated(top_k(fraction=0.1))": (NORMAL, ZERO, NON_FINITE),
    "metered(top_k(fraction=0.1))": (NORMAL, ZERO, NON_FINITE),
}


@pytest.mark.parametrize("text", KINDS)
def test_the_mode_of_a_message_is_named(text: str) -> None:
    for x, wanted in zip((X, torch.zeros(300), torch.full((300,), math.nan)), KINDS[text], strict=True):
        stats = Stats(torch.zeros(300)) if text.startswith(("vgc", "hybrid")) else None
        found = explain(tersegrad.to_frame(text, x, Context(seed=1), stats))
        assert found.decodes
        assert found.fields().get("mode") == wanted


def test_a_packed_message_says_so() -> None:
    assert explain(tersegrad.to_frame("qsgd(levels=1, coder=rans)", X[:50], Context(seed=1))).fields()["mode"] == "packed"

"""Sparse Dithering on tensors whose rows differ: guarantees hold, messages are shorter, and parts decode as parts."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

import tersegrad
from tersegrad.core import state
from tersegrad.core.errors import CorruptMessage
from tersegrad.core.protocol import Context, Message, Piece, Spec

SHAPES = ((64, 8, 3, 3), (64,), (100, 64), (10, 100), (10,))
TEXTS = (
    "sparse_dithering(nu=0.1)",
    "sparse_dithering(nu=0.1, scale=global)",
    "sparse_dithering(alpha=0.1)",
    "sparse_dithering(bits=1.0)",
    "random_sparse_dithering(omega=0.5)",
    "error_feedback(sparse_dithering(alpha=0.1))",
    "by_tensor(sparse_dithering(alpha=0.1))",
)


def gradient() -> tuple[torch.Tensor, Spec]:
    g = torch.Generator().manual_seed(0)
    parts = [
        torch.randn(s, generator=g) * torch.exp2(2 * torch.randn(s[0], generator=g)).view(-1, *[1] * (len(s) - 1))
        for s in SHAPES
    ]
    return torch.cat([p.flatten() for p in parts]), Spec(tuple(Piece(s, 0, math.prod(s)) for s in SHAPES))


def sent(text: str, x: torch.Tensor, spec: Spec) -> tuple[int, torch.Tensor]:
    c = tersegrad.parse(text)
    message, _ = c.encode(x, spec, c.init(spec, "cpu"), Context(seed=1))
    return int(message.nbytes), c.decode(Message.frombytes(message.tobytes()), spec, Context(seed=1))


@pytest.mark.parametrize("text", TEXTS)
def test_shapes_make_messages_shorter_or_better(text: str) -> None:
    x, spec = gradient()
    norm = float(x.double().square().sum())
    length, values = sent(text, x, spec)
    plain, others = sent(text, x, Spec.flat(x.numel()))
    error, before = (float((v.double() - x).square().sum()) / norm for v in (values, others))
    promise = tersegrad.parse(text).guarantee(spec)
    assert promise.kind != "contractive" or error <= promise.value * (1 + 1e-6)
    if "bits" in text:
        assert length <= x.numel() / 8
        assert error < 0.9 * before
    else:
        assert length < 0.97 * plain


def test_parts_of_a_buffer() -> None:
    x, spec = gradient()
    cuts = [0, 3700, 7411, x.numel()]
    for a, b in itertools.pairwise(cuts):
        part, y = state.slice_spec(spec, a, b), x[a:b].contiguous()
        length, values = sent("sparse_dithering(nu=0.01)", y, part)
        assert float((values - y).square().sum()) <= 0.01 * float(y.square().sum())
        assert length < sent("sparse_dithering(nu=0.01)", y, Spec.flat(b - a))[0]


def test_another_spec_is_refused_or_decodes_to_a_vector() -> None:
    x, spec = gradient()
    c = tersegrad.parse("sparse_dithering(nu=0.01)")
    message, _ = c.encode(x, spec, None, Context())
    try:
        values = c.decode(message, Spec.flat(x.numel()), Context())
    except CorruptMessage:
        return
    assert values.shape == x.shape

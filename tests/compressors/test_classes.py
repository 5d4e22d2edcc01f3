"""Dithering on tensors whose rows differ: guarantees hold, messages are shorter, and parts decode as parts."""

from __future__ import annotations

import itertools
import math
import struct
from typing import Any

import pytest
import torch

import tersegrad
from tersegrad import kernels
from tersegrad.codecs import classed
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
    "trellis(nu=0.1)",
    "trellis(alpha=0.1, states=16)",
    "trellis(bits=1.0)",
    "dithered_trellis(omega=0.2)",
    "subtractive_dithering(omega=0.2)",
    "subtractive_dithering(omega=0.05, coder=rans, scale=global)",
    "error_feedback(trellis(alpha=0.1))",
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


# Quantisers whose levels are coded as dithered levels where classes make them shorter.
CODED = (
    "qsgd(bits=4, norm=max, coder=rans)",
    "qsgd(levels=100, bucket=8192, norm=max, coder=rans)",
    "natural(coder=rans)",
    "natural_dithering(coder=rans)",
    "error_feedback(qsgd(levels=20, coder=rans))",
)


@pytest.mark.parametrize("text", CODED)
def test_other_quantisers_take_classes_where_they_are_shorter(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x, spec = gradient()
    length, values = sent(text, x, spec)
    parts = [sent(text, x[:d].contiguous(), state.slice_spec(spec, 0, d)) for d in (0, 1, 511, 3000)]
    monkeypatch.setattr(classed, "encode", lambda *_: None)
    plain, same = sent(text, x, spec)
    assert torch.equal(values, same)
    # Exponents of rows differ by a few octaves among many: only much larger tensors gain there.
    assert length < 0.97 * plain or "natural(" in text
    for d, (short, found) in zip((0, 1, 511, 3000), parts, strict=True):
        before, wanted = sent(text, x[:d].contiguous(), state.slice_spec(spec, 0, d))
        assert torch.equal(found, wanted)
        assert short <= before


@pytest.mark.parametrize("text", CODED)
def test_even_vectors_keep_one_table(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(20_000, generator=torch.Generator().manual_seed(3))
    length, _ = sent(text, x, Spec.of(x))
    monkeypatch.setattr(classed, "encode", lambda *_: None)
    assert length == sent(text, x, Spec.of(x))[0]


def test_exponents_take_classes_where_rows_lie_far_apart() -> None:
    g = torch.Generator().manual_seed(5)
    x = torch.randn(300, 400, generator=g) * torch.exp2(-12.0 * (torch.arange(300) % 3))[:, None]
    length, values = sent("natural(coder=rans)", x.flatten(), Spec.of(x))
    plain, same = sent("natural(coder=rans)", x.t().flatten(), Spec.flat(x.numel()))
    assert length < 0.8 * plain
    assert float((values - x.flatten()).abs().max() / x.abs().max()) < 0.5
    assert same.shape == values.shape


def test_a_sample_decides_for_long_vectors(monkeypatch: pytest.MonkeyPatch) -> None:
    g = torch.Generator().manual_seed(4)
    rows, columns = 1100, 1000
    levels = torch.randn(rows, columns, generator=g).mul(torch.exp2(torch.arange(rows) % 6)[:, None]).round().flatten()
    layout = Spec.of(torch.empty(rows, columns)).layout
    data = classed.encode(lambda begin, end: levels[begin:end], levels.numel(), layout, "auto")
    assert data is not None
    assert torch.equal(classed.decode(data, levels.numel(), -999, 999, layout).float(), levels)
    coded: list[int] = []
    kept = classed._code

    def counting(x: torch.Tensor, *arguments: Any) -> torch.Tensor:
        coded.append(x.numel())
        return kept(x, *arguments)

    monkeypatch.setattr(classed, "_code", counting)
    even = torch.randn(rows * columns, generator=g).round()
    assert classed.encode(lambda begin, end: even[begin:end], even.numel(), layout, "auto") is None
    assert coded == []
    with kernels.force("reference"):
        assert classed.encode(lambda begin, end: even[begin:end], even.numel(), layout, "auto") is None
    assert coded == [classed.SEGMENT]


def test_levels_must_be_integers_within_bounds() -> None:
    layout = Spec.flat(3).layout
    for bad in (0.5, 8.0, -8.0, math.nan, math.inf):
        raw = struct.pack("<IB3f", 1 << 31, 1, 1.0, bad, 0.0)
        with pytest.raises(CorruptMessage, match="integer"):
            classed.decode(Message.frombytes(raw).data, 3, -7, 7, layout)

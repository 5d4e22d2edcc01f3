"""The block cosine transform as a wrapper."""

from __future__ import annotations

import math

import pytest
import torch

import tersegrad
from tersegrad.core.errors import BadConfiguration, CorruptMessage
from tersegrad.core.protocol import Context, Message, Piece, Spec, decode_sent, restore

SPEC = Spec((Piece((48, 80), 0, 3840), Piece((70,), 0, 70), Piece((30, 30), 17, 500)))


def basis(n: int) -> torch.Tensor:
    """The orthonormal DCT-II by its textbook formula, float64."""
    j, i = torch.arange(n, dtype=torch.float64).unsqueeze(1), torch.arange(n, dtype=torch.float64)
    rows = math.sqrt(2 / n) * torch.cos(math.pi * (2 * i + 1) * j / (2 * n))
    rows[0] /= math.sqrt(2)
    return rows


def test_coefficients_are_those_of_the_tiles() -> None:
    """Tiles of the largest divisor up to the block in both dimensions; a vector's runs likewise; a shard in runs of the block."""
    x = torch.randn(SPEC.numel)
    c = tersegrad.parse("dct(identity, block=32)")
    message, _ = c.encode(x, SPEC, None, Context())
    sent = decode_sent(c, message, SPEC, Context())
    tile = basis(24) @ x[:3840].view(48, 80)[24:, 40:60].double() @ basis(20).T
    torch.testing.assert_close(sent[:3840].view(48, 80)[24:, 40:60].double(), tile, rtol=0, atol=3e-6)
    run = basis(14) @ x[3840:3854].double()
    torch.testing.assert_close(sent[3840:3854].double(), run, rtol=0, atol=3e-6)
    shard = basis(32) @ x[3910:3942].double()
    torch.testing.assert_close(sent[3910:3942].double(), shard, rtol=0, atol=3e-6)


def test_it_is_orthonormal_and_inverts() -> None:
    x = torch.randn(SPEC.numel)
    c = tersegrad.parse("dct(identity)")
    message, _ = c.encode(x, SPEC, None, Context())
    sent = decode_sent(c, message, SPEC, Context())
    assert abs(float(sent.norm() / x.norm()) - 1) < 1e-6
    decoded = c.decode(message, SPEC, Context())
    assert torch.equal(decoded, restore(c, sent, SPEC))
    assert float((decoded - x).norm()) < 1e-6 * float(x.norm())
    assert c.guarantee(SPEC).value < 1e-10


@pytest.mark.parametrize("scale", [1e-40, 3e37, 3.4e38])
def test_extreme_magnitudes_stay_finite(scale: float) -> None:
    x = torch.randn(4096).clamp(-1, 1) * scale
    c = tersegrad.parse("dct(chunk_top_k(k=256))")
    spec = Spec((Piece((64, 64), 0, 4096),))
    message, _ = c.encode(x, spec, None, Context())
    decoded = c.decode(message, spec, Context())
    assert bool(torch.isfinite(decoded).all())
    assert float((decoded.double() - x.double()).norm()) < float(x.double().norm())


def test_columns_of_the_largest_coefficients_stay_finite() -> None:
    """Between the two passes their sums leave the range of floats, with both signs, so that the second pass would take inf from inf."""
    signs = torch.where(torch.arange(64) % 2 == 0, 1.0, -1.0)
    coefficients = signs.repeat(64, 1) * torch.finfo(torch.float32).max
    c = tersegrad.parse("dct(identity)")
    spec = Spec((Piece((64, 64), 0, 4096),))
    decoded = restore(c, coefficients.flatten(), spec)
    assert bool(torch.isfinite(decoded).all())
    exact = restore(c, coefficients.flatten() / 2**32, spec).double() * 2**32
    largest = torch.finfo(torch.float32).max
    assert torch.equal(decoded, exact.clamp(-largest, largest).float())


def test_bad_bytes_and_bad_parts_are_refused() -> None:
    c = tersegrad.parse("dct(int8)")
    message, _ = c.encode(torch.randn(100), Spec.flat(100), None, Context())
    data = bytearray(message.tobytes())
    data[-1] = 2
    with pytest.raises(CorruptMessage, match="last byte"):
        c.decode(Message.frombytes(data), Spec.flat(100), Context())
    with pytest.raises(CorruptMessage):
        c.decode(Message.frombytes(b""), Spec.flat(100), Context())
    with pytest.raises(BadConfiguration, match=r"error_feedback\(dct"):
        tersegrad.parse("dct(error_feedback(sign))")
    with pytest.raises(BadConfiguration, match="block"):
        tersegrad.parse("dct(int8, block=0)")


def test_error_feedback_keeps_the_residual_in_the_space_of_gradients() -> None:
    c = tersegrad.parse("error_feedback(dct(chunk_top_k(k=16)), decay=0.5)")
    spec = Spec((Piece((64, 64), 0, 4096),))
    x, state = torch.randn(4096), c.init(spec, "cpu")
    first, state = c.encode(x, spec, state, Context())
    left = x - c.decode(first, spec, Context())
    torch.testing.assert_close(state.residual, left)
    second, state = c.encode(x, spec, state, Context(step=1))
    torch.testing.assert_close(state.residual, x + 0.5 * left - c.decode(second, spec, Context(step=1)), rtol=1e-5, atol=1e-6)

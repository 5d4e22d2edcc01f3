"""Aligned signs: exact around any compressor, shorter where signs agree, the same description from every backend."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import tersegrad
from tersegrad.core import state
from tersegrad.core.errors import BadConfiguration, CorruptMessage
from tersegrad.core.protocol import Context, Message, Piece, Spec
from tersegrad.kernels import native, reference
from tersegrad.kernels.reference import align
from tests.device import Device

SHAPES = ((64, 9, 3, 3), (64,), (90, 70), (300, 5), (3, 500), (10,))


def gradient(share: float = 0.1) -> tuple[Tensor, Spec]:
    """Outer products of signs, ``share`` of them wrong."""
    g, parts = torch.Generator().manual_seed(0), []
    for shape in SHAPES:
        columns = math.prod(shape[1:])
        rows, across = (torch.randint(0, 2, (n,), generator=g) * 2.0 - 1 for n in (shape[0], columns))
        wrong = torch.where(torch.rand(shape[0], columns, generator=g) < share, -1.0, 1.0)
        parts.append((torch.randn(shape[0], columns, generator=g).abs() * rows[:, None] * across * wrong).flatten())
    return torch.cat(parts), Spec(tuple(Piece(s, 0, math.prod(s)) for s in SHAPES))


def sent(text: str, x: Tensor, spec: Spec) -> tuple[int, Tensor]:
    c, ctx = tersegrad.parse(text), Context(seed=1)
    message, _ = c.encode(x, spec, c.init(spec, "cpu"), ctx)
    assert int(message.nbytes) <= c.max_nbytes(spec)
    return int(message.nbytes), c.decode(Message.frombytes(message.tobytes()), spec, ctx)


@pytest.mark.parametrize(
    "inner", ["sparse_dithering(alpha=0.1)", "qsgd(levels=15, norm=max, coder=rans)", "trellis(alpha=0.05)"]
)
def test_signs_that_agree_are_not_sent_twice(inner: str) -> None:
    x, spec = gradient(0.02)
    plain, without = sent(inner, x, spec)
    length, values = sent(f"aligned({inner})", x, spec)
    before, after = (float((v - x).square().sum() / x.square().sum()) for v in (without, values))
    assert length < 0.9 * plain
    assert after <= 1.1 * before


@pytest.mark.parametrize("inner", ["identity", "bf16", "sparse_dithering(nu=0.1)", "sign", "top_k(fraction=0.1)"])
def test_negation_is_exact(inner: str) -> None:
    x, spec = gradient()
    _, wanted = sent(inner, x, spec)
    _, values = sent(f"aligned({inner})", x, spec)
    if inner in ("identity", "bf16", "top_k(fraction=0.1)"):
        assert torch.equal(values, wanted)
    assert tersegrad.parse(f"aligned({inner})").guarantee(spec) == tersegrad.parse(inner).guarantee(spec)
    assert float((values - x).square().sum()) <= 1.001 * float((wanted - x).square().sum())


def test_random_signs_are_left_alone() -> None:
    g = torch.Generator().manual_seed(2)
    x = torch.randn(200, 300, generator=g)
    length, _ = sent("aligned(sparse_dithering(alpha=0.1))", x, Spec.of(x))
    assert length == 1 + sent("sparse_dithering(alpha=0.1)", x, Spec.of(x))[0]


def test_signs_that_cost_more_than_they_save_are_not_sent() -> None:
    # A few coordinates hold nearly all of the energy: many exceed the mean square, few are coded.
    x, spec = gradient(0.05)
    x[::997] *= 300
    text = "sparse_dithering(alpha=0.5)"
    assert sent(f"aligned({text})", x, spec)[0] <= 1 + sent(text, x, spec)[0]


def test_awkward_vectors() -> None:
    _, spec = gradient()
    for x in (torch.zeros(spec.numel), torch.full((spec.numel,), 3e38), torch.full((spec.numel,), -1e-41)):
        _, values = sent("aligned(identity)", x, spec)
        assert torch.equal(values, x)
    bad = torch.ones(spec.numel)
    bad[7] = math.nan
    assert bool(sent("aligned(int8)", bad, spec)[1].isnan().all())
    assert sent("aligned(int8)", torch.empty(0), Spec.flat(0))[1].numel() == 0
    x, _ = gradient()
    for a, b in ((0, 4321), (3000, 9000), (5183, x.numel())):
        part = state.slice_spec(spec, a, b)
        assert torch.equal(sent("aligned(identity)", x[a:b], part)[1], x[a:b])


def test_a_vector_larger_than_what_squares_to_a_float() -> None:
    x = torch.full((50, 40), -(2.0**120))
    x[::2] *= -1
    assert torch.equal(sent("aligned(identity)", x.flatten(), Spec.of(x))[1], x.flatten())


@pytest.mark.parametrize("share", [0.02, 0.2, 0.35, 0.5])
def test_native_equals_reference(share: float) -> None:
    x, spec = gradient(share)
    for a, b in ((0, x.numel()), (0, 4321), (3001, 9007), (5183, x.numel()), (17, 40)):
        part, y = state.slice_spec(spec, a, b).layout, x[a:b].contiguous()
        for least in (0.0, 0.5, 1.0, 3.0, 50.0):
            wanted = reference.align_find(y, least, part)
            for threads in (1, 2):
                with native.using(threads=threads):
                    assert torch.equal(native.align_find(y, least, part), wanted), (a, b, least)
            if wanted.numel():
                assert align.nbytes(wanted, part) == wanted.numel() <= align.most_bytes(part)
                flipped, other = torch.empty_like(y), y.clone()
                reference.align_flip(y, wanted, part, flipped)
                native.align_flip(other, wanted, part, other)
                assert torch.equal(flipped, other)
                native.align_flip(other, wanted, part, other)
                assert torch.equal(other, y)


def test_descriptions_that_no_encoder_writes() -> None:
    layout, x = Spec.of(torch.empty(4, 5)).layout, torch.ones(20)
    for told in ([3, 0], [2], [0x41], [1, 0], [], [2, 0, 0]):
        data = torch.tensor(told, dtype=torch.uint8)
        for backend in (reference, native):
            out = torch.zeros(20)
            with pytest.raises(CorruptMessage):
                backend.align_flip(x, data, layout, out)
            assert not out.any()


def test_what_keeps_values_goes_outside() -> None:
    with pytest.raises(BadConfiguration, match="error_feedback\\(aligned"):
        tersegrad.parse("aligned(error_feedback(int8))")
    x, spec = gradient()
    c = tersegrad.parse("error_feedback(aligned(sparse_dithering(alpha=0.2)))")
    kept = c.init(spec, "cpu")
    total = torch.zeros_like(x)
    for step in range(3):
        message, kept = c.encode(x, spec, kept, Context(step=step))
        total += c.decode(message, spec, Context(step=step))
    assert torch.allclose(total + kept.residual, 3 * x, atol=1e-4)


def test_on_a_device() -> None:
    x, spec = gradient()
    c = tersegrad.parse("aligned(bf16)")
    here, _ = c.encode(x, spec, None, Context())
    with Device() as device:
        there, _ = c.encode(device.to(x), spec, None, Context())
        assert device.back(there.payload).tolist() == here.payload.tolist()
        assert torch.equal(device.back(c.decode(there, spec, Context())), c.decode(here, spec, Context()))

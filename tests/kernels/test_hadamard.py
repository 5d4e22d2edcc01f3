"""The rotation: one definition, the same floats on every instruction set and thread count, orthonormal, and fast."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from tersegrad.core import philox
from tersegrad.core.philox import Purpose
from tersegrad.core.protocol import Context
from tersegrad.kernels import native, reference
from tersegrad.kernels.reference.hadamard import rotated_numel, signs

SIZES = (
    0,
    1,
    2,
    3,
    5,
    15,
    16,
    17,
    63,
    64,
    65,
    127,
    128,
    129,
    255,
    257,
    1000,
    4095,
    4096,
    4097,
    4096 + 33,
    3 * 4096 + 2049,
    100_003,
)
BLOCKS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 65536)
CTX = Context(seed=0x0123_4567_89AB_CDEF, step=7, buffer=3, sender=0xFFFF)


def vector(numel: int, seed: int = 0) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


def rotated(backend: object, x: Tensor, block: int) -> tuple[Tensor, float]:
    y = torch.full((rotated_numel(x.numel(), block),), 9.0)
    top = backend.rotate(x, y, block, CTX)  # type: ignore[attr-defined]
    return y, top


def same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.view(torch.int32), b.view(torch.int32))


def test_signs_follow_the_scalar_definition() -> None:
    got = signs(1000, CTX, torch.device("cpu"))
    for i in range(1000):
        block = philox.block(CTX.seed, (i >> 7, Purpose.ROTATION << 24 | i >> 39, CTX.step, CTX.buffer << 16 | CTX.sender))
        assert bool(got[i]) == bool(block[i % 128 // 32] >> i % 32 & 1)


def test_small_transform_by_hand() -> None:
    minus = signs(4, CTX, torch.device("cpu"))
    x = torch.tensor([1.0, 2.0, 3.0, 4.0])
    a, b, c, d = (float(v) for v in torch.where(minus, -x, x) / 2)
    y, top = rotated(reference, x, 4)
    assert y.tolist() == [a + b + c + d, a - b + c - d, a + b - c - d, a - b - c + d]
    assert top == 4.0


@pytest.mark.parametrize("block", BLOCKS)
def test_orthonormal_and_inverse(block: int) -> None:
    for numel in SIZES:
        x = vector(numel)
        y, _ = rotated(reference, x, block)
        norm = float(x.double().square().sum())
        assert float(y.double().square().sum()) == pytest.approx(norm, rel=1e-5, abs=1e-30)
        back = reference.unrotate(y, torch.empty(numel), block, CTX)
        assert float((back - x).double().square().sum()) <= (2 * (math.log2(block) + 2) * 2**-24) ** 2 * norm


def test_a_spike_spreads_evenly() -> None:
    x = torch.zeros(4096)
    x[1234] = 64.0
    y, _ = rotated(reference, x, 4096)
    assert torch.equal(y.abs(), torch.ones(4096))


@pytest.mark.parametrize("isa", native.supported_isas())
@pytest.mark.parametrize("block", BLOCKS)
def test_same_floats_everywhere(isa: str, block: int) -> None:
    for numel in SIZES:
        for x in (vector(numel), vector(numel, 1) * 1e-38, torch.full((numel,), -0.0)):
            want, want_top = rotated(reference, x, block)
            want_back = reference.unrotate(want, torch.empty(numel), block, CTX)
            with native.using(isa=isa, threads=1):
                got, top = rotated(native, x, block)
                back = native.unrotate(got, torch.full((numel,), 9.0), block, CTX)
            assert same_bits(got, want)
            assert same_bits(back, want_back)
            assert top == want_top


@pytest.mark.parametrize("isa", native.supported_isas())
def test_threads_alignment_and_streaming_change_nothing(isa: str) -> None:
    numel = (16 << 20) + 4096 * 3 + 77  # large enough for several threads and for stores that bypass the cache
    x = vector(numel)
    size = rotated_numel(numel, 4096)
    want = torch.empty(size)
    with native.using(isa=isa, threads=1):
        native.rotate(x, want, 4096, CTX)
    store = torch.empty(size + 1)
    with native.using(isa=isa, threads=3):
        native.rotate(x, store[1:], 4096, CTX)
        assert same_bits(store[1:], want)
        back = native.unrotate(store[1:], torch.empty(numel), 4096, CTX)
        whole = numel - numel % 4096  # in place, where no padding is needed
        native.unrotate(want[:whole], want[:whole], 4096, CTX)
    assert same_bits(want[:whole], back[:whole])
    small = 64 << 10
    first, _ = rotated(reference, x[: small + 5], 4096)
    with native.using(isa=isa):
        second, _ = rotated(native, x[: small + 5], 4096)
        odd = torch.empty(first.numel() + 1)
        native.rotate(x[1 : small + 6], odd[1:], 4096, CTX)
    assert same_bits(first, second)
    third, _ = rotated(reference, x[1 : small + 6], 4096)
    assert same_bits(odd[1:], third)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", [0, 70, 4096, 4100])
def test_non_finite_input_is_reported(bad: float, where: int) -> None:
    x = vector(4101)
    x[where] = bad
    assert math.isnan(rotated(reference, x, 4096)[1])
    if native.available():
        for isa in native.supported_isas():
            with native.using(isa=isa):
                assert math.isnan(rotated(native, x, 4096)[1])


def test_bad_arguments_are_refused() -> None:
    x = torch.zeros(100)
    for block, size in ((48, 128), (0, 128), (1 << 17, 128), (64, 127), (64, 129)):
        with pytest.raises(ValueError, match=r"power of two|padded size"):
            native.rotate(x, torch.empty(size), block, CTX)

"""Rate-distortion-optimised levels: all instruction sets and the reference choose the same, and the choice is what it says."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from tersegrad.core.protocol import Context
from tersegrad.kernels import native, reference
from tersegrad.kernels.reference import lowering
from tests.kernels.test_dither import AUTO, BLOCK, PAPER, RANS, SEGMENT, gaussian, heavy, settings, tensor
from tests.laws.inputs import uneven

ZERO, CODED, CLASSED = 0, 2, 3
SHAPES = ((300, 200), (24,), (70, 33, 3), ())


def encode(
    x: Tensor,
    nu: float,
    step: float,
    coder: int,
    backend: object,
    layout: Tensor | None = None,
    left: Tensor | None = None,
    carry: Tensor | None = None,
    rdo: bool = True,
) -> tuple[bytes, float, float]:
    out = torch.empty(reference.dither_max_bytes(x.numel()), dtype=torch.uint8)
    given = (x, nu, step, coder, 0, None, out, left, carry, layout, rdo)
    nbytes, norm, error = backend.dither_encode(*given)  # type: ignore[attr-defined]
    return out[: int(nbytes)].numpy().tobytes(), float(norm), float(error)


def agree(x: Tensor, nu: float, step: float, coder: int, layout: Tensor | None = None) -> bytes:
    """The message, the same from everything there is, and so what it leaves out."""
    wanted, norm, error = encode(x, nu, step, coder, reference, layout)
    values = reference.dither_decode(tensor(wanted), torch.empty(x.numel()), None, layout)
    rest, half = x - values, x * 0.5
    assert math.isclose(error, float(rest.double().square().sum()), rel_tol=1e-4, abs_tol=1e-6 * norm)
    for isa, threads in settings():
        with native.using(isa=isa, threads=threads):
            assert encode(x, nu, step, coder, native, layout) == (wanted, norm, error), (isa, threads)
            for given, carry in ((x, None), (half, half.clone())):
                if carry is not None and not torch.equal(half + half, x):
                    continue
                left = torch.full((x.numel(),), 7.0)
                assert encode(given, nu, step, coder, native, layout, left, carry)[0] == wanted, (isa, threads)
                assert torch.equal(left, rest), (isa, threads)
    return wanted


def test_logarithms_are_those_of_the_mathematics() -> None:
    for a, b in ((1, 1), (3, 2), (7, 5), (1 << 20, 3), ((1 << 32) - 1, 1), (786_433, 786_432), (1000, 999)):
        assert -1e-6 <= 16 * math.log2(a / b) - lowering.log2_sixteenths(a, b) < 1 + 1e-6
    assert all(lowering.log2_sixteenths(1 << k, 1) == 16 * k for k in range(32))


@pytest.mark.parametrize("n", [1, 2, 63, 64, 65, 1000, 4097])
@pytest.mark.parametrize("coder", [AUTO, RANS, PAPER])
def test_small_sizes(n: int, coder: int) -> None:
    agree(heavy(n), 0.1, 0.0, coder)
    agree(gaussian(n, n), 0.0, 0.9, coder)


def test_several_segments_escapes_and_wide_windows() -> None:
    agree(heavy(SEGMENT + SEGMENT // 2 + 77), 0.3, 0.0, RANS)
    for nu in (1.0, 0.01, 1e-4):
        agree(heavy(BLOCK + 4321), nu, 0.0, RANS)
    agree(gaussian(BLOCK + 4321), 0.0, 0.05, RANS)


@pytest.mark.parametrize("nu", [1.0, 0.3, 0.01, 1e-5])
def test_classes_have_thresholds_of_their_own(nu: float) -> None:
    x, spec = uneven(SHAPES)
    data = agree(x, nu, 0.0, RANS, spec.layout)
    plain = encode(x, nu, 0.0, RANS, native, spec.layout, rdo=False)[0]
    assert data[4] == CLASSED
    assert len(data) <= len(plain)
    assert nu < 0.3 or len(data) < 0.96 * len(plain)
    agree(x[: 3 << 13], nu, 0.0, RANS)


def test_levels_that_are_not_worth_their_bits_vanish() -> None:
    """A segment, and a block beside others, of nothing but zeros and a few small ones."""
    x = torch.zeros(SEGMENT // 2)
    x[::5000] = 0.6
    assert agree(x, 0.0, 1.0, RANS)[4] == ZERO
    assert encode(x, 0.0, 1.0, RANS, native, rdo=False)[0][4] == CODED
    x[BLOCK + 3 :: 5000] = -30.0
    data = agree(x, 0.0, 1.0, RANS)
    assert data[4] == CODED
    assert data[7:11] == bytes(4)
    agree(torch.zeros(BLOCK + 1), 0.1, 0.0, RANS)


def test_a_level_is_lowered_where_that_is_cheaper() -> None:
    """By the counts of the levels to nearest: squared error in squared steps plus an eighth per bit decides."""
    x, n = heavy(3000), 3000
    found = reference.dither_decode(tensor(encode(x, 0.0, 1.0, RANS, reference)[0]), torch.empty(n), None)
    k, nearest = torch.round(found / found[found > 0].min()), torch.round(x)
    counts = torch.bincount(nearest.abs().long(), minlength=9).double()
    bits = -torch.log2(counts / torch.tensor([1.0] + [2.0] * (counts.numel() - 1)))
    changed = 0
    for level in range(1, 8):
        here = nearest.abs() == level
        more = bits[level] - bits[level - 1]
        y = x[here].abs().double()
        gain = (y - level) ** 2 + more / 8 - (y - level + 1) ** 2
        lower = k[here].abs() == level - 1
        # Up to what a sixteenth of a bit is worth, and six bits.
        assert bool((gain[lower] > -0.01).all())
        assert bool((gain[~lower] < 0.01).all()) or float(more) > 6
        changed += int(lower.sum())
    assert changed > 50
    assert torch.equal(k[nearest.abs() > 7], nearest[nearest.abs() > 7])


def test_no_coordinate_errs_by_more_than_seven_eighths_of_a_step() -> None:
    x = torch.cat([heavy(BLOCK), torch.zeros(BLOCK)])
    blocks = [lowering.Block(torch.round(b).long(), 1.0) for b in x.clamp(-1e6, 1e6).split(BLOCK)]
    counts = torch.tensor([[1, 1 << 20, 1]])
    for b, part in zip(lowering.lowered(x, blocks, None, counts), x.split(BLOCK), strict=True):
        assert float((b.k - part.clamp(-1e6, 1e6)).abs().max()) <= 0.875


def test_random_levels_are_not_lowered() -> None:
    out = torch.empty(reference.dither_max_bytes(100), dtype=torch.uint8)
    with pytest.raises(ValueError, match="at random"):
        native.dither_encode(gaussian(100), 0.1, 0.0, AUTO, 0, Context(), out, None, None, None, True)

"""The compiled update of variance-based compression is the plain one, bit for bit, on every instruction set and thread count."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from tersegrad.kernels import native, reference

TAU = float(torch.tensor(0.1))  # a float32, as compressors pass it
SIZES = (0, 1, 15, 16, 17, 1023, 1024, 1025, 5000, 300_001)


def inputs(n: int, doubt: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(n)
    r, x = torch.randn(2, n, generator=g).unbind()
    v, s = (torch.rand(2, n, generator=g) * doubt).unbind()
    r[::7] = 0
    x[::7] = 0
    v[::5] = 0
    s[::5] = 0
    return r.contiguous(), v.contiguous(), x.contiguous(), s.contiguous()


def same(ours: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    count = int(expected[4])
    for a, b in zip((*ours[:2], ours[2][:count], ours[3][:count]), (*expected[:2], expected[2][:count], expected[3][:count])):
        assert a.dtype == b.dtype
        bits = torch.int32 if a.dtype == torch.float32 else a.dtype
        assert torch.equal(a.view(bits), b.view(bits))
    assert ours[4:] == expected[4:]


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("doubt", [1e-3, 3.0, 300.0])
def test_native_is_reference(n: int, doubt: float) -> None:
    given = inputs(n, doubt)
    before = [t.clone() for t in given]
    by_variance = reference.variance_select(*given, 1.3, 0.999, 10**6)
    by_both = reference.hybrid_select(*given, 1.3, TAU, 0.999, 10**6)
    for isa in native.supported_isas():
        for threads in (1, 3):
            with native.using(isa=isa, threads=threads):
                same(native.variance_select(*given, 1.3, 0.999, 10**6), by_variance)
                same(native.hybrid_select(*given, 1.3, TAU, 0.999, 10**6), by_both)
    assert all(torch.equal(a, b) for a, b in zip(given, before))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("which", range(4))
def test_what_is_not_finite_is_seen(bad: float, which: int) -> None:
    given = inputs(3000, 3.0)
    given[which][2500] = bad
    for run in (native, reference):
        assert not run.variance_select(*given, 1.3, 0.999, 10**6)[5] or (
            bad < 0 and which in (1, 3)
        )  # a negative moment is nobody's
        assert not run.hybrid_select(*given, 1.3, 0.1, 0.999, 10**6)[5] or (bad < 0 and which in (1, 3))
    same(
        native.variance_select(*inputs(3000, 3.0), 1.3, 0.999, 10**6),
        reference.variance_select(*inputs(3000, 3.0), 1.3, 0.999, 10**6),
    )


def test_large_finite_values_stay_finite() -> None:
    """Squares overflow, what is sent does not."""
    x = torch.full((20,), 3e38)
    zero = torch.zeros(20)
    for run in (native, reference):
        _, _, indices, values, count, finite = run.variance_select(zero, zero, x, torch.ones(20), 1.0, 0.9, 20)
        assert count == 20
        assert finite
        assert indices.tolist() == list(range(20))
        assert torch.equal(values, x)


def test_compiled_by_torch_it_is_the_same() -> None:
    given = inputs(2000, 3.0)
    compiled = torch.compile(reference.variance_update, backend="aot_eager")
    for a, b in zip(compiled(*given, 1.3, 0.999), reference.variance_update(*given, 1.3, 0.999)):
        assert torch.equal(a, b)
    sent = given[0].view(4, 500)
    rounded = torch.compile(lambda t: reference.exp4_round(t, reference.exp4_top(t)), backend="aot_eager")
    assert torch.equal(rounded(sent), reference.exp4_round(sent, reference.exp4_top(sent)))

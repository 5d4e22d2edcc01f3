"""Sparse Dithering: published rates from real bytes, targets that are hit, guarantees that hold."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import tersegrad
from tersegrad.compressors import sparse_dithering
from tersegrad.compressors.sparse_dithering import Coder, RandomSparseDithering, SparseDithering
from tersegrad.core.errors import BadConfiguration
from tersegrad.core.protocol import Context, Fed, Spec, Splitter

MILLION = 10**6
Source = Callable[[int], Tensor]


def gaussian(d: int, seed: int = 0) -> Tensor:
    return torch.randn(d, generator=torch.Generator().manual_seed(seed))


def laplace(d: int) -> Tensor:
    u = torch.rand(d, generator=torch.Generator().manual_seed(1), dtype=torch.float64) - 0.5
    return (-torch.sign(u) * torch.log1p(-2 * u.abs())).float()


def student(d: int) -> Tensor:
    z = torch.randn(4, d, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    return (z[0] / (z[1:].square().sum(0) / 3).sqrt()).float()


def worst(d: int, nu: float = 0.1) -> Tensor:
    """The vector on which the published code is longest at nu = 0.1: zeros, and magnitudes just above 3h and 5h."""
    tau = 1 / (1 + 2**2.4375)
    zeros = round(tau * d)
    fives = round((10 / (1 - tau) - 9) / 16 * (d - zeros))
    h = math.sqrt(nu / d)
    size = torch.full((d,), 3 * h * (1 + 1e-5), dtype=torch.float64)
    size[:zeros] = 0
    size[zeros : zeros + fives] = 5 * h * (1 + 1e-5)
    order = torch.randperm(d, generator=torch.Generator().manual_seed(3))
    signs = torch.randint(0, 2, (d,), generator=torch.Generator().manual_seed(4)) * 2 - 1
    return (size * signs)[order].float()


def measure(c: SparseDithering | RandomSparseDithering, x: Tensor, seed: int = 0) -> tuple[int, float]:
    """Bits of the whole message and relative error."""
    ctx, spec = Context(seed=seed), Spec.flat(x.numel())
    message, _ = c.encode(x, Spec.of(x), None, ctx)
    decoded = c.decode(message, spec, ctx)
    error = float((decoded.double() - x.double()).square().sum() / x.double().square().sum())
    return 8 * int(message.nbytes), error


@pytest.mark.parametrize(("make", "published"), [(gaussian, 2.80), (laplace, 2.66), (worst, 3.307)])
def test_published_rates_of_the_paper_code(make: Source, published: float) -> None:
    bits, error = measure(SparseDithering(nu=0.1, coder="paper"), make(MILLION))
    assert abs(bits / MILLION - published) <= 0.01
    assert bits <= 30 + math.log2(MILLION) + 3.35 * MILLION
    assert error <= 0.1


def test_published_rate_of_the_randomised_paper_code() -> None:
    x = torch.full((MILLION,), 0.7)
    bits, error = measure(RandomSparseDithering(omega=9 / 16, coder="paper"), x)
    assert abs(bits / MILLION - 2.252) <= 0.002
    assert abs(error - 0.5) < 0.005


@pytest.mark.parametrize(("alpha", "gap"), [(0.5, 0.215), (0.25, 0.27), (0.1, 0.27), (0.03, 0.27), (0.01, 0.27)])
def test_gap_to_the_gaussian_limit(alpha: float, gap: float) -> None:
    d = 1 << 20
    for chunk, more in ((18, 0.0), ("auto", 0.015)):
        bits, error = measure(SparseDithering(alpha=alpha, coder="rans", chunk=chunk), gaussian(d))  # type: ignore[arg-type]
        assert error <= alpha
        assert bits / d <= 0.5 * math.log2(1 / alpha) + gap + more


def ideal(x: Tensor, alpha: float) -> float:
    """Entropy of the levels at the largest step whose error, with the least-squares gain, is at most alpha."""
    y = x.double()
    low, high = 1e-4, 100.0
    for _ in range(40):
        step = math.sqrt(low * high)
        k = torch.round(y / step)
        energy = float(k @ k)
        error = 1 - float(y @ k) ** 2 / energy / float(y @ y) if energy else 1.0
        low, high = (step, high) if error <= alpha else (low, step)
    counts = torch.unique(torch.round(y / low), return_counts=True)[1].double()
    p = counts / counts.sum()
    return float(-(p * p.log2()).sum())


@pytest.mark.parametrize("alpha", [0.5, 0.25, 0.1, 0.03, 0.01])
@pytest.mark.parametrize("make", [laplace, student])
def test_heavier_tails_stay_near_the_ideal_coder(make: Source, alpha: float) -> None:
    d = 1 << 20
    x = make(d)
    for chunk, above in ((18, 0.02), ("auto", 0.035)):
        bits, error = measure(SparseDithering(alpha=alpha, coder="rans", chunk=chunk), x)  # type: ignore[arg-type]
        assert error <= alpha
        assert bits / d <= ideal(x, alpha) + above


@pytest.mark.parametrize("alpha", [0.3, 0.05])
def test_target_error_is_hit_closely(alpha: float) -> None:
    # A larger step that still meets alpha would save at most 0.005 bit: one bit is a factor of four in the error.
    for d in (1 << 16, 1 << 20, 3 << 20):
        _, error = measure(SparseDithering(alpha=alpha), gaussian(d))
        assert alpha * 4**-0.005 <= error <= alpha
    uneven = gaussian(1 << 19) * torch.logspace(-2, 1, 64).repeat_interleave(1 << 13)
    _, error = measure(SparseDithering(alpha=alpha), uneven)
    assert alpha * 4**-0.005 <= error <= alpha


@pytest.mark.parametrize("bits", [0.05, 0.5, 1.7, 6.0])
def test_budget_is_never_exceeded_and_nearly_used(bits: float) -> None:
    for d in (1, 10, 333, 5000, 1 << 18):
        for x in (gaussian(d), torch.ones(d), student(d)):
            got, _ = measure(SparseDithering(bits=bits), x)
            assert got <= max(32, 8 * math.floor(bits * d / 8))
    got, _ = measure(SparseDithering(bits=bits), gaussian(1 << 18))
    assert got >= 0.99 * bits * (1 << 18)


@pytest.mark.parametrize("coder", ["auto", "rans", "paper"])
def test_small_vectors_and_coders_decode_alike(coder: Coder) -> None:
    for d in (1, 2, 10, 100, 4096):
        x = gaussian(d, d)
        ctx, spec = Context(), Spec.flat(d)
        c, reference = SparseDithering(nu=0.1, coder=coder), SparseDithering(nu=0.1, coder="rans")
        message, wanted = c.encode(x, Spec.of(x), None, ctx)[0], reference.encode(x, Spec.of(x), None, ctx)[0]
        torch.testing.assert_close(c.decode(message, spec, ctx), reference.decode(wanted, spec, ctx))


def test_auto_is_never_longer_than_the_others() -> None:
    for d in (3, 50, 700, 9000, 40_000):
        for nu in (1.0, 0.1, 0.01):
            lengths = {coder: measure(SparseDithering(nu=nu, coder=coder), gaussian(d))[0] for coder in ("auto", "rans")}
            if d <= 9000:
                lengths["paper"] = measure(SparseDithering(nu=nu, coder="paper"), gaussian(d))[0]
            assert lengths["auto"] == min(lengths.values())


def test_one_hot_needs_a_large_level() -> None:
    x = torch.zeros(1 << 20)
    x[12345] = -2.5
    bits, error = measure(SparseDithering(nu=0.01, chunk=18), x)
    assert error < 1e-12
    assert bits < 3000
    assert measure(SparseDithering(nu=0.01), x)[0] < 10_000  # four chunks, with 64 states each


def test_unbiased_over_three_thousand_seeds() -> None:
    d, seeds = 4096, 3000
    x = student(d)
    c = RandomSparseDithering(omega=0.25, coder="rans")
    step = 2 * math.sqrt(0.25 / d) * float(x.double().norm())
    total, errors = torch.zeros(d, dtype=torch.float64), []
    for seed in range(seeds):
        ctx = Context(seed=seed)
        decoded = c.decode(c.encode(x, Spec.of(x), None, ctx)[0], Spec.flat(d), ctx).double()
        total += decoded - x
        errors.append(float((decoded - x).square().sum() / x.double().square().sum()))
    # Bernstein at 1e-6 over all coordinates: |error| <= step, variance <= step^2/4; 16-bit draws bias by 2^-17 of a step.
    log = math.log(2 * d / 1e-6)
    bound = step * (math.sqrt(2 * 0.25 * log / seeds) + log / (3 * seeds) + 2.0**-17)
    assert float((total / seeds).abs().max()) <= bound
    mean = sum(errors) / seeds
    spread = math.sqrt(sum((e - mean) ** 2 for e in errors) / seeds / seeds)
    assert mean <= 0.25 + 4 * spread


def test_bad_configurations_say_what_to_do() -> None:
    for arguments in ({}, {"nu": 0.1, "alpha": 0.1}, {"nu": 2.0}, {"alpha": 1.0}, {"bits": 0.0}, {"nu": 0.1, "coder": "zip"}):
        with pytest.raises(BadConfiguration):
            SparseDithering(**arguments)
    with pytest.raises(BadConfiguration):
        RandomSparseDithering(omega=0.0)


@pytest.mark.parametrize(
    "text",
    [
        "nu=0.1",
        "nu=0.1, scale=global",
        "alpha=0.3",
        "bits=1.5",
        "nu=0.2, coder=paper",
        "nu=0.3, rdo=true",
        "nu=0.3, scale=global, rdo=true",
        "alpha=0.3, rdo=true",
        "bits=1, rdo=true",
    ],
)
@pytest.mark.parametrize("d", [0, 1, 1000, 20_000, 300_000])
def test_what_is_left_comes_with_the_message(text: str, d: int) -> None:
    compressor = tersegrad.parse(f"sparse_dithering({text})")
    assert isinstance(compressor, Splitter)
    x, residual = gaussian(d), 0.3 * gaussian(d).flip(0)
    y, left, spec, ctx = x + residual, torch.full((d,), 7.0), Spec.flat(d), Context(seed=1)
    message, finite = compressor.encode_split(Fed(x, residual, left), Spec.of(x), ctx)
    assert finite
    assert message.tobytes() == compressor.encode(y, Spec.of(y), None, ctx)[0].tobytes()
    assert torch.equal(left, y - compressor.decode(message, spec, ctx))
    if d:
        x[d // 2] = math.inf
        message, finite = compressor.encode_split(Fed(x, residual, left), Spec.of(x), ctx)
        assert not finite
        assert bool(compressor.decode(message, spec, ctx).isnan().all())


@pytest.mark.parametrize("alpha", [0.02, 0.3, 0.8])
def test_a_target_error_takes_one_full_pass_on_uneven_vectors_too(alpha: float, monkeypatch: pytest.MonkeyPatch) -> None:
    x = gaussian(700_000)
    for k in range(7):
        x[100_000 * k : 100_000 * (k + 1)] *= 3.0 ** (k % 4)
    passes = 0
    encode = sparse_dithering.encode_at

    def counted(*arguments: Any, **options: Any) -> Any:
        nonlocal passes
        passes += 1
        return encode(*arguments, **options)

    monkeypatch.setattr(sparse_dithering, "encode_at", counted)
    coded = sparse_dithering.encode_to_error(x, alpha, "rans", "auto", None)
    assert 0.99 * alpha <= coded.error / coded.norm <= alpha
    assert passes <= 2


@pytest.mark.parametrize("d", [1, 3, 20, 1000])
@pytest.mark.parametrize("bits", [0.01, 1.5, 8, 40])
def test_a_budget_holds_up_to_the_largest_float32(d: int, bits: float) -> None:
    compressor = SparseDithering(bits=bits)
    for x in (torch.full((d,), torch.finfo(torch.float32).max), gaussian(d).clamp(-1, 1) * 3.4e38):
        message, _ = compressor.encode(x, Spec.of(x), None, Context())
        assert int(message.nbytes) <= compressor.max_nbytes(Spec.of(x))
        decoded = compressor.decode(message, Spec.of(x), Context()).double()
        assert float((decoded - x.double()).norm()) <= float(x.double().norm()) * (1 + 1e-6)


@pytest.mark.parametrize("scale", [1.0, 1e-30, 1e-41])
def test_the_smallest_target_error_is_no_domain_error(scale: float) -> None:
    compressor = SparseDithering(alpha=5e-324)
    x = gaussian(100) * scale
    message, _ = compressor.encode(x, Spec.of(x), None, Context())
    decoded = compressor.decode(message, Spec.of(x), Context())
    assert float((decoded - x).abs().max()) <= max(2.0**-126, 2.0**-24 * 4 * scale)


@pytest.mark.parametrize(
    ("make", "alpha", "share"), [(student, 0.25, 0.96), (student, 0.1, 0.98), (laplace, 0.25, 0.99), (gaussian, 0.25, 1.002)]
)
def test_chosen_levels_take_fewer_bits_at_the_same_error(make: Source, alpha: float, share: float) -> None:
    x = make(1 << 18)
    plain, error = measure(SparseDithering(alpha=alpha), x)
    chosen, wrong = measure(SparseDithering(alpha=alpha, rdo=True), x)
    assert max(error, wrong) <= alpha
    assert chosen <= share * plain


def test_a_certificate_holds_where_chosen_levels_would_break_it() -> None:
    """Three quarters of the coordinates just round to zero, the others to one but are not worth it: all of them would be lost."""
    x = torch.tensor([0.49, 0.49, 0.49, 0.65]).repeat(20_000)
    nu = x.numel() / float(4 * x.double().square().sum())
    assert 0.8 < nu < 1
    for scale in ("chunk", "global"):
        c = SparseDithering(nu=nu, scale=scale, rdo=True)
        step = sparse_dithering.global_step(x, nu, scale)
        chosen = sparse_dithering.encode_at(x, step, nu, "auto", "auto", None, rdo=True)
        assert chosen.error > nu * chosen.norm
        assert measure(c, x)[1] <= nu
        assert c.guarantee(Spec.of(x)) == SparseDithering(nu=nu).guarantee(Spec.of(x))


@pytest.mark.parametrize("d", [30, 1000, 70_000])
@pytest.mark.parametrize("nu", [1.0, 0.3, 0.01])
def test_certificates_of_chosen_levels_hold_for_hostile_vectors(d: int, nu: float) -> None:
    g = torch.Generator().manual_seed(d)
    for make in (worst, laplace, student, gaussian):
        assert measure(SparseDithering(nu=nu, rdo=True), make(d))[1] <= nu
    for share in (0.5, 0.9, 0.99):
        # Two values, so that a step may lie anywhere between them.
        for high in (1.02, 1.2, 1.7):
            x = torch.where(torch.rand(d, generator=g) < share, 1.0, high)
            assert measure(SparseDithering(nu=nu, rdo=True), x)[1] <= nu


@pytest.mark.parametrize("d", [3, 10, 100, 1000, 5000])
@pytest.mark.parametrize("make", [gaussian, student])
def test_few_coordinates_are_not_the_worse_for_a_choice(d: int, make: Source) -> None:
    """Their counts tell little, so that the nearest levels are tried too."""
    x = make(d)
    for alpha in (0.03, 0.25):
        assert measure(SparseDithering(alpha=alpha, rdo=True), x)[0] <= measure(SparseDithering(alpha=alpha), x)[0]
    assert measure(SparseDithering(bits=1, rdo=True), x)[1] <= measure(SparseDithering(bits=1), x)[1] * (1 + 1e-9)


def test_messages_of_few_levels_are_not_the_worse_for_a_choice() -> None:
    """Their errors jump with the step, so that a search may end far from the target."""
    g = torch.Generator().manual_seed(7)
    x = torch.zeros(1 << 18)
    x[torch.randint(0, x.numel(), (300,), generator=g)] = student(300) ** 3
    for alpha in (0.25, 0.1, 0.01):
        bits, error = measure(SparseDithering(alpha=alpha, rdo=True), x)
        assert error <= alpha
        assert bits <= measure(SparseDithering(alpha=alpha), x)[0]

"""Spherical Compression: lengths and constants against theory, errors that never exceed alpha, the same words everywhere."""

from __future__ import annotations

import contextlib
import math
import random
import zlib

import pytest
import torch
from torch import Tensor

import tersegrad
from tersegrad import kernels, theory
from tersegrad.codecs import normal, rice, sphere
from tersegrad.compressors.spherical import Spherical
from tersegrad.core.errors import BadConfiguration, CorruptMessage
from tersegrad.core.philox import Purpose
from tersegrad.core.protocol import Context, Message, Spec
from tersegrad.kernels import native
from tests.laws.zoo import adversarial

# The (d, alpha) of the published scheme's Monte Carlo table.
TABLE = [(4, 0.5), (8, 0.5), (8, 0.25), (10, 0.2), (6, 0.1), (14, 0.25)]


def gaussian(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def once(c: Spherical, x: Tensor, ctx: Context) -> tuple[Message, Tensor]:
    message, _ = c.encode(x, Spec.of(x), None, ctx)
    return message, c.decode(message, Spec.flat(x.numel()), ctx)


def error(y: Tensor, x: Tensor) -> float:
    return float((y.double() - x.double()).square().sum() / x.double().square().sum())


@pytest.mark.parametrize(("d", "alpha"), TABLE)
def test_lengths_errors_and_constants_of_ten_thousand_vectors(d: int, alpha: float) -> None:
    """One codebook serves many vectors here, a new one every 1000: the same search and words as in whole messages."""
    chance, parameter = theory.cap_probability(alpha, d), int(theory.spherical_rice_parameter(alpha, d))
    seeds = 10 if d < 14 else 2
    bits, dots = 0, []
    for seed in range(seeds):
        x, ctx = gaussian(10_000 // seeds, d, seed=seed), Context(seed=seed)
        square = x.double().square().sum(1)
        scale = square.sqrt() * math.sqrt(1 - alpha)
        t = sphere.search(ctx, x, scale, square, alpha, chance, d)
        y = sphere.points(sphere.words(ctx, t, d, d), scale)
        assert bool((sphere.errors(y, x) <= alpha * square).all())
        bits += rice.length_bits(t, parameter)
        dots.append((y.double() * x.double()).sum(1) / square)
    mean = bits / 10_000
    assert mean <= theory.neg_log2_cap(alpha, d) + 1.6
    assert mean == pytest.approx(theory.spherical_expected_bits(alpha, d), abs=0.1)
    dot = float(torch.cat(dots).mean())
    assert dot == pytest.approx(theory.spherical_constant(alpha, d), abs=0.002)
    assert (1 - alpha) / dot**2 - 1 == pytest.approx(theory.spherical_omega(alpha, d), abs=0.01)


@pytest.mark.parametrize(("d", "alpha"), [(1, 0.3), (2, 0.01), (3, 0.1), (10, 0.2), (14, 0.5), (1000, 0.995)])
def test_whole_vectors(d: int, alpha: float) -> None:
    c, bits = Spherical(alpha=alpha), 0
    for seed in range(20):
        x, ctx = gaussian(d, seed=seed) * 10.0 ** (seed - 10), Context(seed=seed, sender=7)
        message, y = once(c, x, ctx)
        assert error(y, x) <= alpha
        bits += 8 * int(message.nbytes)
        assert int(message.nbytes) <= c.max_nbytes(Spec.flat(d))
    # Norm and parameter, then the code, padding, and two standard errors.
    assert bits / 20 <= 31 + 6 + theory.spherical_expected_bits(alpha, d) + 7 + 2


@pytest.mark.parametrize("block", [1, 3, 8, 12])
@pytest.mark.parametrize("alpha", [0.25, 0.5, 0.9])
def test_blocks_keep_the_sure_bound(block: int, alpha: float) -> None:
    c = Spherical(alpha=alpha, block=block)
    for d in (1, 2, 7, 8, 9, 500):
        for name, x in adversarial(d).items():
            _, y = once(c, x, Context(seed=d))
            allowed = alpha * float(x.double().square().sum()) + d * 2.0**-252
            assert float((y.double() - x.double()).square().sum()) <= allowed, (name, d)


def test_rate_of_blocks() -> None:
    x = gaussian(20_000)
    c = Spherical(alpha=0.25, block=8)
    message, y = once(c, x, Context(seed=1))
    assert error(y, x) <= 0.21  # the mean error; 0.25 is the sure bound
    assert int(message.nbytes) * 8 / x.numel() <= 1.66  # of which norms take about a quarter of a bit


def test_the_unbiased_version_is_unbiased() -> None:
    d, block, copies, seeds = 20, 5, 100, 120
    pattern = gaussian(d, seed=3) * torch.logspace(-1, 1, d)
    x = pattern.repeat(copies)
    c = Spherical(alpha=0.6, block=block, unbiased=True)
    means, errors = [], []
    for seed in range(seeds):
        _, y = once(c, x, Context(seed=seed))
        means.append((y.double() - x.double()).view(copies, d).mean(0))
        errors.append(error(y, x))
    # Copies share a codebook, so only the means of different seeds are independent: 20 coordinates, 5.5 standard errors.
    spread, mean = torch.std_mean(torch.stack(means), dim=0)
    assert bool((mean.abs() <= 5.5 * spread / math.sqrt(seeds)).all())
    omega = c.guarantee(Spec.flat(d)).value
    assert sum(errors) / seeds <= omega * 1.01
    assert omega >= theory.spherical_omega(0.6, block)


def test_unbiased_whole_vectors_have_the_variance_of_theory() -> None:
    c, x = Spherical(alpha=0.5, unbiased=True), gaussian(8, seed=1)
    mean, errors, seeds = torch.zeros(8, dtype=torch.float64), [], 1500
    for seed in range(seeds):
        _, y = once(c, x, Context(seed=seed))
        mean += (y - x).double() / seeds
        errors.append(error(y, x))
    assert sum(errors) / seeds == pytest.approx(theory.spherical_omega(0.5, 8), abs=0.03)
    assert float(mean.norm() / x.norm()) <= 4 * math.sqrt(0.66 / seeds)


def test_too_many_draws_are_refused_with_advice() -> None:
    with pytest.raises(BadConfiguration, match=r"block=15 or less, or alpha=0\.2\d+ or more"):
        Spherical(alpha=0.2, block=20)
    c = Spherical(alpha=0.2)
    with pytest.raises(BadConfiguration, match="draws"):
        c.init(Spec.flat(1000), "cpu")
    with pytest.raises(BadConfiguration, match="draws"):
        c.encode(gaussian(1000), Spec.of(gaussian(1000)), None, Context())
    for arguments in ({"alpha": 0.0}, {"alpha": 1.0}, {"alpha": 0.5, "block": 0}):
        with pytest.raises(BadConfiguration):
            Spherical(**arguments)  # type: ignore[arg-type]


def test_special_vectors() -> None:
    for c in (Spherical(alpha=0.5), Spherical(alpha=0.5, block=4), Spherical(alpha=0.5, block=4, unbiased=True)):
        for d in (1, 8, 9):
            ctx = Context(seed=d)
            _, y = once(c, torch.zeros(d), ctx)
            assert bool((y == 0).all())
            for bad in (math.nan, math.inf):
                x = gaussian(d)
                x[-1] = bad
                assert bool(torch.isnan(once(c, x, ctx)[1]).all())
            for scale in (1e-45, 1e-41, 1e-38, 3e38):
                x = torch.full((d,), scale)
                y = once(c, x, ctx)[1]
                assert bool(torch.isfinite(y).all())
                if not c.unbiased:
                    assert float((y.double() - x.double()).square().sum()) <= 0.5 * d * float(x[0]) ** 2 + d * 2.0**-252
        assert once(c, torch.empty(0), Context())[1].numel() == 0


def test_damaged_messages_raise_or_decode() -> None:
    rng = random.Random(1)
    for c, d in ((Spherical(alpha=0.4), 9), (Spherical(alpha=0.5, block=4), 203)):
        spec, ctx = Spec.flat(d), Context(seed=5)
        message, _ = c.encode(gaussian(d), Spec.of(gaussian(d)), None, ctx)
        data = message.tobytes()
        trials = [data[:n] for n in range(len(data))] + [data + b"\0"] + [rng.randbytes(rng.randrange(60)) for _ in range(150)]
        for _ in range(250):
            changed = bytearray(data)
            changed[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
            trials.append(bytes(changed))
        for trial in trials:
            with contextlib.suppress(CorruptMessage):
                assert c.decode(Message.frombytes(trial), spec, ctx).shape == (d,)
    with pytest.raises(CorruptMessage):
        c.decode(Message.frombytes(data[:-1]), spec, ctx)


def test_words_are_the_same_on_every_backend() -> None:
    """The table is pinned: a change of one entry would decode old messages differently."""
    assert zlib.crc32(normal.quantiles().numpy().astype("<i4").tobytes()) == 0x176DEAFF
    index = torch.tensor([0, 1, 7, 123_456_789, 1 << 39])
    ctx = Context(seed=99, step=3, buffer=2, sender=1)
    with kernels.force("reference"):
        wanted = sphere.words(ctx, index, 13, 11)
    assert torch.equal(sphere.words(ctx, index, 13, 11), wanted)
    draws = kernels.reference.random_u16(ctx, Purpose.CODEBOOK, 16 * 7, 11)
    assert torch.equal(normal.quantiles()[draws.long()], wanted[2])
    x = gaussian(700)
    c = Spherical(alpha=0.4, block=6)
    with kernels.force("reference"):
        bytes_wanted = once(c, x, ctx)[0].tobytes()
    for isa in native.supported_isas():
        with native.using(isa=isa, threads=3):
            assert once(c, x, ctx)[0].tobytes() == bytes_wanted


@pytest.mark.parametrize("text", ["spherical(alpha=0.5)", "spherical(alpha=0.5, block=4)"])
def test_the_rice_parameter_travels_in_the_message(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A receiver whose mathematics library rounds another way decodes the same."""
    c, x, ctx = tersegrad.parse(text), gaussian(12), Context(seed=5)
    message, y = once(c, x, ctx)  # type: ignore[arg-type]
    monkeypatch.setattr(Spherical, "_rice", lambda self, d: 7)
    assert torch.equal(c.decode(message, Spec.of(x), ctx), y)
    other, z = once(c, x, ctx)  # type: ignore[arg-type]
    assert other.tobytes() != message.tobytes()
    assert torch.equal(z, y)

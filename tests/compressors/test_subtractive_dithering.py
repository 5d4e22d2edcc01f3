"""Subtractive dithering: an error whose law ignores x, and rates near the limit from real bytes."""

from __future__ import annotations

import contextlib
import math
import random

import pytest
import torch
from torch import Tensor

from tersegrad import kernels
from tersegrad.codecs import gaussian as model
from tersegrad.compressors.subtractive_dithering import SubtractiveDithering
from tersegrad.core.errors import BadConfiguration, CorruptMessage
from tersegrad.core.protocol import Context, Message, Spec
from tersegrad.kernels import native
from tests.laws.zoo import adversarial


def gaussian(d: int, seed: int = 0) -> Tensor:
    return torch.randn(d, generator=torch.Generator().manual_seed(seed))


def once(c: SubtractiveDithering, x: Tensor, ctx: Context) -> tuple[Message, Tensor]:
    message, _ = c.encode(x, Spec.of(x), None, ctx)
    return message, c.decode(message, Spec.flat(x.numel()), ctx)


def excess(omega: float, d: int, nbytes: float) -> float:
    return 8 * nbytes / d - 0.5 * math.log2((1 + omega) / omega)


@pytest.mark.parametrize("omega", [1.0, 1 / 3, 0.1, 0.03, 0.01])
@pytest.mark.parametrize("scale", ["chunk", "global"])
def test_rate_on_gaussian_data(omega: float, scale: str) -> None:
    d = 1 << 20
    x = gaussian(d)
    c = SubtractiveDithering(omega=omega, scale=scale, chunk=18)  # type: ignore[arg-type]
    message, y = once(c, x, Context(seed=1))
    assert excess(omega, d, int(message.nbytes)) <= 0.27
    usual = SubtractiveDithering(omega=omega, scale=scale)  # type: ignore[arg-type]
    assert excess(omega, d, int(once(usual, x, Context(seed=1))[0].nbytes)) <= 0.285
    error = float((y - x).double().square().sum() / x.double().square().sum())
    assert error == pytest.approx(omega, rel=0.01)


@pytest.mark.parametrize("d", [10, 300, 1000])
def test_short_vectors_pay_for_no_tables(d: int) -> None:
    omega, trials = 0.2, 20
    c = SubtractiveDithering(omega=omega)
    total = sum(int(once(c, gaussian(d, s), Context(seed=s))[0].nbytes) for s in range(trials))
    # The step, a bit for the form, the coder's end and padding; and a few standard errors.
    assert excess(omega, d, total / trials - 4) * d <= 0.262 * d + 1 + 2 + 4 + 2 * math.sqrt(d / trials)


def test_a_sparse_short_vector_takes_the_adaptive_code() -> None:
    x = torch.zeros(1000)
    x[17] = 1.0
    c = SubtractiveDithering(omega=4.0)
    message, _ = once(c, x, Context(seed=1))
    assert message.tobytes()[4] & 1 == 1
    assert int(message.nbytes) < 60


@pytest.mark.parametrize("name", ["gaussian", "one_hot", "half_steps", "student_t"])
def test_unbiased_with_variance_omega(name: str) -> None:
    d, seeds, omega = 4096, 3000 if name == "gaussian" else 600, 0.25
    x = adversarial(d)[name]
    c = SubtractiveDithering(omega=omega, coder="rans")
    square = float(x.double().square().sum())
    step = math.sqrt(12 * omega / d * square)
    total, errors = torch.zeros(d, dtype=torch.float64), []
    for seed in range(seeds):
        _, y = once(c, x, Context(seed=seed, step=seed % 7))
        off = y.double() - x.double()
        total += off
        errors.append(float(off.square().sum()) / square)
        assert float(off.abs().max()) <= step * 0.50001 + 1e-6 * float(x.abs().max())
    # Bernstein at 1e-6 over all coordinates: |error| <= step/2, variance step^2/12; fixed point shifts by at most 2^-17 of a step.
    log = math.log(2 * d / 1e-6)
    bound = step * (math.sqrt(2 / 12 * log / seeds) + 0.5 * log / (3 * seeds) + 2.0**-17)
    assert float((total / seeds).abs().max()) <= bound + 1e-7 * float(x.abs().max())
    mean = sum(errors) / seeds
    spread = math.sqrt(sum((e - mean) ** 2 for e in errors)) / seeds
    assert mean <= omega + 4 * spread
    assert mean >= omega - 4 * spread  # the error law is one and the same for all vectors


def test_error_law_does_not_depend_on_the_vector() -> None:
    """Kolmogorov-Smirnov distance of errors, in steps, from the uniform law."""
    d, omega = 1 << 16, 0.5
    for name, x in adversarial(d).items():
        if name in ("zero", "denormal"):
            continue
        _, y = once(SubtractiveDithering(omega=omega), x, Context(seed=3))
        step = math.sqrt(12 * omega / d) * float(x.double().norm())
        off = ((y.double() - x.double()) / step).sort().values
        distance = float((off + 0.5 - (torch.arange(d) + 0.5) / d).abs().max())
        assert distance <= math.sqrt(math.log(2e6) / (2 * d)) + 1e-4, name  # Dvoretzky-Kiefer-Wolfowitz at 1e-6


def test_special_vectors() -> None:
    for coder in ("auto", "rans"):
        c = SubtractiveDithering(omega=0.1, coder=coder)
        for d in (1, 2, 64, 400):
            ctx = Context(seed=d)
            assert bool((once(c, torch.zeros(d), ctx)[1] == 0).all())
            for bad in (math.nan, -math.inf):
                x = gaussian(d)
                x[d // 2] = bad
                assert bool(torch.isnan(once(c, x, ctx)[1]).all())
            for size in (1e-45, 1e-40, 1e-38, 3.4e38):
                x = torch.full((d,), size)
                y = once(c, x, ctx)[1]
                assert bool(torch.isfinite(y).all())
                assert float((y - x).abs().max()) <= max(2.0**-126, 0.51 * math.sqrt(1.2) * size)
        assert once(c, torch.empty(0), Context())[1].numel() == 0


def test_zero_segments_cost_nothing_and_stay_zero() -> None:
    x = gaussian(1 << 20)
    x[1 << 18 : 3 << 18] = 0
    c = SubtractiveDithering(omega=0.3, chunk=18)
    message, y = once(c, x, Context(seed=1))
    assert bool((y[1 << 18 : 3 << 18] == 0).all())
    assert excess(0.3, 1 << 19, int(message.nbytes)) <= 0.27
    base = gaussian(1 << 20, 3)
    added = c.decode_add(message, Spec.flat(1 << 20), Context(seed=1), base.clone(), 0.5)
    torch.testing.assert_close(added, base + 0.5 * y)


def test_tiny_omega_and_outliers_use_escapes_plain_levels_or_raw_floats() -> None:
    x = gaussian(40_000)
    x[5] = 1e6
    for omega in (1e-12, 1e-9, 1e-6, 1e-3):
        c = SubtractiveDithering(omega=omega)
        message, y = once(c, x, Context(seed=2))
        assert int(message.nbytes) <= c.max_nbytes(Spec.flat(40_000))
        error = float((y.double() - x.double()).square().sum() / x.double().square().sum())
        assert error <= 1.05 * omega + 2.0**-44


def test_same_bytes_on_every_backend() -> None:
    for d in (1, 10, 65, 5000, 300_001):
        x, ctx = gaussian(d), Context(seed=d, sender=3)
        x[0] *= 50
        for c in (SubtractiveDithering(omega=0.2), SubtractiveDithering(omega=1e-4, coder="rans", scale="global")):
            with kernels.force("reference"):
                wanted, values = once(c, x[:40_000], ctx)
            got, same = once(c, x[:40_000], ctx)
            assert got.tobytes() == wanted.tobytes()
            assert torch.equal(same, values)
            best, values = once(c, x, ctx)
            for isa in native.supported_isas():
                with native.using(isa=isa, threads=2):
                    message, same = once(c, x, ctx)
                assert message.tobytes() == best.tobytes()
                assert torch.equal(same, values)


def test_damaged_messages_raise_or_decode() -> None:
    rng = random.Random(1)
    for coder, d in (("auto", 12), ("auto", 700), ("rans", 700)):
        c = SubtractiveDithering(omega=0.05, coder=coder)  # type: ignore[arg-type]
        spec, ctx = Spec.flat(d), Context(seed=5)
        data = once(c, gaussian(d), ctx)[0].tobytes()
        trials = [data[:n] for n in range(len(data))] + [data + b"\0"] + [rng.randbytes(rng.randrange(60)) for _ in range(150)]
        for _ in range(250):
            changed = bytearray(data)
            changed[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
            trials.append(bytes(changed))
        for trial in trials:
            with contextlib.suppress(CorruptMessage):
                assert c.decode(Message.frombytes(trial), spec, ctx).shape == (d,)
        with pytest.raises(CorruptMessage):
            c.decode(Message.frombytes(data[:3]), spec, ctx)


@pytest.mark.parametrize("sigma", [0.01, 0.3, 1.0, 3.9, 4.0, 30.0, 1e5])
def test_the_static_model_codes_any_levels(sigma: float) -> None:
    generator = torch.Generator().manual_seed(1)
    sizes = torch.randint(0, 32768, (500,), generator=generator)
    likely = torch.round(torch.randn(500, generator=generator) * sigma).to(torch.int32)
    likely[7], likely[8] = 1 << 30, -(1 << 30)
    with kernels.force("reference"):
        data = model.encode(likely, sizes, sigma)
        assert torch.equal(model.decode(data, sizes, sigma), likely)
    assert torch.equal(model.encode(likely, sizes, sigma), data)
    assert torch.equal(model.decode(data, sizes, sigma), likely)


def test_bad_configurations_are_refused() -> None:
    for arguments in ({"omega": 0.0}, {"omega": math.inf}, {"omega": 0.1, "coder": "zip"}, {"omega": 0.1, "scale": "row"}):
        with pytest.raises(BadConfiguration):
            SubtractiveDithering(**arguments)

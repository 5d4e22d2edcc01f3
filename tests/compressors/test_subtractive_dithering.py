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
from tersegrad.kernels import native, reference
from tests.laws.inputs import uneven
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


SHAPES = ((48, 16, 3, 3), (24,), (3,), (60, 65), (), (70, 33), (1, 200), (300, 100))


def classed(data: bytes, steps: int = 1) -> bool:
    """Whether a message with so many steps has scale classes."""
    return data[:4] == b"\0\0\0\x80" and data[4 + 4 * steps] >= 128


@pytest.mark.parametrize("omega", [2.0, 0.2, 0.01])
def test_scale_classes_shorten_and_change_no_value(omega: float) -> None:
    x, spec = uneven(SHAPES)
    ctx = Context(seed=4)
    for scale in ("chunk", "global"):
        c = SubtractiveDithering(omega=omega, scale=scale)
        message, _ = c.encode(x, spec, None, ctx)
        # Rows of one coordinate each: nothing to tell.
        flat = Spec.of(x.view(-1, 1))
        plain, _ = c.encode(x, flat, None, ctx)
        assert classed(message.tobytes())
        assert not classed(plain.tobytes())
        assert int(message.nbytes) < 0.92 * int(plain.nbytes)
        y = c.decode(message, spec, ctx)
        assert torch.equal(y, c.decode(plain, flat, ctx))
        added = c.decode_add(message, spec, ctx, torch.ones_like(x), 0.5)
        torch.testing.assert_close(added, 1 + 0.5 * y)


def test_scale_classes_are_the_same_bytes_on_every_backend() -> None:
    x, spec = uneven(SHAPES)
    x[5] *= 1000
    for text in ({"omega": 1.0}, {"omega": 0.002, "coder": "rans", "scale": "global", "chunk": 14}):
        c, ctx = SubtractiveDithering(**text), Context(seed=9, sender=2)
        with kernels.force("reference"):
            wanted = c.encode(x, spec, None, ctx)[0].tobytes()
            values = c.decode(Message.frombytes(wanted), spec, ctx)
        assert classed(wanted)
        for isa in native.supported_isas():
            with native.using(isa=isa, threads=2):
                assert c.encode(x, spec, None, ctx)[0].tobytes() == wanted, isa
                assert torch.equal(c.decode(Message.frombytes(wanted), spec, ctx), values), isa


def test_scale_classes_of_several_segments_leave_out_the_zero_ones() -> None:
    g = torch.Generator().manual_seed(2)
    rows = torch.randn(4000, 256, generator=g) * torch.exp2(2 * torch.randn(4000, 1, generator=g))
    rows[1024:2048] = 0
    spec, ctx = Spec.of(rows), Context(seed=1)
    for scale, steps in (("chunk", 4), ("global", 1)):
        c = SubtractiveDithering(omega=1, scale=scale)  # type: ignore[arg-type]
        message, _ = c.encode(rows.flatten(), spec, None, ctx)
        flat = Spec.of(torch.empty(rows.numel(), 1))
        plain, _ = c.encode(rows.flatten(), flat, None, ctx)
        assert classed(message.tobytes(), steps)
        assert int(message.nbytes) < 0.8 * int(plain.nbytes)
        y = c.decode(message, spec, ctx)
        assert torch.equal(y, c.decode(plain, flat, ctx))
        assert scale == "global" or bool((y[1024 * 256 : 2048 * 256] == 0).all())


def test_silent_rows_cost_next_to_nothing() -> None:
    """Levels of a silent row are all zero, whatever the dither is."""
    x = torch.zeros(1000, 256)
    x[::10] = gaussian(25_600).view(100, 256)
    few, _ = SubtractiveDithering(omega=1.0).encode(x.flatten(), Spec.of(x), None, Context())
    # The step is the same, and so is what is told about the rows that are not silent.
    alone, _ = SubtractiveDithering(omega=0.1).encode(x[::10].flatten(), Spec.flat(25_600), None, Context())
    # A decision for each row takes half a bit; chunks have 2^18 symbols.
    assert classed(few.tobytes())
    assert int(few.nbytes) < 1.02 * int(alone.nbytes) + 1000 / 16 + 130


@pytest.mark.parametrize("omega", [8.0, 1.0, 0.25, 0.03])
def test_even_vectors_have_no_scale_classes(omega: float) -> None:
    for d in (600, 5000, 100_000, 300_000):
        x = gaussian(d)
        for spec in (Spec.flat(d), Spec.of(x.view(-1, 50))):
            message, _ = SubtractiveDithering(omega=omega, coder="rans").encode(x, spec, None, Context(seed=d))
            assert not classed(message.tobytes())


@pytest.mark.parametrize("d", [600, 3000, 40_000])
def test_scale_classes_never_make_a_message_longer(d: int, monkeypatch: pytest.MonkeyPatch) -> None:
    x = gaussian(d)
    uneasy = {
        "gaussian": x,
        "halves": torch.where(torch.arange(d) < d // 2, x, 0.01 * x),
        "rows": (x.view(-1, 50) * torch.exp2(0.5 * gaussian(d // 50, 1))[:, None]).flatten(),
        "sparse": x * (gaussian(d, 2) > 2),
        "tails": x / gaussian(2 * d, 3).view(2, -1).square().mean(0).sqrt(),
    }
    specs = (Spec.flat(d), Spec.of(x.view(-1, 50)), Spec.of(x.view(10, -1)))
    configurations = [SubtractiveDithering(omega=omega, coder="rans") for omega in (100.0, 8.0, 1.0, 0.1, 0.001)]

    def lengths() -> dict[tuple[str, int, int], int]:
        return {
            (name, i, j): int(c.encode(x, spec, None, Context(seed=d))[0].nbytes)
            for name, x in uneasy.items()
            for i, spec in enumerate(specs)
            for j, c in enumerate(configurations)
        }

    found = lengths()
    monkeypatch.setattr(native if native.available() else reference, "classes_choose", lambda *_: None)
    plain = lengths()
    assert [key for key in found if found[key] > 1.01 * plain[key]] == []
    assert any(found[key] < 0.9 * plain[key] for key in found) or d < 1000


def test_scale_classes_that_do_not_pay_are_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    x = gaussian(20_000)
    c = SubtractiveDithering(omega=1.0)
    plain = once(c, x, Context())[0].tobytes()

    def eager(symbols: Tensor, window: int, layout: Tensor, parts: Tensor, contexts: Tensor) -> Tensor:
        contexts.copy_(torch.arange(symbols.numel()) % 2)
        return torch.zeros(30, dtype=torch.uint8)

    monkeypatch.setattr(kernels.get(torch.device("cpu")), "classes_choose", eager)
    assert once(c, x, Context())[0].tobytes() == plain


def test_damaged_scale_classes_raise_or_decode_alike() -> None:
    rng, refused = random.Random(2), 0
    x, spec = uneven(((190, 40), (12,), (16, 5, 3, 3), (100,)), spread=1.0)
    c, ctx = SubtractiveDithering(omega=0.2), Context(seed=5)
    data = c.encode(x, spec, None, ctx)[0].tobytes()
    assert classed(data)
    for trial in range(160):
        changed = bytearray(data)
        if trial % 4 == 0:
            del changed[rng.randrange(8, len(changed)) :]
        # Window, octaves, escapes, classes and tables; then words.
        place = rng.randrange(8, min(len(changed), 120 if trial % 3 else len(changed)) + 1) - 1
        changed[place] ^= 1 << rng.randrange(8)
        results: list[Tensor | None] = []
        for backend in ("native", "reference"):
            with kernels.force(backend):
                try:
                    results.append(c.decode(Message.frombytes(bytes(changed)), spec, ctx))
                except CorruptMessage:
                    results.append(None)
        one, other = results
        assert (one is None) == (other is None), changed[:120].hex()
        if one is not None and other is not None:
            assert torch.equal(one, other)
        refused += one is None
    assert 60 < refused < 160


def test_another_spec_is_refused_or_decodes_to_a_vector() -> None:
    x, spec = uneven(SHAPES)
    c, ctx = SubtractiveDithering(omega=0.3), Context(seed=5)
    message, _ = c.encode(x, spec, None, ctx)
    with contextlib.suppress(CorruptMessage):
        assert c.decode(message, Spec.flat(x.numel()), ctx).shape == x.shape


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

"""QSGD: unbiased within a concentration bound, variance within the guarantee, the same bytes everywhere, bad bytes refused."""

from __future__ import annotations

import math
import random

import pytest
import torch
from torch import Tensor

from tersegrad import kernels
from tersegrad.compressors.qsgd import QSGD
from tersegrad.core.errors import BadConfiguration, CorruptMessage
from tersegrad.core.protocol import Accumulator, Compressor, Context, Message, Spec
from tersegrad.kernels import native

CONFIGURATIONS = (
    QSGD(),
    QSGD(bits=2, bucket=128),
    QSGD(bits=3, norm="max"),
    QSGD(bits=8, norm="max", bucket=64),
    QSGD(bits=4, levels=5),
    QSGD(bits=3, coder="elias"),
    QSGD(bits=2, norm="max", bucket=64, coder="elias"),
    QSGD(levels=4, coder="rans"),
    QSGD(levels=127, norm="max", coder="rans"),
    QSGD(levels=1, coder="rans"),
)
every = pytest.mark.parametrize("c", CONFIGURATIONS, ids=str)


def vectors(d: int, s: int = 7) -> dict[str, Tensor]:
    g = torch.randn(d, generator=torch.Generator().manual_seed(d))
    index = torch.arange(d)
    one_hot = torch.zeros(d)
    one_hot[d // 2] = -2.5
    one_big = torch.full((d,), 0.004)
    one_big[d // 3] = 3.0
    half = torch.full((d,), 0.5 / s)
    half[0] = 1.0
    return {
        "gaussian": g,
        "one_hot": one_hot,
        "constant": torch.full((d,), -0.7),
        "alternating": 1.0 - 2.0 * (index % 2),
        "geometric": torch.pow(0.9, (index % 300).float()),
        "one_big": one_big,
        "half_a_step": half,
        "large": g.clamp(-3, 3) * 1e38,
        "tiny": g * 1e-42,
    }


def roundtrip(c: QSGD, x: Tensor, ctx: Context) -> tuple[Message, Tensor]:
    message, _ = c.encode(x, Spec.of(x), None, ctx)
    return message, c.decode(message, Spec.flat(x.numel()), ctx)


@every
@pytest.mark.parametrize("d", [0, 1, 63, 64, 65, 511, 512, 513, 4000])
def test_same_bytes_on_every_backend(c: QSGD, d: int) -> None:
    x = torch.randn(d, generator=torch.Generator().manual_seed(d))
    ctx = Context(seed=9, step=2, buffer=1, sender=4)
    with kernels.force("reference"):
        message, decoded = roundtrip(c, x, ctx)
    assert int(message.nbytes) <= c.max_nbytes(Spec.flat(d))
    assert decoded.shape == (d,)
    for isa in native.supported_isas():
        with native.using(isa=isa, threads=2):
            again, same = roundtrip(c, x, ctx)
            assert again.tobytes() == message.tobytes()
            assert torch.equal(same, decoded)


@every
def test_levels_are_multiples_of_the_step(c: QSGD) -> None:
    x = vectors(1000)["gaussian"]
    _, decoded = roundtrip(c, x, Context(seed=1))
    for bucket, part in zip(torch.split(x, c.bucket), torch.split(decoded, c.bucket), strict=True):
        norm = bucket.double().norm() if c.norm == "l2" else bucket.double().abs().max()
        levels = part.double() / norm * c.s
        assert torch.allclose(levels, levels.round(), atol=1e-4)
        assert float(levels.abs().max()) <= c.s + 1e-4


@pytest.mark.parametrize("c", [QSGD(), QSGD(bits=3, norm="max", bucket=64), QSGD(bits=8)], ids=str)
def test_unbiased_with_a_bernstein_bound(c: QSGD) -> None:
    d, draws = 1030, 300
    spec = Spec.flat(d)
    for name, x in vectors(d, c.s).items():
        total = torch.zeros(d, dtype=torch.float64)
        for seed in range(draws):
            total += roundtrip(c, x, Context(seed=seed))[1].double()
        buckets = torch.arange(d) // c.bucket
        squares = torch.zeros(int(buckets[-1]) + 1, dtype=torch.float64).index_add_(0, buckets, x.double() ** 2)
        top = torch.stack([b.double().abs().max() for b in torch.split(x, c.bucket)])
        step = ((squares.sqrt() if c.norm == "l2" else top) / c.s).clamp(2.0**-126)[buckets]
        f = (x.double() / step).abs() % 1.0
        # Each draw errs by at most one step with variance step^2 f(1-f): Bernstein, union over coordinates, failure below 1e-9.
        budget = math.log(2 * d / 1e-9)
        bound = (2 * f * (1 - f) * budget / draws).sqrt() + 2 * budget / (3 * draws) + 2.0**-16
        error = (total / draws - x.double()).abs()
        assert bool((error <= bound * step + 2.0**-21 * x.double().abs()).all()), (name, str(c.guarantee(spec)))


@every
def test_variance_within_the_guarantee(c: QSGD) -> None:
    for d in (1, 64, 700):
        omega = c.guarantee(Spec.flat(d)).value
        for name, x in vectors(d, c.s).items():
            norm = float(x.double().square().sum())
            draws = 40
            errors = [float((roundtrip(c, x, Context(seed=k))[1] - x).double().square().sum()) for k in range(draws)]
            # A coordinate errs by at most a step, a message by at most B / s^2: Hoeffding for the mean, failure below 1e-9.
            slack = min(d, c.bucket) / c.s**2 * math.sqrt(math.log(1e9) / (2 * draws))
            assert sum(errors) / draws <= (omega + slack) * norm + d * 2.0**-252, name


def test_the_l2_guarantee_is_attained() -> None:
    # A constant bucket of 512 with s = 7: omega = sqrt(512)/7 - 1, and the mean over buckets concentrates.
    c = QSGD()
    x = torch.full((512 * 400,), 0.25)
    _, decoded = roundtrip(c, x, Context(seed=5))
    error = float((decoded - x).double().square().sum() / x.double().square().sum())
    assert error == pytest.approx(math.sqrt(512) / 7 - 1, rel=0.02)
    assert error <= c.guarantee(Spec.flat(x.numel())).value * 1.02


def test_gaussian_errors_quoted_in_the_documentation() -> None:
    x = torch.randn(1 << 17, generator=torch.Generator().manual_seed(0))
    for c, low, high in ((QSGD(), 1.5, 1.7), (QSGD(norm="max"), 0.03, 0.045)):
        _, decoded = roundtrip(c, x, Context(seed=5))
        assert low < float((decoded - x).square().sum() / x.square().sum()) < high


@every
def test_zero_nan_and_inf(c: QSGD) -> None:
    spec = Spec.flat(1300)
    _, decoded = roundtrip(c, torch.zeros(1300), Context())
    assert torch.equal(decoded, torch.zeros(1300))
    for bad in (math.nan, math.inf, -math.inf):
        x = vectors(1300)["gaussian"]
        x[777] = bad
        message, decoded = roundtrip(c, x, Context())
        assert bool(decoded.isnan().all())
        out = torch.ones(1300)
        assert bool(c.decode_add(message, spec, Context(), out, 0.5).isnan().all())


@every
def test_decode_add_is_decode_then_add(c: QSGD) -> None:
    assert isinstance(c, Compressor)
    assert isinstance(c, Accumulator)
    for x in vectors(1000).values():
        message, decoded = roundtrip(c, x, Context(seed=3))
        out = torch.linspace(-1, 1, 1000)
        expected = out + decoded * torch.tensor(0.7)
        assert c.decode_add(message, Spec.flat(1000), Context(seed=3), out, 0.7) is out
        assert torch.equal(out, expected)


@every
def test_out_is_used(c: QSGD) -> None:
    x = vectors(900)["gaussian"]
    spec = Spec.flat(900)
    buffer = torch.full((c.max_nbytes(spec) + 5,), 7, dtype=torch.uint8)
    message, _ = c.encode(x, Spec.of(x), None, Context(seed=3), out=buffer)
    assert message.data is buffer
    plain, _ = c.encode(x, Spec.of(x), None, Context(seed=3))
    assert message.tobytes() == plain.tobytes()
    out = torch.empty(900)
    assert c.decode(message, spec, Context(), out) is out


@every
def test_bad_bytes_are_refused_or_decode_to_the_right_shape(c: QSGD) -> None:
    rng = random.Random(1)
    spec = Spec.flat(900)
    for x in (vectors(900)["gaussian"], vectors(900)["one_big"], torch.zeros(900)):
        good = c.encode(x, Spec.of(x), None, Context())[0].tobytes()
        cases = [good[:k] for k in range(0, len(good), 7)] + [good + b"\0", b"", b"\x03", b"\x09" * 40]
        for _ in range(300):
            bad = bytearray(good)
            for _ in range(rng.randint(1, 4)):
                bad[rng.randrange(len(bad))] = rng.randrange(256)
            cases.append(bytes(bad))
        for data in cases:
            try:
                out = c.decode(Message.frombytes(data), spec, Context())
            except CorruptMessage:
                continue
            assert out.shape == (900,)
            assert out.dtype == torch.float32


def test_incompressible_levels_are_packed() -> None:
    c = QSGD(bits=8, norm="max", bucket=64, coder="elias")
    x = torch.randn(640, generator=torch.Generator().manual_seed(0))
    message, decoded = roundtrip(c, x, Context())
    assert message.tobytes()[0] == 4
    assert int(message.nbytes) == c.max_nbytes(Spec.flat(640)) == 1 + 40 + 640
    assert float((decoded - x).square().sum() / x.square().sum()) < 0.01


def test_entropy_coders_beat_packing_on_l2() -> None:
    x = torch.randn(1 << 16, generator=torch.Generator().manual_seed(0))
    sizes = {
        k: int(QSGD(bits=4, coder=k).encode(x, Spec.of(x), None, Context())[0].nbytes) for k in ("packed", "elias", "rans")
    }
    assert sizes["rans"] < sizes["elias"] < sizes["packed"]


def test_configuration_errors_say_what_to_do() -> None:
    for wrong in ({"bits": 1}, {"bits": 9}, {"bucket": 0}, {"bucket": 100}, {"norm": "l1"}, {"coder": "zip"}, {"levels": 0}):
        with pytest.raises(BadConfiguration, match="qsgd: "):
            QSGD(**wrong)
    with pytest.raises(BadConfiguration, match="coder=rans"):
        QSGD(levels=8)
    assert QSGD(levels=8, coder="rans").s == 8
    assert str(QSGD(bits=3, norm="max")) == "qsgd(bits=3, norm=max)"

"""The fixed-rate baselines as compressors: what they promise, on vectors chosen to break it."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tersegrad import kernels
from tersegrad.compressors.bf16 import BF16
from tersegrad.compressors.fp8 import FP8
from tersegrad.compressors.fp16 import FP16
from tersegrad.compressors.identity import Identity
from tersegrad.compressors.natural import Natural
from tersegrad.compressors.natural_dithering import NaturalDithering
from tersegrad.compressors.sign import Sign
from tersegrad.compressors.ternary import Ternary
from tersegrad.core.errors import BadConfiguration, CorruptMessage
from tersegrad.core.protocol import Accumulator, Compressor, Context, Message, Spec
from tersegrad.wrappers import Rotated

ALL: tuple[Compressor[Any], ...] = (
    Identity(),
    BF16(),
    FP16(),
    FP8(),
    FP8(block=128),
    Sign(),
    Ternary(),
    Ternary(bucket=64),
    Natural(),
    Natural(coder="rans"),
    NaturalDithering(),
    NaturalDithering(levels=3, bucket=128),
    NaturalDithering(levels=4, coder="rans"),
)
every = pytest.mark.parametrize("c", ALL, ids=str)
SIZES = (0, 1, 2, 63, 64, 65, 1000)
FLOOR = 2.0**-126
CONTEXT = Context(seed=5)


def once(c: Compressor[Any], x: Tensor, ctx: Context = CONTEXT) -> Tensor:
    spec = Spec.flat(x.numel(), x.dtype)
    message, _ = c.encode(x, spec, c.init(spec, x.device), ctx)
    assert int(message.nbytes) <= c.max_nbytes(spec)
    return c.decode(Message.frombytes(message.tobytes()), spec, ctx)


def vectors(d: int) -> dict[str, Tensor]:
    g = torch.randn(d, generator=torch.Generator().manual_seed(d))
    index = torch.arange(d, dtype=torch.float32)
    one_hot = torch.zeros(d)
    one_hot[-1] = -2.0
    worst_ternary = torch.full((d,), 1 / (1 + math.sqrt(d)))
    worst_ternary[0] = 1.0
    many_small = torch.full((d,), 2.0**-16)
    many_small[0] = 1.0
    return {
        "gaussian": g,
        "one-hot": one_hot,
        "constant": torch.full((d,), 4 / 3),
        "alternating": 1.7 * (1 - 2 * (index % 2)),
        "geometric": 2.0 ** -(index % 140) * (1 - 2 * (index % 2)),
        "one big, many small": many_small,
        "worst for ternary": worst_ternary,
        "worst for fp8": torch.where(index % 2 == 0, 449 / 448, 17 / 16),
        "below the lowest level": torch.where(index == 0, 1.0, 2.0**-9),
        "tiny": g * 1e-30,
        "denormal": g * 1e-41,
        "huge": g.clamp(-1, 1) * 1.7e38,
        "zero": torch.zeros(d),
    }


def error(y: Tensor, x: Tensor) -> float:
    return float((y.double() - x.double()).square().sum())


@every
@pytest.mark.parametrize("d", [1, 64, 300])
def test_guarantee(c: Compressor[Any], d: int) -> None:
    promise = c.guarantee(Spec.flat(d))
    assert promise.kind in ("contractive", "unbiased")
    assert promise.sure == (promise.kind == "contractive")
    for name, x in vectors(d).items():
        norm, seeds = float(x.double().square().sum()), 1 if promise.sure else 50
        errors = [error(once(c, x, Context(seed=s)), x) for s in range(seeds)]
        allowed = promise.value * norm * (1 + 1e-9) + d * FLOOR**2
        if promise.sure:
            assert errors[0] <= allowed, (name, errors[0] / max(norm, 1e-300))
        else:  # Bernstein at 1e-9: errors lie in [0, most], so their variance is at most most * mean
            most, log = max(errors), math.log(1e9)
            slack = math.sqrt(2 * most * allowed * log / seeds) + most * log / (3 * seeds)
            assert sum(errors) / seeds <= allowed + slack, name


@pytest.mark.parametrize("c", [c for c in ALL if c.guarantee(Spec.flat(64)).kind == "unbiased"], ids=str)
def test_unbiased(c: Compressor[Any]) -> None:
    pattern = torch.cat((torch.linspace(-1, 1, 57), torch.tensor([1e-3, -1e-4, 2.0**-7, 0.75, 2.0, -3.0, 0.0])))
    copies, seeds = 128, 50
    x = pattern.repeat(copies)
    total, squares, most = torch.zeros(64, dtype=torch.float64), torch.zeros(64, dtype=torch.float64), 0.0
    for seed in range(seeds):
        e = (once(c, x, Context(seed=seed)) - x).double().view(copies, 64)
        total, squares, most = total + e.sum(0), squares + e.square().sum(0), max(most, float(e.abs().max()))
    draws, log = copies * seeds, math.log(2 * 64 / 1e-9)
    variance = 2 * squares / draws + most**2 * log / draws  # at least the true one, but for odds far below 1e-9
    bound = (2 * variance * log / draws).sqrt() + 2 * most * log / (3 * draws) + most * 2.0**-16
    assert bool(((total / draws).abs() <= bound).all())


def test_small_probabilities_keep_their_mean() -> None:
    """A coordinate of 2^-20 of the largest must still arrive once in 2^20 times, although draws have 16 bits."""
    x = torch.full((1 << 20,), 2.0**-20)
    x[0] = 1.0
    hits = sum(int((once(Ternary(), x, Context(seed=s))[1:] != 0).sum()) for s in range(8))
    assert 1 <= hits <= 25  # Poisson with mean 8: outside with odds below 4e-4, and the seeds are fixed


@every
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_sizes_dtypes_and_views(c: Compressor[Any], dtype: torch.dtype) -> None:
    for d in SIZES:
        x = torch.randn(2 * d, generator=torch.Generator().manual_seed(d))[::2].to(dtype)
        y = once(c, x)
        assert y.shape == (d,)
        assert y.dtype == torch.float32
        assert bool(y.isfinite().all())
        assert torch.equal(y, once(c, x.clone()))


@every
def test_extreme_but_finite(c: Compressor[Any]) -> None:
    for value in (torch.finfo(torch.float32).max, 3.4e38, 1e38, 1e-38, 1e-45, 0.0):
        for d in (1, 65, 300):
            y = once(c, torch.full((d,), -value))
            assert bool(y.isfinite().all())
            assert value or not bool(y.any())


@every
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_non_finite(c: Compressor[Any], bad: float) -> None:
    for d, at in ((1, 0), (65, 64), (700, 200)):
        x = torch.randn(d, generator=torch.Generator().manual_seed(1))
        x[at] = bad
        y = once(c, x)
        if isinstance(c, (Identity, BF16)):
            assert str(float(y[at])) == str(bad)
            assert bool(y.isfinite().sum() == d - 1)
        else:
            assert bool(y.isnan().all())


@every
def test_out_and_decode_add(c: Compressor[Any]) -> None:
    x, ctx, spec = torch.randn(1000, generator=torch.Generator().manual_seed(2)), Context(seed=3), Spec.flat(1000)
    plain, _ = c.encode(x, Spec.of(x), None, ctx)
    room = torch.full((c.max_nbytes(spec) + 7,), 99, dtype=torch.uint8)
    message, _ = c.encode(x, Spec.of(x), None, ctx, out=room)
    assert message.data is room
    assert message.tobytes() == plain.tobytes()
    assert bool((room[c.max_nbytes(spec) :] == 99).all())
    y = torch.empty(1000)
    assert c.decode(message, spec, ctx, y) is y
    base = torch.randn(1000)
    assert isinstance(c, Accumulator)
    added = c.decode_add(message, spec, ctx, base.clone(), 0.3)
    assert torch.equal(added, base + y * torch.tensor(0.3))
    with kernels.force("reference"):
        assert torch.equal(added, c.decode_add(message, spec, ctx, base.clone(), 0.3))
    with pytest.raises(BadConfiguration, match="out must be"):
        c.encode(x, Spec.of(x), None, ctx, out=torch.empty(3, dtype=torch.uint8))
    with pytest.raises(BadConfiguration, match="out must be"):
        c.decode(message, spec, ctx, torch.empty(999))


@every
def test_wrong_lengths_are_corrupt(c: Compressor[Any]) -> None:
    ctx = Context()
    for d in (1, 100):
        message, _ = c.encode(torch.randn(d), Spec.of(torch.randn(d)), None, ctx)
        data = message.tobytes()
        for other in (data[:-1], data + b"\0", b""):
            with pytest.raises(CorruptMessage):
                c.decode(Message.frombytes(other), Spec.flat(d), ctx)


def test_exactness_where_it_is_promised() -> None:
    x = torch.randn(1000)
    assert torch.equal(once(Identity(), x), x)
    assert torch.equal(once(BF16(), x.bfloat16()), x.bfloat16().float())
    assert torch.equal(once(FP16(), torch.tensor([1.0, 2.0**-13, -0.75])), torch.tensor([1.0, 2.0**-13, -0.75]))
    powers = 2.0 ** torch.arange(-20, 20)
    assert torch.equal(once(Natural(), powers), powers)
    assert torch.equal(once(Ternary(), torch.tensor([3.0, -3.0, 0.0])), torch.tensor([3.0, -3.0, 0.0]))


def test_sign_attains_its_bound_and_zero_is_positive() -> None:
    x = torch.zeros(100)
    x[3] = 1.0
    assert error(once(Sign(), x), x) == pytest.approx(1 - 1 / 100)
    assert torch.equal(once(Sign(), torch.tensor([-0.0, 2.0])), torch.tensor([1.0, 1.0]))


def test_signs_have_a_scale_per_block() -> None:
    x = torch.cat((torch.full((4096,), -1000.0), torch.ones(4096), torch.tensor([0.001, -0.001])))
    assert torch.equal(once(Sign(), x), x)
    whole = once(Sign(block=None), x)
    assert whole.abs().unique().numel() == 1
    assert [Sign().nbytes(d) - -(-d // 8) for d in (0, 1, 4096, 4097, 8194)] == [0, 4, 4, 8, 12]
    assert [Sign(block=None).nbytes(d) - -(-d // 8) for d in (0, 1, 8194)] == [0, 4, 4]
    # A block bounds the whole: a one-hot block of 64 attains it.
    one = torch.zeros(640)
    one[7::64] = 3.0
    promised = Sign(block=64).guarantee(Spec.of(one)).value
    assert error(once(Sign(block=64), one), one) / error(one, 0 * one) == pytest.approx(promised, abs=1e-6) == 1 - 1 / 64


def test_no_block_of_a_vector_that_is_not_finite_has_a_scale() -> None:
    x = torch.ones(10_000)
    x[9000] = math.inf
    assert bool(once(Sign(), x).isnan().all())


def test_rotated_signs_err_as_on_gaussian_data_where_tensors_differ_in_size() -> None:
    g = torch.Generator().manual_seed(8)
    x = torch.randn(16, 4096, generator=g).mul(torch.exp2(torch.arange(16.0) - 8)[:, None]).flatten()
    whole = error(x, 0 * x)
    assert error(once(Rotated(Sign()), x), x) / whole == pytest.approx(1 - 2 / math.pi, abs=0.02)
    assert error(once(Rotated(Sign(block=None)), x), x) / whole > 0.7


def test_natural_saturates_at_the_largest_power() -> None:
    assert once(Natural(), torch.tensor([3.4e38, -2e38])).tolist() == [2.0**127, -(2.0**127)]


def test_entropy_coding_shortens_the_message() -> None:
    x = torch.randn(1 << 17, generator=torch.Generator().manual_seed(4))
    for packed, coded in ((Natural(), Natural(coder="rans")), (NaturalDithering(), NaturalDithering(coder="rans"))):
        a, _ = packed.encode(x, Spec.of(x), None, Context(seed=1))
        b, _ = coded.encode(x, Spec.of(x), None, Context(seed=1))
        assert int(b.nbytes) < 0.6 * int(a.nbytes)
        spec = Spec.of(x)
        assert torch.equal(packed.decode(a, spec, Context()), coded.decode(b, spec, Context()))


def test_bad_configurations() -> None:
    for make in (
        lambda: FP8(block=33),
        lambda: FP8(block=8),
        lambda: Ternary(bucket=100),
        lambda: Ternary(bucket=0),
        lambda: Sign(block=100),
        lambda: Sign(block=0),
        lambda: Natural(coder="zip"),  # type: ignore[arg-type]
        lambda: NaturalDithering(levels=0),
        lambda: NaturalDithering(levels=65),
        lambda: NaturalDithering(bucket=-64),
    ):
        with pytest.raises(BadConfiguration):
            make()


def test_text_forms() -> None:
    assert [str(c) for c in ALL[:3]] == ["identity", "bf16", "fp16"]
    assert str(NaturalDithering(levels=4, coder="rans")) == "natural_dithering(levels=4, coder=rans)"
    assert str(FP8()) == "fp8"
    assert str(Ternary(bucket=64)) == "ternary(bucket=64)"

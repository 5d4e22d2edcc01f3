"""Rotation: promises carry over, outliers stop hurting, awkward sizes and magnitudes are ordinary."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from tersegrad.compressors import BF16
from tersegrad.core.errors import BadConfiguration, CorruptMessage
from tersegrad.core.protocol import Compressor, Context, Message, Spec, Stats
from tersegrad.kernels.reference.hadamard import rotated_numel
from tersegrad.wrappers import ErrorFeedback, Metered, Rotated
from tests.wrappers.toys import Coarse, Largest, Lottery, Toy

SIZES = (0, 1, 2, 3, 63, 64, 65, 1000, 4096, 4097, 10_000)


def vectors(d: int) -> dict[str, Tensor]:
    g = torch.randn(d, generator=torch.Generator().manual_seed(d))
    spike = torch.full((d,), 1e-3)
    spike[d // 2 : d // 2 + 1] = 100.0
    return {
        "gaussian": g,
        "spike": spike,
        "constant": torch.ones(d),
        "huge": torch.sign(g) * 3e38,
        "tiny": g * 1e-38,
        "zero": torch.zeros(d),
    }


def relative_error(c: Compressor[Any], x: Tensor, ctx: Context | None = None) -> float:
    ctx, spec = ctx or Context(seed=5), Spec.flat(x.numel())
    message, _ = c.encode(x, spec, c.init(spec, "cpu"), ctx)
    decoded = c.decode(Message.frombytes(message.tobytes()), spec, ctx)
    assert bool(torch.isfinite(decoded).all())
    norm = float(x.double().square().sum())
    return float((decoded.double() - x.double()).square().sum()) / norm if norm else float(decoded.abs().sum())


@pytest.mark.parametrize("d", SIZES)
def test_exact_inside_is_exact_up_to_the_stated_rounding(d: int) -> None:
    c = Rotated(Toy())
    for name, x in vectors(d).items():
        promise = c.guarantee(Spec.flat(d))
        floor = d * 2.0**-252 / max(float(x.double().square().sum()), 1e-300)  # 2^-126 per coordinate, below all promises
        assert relative_error(c, x) <= promise.value + floor, name
        assert promise.value < 1e-11


@pytest.mark.parametrize("d", [1, 65, 1000, 4100])
@pytest.mark.parametrize("inner", [Largest(k=50), Coarse(levels=100)], ids=str)
def test_sure_promises_carry_over_for_every_rotation(d: int, inner: Compressor[Any]) -> None:
    for block in (1, 16, 64, 4096):
        c = Rotated(inner, block=block)
        promise = c.guarantee(Spec.flat(d))
        assert promise.sure
        for name, x in vectors(d).items():
            for seed in range(3):
                assert relative_error(c, x, Context(seed=seed)) <= promise.value * (1 + 1e-6) + 1e-30, (name, block)


def test_unbiased_stays_unbiased() -> None:
    d, p, draws = 96, 0.5, 4000
    c, spec = Rotated(Lottery(p=p), block=32), Spec.flat(96)
    assert c.guarantee(spec).kind == "unbiased"
    assert c.guarantee(spec).value == pytest.approx(1 / p - 1, rel=1e-5)
    x = torch.randn(d, generator=torch.Generator().manual_seed(0))
    mean, square = torch.zeros(d, dtype=torch.float64), 0.0
    state = c.init(spec, "cpu")
    for t in range(draws):
        decoded = c.decode(c.encode(x, spec, state, Context(step=t))[0], spec, Context(step=t)).double()
        mean += (decoded - x) / draws
        square += float((decoded - x).square().sum()) / draws
    norm = float(x.double().square().sum())
    # E ||mean||^2 = omega ||x||^2 / draws; Markov at 1/50 keeps chance out, and a bias of a few per cent would still show.
    assert float(mean.square().sum()) <= 50 * norm / draws
    assert square <= norm * (1 / p - 1) * 1.1


def test_rotation_rescues_a_quantiser_from_outliers() -> None:
    x = vectors(4096)["spike"] + torch.randn(4096, generator=torch.Generator().manual_seed(1)) * 0.5
    assert relative_error(Rotated(Coarse(levels=7)), x) < 0.5 * relative_error(Coarse(levels=7), x)


def test_fresh_signs_for_every_step_buffer_and_seed_but_not_sender() -> None:
    x, c = vectors(4096)["gaussian"], Rotated(Toy())

    def sent(ctx: Context) -> bytes:
        return c.encode(x, Spec.of(x), None, ctx)[0].tobytes()

    assert sent(Context(sender=1)) == sent(Context(sender=2))
    assert len({sent(Context(seed=a, step=b, buffer=e)) for a, b, e in ((0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1))}) == 4


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_non_finite_input_decodes_to_nan_everywhere(bad: float) -> None:
    for d in (1, 65, 5000):
        x = torch.ones(d)
        x[-1] = bad
        for inner in (Toy(), Largest(k=3)):
            c, spec = Rotated(inner), Spec.flat(d)
            message, _ = c.encode(x, spec, c.init(spec, "cpu"), Context())
            assert bool(torch.isnan(c.decode(message, spec, Context())).all())


def test_out_buffers_and_metered_inside() -> None:
    c, spec, x = Rotated(Metered(Toy()), block=64), Spec.flat(100), vectors(100)["gaussian"]
    state = c.init(spec, "cpu")
    plain, after = c.encode(x, spec, state, Context())
    assert after.messages == 1
    assert after.coordinates == rotated_numel(100, 64) == 128
    buffer = torch.full((c.max_nbytes(spec) + 3,), 170, dtype=torch.uint8)
    message, _ = c.encode(x, spec, state, Context(), out=buffer)
    assert message.data is buffer
    assert message.tobytes() == plain.tobytes()
    assert buffer[-3:].tolist() == [170] * 3
    for d in (100, 128):  # with and without padding
        spec, x = Spec.flat(d), vectors(d)["gaussian"]
        message, _ = c.encode(x, spec, c.init(spec, "cpu"), Context())
        target = torch.empty(d)
        assert c.decode(message, spec, Context(), out=target) is target
        assert torch.equal(target, c.decode(message, spec, Context()))


def test_bad_bytes() -> None:
    c, spec = Rotated(Toy()), Spec.flat(64)
    data = c.encode(torch.ones(64), Spec.of(torch.ones(64)), None, Context())[0].tobytes()
    for broken in (b"", data[:-1], data + b"\0", data[:-1] + b"\2", b"\0"):
        with pytest.raises(CorruptMessage):
            c.decode(Message.frombytes(broken), spec, Context())


def test_a_residual_inside_a_rotation_is_refused() -> None:
    with pytest.raises(BadConfiguration, match="put rotated inside"):
        Rotated(ErrorFeedback(Largest()))
    for block in (0, 3, -4, 1 << 17):
        with pytest.raises(BadConfiguration, match="power of two"):
            Rotated(Largest(), block=block)


def test_promises_near_one_are_not_drowned_in_rounding() -> None:
    spec = Spec.flat(1 << 24)
    promise = Rotated(Largest(k=1)).guarantee(spec)
    assert promise == Largest(k=1).guarantee(spec)
    assert promise.value < 1


@dataclasses.dataclass(frozen=True)
class Stubborn(BF16):
    """Ignores ``out=`` and hands out exactly its message."""

    name: ClassVar[str] = "stubborn"

    def encode(
        self, x: Tensor, spec: Spec, state: None, ctx: Context, *, stats: Stats | None = None, out: Tensor | None = None
    ) -> tuple[Message, None]:
        message, _ = super().encode(x, spec, state, ctx)
        return Message(message.payload.clone(), message.nbytes), None


@pytest.mark.parametrize("given", [False, True])
def test_an_inner_compressor_may_ignore_the_buffer(given: bool) -> None:
    x, ctx = torch.linspace(-1, 1, 100), Context(seed=3)
    spec = Spec.of(x)
    out = torch.full((Rotated(BF16()).max_nbytes(spec) + 3,), 170, dtype=torch.uint8) if given else None
    wanted, _ = Rotated(BF16()).encode(x, spec, None, ctx)
    message, _ = Rotated(Stubborn()).encode(x, spec, None, ctx, out=out)
    assert message.tobytes() == wanted.tobytes()
    assert out is None or (message.data is out and out[-3:].tolist() == [170] * 3)

"""Int8 and int4: a sure contraction, attained by the worst case, the same bytes everywhere."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from tersegrad import kernels
from tersegrad.compressors.int_block import Int4, Int8
from tersegrad.core.errors import BadConfiguration, CorruptMessage
from tersegrad.core.protocol import Accumulator, Compressor, Context, Message, Spec
from tersegrad.kernels import native

Either = Int8 | Int4
CONFIGURATIONS: tuple[Either, ...] = (Int8(), Int8(block=8), Int8(block=4096), Int4(), Int4(block=64), Int4(block=1024))
every = pytest.mark.parametrize("c", CONFIGURATIONS, ids=str)


def vectors(c: Either, d: int) -> dict[str, Tensor]:
    g = torch.randn(d, generator=torch.Generator().manual_seed(d))
    index = torch.arange(d)
    one_hot = torch.zeros(d)
    one_hot[d // 2 : d // 2 + 1] = -2.5
    one_big = torch.full((d,), 0.004)
    one_big[d // 3 : d // 3 + 1] = 3.0
    tables = {
        "gaussian": g,
        "one_hot": one_hot,
        "constant": torch.full((d,), -0.7),
        "alternating": 1.0 - 2.0 * (index % 2),
        "geometric": torch.pow(0.9, (index % 300).float()),
        "one_big": one_big,
        "large": g.clamp(-3.4, 3.4) * 1e38,
        "largest": torch.full((d,), torch.finfo(torch.float32).max),
        "tiny": g * 1e-42,
        "zero": torch.zeros(d),
    }
    for top in (1.0, 1.0039, 1.37, 1.99):  # several roundings of the step
        for fraction in (0.49, 0.4999, 0.5001):
            half = torch.full((d,), fraction * top / c.levels)
            half[:: c.block] = top
            tables[f"half a step {top} {fraction}"] = half
    return tables


def roundtrip(c: Either, x: Tensor) -> tuple[Message, Tensor]:
    message, _ = c.encode(x, Spec.of(x), None, Context())
    return message, c.decode(message, Spec.flat(x.numel()), Context())


@every
@pytest.mark.parametrize("d", [0, 1, 63, 64, 65, 511, 512, 513, 5000])
def test_same_bytes_on_every_backend(c: Either, d: int) -> None:
    for x in vectors(c, d).values():
        with kernels.force("reference"):
            message, decoded = roundtrip(c, x)
        assert int(message.nbytes) == c.max_nbytes(Spec.flat(d))
        for isa in native.supported_isas():
            with native.using(isa=isa, threads=2):
                again, same = roundtrip(c, x)
                assert again.tobytes() == message.tobytes()
                assert torch.equal(same, decoded)


@every
def test_contraction_holds_always(c: Either) -> None:
    for d in (1, 8, 65, 3000):
        alpha = c.guarantee(Spec.flat(d)).value
        for name, x in vectors(c, d).items():
            _, decoded = roundtrip(c, x)
            assert bool(decoded.isfinite().all()), name
            error = float((decoded.double() - x.double()).square().sum())
            assert error <= alpha * float(x.double().square().sum()) + d * 2.0**-252, name


def test_the_guarantee_is_nearly_attained() -> None:
    for c in (Int8(), Int4()):
        x = torch.full((c.block * 10,), 0.4999 / c.levels)
        x[:: c.block] = 1.0
        _, decoded = roundtrip(c, x)
        error = float((decoded - x).double().square().sum() / x.double().square().sum())
        assert error >= 0.98 * c.guarantee(Spec.flat(x.numel())).value


def test_sizes() -> None:
    assert Int8().max_nbytes(Spec.flat(1024)) == 1024 + 4 * 4
    assert Int4().max_nbytes(Spec.flat(1024)) == 512 + 2 * 32
    assert Int4().max_nbytes(Spec.flat(33)) == 17 + 2 * 2


@every
def test_nan_and_inf(c: Either) -> None:
    for bad in (math.nan, math.inf, -math.inf):
        x = vectors(c, 1300)["gaussian"]
        x[777] = bad
        message, decoded = roundtrip(c, x)
        assert bool(decoded.isnan().all())
        assert bool(c.decode_add(message, Spec.flat(1300), Context(), torch.ones(1300)).isnan().all())


@every
def test_decode_add_is_decode_then_add(c: Either) -> None:
    assert isinstance(c, Compressor)
    assert isinstance(c, Accumulator)
    for name, x in vectors(c, 1000).items():
        message, decoded = roundtrip(c, x)
        out = torch.linspace(-1, 1, 1000)
        expected = out + decoded * torch.tensor(0.7)
        assert c.decode_add(message, Spec.flat(1000), Context(), out, 0.7) is out
        assert torch.equal(out, expected), name


@every
def test_out_is_used(c: Either) -> None:
    x = vectors(c, 900)["gaussian"]
    buffer = torch.full((c.max_nbytes(Spec.flat(900)) + 5,), 7, dtype=torch.uint8)
    message, _ = c.encode(x, Spec.of(x), None, Context(), out=buffer)
    assert message.data is buffer
    assert message.tobytes() == roundtrip(c, x)[0].tobytes()
    out = torch.empty(900)
    assert c.decode(message, Spec.flat(900), Context(), out) is out


def test_wrong_lengths_are_refused() -> None:
    c = Int4()
    good = roundtrip(c, torch.randn(100))[0].tobytes()
    for data in (good[:-1], good + b"\0", b""):
        with pytest.raises(CorruptMessage):
            c.decode(Message.frombytes(data), Spec.flat(100), Context())


def test_configuration_errors() -> None:
    for block in (0, -8, 12):
        with pytest.raises(BadConfiguration, match="multiple of 8"):
            Int8(block=block)
    assert str(Int4(block=64)) == "int4(block=64)"
    assert str(Int8()) == "int8"

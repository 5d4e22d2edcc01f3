"""Threshold: what is above tau, exactly or as +-tau; raw where coding would expand."""

import math

import pytest
import torch
from torch import Tensor

from tersegrad import kernels
from tersegrad.compressors.threshold import Threshold
from tersegrad.core.errors import BadConfiguration, CorruptMessage
from tersegrad.core.protocol import Accumulator, Compressor, Context, Message, Spec
from tersegrad.kernels import native

CTX = Context()
VARIANTS = [Threshold(tau=t, values=v) for t in (0.0, 0.01, 1.0, 2.5, 1e30) for v in ("exact", "sign") if t or v == "exact"]


def send(compressor: Threshold, x: Tensor) -> tuple[Message, Tensor]:
    spec = Spec.flat(x.numel())
    message, _ = compressor.encode(x, Spec.of(x), None, CTX)
    assert 1 <= int(message.nbytes) <= compressor.max_nbytes(spec)
    sent = Message.frombytes(message.tobytes())
    return sent, compressor.decode(sent, spec, CTX)


def expected(compressor: Threshold, x: Tensor) -> Tensor:
    tau = torch.tensor(compressor.tau, dtype=torch.float32)
    kept = x if compressor.values == "exact" else x.sign() * tau
    return torch.where(x.abs() > tau, kept, torch.zeros(()))


@pytest.mark.parametrize("compressor", VARIANTS, ids=str)
@pytest.mark.parametrize("n", [0, 1, 2, 63, 64, 65, 1000, 20_000])
def test_definition(compressor: Threshold, n: int) -> None:
    generator = torch.Generator().manual_seed(n)
    gaussian = torch.randn(n, generator=generator)
    level = torch.full((n,), compressor.tau)
    for x in (gaussian, gaussian * 100, torch.zeros(n), level, gaussian.sign() * 3e38, gaussian * 1e-43):
        _, decoded = send(compressor, x)
        assert torch.equal(decoded, expected(compressor, x))
        if compressor.values == "exact":
            error = float((decoded.double() - x.double()).square().sum())
            assert error <= n * compressor.tau**2 * (1 + 1e-6)
    assert compressor.guarantee(Spec.flat(n)).kind == "none"


@pytest.mark.parametrize("compressor", VARIANTS, ids=str)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_non_finite(compressor: Threshold, bad: float) -> None:
    x = torch.randn(1000)
    x[777] = bad
    message, decoded = send(compressor, x)
    assert message.tobytes() == b"\x02"
    assert bool(decoded.isnan().all())


def test_dense_input_is_sent_raw() -> None:
    x = torch.randn(1000) + 10
    message, decoded = send(Threshold(tau=0.5), x)
    assert message.tobytes()[0] == 3
    assert int(message.nbytes) == 4001
    assert torch.equal(decoded, x)


def test_rate_of_signs() -> None:
    d = 1 << 18
    x = torch.randn(d, generator=torch.Generator().manual_seed(0))
    message, decoded = send(Threshold(tau=2.5, values="sign"), x)
    k = int((decoded != 0).sum())
    limit = (math.lgamma(d + 1) - math.lgamma(k + 1) - math.lgamma(d - k + 1)) / math.log(2)
    assert 8 * int(message.nbytes) <= limit + k + 0.1 * k + 64


@pytest.mark.parametrize("compressor", VARIANTS, ids=str)
def test_same_bytes_everywhere(compressor: Threshold) -> None:
    for n in (65, 5000):
        x = torch.randn(n) * 2
        with kernels.force("reference"):
            wanted = send(compressor, x)
        for isa in native.supported_isas():
            for threads in (1, 3):
                with native.using(isa=isa, threads=threads):
                    message, decoded = send(compressor, x)
                assert message.tobytes() == wanted[0].tobytes()
                assert torch.equal(decoded, wanted[1])


@pytest.mark.parametrize("compressor", VARIANTS, ids=str)
def test_decode_add(compressor: Threshold) -> None:
    assert isinstance(compressor, Compressor)
    assert isinstance(compressor, Accumulator)
    message, decoded = send(compressor, torch.randn(1000))
    out = torch.linspace(-1, 1, 1000)
    wanted = out + decoded * 0.25
    assert torch.equal(compressor.decode_add(message, Spec.flat(1000), CTX, out, 0.25), wanted)


@pytest.mark.parametrize("compressor", VARIANTS, ids=str)
def test_bad_bytes(compressor: Threshold) -> None:
    n = 1000
    spec = Spec.flat(n)
    data = bytearray(send(compressor, torch.randn(n, generator=torch.Generator().manual_seed(0)))[0].tobytes())
    for cut in range(0, len(data), max(1, len(data) // 100)):
        with pytest.raises(CorruptMessage):
            compressor.decode(Message.frombytes(data[:cut]), spec, CTX)
    with pytest.raises(CorruptMessage):
        compressor.decode(Message.frombytes(data + b"\0"), spec, CTX)
    generator = torch.Generator().manual_seed(1)
    for _ in range(300):
        mutated = bytearray(data)
        at = int(torch.randint(min(len(data), 60), (1,), generator=generator))
        mutated[at] = int(torch.randint(256, (1,), generator=generator))
        try:
            decoded = compressor.decode(Message.frombytes(mutated), spec, CTX)
        except CorruptMessage:
            continue
        assert decoded.shape == (n,)
        assert decoded.dtype == torch.float32


def test_configuration() -> None:
    assert str(Threshold(tau=0.5)) == "threshold(tau=0.5)"
    assert str(Threshold(tau=0.5, values="sign")) == "threshold(tau=0.5, values=sign)"
    assert Threshold(tau=1).wire_id == 14
    for tau in (-1.0, math.nan, math.inf, 1e39):
        with pytest.raises(BadConfiguration):
            Threshold(tau=tau)
    with pytest.raises(BadConfiguration):
        Threshold(tau=0.0, values="sign")
    with pytest.raises(BadConfiguration):
        Threshold(tau=1.0, values="bf16")  # type: ignore[arg-type]

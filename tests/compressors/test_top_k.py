"""Top-k: the set, the bytes, the guarantee, awkward input, bad bytes."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tersegrad import kernels
from tersegrad.compressors.top_k import TopK
from tersegrad.core.errors import BadConfiguration, CorruptMessage
from tersegrad.core.protocol import Accumulator, Compressor, Context, Fed, Message, Spec
from tersegrad.kernels import native
from tersegrad.recipes import parse

CTX = Context(seed=3)
SIZES = (0, 1, 2, 63, 64, 65, 1000, 5000)
VARIANTS = [
    TopK(fraction=0.01),
    TopK(k=7),
    TopK(fraction=1.0),
    TopK(fraction=0.3, values="bf16"),
    TopK(fraction=0.05, exact=False),
    TopK(fraction=0.5, exact=False, values="bf16"),
]


def send(compressor: TopK, x: Tensor) -> tuple[Message, Tensor]:
    spec = Spec.flat(x.numel())
    message, state = compressor.encode(x, Spec.of(x), None, CTX)
    assert state is None
    assert 1 <= int(message.nbytes) <= compressor.max_nbytes(spec)
    sent = Message.frombytes(message.tobytes())
    decoded = compressor.decode(sent, spec, CTX)
    assert decoded.dtype == torch.float32
    assert decoded.shape == (x.numel(),)
    return sent, decoded


def inputs(n: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(n)
    gaussian = torch.randn(n, generator=generator)
    return [
        gaussian,
        torch.round(gaussian * 2),
        torch.full((n,), -2.0),
        torch.zeros(n),
        gaussian * 1e-42,
        gaussian.sign() * 3.4e38,
        torch.where(torch.rand(n, generator=generator) < 0.005, gaussian, torch.zeros(())),
        torch.arange(n, dtype=torch.float32),
        torch.ones(n) / (torch.arange(n) + 1) ** 2,
    ]


@pytest.mark.parametrize("n", SIZES)
def test_is_the_set_of_torch_topk(n: int) -> None:
    x = torch.randn(n, generator=torch.Generator().manual_seed(n))
    for k in {1, n // 10 + 1, n} - {0}:
        _, decoded = send(TopK(k=k), x)
        expected = torch.zeros(n)
        best = x.abs().topk(min(k, n)).indices
        expected[best] = x[best]
        assert torch.equal(decoded, expected)


def test_ties_go_to_the_lowest_index() -> None:
    x = torch.tensor([1.0, -2.0, 1.0, 2.0, -1.0, 1.0])
    assert send(TopK(k=4), x)[1].tolist() == [1.0, -2.0, 1.0, 2.0, 0.0, 0.0]
    assert send(TopK(k=1), x)[1].tolist() == [0.0, -2.0, 0.0, 0.0, 0.0, 0.0]


@pytest.mark.parametrize("compressor", VARIANTS, ids=str)
@pytest.mark.parametrize("n", SIZES)
def test_guarantee_holds_for_every_input(compressor: TopK, n: int) -> None:
    guarantee = compressor.guarantee(Spec.flat(n))
    assert guarantee.kind == "contractive"
    assert guarantee.sure
    for x in inputs(n):
        _, decoded = send(compressor, x)
        assert bool(decoded.isfinite().all())
        error = float((decoded.double() - x.double()).square().sum())
        allowed = guarantee.value * float(x.double().square().sum()) + n * 2.0**-252
        assert error <= allowed * (1 + 1e-12)


def test_guarantee_is_tight_on_constant_vectors() -> None:
    x = torch.ones(1000)
    _, decoded = send(TopK(fraction=0.07), x)
    assert int((decoded != 0).sum()) == 70
    assert float((decoded - x).square().sum()) / 1000 == pytest.approx(TopK(fraction=0.07).guarantee(Spec.flat(1000)).value)


@pytest.mark.parametrize("values", ["float32", "bf16"])
@pytest.mark.parametrize("fraction", [1e-4, 0.001, 0.01, 0.1])
def test_rate(fraction: float, values: str) -> None:
    d = 1 << 20
    k = math.ceil(fraction * d)
    x = torch.randn(d, generator=torch.Generator().manual_seed(0))
    message, _ = send(TopK(fraction=fraction, values="bf16" if values == "bf16" else "float32"), x)
    limit = (math.lgamma(d + 1) - math.lgamma(k + 1) - math.lgamma(d - k + 1)) / math.log(2)
    assert 8 * int(message.nbytes) <= 1.02 * (limit + k * (16 if values == "bf16" else 32))


def test_zeros_are_never_sent() -> None:
    x = torch.zeros(100_000)
    x[[5, 70_000]] = torch.tensor([1.0, -1e-45])
    message, decoded = send(TopK(fraction=0.1), x)
    assert int(message.nbytes) < 20
    assert torch.equal(decoded, x)
    assert send(TopK(fraction=0.1), torch.zeros(10))[0].tobytes() == b"\x01"


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("compressor", VARIANTS, ids=str)
def test_non_finite(compressor: TopK, bad: float) -> None:
    for at in (0, 500, 999):
        x = torch.randn(1000)
        x[at] = bad
        message, decoded = send(compressor, x)
        assert message.tobytes() == b"\x02"
        assert bool(decoded.isnan().all())
    assert bool(send(compressor, torch.full((100,), bad))[1].isnan().all())


def test_non_finite_in_a_large_vector_of_nan() -> None:
    x = torch.full((1 << 18,), math.nan)
    x[::3] = 1.0
    assert bool(send(TopK(fraction=0.01, exact=False), x)[1].isnan().all())


@pytest.mark.parametrize("n", [1000, 1 << 18])
def test_estimate_sends_about_k(n: int) -> None:
    x = torch.randn(n, generator=torch.Generator().manual_seed(1))
    compressor = TopK(fraction=0.05, exact=False)
    _, decoded = send(compressor, x)
    count = int((decoded != 0).sum())
    assert 0.025 * n <= count <= 0.0625 * n + 1
    smallest, rest = decoded[decoded != 0].abs().min(), x[decoded == 0].abs().max()
    assert smallest > rest


def test_estimate_on_data_that_deceives_the_sample() -> None:
    from tersegrad.kernels.reference.select import sample_positions

    n = 1 << 17
    for inside, outside in ((0.0, 1.0), (1.0, 0.0), (1.0, 1.0)):
        x = torch.full((n,), outside)
        x[sample_positions(n)] = inside
        compressor = TopK(fraction=0.01, exact=False)
        _, decoded = send(compressor, x)
        count = int((decoded != 0).sum())
        assert n * 0.005 <= count <= n * 0.0125 + 1


@pytest.mark.parametrize("compressor", VARIANTS, ids=str)
def test_same_bytes_everywhere(compressor: TopK) -> None:
    for n in (65, 5000):
        for x in inputs(n):
            with kernels.force("reference"):
                expected = send(compressor, x)
            for isa in native.supported_isas():
                for threads in (1, 3):
                    with native.using(isa=isa, threads=threads):
                        message, decoded = send(compressor, x)
                    assert message.tobytes() == expected[0].tobytes()
                    assert torch.equal(decoded, expected[1])


@pytest.mark.parametrize("compressor", VARIANTS, ids=str)
def test_decode_add(compressor: TopK) -> None:
    assert isinstance(compressor, Compressor)
    assert isinstance(compressor, Accumulator)
    for x in inputs(1000):
        message, decoded = send(compressor, x)
        out = torch.linspace(-1, 1, 1000)
        expected = out + decoded * 0.25
        assert torch.equal(compressor.decode_add(message, Spec.flat(1000), CTX, out, 0.25), expected)
    message, _ = compressor.encode(torch.tensor([math.nan, 1.0]), Spec.of(torch.tensor([math.nan, 1.0])), None, CTX)
    assert bool(compressor.decode_add(message, Spec.flat(2), CTX, torch.zeros(2)).isnan().all())


def test_given_buffers_are_used() -> None:
    x, compressor = torch.randn(1000), TopK(k=10)
    spec = Spec.flat(1000)
    buffer, out = torch.zeros(compressor.max_nbytes(spec), dtype=torch.uint8), torch.full((1000,), 5.0)
    message, _ = compressor.encode(x, Spec.of(x), None, CTX, out=buffer)
    assert message.data is buffer
    assert compressor.decode(message, spec, CTX, out=out) is out
    assert torch.equal(out, send(compressor, x)[1])


def test_other_dtypes_and_views() -> None:
    base = torch.randn(40, 50)
    for x in (base.t(), base[::2], base.bfloat16(), base.half(), base.requires_grad_()):
        _, decoded = send(TopK(k=5), x)
        expected = x.detach().reshape(-1).float()
        assert torch.equal(decoded[decoded != 0], expected[decoded != 0])


@pytest.mark.parametrize("compressor", VARIANTS, ids=str)
def test_bad_bytes(compressor: TopK) -> None:
    n = 1000
    spec = Spec.flat(n)
    message, _ = send(compressor, torch.randn(n, generator=torch.Generator().manual_seed(0)))
    data = bytearray(message.tobytes())
    for cut in range(0, len(data), max(1, len(data) // 200)):
        with pytest.raises(CorruptMessage):
            compressor.decode(Message.frombytes(data[:cut]), spec, CTX)
    with pytest.raises(CorruptMessage):
        compressor.decode(Message.frombytes(data + b"\0"), spec, CTX)
    generator = torch.Generator().manual_seed(1)
    for _ in range(500):
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
    assert str(TopK(fraction=0.01)) == "top_k(fraction=0.01)"
    assert str(TopK(k=5, exact=False, values="bf16")) == "top_k(k=5, exact=false, values=bf16)"
    assert TopK(k=5).wire_id == 12
    bad: tuple[dict[str, Any], ...] = (
        {},
        {"fraction": 0.1, "k": 3},
        {"fraction": 0.0},
        {"fraction": 1.5},
        {"k": 0},
        {"k": 1, "values": "int8"},
    )
    for arguments in bad:
        with pytest.raises(BadConfiguration):
            TopK(**arguments)


@pytest.mark.parametrize(
    "text", ["top_k(fraction=0.01)", "top_k(fraction=0.1)", "top_k(k=40)", "top_k(fraction=0.1, values=bf16)"]
)
@pytest.mark.parametrize("d", [1, 2, 65, 300, 5000])
def test_of_a_sum_sends_what_the_sum_sends(text: str, d: int) -> None:
    """Messages of all coordinates among them, whose values are needed after what they leave behind is known."""
    compressor, spec, ctx = parse(text), Spec.flat(d), Context()
    assert isinstance(compressor, TopK)
    x, residual = torch.randn(2, d, generator=torch.Generator().manual_seed(d))
    left = torch.empty(d)
    message, finite = compressor.encode_split(Fed(x, residual, left), spec, ctx)
    expected, _ = compressor.encode(x + residual, spec, None, ctx)
    assert finite
    assert torch.equal(message.payload, expected.payload)
    assert torch.equal(left, x + residual - compressor.decode(expected, spec, ctx))

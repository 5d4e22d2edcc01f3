"""Random-k: a uniform permutation from the shared seed, unbiased, never an index on the wire."""

import math

import pytest
import torch
from torch import Tensor

from tersegrad import kernels
from tersegrad.compressors.random_k import RandomK, permutation_key
from tersegrad.core.errors import BadConfiguration, CorruptMessage
from tersegrad.core.protocol import Accumulator, Compressor, Context, Message, Spec
from tersegrad.kernels import native

CTX = Context(seed=3)
VARIANTS = [
    RandomK(fraction=0.1),
    RandomK(k=7),
    RandomK(fraction=1.0),
    RandomK(fraction=0.3, unbiased=False),
    RandomK(fraction=0.3, unbiased=False, values="bf16"),
]


def send(compressor: RandomK, x: Tensor, ctx: Context = CTX) -> tuple[Message, Tensor]:
    spec = Spec.flat(x.numel())
    message, _ = compressor.encode(x, Spec.of(x), None, ctx)
    assert int(message.nbytes) == compressor.max_nbytes(spec)
    sent = Message.frombytes(message.tobytes())
    return sent, compressor.decode(sent, spec, ctx)


@pytest.mark.parametrize("d", [1, 2, 3, 4, 5, 7, 8, 9, 31, 33, 64, 65, 100, 1000, 1025, 4096, 10_007])
def test_is_a_permutation(d: int) -> None:
    for seed in range(5):
        keys, rotation = permutation_key(Context(seed=seed), d)
        images = kernels.get(torch.device("cpu")).permuted_indices(keys, rotation, d, d)
        assert torch.equal(images.sort().values, torch.arange(d, dtype=images.dtype))


@pytest.mark.parametrize("d", [3, 10, 37])
def test_every_place_is_equally_likely(d: int) -> None:
    """Counts of (position, image) pairs over n seeds: each is binomial(n, 1/d); Bernstein with a union over all pairs."""
    n = 1500
    counts = torch.zeros(d, d)
    rows = torch.arange(d)
    for seed in range(n):
        keys, rotation = permutation_key(Context(seed=seed, step=seed % 7), d)
        counts[rows, kernels.get(torch.device("cpu")).permuted_indices(keys, rotation, d, d).long()] += 1
    log_term = math.log(2 * d * d / 1e-9)
    variance = n / d * (1 - 1 / d)
    allowed = math.sqrt(2 * variance * log_term) + log_term * 2 / 3
    assert float((counts - n / d).abs().max()) <= allowed


def test_pairs_are_spread() -> None:
    """Two coordinates are chosen together about as often as independent draws without replacement would."""
    d, k, n = 50, 10, 1500
    together = torch.zeros(d, d)
    for seed in range(n):
        keys, rotation = permutation_key(Context(seed=seed), d)
        chosen = kernels.get(torch.device("cpu")).permuted_indices(keys, rotation, d, k).long()
        together[chosen[:, None], chosen] += 1
    together.fill_diagonal_(n * k * (k - 1) / (d * (d - 1)))
    p = k * (k - 1) / (d * (d - 1))
    log_term = math.log(2 * d * d / 1e-9)
    allowed = math.sqrt(2 * n * p * (1 - p) * log_term) + log_term * 2 / 3
    assert float((together - n * p).abs().max()) <= allowed


def test_unbiased_and_variance() -> None:
    """Mean of n decodings within a Bernstein bound; mean squared error is omega on average."""
    d, n = 40, 2000
    x = torch.linspace(-1, 3, d)
    compressor = RandomK(fraction=0.25)
    omega = compressor.guarantee(Spec.flat(d)).value
    assert omega == pytest.approx(3.0)
    mean, error = torch.zeros(d, dtype=torch.float64), 0.0
    for seed in range(n):
        _, decoded = send(compressor, x, Context(seed=seed))
        mean += decoded.double() / n
        error += float((decoded - x).double().square().sum()) / n
    log_term = math.log(2 * d / 1e-9)
    allowed = x.abs().double() * (math.sqrt(2 * omega * log_term / n) + 4 * log_term / (3 * n)) + 1e-6
    assert bool(((mean - x.double()).abs() <= allowed).all())
    norm = float(x.double().square().sum())
    # ||C(x) - x||^2 lies between 0 and (d/k - 1)^2 ||x||^2: Hoeffding.
    assert abs(error - omega * norm) <= omega**2 * norm * math.sqrt(math.log(2 / 1e-9) / (2 * n))


def test_contractive_on_average() -> None:
    compressor = RandomK(k=10, unbiased=False)
    guarantee = compressor.guarantee(Spec.flat(40))
    assert (guarantee.kind, guarantee.value, guarantee.sure) == ("contractive", 0.75, False)
    x, n = torch.linspace(-1, 3, 40), 1000
    errors = [float((send(compressor, x, Context(seed=s))[1] - x).square().sum() / x.square().sum()) for s in range(n)]
    assert abs(sum(errors) / n - 0.75) <= math.sqrt(math.log(2 / 1e-9) / (2 * n))


@pytest.mark.parametrize("compressor", VARIANTS, ids=str)
@pytest.mark.parametrize("n", [0, 1, 63, 64, 65, 1000])
def test_round_trip(compressor: RandomK, n: int) -> None:
    x = torch.randn(n, generator=torch.Generator().manual_seed(n)) + 5
    message, decoded = send(compressor, x)
    assert decoded.shape == (n,)
    count = compressor._count(n)
    assert int(message.nbytes) == count * (2 if compressor.values == "bf16" else 4)
    kept = decoded != 0
    assert int(kept.sum()) == count
    factor = n / count if compressor.unbiased and count else 1.0
    torch.testing.assert_close(decoded[kept], x[kept] * factor, rtol=2**-8 if compressor.values == "bf16" else 1e-6, atol=0)


def test_the_mask_is_shared_and_changes_with_the_context() -> None:
    x = torch.ones(1000)
    compressor = RandomK(fraction=0.1)

    def mask(ctx: Context) -> list[int]:
        return torch.nonzero(send(compressor, x, ctx)[1]).reshape(-1).tolist()

    base = mask(Context(seed=1, step=2, buffer=3, sender=4))
    assert mask(Context(seed=1, step=2, buffer=3, sender=9)) == base
    for other in (Context(2, 2, 3, 4), Context(1, 3, 3, 4), Context(1, 2, 4, 4)):
        assert mask(other) != base


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("compressor", VARIANTS, ids=str)
def test_non_finite_anywhere_decodes_to_nan(compressor: RandomK, bad: float) -> None:
    for at in range(0, 100, 9):  # most of these places are not in the mask
        x = torch.randn(100)
        x[at] = bad
        message, decoded = send(compressor, x)
        assert bool(decoded.isnan().all())
        assert bool(compressor.decode_add(message, Spec.flat(100), Context(seed=3), torch.zeros(100)).isnan().all())


@pytest.mark.parametrize("compressor", VARIANTS, ids=str)
def test_extremes_stay_finite(compressor: RandomK) -> None:
    for scale in (3.4e38, 1e38, 1e-42):
        _, decoded = send(compressor, torch.randn(200).sign() * scale)
        assert bool(decoded.isfinite().all())
    assert not bool(send(compressor, torch.zeros(200))[1].any())


@pytest.mark.parametrize("compressor", VARIANTS, ids=str)
def test_same_bytes_everywhere(compressor: RandomK) -> None:
    for n in (65, 5000):
        x = torch.randn(n)
        with kernels.force("reference"):
            expected = send(compressor, x)
        for isa in native.supported_isas():
            for threads in (1, 3):
                with native.using(isa=isa, threads=threads):
                    message, decoded = send(compressor, x)
                assert message.tobytes() == expected[0].tobytes()
                assert torch.equal(decoded, expected[1])


@pytest.mark.parametrize("compressor", VARIANTS, ids=str)
def test_decode_add(compressor: RandomK) -> None:
    assert isinstance(compressor, Compressor)
    assert isinstance(compressor, Accumulator)
    message, decoded = send(compressor, torch.randn(1000))
    out = torch.linspace(-1, 1, 1000)
    expected = out + decoded * 0.25
    assert torch.equal(compressor.decode_add(message, Spec.flat(1000), Context(seed=3), out, 0.25), expected)


def test_bad_bytes() -> None:
    compressor = RandomK(fraction=0.1)
    data = send(compressor, torch.randn(100))[0].tobytes()
    for wrong in (b"", data[:-1], data + b"\0", data[:20]):
        with pytest.raises(CorruptMessage):
            compressor.decode(Message.frombytes(wrong), Spec.flat(100), Context(seed=3))
    garbage = Message.frombytes(bytes(range(200, 240)))
    assert compressor.decode(garbage, Spec.flat(100), Context(seed=3)).shape == (100,)


def test_configuration() -> None:
    assert str(RandomK(fraction=0.01)) == "random_k(fraction=0.01)"
    assert str(RandomK(k=3, unbiased=False)) == "random_k(k=3, unbiased=false)"
    assert RandomK(k=5).wire_id == 13
    assert RandomK(fraction=0.07)._count(100) == 7
    for arguments in ({}, {"fraction": 0.1, "k": 3}, {"fraction": 0.0}, {"k": 0}, {"k": 1, "values": "bf16"}):
        with pytest.raises(BadConfiguration):
            RandomK(**arguments)

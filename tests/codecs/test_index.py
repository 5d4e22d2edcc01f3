"""Index sets: round trips, distance from log2 C(d, k), every form, bad bytes."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tersegrad import kernels
from tersegrad.codecs import index
from tersegrad.core.errors import CorruptMessage

TAIL = torch.tensor([255, 0, 170, 1, 2, 3, 4, 5, 6], dtype=torch.uint8)


def log2_choose(n: int, k: int) -> float:
    return (math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)) / math.log(2)


def random_set(numel: int, count: int, seed: int) -> Tensor:
    order = torch.randperm(numel, generator=torch.Generator().manual_seed(seed))
    return order[:count].sort().values.to(index.dtype(numel))


def round_trip(indices: Tensor, numel: int) -> Tensor:
    data = index.encode(indices, numel)
    assert data.numel() <= index.max_nbytes(indices.numel(), numel)
    decoded, used = index.decode(torch.cat([data, TAIL]), indices.numel(), numel)  # whatever follows does not matter
    assert used == data.numel()
    assert decoded.dtype == index.dtype(numel)
    assert torch.equal(decoded, indices.to(decoded.dtype))
    return data


@pytest.mark.parametrize("fraction", [1e-4, 3e-4, 1e-3, 3e-3, 0.01, 0.03, 0.1, 0.2, 0.3])
def test_random_sets_are_within_a_tenth_of_a_bit_of_the_limit(fraction: float) -> None:
    d = 1 << 20
    k = math.ceil(fraction * d)
    sizes = [8 * round_trip(random_set(d, k, seed), d).numel() / k for seed in range(4)]
    assert sum(sizes) / len(sizes) - log2_choose(d, k) / k < 0.1


@pytest.mark.parametrize("numel", [0, 1, 2, 3, 7, 8, 9, 63, 64, 65, 1000])
def test_every_count(numel: int) -> None:
    for count in {0, 1, 2, numel // 3, numel // 2, numel // 2 + 1, numel - 1, numel}:
        if 0 <= count <= numel:
            round_trip(random_set(numel, count, count), numel)


def shapes() -> dict[str, tuple[Tensor, int]]:
    """Sets that make each form win."""
    d = 1 << 17
    generator = torch.Generator().manual_seed(1)
    blocks = (torch.rand(d // 64, generator=generator) < 0.02).repeat_interleave(64)
    bursts = blocks & (torch.rand(d, generator=generator) < 0.9)
    waves = torch.rand(d, generator=generator) < 0.6 * torch.sin(torch.arange(d) / 3000.0).abs() ** 8
    runs = (torch.rand(d // 8, generator=generator) < 0.3).repeat_interleave(8)
    gaps = torch.where(torch.rand(400, generator=generator) < 0.9, 1, 30000).cumsum(0)
    return {
        "short": (random_set(d, 200, 0), d),
        "golomb": (random_set(d, 3000, 0), d),
        "rice": (gaps, 1 << 22),
        "bitmap": (random_set(4000, 1900, 0), 4000),
        "bursts": (torch.nonzero(bursts).reshape(-1), d),
        "waves": (torch.nonzero(waves).reshape(-1), d),
        "runs": (torch.nonzero(runs).reshape(-1), d),
        "huge": (torch.tensor(sorted(set(torch.randint(1 << 44, (3000,), generator=generator).tolist()))), 1 << 44),
        "far": (torch.tensor([0, 5, (1 << 40) - 1]), 1 << 40),
        "prefix": (torch.arange(5000), 1 << 30),
    }


@pytest.mark.parametrize("name", shapes())
def test_shapes(name: str) -> None:
    indices, numel = shapes()[name]
    data = round_trip(indices, numel)
    form = {"golomb": index.GOLOMB, "bitmap": index.BITMAP, "bursts": index.ENTROPY_GAPS, "runs": index.ENTROPY_BITMAP}
    if name in form:
        assert int(data[0]) == form[name]


def test_clustered_sets_profit() -> None:
    indices, numel = shapes()["bursts"]
    assert 8 * round_trip(indices, numel).numel() < 0.5 * log2_choose(numel, indices.numel())


@pytest.mark.parametrize("name", [n for n in shapes() if n != "huge"])
def test_reference_writes_the_same_bytes(name: str) -> None:
    indices, numel = shapes()[name]
    if name == "far":
        indices, numel = indices[:2], 1 << 30
    data = index.encode(indices, numel)
    with kernels.force("reference"):
        assert torch.equal(index.encode(indices, numel), data)
        decoded, used = index.decode(data, indices.numel(), numel)
    assert used == data.numel()
    assert torch.equal(decoded, indices.to(decoded.dtype))


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 3000), st.data())
def test_any_set(numel: int, data: st.DataObject) -> None:
    chosen = data.draw(st.sets(st.integers(0, numel - 1), max_size=min(numel, 600)))
    round_trip(torch.tensor(sorted(chosen), dtype=torch.int64), numel)


def test_int64_indices_give_the_bytes_of_int32() -> None:
    indices = random_set(10_000, 700, 3)
    assert torch.equal(index.encode(indices, 10_000), index.encode(indices.long(), 10_000))


def test_writes_into_the_given_buffer() -> None:
    indices = random_set(10_000, 700, 3)
    out = torch.zeros(index.max_nbytes(700, 10_000), dtype=torch.uint8)
    data = index.encode(indices, 10_000, out)
    assert data.data_ptr() == out.data_ptr()
    with pytest.raises(ValueError, match="at least"):
        index.encode(indices, 10_000, out[:-1])


@pytest.mark.parametrize("bad", [[1, 1], [2, 1], [-1, 1], [1, 10]])
def test_refuses_what_is_not_a_set(bad: list[int]) -> None:
    with pytest.raises(ValueError, match="increase strictly"):
        index.encode(torch.tensor(bad), 10)


def test_grows_with_count() -> None:
    for numel in (10, 1000, 1 << 20):
        sizes = [index.max_nbytes(k, numel) for k in range(0, numel // 2, max(1, numel // 997))]
        assert sizes == sorted(sizes)


@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize("name", ["short", "golomb", "rice", "bitmap", "bursts", "runs"])
def test_bad_bytes(name: str, backend: kernels.Backend) -> None:
    indices, numel = shapes()[name]
    data, count = index.encode(indices, numel), indices.numel()
    generator = torch.Generator().manual_seed(0)
    trials = 300 if backend == "auto" else 3
    with kernels.force(backend):
        for cut in range(0, data.numel(), max(1, data.numel() // trials)):
            with pytest.raises(CorruptMessage):
                index.decode(data[:cut], count, numel)
        for _ in range(trials):
            mutated = data.clone()
            at = int(torch.randint(data.numel() if backend == "auto" else 40, (1,), generator=generator))
            mutated[at] = int(torch.randint(256, (1,), generator=generator))
            try:
                decoded, used = index.decode(mutated, count, numel)
            except CorruptMessage:
                continue
            assert used <= data.numel()
            assert decoded.numel() == count
            assert bool((decoded[1:] > decoded[:-1]).all())
            assert int(decoded[0]) >= 0
            assert int(decoded[-1]) < numel


def test_bad_counts() -> None:
    data = index.encode(random_set(100, 10, 0), 100)
    for count in (-1, 101):
        with pytest.raises(CorruptMessage):
            index.decode(data, count, 100)

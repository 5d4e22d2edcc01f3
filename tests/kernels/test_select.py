"""Sparse kernels: every instruction set and thread count agrees with the reference."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from tersegrad.core.errors import CorruptMessage
from tersegrad.kernels import native, reference
from tersegrad.kernels.native.module import module
from tersegrad.kernels.reference.select import sample_positions

SIZES = (0, 1, 15, 16, 17, 63, 64, 65, 1000, 5000, 70_001)


@pytest.fixture(params=native.supported_isas() or ("none",))
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    with native.using(isa=request.param):
        yield request.param


def vectors(n: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(n)
    gaussian = torch.randn(n, generator=generator)
    sparse = torch.where(torch.rand(n, generator=generator) < 0.005, gaussian, torch.zeros(()))
    whole = torch.round(gaussian * 3)  # many ties
    constant = torch.full((n,), -2.0)
    tiny = gaussian * 1e-44
    huge = gaussian.sign() * 3e38
    period = torch.zeros(n)
    period[::16] = 1.0
    return [gaussian, sparse, whole, constant, tiny, huge, period, torch.zeros(n)]


def found(selected: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, int]:
    """What a selection found, without the room that is left, and how many there are."""
    indices, values, count = selected
    assert count.dim() == 0
    return indices[: int(count)], values[: int(count)], int(count)


@pytest.mark.parametrize("n", SIZES)
def test_top_k(n: int, isa: str) -> None:
    for x in vectors(n):
        for k in {1, max(1, n // 100), n // 3 + 1, max(1, n)}:
            expected = found(reference.select_top_k(x, k))
            got = found(native.select_top_k(x, k))
            assert torch.equal(got[0], expected[0])
            assert torch.equal(got[1], expected[1])


@pytest.mark.parametrize("n", SIZES)
def test_unaligned(n: int, isa: str) -> None:
    for x in vectors(n)[:3]:
        moved = torch.cat([torch.ones(1), x])[1:]
        raw = torch.empty(4 * n + 1, dtype=torch.uint8)
        raw[1:] = x.view(torch.uint8)
        k = max(1, n // 10)
        assert torch.equal(found(native.select_top_k(moved, k))[0], found(reference.select_top_k(x, k))[0])
        assert native.all_finite(moved)


@pytest.mark.parametrize("n", [(1 << 19) + 77])
def test_large(n: int, isa: str) -> None:
    generator = torch.Generator().manual_seed(5)
    gaussian = torch.randn(n, generator=generator)
    # The sample never sees the large coordinates, or sees nothing else: the answer must not depend on it.
    positions = sample_positions(n)
    hidden, shown = torch.rand(n, generator=generator) + 10, torch.rand(n, generator=generator)
    hidden[positions] = 0.5
    shown[positions] += 10
    ones = torch.where(gaussian > 2.6, gaussian, torch.ones(()))
    for x in (gaussian, hidden, shown, ones):
        for k in (1, n // 100, n // 2):
            expected = found(reference.select_top_k(x, k))
            for threads in (1, 2):
                with native.using(threads=threads):
                    got = found(native.select_top_k(x, k))
                assert torch.equal(got[0], expected[0])
                assert torch.equal(got[1], expected[1])


@pytest.mark.parametrize("n", [*SIZES, 1 << 19])
def test_compact_and_sample(n: int, isa: str) -> None:
    for x in vectors(n)[: 8 if n < 100_000 else 2]:
        for k in {1, max(1, n // 100), n // 2}:
            key = reference.select_sample_key(x, k)
            assert native.select_sample_key(x, k) == key
            for limit in (0, k, n):
                expected = found(reference.select_compact(x, key, limit))
                for threads in (1, 2):
                    with native.using(threads=threads):
                        got = found(native.select_compact(x, key, limit))
                    assert got[2] == expected[2]
                    assert torch.equal(got[0], expected[0])
                    assert torch.equal(got[1], expected[1])


@pytest.mark.parametrize("n", SIZES)
def test_finite(n: int, isa: str) -> None:
    x = torch.randn(n)
    assert native.all_finite(x)
    for bad in (float("nan"), float("inf"), -float("inf")):
        for at in {0, n // 2, n - 1} if n else ():
            y = x.clone()
            y[at] = bad
            assert not native.all_finite(y)
            indices, values, _ = native.select_top_k(y, 1)
            assert indices.tolist() == [at]
            assert not bool(values.isfinite())


@pytest.mark.parametrize("n", [*SIZES, (5 << 20) + 3])
def test_scatter(n: int, isa: str) -> None:
    x = torch.randn(n)
    for k in {0, 1, n // 50, n // 2} if n < 1 << 20 else {n // 50}:
        indices, values, _ = found(native.select_top_k(x, k))
        expected, total = torch.full((n,), 7.0), torch.linspace(-1, 1, n) if n else torch.zeros(0)
        got, sums = torch.full((n + 1,), 7.0)[1:], total.clone()
        reference.sparse_scatter(indices, values, expected)
        reference.sparse_scatter_add(indices, values, 0.3, total)
        for threads in (1, 2):
            with native.using(threads=threads):
                native.sparse_scatter(indices, values, got)
                assert torch.equal(got, expected)
        native.sparse_scatter_add(indices, values, 0.3, sums)
        assert torch.equal(sums, total)


@pytest.mark.parametrize("divisor", [1, 7, 64, 1 << 20])
def test_gaps_with_threads(divisor: int) -> None:
    """Bit streams that several threads write are joined within a byte."""
    numel = 3 << 20
    indices = torch.randperm(numel, generator=torch.Generator().manual_seed(3))[:200_003].sort().values.to(torch.int32)
    out, joined = torch.zeros(1 << 20, dtype=torch.uint8), torch.full((1 << 20,), 255, dtype=torch.uint8)
    with native.using(threads=1):
        size = int(native.golomb_encode(indices, divisor, out))
        histogram = native.gap_histogram(indices, numel)
    for threads in (2, 3, 5):
        with native.using(threads=threads):
            assert int(native.golomb_encode(indices, divisor, joined)) == int(native.golomb_size(indices, divisor)) == size
            assert torch.equal(joined[:size], out[:size])
            assert torch.equal(native.gap_histogram(indices, numel), histogram)
            unordered = indices.clone()
            unordered[numel // 7 % indices.numel()] = numel - 1
            with pytest.raises(ValueError, match="increase strictly"):
                native.gap_histogram(unordered, numel)
    back = torch.empty_like(indices)
    assert int(native.golomb_decode(out[:size], numel, divisor, back)) == size
    assert torch.equal(back, indices)


@pytest.mark.parametrize("divisor", [1, 2, 3, 5, 64, 69, 1000, (1 << 33) + 7])
def test_golomb_codes_agree(divisor: int, isa: str) -> None:
    for count, numel in ((1, 1), (3, 9), (500, 5000), (3000, 3000), (3000, 200_000), (400, (1 << 40) + 3)):
        generator = torch.Generator().manual_seed(count)
        every = torch.randperm(numel, generator=generator) if numel < 1 << 20 else torch.arange(count) * (numel // count)
        indices = every[:count].sort().values.to(torch.int32 if numel < 1 << 31 else torch.int64)
        size = int(reference.golomb_size(indices, divisor))
        if size > 1 << 20:
            continue
        wanted = torch.zeros(size, dtype=torch.uint8)
        reference.golomb_encode(indices, divisor, wanted)
        got = torch.zeros_like(wanted)
        assert int(native.golomb_encode(indices, divisor, got)) == int(native.golomb_size(indices, divisor)) == wanted.numel()
        assert torch.equal(got, wanted)
        for backend in (native, reference):
            back = torch.empty_like(indices)
            assert int(backend.golomb_decode(got, numel, divisor, back)) == got.numel()
            assert torch.equal(back, indices)


def test_golomb_decoders_agree_on_bad_bytes(isa: str) -> None:
    generator = torch.Generator().manual_seed(8)
    accepted = 0
    for trial in range(300):
        ones = torch.rand(24, 8, generator=generator) < (0.2, 0.4, 0.6)[trial % 3]
        data = (ones.int() << torch.arange(8)).sum(1).to(torch.uint8)
        numel, divisor, count = (40, 1000, 1 << 40)[trial % 3], (1, 3, 8, 69, 1 << 35)[trial % 5], (1, 4, 12)[trial // 5 % 3]
        answers: list[tuple[int, list[int]] | None] = []
        for backend in (native, reference):
            out = torch.empty(count, dtype=torch.int32 if numel < 1 << 31 else torch.int64)
            try:
                answers.append((int(backend.golomb_decode(data, numel, divisor, out)), out.tolist()))
            except CorruptMessage:
                answers.append(None)
        assert answers[0] == answers[1]
        accepted += answers[0] is not None
    assert 10 < accepted < 290


@pytest.mark.parametrize("bad", [[3, 3], [-1, 2], [2, 10], [5, 4]])
def test_scatter_refuses_bad_indices(bad: list[int]) -> None:
    indices, values = torch.tensor(bad, dtype=torch.int32), torch.ones(2)
    for backend in (native, reference):
        with pytest.raises(ValueError, match="increase strictly"):
            backend.sparse_scatter(indices, values, torch.zeros(10))
        with pytest.raises(ValueError, match="increase strictly"):
            backend.sparse_scatter_add(indices, values, 1.0, torch.zeros(10))


@pytest.mark.parametrize("n", [1, 2, 3, 5, 64, 65, 1000, 20_001])
def test_permutation(n: int, isa: str) -> None:
    x = torch.randn(n)
    for seed in range(3):
        keys = [int(v) for v in torch.randint(1 << 32, (6,), generator=torch.Generator().manual_seed(seed))]
        for k in {1, n // 2, n}:
            expected = reference.permuted_indices(keys, seed % n, n, k)
            assert torch.equal(native.permuted_indices(keys, seed % n, n, k), expected)
            values = x[expected.long()]
            assert torch.equal(native.permuted_gather(x, keys, seed % n, k), values)
            assert torch.equal(reference.permuted_gather(x, keys, seed % n, k), values)
            dense = torch.zeros(n)
            dense[expected.long()] = values
            for backend in (native, reference):
                out = torch.full((n,), 3.0)
                backend.permuted_scatter(values, keys, seed % n, out)
                assert torch.equal(out, dense)
                backend.permuted_scatter_add(values, keys, seed % n, -1.0, out)
                assert not bool(out.any())


def test_permutation_of_a_huge_range(isa: str) -> None:
    keys = [1, 2, 3, 4, 5, 6]
    for n in ((1 << 33) + 5, (1 << 40) - 1):
        expected = reference.permuted_indices(keys, 12345, n, 3000)
        assert torch.equal(native.permuted_indices(keys, 12345, n, 3000), expected)
        assert len(set(expected.tolist())) == 3000
        assert 0 <= int(expected.min()) <= int(expected.max()) < n


def test_permutation_with_threads() -> None:
    with native.using(threads=1):
        one = native.permuted_indices([9, 8, 7, 6, 5, 4], 3, 300_007, 200_000)
    with native.using(threads=3):
        three = native.permuted_indices([9, 8, 7, 6, 5, 4], 3, 300_007, 200_000)
    assert torch.equal(one, three)


def test_wrappers_refuse_what_does_not_fit() -> None:
    x, small = torch.ones(100), torch.empty(3, dtype=torch.int32)
    with pytest.raises(ValueError, match="room"):
        module.select_top_k(x, 10, small, torch.empty(10))
    with pytest.raises(ValueError, match="permutation"):
        module.permuted_gather(x, [1, 2, 3], 0, torch.empty(5))
    with pytest.raises(ValueError, match="permutation"):
        module.permuted_gather(x, [1] * 6, 100, torch.empty(5))
    with pytest.raises(ValueError, match="too small"):
        native.golomb_encode(torch.arange(1000, dtype=torch.int32) * 7, 5, torch.empty(100, dtype=torch.uint8))

"""Golomb-Rice codes: codewords by definition, the best parameter, escapes, round trips, truncations and mutations."""

import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tersegrad.codecs import rice
from tersegrad.core.errors import CorruptMessage

LARGEST = 2**63 - 1
integers = st.one_of(
    st.integers(0, 40), st.integers(0, 5000), st.integers(0, LARGEST), st.sampled_from([LARGEST, 1 << 62, 31, 32])
)


def low_bits(v: int, n: int) -> str:
    return "".join(str(v >> j & 1) for j in range(n))


def planes(values: list[int], k: int) -> list[str]:
    escapes = [(v >> k) - 31 for v in values if v >> k >= 32]
    return [
        "".join("0" * min(v >> k, 32) + "1" for v in values),
        "".join(low_bits(v, k) for v in values),
        "".join("0" * (e.bit_length() - 1) + "1" for e in escapes),
        "".join(low_bits(e, e.bit_length() - 1) for e in escapes),
    ]


def length(values: list[int], k: int) -> int:
    return sum(map(len, planes(values, k)))


def stream(bits: str) -> bytes:
    return int(bits[::-1] or "0", 2).to_bytes((len(bits) + 7) // 8, "little")


def written(values: list[int], k: int) -> bytes:
    return b"".join(map(stream, planes(values, k)))


def test_by_hand() -> None:
    assert planes([0, 3], 0) == ["10001", "", "", ""]
    assert planes([13], 2) == ["0001", "10", "", ""]
    assert planes([31], 0) == ["0" * 31 + "1", "", "", ""]
    assert planes([32, 33], 0) == [("0" * 32 + "1") * 2, "", "101", "0"]
    assert planes([67], 1) == ["0" * 32 + "1", "1", "01", "0"]
    assert rice.encode(torch.tensor([3, 0, 2]), 0).tolist() == [0b10011000]
    assert rice.encode(torch.tensor([9, 2]), 2).tolist() == [0b1100, 0b1001]


@pytest.mark.parametrize("k", range(57))
def test_bytes_by_definition(k: int) -> None:
    around = [(32 << k) + d for d in (-1, 0, 1)] + [(33 << k) - 1, (1000 << k) + 5]
    values = [v for v in [*range(0, 80, 7), *around, 1 << 40, 1 << 62, LARGEST] if v <= LARGEST]
    data = rice.encode(torch.tensor(values), k)
    assert data.numpy().tobytes() == written(values, k)
    back, used = rice.decode(data, len(values), k)
    assert back.tolist() == values
    assert used == data.numel()
    assert rice.length_bits(torch.tensor(values), k) == length(values, k)


@given(st.lists(integers, max_size=60), st.integers(0, 56), st.binary(max_size=3))
def test_round_trip(values: list[int], k: int, tail: bytes) -> None:
    tensor = torch.tensor(values, dtype=torch.int64)
    data = rice.encode(tensor, k)
    assert data.numpy().tobytes() == written(values, k)
    back, used = rice.decode(torch.tensor([*data.tolist(), *tail], dtype=torch.uint8), len(values), k)
    assert torch.equal(back, tensor)
    assert used == data.numel()


@given(st.lists(integers, max_size=30))
def test_best_parameter_is_the_best(values: list[int]) -> None:
    tensor = torch.tensor(values, dtype=torch.int64)
    costs = [length(values, k) for k in range(57)]
    assert rice.best_k(tensor) == costs.index(min(costs))


def test_best_parameter_of_geometric_gaps() -> None:
    generator = torch.Generator().manual_seed(0)
    for p, expected in ((0.5, 0), (0.1, 3), (0.01, 6), (0.001, 9)):
        gaps = torch.empty(20_000).geometric_(p, generator=generator).long() - 1
        k = rice.best_k(gaps)
        assert k == expected
        entropy = -(p * torch.tensor(p).log2() + (1 - p) * torch.tensor(1 - p).log2()) / p
        assert rice.length_bits(gaps, k) / gaps.numel() < float(entropy) + 0.1
        assert torch.equal(rice.decode(rice.encode(gaps, k), gaps.numel(), k)[0], gaps)


def test_one_huge_value_costs_little() -> None:
    assert rice.length_bits(torch.tensor([LARGEST]), 0) <= 160
    assert max(rice.length_bits(torch.tensor([LARGEST]), k) for k in range(57)) <= 160


@pytest.mark.parametrize("k", [0, 3, 20, 56])
def test_every_truncation_and_mutations(k: int) -> None:
    chooser = random.Random(k)
    values = torch.tensor([chooser.choice([0, 1, 5, 900, 1 << 33, LARGEST]) for _ in range(30)])
    data = rice.encode(values, k)
    for length in range(data.numel()):
        with pytest.raises(CorruptMessage):
            rice.decode(data[:length], values.numel(), k)
    for _ in range(200):
        mutated = data.clone()
        mutated[chooser.randrange(data.numel())] ^= 1 << chooser.randrange(8)
        try:
            back, used = rice.decode(mutated, values.numel(), k)
        except CorruptMessage:
            continue
        assert int(back.min()) >= 0
        assert torch.equal(rice.encode(back, k), mutated[:used])


def test_overflow_is_refused() -> None:
    for k in (1, 30, 56):
        e = (LARGEST >> k) - 31
        for beyond, good in ((0, True), (1, False)):
            n = (e + beyond).bit_length() - 1
            parts = ["0" * 32 + "1", "1" * k, "0" * n + "1", low_bits(e + beyond, n)]
            data = torch.tensor(list(b"".join(map(stream, parts))), dtype=torch.uint8)
            if good:
                assert rice.decode(data, 1, k)[0].tolist() == [LARGEST]
            else:
                with pytest.raises(CorruptMessage):
                    rice.decode(data, 1, k)
    for parts in (["0" * 33 + "1"], ["0" * 32 + "1", "", "0" * 63 + "1", "1" * 63]):
        data = torch.tensor(list(b"".join(map(stream, parts)) + bytes(8)), dtype=torch.uint8)
        with pytest.raises(CorruptMessage):
            rice.decode(data, 1, 0)


def test_refusals() -> None:
    for values in ([-1], [0, -1], [-1, 0], [0, 0, -(2**63)]):
        for call in (lambda v: rice.encode(v, 3), rice.best_k, lambda v: rice.length_bits(v, 3)):
            with pytest.raises(ValueError, match="at least 0"):
                call(torch.tensor(values))
    for k in (-1, 57):
        with pytest.raises(ValueError, match=r"0\.\.56"):
            rice.encode(torch.zeros(1, dtype=torch.int64), k)
        with pytest.raises(ValueError, match=r"0\.\.56"):
            rice.decode(torch.zeros(1, dtype=torch.uint8), 1, k)
    with pytest.raises(CorruptMessage, match="cannot hold"):
        rice.decode(torch.zeros(1, dtype=torch.uint8), 1 << 60, 2)

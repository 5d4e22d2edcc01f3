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


def gamma(v: int) -> str:
    return "0" * (v.bit_length() - 1) + "1" + low_bits(v, v.bit_length() - 1)


def codeword(v: int, k: int) -> str:
    q = v >> k
    if q < 32:
        return "0" * q + "1" + low_bits(v, k)
    d = q - 31
    return "0" * 32 + gamma(d.bit_length()) + low_bits(d, d.bit_length() - 1) + low_bits(v, k)


def stream(bits: str) -> bytes:
    return int(bits[::-1] or "0", 2).to_bytes((len(bits) + 7) // 8, "little")


def test_by_hand() -> None:
    assert codeword(0, 0) == "1"
    assert codeword(3, 0) == "0001"
    assert codeword(13, 2) == "000110"
    assert codeword(31, 0) == "0" * 31 + "1"
    assert codeword(32, 0) == "0" * 32 + "1"  # delta(1)
    assert codeword(33, 0) == "0" * 32 + "0100"  # delta(2)
    assert codeword(67, 1) == "0" * 32 + "0101"[:3] + "0" + "1"  # q = 33, low bit 1
    assert rice.encode(torch.tensor([3, 0, 2]), 0).tolist() == [0b10011000]


@pytest.mark.parametrize("k", range(57))
def test_bytes_by_definition(k: int) -> None:
    around = [(32 << k) + d for d in (-1, 0, 1)] + [(33 << k) - 1, (1000 << k) + 5]
    values = [v for v in [*range(0, 80, 7), *around, 1 << 40, 1 << 62, LARGEST] if v <= LARGEST]
    data = rice.encode(torch.tensor(values), k)
    assert data.numpy().tobytes() == stream("".join(codeword(v, k) for v in values))
    back, used = rice.decode(data, len(values), k)
    assert back.tolist() == values
    assert used == data.numel()
    assert rice.length_bits(torch.tensor(values), k) == sum(len(codeword(v, k)) for v in values)


@given(st.lists(integers, max_size=60), st.integers(0, 56), st.binary(max_size=3))
def test_round_trip(values: list[int], k: int, tail: bytes) -> None:
    tensor = torch.tensor(values, dtype=torch.int64)
    data = rice.encode(tensor, k)
    assert data.numel() == (rice.length_bits(tensor, k) + 7) // 8
    back, used = rice.decode(torch.tensor([*data.tolist(), *tail], dtype=torch.uint8), len(values), k)
    assert torch.equal(back, tensor)
    assert used == data.numel()


@given(st.lists(integers, max_size=30))
def test_best_parameter_is_the_best(values: list[int]) -> None:
    tensor = torch.tensor(values, dtype=torch.int64)
    costs = [sum(len(codeword(v, k)) for v in values) for k in range(57)]
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
    assert rice.length_bits(torch.tensor([LARGEST]), 0) <= 105
    assert max(rice.length_bits(torch.tensor([LARGEST]), k) for k in range(57)) <= 106


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
        d = (LARGEST >> k) - 31
        for beyond, good in ((0, True), (1, False)):
            delta = gamma((d + beyond).bit_length()) + low_bits(d + beyond, (d + beyond).bit_length() - 1)
            data = torch.tensor(list(stream("0" * 32 + delta + "1" * k)), dtype=torch.uint8)
            if good:
                assert rice.decode(data, 1, k)[0].tolist() == [LARGEST]
            else:
                with pytest.raises(CorruptMessage):
                    rice.decode(data, 1, k)
    everything = torch.tensor(list(stream("0" * 32 + gamma(63) + "1" * 62)), dtype=torch.uint8)
    with pytest.raises(CorruptMessage):
        rice.decode(everything, 1, 0)


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

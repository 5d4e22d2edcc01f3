"""Trits: the layout, round trips, and what a decoder refuses."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tersegrad.codecs import trits
from tersegrad.core.errors import CorruptMessage


@given(st.lists(st.integers(0, 2), max_size=300))
def test_round_trip_and_layout(values: list[int]) -> None:
    data = trits.pack(torch.tensor(values, dtype=torch.uint8))
    assert data.tolist() == [sum(t * 3**j for j, t in enumerate(values[i : i + 5])) for i in range(0, len(values), 5)]
    assert data.numel() == trits.nbytes(len(values))
    assert trits.unpack(data, len(values)).tolist() == values


def test_every_byte() -> None:
    data = torch.arange(243).to(torch.uint8)
    values = trits.unpack(data, 5 * 243)
    assert int(values.max()) == 2
    assert torch.equal(trits.pack(values), data)


def test_by_hand() -> None:
    assert trits.pack(torch.tensor([2, 2, 2, 2, 2, 1, 2], dtype=torch.uint8)).tolist() == [242, 7]


@pytest.mark.parametrize("position", [0, 4, 5, 63, 64, 99])
@pytest.mark.parametrize("value", [3, 4, 128, 255])
def test_encoder_refuses_other_values(position: int, value: int) -> None:
    bad = torch.zeros(100, dtype=torch.uint8)
    bad[position] = value
    with pytest.raises(ValueError, match="0, 1 or 2"):
        trits.pack(bad)
    with pytest.raises(ValueError, match="uint8"):
        trits.pack(bad.int())


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 64, 100])
def test_decoder_refuses(count: int) -> None:
    values = torch.arange(count).remainder(3).to(torch.uint8)
    data = trits.pack(values)
    for length in range(data.numel()):
        with pytest.raises(CorruptMessage):
            trits.unpack(data[:length], count)
    last = count - 5 * (data.numel() - 1)
    for position in {0, data.numel() - 1}:
        for byte in range(3**last if position else 243, 256):
            mutated = data.clone()
            mutated[position] = byte
            with pytest.raises(CorruptMessage):
                trits.unpack(mutated, count)
            assert int(trits.unpack(mutated, count, check=False).max()) <= 2

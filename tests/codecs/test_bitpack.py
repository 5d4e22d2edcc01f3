"""Fixed-width packing: the layout bit by bit, round trips, and what a decoder refuses."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tersegrad.codecs import bitpack
from tersegrad.core.errors import CorruptMessage

SIZES = (0, 1, 2, 5, 7, 8, 9, 31, 32, 33, 63, 64, 65, 127, 128, 129, 1000)


def random_codes(count: int, width: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 1 << width, (count,), generator=generator).to(bitpack.dtype(width))


def by_definition(codes: torch.Tensor, width: int) -> bytes:
    stream = sum((int(c) & (1 << width) - 1) << i * width for i, c in enumerate(codes))
    return stream.to_bytes(bitpack.nbytes(codes.numel(), width), "little")


@pytest.mark.parametrize("width", range(1, 17))
@pytest.mark.parametrize("count", SIZES)
def test_layout_and_round_trip(width: int, count: int) -> None:
    codes = random_codes(count, width, seed=count)
    data = bitpack.pack(codes, width)
    assert data.numpy().tobytes() == by_definition(codes, width)
    back = bitpack.unpack(data, width, count)
    assert back.dtype == codes.dtype
    assert torch.equal(back, codes)


def test_by_hand() -> None:
    assert bitpack.pack(torch.tensor([1, 0, 1, 1, 0, 0, 0, 1, 1], dtype=torch.uint8), 1).tolist() == [0b10001101, 1]
    assert bitpack.pack(torch.tensor([1, 2, 3, 0, 3], dtype=torch.uint8), 2).tolist() == [0b00111001, 3]
    assert bitpack.pack(torch.tensor([0xA, 0xB, 0xC], dtype=torch.uint8), 4).tolist() == [0xBA, 0x0C]
    assert bitpack.pack(torch.tensor([0x123, 0x456], dtype=torch.int32), 12).tolist() == [0x23, 0x61, 0x45]
    assert bitpack.pack(torch.tensor([0x1234, 0xFFFF], dtype=torch.int32), 16).tolist() == [0x34, 0x12, 0xFF, 0xFF]


@given(st.integers(1, 16), st.data())
def test_any_codes(width: int, data: st.DataObject) -> None:
    codes = torch.tensor(data.draw(st.lists(st.integers(0, (1 << width) - 1), max_size=200)), dtype=bitpack.dtype(width))
    packed = bitpack.pack(codes, width)
    assert packed.numel() == bitpack.nbytes(codes.numel(), width)
    assert torch.equal(bitpack.unpack(packed, width, codes.numel()), codes)


def test_only_the_low_bits_count() -> None:
    wide = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    for width in range(1, 8):
        assert torch.equal(bitpack.pack(wide, width), bitpack.pack(wide & (1 << width) - 1, width))
    signed = torch.arange(-70, 70, dtype=torch.int32)
    assert torch.equal(bitpack.pack(signed, 9), bitpack.pack(signed & 511, 9))


def test_out_is_used_and_checked() -> None:
    codes = random_codes(100, 4)
    out = torch.full((60,), 7, dtype=torch.uint8)
    data = bitpack.pack(codes, 4, out)
    assert data.data_ptr() == out.data_ptr()
    assert data.numel() == 50
    assert out[50:].tolist() == [7] * 10
    into = torch.full((110,), 9, dtype=torch.uint8)
    assert bitpack.unpack(out, 4, 100, into).data_ptr() == into.data_ptr()
    assert into[100:].tolist() == [9] * 10
    for bad in (
        torch.empty(49, dtype=torch.uint8),
        torch.empty(50, dtype=torch.int32),
        torch.empty(100, dtype=torch.uint8)[::2],
    ):
        with pytest.raises(ValueError, match="out must be"):
            bitpack.pack(codes, 4, bad)


def test_non_contiguous_input() -> None:
    codes = random_codes(200, 5)
    assert torch.equal(bitpack.pack(codes[::2], 5), bitpack.pack(codes[::2].clone(), 5))
    spaced = torch.zeros(2 * bitpack.nbytes(100, 5), dtype=torch.uint8)
    spaced[::2] = bitpack.pack(codes[:100], 5)
    assert torch.equal(bitpack.unpack(spaced[::2], 5, 100), codes[:100])


def test_refusals() -> None:
    with pytest.raises(ValueError, match="1 to 16 bits"):
        bitpack.pack(torch.zeros(1, dtype=torch.uint8), 0)
    with pytest.raises(ValueError, match="1 to 16 bits"):
        bitpack.unpack(torch.zeros(9, dtype=torch.uint8), 17, 1)
    with pytest.raises(ValueError, match=r"uint8 tensors, got torch\.int32"):
        bitpack.pack(torch.zeros(1, dtype=torch.int32), 8)
    with pytest.raises(ValueError, match=r"int32 tensors, got torch\.uint8"):
        bitpack.pack(torch.zeros(1, dtype=torch.uint8), 9)


@pytest.mark.parametrize("width", range(1, 17))
def test_truncation_and_padding(width: int) -> None:
    count = 21
    data = bitpack.pack(random_codes(count, width), width)
    for length in range(data.numel()):
        with pytest.raises(CorruptMessage):
            bitpack.unpack(data[:length], width, count)
    for bit in range(count * width, 8 * data.numel()):
        mutated = data.clone()
        mutated[bit // 8] ^= 1 << bit % 8
        with pytest.raises(CorruptMessage):
            bitpack.unpack(mutated, width, count)
        assert torch.equal(bitpack.unpack(mutated, width, count, check=False), bitpack.unpack(data, width, count))

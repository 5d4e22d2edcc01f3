"""Elias codes: textbook codewords, lengths against formulas, round trips, truncations and mutations."""

import math
import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tersegrad.codecs import elias
from tersegrad.codecs.elias import Code
from tersegrad.core.errors import CorruptMessage

CODES: tuple[Code, ...] = ("gamma", "delta", "omega")
LARGEST = 2**63 - 1


def low(v: int) -> str:
    """The bits of v below its leading one, LSB-first."""
    return bin(v)[3:][::-1]


def codeword(v: int, code: Code) -> str:
    """The code of v as a string of bits in stream order, straight from the definition."""
    if code == "gamma":
        return "0" * (v.bit_length() - 1) + "1" + low(v)
    if code == "delta":
        return codeword(v.bit_length(), "gamma") + low(v)
    bits = "0"
    while v > 1:
        bits = "1" + low(v) + bits
        v = v.bit_length() - 1
    return bits


def stream(bits: str) -> bytes:
    return int(bits[::-1] or "0", 2).to_bytes((len(bits) + 7) // 8, "little")


def formula(v: int, code: Code) -> int:
    n = v.bit_length() - 1
    if code == "gamma":
        return 2 * n + 1
    if code == "delta":
        return n + 2 * int(math.log2(n + 1)) + 1
    return 1 if v == 1 else formula(n, "omega") + n + 1 if n else 1


AWKWARD = sorted({min(LARGEST, max(1, (1 << n) + d)) for n in range(64) for d in (-1, 0, 1)})
values_lists = st.lists(st.one_of(st.integers(1, 20), st.integers(1, LARGEST), st.sampled_from(AWKWARD)), max_size=60)


def test_textbook_codewords() -> None:
    """Gamma and delta of 1..5, 17 and omega of 1, 2, 4, 16: the textbook's codewords with the low bits reversed."""
    assert [codeword(v, "gamma") for v in (1, 2, 3, 4, 5, 6)] == ["1", "010", "011", "00100", "00110", "00101"]
    assert [codeword(v, "delta") for v in (1, 2, 3, 4, 17)] == ["1", "0100", "0101", "01100", "001101000"]
    assert [codeword(v, "omega") for v in (1, 2, 3, 4, 8, 16)] == ["0", "100", "110", "101000", "1110000", "10100100000"]


@pytest.mark.parametrize("code", CODES)
def test_bytes_by_definition(code: Code) -> None:
    values = [*range(1, 130), *AWKWARD]
    data = elias.encode(torch.tensor(values), code)
    assert data.numpy().tobytes() == stream("".join(codeword(v, code) for v in values))
    back, used = elias.decode(data, len(values), code)
    assert back.tolist() == values
    assert used == data.numel()
    for v in values:
        assert elias.length_bits(torch.tensor([v]), code) == len(codeword(v, code)) == formula(v, code)


@pytest.mark.parametrize("code", CODES)
@given(values=values_lists, tail=st.binary(max_size=3))
def test_round_trip_and_what_follows_is_left_alone(code: Code, values: list[int], tail: bytes) -> None:
    tensor = torch.tensor(values, dtype=torch.int64)
    data = elias.encode(tensor, code)
    assert data.numel() == (elias.length_bits(tensor, code) + 7) // 8
    back, used = elias.decode(torch.tensor([*data.tolist(), *tail], dtype=torch.uint8), len(values), code)
    assert torch.equal(back, tensor)
    assert used == data.numel()


@pytest.mark.parametrize("code", CODES)
def test_long_streams(code: Code) -> None:
    generator = torch.Generator().manual_seed(1)
    values = torch.exp(torch.rand(100_003, generator=generator) * 9).long()
    back, _ = elias.decode(elias.encode(values, code), values.numel(), code)
    assert torch.equal(back, values)


@pytest.mark.parametrize("code", CODES)
def test_every_truncation(code: Code) -> None:
    values = torch.tensor([1, 7, 300, LARGEST, 2, 1 << 40, 5, 9])
    data = elias.encode(values, code)
    for length in range(data.numel()):
        with pytest.raises(CorruptMessage):
            elias.decode(data[:length], values.numel(), code)


@pytest.mark.parametrize("code", CODES)
def test_mutations_raise_or_decode(code: Code) -> None:
    chooser = random.Random(2)
    values = torch.tensor([chooser.choice([1, 2, 3, 17, 1 << 33, LARGEST]) for _ in range(40)])
    data = elias.encode(values, code)
    for _ in range(300):
        mutated = data.clone()
        for _ in range(chooser.randint(1, 3)):
            mutated[chooser.randrange(data.numel())] ^= 1 << chooser.randrange(8)
        try:
            back, used = elias.decode(mutated, values.numel(), code)
        except CorruptMessage:
            continue
        assert int(back.min()) >= 1
        assert torch.equal(elias.encode(back, code), mutated[:used])  # each sequence has one encoding


def test_refusals() -> None:
    one = torch.ones(1, dtype=torch.int64)
    for bad in (0, -1, -(2**63)):
        for values in ([bad], [1, bad], [bad, 1], [1, 1, bad]):
            for code in CODES:
                with pytest.raises(ValueError, match="at least 1"):
                    elias.encode(torch.tensor(values), code)
    with pytest.raises(ValueError, match="gamma, delta and omega"):
        elias.encode(one, "zeta")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="int64"):
        elias.encode(one.int())
    with pytest.raises(ValueError, match="negative"):
        elias.decode(torch.zeros(1, dtype=torch.uint8), -1)
    with pytest.raises(CorruptMessage, match="cannot hold"):
        elias.decode(torch.zeros(1, dtype=torch.uint8), 1 << 60)  # never allocated


def test_values_of_2_to_the_63_are_refused() -> None:
    for bits in ("0" * 63 + "1" + "0" * 63, "0" * 200):
        with pytest.raises(CorruptMessage):
            elias.decode(torch.tensor(list(stream(bits + "0" * 80)), dtype=torch.uint8), 1, "gamma")
    with pytest.raises(CorruptMessage):
        elias.decode(torch.tensor(list(stream(codeword(64, "gamma") + "0" * 200)), dtype=torch.uint8), 1, "delta")
    for group in (63, 64, 1000):  # a group that announces a value of 2^63 or more
        bits = codeword(group, "omega")[:-1] + "1" + "0" * 1100
        with pytest.raises(CorruptMessage):
            elias.decode(torch.tensor(list(stream(bits)), dtype=torch.uint8), 1, "omega")

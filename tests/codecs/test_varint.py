"""LEB128 varints: known encodings, round trips, and everything a reader refuses."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tersegrad.codecs import varint
from tersegrad.core.errors import CorruptMessage

KNOWN = {0: "00", 1: "01", 127: "7f", 128: "8001", 300: "ac02", 624485: "e58e26", 2**64 - 1: "ffffffffffffffffff01"}


def test_known_encodings() -> None:
    assert {v: varint.write(v).hex() for v in KNOWN} == KNOWN


@given(st.integers(0, 2**64 - 1), st.binary(max_size=4), st.binary(max_size=4))
def test_round_trip(value: int, before: bytes, after: bytes) -> None:
    data = varint.write(value)
    assert len(data) == varint.nbytes(value)
    end = len(before) + len(data)
    whole = before + data + after
    assert varint.read(whole, len(before)) == (value, end)
    assert varint.read(memoryview(whole), len(before)) == (value, end)
    assert varint.read(torch.tensor(list(whole), dtype=torch.uint8), len(before)) == (value, end)


@given(st.integers(128, 2**64 - 1))
def test_truncations(value: int) -> None:
    data = varint.write(value)
    for length in range(len(data)):
        with pytest.raises(CorruptMessage, match="ends inside"):
            varint.read(data[:length])


@given(st.binary(max_size=12))
def test_whatever_is_read_is_canonical(data: bytes) -> None:
    try:
        value, end = varint.read(data)
    except CorruptMessage:
        return
    assert varint.write(value) == data[:end]


@pytest.mark.parametrize(
    ("data", "why"),
    [
        ("8000", "more bytes"),
        ("ff00", "more bytes"),
        ("ff" * 9 + "02", "64 bits"),
        ("80" * 10 + "01", "ten bytes"),
        ("", "ends inside"),
    ],
)
def test_refusals(data: str, why: str) -> None:
    with pytest.raises(CorruptMessage, match=why):
        varint.read(bytes.fromhex(data))


def test_bad_arguments() -> None:
    for value in (-1, 2**64):
        with pytest.raises(ValueError, match="varints hold"):
            varint.write(value)
    with pytest.raises(ValueError, match="negative"):
        varint.read(b"\x00", -1)
    with pytest.raises(CorruptMessage):
        varint.read(b"\x00", 1)

"""Frames: round trips, and every way to damage one."""

import struct
import tracemalloc
import zlib

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tersegrad.core import frame
from tersegrad.core.errors import BadConfiguration, CorruptMessage
from tersegrad.core.protocol import Context, Message, Spec


def packed(payload: bytes = b"\x01\x02\x03", *, text: str = "qsgd(bits=4)", numel: int = 6) -> bytes:
    message = Message.frombytes(payload)
    return frame.pack(message, wire_id=11, text=text, spec=Spec.flat(numel), context=Context(1, 2, 3, 4))


def resealed(data: bytes) -> bytes:
    """The same bytes with a checksum that fits, as an attacker would send them."""
    return data[:-4] + struct.pack("<I", zlib.crc32(data[:-4]))


@given(
    payload=st.binary(max_size=100),
    text=st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=255),
    wire_id=st.integers(0, 65535),
    numel=st.integers(0, 2**40),
    dtype=st.sampled_from(frame.DTYPES),
    seed=st.integers(0, 2**64 - 1),
    step=st.integers(0, 2**32 - 1),
    buffer=st.integers(0, 65535),
    sender=st.integers(0, 65535),
)
def test_round_trip(
    payload: bytes, text: str, wire_id: int, numel: int, dtype: torch.dtype, seed: int, step: int, buffer: int, sender: int
) -> None:
    context = Context(seed, step, buffer, sender)
    data = frame.pack(Message.frombytes(payload), wire_id=wire_id, text=text, spec=Spec.flat(numel, dtype), context=context)
    opened = frame.unpack(data)
    assert opened == frame.Frame(wire_id, text, context, numel, dtype, payload)
    assert opened.message.tobytes() == payload
    assert opened.spec == Spec.flat(numel, dtype)
    assert opened.overhead == len(data) - len(payload)
    assert frame.unpack(memoryview(data)) == frame.unpack(bytearray(data)) == opened


def test_layout_by_hand() -> None:
    data = packed(b"\xaa\xbb", text="sign", numel=16)
    header = b"TGRD" + bytes([1, 0]) + struct.pack("<H", 11) + struct.pack("<QIHH", 1, 2, 3, 4) + struct.pack("<QQB", 16, 2, 4)
    body = header + b"sign" + b"\xaa\xbb"
    assert data == body + struct.pack("<I", zlib.crc32(body))


def test_only_the_message_is_packed_not_its_buffer() -> None:
    message = Message(torch.arange(10, dtype=torch.uint8), 3)
    data = frame.pack(message, wire_id=1, text="identity", spec=Spec.flat(1), context=Context())
    assert frame.unpack(data).payload == b"\x00\x01\x02"


def test_every_truncation_and_extension() -> None:
    data = packed()
    for length in range(len(data)):
        with pytest.raises(CorruptMessage):
            frame.unpack(data[:length])
    with pytest.raises(CorruptMessage):
        frame.unpack(data + b"\x00")


def test_every_single_bit_flip() -> None:
    data = packed()
    for bit in range(8 * len(data)):
        damaged = bytearray(data)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(CorruptMessage):
            frame.unpack(damaged)


@pytest.mark.parametrize(
    ("offset", "value", "why"),
    [
        (0, b"TGRE", "not a tersegrad frame"),
        (4, b"\x00", "version 0"),
        (4, b"\x02", "version 2"),
        (5, b"\x03", "dtype number 3"),
        (5, b"\xff", "dtype number 255"),
        (32, struct.pack("<Q", 4), "announces"),
        (32, struct.pack("<Q", 2**64 - 1), "announces"),
        (40, b"\xff", "announces"),
        (41, b"\xe9", "not ASCII"),
    ],
)
def test_headers_with_a_good_checksum(offset: int, value: bytes, why: str) -> None:
    data = bytearray(packed())
    data[offset : offset + len(value)] = value
    with pytest.raises(CorruptMessage, match=why):
        frame.unpack(resealed(bytes(data)))


def test_moving_a_byte_between_text_and_payload_changes_both() -> None:
    data = bytearray(packed(b"\x41\x42"))
    data[32] -= 1
    data[40] += 1
    opened = frame.unpack(resealed(bytes(data)))
    assert (opened.text, opened.payload) == ("qsgd(bits=4)A", b"B")


def test_largest_numel_that_the_reader_accepts() -> None:
    assert frame.unpack(packed(numel=6), max_numel=6).numel == 6
    with pytest.raises(CorruptMessage, match="claims 6 coordinates"):
        frame.unpack(packed(numel=6), max_numel=5)


def test_huge_claims_do_not_allocate() -> None:
    claims = bytearray(packed())
    claims[24:32] = struct.pack("<Q", 2**63)  # numel
    longer = bytearray(packed())
    longer[32:40] = struct.pack("<Q", 2**62)  # payload length
    tracemalloc.start()
    try:
        assert frame.unpack(resealed(bytes(claims))).numel == 2**63
        for limit in (None, 1 << 30):
            with pytest.raises(CorruptMessage):
                frame.unpack(resealed(bytes(longer)), max_numel=limit)
        with pytest.raises(CorruptMessage):
            frame.unpack(resealed(bytes(claims)), max_numel=1 << 30)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_what_cannot_be_framed() -> None:
    with pytest.raises(BadConfiguration, match="256 bytes"):
        packed(text="x" * 256)
    with pytest.raises(BadConfiguration, match="float64"):
        frame.pack(Message.frombytes(b""), wire_id=1, text="identity", spec=Spec.flat(1, torch.float64), context=Context())

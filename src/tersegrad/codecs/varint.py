"""LEB128 varints for lengths in headers: seven bits per byte, low bits first, the high bit set on all bytes but the last.

Values are 0 .. 2^64 - 1, so at most ten bytes; each value has one encoding, and readers refuse the others.
"""

from __future__ import annotations

from torch import Tensor

from tersegrad.core.errors import CorruptMessage

MAX_NBYTES = 10


def nbytes(value: int) -> int:
    """Bytes of ``value``."""
    return max(1, (value.bit_length() + 6) // 7)


def write(value: int) -> bytes:
    """``value`` as bytes.

    >>> write(300).hex()
    'ac02'
    """
    if not 0 <= value < 1 << 64:
        raise ValueError(f"varints hold 0 .. 2^64 - 1, got {value}")
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)


def read(data: Tensor | bytes | bytearray | memoryview, offset: int = 0) -> tuple[int, int]:
    """The varint that begins at ``offset``, and the offset after it; raises :class:`CorruptMessage`."""
    if offset < 0:
        raise ValueError(f"offset must not be negative, got {offset}")
    head = data[offset : offset + MAX_NBYTES]
    raw = head.cpu().numpy().tobytes() if isinstance(head, Tensor) else bytes(head)
    value = 0
    for j, byte in enumerate(raw):
        value |= (byte & 127) << 7 * j
        if byte < 128:
            if byte == 0 and j:
                raise CorruptMessage("a length is written with more bytes than it needs")
            if value >= 1 << 64:
                raise CorruptMessage("a length does not fit into 64 bits")
            return value, offset + j + 1
    raise CorruptMessage("a length takes more than ten bytes" if len(raw) == MAX_NBYTES else "the message ends inside a length")

"""The first byte of most messages of variable length: what kind of message it is (``spec/wire.md``, section 1.4)."""

from __future__ import annotations

NORMAL, ZERO, NON_FINITE, RAW, PACKED, CLASSED = range(6)
NAMES = {
    NORMAL: "normal",
    ZERO: "all zero",
    NON_FINITE: "non-finite input",
    RAW: "raw float32",
    PACKED: "packed",
    CLASSED: "scale classes",
}


def name(data: bytes) -> str:
    """What the mode byte of a message says.

    >>> name(b"\\1"), name(b"\\7"), name(b"")
    ('all zero', 'unknown (7)', 'missing')
    """
    return NAMES.get(data[0], f"unknown ({data[0]})") if data else "missing"

"""Frames: a message with everything a stranger needs to decode it, for files, Flower and debugging.

Layout (little-endian; ``spec/wire.md`` section 2):

====  =====================================================
 4    magic ``TGRD``
 1    version, 1
 1    dtype: 0 float32, 1 float16, 2 bfloat16
 2    wire id
 8    seed
 4    step
 2    buffer
 2    sender
 8    numel
 8    payload length n
 1    length t of the text form
 t    text form, ASCII
 n    payload
 4    CRC-32 of all bytes before it
====  =====================================================

Inside a process group the spec is known and no frame is used.
"""

from __future__ import annotations

import dataclasses
import struct
import zlib

import torch

from tersegrad.core.errors import BadConfiguration, CorruptMessage
from tersegrad.core.protocol import Context, Message, Spec

MAGIC = b"TGRD"
VERSION = 1
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_HEADER = struct.Struct("<4sBBHQIHHQQB")


@dataclasses.dataclass(frozen=True)
class Frame:
    """An unpacked frame. The text form is not parsed here: that is :func:`tersegrad.parse`'s work."""

    wire_id: int
    text: str
    context: Context
    numel: int
    dtype: torch.dtype
    payload: bytes

    @property
    def spec(self) -> Spec:
        """The flat spec of this frame; compressors that use tensor boundaries need the model's own spec instead."""
        return Spec.flat(self.numel, self.dtype)

    @property
    def message(self) -> Message:
        return Message.frombytes(self.payload)

    @property
    def overhead(self) -> int:
        """Bytes of the frame that are not payload."""
        return _HEADER.size + len(self.text) + 4


def pack(message: Message, *, wire_id: int, text: str, spec: Spec, context: Context) -> bytes:
    """The frame of ``message`` as bytes."""
    label = text.encode("ascii")
    if len(label) > 255:
        raise BadConfiguration(f"the text form takes {len(label)} bytes, a frame holds 255: name the composition in recipes")
    if spec.dtype not in DTYPES:
        raise BadConfiguration(f"frames carry float32, float16 and bfloat16 gradients, got {spec.dtype}")
    payload = message.tobytes()
    header = _HEADER.pack(
        MAGIC,
        VERSION,
        DTYPES.index(spec.dtype),
        wire_id,
        context.seed,
        context.step,
        context.buffer,
        context.sender,
        spec.numel,
        len(payload),
        len(label),
    )
    body = header + label + payload
    return body + struct.pack("<I", zlib.crc32(body))


def unpack(data: bytes | bytearray | memoryview, *, max_numel: int | None = None) -> Frame:
    """Check and open a frame. ``max_numel`` refuses buffers larger than the reader is ready to hold."""
    raw = bytes(data)
    if len(raw) < _HEADER.size + 4:
        raise CorruptMessage(f"a frame has at least {_HEADER.size + 4} bytes, got {len(raw)}: was it truncated?")
    magic, version, dtype, wire_id, seed, step, buffer, sender, numel, length, label = _HEADER.unpack_from(raw)
    if magic != MAGIC:
        raise CorruptMessage(f"not a tersegrad frame: it starts with {magic!r} instead of {MAGIC!r}")
    if version != VERSION:
        raise CorruptMessage(f"frame version {version} is not supported by this release, which reads version {VERSION}")
    if len(raw) != _HEADER.size + label + length + 4:
        raise CorruptMessage(f"the header announces {_HEADER.size + label + length + 4} bytes, the frame has {len(raw)}")
    if zlib.crc32(raw[:-4]) != struct.unpack("<I", raw[-4:])[0]:
        raise CorruptMessage("checksum mismatch: the frame was damaged on its way")
    if dtype >= len(DTYPES):
        raise CorruptMessage(f"unknown dtype number {dtype}")
    if max_numel is not None and numel > max_numel:
        raise CorruptMessage(f"the frame claims {numel} coordinates, the reader expects at most {max_numel}")
    text = raw[_HEADER.size : _HEADER.size + label]
    if not text.isascii():
        raise CorruptMessage("the text form is not ASCII")
    payload = raw[_HEADER.size + label : -4]
    return Frame(wire_id, text.decode("ascii"), Context(seed, step, buffer, sender), numel, DTYPES[dtype], payload)

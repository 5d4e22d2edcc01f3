"""Compressors that keep nothing between messages: checked buffers, the two decoders and the rest of the protocol, written once.

A concrete class of :class:`Stateless` says how a message is written into a buffer and read from one; :class:`FixedRate` is for
messages whose length follows from the number of coordinates alone, and asks for two kernel calls and a length.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import torch
from torch import Tensor

from tersegrad.core.buffers import byte_buffer, float_buffer
from tersegrad.core.errors import CorruptMessage
from tersegrad.core.protocol import Context, Message, Spec, Stats, flat_float32
from tersegrad.core.text import Configuration


def exactly(data: Tensor, expected: int) -> None:
    """Raise :class:`CorruptMessage` unless a fixed-rate message has ``expected`` bytes."""
    if data.numel() != expected:
        raise CorruptMessage(f"expected a message of {expected} bytes, got {data.numel()}")


@dataclasses.dataclass(frozen=True)
class Stateless(Configuration):
    """Base of compressors without state. Concrete classes have ``wire_id``, ``max_nbytes``, ``guarantee`` and the two below."""

    def write(self, x: Tensor, data: Tensor, spec: Spec, ctx: Context) -> int:
        """The message for flat float32 ``x`` into the first bytes of ``data`` (``max_nbytes`` of them); returns its length."""
        raise NotImplementedError

    def read(self, data: Tensor, spec: Spec, ctx: Context, out: Tensor, weight: float | None) -> None:
        """What ``data`` decodes to, into ``out``; with a ``weight``, that many times as much is added to ``out``.

        A message that is refused raises :class:`CorruptMessage`, with a ``weight`` before ``out`` is written to.
        """
        raise NotImplementedError

    def max_nbytes(self, spec: Spec) -> int:
        raise NotImplementedError

    def init(self, spec: Spec, device: torch.device | str) -> None:
        return None

    def encode(
        self, x: Tensor, spec: Spec, state: None, ctx: Context, *, stats: Stats | None = None, out: Tensor | None = None
    ) -> tuple[Message, None]:
        flat = flat_float32(x, spec)
        data = byte_buffer(out, self.max_nbytes(spec), flat.device)
        nbytes = self.write(flat, data, spec, ctx)
        return Message(data if out is None else out, nbytes), None

    def decode(self, message: Message, spec: Spec, ctx: Context, out: Tensor | None = None) -> Tensor:
        out = float_buffer(out, spec.numel, message.data.device)
        self.read(message.payload.contiguous(), spec, ctx, out, None)
        return out

    def decode_add(self, message: Message, spec: Spec, ctx: Context, out: Tensor, weight: float = 1.0) -> Tensor:
        out = float_buffer(out, spec.numel, message.data.device)
        self.read(message.payload.contiguous(), spec, ctx, out, weight)
        return out


@dataclasses.dataclass(frozen=True)
class FixedRate(Stateless):
    """Base of compressors whose messages for d coordinates all have ``nbytes(d)`` bytes."""

    fixed_size: ClassVar[bool] = True

    def nbytes(self, numel: int) -> int:
        """The length of a message."""
        raise NotImplementedError

    def pack(self, x: Tensor, data: Tensor, ctx: Context) -> None:
        """The kernel that writes the message."""
        raise NotImplementedError

    def unpack(self, data: Tensor, out: Tensor, weight: float | None) -> None:
        """The kernel that reads it; with a ``weight`` it adds."""
        raise NotImplementedError

    def max_nbytes(self, spec: Spec) -> int:
        return self.nbytes(spec.numel)

    def write(self, x: Tensor, data: Tensor, spec: Spec, ctx: Context) -> int:
        self.pack(x, data, ctx)
        return data.numel()

    def read(self, data: Tensor, spec: Spec, ctx: Context, out: Tensor, weight: float | None) -> None:
        exactly(data, self.nbytes(spec.numel))
        self.unpack(data, out, weight)

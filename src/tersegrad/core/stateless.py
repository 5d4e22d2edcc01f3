"""Compressors that keep nothing between messages: checked buffers, the two decoders and the rest of the protocol, written once.

A concrete class of :class:`Stateless` says how a message is written into a buffer and read from one; :class:`FixedRate` is for
messages whose length follows from the number of coordinates alone, and asks for two kernel calls and a length.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from tersegrad.core import host
from tersegrad.core.buffers import byte_buffer, float_buffer
from tersegrad.core.errors import CorruptMessage
from tersegrad.core.protocol import Context, Message, Spec, Stats, flat_float32, has_fixed_size
from tersegrad.core.sums import add_each
from tersegrad.core.text import Configuration


def exactly(data: Tensor, expected: int) -> None:
    """Raise :class:`CorruptMessage` unless a fixed-rate message has ``expected`` bytes."""
    if data.numel() != expected:
        raise CorruptMessage(f"expected a message of {expected} bytes, got {data.numel()}")


@dataclasses.dataclass(frozen=True)
class Stateless(Configuration):
    """Base of compressors without state. Concrete classes have ``wire_id``, ``max_nbytes``, ``guarantee`` and the two below.

    Messages of variable length are coded on the CPU: for a tensor elsewhere both methods get copies in the host's memory, which
    takes one read per message. A class that chooses a few coordinates says ``selects``: then ``x`` and the ``out`` of ``read``
    stay on their device, and only what was chosen travels (:meth:`stays`).
    Where a backend has a kernel for the whole message, ``codes_on_host``
    says no, and everything stays on the device.
    """

    selects: ClassVar[bool] = False

    def write(self, x: Tensor, data: Tensor, spec: Spec, ctx: Context) -> int | Tensor:
        """The message for flat float32 ``x`` into the first bytes of ``data`` (``max_nbytes`` of them); returns its length."""
        raise NotImplementedError

    def read(self, data: Tensor, spec: Spec, ctx: Context, out: Tensor, weight: float | None) -> None:
        """What ``data`` decodes to, into ``out``; with a ``weight``, that many times as much is added to ``out``.

        A message that is refused raises :class:`CorruptMessage`, with a ``weight`` before ``out`` is written to.
        """
        raise NotImplementedError

    def max_nbytes(self, spec: Spec) -> int:
        raise NotImplementedError

    def codes_on_host(self, device: torch.device) -> bool:
        """Whether messages for tensors on ``device`` are written and read on the CPU."""
        return not has_fixed_size(self)

    def stays(self, device: torch.device) -> bool:
        """Whether ``x`` and the ``out`` of :meth:`read` stay on ``device`` where messages are coded on the host."""
        return self.selects

    def written_on_host(self, spec: Spec, device: torch.device) -> bool:
        """The same for messages of one kind: some are too short for a device."""
        return self.codes_on_host(device)

    def init(self, spec: Spec, device: torch.device | str) -> None:
        return None

    def encode(
        self, x: Tensor, spec: Spec, state: None, ctx: Context, *, stats: Stats | None = None, out: Tensor | None = None
    ) -> tuple[Message, None]:
        flat = flat_float32(x, spec)
        data = byte_buffer(out, self.max_nbytes(spec), flat.device)
        whole = data if out is None else out
        if flat.is_cpu or not self.written_on_host(spec, flat.device):
            return Message(whole, self.write(flat, data, spec, ctx)), None
        here = host.empty(data.numel(), torch.uint8, flat.device)
        nbytes = int(self.write(flat if self.stays(flat.device) else host.read(flat), here, spec, ctx))
        data[:nbytes].copy_(here[:nbytes], non_blocking=True)
        return Message(whole, nbytes, here[:nbytes]), None

    def decode(self, message: Message, spec: Spec, ctx: Context, out: Tensor | None = None) -> Tensor:
        out = float_buffer(out, spec.numel, message.data.device)
        if out.is_cpu or not self.written_on_host(spec, out.device):
            self.read(message.payload.contiguous(), spec, ctx, out, None)
        else:
            self._read_on_host(message, spec, ctx, out, None)
        return out

    def decode_add(self, message: Message, spec: Spec, ctx: Context, out: Tensor, weight: float = 1.0) -> Tensor:
        out = float_buffer(out, spec.numel, message.data.device)
        if out.is_cpu or not self.written_on_host(spec, out.device):
            self.read(message.payload.contiguous(), spec, ctx, out, weight)
        else:
            self._read_on_host(message, spec, ctx, out, weight)
        return out

    def sums_at_once(self, device: torch.device) -> bool:
        """Whether :meth:`read_sum` has a kernel for ``device``."""
        return False

    def read_sum(self, data: Sequence[Tensor], spec: Spec, out: Tensor, weight: float) -> None:
        """``weight`` times the sum of what messages decode to, into ``out``, by one kernel for several of them."""
        raise NotImplementedError

    def decode_sum(
        self, messages: Sequence[Message], spec: Spec, contexts: Sequence[Context], out: Tensor, weight: float = 1.0
    ) -> Tensor:
        out = float_buffer(out, spec.numel, messages[0].data.device)
        if not self.sums_at_once(out.device):
            return add_each(self, messages, spec, contexts, out, weight)
        self.read_sum([m.payload.contiguous() for m in messages], spec, out, weight)
        return out

    def _read_on_host(self, message: Message, spec: Spec, ctx: Context, out: Tensor, weight: float | None) -> None:
        if self.stays(out.device):
            self.read(message.on_host(), spec, ctx, out, weight)
            return
        here = host.empty(spec.numel, torch.float32, out.device)
        self.read(message.on_host(), spec, ctx, here, None)
        _ = out.copy_(here, non_blocking=True) if weight is None else out.add_(host.send(here, out.device) * weight)


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

"""The published form of variance-based messages: one 32-bit word per coordinate that is sent, a code above its index.

::

    4 bytes  magic
    4        count n
    t        a table that the codes refer to
    4 n      words, code << width | index, by increasing index

:class:`PowerWords` holds powers of two, whose exponents are relative to a table with one byte per tensor; :class:`SignWords` +-tau.
"""

from __future__ import annotations

import dataclasses
import struct
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from tersegrad.codecs import exp4, index
from tersegrad.codecs.values import Place, to_powers
from tersegrad.core.errors import CorruptMessage
from tersegrad.core.protocol import Context, Spec
from tersegrad.kernels.reference.values import from_powers

HEAD = 8


class Words(Protocol):
    """A way to say values by words."""

    @property
    def magic(self) -> bytes: ...

    @property
    def width(self) -> int:
        """Bits of an index."""
        ...

    def write(self, values: Tensor, place: Place) -> tuple[Tensor, Tensor]:
        """The message, and what each value becomes."""
        ...

    def read(self, data: Tensor, spec: Spec) -> tuple[Tensor, Tensor]:
        """Indices and values; raises :class:`CorruptMessage`."""
        ...

    def max_nbytes(self, spec: Spec) -> int: ...


@dataclasses.dataclass(frozen=True)
class PowerWords:
    """Four bits of code: sign and how far below the tensor's exponent E. The table has E of each tensor, -128 for silent ones."""

    magic: ClassVar[bytes] = b"VGC1"
    width: ClassVar[int] = 28

    def write(self, values: Tensor, place: Place) -> tuple[Tensor, Tensor]:
        powers = to_powers(values, place)
        table = torch.zeros(self._table(place.spec), dtype=torch.int8)
        table[: len(place.spec.pieces)] = torch.where(powers.used, powers.exponents, -128).to(torch.int8)
        kept = place.indices[powers.kept]
        return _write(self, table.view(torch.uint8), powers.codes, kept), powers.decoded

    def read(self, data: Tensor, spec: Spec) -> tuple[Tensor, Tensor]:
        tensors, table = len(spec.pieces), self._table(spec)
        codes, indices = _read(self, data, table, spec.numel)
        exponents = data[HEAD : HEAD + table].clone().view(torch.int8).to(torch.int32)
        exponents, padding = exponents[:tensors], exponents[tensors:]
        owners = Place(indices, spec, Context()).pieces()
        used = torch.zeros(tensors, dtype=torch.bool)
        used[owners] = True
        if bool(padding.any()) or not torch.equal(used, exponents != -128) or bool((exponents[used] < exp4.LOWEST).any()):
            raise CorruptMessage("the exponents do not fit the words")
        return indices.to(index.dtype(spec.numel)), from_powers(exponents[owners], codes)

    def max_nbytes(self, spec: Spec) -> int:
        return HEAD + self._table(spec) + 4 * spec.numel

    def _table(self, spec: Spec) -> int:
        """Bytes of the table: whole words."""
        return -(-len(spec.pieces) // 4) * 4


@dataclasses.dataclass(frozen=True)
class SignWords:
    """One bit of code: the sign of +-tau, tau a float32 that both ends know."""

    tau: float
    magic: ClassVar[bytes] = b"VGH1"
    width: ClassVar[int] = 31

    def write(self, values: Tensor, place: Place) -> tuple[Tensor, Tensor]:
        negative = torch.signbit(values).to(torch.uint8)
        return _write(self, negative[:0], negative, place.indices), values.sign() * self.tau

    def read(self, data: Tensor, spec: Spec) -> tuple[Tensor, Tensor]:
        negative, indices = _read(self, data, 0, spec.numel)
        return indices.to(index.dtype(spec.numel)), (1.0 - 2.0 * negative.to(torch.float32)) * self.tau

    def max_nbytes(self, spec: Spec) -> int:
        return HEAD + 4 * spec.numel


def _write(form: Words, table: Tensor, codes: Tensor, indices: Tensor) -> Tensor:
    head = torch.frombuffer(bytearray(form.magic + struct.pack("<I", indices.numel())), dtype=torch.uint8)
    words = codes.to(torch.int64) << form.width | indices.to(torch.int64)
    signed = torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)
    return torch.cat((head, table, signed.view(torch.uint8)))


def _read(form: Words, data: Tensor, table: int, numel: int) -> tuple[Tensor, Tensor]:
    """Codes (uint8) and strictly increasing indices (int64) of a message with ``table`` bytes before the words."""
    start = HEAD + table
    if data.numel() < start or bytes(data[:4].tolist()) != form.magic:
        raise CorruptMessage("not a message in the paper's form")
    count = struct.unpack("<I", bytes(data[4:HEAD].tolist()))[0]
    if data.numel() != start + 4 * count:
        raise CorruptMessage(f"{count} words take {start + 4 * count} bytes, the message has {data.numel()}")
    words = data[start:].clone().view(torch.int32).to(torch.int64) & 0xFFFFFFFF
    indices = words & (1 << form.width) - 1
    if count and (int(indices[-1]) >= numel or not bool((indices.diff() > 0).all())):
        raise CorruptMessage("the indices of the words do not increase within the buffer")
    return (words >> form.width).to(torch.uint8), indices

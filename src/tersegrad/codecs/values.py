"""The values of sparse messages: how numbers become bytes beside the index set that says where they lie.

A form writes the values of a set of coordinates, tells what each becomes, and reads them again. Some round; ``Exp4`` also leaves
out what is too small. Forms that keep something per tensor find the tensors in the spec.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor

from tersegrad import kernels
from tersegrad.codecs import bitpack, exp4
from tersegrad.core.errors import CorruptMessage
from tersegrad.core.protocol import Compressor, Context, Message, Spec
from tersegrad.kernels.reference.values import from_powers, mean_scales, round_to_powers


@dataclasses.dataclass(frozen=True)
class Place:
    """Where values lie: the increasing indices of their coordinates, and the public facts of the message."""

    indices: Tensor
    spec: Spec
    ctx: Context

    @property
    def count(self) -> int:
        return self.indices.numel()

    def pieces(self) -> Tensor:
        """The number of the piece that each index lies in."""
        ends = list(itertools.accumulate(p.numel for p in self.spec.pieces))
        return torch.searchsorted(torch.tensor(ends, dtype=torch.int64), self.indices.long(), right=True)

    def owners(self) -> tuple[Tensor, int]:
        """For each index the number of its piece among those that have any, and how many those are."""
        used, owners = torch.unique_consecutive(self.pieces(), return_inverse=True)
        return owners, used.numel()


class Given(NamedTuple):
    """Values as a device's kernels lay them behind an index set."""

    # Room for indices of those that are sent.
    indices: Tensor
    # Numbers, or bytes (uint8).
    values: Tensor
    # How many are sent, int64; of bytes also how many there are, and the message's mode.
    told: Tensor
    # What each becomes, where that is known.
    decoded: Tensor | None = None


@dataclasses.dataclass(frozen=True)
class Written:
    """The bytes of values, and what each value becomes."""

    data: Tensor
    decoded: Tensor
    # Which of them are sent, where it is not all.
    kept: Tensor | None = None
    # Whether the message says so by mode 4.
    packed: bool = False


class Form(Protocol):
    """How values are written and read."""

    @property
    def packs(self) -> bool:
        """Whether there is a second, packed form."""
        ...

    @property
    def narrow(self) -> bool | None:
        """Whether values are bfloat16 one behind the other; no: float32; None: neither."""
        ...

    @property
    def local(self) -> bool:
        """Whether :meth:`read` asks for the host's memory."""
        ...

    @property
    def coded_by(self) -> tuple[str, ...] | None:
        """The kernels that write and read long messages where their values are; None: they are written and read on the CPU."""
        ...

    def give(self, indices: Tensor, values: Tensor, count: Tensor, spec: Spec) -> Given:
        """What a selection found as ``sparse_encode`` takes it, for which nobody waits; where there are such kernels."""
        ...

    def put(
        self, data: Tensor, front: bytes, count: int, alphabet: int, spec: Spec, packed: bool, out: Tensor, weight: float | None
    ) -> Tensor:
        """Decode a message that begins with ``front``, as ``sparse_decode`` does; where :attr:`narrow` is None."""
        ...

    def write(self, values: Tensor, place: Place) -> Written: ...

    def read(self, data: Tensor, place: Place, packed: bool) -> Tensor:
        """As float32; ``data`` is all that follows the index set. Raises :class:`CorruptMessage`."""
        ...

    def max_nbytes(self, count: int, tensors: int) -> int:
        """No ``count`` values in ``tensors`` tensors take more bytes."""
        ...


# Kernels for the set of a message.
SETS = ("sparse_encode", "sparse_encode_gaps")


def check_length(data: Tensor, expected: int) -> None:
    """Raise :class:`CorruptMessage` unless the values have this many bytes."""
    if data.numel() != expected:
        raise CorruptMessage(f"the values take {expected} bytes, the message has {data.numel()}")


class _Plain:
    """What forms have in common that are written as they are."""

    packs: ClassVar[bool] = False
    local: ClassVar[bool] = False
    coded_by: ClassVar[tuple[str, ...] | None] = (*SETS, "sparse_decode", "sparse_decode_gaps")

    def give(self, indices: Tensor, values: Tensor, count: Tensor, spec: Spec) -> Given:
        return Given(indices, values, count)

    def put(
        self, data: Tensor, front: bytes, count: int, alphabet: int, spec: Spec, packed: bool, out: Tensor, weight: float | None
    ) -> Tensor:
        raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class Float32(_Plain):
    """Exact values."""

    narrow: ClassVar[bool | None] = False

    def write(self, values: Tensor, place: Place) -> Written:
        return Written(values.view(torch.uint8), values)

    def read(self, data: Tensor, place: Place, packed: bool) -> Tensor:
        check_length(data, 4 * place.count)
        return data.clone().view(torch.float32)

    def max_nbytes(self, count: int, tensors: int) -> int:
        return 4 * count


@dataclasses.dataclass(frozen=True)
class BFloat16(_Plain):
    """The nearest bfloat16; what would round up to Inf becomes the largest finite number."""

    narrow: ClassVar[bool | None] = True

    def write(self, values: Tensor, place: Place) -> Written:
        largest = torch.finfo(torch.bfloat16).max
        rounded = values.clamp(-largest, largest).to(torch.bfloat16)
        return Written(rounded.view(torch.uint8), rounded.float())

    def read(self, data: Tensor, place: Place, packed: bool) -> Tensor:
        check_length(data, 2 * place.count)
        return data.clone().view(torch.bfloat16).float()

    def max_nbytes(self, count: int, tensors: int) -> int:
        return 2 * count


@dataclasses.dataclass(frozen=True)
class Signs(_Plain):
    """One bit per value: +-tau, tau a float32 that both ends know."""

    tau: float
    narrow: ClassVar[bool | None] = None
    coded_by: ClassVar[tuple[str, ...] | None] = (*SETS, "signs_encode", "signs_decode")

    def give(self, indices: Tensor, values: Tensor, count: Tensor, spec: Spec) -> Given:
        return Given(indices, *kernels.get(values.device).signs_encode(values, count))

    def put(
        self, data: Tensor, front: bytes, count: int, alphabet: int, spec: Spec, packed: bool, out: Tensor, weight: float | None
    ) -> Tensor:
        return kernels.get(data.device).signs_decode(data, front, count, spec.numel, alphabet, self.tau, out, weight)

    def write(self, values: Tensor, place: Place) -> Written:
        signs = bitpack.pack(torch.signbit(values).to(torch.uint8), 1)
        return Written(signs, torch.full_like(values, self.tau).copysign_(values))

    def read(self, data: Tensor, place: Place, packed: bool) -> Tensor:
        check_length(data, bitpack.nbytes(place.count, 1))
        return _plus_minus(data, place.count).mul_(self.tau)

    def max_nbytes(self, count: int, tensors: int) -> int:
        return bitpack.nbytes(count, 1)


@dataclasses.dataclass(frozen=True)
class MeanSigns(_Plain):
    """One bit per value: +- the mean magnitude of what its tensor sends, a bfloat16 per tensor that sends anything."""

    narrow: ClassVar[bool | None] = None
    local: ClassVar[bool] = True
    coded_by: ClassVar[tuple[str, ...] | None] = (*SETS, "mean_signs_encode", "mean_signs_decode")

    def give(self, indices: Tensor, values: Tensor, count: Tensor, spec: Spec) -> Given:
        return Given(indices, *kernels.get(values.device).mean_signs_encode(indices, values, count, spec.layout))

    def put(
        self, data: Tensor, front: bytes, count: int, alphabet: int, spec: Spec, packed: bool, out: Tensor, weight: float | None
    ) -> Tensor:
        return kernels.get(data.device).mean_signs_decode(data, front, count, spec.numel, alphabet, spec.layout, out, weight)

    def write(self, values: Tensor, place: Place) -> Written:
        owners, tensors = place.owners()
        scales = mean_scales(values, owners, tensors, kernels.get(values.device).sum_abs)
        signs = bitpack.pack(torch.signbit(values).to(torch.uint8), 1)
        return Written(torch.cat((scales.view(torch.uint8), signs)), torch.copysign(scales.float()[owners], values))

    def read(self, data: Tensor, place: Place, packed: bool) -> Tensor:
        owners, tensors = place.owners()
        check_length(data, self.max_nbytes(place.count, tensors))
        scales = data[: 2 * tensors].clone().view(torch.bfloat16).float()
        return scales[owners] * _plus_minus(data[2 * tensors :], place.count)

    def max_nbytes(self, count: int, tensors: int) -> int:
        return 2 * tensors + bitpack.nbytes(count, 1)


def _plus_minus(data: Tensor, count: int) -> Tensor:
    """+1 or -1 for each bit, as float32."""
    return bitpack.unpack(data, 1, count).to(torch.float32).mul_(-2.0).add_(1.0)


@dataclasses.dataclass(frozen=True)
class Powers:
    """Values rounded to powers of two: +-2^(E - d) with d in 0..7, 2^E the nearest to the largest of their piece."""

    decoded: Tensor
    kept: Tensor
    # By piece: E, and whether the piece sends anything.
    exponents: Tensor
    used: Tensor
    # Of the values that are kept: 8 sign + d.
    codes: Tensor


def to_powers(values: Tensor, place: Place) -> Powers:
    """Round ``values``; those below 2^(E - 7) become zero and are not kept."""
    ops, tensors = kernels.get(values.device), len(place.spec.pieces)
    decoded, exponents, owners, codes = round_to_powers(values, place.pieces(), tensors, ops.exp4_top, ops.exp4_round)
    used = torch.zeros(tensors, dtype=torch.bool)
    used[owners] = True
    return Powers(decoded, decoded != 0, exponents, used, codes)


@dataclasses.dataclass(frozen=True)
class Exp4(_Plain):
    """Four bits per value, entropy-coded: sign and one of eight powers of two (``codecs/exp4.py``)."""

    packs: ClassVar[bool] = True
    narrow: ClassVar[bool | None] = None
    local: ClassVar[bool] = True
    coded_by: ClassVar[tuple[str, ...] | None] = (*SETS, "exp4_encode", "exp4_decode")

    def give(self, indices: Tensor, values: Tensor, count: Tensor, spec: Spec) -> Given:
        indices, decoded, data, told = kernels.get(values.device).exp4_encode(indices, values, count, spec.layout)
        return Given(indices, data, told, decoded)

    def put(
        self, data: Tensor, front: bytes, count: int, alphabet: int, spec: Spec, packed: bool, out: Tensor, weight: float | None
    ) -> Tensor:
        return kernels.get(data.device).exp4_decode(data, front, count, spec.numel, alphabet, spec.layout, packed, out, weight)

    def write(self, values: Tensor, place: Place) -> Written:
        powers = to_powers(values, place)
        if not powers.codes.numel():
            return Written(values.new_empty(0, dtype=torch.uint8), powers.decoded, powers.kept)
        data, packed = exp4.encode(powers.exponents[powers.used], powers.codes)
        return Written(data, powers.decoded, powers.kept, packed)

    def read(self, data: Tensor, place: Place, packed: bool) -> Tensor:
        owners, tensors = place.owners()
        exponents, codes = exp4.decode(data, place.count, tensors, packed)
        return from_powers(exponents[owners], codes)

    def max_nbytes(self, count: int, tensors: int) -> int:
        return exp4.max_nbytes(count, tensors)


@dataclasses.dataclass(frozen=True)
class Compressed(_Plain):
    """All values as one vector, by a compressor without state."""

    compressor: Compressor[Any]
    narrow: ClassVar[bool | None] = None
    local: ClassVar[bool] = True
    coded_by: ClassVar[tuple[str, ...] | None] = None

    def write(self, values: Tensor, place: Place) -> Written:
        spec, ctx = Spec.flat(place.count), place.ctx.child(0)
        message, _ = self.compressor.encode(values, spec, None, ctx)
        return Written(message.payload, self.compressor.decode(message, spec, ctx))

    def read(self, data: Tensor, place: Place, packed: bool) -> Tensor:
        return self.compressor.decode(Message(data.clone(), data.numel()), Spec.flat(place.count), place.ctx.child(0))

    def max_nbytes(self, count: int, tensors: int) -> int:
        return self.compressor.max_nbytes(Spec.flat(count))

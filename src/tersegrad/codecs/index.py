"""Index sets: strictly increasing numbers of [0, numel) as bytes, close to log2 C(numel, count) bits.

``count`` is known to both ends. Where more than half of the numbers are in the set, the complement is coded. The first byte
tells the form; the encoder takes the smallest of those whose estimates promise enough:

=======  ===========================================================================================================
0..249   short sets: an arithmetic code of the gaps' binary digits, of which this byte is the first (no header at all)
250      planar Golomb code of the gaps; its divisor follows from count and numel, for sets that look random
251      the same with the divisor 2^s; the next byte is s
252      bitmap, one bit per number
253      entropy-coded gaps: classes by rANS with a table from the data, then the bits that the classes leave open
254      entropy-coded bitmap: its bytes by rANS
=======  ===========================================================================================================

``spec/wire.md``, "index sets", has every bit. Golomb codes are the Huffman codes of geometric gaps, 0.03 bit per index above the
entropy; the short form pays about 2 bits per set above log2 C(numel, count), whole bytes included. All forms but the short one
can be read by many processors at once.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Collection
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from tersegrad import kernels
from tersegrad.codecs import rans
from tersegrad.core import host
from tersegrad.core.errors import CorruptMessage
from tersegrad.kernels.reference.index import golomb_nbytes, random_divisor

SHORT = 256  # sets up to this long are arithmetic-coded, which takes about 0.1 microsecond per index
GOLOMB, RICE, BITMAP, ENTROPY_GAPS, ENTROPY_BITMAP = range(250, 255)
RICE_MAX = 40
CLASSES = 112  # gaps below 2^56
KINDS = 128  # classes that kernels count
TABLES = 100  # about the bytes of rANS tables and states
# Estimated shares of the best form so far that make another one worth writing.
RICE_GAIN, ENTROPY_GAIN = 0.995, 0.99
# The share of a Rice code's estimate that makes entropy-coded gaps the better one without a trial.
CLEAR_GAIN = 0.98

Histogram = list[tuple[int, int]]  # classes of gaps that occur, in ascending order, and how often


def dtype(numel: int) -> torch.dtype:
    """The dtype of indices into ``numel`` coordinates."""
    return torch.int32 if numel <= 1 << 31 else torch.int64


@functools.lru_cache(maxsize=1024)
def max_nbytes(count: int, numel: int) -> int:
    """No set of ``count`` numbers of [0, numel) takes more bytes; grows with ``count`` up to numel / 2."""
    k = min(count, numel - count)
    if k <= 0:
        return 1
    return 1 + min(golomb_nbytes(k, numel), -(-numel // 8))


class Form(Protocol):
    """One way to write a set: how long it is, and its bytes."""

    def size(self) -> int: ...

    def write(self, out: Tensor) -> None:
        """Into the first :meth:`size` bytes of ``out``."""
        ...


@dataclasses.dataclass(frozen=True, eq=False)
class Digits:
    """The arithmetic code of a short set."""

    indices: Tensor
    numel: int

    @functools.cached_property
    def _code(self) -> Tensor:
        out = torch.empty(64 + 128 * self.indices.numel(), dtype=torch.uint8, device=self.indices.device)
        return out[: kernels.get(self.indices.device).digits_encode(self.indices, self.numel, out)]

    def size(self) -> int:
        return self._code.numel()

    def write(self, out: Tensor) -> None:
        host.lay(out, self._code)


@dataclasses.dataclass(frozen=True, eq=False)
class Golomb:
    """Gaps by a Golomb code; ``header`` is the form and, where it does not follow from the set's size, the divisor's log2."""

    indices: Tensor
    numel: int
    divisor: int
    header: tuple[int, ...]
    counted: Counted | None = None

    @functools.cached_property
    def _code(self) -> Tensor:
        k, ops = self.indices.numel(), kernels.get(self.indices.device)
        # The planes of a set in [0, numel): at most numel / divisor zeros and k ones, then the bits of the remainders.
        most = 3 + (k + self.numel // self.divisor + k * self.divisor.bit_length() + 7) // 8
        out = torch.empty(most, dtype=torch.uint8, device=self.indices.device)
        return out[: int(ops.golomb_encode(self.indices, self.divisor, out))]

    def size(self) -> int:
        if self.counted is not None:
            return len(self.header) + self.counted.golomb
        # Another form is nearly always shorter for a short set, so that this one is not written to be measured.
        if self.indices.numel() <= SHORT:
            return len(self.header) + int(kernels.get(self.indices.device).golomb_size(self.indices, self.divisor))
        return len(self.header) + self._code.numel()

    def write(self, out: Tensor) -> None:
        host.lay(out, bytes(self.header), self._code)


@dataclasses.dataclass(frozen=True, eq=False)
class Bitmap:
    """One bit per number, plain."""

    indices: Tensor
    numel: int

    def size(self) -> int:
        return 1 + -(-self.numel // 8)

    def write(self, out: Tensor) -> None:
        host.lay(out, bytes((BITMAP,)), kernels.get(self.indices.device).bitmap_encode(self.indices, self.numel))


@dataclasses.dataclass(frozen=True, eq=False)
class EntropyGaps:
    """Classes of the gaps by rANS, then the bits that they leave open."""

    indices: Tensor
    alphabet: int
    open_bits: int

    @functools.cached_property
    def _classes(self) -> Tensor:
        return rans.encode(kernels.get(self.indices.device).gap_classes(self.indices), self.alphabet)

    def size(self) -> int:
        return 2 + self._classes.numel() + -(-self.open_bits // 8)

    def write(self, out: Tensor) -> None:
        at = host.lay(out, bytes((ENTROPY_GAPS, self.alphabet)), self._classes)
        kernels.get(self.indices.device).gap_rests_encode(self.indices, out[at:])


@dataclasses.dataclass(frozen=True, eq=False)
class EntropyBitmap:
    """The bytes of the bitmap by rANS."""

    bitmap: Tensor

    @functools.cached_property
    def _code(self) -> Tensor:
        return rans.encode(self.bitmap, 256)

    def size(self) -> int:
        return 1 + self._code.numel()

    def write(self, out: Tensor) -> None:
        host.lay(out, bytes((ENTROPY_BITMAP,)), self._code)


@dataclasses.dataclass(frozen=True)
class Counted:
    """What a kernel has counted of a set: how often the 128 classes of gaps occur, and the bytes of its Golomb code."""

    classes: list[int]
    golomb: int


def encode(indices: Tensor, numel: int, out: Tensor | None = None, counted: Counted | None = None) -> Tensor:
    """The bytes of strictly increasing int32 or int64 ``indices``, in the first bytes of ``out`` if it is given.

    >>> encode(torch.tensor([5]), 1000).tolist(), encode(torch.arange(1000), 1000).tolist()
    ([1, 64], [0])
    """
    if out is None:
        room = max_nbytes(min(indices.numel(), numel), numel)
        out = torch.empty(room, dtype=torch.uint8, device=indices.device)
    return out[: write(indices, numel, out, counted)]


def write(indices: Tensor, numel: int, out: Tensor, counted: Counted | None = None) -> int:
    """The same into ``out``; how many bytes they are."""
    count = indices.numel()
    if count > numel:
        raise ValueError(f"{count} distinct indices out of {numel}")
    room = max_nbytes(count, numel)
    if out.dtype != torch.uint8 or out.dim() != 1 or not out.is_contiguous() or out.numel() < room:
        raise ValueError(f"out must be a contiguous 1-D uint8 tensor of at least {room} bytes")
    if 2 * count > numel:
        indices, counted = kernels.get(indices.device).index_complement(indices, numel), None
    best = _smallest(indices, numel, counted)
    best.write(out)
    return best.size()


class Tried(NamedTuple):
    """The forms that estimates make worth writing, beside the bitmap and the Golomb code for sets that look random."""

    rice: int | None
    gaps: bool


def _tried(histogram: Histogram, k: int, size: int) -> Tried:
    """What to try where the best form so far has ``size`` bytes."""
    parameter, rice = _rice_estimate(histogram)
    gaps = _gaps_estimate(histogram) if k > SHORT else math.inf
    tries_rice = _promises(2 + rice, size, RICE_GAIN) and not _promises(gaps, 2 + rice, CLEAR_GAIN)
    return Tried(parameter if tries_rice else None, _promises(gaps, size, ENTROPY_GAIN))


class Gaps(NamedTuple):
    """What a decoder of entropy-coded gaps is told, and the bits that follow their classes."""

    alphabet: int
    open_bits: int
    # The bytes of the best form beside it.
    others: int

    @property
    def room(self) -> int:
        """Bits that suffice for sets of about this kind, in steps of an eighth."""
        step = 1 << max(self.open_bits.bit_length() - 3, 3)
        return (self.open_bits // step + 1) * step


def expected(count: int, numel: int, counted: Counted) -> Literal["golomb"] | Gaps | None:
    """The form that :func:`encode` takes, or that it compares with the Golomb code, by what was counted; None where that does not tell."""
    size = 1 + counted.golomb
    if count <= SHORT or 32 * count > numel or size >= 1 + -(-numel // 8):
        return None
    histogram = _occurring(counted.classes)
    rice, gaps = _tried(histogram, count, size)
    if rice is not None:
        return None
    return Gaps(histogram[-1][0] + 1, _open_bits(histogram), size) if gaps else "golomb"


def _smallest(indices: Tensor, numel: int, counted: Counted | None) -> Form:
    """The form with the fewest bytes, the first if several are equal."""
    k = indices.numel()
    best: Form = Digits(indices, numel) if k <= SHORT else Bitmap(indices, numel)
    if k == 0:
        return best
    size = best.size()
    classes = kernels.get(indices.device).gap_histogram(indices, numel).tolist() if counted is None else counted.classes
    # Later classes have gaps that are too long for the vector.
    histogram = _occurring(classes[: 2 * numel.bit_length()])
    if k <= SHORT:
        best, size = _shorter(best, size, Bitmap(indices, numel))
    # A divisor of one makes a bitmap of the Golomb code.
    if random_divisor(k, numel) > 1:
        best, size = _shorter(best, size, Golomb(indices, numel, random_divisor(k, numel), (GOLOMB,), counted))
    rice, gaps = _tried(histogram, k, size)
    if rice is not None:
        best, size = _shorter(best, size, Golomb(indices, numel, 1 << rice, (RICE, rice)))
    if gaps and _promises(_gaps_estimate(histogram), size, ENTROPY_GAIN):
        best, size = _shorter(best, size, EntropyGaps(indices, histogram[-1][0] + 1, _open_bits(histogram)))
    if 32 * k > numel > 4096:
        ops = kernels.get(indices.device)
        bitmap = ops.bitmap_encode(indices, numel)
        counts = ops.rans_histogram(bitmap, 256, None, 1, True)[0].tolist()
        if _promises(TABLES + _entropy(counts) / sum(counts) * bitmap.numel() / 8, size, ENTROPY_GAIN):
            best, size = _shorter(best, size, EntropyBitmap(bitmap))
    return best


def _shorter(best: Form, size: int, other: Form) -> tuple[Form, int]:
    """The one with fewer bytes, and how many."""
    found = other.size()
    return (other, found) if found < size else (best, size)


def _promises(estimate: float, size: float, gain: float) -> bool:
    """Whether a form of about ``estimate`` bytes is worth trying where ``size`` are reached."""
    return estimate < gain * size


def _occurring(classes: list[int]) -> Histogram:
    return [(c, n) for c, n in enumerate(classes) if n]


def _open_bits(histogram: Histogram) -> int:
    """The bits that the classes of gaps leave open."""
    return sum([n * ((c + 1) // 2 - 1) for c, n in histogram if c])


def _gaps_estimate(histogram: Histogram) -> float:
    """About the bytes of entropy-coded gaps."""
    return TABLES + (_entropy([n for _, n in histogram]) + _open_bits(histogram)) / 8


def _entropy(counts: Collection[int]) -> float:
    """Bits that an ideal code spends on all symbols together."""
    total = sum(counts)
    return sum([n * math.log2(total / n) for n in counts if n])


# The middle of every class of gaps, and for every Rice parameter about the bits of its unary part beyond the first.
MIDDLES = [(2.5 + (c + 1) % 2) * 2.0 ** ((c + 1) // 2 - 1) - 1 if c else 0.0 for c in range(128)]
UNARY = [[g / (1 << s) - 0.5 if g > (1 << s) / 2 else 0.0 for g in MIDDLES] for s in range(RICE_MAX)]


def _rice_estimate(histogram: Histogram) -> tuple[int, float]:
    """A good Rice parameter and its bytes, from the counts of the gaps' classes, each gap taken as the middle of its class."""
    total = sum([n for _, n in histogram])
    reached = itertools.accumulate(n for _, n in histogram)
    median = next(c for (c, _), below in zip(histogram, reached) if 2 * below >= total)
    near = range(min(max(0, median // 2 - 2), RICE_MAX - 1), min(RICE_MAX, median // 2 + 3))

    def cost(s: int) -> float:
        bits = UNARY[s]
        return total * (1 + s) + sum([n * bits[c] for c, n in histogram])

    # Convex in the parameter: the first of the smallest is where neither neighbour is better.
    at = near[len(near) // 2]
    least, lower, upper = cost(at), at, at
    while lower > near[0] and (below := cost(lower - 1)) <= least:
        lower, least = lower - 1, below
    while lower == at and upper < near[-1] and (above := cost(upper + 1)) < least:
        upper, least = upper + 1, above
    return (upper if lower == at else lower), least / 8


def decode(data: Tensor, count: int, numel: int, front: bytes | None = None) -> tuple[Tensor, int]:
    """The indices, and how many bytes of ``data`` they took; raises :class:`CorruptMessage`.

    ``front``: the first two bytes, where they are known already.

    >>> decode(encode(torch.tensor([2, 3, 5, 7]), 10), 4, 10)
    (tensor([2, 3, 5, 7], dtype=torch.int32), 2)
    """
    if not 0 <= count <= numel:
        raise CorruptMessage(f"{count} indices out of {numel}")
    if data.numel() == 0:
        raise CorruptMessage("the index set ends early")
    ops = kernels.get(data.device)
    complement = 2 * count > numel
    k = numel - count if complement else count
    form, parameter = (*(data[:2].tolist() if front is None else front), 255)[:2]
    if form < GOLOMB:
        if k > SHORT:
            raise CorruptMessage(f"{k} indices are too many for the short form")
        indices, used = ops.digits_decode(data, k, numel)
    elif k == 0:
        raise CorruptMessage("an empty set has the short form")
    else:
        indices, used = _decode_gaps(form, parameter, data, k, numel)
    return (ops.index_complement(indices, numel) if complement else indices), used


def _decode_gaps(form: int, parameter: int, data: Tensor, k: int, numel: int) -> tuple[Tensor, int]:
    ops = kernels.get(data.device)
    if form == GOLOMB:
        return _decode_golomb(data[1:], k, numel, random_divisor(k, numel), 1)
    if form == BITMAP:
        return ops.bitmap_decode(data[1:], k, numel), 1 + -(-numel // 8)
    if form == ENTROPY_BITMAP:
        bitmap, used = rans.decode(data[1:], -(-numel // 8), 256)
        return ops.bitmap_decode(bitmap, k, numel), used + 1
    if form == RICE:
        if parameter >= RICE_MAX:
            raise CorruptMessage(f"Rice parameters are 0 to {RICE_MAX - 1}")
        return _decode_golomb(data[2:], k, numel, 1 << parameter, 2)
    if form == ENTROPY_GAPS:
        if not 1 <= parameter <= CLASSES:
            raise CorruptMessage(f"gaps have 1 to {CLASSES} classes, not {parameter}")
        classes, used = rans.decode(data[2:], k, parameter)
        indices, rest = ops.gap_rests_decode(data[2 + used :], classes, numel)
        return indices, 2 + used + int(rest)
    raise CorruptMessage(f"unknown form {form} of an index set")


def _decode_golomb(data: Tensor, k: int, numel: int, divisor: int, header: int) -> tuple[Tensor, int]:
    if k > 8 * data.numel():
        raise CorruptMessage(f"{data.numel()} bytes cannot hold {k} gaps")
    indices = torch.empty(k, dtype=dtype(numel), device=data.device)
    return indices, header + int(kernels.get(data.device).golomb_decode(data, numel, divisor, indices))

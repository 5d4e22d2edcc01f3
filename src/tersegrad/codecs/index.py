"""Index sets: strictly increasing numbers of [0, numel) as bytes, close to log2 C(numel, count) bits.

``count`` is known to both ends. Where more than half of the numbers are in the set, the complement is coded. The first byte
tells the form; the encoder takes the smallest (the last two only where they promise at least 1 %, for the sake of speed):

=======  ===========================================================================================================
0..249   short sets: an arithmetic code of the gaps' binary digits, of which this byte is the first (no header at all)
250      Golomb code of the gaps; its divisor follows from count and numel, for sets that look random
251      Rice code of the gaps; the next byte is its parameter
252      bitmap, one bit a number
253      entropy-coded gaps: classes by rANS with a table from the data, then the bits that the classes leave open
254      entropy-coded bitmap: its bytes by rANS
=======  ===========================================================================================================

``spec/wire.md``, "index sets", has every bit. Golomb codes are the Huffman codes of geometric gaps, 0.03 bit an index above the
entropy; the short form pays about 2 bits a set above log2 C(numel, count), whole bytes included.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection

import torch
from torch import Tensor

from tersegrad import kernels
from tersegrad.codecs import rans
from tersegrad.core.errors import CorruptMessage

SHORT = 256  # sets up to this long are arithmetic-coded, which takes about 0.1 microsecond an index
GOLOMB, RICE, BITMAP, ENTROPY_GAPS, ENTROPY_BITMAP = range(250, 255)
RICE_MAX = 40
CLASSES = 112  # gaps below 2^56


def dtype(numel: int) -> torch.dtype:
    """The dtype of indices into ``numel`` coordinates."""
    return torch.int32 if numel <= 1 << 31 else torch.int64


def divisor(count: int, numel: int) -> int:
    """The Golomb divisor for random sets: about ln 2 times the mean gap.

    >>> divisor(10, 1000), divisor(300, 1000)
    (69, 2)
    """
    return max(1, (numel * 45426 // count + 11141) >> 16)


def max_nbytes(count: int, numel: int) -> int:
    """No set of ``count`` numbers of [0, numel) takes more bytes; grows with ``count`` up to numel / 2."""
    k = min(count, numel - count)
    if k <= 0:
        return 1
    # Bits of the Golomb code: the quotients add up to at most 1.45 k, and a remainder has at most log2(m) + 1 bits.
    golomb = math.ceil(k * (3.45 + math.log2(0.6932 * numel / k + 1.17)))
    return 1 + -(-min(golomb, numel) // 8)


def encode(indices: Tensor, numel: int, out: Tensor | None = None) -> Tensor:
    """The bytes of strictly increasing int32 or int64 ``indices``, in the first bytes of ``out`` if it is given.

    >>> encode(torch.tensor([5]), 1000).tolist(), encode(torch.arange(1000), 1000).tolist()
    ([1, 64], [0])
    """
    count = indices.numel()
    if count > numel:
        raise ValueError(f"{count} distinct indices out of {numel}")
    room = max_nbytes(count, numel)
    if out is None:
        out = torch.empty(room, dtype=torch.uint8, device=indices.device)
    elif out.dtype != torch.uint8 or out.dim() != 1 or not out.is_contiguous() or out.numel() < room:
        raise ValueError(f"out must be a contiguous 1-D uint8 tensor of at least {room} bytes")
    ops = kernels.get(indices.device)
    if 2 * count > numel:
        indices = ops.index_complement(indices, numel)
    best = _encode_gaps(indices, numel, out) if indices.numel() else room + 1
    if indices.numel() <= SHORT:
        short = torch.empty(64 + 128 * indices.numel(), dtype=torch.uint8, device=indices.device)
        size = ops.digits_encode(indices, numel, short)
        if size <= best:
            out[:size] = short[:size]
            return out[:size]
    return out[:best]


def _encode_gaps(indices: Tensor, numel: int, out: Tensor) -> int:
    """The smallest form with a header byte, into ``out``; returns its length."""
    ops, k = kernels.get(indices.device), indices.numel()
    histogram = {c: n for c, n in enumerate(ops.gap_histogram(indices, numel)) if n}
    m = divisor(k, numel)
    bitmap_size = 1 + -(-numel // 8)
    best = 1 + (ops.golomb_size(indices, m) if 8 * k > numel else ops.golomb_encode(indices, m, out[1:]))
    form = GOLOMB

    parameter, estimate = _rice_estimate(histogram)
    if 2 + estimate < 0.995 * best:
        size = 2 + ops.golomb_size(indices, 1 << parameter)
        if size < best:
            best, form = size, RICE
    if bitmap_size <= best + best // 256:  # about as small, and much faster to read than unary quotients
        best, form = bitmap_size, BITMAP

    coded: Tensor | None = None
    rests = sum(n * max(0, (c + 1) // 2 - 1) for c, n in histogram.items())
    if k > SHORT and 300 + (_entropy(histogram.values()) + rests) / 8 < 0.99 * best:
        alphabet = max(histogram) + 1
        classes = rans.encode(ops.gap_classes(indices), alphabet)
        size = 2 + classes.numel() + -(-rests // 8)
        if size < best:
            best, form = size, ENTROPY_GAPS
            coded = classes
    if 32 * k > numel > 4096:
        bitmap = ops.bitmap_encode(indices, numel)
        counts = ops.rans_histogram(bitmap, 256, None, 1, True)[0].tolist()
        if 500 + _entropy(counts) / sum(counts) * bitmap.numel() / 8 < 0.99 * best:
            packed = rans.encode(bitmap, 256)
            if 1 + packed.numel() < best:
                best, form = 1 + packed.numel(), ENTROPY_BITMAP
                coded = packed

    if form == GOLOMB and 8 * k > numel:
        ops.golomb_encode(indices, m, out[1:])
    elif form == RICE:
        out[1] = parameter
        ops.golomb_encode(indices, 1 << parameter, out[2:])
    elif form == BITMAP:
        out[1:best] = ops.bitmap_encode(indices, numel)
    elif form == ENTROPY_GAPS and coded is not None:
        out[1] = alphabet
        out[2 : 2 + coded.numel()] = coded
        ops.gap_rests_encode(indices, out[2 + coded.numel() :])
    elif form == ENTROPY_BITMAP and coded is not None:
        out[1:best] = coded
    out[0] = form
    return best


def _entropy(counts: Collection[int]) -> float:
    """Bits that an ideal code spends on all symbols together."""
    total = sum(counts)
    return sum(n * math.log2(total / n) for n in counts if n)


def _rice_estimate(histogram: dict[int, int]) -> tuple[int, float]:
    """A good Rice parameter and its bytes, from the counts of the gaps' classes, each gap taken as the middle of its class."""
    total = sum(histogram.values())
    reached = itertools.accumulate(histogram.values())
    median = next(c for c, below in zip(histogram, reached) if 2 * below >= total)
    middles = [(n, (2.5 + (c + 1) % 2) * 2.0 ** ((c + 1) // 2 - 1) - 1 if c else 0.0) for c, n in histogram.items()]
    near = range(max(0, median // 2 - 2), min(RICE_MAX, median // 2 + 3))
    costs = [total * (1 + s) + sum(n * max(0.0, g / 2**s - 0.5) for n, g in middles) for s in near]
    return near[costs.index(min(costs))], min(costs) / 8


def decode(data: Tensor, count: int, numel: int) -> tuple[Tensor, int]:
    """The indices, and how many bytes of ``data`` they took; raises :class:`CorruptMessage`.

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
    form = int(data[0])
    if form < GOLOMB:
        if k > SHORT:
            raise CorruptMessage(f"{k} indices are too many for the short form")
        indices, used = ops.digits_decode(data, k, numel)
    elif k == 0:
        raise CorruptMessage("an empty set has the short form")
    else:
        indices, used = _decode_gaps(form, data, k, numel)
    return (ops.index_complement(indices, numel) if complement else indices), used


def _decode_gaps(form: int, data: Tensor, k: int, numel: int) -> tuple[Tensor, int]:
    ops = kernels.get(data.device)
    if form == GOLOMB:
        indices, used = ops.golomb_decode(data[1:], k, numel, divisor(k, numel))
        return indices, used + 1
    if form == BITMAP:
        return ops.bitmap_decode(data[1:], k, numel), 1 + -(-numel // 8)
    if form == ENTROPY_BITMAP:
        bitmap, used = rans.decode(data[1:], -(-numel // 8), 256)
        return ops.bitmap_decode(bitmap, k, numel), used + 1
    parameter = int(data[1]) if data.numel() > 1 else 255
    if form == RICE:
        if parameter >= RICE_MAX:
            raise CorruptMessage(f"Rice parameters are 0 to {RICE_MAX - 1}")
        indices, used = ops.golomb_decode(data[2:], k, numel, 1 << parameter)
        return indices, used + 2
    if form == ENTROPY_GAPS:
        if not 1 <= parameter <= CLASSES:
            raise CorruptMessage(f"gaps have 1 to {CLASSES} classes, not {parameter}")
        classes, used = rans.decode(data[2:], k, parameter)
        indices, rest = ops.gap_rests_decode(data[2 + used :], classes, numel)
        return indices, 2 + used + rest
    raise CorruptMessage(f"unknown form {form} of an index set")

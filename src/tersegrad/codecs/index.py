"""Index sets: strictly increasing numbers of [0, numel) as bytes, close to log2 C(numel, count) bits.

``count`` is known to both ends. Where more than half of the numbers are in the set, the complement is coded. The first byte tells
the form, and the encoder takes the form that is smallest for the set at hand:

=======  ===========================================================================================================
0..250   short sets: an arithmetic code of the gaps' binary digits, of which this byte is the first (no header at all)
251      Golomb code of the gaps; its divisor follows from count and numel, for sets that look random
252      Rice code of the gaps; the next byte is its parameter
253      bitmap, one bit a number
=======  ===========================================================================================================

``spec/wire.md`` section "index sets" has every bit. Golomb codes are the Huffman codes of geometric gaps, 0.03 bit an index above
the entropy; the short form pays about 2 bits a set above log2 C(numel, count), whole bytes included.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tersegrad import kernels
from tersegrad.core.errors import CorruptMessage

SHORT = 256  # sets up to this long are arithmetic-coded, which takes about 0.1 microsecond an index
GOLOMB, RICE, BITMAP = 251, 252, 253


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
    """No set of ``count`` numbers of [0, numel) takes more bytes."""
    k = min(count, numel - count)
    if k <= 0:
        return 1
    # Bits of the Golomb code: the quotients add up to at most 1.45 k, a remainder has at most log2(m) + 1 bits. Smooth in k, so that
    # the bound grows with it up to numel / 2.
    golomb = math.ceil(k * (3.45 + math.log2(0.6932 * numel / k + 1.17)))
    return 1 + -(-min(golomb, numel) // 8)


def encode(indices: Tensor, numel: int, out: Tensor | None = None) -> Tensor:
    """The bytes of a strictly increasing int32 or int64 ``indices``, in the first bytes of ``out`` if it is given.

    >>> encode(torch.tensor([5]), 1000).tolist(), encode(torch.arange(1000), 1000).tolist()
    ([1, 72], [0])
    """
    count = indices.numel()
    ops = kernels.get(indices.device)
    if not 0 <= count <= numel or not ops.index_increasing(indices, numel):
        raise ValueError(f"indices must increase strictly within [0, {numel})")
    room = max_nbytes(count, numel)
    if out is None:
        out = torch.empty(room, dtype=torch.uint8, device=indices.device)
    elif out.dtype != torch.uint8 or out.dim() != 1 or not out.is_contiguous() or out.numel() < room:
        raise ValueError(f"out must be a contiguous 1-D uint8 tensor of at least {room} bytes")
    if 2 * count > numel:
        indices = ops.index_complement(indices, numel)
    k = indices.numel()

    short: Tensor | None = None
    sizes: dict[tuple[int, int], int] = {}  # bytes of (form, parameter)
    if k:
        sizes[BITMAP, 0] = 1 + -(-numel // 8)
        m = divisor(k, numel)
        sizes[GOLOMB, m] = 1 + ops.golomb_size(indices, m)
        rice = _rice_parameter(ops.gap_classes(indices)[2])
        if 1 << rice != m:
            sizes[RICE, rice] = 2 + ops.golomb_size(indices, 1 << rice)
    best = min(sizes, key=sizes.__getitem__, default=None)
    if k <= SHORT:
        short = torch.empty(64 + 128 * k, dtype=torch.uint8, device=indices.device)
        size = ops.digits_encode(indices, numel, short)
        if best is None or size <= sizes[best]:
            out[:size] = short[:size]
            return out[:size]
    assert best is not None
    form, parameter = best
    size = sizes[best]
    out[0] = form
    if form == BITMAP:
        out[1:size] = ops.bitmap_encode(indices, numel)
    elif form == GOLOMB:
        ops.golomb_encode(indices, parameter, out[1:])
    else:
        out[1] = parameter
        ops.golomb_encode(indices, 1 << parameter, out[2:])
    return out[:size]


def _rice_parameter(histogram: list[int]) -> int:
    """A good Rice parameter, from the counts of the gaps' classes (each gap taken as the middle of its class)."""
    middles = [0.0] + [(2.5 + (c + 1) % 2) * 2.0 ** ((c + 1) // 2 - 1) - 1 for c in range(1, len(histogram))]
    total = sum(histogram)
    costs = [total * (1 + s) + sum(n * max(0.0, g / 2**s - 0.5) for n, g in zip(histogram, middles) if n) for s in range(40)]
    return costs.index(min(costs))


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
    elif form == BITMAP:
        indices, used = ops.bitmap_decode(data[1:], k, numel), 1 + -(-numel // 8)
    elif form == GOLOMB:
        indices, used = ops.golomb_decode(data[1:], k, numel, divisor(k, numel))
        used += 1
    elif form == RICE:
        parameter = int(data[1]) if data.numel() > 1 else 255
        if parameter >= 40:
            raise CorruptMessage("Rice parameters are 0 to 39")
        indices, used = ops.golomb_decode(data[2:], k, numel, 1 << parameter)
        used += 2
    else:
        raise CorruptMessage(f"unknown form {form} of an index set")
    return (ops.index_complement(indices, numel) if complement else indices), used

"""Chunk sets: which ``keep`` coordinates every chunk sends, in log2 C(n, k) bits each (``spec/wire.md``, "Chunk sets").

A chunk is halved again and again. How many of its chosen coordinates lie in the left half is a hypergeometric number for a random set,
and is coded as such; one or two left in a node are a digit among as many as there are. The product of these chances is
1 / C(n, k) for every set, so that no set is long. Chunks are coded in streams of some 2,048 coordinates, which are read independently of
one another; a stream costs about 32 bits, 0.016 bit per coordinate.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tersegrad import kernels
from tersegrad.codecs import tiles
from tersegrad.codecs.tiles import Region
from tersegrad.core import buffers

STREAM = 2048
LARGEST, MOST = 1 << 16, 256


def max_nbytes(regions: Sequence[Region]) -> int:
    """No sets of these regions take more bytes.

    >>> max_nbytes([Region(0, 64, 64, 64, 64, keep=64)])
    108
    """
    bits, held = [], STREAM
    for region in regions:
        chunks = region.count if region.keep < region.size else 0
        while chunks:
            if held >= STREAM:
                bits.append(0)
                held = 0
            here = min(chunks, -(-(STREAM - held) // region.keep))
            bits[-1] += here * region.keep * (region.size - 1).bit_length()
            chunks -= here
            held += here * region.keep
    return sum(4 * (-(-b // 32) + 3) for b in bits) + 2 * max(0, len(bits) - 1)


def encode(places: Tensor, regions: tuple[Region, ...], numel: int, out: Tensor) -> int:
    """Places into ``out``; the number of bytes."""
    return int(kernels.get(places.device).chunk_encode(places, tiles.table(regions), numel, out))


def decode(data: Tensor, regions: tuple[Region, ...], numel: int) -> Tensor:
    """The places that all of ``data`` holds."""
    places = buffers.empty(sum(r.places for r in regions), torch.int32, data.device)
    kernels.get(data.device).chunk_decode(data, tiles.table(regions), numel, places)
    return places

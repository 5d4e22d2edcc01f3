"""Scale classes for the levels of any quantiser: its integers as a message of dithered levels, whose segments know about them.

Rows and columns of a gradient differ in scale, and so do their levels (``docs/classes.md``). Sparse Dithering chooses classes segment by
segment and codes by them, on every device. Integers are multiples of a step of one, so its message holds them exactly: what another
quantiser has to send is such a message (``spec/wire.md``, 5.16), and nothing is coded in two places.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tersegrad import kernels
from tersegrad.codecs import rans
from tersegrad.core import buffers
from tersegrad.core.errors import CorruptMessage

# The integer levels begin .. end - 1, of any type.
Levels = Callable[[int, int], Tensor]
# Of the operation: rANS segments only; the first word of such a message; the segments' length, and the kind of those with classes.
RANS, SEGMENTS, SEGMENT, CLASSED = 1, 0x80000000, 1 << 18, 3
# Vectors of more segments than this are coded only if one of them, in the middle, gains from classes.
MANY = 4
# Shorter vectors have no classes.
SHORTEST = 512


def encode(levels: Levels, numel: int, layout: Tensor, chunk: rans.Chunk) -> Tensor | None:
    """A message of all ``levels``, or None where no part of it would have classes.

    >>> rows = torch.randn(64, 100, generator=torch.Generator().manual_seed(0)) * torch.exp2(torch.arange(64.0) % 8)[:, None]
    >>> levels = rows.round().flatten().to(torch.int16)
    >>> layout = torch.tensor([6400, 100, 1, 0])
    >>> data = encode(lambda begin, end: levels[begin:end], 6400, layout, "auto")
    >>> bool((decode(data, 6400, -2000, 2000, layout) == levels).all())
    True
    >>> even = torch.randn(6400, generator=torch.Generator().manual_seed(1)).round()
    >>> encode(lambda begin, end: even[begin:end], 6400, layout, "auto") is None
    True
    """
    if numel < SHORTEST:
        return None
    sampled = numel > MANY * SEGMENT
    begin, end = (numel // SEGMENT // 2 * SEGMENT, (numel // SEGMENT // 2 + 1) * SEGMENT) if sampled else (0, numel)
    found = levels(begin, end)
    small = found if found.dtype == torch.int8 else found.clamp(-127, 127).to(torch.int8)
    if not kernels.get(found.device).may_have_classes(small, layout, begin, numel):
        return None
    if sampled:
        if not _has_classes(_code(found, _within(layout, begin, end), chunk), SEGMENT):
            return None
        found = levels(0, numel)
    data = _code(found, layout, chunk)
    return data if _has_classes(data, numel) else None


def decode(data: Tensor, numel: int, least: int, most: int, layout: Tensor) -> Tensor:
    """The levels of a message, int16; :class:`CorruptMessage` unless they are integers of ``least`` .. ``most``, 0 among them."""
    found = buffers.empty(numel, torch.float32, data.device)
    kernels.get(data.device).dither_decode(data, found, None, layout)
    levels = found.to(torch.int16)
    low, high = levels.aminmax() if numel else (levels.sum(), levels.sum())
    if not bool((low >= least) & (high <= most) & (levels == found).all()):
        raise CorruptMessage(f"a level is not an integer of {least}..{most}")
    return levels


def shorter(
    levels: Levels, symbols: Callable[[], Tensor], alphabet: int, layout: Tensor, numel: int, chunk: rans.Chunk
) -> tuple[bool, Tensor]:
    """The shorter of both codes: ``levels`` with classes (then True), or ``symbols`` with one table.

    Symbols are asked for once levels no longer are, so they may lie in the same place.
    """
    known = encode(levels, numel, layout, chunk)
    if known is not None and numel > SEGMENT:
        return True, known
    # Where a few bytes may decide, both are written.
    plain = rans.encode(symbols(), alphabet, chunk=chunk)
    return (False, plain) if known is None or known.numel() >= plain.numel() else (True, known)


def _code(levels: Tensor, layout: Tensor, chunk: rans.Chunk) -> Tensor:
    run = kernels.get(levels.device)
    out = buffers.empty(run.dither_max_bytes(levels.numel()), torch.uint8, levels.device)
    bits = 0 if chunk == "auto" else rans.chunk_bits(chunk)
    return out[: int(run.dither_encode(levels.to(torch.float32), 0.0, 1.0, RANS, bits, None, out, layout=layout)[0])]


def _has_classes(data: Tensor, numel: int) -> bool:
    """Whether any segment of a message has classes."""
    segments = max(1, (numel + SEGMENT // 2) // SEGMENT)
    table = 4 * segments if segments > 1 else 0
    # Shorter ones, of zeros alone, have no segments.
    if data.numel() <= 4 + table:
        return False
    if not table:
        return int(data[4]) == CLASSED
    sizes = data[4 : 4 + table].clone().view(torch.int32).long()
    return bool((data[sizes.cumsum(0) - sizes + 4 + table] == CLASSED).any())


def _within(layout: Tensor, begin: int, end: int) -> Tensor:
    """The layout of coordinates begin .. end."""
    size, columns, group, phase = layout.view(-1, 4).unbind(1)
    first = size.cumsum(0) - size
    start, stop = first.clamp(min=begin), (first + size).clamp(max=end)
    here = torch.stack((stop - start, columns, group, (phase + start - first) % columns), 1)
    return here[start < stop].flatten()

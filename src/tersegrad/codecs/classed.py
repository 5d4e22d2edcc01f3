"""Scale classes for the levels of any quantiser: its integers as a message of dithered levels, whose segments know about them.

Rows and columns of a gradient differ in scale, and so do their levels (``docs/classes.md``). Sparse Dithering chooses classes segment by
segment and codes by them, on every device. Integers are multiples of a step of one, so its message holds them exactly: what another
quantiser has to send is such a message (``spec/wire.md``, 5.16), and nothing is coded in two places.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from tersegrad import kernels
from tersegrad.codecs import rans
from tersegrad.core import buffers, host
from tersegrad.core.errors import CorruptMessage
from tersegrad.kernels.reference.dither import SHORT
from tersegrad.kernels.reference.rans import SEGMENT as SEGMENT
from tersegrad.kernels.reference.tried import RANS, classed_segments

# Vectors of more segments than this are coded only if one of them, in the middle, gains from classes.
MANY = 4
# Shorter vectors have no classes.
SHORTEST = 512


def encode(levels: Tensor, layout: Tensor, chunk: rans.Chunk) -> Tensor | None:
    """A message of integer ``levels`` (float32), or None where no part of it would have classes.

    >>> rows = torch.randn(64, 100, generator=torch.Generator().manual_seed(0)) * torch.exp2(torch.arange(64.0) % 8)[:, None]
    >>> levels = rows.round().flatten()
    >>> layout = torch.tensor([6400, 100, 1, 0])
    >>> data = encode(levels, layout, "auto")
    >>> bool((decode(data, 6400, -2000, 2000, layout) == levels).all())
    True
    >>> encode(torch.randn(6400, generator=torch.Generator().manual_seed(1)).round(), layout, "auto") is None
    True
    """
    numel = levels.numel()
    if numel < SHORTEST:
        return None
    if numel > MANY * SEGMENT:
        begin = numel // SEGMENT // 2 * SEGMENT
        part = _code(levels[begin : begin + SEGMENT], _within(layout, begin, begin + SEGMENT), chunk)
        if not classed_segments(part, SEGMENT):
            return None
    data = _code(levels, layout, chunk)
    return data if classed_segments(data, numel) else None


def decode(data: Tensor, numel: int, least: int, most: int, layout: Tensor) -> Tensor:
    """The levels of a message, int16; :class:`CorruptMessage` unless they are integers of ``least`` .. ``most``, 0 among them."""
    found = buffers.empty(numel, torch.float32, data.device)
    kernels.get(data.device).dither_decode(data, found, None, layout)
    levels = found.to(torch.int16)
    low, high = levels.aminmax() if numel else (levels.sum(), levels.sum())
    if not bool((low >= least) & (high <= most) & (levels == found).all()):
        raise CorruptMessage(f"a level is not an integer of {least}..{most}")
    return levels


@dataclasses.dataclass(frozen=True)
class Begun:
    """Levels whose code is not chosen yet. On a device with kernels for it, it was asked what helps to choose; nobody waits for that."""

    levels: Tensor
    symbols: Tensor
    alphabet: int
    layout: Tensor
    chunk: rans.Chunk
    plain: Tensor | None = None
    told: Tensor | None = None  # int64, (2,): the length of the plain code, and whether classes pay

    def finish(self, told: Sequence[float] | None) -> tuple[bool, Tensor]:
        """The shorter of both codes, classes (then True) or one table; ``told`` is what the device was asked, where there is such."""
        if told is None or self.plain is None:
            return self._finish_here()
        numel, (length, classes) = self.levels.numel(), (int(n) for n in told)
        plain = self.plain[:length]
        if classes == 0:
            return False, plain
        # A segment that has classes by itself has them in the whole.
        known = _code(self.levels, self.layout, self.chunk) if classes > 0 else encode(self.levels, self.layout, self.chunk)
        if known is None:
            return False, plain
        return (True, known) if numel > SEGMENT or known.numel() < length else (False, plain)

    def _finish_here(self) -> tuple[bool, Tensor]:
        known = encode(self.levels, self.layout, self.chunk)
        if known is None:
            return False, rans.encode(self.symbols, self.alphabet, chunk=self.chunk)
        if self.levels.numel() > SEGMENT:
            return True, known
        # Where a few bytes may decide, both are written.
        plain = rans.encode(self.symbols, self.alphabet, chunk=self.chunk)
        return (True, known) if known.numel() < plain.numel() else (False, plain)


def begin(levels: Tensor, symbols: Tensor, alphabet: int, layout: Tensor, chunk: rans.Chunk) -> Begun:
    """Levels, and the same as symbols for one table, to be coded the shorter way."""
    numel, device = levels.numel(), levels.device
    # Short vectors are coded on the host.
    if numel <= SHORT or not kernels.faster(device, "rans_encode_trying"):
        return Begun(levels, symbols, alphabet, layout, chunk)
    part, within = levels, layout
    if numel > MANY * SEGMENT:
        at = numel // SEGMENT // 2 * SEGMENT
        part, within = levels[at : at + SEGMENT], _within(layout, at, at + SEGMENT)
    plain = torch.empty(rans.max_nbytes(numel, alphabet), dtype=torch.uint8, device=device)
    bits = 0 if chunk == "auto" else rans.chunk_bits(chunk)
    told = kernels.get(device).rans_encode_trying(symbols, alphabet, bits, plain, part, within)
    return Begun(levels, symbols, alphabet, layout, chunk, plain, told)


def shorter(levels: Tensor, symbols: Tensor, alphabet: int, layout: Tensor, chunk: rans.Chunk) -> tuple[bool, Tensor]:
    """The shorter of both codes: ``levels`` with classes (then True), or ``symbols`` with one table."""
    begun = begin(levels, symbols, alphabet, layout, chunk)
    return begun.finish(None if begun.told is None else host.read(begun.told).tolist())


def _code(levels: Tensor, layout: Tensor, chunk: rans.Chunk) -> Tensor:
    run = kernels.get(levels.device)
    out = buffers.empty(run.dither_max_bytes(levels.numel()), torch.uint8, levels.device)
    bits = 0 if chunk == "auto" else rans.chunk_bits(chunk)
    return out[: int(run.dither_encode(levels, 0.0, 1.0, RANS, bits, None, out, layout=layout)[0])]


def _within(layout: Tensor, begin: int, end: int) -> Tensor:
    """The layout of coordinates begin .. end."""
    size, columns, group, phase = layout.view(-1, 4).unbind(1)
    first = size.cumsum(0) - size
    start, stop = first.clamp(min=begin), (first + size).clamp(max=end)
    here = torch.stack((stop - start, columns, group, (phase + start - first) % columns), 1)
    return here[start < stop].flatten()

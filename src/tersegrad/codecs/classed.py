"""Scale classes for the levels of any quantiser: its integers as a message of dithered levels, whose segments know about them.

Rows and columns of a gradient differ in scale, and so do their levels (``docs/classes.md``). Sparse Dithering chooses classes segment by
segment and codes by them, on every device. Integers are multiples of a step of one, so its message holds them exactly: what another
quantiser has to send is such a message (``spec/wire.md``, 5.16), and nothing is coded in two places.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from tersegrad import kernels
from tersegrad.codecs import rans
from tersegrad.core import buffers, host
from tersegrad.core.errors import CorruptMessage
from tersegrad.kernels.reference.dither import SHORT
from tersegrad.kernels.reference.rans import SEGMENT as SEGMENT
from tersegrad.kernels.reference.tried import RANS, classed_segments

# The integer levels begin .. end - 1, of any type.
Levels = Callable[[int, int], Tensor]
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
    begin, end = _looked_at(numel)
    found = levels(begin, end)
    small = found if found.dtype == torch.int8 else found.clamp(-127, 127).to(torch.int8)
    if not kernels.get(found.device).may_have_classes(small, layout, begin, numel):
        return None
    if end - begin < numel:
        if not classed_segments(_code(found, _within(layout, begin, end), chunk), SEGMENT):
            return None
        found = levels(0, numel)
    data = _code(found, layout, chunk)
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
    """Levels whose code is not chosen yet: a device was asked what helps to choose, and nobody waits for that."""

    levels: Levels
    numel: int
    layout: Tensor
    chunk: rans.Chunk
    plain: Tensor
    told: Tensor  # int64, (2,): the length of the plain code, and whether classes pay

    def finish(self, told: Sequence[float]) -> tuple[bool, Tensor]:
        """The shorter of both codes, classes (then True) or one table; ``told`` is what the device was asked."""
        length, classes = (int(n) for n in told)
        plain, levels, numel = self.plain[:length], self.levels, self.numel
        if classes == 0:
            return False, plain
        # A segment that has classes by itself has them in the whole.
        known = (
            _code(levels(0, numel), self.layout, self.chunk) if classes > 0 else encode(levels, numel, self.layout, self.chunk)
        )
        if known is None:
            return False, plain
        return (True, known) if numel > SEGMENT or known.numel() < length else (False, plain)


def asks(device: torch.device, numel: int) -> bool:
    """Whether levels on ``device`` are coded by :func:`begin`: there are kernels for it, and short vectors are coded on the host."""
    return numel > SHORT and kernels.faster(device, "rans_encode_trying")


def begin(levels: Levels, symbols: Tensor, alphabet: int | Tensor, layout: Tensor, chunk: rans.Chunk) -> Begun:
    """Levels, and the same as symbols for one table, to be coded the shorter way; only the device may know the alphabet."""
    numel, device = symbols.numel(), symbols.device
    first, last = _looked_at(numel)
    within = layout if last - first == numel else _within(layout, first, last)
    most = 256 if isinstance(alphabet, Tensor) else alphabet
    plain = torch.empty(rans.max_nbytes(numel, most), dtype=torch.uint8, device=device)
    bits = 0 if chunk == "auto" else rans.chunk_bits(chunk)
    looked_at = levels(first, last).to(torch.float32)
    told = kernels.get(device).rans_encode_trying(symbols, alphabet, bits, plain, looked_at, within)
    return Begun(levels, numel, layout, chunk, plain, told)


def shorter(
    levels: Levels, symbols: Callable[[], Tensor], alphabet: int, layout: Tensor, numel: int, chunk: rans.Chunk
) -> tuple[bool, Tensor]:
    """The shorter of both codes: ``levels`` with classes (then True), or ``symbols`` with one table.

    Symbols are asked for once levels no longer are, so they may lie in the same place; not where a device is asked (:func:`asks`).
    """
    if numel > SHORT and asks(levels(0, 0).device, numel):
        begun = begin(levels, symbols(), alphabet, layout, chunk)
        return begun.finish(host.read(begun.told).tolist())
    known = encode(levels, numel, layout, chunk)
    if known is not None and numel > SEGMENT:
        return True, known
    # Where a few bytes may decide, both are written.
    plain = rans.encode(symbols(), alphabet, chunk=chunk)
    return (False, plain) if known is None or known.numel() >= plain.numel() else (True, known)


def _looked_at(numel: int) -> tuple[int, int]:
    """The part of a vector that decides whether the whole is tried: all of it, or of long ones a segment in the middle."""
    if numel <= MANY * SEGMENT:
        return 0, numel
    begin = numel // SEGMENT // 2 * SEGMENT
    return begin, begin + SEGMENT


def _code(levels: Tensor, layout: Tensor, chunk: rans.Chunk) -> Tensor:
    run = kernels.get(levels.device)
    out = buffers.empty(run.dither_max_bytes(levels.numel()), torch.uint8, levels.device)
    bits = 0 if chunk == "auto" else rans.chunk_bits(chunk)
    return out[: int(run.dither_encode(levels.to(torch.float32), 0.0, 1.0, RANS, bits, None, out, layout=layout)[0])]


def _within(layout: Tensor, begin: int, end: int) -> Tensor:
    """The layout of coordinates begin .. end."""
    size, columns, group, phase = layout.view(-1, 4).unbind(1)
    first = size.cumsum(0) - size
    start, stop = first.clamp(min=begin), (first + size).clamp(max=end)
    here = torch.stack((stop - start, columns, group, (phase + start - first) % columns), 1)
    return here[start < stop].flatten()

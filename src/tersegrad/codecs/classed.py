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
from tersegrad.core import buffers
from tersegrad.core.errors import CorruptMessage
from tersegrad.kernels.reference.dither import SHORT
from tersegrad.kernels.reference.rans import SEGMENT as SEGMENT
from tersegrad.kernels.reference.tried import RANS, classed_segments, within
from tersegrad.kernels.schema_codes import Means

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
        if not classed_segments(_code(found, within(layout, begin, end), chunk), SEGMENT):
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
    out: Tensor
    told: Tensor  # int64, (4,): the length of the plain code, which lies in ``out``; whether classes pay; two facts

    def finish(self, told: Sequence[int]) -> tuple[bool, Tensor] | None:
        """The shorter of both codes, classes (then True) or one table; None where it would fill ``out``. ``told``: what was asked."""
        length, classes, *_ = told
        levels, numel, known = self.levels, self.numel, None
        if classes > 0:
            known = _code(levels(0, numel), self.layout, self.chunk)
        elif classes < 0:
            known = encode(levels, numel, self.layout, self.chunk)
        # A segment that has classes by itself has them in the whole.
        if known is not None and (numel > SEGMENT or known.numel() < length):
            return (True, known) if known.numel() < self.out.numel() else None
        return (False, self.out[:length]) if length < self.out.numel() else None


def asks(device: torch.device, numel: int) -> bool:
    """Whether levels on ``device`` are coded by :func:`begin`: there are kernels for it, and short vectors are coded on the host."""
    return numel > SHORT and kernels.faster(device, "rans_encode_trying")


def begin(
    levels: Levels,
    codes: Tensor,
    means: Means,
    alphabet: int,
    layout: Tensor,
    chunk: rans.Chunk,
    head: Tensor,
    out: Tensor,
    steps: Tensor | None = None,
) -> Begun:
    """Levels, and bytes that mean them, to be coded the shorter way: with one table into ``out``, after the ``head`` of such messages."""
    numel, bits = codes.numel(), 0 if chunk == "auto" else rans.chunk_bits(chunk)
    run = kernels.get(codes.device).rans_encode_trying
    told = run(codes, means, alphabet, bits, head, out, layout, _looked_at(numel), steps)
    return Begun(levels, numel, layout, chunk, out, told)


def shorter(
    levels: Levels, symbols: Callable[[], Tensor], alphabet: int, layout: Tensor, numel: int, chunk: rans.Chunk
) -> tuple[bool, Tensor]:
    """The shorter of both codes: ``levels`` with classes (then True), or ``symbols`` with one table.

    Symbols are asked for once levels no longer are, so they may lie in the same place. Where a device is asked, :func:`begin` is for that.
    """
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

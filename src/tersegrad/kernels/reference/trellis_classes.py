"""Scale classes of trellis-coded segments in plain torch: their definition (``spec/wire.md``, "trellis").

Classes are looked for among the levels of a scalar quantiser, by the choice that Sparse Dithering makes, and each then has tables of its
own. Without dither, a class with many coordinates close to zero is *still*: they are rounded one by one to even integers, towards zero by
what that saves, and leave the state of their trellis alone. A trellis would lose there, for half of its states do not admit zero.
"""

from __future__ import annotations

import dataclasses
import struct

import torch
from torch import Tensor

from tersegrad.core.errors import CorruptMessage
from tersegrad.kernels.reference.classes import BLOCK, CLASSES, COUNTED, EXACT, Region, choose, log2_near, read_classes
from tersegrad.kernels.reference.lowering import log2_sixteenths

__all__ = ["Found", "find", "read"]

# Levels are at most this.
HIGHEST = 127
# A class is still where more than two eighths of its coordinates lie within an eighth of a level from zero, or more than seven eighths of
# its levels are zero.
EIGHTHS, CLOSE, ZEROS = 8, 2, 7
# Rounding adds half a level, less by so much for each bit by which a one is dearer than a zero, in 1/64 of a level: the least sum of the
# squared error and 3/8 of a squared step for each bit. A bit of this kind counts up to the most.
HALF, PER_BIT, MOST_BITS = 32, 3, 8
# The same with ``rdo``: half a squared step for each bit, which counts in sixteenths.
FOURTH, MOST_SIXTEENTHS = 4, 112


@dataclasses.dataclass(frozen=True)
class Found:
    """Scale classes of a segment."""

    side: bytes  # what says which they are
    number: Tensor  # of every coordinate: which of the classes that have tables, int64
    still: tuple[bool, ...]  # by that number
    bits: float = 0.0  # that the levels are about to take
    adds: tuple[int, ...] = ()  # what rounding adds in still classes

    @property
    def first(self) -> list[int]:
        """The first table of every class, and the number of tables: two for each class that is not still."""
        at = [0]
        for still in self.still:
            at.append(at[-1] + (1 if still else 2))
        return at

    def of_each(self, values: list[int]) -> Tensor:
        """What every coordinate has by its class, int64."""
        return torch.tensor(values, device=self.number.device)[self.number]

    @property
    def still_each(self) -> Tensor:
        return self.of_each([int(s) for s in self.still]).bool()

    def moving(self) -> bytes:
        """A bit for each class that is not still."""
        used = struct.unpack_from("<H", self.side)[0]
        numbers = [c for c in range(CLASSES) if used >> c & 1]
        return struct.pack("<H", sum(1 << c for c, still in zip(numbers, self.still, strict=True) if not still))


def find(y: Tensor, unit: int, regions: list[Region], dithered: bool, rdo: bool) -> Found | None:
    """Classes of integers ``y`` that are rounded to multiples of ``unit``; None where none are worth telling."""
    level = torch.div(y + unit // 2, unit, rounding_mode="floor").clamp(-HIGHEST, HIGHEST)
    window = min((int(y.abs().max()) + unit // 2) // unit, HIGHEST)
    if window == 0 or (chosen := choose((level + window).to(torch.uint8), window, regions)) is None:
        return None
    side, number, counts, bits = chosen
    tables = counts.shape[0]
    if dithered:
        return Found(side, number.long(), (False,) * tables, bits)
    # Of the coordinates that were counted.
    n = y.numel()
    taken = torch.arange(n, device=y.device) // BLOCK % (COUNTED if n >= EXACT else 1) == 0
    here, near = number[taken].long(), y[taken].abs() < unit // EIGHTHS
    zero = level[taken] == 0
    every, close, zeros = (torch.bincount(h, minlength=tables) for h in (here, here[near], here[zero]))
    still = ((EIGHTHS * close > CLOSE * every) | (EIGHTHS * zeros > ZEROS * every)).tolist()
    return Found(side, number.long(), tuple(still), bits, tuple(_adds(row, window, rdo) for row in counts.tolist()))


def _adds(counts: list[int], window: int, rdo: bool) -> int:
    """What rounding adds in a still class with these counts."""
    zeros, ones = counts[window], counts[window - 1] + counts[window + 1]
    if rdo:
        dearer = MOST_SIXTEENTHS if not ones else log2_sixteenths(2 * zeros, ones) if 2 * zeros > ones else 0
        return HALF - min(dearer, MOST_SIXTEENTHS) // FOURTH
    return HALF - PER_BIT * (min(max(log2_near(2 * zeros, ones), 0), MOST_BITS) if ones else MOST_BITS)


def read(data: Tensor, regions: list[Region], dithered: bool) -> tuple[Found, int]:
    """The classes of a segment, and the bytes read."""
    head = 0 if dithered else 2
    if data.numel() < head + 2:
        raise CorruptMessage("the classes are cut short")
    moving, used = 0, struct.unpack("<H", bytes(data[head : head + 2].tolist()))[0]
    number, _, size = read_classes(data[head:], regions)
    if not dithered:
        moving = struct.unpack("<H", bytes(data[:2].tolist()))[0]
        if moving & ~used:
            raise CorruptMessage("a class without a table follows the trellis")
    still = tuple(not dithered and not moving >> c & 1 for c in range(CLASSES) if used >> c & 1)
    return Found(b"", number.long(), still), head + size

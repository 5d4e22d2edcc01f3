"""Where the chunks of a buffer lie: a public layout that follows from the spec alone (``spec/wire.md``, "Tiles").

A whole matrix is cut into tiles of at most ``side`` x ``side``: a dimension is cut into pieces of its largest divisor up to ``side``.
Of a tensor with more dimensions the last ones are joined until they reach ``side``, the others are joined too. A vector is cut into
runs of its largest divisor up to ``vector`` where that is asked for. Everything else, such as a shard of a matrix, is cut into runs of
``run`` coordinates (``side * side`` unless told), the last possibly shorter.

>>> from tersegrad.core.protocol import Piece, Spec
>>> regions(Spec((Piece((128, 192), 0, 24576), Piece((100,), 0, 100))), side=64, keep=64)
(Region(start=0, rows=128, cols=192, height=64, width=64, keep=64), Region(start=24576, rows=1, cols=100, height=1, width=100, keep=64))
"""

from __future__ import annotations

import dataclasses
import functools
import math

import torch
from torch import Tensor

from tersegrad.core.protocol import Piece, Spec


@dataclasses.dataclass(frozen=True)
class Region:
    """``rows`` x ``cols`` coordinates from ``start`` on, in tiles of ``height`` x ``width``, of each of which ``keep`` are sent."""

    start: int
    rows: int
    cols: int
    height: int
    width: int
    keep: int

    @property
    def numel(self) -> int:
        return self.rows * self.cols

    @property
    def size(self) -> int:
        """Coordinates of a tile."""
        return self.height * self.width

    @property
    def count(self) -> int:
        """Number of tiles."""
        return self.numel // self.size

    @property
    def places(self) -> int:
        """Coordinates that are sent of all tiles."""
        return self.count * self.keep


def divisor(n: int, most: int) -> int:
    """The largest divisor of ``n`` up to ``most``.

    >>> [divisor(n, 64) for n in (768, 50257, 100, 67)]
    [64, 29, 50, 1]
    """
    return next(k for k in range(min(n, most), 0, -1) if n % k == 0)


def matrix(shape: tuple[int, ...], side: int) -> tuple[int, int]:
    """A tensor of two or more dimensions as rows and columns.

    >>> matrix((64, 32, 3, 3), 64), matrix((8, 512, 128), 64), matrix((512, 10), 64)
    ((64, 288), (4096, 128), (512, 10))
    """
    at, cols = len(shape) - 1, shape[-1]
    while at > 1 and cols < side:
        at -= 1
        cols *= shape[at]
    return math.prod(shape[:at]), cols


@functools.lru_cache(maxsize=256)
def regions(spec: Spec, side: int, keep: int = 1, vector: int | None = None, run: int | None = None) -> tuple[Region, ...]:
    """The regions of a buffer, in its order; a tile keeps ``keep`` coordinates or all that it has."""
    found, at = [], 0
    for piece in spec.pieces:
        if piece.numel:
            found += [
                Region(at + start, *sizes, min(keep, sizes[2] * sizes[3]))
                for start, sizes in _cut(piece, side, vector, run or side * side)
            ]
        at += piece.numel
    return tuple(found)


def _cut(piece: Piece, side: int, vector: int | None, run: int) -> list[tuple[int, tuple[int, int, int, int]]]:
    """Start, rows, columns, height and width of the parts of a piece."""
    d, whole = piece.numel, piece.numel == math.prod(piece.shape)
    if whole and len(piece.shape) > 1:
        rows, cols = matrix(piece.shape, side)
        return [(0, (rows, cols, divisor(rows, side), divisor(cols, side)))]
    if whole and vector is not None:
        width = divisor(d, vector)
        return [(0, (d // width, width, 1, width))]
    runs, rest = divmod(d, run)
    first = [(0, (runs, run, 1, run))] if runs else []
    return first + ([(runs * run, (1, rest, 1, rest))] if rest else [])


@functools.lru_cache(maxsize=256)
def table(found: tuple[Region, ...]) -> Tensor:
    """Regions as the kernels want them: int64, six numbers each."""
    return torch.tensor([dataclasses.astuple(r) for r in found], dtype=torch.int64).reshape(-1)

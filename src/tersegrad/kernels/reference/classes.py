"""Scale classes in plain torch: the definition (``spec/wire.md``, "Scale classes").

Rows and columns of a gradient differ in scale by orders of magnitude. A segment may therefore say, in octaves, how large the levels of
its rows, columns or blocks of 64 are, and every coordinate takes the probability table of its class: 0 where all levels are zero,
else about 8 + log2 of the mean magnitude. What a row is follows from the layout, four numbers for every piece of the buffer.
"""

from __future__ import annotations

import dataclasses
import math
import struct
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from tersegrad.core.errors import CorruptMessage
from tersegrad.kernels.reference.rans import decode_block, encode_counted
from tersegrad.kernels.reference.rans_tables import rans_histogram, rans_write_tables

__all__ = ["Region", "Scales", "choose", "cut", "entropy", "log2_near", "read_classes"]

CLASSES, OCTAVES = 16, 16
# How the classes of a region are told.
ONE, ROWS, GRID, BLOCKS = 0, 1, 2, 3
# Symbols of scales: 0 is silent, MIDDLE the mean of the region, others octaves from there. Likewise a base of MEAN is a mean of one.
MIDDLE, MEAN, TOP_BASE = 8, 16, 31
BLOCK = 64
# Shorter segments have no classes, longer ones than EXACT count one step of 64 in COUNTED.
SHORTEST, EXACT, COUNTED = 512, 1 << 16, 8
FEW_ROWS = 4
SATURATED = 127
SIDE_CHUNK = 14
# Shares that a model or a count has to save: classes at all, columns beside rows, classes when counted.
WORTH_COUNTING, WORTH_COLUMNS, WORTH_SENDING = 0.98, 0.97, 0.99


@dataclasses.dataclass(frozen=True)
class Region:
    """Consecutive coordinates of one tensor: rows of ``columns`` coordinates, the first one from ``phase`` on."""

    count: int
    columns: int
    group: int  # neighbours in a row that share the scale of a column
    phase: int

    @property
    def rows(self) -> int:
        return -(-(self.phase + self.count) // self.columns)

    def scales(self, mode: int) -> tuple[int, int]:
        """How many rows or blocks, and how many columns, tell their scale."""
        if mode == BLOCKS:
            return -(-self.count // BLOCK), 0
        return (self.rows if mode else 0), (self.columns // self.group if mode == GRID else 0)

    def row_of(self, device: torch.device) -> Tensor:
        return (torch.arange(self.count, device=device) + self.phase) // self.columns

    def column_of(self, device: torch.device) -> Tensor:
        return (torch.arange(self.count, device=device) + self.phase) % self.columns // self.group

    def block_of(self, device: torch.device) -> Tensor:
        return torch.arange(self.count, device=device) // BLOCK


def cut(layout: list[list[int]], start: int, stop: int) -> list[Region]:
    """The regions of coordinates start..stop; ``layout`` has numel, columns, group and phase of every piece."""
    regions, at = [], 0
    for numel, columns, group, phase in layout:
        begin, end = max(start, at), min(stop, at + numel)
        if begin < end:
            regions.append(Region(end - begin, columns, group, (phase + begin - at) % columns))
        at += numel
    return regions


# Which classes


@dataclasses.dataclass(frozen=True)
class Scales:
    """What a segment says about scales: mode and base of each region, the octaves, and whether each is a column's."""

    modes: list[tuple[int, int]]
    octaves: Tensor  # uint8
    columns: Tensor  # uint8, 0 or 1

    def classes(self, regions: list[Region]) -> Tensor:
        """The class of every coordinate, uint8."""
        device, parts, at = self.octaves.device, [], 0
        for region, (mode, base) in zip(regions, self.modes, strict=True):
            mine, columns = region.scales(mode)
            total = torch.full((region.count,), base - MEAN + MIDDLE, device=device)
            silent = torch.full((region.count,), base == 0, device=device)
            if mine:
                rows = self.octaves[at : at + mine].long()[(region.block_of if mode == BLOCKS else region.row_of)(device)]
                total, silent = total + rows - MIDDLE, silent | (rows == 0)
            if columns:
                others = self.octaves[at + mine : at + mine + columns].long()[region.column_of(device)]
                total, silent = total + others - MIDDLE, silent | (others == 0)
            at += mine + columns
            parts.append(total.clamp(1, CLASSES - 1).masked_fill(silent, 0).to(torch.uint8))
        return torch.cat(parts)

    def tobytes(self) -> bytes:
        data = bytes(mode << 5 | base for mode, base in self.modes)
        body = torch.empty(self.octaves.numel() + 16, dtype=torch.uint8, device=self.octaves.device)
        counts = rans_histogram(self.octaves, OCTAVES, self.columns, 2, False)
        return data + _bytes(body[: encode_counted(self.octaves, OCTAVES, self.columns, 2, counts, SIDE_CHUNK, body)])


def _bytes(data: Tensor) -> bytes:
    return bytes(data.cpu().numpy().tobytes())


def log2_near(a: int, b: int) -> int:
    """log2(a / b) to the nearest integer, nearly."""
    a, b = 92682 * a, b << 16
    e = a.bit_length() - b.bit_length()
    return e - (a << max(-e, 0) < b << max(e, 0))


def _added(values: Iterable[float]) -> float:
    """The sum, rounded after each number: ``sum`` of later Pythons is more precise than other languages'."""
    total = 0.0
    for value in values:
        total += value
    return total


def _bits(count: int, total: int) -> float:
    """About the bits of ``count`` levels with that sum of magnitudes: those of a discrete Laplace distribution."""
    if count <= 0 or total <= 0:
        return 0.0
    m = total / count
    root = math.sqrt(1 + m * m)
    return count * (math.log2(root + m) + m * math.log2((root + 1) / m))


def _side_bits(counts: list[int]) -> float:
    """About the bits of symbols with these counts."""
    total = sum(counts)
    return _added(4.0 + c * math.log2(total / c) for c in counts if c)


@dataclasses.dataclass(frozen=True)
class _Axis:
    """Scales of the rows, columns or blocks of a region, and what they hold together."""

    octaves: Tensor
    counts: list[int]  # coordinates, by octave
    totals: list[int]  # magnitudes
    side: float

    @staticmethod
    def of(size: Tensor, index: Tensor, number: int, total: int) -> _Axis:
        n = size.numel()
        sums = torch.zeros(number, dtype=torch.int64, device=size.device).index_add_(0, index, size).tolist()
        lengths = torch.bincount(index, minlength=number).tolist()
        octaves = [min(max(MIDDLE + log2_near(s * n, total * m), 1), OCTAVES - 1) if s else 0 for s, m in zip(sums, lengths)]
        counts, totals, numbers = [0] * OCTAVES, [0] * OCTAVES, [0] * OCTAVES
        for o, s, m in zip(octaves, sums, lengths):
            counts[o] += m
            totals[o] += s
            numbers[o] += 1
        return _Axis(torch.tensor(octaves, dtype=torch.uint8, device=size.device), counts, totals, _side_bits(numbers))

    def cost(self) -> float:
        return self.side + _added(_bits(n, t) for n, t in zip(self.counts, self.totals))

    def crossed(self, other: _Axis, count: int, total: int) -> float:
        """The cost of both together, as if they were independent."""
        pairs = [
            (n * m // count, s * t // total)
            for n, s in zip(self.counts, self.totals)
            for m, t in zip(other.counts, other.totals)
        ]
        return self.side + other.side + _added(_bits(n, t) for n, t in pairs)


def _describe(size: Tensor, region: Region) -> tuple[float, int, int, list[Tensor]]:
    """Estimated bits, mode, base and octaves of the rows (or blocks) and columns."""
    n, total = region.count, int(size.sum())
    if total == 0:
        return 0.0, ONE, 0, []
    base = min(max(MEAN + log2_near(total, n), 1), TOP_BASE)
    best = _bits(n, total), ONE, base, list[Tensor]()
    if n <= BLOCK:
        return best
    if region.rows < FEW_ROWS:
        blocks = _Axis.of(size, region.block_of(size.device), -(-n // BLOCK), total)
        return min(best, (blocks.cost(), BLOCKS, base, [blocks.octaves]), key=lambda b: b[0])
    rows = _Axis.of(size, region.row_of(size.device), region.rows, total)
    best = min(best, (rows.cost(), ROWS, base, [rows.octaves]), key=lambda b: b[0])
    columns = _Axis.of(size, region.column_of(size.device), region.columns // region.group, total)
    crossed = rows.crossed(columns, n, total)
    return (crossed, GRID, base, [rows.octaves, columns.octaves]) if crossed < WORTH_COLUMNS * best[0] else best


def entropy(counts: Tensor) -> float:
    rows = [(c, sum(row)) for row in counts.tolist() for c in row if c]
    return _added(c * math.log2(total / c) for c, total in rows)


def choose(symbols: Tensor, window: int, regions: list[Region]) -> tuple[bytes, Tensor, Tensor, float] | None:
    """Classes that are worth telling: their bytes, the table of every symbol, the counts for the tables, and the bits to come."""
    n, alphabet = symbols.numel(), 2 * window + 1
    size = (symbols.long() - window).abs()
    if n < SHORTEST or not regions:
        return None
    cost, at, modes, octaves, columns = (
        0.0,
        0,
        [],
        [size.new_empty(0, dtype=torch.uint8)],
        [size.new_empty(0, dtype=torch.uint8)],
    )
    for region in regions:
        bits, mode, base, axes = _describe(size[at : at + region.count], region)
        cost += bits + 8
        modes.append((mode, base))
        for k, axis in enumerate(axes):
            octaves.append(axis)
            columns.append(torch.full_like(axis, k))
        at += region.count
    if cost >= WORTH_COUNTING * _bits(n, int(size.sum())):
        return None
    scales = Scales(modes, torch.cat(octaves), torch.cat(columns))
    classes = scales.classes(regions).long()
    index = classes * alphabet + symbols.long()
    sampled = n >= EXACT
    taken = index.view(-1)[torch.arange(n, device=index.device) // BLOCK % COUNTED == 0] if sampled else index
    counts = torch.bincount(taken, minlength=CLASSES * alphabet).view(CLASSES, alphabet)
    share = n / taken.numel()
    alone, together = share * entropy(counts.sum(0, keepdim=True)), share * entropy(counts)
    tops = torch.zeros(CLASSES, dtype=torch.int64, device=size.device).scatter_reduce_(0, classes, size, "amax")
    used = torch.bincount(classes, minlength=CLASSES) > 0
    if sampled:
        reach = (torch.arange(alphabet, device=size.device) - window).abs()[None] <= tops[:, None]
        counts = counts + (reach & used[:, None])
    counts = counts[used]
    mask = sum(1 << c for c, u in enumerate(used.tolist()) if u)
    data = struct.pack("<H", mask) + scales.tobytes()
    if together + 8 * (len(data) + len(rans_write_tables(counts))) >= WORTH_SENDING * alone:
        return None
    return data, (used.cumsum(0) - 1)[classes].to(torch.uint8), counts, together


# Reading


def _fields(data: bytes, regions: list[Region]) -> Iterator[tuple[int, int]]:
    for byte, region in zip(data, regions, strict=True):
        mode, base = byte >> 5, byte & 31
        if mode > BLOCKS or (base == 0 and mode != ONE) or (mode == GRID and region.count < region.columns):
            raise CorruptMessage("a malformed description of classes")
        yield mode, base


def read_classes(data: Tensor, regions: list[Region]) -> tuple[Tensor, int, int]:
    """The table of every symbol, the number of tables, and the bytes read."""
    head = bytes(data[: 2 + len(regions)].tolist())
    if len(head) < 2 + len(regions):
        raise CorruptMessage("the classes are cut short")
    mask = struct.unpack_from("<H", head)[0]
    modes = list(_fields(head[2:], regions))
    kinds = [size for region, (mode, _) in zip(regions, modes) for size in region.scales(mode)]
    columns = (
        torch.arange(len(kinds), device=data.device)
        .remainder(2)
        .to(torch.uint8)
        .repeat_interleave(torch.tensor(kinds, dtype=torch.int64, device=data.device))
    )
    octaves = torch.empty(columns.numel(), dtype=torch.uint8, device=data.device)
    used = decode_block(data[len(head) :], OCTAVES, columns, 2, octaves)
    classes = Scales(modes, octaves, columns).classes(regions).long()
    known = torch.tensor([mask >> c & 1 for c in range(CLASSES)], device=data.device)
    if not bool(known[classes].all()):
        raise CorruptMessage("a class without a table")
    return (known.cumsum(0) - 1)[classes].to(torch.uint8), mask.bit_count(), len(head) + used

"""Scale classes on the device: where the regions of segments lie, and the kernels that choose classes."""

from __future__ import annotations

import dataclasses
import functools

import torch
from torch import Tensor

from tersegrad.core import host
from tersegrad.kernels.cuda.loader import launch
from tersegrad.kernels.reference.classes import BLOCK, CLASSES, OCTAVES
from tersegrad.kernels.reference.rans import SEGMENT, pieces

ENCODE, DECODE = "classes_encode.cu", "classes_decode.cu"
# As in classes.cuh and dither.cuh.
PLACES, TOLD, CHUNKS = 7, 2, 32
THREADS, SHARE = 256, 8
# Rows that are longer than any segment count as this long.
LONGEST_ROW = 1 << 20


@dataclasses.dataclass(frozen=True)
class Regions:
    """The regions of all segments: a table of them, and the first one of each segment and of the end."""

    table: Tensor  # (regions, PLACES) int64, then (segments + 1) int64
    number: int
    room: int  # for octaves, those of all segments together

    def to(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Both tables on ``device``, without waiting."""
        table = host.send(self.table, device)
        return table[: self.number * PLACES], table[self.number * PLACES :]


def regions_of(layout: Tensor | None, numel: int, device: torch.device) -> Regions:
    """Regions of a vector; one row without a layout, which must cover ``numel`` coordinates."""
    numbers = layout if layout is not None else torch.tensor([numel, max(numel, 1), 1, 0])
    return _cut(numbers.to(torch.int64).contiguous().numpy().tobytes(), numel, device.type)


@functools.lru_cache(maxsize=256)
def _cut(layout: bytes, numel: int, device: str) -> Regions:
    held = (
        torch.frombuffer(bytearray(layout), dtype=torch.int64).view(-1, 4) if layout else torch.empty(0, 4, dtype=torch.int64)
    )
    size, columns, group, phase = held.unbind(1)
    good = (size >= 0) & (group >= 1) & (columns >= 1) & (phase >= 0) & (phase < columns)
    if not bool(good.all()) or bool((columns % group).any()) or int(size.sum()) != numel:
        raise ValueError("the layout does not belong to this vector")
    ends = size.cumsum(0)
    segments = torch.arange(len(pieces(numel, SEGMENT))) * SEGMENT
    start = torch.cat([(ends - size)[size > 0], segments]).unique()
    count = torch.diff(start, append=torch.tensor([numel]))
    piece = torch.searchsorted(ends, start, right=True)
    columns, group = columns[piece], group[piece]
    phase = (phase[piece] + start - (ends - size)[piece]) % columns
    # Where a row ends is all that matters of one that is longer than a segment.
    phase = torch.where(columns > LONGEST_ROW, LONGEST_ROW - (columns - phase).clamp(max=LONGEST_ROW), phase)
    group, columns = torch.where(columns > LONGEST_ROW, 1, group), columns.clamp(max=LONGEST_ROW)
    rows = (phase + count + columns - 1) // columns
    lines = torch.where(count >= columns, rows + columns // group, rows)
    room = torch.maximum(lines, (count + BLOCK - 1) // BLOCK)
    table = torch.stack([start, count, columns, group, phase, rows, room.cumsum(0) - room], 1)
    firsts = torch.searchsorted(start, torch.cat([segments, torch.tensor([numel])]))
    both = torch.cat([table.flatten(), firsts])
    kept = host.empty(both.numel(), torch.int64, torch.device(device)).copy_(both)
    return Regions(kept, start.numel(), int(room.sum()))


def choose(
    regions: Regions,
    where: tuple[Tensor, Tensor],
    n: int,
    chunk: int,
    levels: Tensor,
    known: Tensor,
    tables: Tensor,
    words: Tensor,
    numbers: Tensor,
    states: Tensor,
    result: Tensor,
) -> Tensor:
    """Choose classes for the segments that gain from them, and code their chunks; what they say of classes."""
    segments, device = len(pieces(n, SEGMENT)), levels.device

    def empty(size: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(size, dtype=dtype, device=device)

    sizes = [segments * CLASSES * 256, segments * CLASSES, regions.room]
    counts, tops, sums = torch.zeros(sum(sizes), dtype=torch.int32, device=device).split(sizes)
    # Levels and classes are read and written sixteen at a time.
    octaves, symbols, classes = (empty(size, torch.uint8) for size in (regions.room, regions.room, n + 15))
    told, costs = empty(regions.number * TOLD, torch.int64), empty(regions.number, torch.float64)
    side, codes = (empty(segments * size, torch.int32) for size in (2 * OCTAVES, CLASSES * 256))
    # A chunk of octaves has at least 2^13 symbols if there are several, and at least 64 for each of its states.
    side_words, side_numbers = empty(regions.room, torch.int16), empty(regions.room // 8192 + 2 * segments, torch.int64)
    side_states = empty(regions.room // 64 + 64 * segments, torch.int32)
    described = empty(regions.number + regions.room // 2 + 8 * segments, torch.uint8)
    shared = segments * SHARE
    launch(ENCODE, "classes_sums", shared, THREADS, n, SHARE, levels, known, *where, sums, result)
    launch(ENCODE, "classes_describe", segments, THREADS, n, known, *where, sums, octaves, symbols, told, costs, side, result)
    launch(
        ENCODE, "classes_count", segments + shared, THREADS,
        n, SHARE, levels, known, *where, told, octaves, symbols, side, side_words, side_numbers, side_states, described,
        classes, counts, tops, result,
    )  # fmt: skip
    launch(
        ENCODE, "classes_decide", segments, THREADS,
        n, chunk, known, *where, counts, tops, described, tables, codes, result,
    )  # fmt: skip
    launch(
        ENCODE, "classes_encode_chunks", segments * CHUNKS // 4, 128,
        n, levels, classes, known, codes, words, numbers, states, result,
    )  # fmt: skip
    return described


@dataclasses.dataclass(frozen=True)
class Read:
    """What a message says of classes: the table of every coordinate, and what the symbols are found by."""

    masks: Tensor
    contexts: Tensor
    entries: Tensor
    only: Tensor


def read(regions: Regions, data: Tensor, count: int, known: Tensor, offsets: Tensor, words: Tensor, state: Tensor) -> Read:
    """Read the classes and the tables of segments that have them."""
    segments, device = len(pieces(count, SEGMENT)), data.device

    def empty(size: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(size, dtype=dtype, device=device)

    where = regions.to(device)
    told, octaves = empty(regions.number * TOLD, torch.int64), empty(regions.room, torch.uint8)
    tables = segments * CLASSES
    q, entries = empty(tables * 256, torch.int16), empty(tables * 256, torch.int32)
    found = Read(empty(segments, torch.int64), empty(count + 15, torch.uint8), entries, empty(tables, torch.uint8))
    launch(
        DECODE, "classes_read", segments, THREADS,
        data, count, known, *where, told, octaves, found.masks, q, entries, found.only, offsets, words, state,
    )  # fmt: skip
    launch(
        DECODE, "classes_fill", segments * SHARE, THREADS,
        count, SHARE, known, *where, told, octaves, found.masks, found.contexts, state,
    )  # fmt: skip
    return found


def decode_chunks(
    found: Read,
    data: Tensor,
    count: int,
    known: Tensor,
    offsets: Tensor,
    words: Tensor,
    marks: Tensor,
    out: Tensor,
    state: Tensor,
) -> None:
    """Decode the chunks of segments with classes."""
    launch(
        DECODE, "classes_chunks", len(pieces(count, SEGMENT)) * CHUNKS // 4, 128,
        data, count, known, found.masks, found.contexts, found.entries, offsets, words, marks, out, state,
    )  # fmt: skip

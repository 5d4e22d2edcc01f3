"""Scale classes on the device: where the regions of segments lie, and the kernels that choose classes."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import struct

import torch
from torch import Tensor

from tersegrad.kernels.cuda import scratch
from tersegrad.kernels.cuda.loader import Bytes, aside, join, launch
from tersegrad.kernels.reference.classes import BLOCK, CLASSES, OCTAVES
from tersegrad.kernels.reference.dither import USUAL_CHUNK
from tersegrad.kernels.reference.rans import SEGMENT, pieces

ENCODE, DECODE = "classes_encode.cu", "classes_decode.cu"
# As in classes.cuh and dither.cuh.
PLACES, TOLD, CHUNKS = 7, 2, 32
PLACES_OF_SEGMENT = 12
THREADS, SHARE = 256, 8
# Rows that are longer than any segment count as this long.
LONGEST_ROW = 1 << 20


@dataclasses.dataclass(frozen=True, eq=False)
class Regions:
    """The regions of all segments: a table of them, and the first one of each segment and of the end."""

    table: Tensor  # (regions, PLACES) int64, then (segments + 1) int64, on the device
    number: int
    room: int  # for octaves, those of all segments together
    where: tuple[int, int]  # the addresses of both


def regions_of(layout: Tensor | None, numel: int, device: torch.device) -> Regions:
    """Regions of a vector; one row without a layout, which must cover ``numel`` coordinates."""
    if layout is None:
        return _cut(struct.pack("4q", numel, max(numel, 1), 1, 0), numel, device)
    return _cut(layout.to(torch.int64).contiguous().numpy().tobytes(), numel, device)


@functools.lru_cache(maxsize=256)
def _cut(layout: bytes, numel: int, device: torch.device) -> Regions:
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
    kept = torch.cat([table.flatten(), firsts]).to(device)
    if device.type == "cuda":
        # Any stream may use it from now on.
        torch.cuda.current_stream(device).synchronize()
    return Regions(kept, start.numel(), int(room.sum()), (kept.data_ptr(), kept.data_ptr() + 8 * PLACES * start.numel()))


def summed(regions: Regions, segments: int) -> tuple[int, int, int]:
    """Bytes for counts, largest magnitudes and sums, which must be zero at first."""
    return 4 * segments * CLASSES * 256, 4 * segments * CLASSES, 4 * regions.room


@dataclasses.dataclass(frozen=True)
class Chosen:
    """What was chosen for segments: addresses in ``memory``."""

    memory: Tensor
    classes: int  # of every coordinate
    codes: int
    described: int


def search(
    regions: Regions, n: int, chunk: int, summed: list[int], levels: int, known: int, result: Tensor, tables: int = 0
) -> Chosen:
    """Choose classes for the segments that gain from them, and write their tables to ``tables`` (or nowhere)."""
    segments, number, room = len(pieces(n, SEGMENT)), regions.number, regions.room
    counts, tops, sums = summed
    # Classes are written sixteen at a time. A chunk of octaves has at least 2^13 symbols if there are several, and at least 64 for each of
    # its states.
    memory, places = scratch.empty(
        result.device, room, room, n + 15, 8 * number * TOLD, 8 * (number + segments), 8 * segments * OCTAVES, 4 * segments * CLASSES * 256,
        2 * room, 8 * (room // 8192 + 2 * segments), 4 * (room // 64 + 64 * segments), number + room // 2 + 8 * segments,
        0 if tables else segments * 8192,
    )  # fmt: skip
    octaves, symbols, classes, told, costs, side, codes, *side_words, described, own_tables = places
    shared, where = segments * SHARE, regions.where
    launch(ENCODE, "classes_sums", shared, THREADS, n, SHARE, levels, known, *where, sums, result)
    launch(ENCODE, "classes_describe", segments, THREADS, n, known, *where, sums, octaves, symbols, told, costs, side, result)
    # Where tables are written aside, so are octaves, and both are waited for; else there is something aside that is not.
    with aside() if tables else contextlib.nullcontext():
        launch(
            ENCODE, "classes_octaves", segments, 128,
            n, known, *where, told, symbols, side, *side_words, described, result,
        )  # fmt: skip
    launch(
        ENCODE, "classes_count", shared, THREADS, n, SHARE, levels, known, *where, told, octaves, classes, counts, tops, result
    )
    if tables:
        join()
    launch(
        ENCODE, "classes_decide", segments, THREADS,
        n, chunk, known, *where, counts, tops, described, tables or own_tables, codes, result,
    )  # fmt: skip
    return Chosen(memory, classes, codes, described)


def choose(
    regions: Regions,
    n: int,
    chunk: int,
    summed: list[int],
    levels: int,
    known: int,
    tables: int,
    words: int,
    numbers: int,
    states: int,
    result: Tensor,
) -> tuple[int, Tensor]:
    """Choose classes for the segments that gain from them, and code their chunks; what they say of classes, and the memory of that."""
    chosen = search(regions, n, chunk, summed, levels, known, result, tables)
    exponent = chunk or USUAL_CHUNK
    blocks = sum(-(-max(1, (size + (1 << exponent - 1)) >> exponent) // 4) for size in pieces(n, SEGMENT))
    with aside():
        launch(
            ENCODE, "classes_encode_chunks", blocks, 128,
            n, exponent, levels, chosen.classes, known, chosen.codes, words, numbers, states, result, spread=True,
        )  # fmt: skip
    return chosen.described, chosen.memory


@dataclasses.dataclass(frozen=True)
class Read:
    """What a message says of classes: the table of every coordinate, and what the symbols are found by. Addresses in ``memory``."""

    memory: Tensor
    masks: int
    contexts: int
    entries: int
    only: int


def read(
    regions: Regions,
    data: Bytes,
    count: int,
    known: int,
    offsets: int,
    words: int,
    state: Tensor,
    whose: int = 0,
    most: int = CLASSES,
) -> Read:
    """Read the classes and the tables, at most ``most``, of segments that have them; ``whose`` these are as in classes_decode.cu."""
    segments, where = len(pieces(count, SEGMENT)), regions.where
    tables = segments * most
    memory, (told, octaves, q, masks, contexts, entries, only) = scratch.empty(
        state.device,
        8 * regions.number * TOLD,
        regions.room,
        2 * tables * 256,
        8 * segments,
        count + 15,
        4 * tables * 256,
        tables,
    )
    launch(
        DECODE, "classes_read", segments, THREADS,
        data, count, whose, most, known, *where, told, octaves, masks, q, entries, only, offsets, words, state,
    )  # fmt: skip
    launch(
        DECODE, "classes_fill", segments * SHARE, THREADS,
        count, whose, SHARE, known, *where, told, octaves, masks, contexts, state,
    )  # fmt: skip
    return Read(memory, masks, contexts, entries, only)


def decode_chunks(
    found: Read, data: Bytes, count: int, known: int, offsets: int, words: int, marks: int, out: Tensor, state: Tensor
) -> None:
    """Decode the chunks of segments with classes."""
    segments = len(pieces(count, SEGMENT))
    share = min(CHUNKS // 4, 1 << max(scratch.BLOCKS // (4 * segments), 1).bit_length() - 1)
    launch(
        DECODE, "classes_chunks", segments * share + CHUNKS // 4 - share, 128,
        data, count, share, known, found.masks, found.contexts, found.entries, offsets, words, marks, out, state, spread=True,
    )  # fmt: skip

"""Exactly k of every chunk, in plain torch: the definition of chunk sets (``spec/wire.md``, "Chunk sets").

Tables are made in float64, one correctly rounded operation after another, so that all machines agree. The code itself runs on Python
integers.
"""

from __future__ import annotations

import functools
import math
import struct
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from tersegrad.core.errors import CorruptMessage
from tersegrad.core.numbers import float32
from tersegrad.kernels.reference.rounding import block_sum, ordered_sum, sum_squares

__all__ = ["chunk_bins", "chunk_carry", "chunk_choose", "chunk_decode", "chunk_encode", "chunk_scatter"]

STREAM = 2048  # places of a stream, at least, if there are so many
LOWEST = 1 << 31
PAIR = 4096  # two chosen ones of a node of up to so many places are one digit


class Area(NamedTuple):
    """One region of a layout."""

    start: int
    rows: int
    cols: int
    height: int
    width: int
    keep: int

    @property
    def size(self) -> int:
        return self.height * self.width

    @property
    def chunks(self) -> int:
        return self.rows * self.cols // self.size

    def tiles(self, x: Tensor) -> Tensor:
        """The part of ``x`` as a view (rows of tiles, tiles in a row, height, width)."""
        part = x[self.start : self.start + self.rows * self.cols]
        return part.view(self.rows // self.height, self.height, self.cols // self.width, self.width).transpose(1, 2)


def areas(regions: Tensor) -> list[Area]:
    return [Area(*row) for row in regions.reshape(-1, 6).tolist()]


def chunk_choose(x: Tensor, regions: Tensor, places: Tensor, values: Tensor) -> Tensor:
    """Whether all of ``x`` is finite, 0-d; only then the outputs are defined."""
    at = 0
    for area in areas(regions):
        tiles = area.tiles(x).reshape(area.chunks, area.size)
        keys = tiles.view(torch.int32) & 0x7FFFFFFF
        order = torch.sort(keys, dim=1, descending=True, stable=True).indices[:, : area.keep]
        chosen = order.sort(dim=1).values
        end = at + area.chunks * area.keep
        places[at:end] = chosen.reshape(-1).to(places.dtype)
        values[at:end] = tiles.gather(1, chosen).reshape(-1)
        at = end
    return torch.isfinite(x).all()


def chunk_carry(x: Tensor, carry: Tensor, decay: float, out: Tensor, regions: Tensor, places: Tensor, values: Tensor) -> Tensor:
    """The sum into ``out``, and whether all of it is finite."""
    return chunk_choose(torch.mul(carry, decay, out=out).add_(x), regions, places, values)


def chunk_scatter(places: Tensor, values: Tensor, regions: Tensor, out: Tensor, weight: float | None = None) -> None:
    at = 0
    for area in areas(regions):
        end = at + area.chunks * area.keep
        where = places[at:end].reshape(area.chunks, area.keep).long()
        shares = values[at:end].reshape(area.chunks, area.keep)
        tiles = area.tiles(out)
        if weight is None:
            dense = torch.zeros(area.chunks, area.size, dtype=out.dtype, device=out.device).scatter_(1, where, shares)
        else:
            dense = tiles.reshape(area.chunks, area.size)
            shares = shares * float32(weight)
            dense = dense.scatter(1, where, dense.gather(1, where) + shares)
        tiles.copy_(dense.reshape(tiles.shape))
        at = end


def chunk_bins(values: Tensor, counts: Tensor, bins: int, chosen: Tensor, stands: Tensor, filled: Tensor) -> None:
    largest, at = torch.finfo(torch.float32).max, 0
    for tensor, number in enumerate(counts.tolist()):
        part, cells = values[at : at + number], slice(tensor * bins, (tensor + 1) * bins)
        centre = (ordered_sum(part, lambda v: v) / number).float()
        around = (part - centre).clamp_(-largest, largest)
        spread = (sum_squares(around) / (number - 1)).sqrt()
        width = (6 * spread / bins).float()
        width = torch.where(torch.isfinite(width) & (width > 0), width, 1.0)
        nearest = torch.div(around, width).add_(bins // 2).round_().clamp_(0, bins - 1).to(torch.uint8)
        each = nearest == torch.arange(bins, device=values.device).unsqueeze(1)
        sums = block_sum(torch.where(each, around, 0.0).reshape(-1), number, lambda v: v)
        chosen[at : at + number] = nearest
        filled[cells] = each.sum(1)
        means = (sums / filled[cells].clamp(min=1)).float()
        stands[cells] = (means + centre).clamp_(-largest, largest)
        at += number


class Split(NamedTuple):
    """How many of a node's chosen ones lie in its left half: the least number, and starts in units of 2^-16."""

    first: int
    starts: tuple[int, ...]


@functools.lru_cache(maxsize=1 << 15)
def split(size: int, c: int) -> Split:
    left, right = (size + 1) // 2, size // 2
    first, last = max(0, c - right), min(c, left)
    mode = min(max((c + 1) * (left + 1) // (size + 2), first), last)
    weights = {mode: 1.0}
    for a in range(mode + 1, last + 1):
        weights[a] = weights[a - 1] * float((left - a + 1) * (c - a + 1)) / float(a * (right - c + a))
    for a in range(mode - 1, first - 1, -1):
        weights[a] = weights[a + 1] * float((a + 1) * (right - c + a + 1)) / float((left - a) * (c - a))
    total = 0.0
    for a in range(first, last + 1):
        total += weights[a]
    scale = float(65536 - len(weights)) / total
    frequencies = [1 + int(weights[a] * scale) for a in range(first, last + 1)]
    frequencies[mode - first] += 65536 - sum(frequencies)
    starts = [0]
    for f in frequencies:
        starts.append(starts[-1] + f)
    return Split(first, tuple(starts))


def streams(regions: Tensor) -> list[list[tuple[Area, int, int]]]:
    """What each stream holds: (region, number of chunks, the first of their places among all). Chunks sent whole are in none."""
    found: list[list[tuple[Area, int, int]]] = []
    held, first = STREAM, 0
    for area in areas(regions):
        chunk = 0
        while area.keep < area.size and chunk < area.chunks:
            if held >= STREAM:
                found.append([])
                held = 0
            here = min(area.chunks - chunk, -(-(STREAM - held) // area.keep))
            found[-1].append((area, here, first + chunk * area.keep))
            chunk += here
            held += here * area.keep
        first += area.chunks * area.keep
    return found


class Node(NamedTuple):
    """Places ``base`` .. ``base + size`` of a chunk, with ``c`` chosen ones, the first of which is number ``place`` of the chunk."""

    base: int
    size: int
    c: int
    place: int

    @property
    def waits(self) -> bool:
        """Whether its places are a digit; it is not split."""
        return self.c == 1 or (self.c == 2 and self.size <= PAIR)

    @property
    def choices(self) -> int:
        """How many digits there are."""
        return self.size if self.c == 1 else self.size * (self.size - 1) // 2


def _halve(
    size: int, keep: int, count: Callable[[Node], int], waiting: Callable[[Node], None], whole: Callable[[Node], None]
) -> None:
    """Go through the nodes of a chunk; ``count`` tells how many lie in the left half."""
    stack = []

    def look(node: Node) -> None:
        if node.waits:
            waiting(node)
        elif node.c == node.size > 0:
            whole(node)
        elif node.c:
            stack.append(node)

    look(Node(0, size, keep, 0))
    while stack:
        node = stack.pop()
        c, left = count(node), (node.size + 1) // 2
        halves = Node(node.base, left, c, node.place), Node(node.base + left, node.size // 2, node.c - c, node.place + c)
        at = len(stack)
        for half in halves:
            look(half)
        # Both are looked at from left to right, and the left one is split first.
        stack[at:] = stack[at:][::-1]


def _write(runs: list[tuple[Area, int, int]], places: list[int]) -> list[int]:
    """The words of one stream, in the order of reading."""
    steps: list[tuple[int, int]] = []  # start and frequency
    digits: tuple[list[tuple[int, int]], ...] = ([], [])  # value and choices, of nodes with one and with two
    for area, chunks, first in runs:
        for chunk in range(chunks):
            at = first + chunk * area.keep
            mine = places[at : at + area.keep]
            if any(b <= a for a, b in zip([-1, *mine], [*mine, area.size])):
                raise ValueError("places must increase within their chunk")

            def count(node: Node, mine: list[int] = mine) -> int:
                border = node.base + (node.size + 1) // 2
                c = sum(p < border for p in mine[node.place : node.place + node.c])
                found = split(node.size, node.c)
                start, end = found.starts[c - found.first : c - found.first + 2]
                steps.append((start, end - start))
                return c

            def waiting(node: Node, mine: list[int] = mine) -> None:
                low, *high = (p - node.base for p in mine[node.place : node.place + node.c])
                digits[node.c - 1].append((low + sum(h * (h - 1) // 2 for h in high), node.choices))

            _halve(area.size, area.keep, count, waiting, lambda node: None)
    state, words = 1, []
    for value, choices in (*reversed(digits[1]), *reversed(digits[0])):
        if state >= (LOWEST + choices - 1) // choices << 32:
            words.append(state & 0xFFFFFFFF)
            state >>= 32
        state = state * choices + value
    for start, f in reversed(steps):
        if state >= f << 47:
            words.append(state & 0xFFFFFFFF)
            state >>= 32
        state = (state // f << 16) + state % f + start
    words.append(state & 0xFFFFFFFF)
    if state >> 32:
        words.append(state >> 32)
    return words[::-1]


def chunk_encode(places: Tensor, regions: Tensor, numel: int, out: Tensor) -> Tensor:
    """Chunk sets into ``out``; the number of bytes, int64, 0-d."""
    listed = places.tolist()
    written = [_write(runs, listed) for runs in streams(regions)]
    data = struct.pack(f"<{max(0, len(written) - 1)}H", *(len(w) for w in written[:-1]))
    data += b"".join(struct.pack(f"<{len(w)}I", *w) for w in written)
    if data:
        out[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(out.device)
    return torch.tensor(len(data), device=out.device)


class _Reader:
    """The state of one stream."""

    def __init__(self, words: Iterator[int], count: int) -> None:
        self._words, self._left, self.state = words, count, 0
        if not count:
            raise CorruptMessage("a stream of chunk sets has no words")
        self._fill(LOWEST)

    def _fill(self, least: int) -> None:
        if self.state < least and self._left:
            self._left -= 1
            self.state = self.state << 32 | next(self._words)

    def split(self, found: Split) -> int:
        self._fill(LOWEST)
        slot = self.state & 0xFFFF
        j = next(j for j, end in enumerate(found.starts[1:]) if slot < end)
        self.state = (found.starts[j + 1] - found.starts[j]) * (self.state >> 16) + slot - found.starts[j]
        return found.first + j

    def digit(self, size: int) -> int:
        # The least state that a writer leaves behind a digit.
        self._fill(-(-LOWEST // size) * size)
        self.state, value = divmod(self.state, size)
        return value

    def finish(self) -> None:
        if self.state != 1 or self._left:
            raise CorruptMessage("a stream of chunk sets does not end where it should")


def _read(reader: _Reader, runs: list[tuple[Area, int, int]], places: list[int]) -> None:
    # Nodes with one and with two, and where their places stand.
    last: tuple[list[tuple[Node, int]], ...] = ([], [])
    for area, chunks, first in runs:
        for chunk in range(chunks):
            at = first + chunk * area.keep

            def whole(node: Node, at: int = at) -> None:
                places[at + node.place : at + node.place + node.c] = range(node.base, node.base + node.c)

            def waiting(node: Node, at: int = at) -> None:
                last[node.c - 1].append((node, at + node.place))

            _halve(area.size, area.keep, lambda node: reader.split(split(node.size, node.c)), waiting, whole)
    for node, at in last[0]:
        places[at] = node.base + reader.digit(node.choices)
    for node, at in last[1]:
        rank = reader.digit(node.choices)
        high = (1 + math.isqrt(1 + 8 * rank)) // 2
        places[at : at + 2] = (node.base + rank - high * (high - 1) // 2, node.base + high)
    reader.finish()


def chunk_decode(data: Tensor, regions: Tensor, numel: int, places: Tensor) -> None:
    raw, found = bytes(data.cpu().numpy().tobytes()), streams(regions)
    listed = [0] * places.numel()
    at = 0
    for area in areas(regions):
        if area.keep == area.size:
            listed[at : at + area.chunks * area.size] = [*range(area.size)] * area.chunks
        at += area.chunks * area.keep
    head = 2 * max(0, len(found) - 1)
    if len(raw) < head:
        raise CorruptMessage("the lengths of the streams are missing")
    lengths = list(struct.unpack_from(f"<{head // 2}H", raw))
    rest, odd = divmod(len(raw) - head - 4 * sum(lengths), 4)
    if rest < 0 or odd or (rest and not found):
        raise CorruptMessage("the streams do not fill the message")
    at = head
    for runs, length in zip(found, [*lengths, rest]):
        words = struct.unpack_from(f"<{length}I", raw, at)
        _read(_Reader(iter(words), length), runs, listed)
        at += 4 * length
    places.copy_(torch.tensor(listed, dtype=places.dtype))

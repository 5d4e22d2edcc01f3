"""rANS blocks whose tables depend on the state of a trellis, in plain torch: the definition of their decoder.

The bytes are those of any rANS block (``kernels/reference/rans.py``), and so is the encoder. A decoder learns the table of a symbol
only when it knows the state that the symbol before it in the same lane led to, so it goes through both together.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor

from tersegrad.core.errors import CorruptMessage
from tersegrad.kernels.reference.rans import FIRST, LONGEST, RAW, SHORTEST, _from_little_endian, _Layout
from tersegrad.kernels.reference.rans import decode_block as decode_plain
from tersegrad.kernels.reference.rans_tables import BITS, TOTAL, rans_read_tables
from tersegrad.kernels.reference.trellis_code import GENERATORS, Grid


@dataclasses.dataclass(frozen=True)
class Known:
    """What a decoder knows of every coordinate of a block beforehand."""

    contexts: Tensor  # (count, 2) uint8: the table for either z0
    flips: Tensor | None  # (count, 2) uint8: for either z0, what z1 is besides the lowest bit of the symbol
    still: Tensor | None  # bool: leaves the state alone


def decode_block(data: Tensor, alphabet: int, num_contexts: int, known: Known, run: int, states: int, out: Tensor) -> int:
    """Fill ``out`` with symbols; the number of bytes read. Trellises start anew every 2^``run`` symbols."""
    form = int(data[0]) if data.numel() else 0
    if form == RAW:
        return decode_plain(data, alphabet, None, 1, out)
    if not SHORTEST <= form <= LONGEST or run > form:
        raise CorruptMessage(f"a trellis-coded block starts with {RAW} (raw) or the log2 of its chunk length, not with {form}")
    frequencies, used = rans_read_tables(data[1:], alphabet, num_contexts)
    head = 1 + used
    if not bool(((frequencies > 0) & (frequencies < TOTAL)).any()):
        _fill_certain(frequencies, known, run, states, out)
        return head
    return head + _decode_chunks(data[head:], frequencies, known, form, run, states, out)


def _fill_certain(frequencies: Tensor, known: Known, run: int, states: int, out: Tensor) -> None:
    """Every table has one symbol."""
    only = (frequencies == TOTAL).int().argmax(1)
    layout = _Layout(out.numel(), 2, LONGEST)
    grid = Grid(out.numel(), layout.lanes, 1 << run)
    walk = _Walk(states, (grid.runs * grid.lanes,), known, grid.steps_first, 0)
    symbols = torch.zeros(walk.tables[0].shape, dtype=torch.uint8, device=out.device)
    for t in range(symbols.shape[0]):
        symbol = only[walk.table(t)]
        symbols[t] = symbol.to(torch.uint8)
        walk.step(t, symbol)
    out.copy_(grid.flat(symbols))


class _Walk:
    """The states of many trellises, and what is known of the coordinates, laid out with the steps along one axis."""

    def __init__(self, states: int, shape: tuple[int, ...], known: Known, lay: Callable[[Tensor], Tensor], axis: int) -> None:
        self.g0, self.g1 = GENERATORS[states]
        self.state = torch.zeros(shape, dtype=torch.int64, device=known.contexts.device)

        def steps(values: Tensor) -> Tensor:
            return lay(values.contiguous()).transpose(0, axis)

        self.tables = [steps(known.contexts[:, z0]).long() for z0 in (0, 1)]
        self.flips = None if known.flips is None else [steps(known.flips[:, z0]).long() for z0 in (0, 1)]
        self.moves = None if known.still is None else ~steps(known.still)

    def table(self, t: int) -> Tensor:
        return torch.where(self.state & 1 == 1, self.tables[1][t], self.tables[0][t])

    def step(self, t: int, symbol: Tensor) -> None:
        odd = self.state & 1
        z1 = symbol & 1
        if self.flips is not None:
            z1 = z1 ^ torch.where(odd == 1, self.flips[1][t], self.flips[0][t])
        after = self.state >> 1 ^ self.g1 * z1 ^ self.g0 * odd
        self.state = after if self.moves is None else torch.where(self.moves[t], after, self.state)


def _decode_chunks(data: Tensor, frequencies: Tensor, known: Known, chunk: int, run: int, states: int, out: Tensor) -> int:
    device, alphabet = data.device, frequencies.shape[1]
    layout = _Layout(out.numel(), alphabet, chunk)
    chunks, lanes = len(layout.lengths), layout.lanes
    at = 4 * chunks
    if data.numel() < at:
        raise CorruptMessage("the chunk table is cut short")
    word_counts = _from_little_endian(data[:at], 4).tolist()
    state = torch.empty((chunks, lanes), dtype=torch.int64, device=device)
    words, begins, position = [], [], 0
    for c, (length, count) in enumerate(zip(layout.coded, word_counts, strict=True)):
        if count > length or data.numel() - at < 4 * lanes + 2 * count:
            raise CorruptMessage(f"chunk {c} announces {count} words, more than there can be")
        state[c] = _from_little_endian(data[at : at + 4 * lanes], 4)
        words.append(_from_little_endian(data[at + 4 * lanes : at + 4 * lanes + 2 * count], 2))
        begins.append(position)
        position += count
        at += 4 * lanes + 2 * count
    stream = torch.cat([*words, torch.zeros(1, dtype=torch.int64, device=device)])
    begin = torch.tensor(begins, device=device)
    end = begin + torch.tensor(word_counts, device=device)
    f_of = frequencies.long().flatten()
    start_of = (frequencies.long().cumsum(1) - frequencies.long()).flatten()
    cells = torch.arange(f_of.numel(), device=device).repeat_interleave(f_of)
    active = layout.active(device)
    symbols = torch.zeros(active.shape, dtype=torch.uint8, device=device)
    walk = _Walk(states, (chunks, lanes), known, layout.grid, 1)
    good = (state >= FIRST).all()
    for t in range(active.shape[1]):
        if lanes * t % (1 << run) == 0:
            walk.state.zero_()
        on = active[:, t]
        slot = state & (TOTAL - 1)
        cell = cells[slot + walk.table(t) * TOTAL]
        symbol = cell % alphabet
        symbols[:, t] = symbol.to(torch.uint8)
        walk.step(t, symbol)
        state = torch.where(on, f_of[cell] * (state >> BITS) + slot - start_of[cell], state)
        needs = state < FIRST
        rank = needs.cumsum(1)
        place = (begin[:, None] + rank - 1).clamp(0, stream.numel() - 1)
        state = torch.where(needs, state << 16 | stream[place], state)
        begin = begin + rank[:, -1]
        good = good & (begin <= end).all()
        begin = torch.minimum(begin, end)
    free = state - FIRST
    raw = free[:, None] >> layout.shifts(device) & (1 << layout.width) - 1
    fits = (free >> layout.rows * layout.width == 0).all() & (raw < alphabet).all()
    if not bool(good & (begin == end).all() & fits):
        raise CorruptMessage("the words do not lead every lane back to a first state")
    for c, length in enumerate(layout.coded):
        out[c * layout.size : c * layout.size + length] = symbols[c].flatten()[:length]
    out[layout.raw_places(device)] = raw.to(torch.uint8)
    return at

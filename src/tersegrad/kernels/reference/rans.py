"""Interleaved rANS in plain torch: the definition. All chunks and their lanes advance together, one step at a time."""

from __future__ import annotations

import torch
from torch import Tensor

from tersegrad.core.errors import CorruptMessage
from tersegrad.kernels.reference.rans_tables import (
    BITS,
    TOTAL,
    checked_contexts,
    rans_histogram,
    rans_read_tables,
    rans_write_tables,
)

__all__ = ["rans_decode", "rans_encode"]

LANES = 64
FIRST = 1 << 16  # the smallest state; the last symbols of a lane are what the encoder adds to it
SEGMENT = 1 << 18  # coordinates that share tables and scales where a vector is cut into segments
RAW = 1  # the first byte of a raw block; that of a coded one is the log2 of its chunk length
SHORTEST, LONGEST, USUAL = 14, 18, 16


def pieces(count: int, size: int) -> list[int]:
    """``count`` cut into pieces of ``size``, except the last, which takes the rest: from half a piece to one and a half."""
    number = (1 if count else 0) if count < size else (count + size // 2) // size
    return [size] * (number - 1) + [count - size * (number - 1)] if number else []


def lanes_of(count: int) -> int:
    """The lanes of a block: 64 from 2^14 symbols on; below, where their states would weigh, 512 to 1023 symbols each."""
    return LANES if count >= 1 << 14 else 1 << max(0, count.bit_length() - 10)


def raw_rows(length: int, lanes: int, alphabet: int) -> int:
    """How many symbols of every lane of a chunk travel in the 16 bits that its first state leaves free."""
    rows = 16 // raw_bits(alphabet)
    return rows if length >= lanes * (rows + 1) else 0


def raw_bits(alphabet: int) -> int:
    return (alphabet - 1).bit_length()


# Chunks


class _Layout:
    """How the symbols of a block lie in chunks and lanes. All chunks have the same number of raw rows."""

    def __init__(self, count: int, alphabet: int, chunk: int) -> None:
        self.size = 1 << chunk
        self.lengths = pieces(count, self.size)
        self.lanes = lanes_of(count)
        self.rows = raw_rows(self.lengths[-1], self.lanes, alphabet)
        self.coded = [length - self.rows * self.lanes for length in self.lengths]
        self.width = raw_bits(alphabet)

    def grid(self, values: Tensor) -> Tensor:
        """The coded symbols, (chunks, steps, lanes), padded with zeros."""
        steps = -(-max(self.coded) // self.lanes)
        padded = values.new_zeros(len(self.coded), steps * self.lanes)
        for c, length in enumerate(self.coded):
            padded[c, :length] = values[c * self.size : c * self.size + length]
        return padded.view(len(self.coded), steps, self.lanes)

    def active(self, device: torch.device) -> Tensor:
        steps = -(-max(self.coded) // self.lanes)
        index = torch.arange(steps * self.lanes, device=device)
        return (index < torch.tensor(self.coded, device=device)[:, None]).view(len(self.coded), steps, self.lanes)

    def raw_places(self, device: torch.device) -> Tensor:
        """Where the raw symbols stand in the block, (chunks, rows, lanes)."""
        row = torch.arange(self.rows, device=device)[:, None] * self.lanes
        lane = torch.arange(self.lanes, device=device)
        places = []
        for c, coded in enumerate(self.coded):
            # The raw symbols begin at lane `coded mod lanes`.
            places.append(c * self.size + coded + row + (lane - coded) % self.lanes)
        return torch.stack(places)

    def shifts(self, device: torch.device) -> Tensor:
        return (self.width * torch.arange(self.rows, device=device))[:, None]

    def first_states(self, symbols: Tensor) -> Tensor:
        raw = symbols[self.raw_places(symbols.device)].long()
        return FIRST + (raw << self.shifts(symbols.device)).sum(1)


def _little_endian(values: Tensor, width: int) -> Tensor:
    return (values[..., None] >> (8 * torch.arange(width, device=values.device)) & 255).to(torch.uint8).flatten()


def _from_little_endian(data: Tensor, width: int) -> Tensor:
    return (data.view(-1, width).long() << (8 * torch.arange(width, device=data.device))).sum(1)


def _encode_chunks(symbols: Tensor, frequencies: Tensor, contexts: Tensor | None, chunk: int) -> Tensor:
    device, alphabet = symbols.device, frequencies.shape[1]
    layout = _Layout(symbols.numel(), alphabet, chunk)
    index = layout.grid(symbols.long() if contexts is None else symbols.long() + contexts.long() * alphabet)
    active = layout.active(device)
    start_of = (frequencies.long().cumsum(1) - frequencies.long()).flatten()
    # A padded symbol has all of the slots, which leaves the state as it is.
    f = frequencies.long().flatten()[index].masked_fill_(~active, TOTAL)
    start = start_of[index].masked_fill_(~active, 0)
    state = layout.first_states(symbols)
    states = torch.empty_like(index)
    emitted = torch.empty_like(active)
    for t in range(index.shape[1] - 1, -1, -1):
        states[:, t] = state
        emits = torch.ge(state >> 20, f[:, t], out=emitted[:, t])
        state = torch.where(emits, state >> 16, state)
        quotient = torch.div(state, f[:, t], rounding_mode="floor")
        state = quotient * (TOTAL - f[:, t]) + state + start[:, t]
    words = states & 0xFFFF
    parts = [_little_endian(emitted.sum((1, 2)), 4)]
    for c in range(len(layout.lengths)):
        parts.append(_little_endian(state[c], 4))
        parts.append(_little_endian(words[c][emitted[c]], 2))
    return torch.cat(parts)


def _decode_chunks(data: Tensor, frequencies: Tensor, contexts: Tensor | None, chunk: int, out: Tensor) -> int:
    device, alphabet = data.device, frequencies.shape[1]
    layout = _Layout(out.numel(), alphabet, chunk)
    chunks, lanes = len(layout.lengths), layout.lanes
    at = 4 * chunks
    if data.numel() < at:
        raise CorruptMessage("the chunk table is cut short")
    word_counts = _from_little_endian(data[:at], 4).tolist()
    state = torch.empty((chunks, lanes), dtype=torch.int64, device=device)
    words, begins = [], []
    position = 0
    for c, (length, count) in enumerate(zip(layout.coded, word_counts)):
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
    # By slot, (contexts * 4096): context * alphabet + symbol, its frequency, and how far the slot lies in it.
    cells = torch.arange(f_of.numel(), device=device).repeat_interleave(f_of)
    gain, rest = f_of[cells], torch.arange(cells.numel(), device=device) % TOTAL - start_of[cells]
    active = layout.active(device)
    full = min(layout.coded) // lanes
    context = None if contexts is None else layout.grid(contexts.long()) * TOTAL
    slots = torch.empty(active.shape, dtype=torch.int64, device=device)
    good = (state >= FIRST).all()
    for t in range(active.shape[1]):
        slot = torch.bitwise_and(state, TOTAL - 1, out=slots[:, t])
        if context is not None:
            slot += context[:, t]
        after = gain[slot] * (state >> BITS) + rest[slot]
        state = after if t < full else torch.where(active[:, t], after, state)
        needs = state < FIRST
        rank = needs.cumsum(1)
        # Who reads beyond the end stays there, and is refused below.
        place = (begin[:, None] + rank - 1).clamp_(0, stream.numel() - 1)
        state = torch.where(needs, state << 16 | stream[place], state)
        begin = begin + rank[:, -1]
    symbols = (cells[slots] % alphabet).to(torch.uint8)
    free = state - FIRST
    raw = free[:, None] >> layout.shifts(device) & (1 << layout.width) - 1
    fits = (free >> layout.rows * layout.width == 0).all() & (raw < alphabet).all()
    if not bool(good & (begin == end).all() & fits):
        raise CorruptMessage("the words do not lead every lane back to a first state")
    for c, length in enumerate(layout.coded):
        out[c * layout.size : c * layout.size + length] = symbols[c].flatten()[:length]
    out[layout.raw_places(device)] = raw.to(torch.uint8)
    return at


# Messages


def _pack_raw(symbols: Tensor, bits: int) -> Tensor:
    planes = (symbols[:, None] >> torch.arange(bits, dtype=torch.uint8, device=symbols.device) & 1).flatten()
    padded = torch.cat([planes, planes.new_zeros(-planes.numel() % 8)]).view(-1, 8)
    return (padded << torch.arange(8, dtype=torch.uint8, device=symbols.device)).sum(1, dtype=torch.uint8)


def _unpack_raw(data: Tensor, count: int, bits: int, alphabet: int) -> Tensor:
    planes = (data[:, None] >> torch.arange(8, dtype=torch.uint8, device=data.device) & 1).flatten()
    used = planes[: count * bits].view(count, bits)
    symbols = (used << torch.arange(bits, dtype=torch.uint8, device=data.device)).sum(1, dtype=torch.uint8)
    if bool((symbols >= alphabet).any()) if alphabet < 256 else False:
        raise CorruptMessage("a raw symbol lies outside the alphabet")
    if bool(planes[count * bits :].any()):
        raise CorruptMessage("the padding after raw symbols is not zero")
    return symbols


def rans_encode(
    symbols: Tensor, alphabet: int, contexts: Tensor | None, num_contexts: int, sample: bool, chunk: int, out: Tensor
) -> int | Tensor:
    """Write the whole message into ``out``; its length, int64, 0-d."""
    counts = rans_histogram(symbols, alphabet, contexts, num_contexts, sample)
    length = encode_counted(symbols, alphabet, contexts, num_contexts, counts, chunk, out)
    return torch.tensor(length, device=out.device)


def encode_counted(
    symbols: Tensor, alphabet: int, contexts: Tensor | None, num_contexts: int, counts: Tensor, chunk: int, out: Tensor
) -> int:
    """As :func:`rans_encode`, with the counts that the tables are made from."""
    if not SHORTEST <= chunk <= LONGEST:
        raise ValueError(f"chunks have 2^{SHORTEST} to 2^{LONGEST} symbols, got 2^{chunk}")
    count = symbols.numel()
    if count == 0 or alphabet == 1:
        return 0
    most = 1 + -(-count * raw_bits(alphabet) // 8)
    tables = torch.frombuffer(bytearray(rans_write_tables(counts)), dtype=torch.uint8).to(symbols.device)
    head = 1 + tables.numel()
    if head < most:
        frequencies, _ = rans_read_tables(tables, alphabet, num_contexts)
        body = symbols.new_empty(0)
        if bool(((frequencies > 0) & (frequencies < TOTAL)).any()):
            body = _encode_chunks(symbols, frequencies, checked_contexts(contexts, count, num_contexts), chunk)
        nbytes = head + body.numel()
        if nbytes < most:
            out[0] = chunk
            out[1:head] = tables
            out[head:nbytes] = body
            return nbytes
    out[0] = RAW
    out[1:most] = _pack_raw(symbols, raw_bits(alphabet))
    return most


def rans_decode(data: Tensor, alphabet: int, contexts: Tensor | None, num_contexts: int, out: Tensor) -> int | Tensor:
    """Fill ``out`` with symbols; the number of bytes read, int64, 0-d."""
    return torch.tensor(decode_block(data, alphabet, contexts, num_contexts, out), device=out.device)


def decode_block(data: Tensor, alphabet: int, contexts: Tensor | None, num_contexts: int, out: Tensor) -> int:
    """As :func:`rans_decode`, with the number of bytes as a number."""
    count = out.numel()
    full = checked_contexts(contexts, count, num_contexts)
    if count == 0:
        return 0
    if alphabet == 1:
        out.zero_()
        return 0
    form = int(data[0]) if data.numel() else 0
    if form == RAW:
        end = 1 + -(-count * raw_bits(alphabet) // 8)
        if data.numel() < end:
            raise CorruptMessage("a raw message is cut short")
        out.copy_(_unpack_raw(data[1:end], count, raw_bits(alphabet), alphabet))
        return end
    if not SHORTEST <= form <= LONGEST:
        raise CorruptMessage(f"a rANS message starts with {RAW} (raw) or the log2 of its chunk length, not with {form}")
    frequencies, used = rans_read_tables(data[1:], alphabet, num_contexts)
    head = 1 + used
    if not bool(((frequencies > 0) & (frequencies < TOTAL)).any()):
        only = (frequencies == TOTAL).int().argmax(1).to(torch.uint8)
        out.copy_(only[0].expand(count) if full is None else only[full.long()])
        return head
    return head + _decode_chunks(data[head:], frequencies, full, form, out)

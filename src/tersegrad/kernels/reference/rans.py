"""Interleaved rANS in plain torch: the definition. All chunks and their 64 lanes advance together, one step at a time."""

from __future__ import annotations

import bisect
from collections.abc import Iterator

import torch
from torch import Tensor

from tersegrad.core.errors import CorruptMessage

__all__ = [
    "rans_decode",
    "rans_encode",
    "rans_histogram",
    "rans_read_tables",
    "rans_write_tables",
]

LANES = 64
BITS = 12
TOTAL = 1 << BITS
FIRST = 1 << 16  # the state at the encoder's start and the decoder's end
CHUNK = 1 << 18
BLOCK = 4096  # sampled histograms count whole blocks,
STRIDE = 8  # one in eight
MAX_Q = 96  # probabilities travel as eighths of a bit, at most 12 bits
MAX_RICE = 5

# Ratios from ceil(2^16 * 2^((q + 1/2) / 8)) on round up to q + 1 eighths of a bit.
_HALF_STEPS = (68438, 74632, 81387, 88753, 96786, 105546, 115098, 125515)
_THRESHOLDS = [_HALF_STEPS[q & 7] << (q >> 3) for q in range(MAX_Q)]
_WEIGHTS = (16777216, 15384775, 14107901, 12937002, 11863283, 10878679, 9975792, 9147842)  # round(2^24 * 2^(-k/8))


# Histograms


def _per_symbol(contexts: Tensor, count: int) -> Tensor:
    if contexts.numel() == count:
        return contexts
    if contexts.numel() != -(-count // LANES):
        raise ValueError("give one context a symbol or one a step of 64 symbols")
    return contexts.repeat_interleave(LANES)[:count]


def _checked_contexts(contexts: Tensor | None, count: int, num_contexts: int) -> Tensor | None:
    if contexts is None:
        return None
    full = _per_symbol(contexts, count)
    if count and int(full.max()) >= num_contexts:
        raise ValueError("a context is not below the number of contexts")
    return full


def rans_histogram(symbols: Tensor, alphabet: int, contexts: Tensor | None, num_contexts: int, sample: bool) -> Tensor:
    """Counts, (num_contexts, alphabet) int64; see the schema."""
    count = symbols.numel()
    full = _checked_contexts(contexts, count, num_contexts)
    if count and int(symbols.max()) >= alphabet:
        raise ValueError("a symbol lies outside the alphabet")
    cells = num_contexts * alphabet
    index = symbols.long() if full is None else symbols.long() + full.long() * alphabet
    if not sample or count < max(1 << 16, 4096 * cells):
        return torch.bincount(index, minlength=cells).view(num_contexts, alphabet)
    taken = torch.arange(count, device=symbols.device) // BLOCK % STRIDE == 0
    counts = torch.bincount(index[taken], minlength=cells)
    counts += torch.bincount(index, minlength=cells) > 0
    return counts.view(num_contexts, alphabet)


def dense_histogram(symbols: Tensor, alphabet: int) -> Tensor:
    """A sampled histogram; where the sampled blocks show at least half of the alphabet, every symbol is taken to occur."""
    if symbols.numel() < max(1 << 16, 4096 * alphabet):
        return rans_histogram(symbols, alphabet, None, 1, False)
    taken = torch.arange(symbols.numel(), device=symbols.device) // BLOCK % STRIDE == 0
    counts = torch.bincount(symbols[taken].long(), minlength=alphabet).view(1, alphabet)
    return rans_histogram(symbols, alphabet, None, 1, True) if 2 * int((counts > 0).sum()) < alphabet else counts + 1


# Tables


class _BitWriter:
    def __init__(self) -> None:
        self.bits: list[int] = []

    def put(self, value: int, width: int) -> None:
        self.bits.extend(value >> k & 1 for k in range(width))

    def gamma(self, value: int) -> None:
        extra = value.bit_length() - 1
        self.put(1 << extra, extra + 1)
        self.put(value, extra)

    def rice(self, value: int, k: int) -> None:
        self.put((1 << (value >> k)) - 1, (value >> k) + 1)
        self.put(value, k)

    def tobytes(self) -> bytes:
        padded = self.bits + [0] * (-len(self.bits) % 8)
        return bytes(sum(bit << k for k, bit in enumerate(padded[i : i + 8])) for i in range(0, len(padded), 8))


class _BitReader:
    def __init__(self, data: bytes) -> None:
        self.data = data
        self.at = 0

    def bit(self) -> int:
        if self.at >= 8 * len(self.data):
            raise CorruptMessage("the probability tables are cut short")
        value = self.data[self.at >> 3] >> (self.at & 7) & 1
        self.at += 1
        return value

    def get(self, width: int) -> int:
        return sum(self.bit() << k for k in range(width))

    def gamma(self, most: int) -> int:
        extra = 0
        while not self.bit():
            extra += 1
            if extra > 9:
                raise CorruptMessage("a run in a probability table is too long")
        value = 1 << extra | self.get(extra)
        if value > most:
            raise CorruptMessage("a run in a probability table leaves the alphabet")
        return value

    def finish(self) -> int:
        while self.at & 7:
            if self.bit():
                raise CorruptMessage("the padding after the probability tables is not zero")
        return self.at // 8


def _predict(linear: int, q: list[int], i: int) -> int:
    return min(max(2 * q[i - 1] - q[i - 2], 0), MAX_Q) if linear and i > 1 else q[i - 1]


def _differences(linear: int, q: list[int]) -> Iterator[int]:
    for i in range(1, len(q)):
        d = q[i] - _predict(linear, q, i)
        yield 2 * d if d >= 0 else -2 * d - 1


def _write_table(out: _BitWriter, counts: list[int]) -> None:
    total = sum(counts)
    q = [bisect.bisect_right(_THRESHOLDS, (total << 16) // c) for c in counts if c]
    out.put(int(len(q) == len(counts)), 1)
    if len(q) < len(counts):
        position, present, first = 0, False, 1
        while position < len(counts):
            begin = position
            while position < len(counts) and (counts[position] > 0) == present:
                position += 1
            out.gamma(position - begin + first)  # only the first run may be empty
            present, first = not present, 0
    if len(q) < 2:
        return
    choices = [(linear, k) for linear in (0, 1) for k in range(MAX_RICE + 1)]
    linear, k = min(choices, key=lambda c: sum((d >> c[1]) + 1 + c[1] for d in _differences(c[0], q)))
    out.put(linear, 1)
    out.put(k, 3)
    out.put(q[0], 7)
    for d in _differences(linear, q):
        out.rice(d, k)


def _apportion(weights: list[int]) -> list[int]:
    """Frequencies in proportion to the weights, at least 1 each, moved to the exact sum where a unit costs least."""
    total = sum(weights)
    f = [max(1, (2 * TOTAL * w + total) // (2 * total)) for w in weights]
    # Quotients of such small integers keep their order in float64.
    for _ in range(sum(f) - TOTAL):
        i = min((i for i in range(len(f)) if f[i] > 1), key=lambda i: weights[i] / (2 * f[i] - 1))
        f[i] -= 1
    for _ in range(TOTAL - sum(f)):
        i = max(range(len(f)), key=lambda i: weights[i] / (2 * f[i] + 1))
        f[i] += 1
    return f


def _read_table(data: _BitReader, alphabet: int) -> list[int]:
    if data.bit():
        symbols = list(range(alphabet))
    else:
        symbols, position, present, first = [], 0, False, 1
        while position < alphabet:
            run = data.gamma(alphabet - position + first) - first
            if present:
                symbols.extend(range(position, position + run))
            position, present, first = position + run, not present, 0
    frequencies = [0] * alphabet
    if len(symbols) < 2:
        frequencies[symbols[0] if symbols else 0] = TOTAL
        return frequencies
    linear, k = data.bit(), data.get(3)
    if k > MAX_RICE:
        raise CorruptMessage(f"a probability table has Rice parameter {k}, the largest is {MAX_RICE}")
    q = [data.get(7)]
    while True:
        if not 0 <= q[-1] <= MAX_Q:
            raise CorruptMessage("a probability lies outside its range")
        if len(q) == len(symbols):
            break
        quotient = 0
        while quotient <= 2 * MAX_Q and data.bit():
            quotient += 1
        z = quotient << k | data.get(k)
        q.append(_predict(linear, q, len(q)) + (-(z >> 1) - 1 if z & 1 else z >> 1))
    for s, f in zip(symbols, _apportion([_WEIGHTS[v & 7] >> (v >> 3) for v in q])):
        frequencies[s] = f
    return frequencies


def rans_write_tables(counts: Tensor) -> bytes:
    """The tables for these counts as bytes."""
    out = _BitWriter()
    if counts.shape[1] > 1:
        for row in counts.tolist():
            _write_table(out, row)
    return out.tobytes()


def rans_read_tables(data: Tensor, alphabet: int, num_contexts: int) -> tuple[Tensor, int]:
    """Frequencies and the number of bytes read."""
    if alphabet == 1:
        return torch.full((num_contexts, 1), TOTAL, dtype=torch.int16, device=data.device), 0
    # No valid table is longer: at most 193 + 6 bits a symbol.
    reader = _BitReader(bytes(data[: num_contexts * (32 * alphabet + 2)].tolist()))
    rows = [_read_table(reader, alphabet) for _ in range(num_contexts)]
    used = reader.finish()
    return torch.tensor(rows, dtype=torch.int16, device=data.device), used


# Chunks


def chunk_lengths(count: int) -> list[int]:
    """All chunks hold CHUNK symbols except the last, which takes the rest: from half a chunk to one and a half."""
    chunks = (1 if count else 0) if count < CHUNK else (count + CHUNK // 2) // CHUNK
    return [CHUNK] * (chunks - 1) + [count - CHUNK * (chunks - 1)] if chunks else []


def _by_chunk(values: Tensor, lengths: list[int]) -> Tensor:
    """(chunks, steps, 64), padded with zeros."""
    steps = -(-max(lengths) // LANES)
    padded = values.new_zeros(len(lengths), steps * LANES)
    for c, length in enumerate(lengths):
        padded[c, :length] = values[c * CHUNK : c * CHUNK + length]
    return padded.view(len(lengths), steps, LANES)


def _active(lengths: list[int], device: torch.device) -> Tensor:
    steps = -(-max(lengths) // LANES)
    index = torch.arange(steps * LANES, device=device)
    return (index < torch.tensor(lengths, device=device)[:, None]).view(len(lengths), steps, LANES)


def _little_endian(values: Tensor, width: int) -> Tensor:
    return (values[..., None] >> (8 * torch.arange(width, device=values.device)) & 255).to(torch.uint8).flatten()


def _from_little_endian(data: Tensor, width: int) -> Tensor:
    return (data.view(-1, width).long() << (8 * torch.arange(width, device=data.device))).sum(1)


def _encode_chunks(symbols: Tensor, frequencies: Tensor, contexts: Tensor | None) -> Tensor:
    device = symbols.device
    lengths = chunk_lengths(symbols.numel())
    index = _by_chunk(symbols.long() if contexts is None else symbols.long() + contexts.long() * frequencies.shape[1], lengths)
    active = _active(lengths, device)
    f_of = frequencies.long().flatten()
    start_of = (frequencies.long().cumsum(1) - frequencies.long()).flatten()
    state = torch.full((len(lengths), LANES), FIRST, dtype=torch.int64, device=device)
    words = torch.zeros(index.shape, dtype=torch.int32, device=device)
    emitted = torch.zeros(index.shape, dtype=torch.bool, device=device)
    for t in range(index.shape[1] - 1, -1, -1):
        on = active[:, t]
        f = torch.where(on, f_of[index[:, t]], TOTAL)
        emits = state >> 20 >= f
        words[:, t] = state & 0xFFFF
        emitted[:, t] = emits
        state = torch.where(emits, state >> 16, state)
        quotient = torch.div(state, f, rounding_mode="floor")
        state = torch.where(on, (quotient << BITS) + (state - quotient * f) + start_of[index[:, t]], state)
    parts = [_little_endian(emitted.sum((1, 2)), 4)]
    for c, length in enumerate(lengths):
        parts.append(_little_endian(state[c, : min(LANES, length)], 4))
        parts.append(_little_endian(words[c][emitted[c]], 2))
    return torch.cat(parts)


def _decode_chunks(data: Tensor, frequencies: Tensor, contexts: Tensor | None, out: Tensor) -> int:
    device = data.device
    lengths = chunk_lengths(out.numel())
    chunks = len(lengths)
    at = 4 * chunks
    if data.numel() < at:
        raise CorruptMessage("the chunk table is cut short")
    word_counts = _from_little_endian(data[:at], 4).tolist()
    state = torch.full((chunks, LANES), FIRST, dtype=torch.int64, device=device)
    words, begins = [], []
    position = 0
    for c, (length, count) in enumerate(zip(lengths, word_counts)):
        lanes = min(LANES, length)
        if count > length or data.numel() - at < 4 * lanes + 2 * count:
            raise CorruptMessage(f"chunk {c} announces {count} words, more than there can be")
        state[c, :lanes] = _from_little_endian(data[at : at + 4 * lanes], 4)
        words.append(_from_little_endian(data[at + 4 * lanes : at + 4 * lanes + 2 * count], 2))
        begins.append(position)
        position += count
        at += 4 * lanes + 2 * count
    stream = torch.cat([*words, torch.zeros(1, dtype=torch.int64, device=device)])
    begin = torch.tensor(begins, device=device)
    end = begin + torch.tensor(word_counts, device=device)

    alphabet = frequencies.shape[1]
    f_of = frequencies.long().flatten()
    start_of = (frequencies.long().cumsum(1) - frequencies.long()).flatten()
    cells = torch.arange(f_of.numel(), device=device).repeat_interleave(
        f_of
    )  # (contexts * 4096): slot to context * alphabet + symbol
    active = _active(lengths, device)
    context = None if contexts is None else _by_chunk(contexts.long(), lengths)
    symbols = torch.zeros(active.shape, dtype=torch.uint8, device=device)
    good = (state >= FIRST).all()
    for t in range(active.shape[1]):
        on = active[:, t]
        slot = state & (TOTAL - 1)
        cell = cells[slot if context is None else slot + context[:, t] * TOTAL]
        symbols[:, t] = (cell % alphabet).to(torch.uint8)
        state = torch.where(on, f_of[cell] * (state >> BITS) + slot - start_of[cell], state)
        needs = state < FIRST
        rank = needs.cumsum(1)
        place = (begin[:, None] + rank - 1).clamp(0, stream.numel() - 1)
        state = torch.where(needs, state << 16 | stream[place], state)
        begin = begin + rank[:, -1]
        good = good & (begin <= end).all()
        begin = torch.minimum(begin, end)
    if not bool(good & (begin == end).all() & (state == FIRST).all()):
        raise CorruptMessage("the words do not lead every lane back to its first state")
    for c, length in enumerate(lengths):
        out[c * CHUNK : c * CHUNK + length] = symbols[c].flatten()[:length]
    return at


# Messages


def _raw_bits(alphabet: int) -> int:
    return (alphabet - 1).bit_length()


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


def rans_encode(symbols: Tensor, alphabet: int, contexts: Tensor | None, num_contexts: int, sample: bool, out: Tensor) -> int:
    """Write the whole message into ``out`` and return its length."""
    counts = rans_histogram(symbols, alphabet, contexts, num_contexts, sample)
    return encode_counted(symbols, alphabet, contexts, num_contexts, counts, out)


def encode_counted(
    symbols: Tensor, alphabet: int, contexts: Tensor | None, num_contexts: int, counts: Tensor, out: Tensor
) -> int:
    """As :func:`rans_encode`, with the counts that the tables are made from."""
    count = symbols.numel()
    if count == 0 or alphabet == 1:
        return 0
    most = 1 + -(-count * _raw_bits(alphabet) // 8)
    tables = torch.frombuffer(bytearray(rans_write_tables(counts)), dtype=torch.uint8).to(symbols.device)
    head = 1 + tables.numel()
    if head < most:
        frequencies, _ = rans_read_tables(tables, alphabet, num_contexts)
        body = symbols.new_empty(0)
        if bool(((frequencies > 0) & (frequencies < TOTAL)).any()):
            body = _encode_chunks(symbols, frequencies, _checked_contexts(contexts, count, num_contexts))
        nbytes = head + body.numel()
        if nbytes < most:
            out[0] = 0
            out[1:head] = tables
            out[head:nbytes] = body
            return nbytes
    out[0] = 1
    out[1:most] = _pack_raw(symbols, _raw_bits(alphabet))
    return most


def rans_decode(data: Tensor, alphabet: int, contexts: Tensor | None, num_contexts: int, out: Tensor) -> int:
    """Fill ``out`` with symbols and return the number of bytes read."""
    count = out.numel()
    full = _checked_contexts(contexts, count, num_contexts)
    if count == 0:
        return 0
    if alphabet == 1:
        out.zero_()
        return 0
    mode = int(data[0]) if data.numel() else 2
    if mode > 1:
        raise CorruptMessage("a rANS message starts with 0 (coded) or 1 (raw)")
    if mode == 1:
        end = 1 + -(-count * _raw_bits(alphabet) // 8)
        if data.numel() < end:
            raise CorruptMessage("a raw message is cut short")
        out.copy_(_unpack_raw(data[1:end], count, _raw_bits(alphabet), alphabet))
        return end
    frequencies, used = rans_read_tables(data[1:], alphabet, num_contexts)
    head = 1 + used
    if not bool(((frequencies > 0) & (frequencies < TOTAL)).any()):
        only = (frequencies == TOTAL).int().argmax(1).to(torch.uint8)
        out.copy_(only[0].expand(count) if full is None else only[full.long()])
        return head
    return head + _decode_chunks(data[head:], frequencies, full, out)

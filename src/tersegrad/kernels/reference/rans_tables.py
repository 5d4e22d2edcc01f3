"""Histograms and probability tables of rANS in plain torch: the definition."""

from __future__ import annotations

import bisect
from collections.abc import Iterator

import torch
from torch import Tensor

from tersegrad.core.errors import CorruptMessage

__all__ = ["rans_histogram", "rans_read_tables", "rans_write_tables"]

BITS = 12
TOTAL = 1 << BITS
STEP = 64  # symbols that may share one entry of `contexts`
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
    if contexts.numel() != -(-count // STEP):
        raise ValueError("give one context per symbol or one per step of 64 symbols")
    return contexts.repeat_interleave(STEP)[:count]


def checked_contexts(contexts: Tensor | None, count: int, num_contexts: int) -> Tensor | None:
    if contexts is None:
        return None
    full = _per_symbol(contexts, count)
    if count and int(full.max()) >= num_contexts:
        raise ValueError("a context is not below the number of contexts")
    return full


def rans_histogram(symbols: Tensor, alphabet: int, contexts: Tensor | None, num_contexts: int, sample: bool) -> Tensor:
    """Counts, (num_contexts, alphabet) int64; see the schema."""
    count = symbols.numel()
    full = checked_contexts(contexts, count, num_contexts)
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
    # No valid table is longer: at most 193 + 6 bits per symbol.
    reader = _BitReader(bytes(data[: num_contexts * (32 * alphabet + 2)].tolist()))
    rows = [_read_table(reader, alphabet) for _ in range(num_contexts)]
    used = reader.finish()
    return torch.tensor(rows, dtype=torch.int16, device=data.device), used

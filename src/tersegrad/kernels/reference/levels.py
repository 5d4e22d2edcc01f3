"""Sequential level codes in plain Python: the definition that the C++ version reproduces bit for bit.

Bit 0 of the stream is the form: 0 the published Sparse Dithering code, 1 the adaptive one. Bits fill bytes from the least
significant end; a reader sees zeros beyond the end of the data, and zero bytes there are dropped.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tersegrad.core.errors import CorruptMessage

__all__ = ["levels_decode", "levels_encode"]

HALF, QUARTER, TOP = 1 << 31, 1 << 30, (1 << 32) - 1
UNARY_BINS = 14  # magnitudes above this escape to an Elias-gamma code with even odds
COUNT_LIMIT = 1 << 20  # adaptive counts are halved there
MAX_LEVEL = (1 << 31) - 1


class BitReader:
    """Bits of a byte string, then zeros."""

    def __init__(self, data: bytes) -> None:
        self.data, self.size, self.next = data, 8 * len(data), 0

    def get(self) -> int:
        k = self.next
        self.next += 1
        return self.data[k >> 3] >> (k & 7) & 1 if k < self.size else 0


class ArithmeticEncoder:
    """Witten, Neal and Cleary's binary coder with 32-bit registers; a 0 has probability zeros / total."""

    def __init__(self, bits: list[int]) -> None:
        self.bits, self.low, self.high, self.pending = bits, 0, TOP, 0

    def emit(self, bit: int) -> None:
        self.bits.append(bit)
        self.bits.extend([1 - bit] * self.pending)
        self.pending = 0

    def put(self, bit: int, zeros: int, total: int) -> None:
        if zeros in (0, total):
            return
        mid = self.low + (self.high - self.low + 1) * zeros // total - 1
        if bit:
            self.low = mid + 1
        else:
            self.high = mid
        while True:
            if self.high < HALF:
                self.emit(0)
            elif self.low >= HALF:
                self.emit(1)
                self.low, self.high = self.low - HALF, self.high - HALF
            elif self.low >= QUARTER and self.high < HALF + QUARTER:
                self.pending += 1
                self.low, self.high = self.low - QUARTER, self.high - QUARTER
            else:
                return
            self.low, self.high = self.low << 1, self.high << 1 | 1

    def finish(self) -> None:
        # Readers see zeros beyond the end: a one lies in every interval that zeros alone do not.
        if self.low > 0 or self.pending:
            self.emit(1)


class ArithmeticDecoder:
    """The inverse of :class:`ArithmeticEncoder`."""

    def __init__(self, reader: BitReader) -> None:
        self.reader, self.low, self.high, self.value = reader, 0, TOP, 0
        for _ in range(32):
            self.value = self.value << 1 | reader.get()

    def get(self, zeros: int, total: int) -> int:
        if zeros == 0:
            return 1
        if zeros == total:
            return 0
        low, high, value = self.low, self.high, self.value
        mid = low + (high - low + 1) * zeros // total - 1
        bit = int(value > mid)
        if bit:
            low = mid + 1
        else:
            high = mid
        while True:
            if high < HALF:
                shift = 0
            elif low >= HALF:
                shift = HALF
            elif low >= QUARTER and high < HALF + QUARTER:
                shift = QUARTER
            else:
                self.low, self.high, self.value = low, high, value
                return bit
            low, high = low - shift << 1, high - shift << 1 | 1
            value = value - shift << 1 | self.reader.get()


class Adaptive:
    """Probability of 0 from the symbols so far: (n0 + 1) / (n + prior)."""

    def __init__(self, prior: int) -> None:
        self.n0 = self.n = 0
        self.prior = prior

    @property
    def odds(self) -> tuple[int, int]:
        return self.n0 + 1, self.n + self.prior

    def update(self, bit: int) -> None:
        self.n0 += 1 - bit
        self.n += 1
        if self.n >= COUNT_LIMIT:
            self.n, self.n0 = (self.n + 1) // 2, (self.n0 + 1) // 2


def levels_encode(levels: Tensor, adaptive: bool) -> Tensor:
    """Signed int32 levels as one bit stream in the published or the adaptive form."""
    values: list[int] = levels.tolist()
    bits = [int(adaptive)]
    (_adaptive_encode if adaptive else _paper_encode)(bits, values)
    bits += [0] * (-len(bits) % 8)
    weights = torch.tensor([1, 2, 4, 8, 16, 32, 64, 128])
    data = (torch.tensor(bits).view(-1, 8) * weights).sum(1).to(torch.uint8)
    return data[: int(data.nonzero().max()) + 1 if bool(data.any()) else 0].to(levels.device)


def levels_decode(data: Tensor, count: int) -> Tensor:
    """The int32 levels of a stream; :class:`CorruptMessage` where it cannot be one."""
    reader = BitReader(bytes(data.cpu().numpy().tobytes()))
    values = (_adaptive_decode if reader.get() else _paper_decode)(reader, count)
    return torch.tensor(values, dtype=torch.int32, device=data.device)


def _paper_encode(bits: list[int], values: list[int]) -> None:
    zeros = values.count(0)
    bits += [zeros >> k & 1 for k in range(len(values).bit_length())]
    filled = [v for v in values if v]
    for v in filled:
        bits += [1] * (abs(v) - 1) + [0]
    bits += [int(v < 0) for v in filled]
    coder = ArithmeticEncoder(bits)
    left = zeros
    for i, v in enumerate(values):
        coder.put(int(v != 0), left, len(values) - i)
        left -= v == 0
    if 0 < zeros < len(values):
        coder.finish()


def _paper_decode(reader: BitReader, count: int) -> list[int]:
    zeros = sum(reader.get() << k for k in range(count.bit_length()))
    if zeros > count:
        raise CorruptMessage(f"{zeros} zeros among {count} levels")
    filled = []
    for _ in range(count - zeros):
        k = 1
        while reader.get():
            k += 1
        filled.append(k)
    filled = [-k if reader.get() else k for k in filled]
    coder, waiting = ArithmeticDecoder(reader), iter(filled)
    values = []
    for i in range(count):
        values.append(next(waiting) if coder.get(zeros, count - i) else 0)
        zeros -= values[-1] == 0
    return values


def _adaptive_encode(bits: list[int], values: list[int]) -> None:
    coder, zero, more = ArithmeticEncoder(bits), Adaptive(3), [Adaptive(2) for _ in range(UNARY_BINS)]
    for v in values:
        coder.put(int(v != 0), *zero.odds)
        zero.update(int(v != 0))
        if v == 0:
            continue
        coder.put(int(v < 0), 1, 2)
        k = abs(v)
        for j, context in enumerate(more, start=1):
            coder.put(int(k > j), *context.odds)
            context.update(int(k > j))
            if k <= j:
                break
        if k > UNARY_BINS:
            rest = k - UNARY_BINS
            width = rest.bit_length() - 1
            for bit in [1] * width + [0] + [rest >> b & 1 for b in reversed(range(width))]:
                coder.put(bit, 1, 2)
    if values:
        coder.finish()


def _adaptive_decode(reader: BitReader, count: int) -> list[int]:
    if not count:
        return []
    coder, zero, more = ArithmeticDecoder(reader), Adaptive(3), [Adaptive(2) for _ in range(UNARY_BINS)]
    values = []
    for _ in range(count):
        filled = coder.get(*zero.odds)
        zero.update(filled)
        if not filled:
            values.append(0)
            continue
        negative = coder.get(1, 2)
        k = 1
        for j, context in enumerate(more, start=1):
            bit = coder.get(*context.odds)
            context.update(bit)
            if not bit:
                break
            k = j + 1
        if k > UNARY_BINS:
            width = 0
            while coder.get(1, 2):
                width += 1
                if width > 30:
                    raise CorruptMessage("a level is too large")
            rest = 1
            for _ in range(width):
                rest = rest << 1 | coder.get(1, 2)
            k = UNARY_BINS + rest
            if k > MAX_LEVEL:
                raise CorruptMessage("a level is too large")
        values.append(-k if negative else k)
    return values

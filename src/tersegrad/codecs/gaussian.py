"""Levels of a dithered Gaussian coordinate, coded with probabilities that both ends know: no tables and nothing to learn.

Level a is the nearest integer to X + U, where X is normal with standard deviation ``sigma`` and 0 < U < 1/2 is known, given as the 15-bit
``size`` with U = (2 size + 1) / 2^17. An arithmetic coder takes yes-no decisions: is a >= 1; then upwards or downwards, one
level at a time, whether to go on; levels far out end in an Elias gamma code. For sigma >= 4 low bits are sent as they are. Since
the cost of a level grows with its square, vectors of one norm cost nearly the same whatever their shape.

The stream (spec, "Subtractive dithering") begins with the bit 0, where :mod:`~tersegrad.codecs.levels` writes 1 for its adaptive code.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import torch
from torch import Tensor

from tersegrad.codecs import normal
from tersegrad.core.errors import CorruptMessage
from tersegrad.kernels.reference.levels import ArithmeticDecoder, ArithmeticEncoder, BitReader

Decide = Callable[[int, int], int]  # (bit to send, chance of a one in 2^16) -> the bit

LEAST = 16  # of 65536: no decision is more certain than that
MOST_EXTRA = 31  # bits of an escape


@functools.lru_cache(maxsize=1 << 16)
def _chance(sigma: float, shift: int, size: int, level: int) -> int:
    """2^48 P(a >> shift >= level) at the middle of one of 64 classes of ``size``."""
    dither = (2 * (size >> 9 << 9 | 256) + 1) / 131072
    return normal.tail((level * (1 << shift) - 0.5 - dither) / sigma)


def _ones(part: int, whole: int) -> int:
    return min(max((part << 16) // whole, LEAST), 65536 - LEAST) if whole > 0 else 32768


def _walk(decide: Decide, sigma: float, shift: int, size: int, level: int) -> int:
    """One level, through ``decide``: an encoder passes the level and gets it back, a decoder ignores it and gets the true one."""
    reach = int(4 * sigma / (1 << shift)) + 2
    high = level >> shift
    upwards = decide(int(high >= 1), _ones(_chance(sigma, shift, size, 1), 1 << 48))
    k = 0
    more = 1
    while more and k < reach:
        if upwards:
            k += 1
            more = decide(
                int(high > k), _ones(_chance(sigma, shift, size, k + 1), _chance(sigma, shift, size, k))
            )
        else:
            down = (1 << 48) - _chance(sigma, shift, size, -k)  # P(a < -k)
            more = decide(int(high < -k), _ones(down, (1 << 48) - _chance(sigma, shift, size, 1 - k)))
            k += more
    result = k if upwards else -k
    if more:
        beyond = high - k if upwards else 1 - k - high  # from 1 on
        result = _escape(decide, max(beyond, 1))
        result = k + result if upwards else 1 - k - result
    low = 0
    for b in range(shift):
        low |= decide(level >> b & 1, 32768) << b
    return result << shift | low


def _escape(decide: Decide, value: int) -> int:
    """Elias gamma with even odds."""
    width = 0
    while decide(int(value >> width + 1 > 0), 32768):
        width += 1
        if width > MOST_EXTRA:
            raise CorruptMessage("a level is too large")
    result = 1
    for b in reversed(range(width)):
        result = result << 1 | decide(value >> b & 1, 32768)
    return result


def _shift(sigma: float) -> int:
    return max(0, math.frexp(sigma)[1] - 2) if sigma >= 4 else 0


def encode(levels: Tensor, sizes: Tensor, sigma: float) -> Tensor:
    """int32 levels as bytes."""
    bits = [0]
    coder, shift = ArithmeticEncoder(bits), _shift(sigma)

    def decide(bit: int, ones: int) -> int:
        coder.put(bit, 65536 - ones, 65536)
        return bit

    for level, size in zip(levels.tolist(), sizes.tolist(), strict=True):
        _walk(decide, sigma, shift, size, level)
    coder.finish()
    data = sum(bit << i for i, bit in enumerate(bits)).to_bytes((len(bits) + 7) // 8, "little")
    return torch.tensor(list(data), dtype=torch.uint8, device=levels.device)


def decode(data: Tensor, sizes: Tensor, sigma: float) -> Tensor:
    """The levels, int32; raises :class:`CorruptMessage`."""
    reader = BitReader(bytes(data.cpu().numpy().tobytes()))
    if reader.get():
        raise CorruptMessage("not a stream of this form")
    coder, shift = ArithmeticDecoder(reader), _shift(sigma)
    values = []
    for size in sizes.tolist():
        values.append(_walk(lambda _, ones: coder.get(65536 - ones, 65536), sigma, shift, size, 0))
        if reader.next > reader.size + 64 or abs(values[-1]) > 1 << 30:
            raise CorruptMessage("the levels end early, or one is too large")
    return torch.tensor(values, dtype=torch.int32, device=data.device)

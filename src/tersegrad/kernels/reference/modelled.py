"""Levels coded with given probabilities, in plain Python: the definition that the C++ version reproduces bit for bit.

The stream begins with the bit 0. A level a of class c is sent as yes-or-no answers; row c of the table, (classes, 1 + 2 reach), holds
for each question the chance of a yes, in units of 2^-16. The questions are about h = a >> shift. The first is whether h >= 1 (entry 0).
After a yes the next ones are whether h > k for k = 1, ..., reach (entries 1 to reach), after a no whether h < -k for
k = 0, ..., reach - 1 (entries reach + 1 to 2 reach); the first no to one of these ends them. Where all of these are answered by yes,
the Elias gamma code of h - reach or of 1 - reach - h follows at even odds: its width in unary, then the bits below the leading one,
from the top. Last come the ``shift`` low bits of a at even odds, lowest first.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tersegrad.core.errors import CorruptMessage
from tersegrad.kernels.reference.levels import ArithmeticDecoder, ArithmeticEncoder, BitReader

__all__ = ["modelled_decode", "modelled_encode"]

Decide = Callable[[int, int], int]  # (bit to send, chance of a one in 2^16) -> the bit

EVEN = 1 << 15
WIDEST = 30  # of an escape
LARGEST = 1 << 30


def _walk(decide: Decide, row: list[int], shift: int, level: int) -> int:
    """One level: an encoder passes it and gets it back, a decoder passes anything and gets the true one."""
    reach, high = len(row) // 2, level >> shift
    if decide(int(high >= 1), row[0]):
        k = 1
        while k <= reach and decide(int(high > k), row[k]):
            k += 1
        result = k if k <= reach else reach + _escape(decide, high - reach)
    else:
        k = 0
        while k < reach and decide(int(high < -k), row[1 + reach + k]):
            k += 1
        result = -k if k < reach else 1 - reach - _escape(decide, 1 - reach - high)
    low = 0
    for b in range(shift):
        low |= decide(level >> b & 1, EVEN) << b
    return result << shift | low


def _escape(decide: Decide, value: int) -> int:
    width = 0
    while decide(int(value >> width + 1 > 0), EVEN):
        width += 1
        if width > WIDEST:
            raise CorruptMessage("a level is too large")
    result = 1
    for b in reversed(range(width)):
        result = result << 1 | decide(value >> b & 1, EVEN)
    return result


def modelled_encode(levels: Tensor, classes: Tensor, table: Tensor, shift: int) -> Tensor:
    bits = [0]
    coder, rows = ArithmeticEncoder(bits), table.tolist()

    def decide(bit: int, ones: int) -> int:
        coder.put(bit, 65536 - ones, 65536)
        return bit

    for level, c in zip(levels.tolist(), classes.tolist(), strict=True):
        _walk(decide, rows[c], shift, level)
    coder.finish()
    bits += [0] * (-len(bits) % 8)
    weights = torch.tensor([1, 2, 4, 8, 16, 32, 64, 128])
    return (torch.tensor(bits).view(-1, 8) * weights).sum(1).to(torch.uint8).to(levels.device)


def modelled_decode(data: Tensor, classes: Tensor, table: Tensor, shift: int) -> Tensor:
    reader = BitReader(bytes(data.cpu().numpy().tobytes()))
    if reader.get():
        raise CorruptMessage("not a stream of this form")
    coder, rows, values = ArithmeticDecoder(reader), table.tolist(), []

    def decide(_: int, ones: int) -> int:
        return coder.get(65536 - ones, 65536)

    for c in classes.tolist():
        level = _walk(decide, rows[c], shift, 0)
        if reader.next > reader.size + 64 or abs(level) > LARGEST:
            raise CorruptMessage("the levels end early, or one is too large")
        values.append(level)
    return torch.tensor(values, dtype=torch.int32, device=data.device)

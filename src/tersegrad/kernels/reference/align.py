"""Signs of rows and columns in plain torch: the definition (``spec/wire.md``, "Aligned").

The gradient of a layer is a sum of outer products, so the signs of a row often agree with one another, or with those of the columns. A
description tells for each piece with rows whether its rows, or its rows and columns, have a sign, and which; where it tells one, a
coordinate is negated if exactly one of its row's and its column's is negative. Sums are of -1, 0 and 1, so no order matters.
"""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import Tensor

from tersegrad.core import host
from tersegrad.core.errors import CorruptMessage

__all__ = ["align_find", "align_flip"]

NONE, ROWS, BOTH = 0, 1, 2
FEWEST_ROWS, FEWEST_COLUMNS = 4, 4
# Sums of more coordinates than this would not be exact in float32.
LONGEST = 1 << 24
ROUNDS = 2
# What a description has to save: so many bits, and so much of a bit per coordinate that counts.
LEAST_BITS, LEAST_SHARE = 16.0, 0.02


@dataclasses.dataclass(frozen=True)
class Matrix:
    """A piece with rows: ``count`` coordinates from ``at`` on, the first of them at ``phase`` in a row of ``columns``."""

    at: int
    count: int
    columns: int
    phase: int

    @property
    def rows(self) -> int:
        return -(-(self.phase + self.count) // self.columns)

    def of(self, x: Tensor) -> Tensor:
        """Its part of a vector, flat."""
        return x[self.at : self.at + self.count]


def matrices(layout: Tensor) -> list[Matrix]:
    """The pieces that may have signs."""
    found, at = [], 0
    for count, columns, _, phase in layout.view(-1, 4).tolist():
        piece = Matrix(at, count, columns, phase)
        if piece.rows >= FEWEST_ROWS and columns >= FEWEST_COLUMNS and max(piece.rows, columns) <= LONGEST:
            found.append(piece)
        at += count
    return found


def most_bytes(layout: Tensor) -> int:
    """No description for this layout is longer."""
    return (sum(2 + m.rows + m.columns for m in matrices(layout)) + 7) // 8


def _told(data: Tensor, layout: Tensor) -> tuple[list[tuple[Matrix, int, int]], int]:
    """Matrices with signs, their kinds and where their bits begin, and how many bits there are; ``data`` is in the host's memory."""
    raw, at, found = data.numpy(), 0, []
    for m in matrices(layout):
        if at + 2 > 8 * len(raw):
            raise CorruptMessage("the signs of rows and columns are cut short")
        kind = int(raw[at // 8]) >> at % 8 & 1 | (int(raw[(at + 1) // 8]) >> (at + 1) % 8 & 1) << 1
        if kind > BOTH:
            raise CorruptMessage("a piece has no signs, those of rows, or those of rows and columns")
        if kind:
            found.append((m, kind, at + 2))
        at += 2 + (0, m.rows, m.rows + m.columns)[kind]
    return found, at


def nbytes(data: Tensor, layout: Tensor) -> int:
    """How long the description at the start of ``data`` is."""
    return (_told(host.read(data), layout)[1] + 7) // 8


def _saved(count: int, agreement: int, told: int) -> float:
    """Bits that signs save: those of ``count`` fair ones, less the entropy of agreeing, less the bits that are told."""
    share = (count + agreement) / (2 * count)
    entropy = -(share * math.log2(share) + (1 - share) * math.log2(1 - share)) if share < 1 else 0.0
    return count * (1 - entropy) - told


def _signs(sums: Tensor) -> Tensor:
    return torch.where(sums < 0, -1.0, 1.0)


def align_find(x: Tensor, least: float, layout: Tensor) -> Tensor:
    """The description for coordinates of more than ``least``: see the schema."""
    pieces = matrices(layout)
    sums, signs = [], []
    for m in pieces:
        part = m.of(x)
        q = (part > least).to(torch.float32) - (part < -least).to(torch.float32)
        q = torch.nn.functional.pad(q, (m.phase, m.rows * m.columns - m.phase - m.count)).view(m.rows, m.columns)
        alone, busy = q.sum(1), q.abs().sum(1)
        # The first of the busiest rows: the columns begin with its signs.
        order = torch.arange(m.rows - 1, -1, -1, device=x.device)
        across = _signs(q[(busy.long() * m.rows + order).argmax()])
        for _ in range(ROUNDS):
            down = _signs(q @ across)
            both = down @ q
            across = _signs(both)
        sums.append(torch.stack([busy.double().sum(), alone.abs().double().sum(), both.abs().double().sum()]))
        signs.append(torch.cat([alone, down, across]) < 0)
    if not pieces:
        return torch.empty(0, dtype=torch.uint8)
    numbers = host.read(torch.stack(sums)).long().tolist()
    bits = host.read(torch.cat(signs))
    told, some = [], False
    for m, (count, rows_agree, both_agree), found in zip(
        pieces, numbers, bits.split([2 * m.rows + m.columns for m in pieces]), strict=True
    ):
        alone_bits, both_bits = found[: m.rows], found[m.rows :]
        by_rows = _saved(count, rows_agree, m.rows) if count else 0.0
        by_both = _saved(count, both_agree, m.rows + m.columns) if count else 0.0
        kind = BOTH if by_both > by_rows else ROWS
        if max(by_rows, by_both) < max(LEAST_BITS, LEAST_SHARE * count):
            kind = NONE
        some |= kind != NONE
        told += [torch.tensor([kind & 1, kind >> 1], dtype=torch.bool)]
        told += [[], [alone_bits], [both_bits]][kind]
    if not some:
        return torch.empty(0, dtype=torch.uint8)
    return _packed(torch.cat(told))


def _packed(bits: Tensor) -> Tensor:
    rows = torch.nn.functional.pad(bits.to(torch.uint8), (0, -bits.numel() % 8)).view(-1, 8)
    return (rows << torch.arange(8, dtype=torch.uint8)).sum(1).to(torch.uint8)


def align_flip(x: Tensor, data: Tensor, layout: Tensor, out: Tensor) -> None:
    """``out`` becomes x with the signs of a description. See the schema."""
    raw = host.read(data)
    found, end = _told(raw, layout)
    bits = (raw[:, None] >> torch.arange(8, dtype=torch.uint8) & 1).view(-1).bool()
    if raw.numel() != (end + 7) // 8 or bool(bits[end:].any()):
        raise CorruptMessage("the signs of rows and columns have another length, or do not end in zeros")
    if out is not x:
        out.copy_(x)
    for m, kind, at in found:
        rows, columns = bits[at : at + m.rows], bits[at + m.rows : at + m.rows + m.columns]
        place = torch.arange(m.phase, m.phase + m.count, device=x.device)
        flips = rows.to(x.device)[place // m.columns]
        if kind == BOTH:
            flips = flips ^ columns.to(x.device)[place % m.columns]
        part = m.of(out)
        part.copy_(torch.where(flips, -part, part))

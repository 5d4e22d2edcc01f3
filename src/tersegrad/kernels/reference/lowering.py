"""Rate-distortion-optimised levels in plain torch: their definition. Nothing on the wire changes.

Rounding to nearest gives the smallest error at a step. Where one level is dearer than the one below it, it pays to take the lower
one a little beyond the middle between them, and a smaller step: of all levels of a coordinate the one with the least squared error
plus an eighth of a squared step per bit. The bits follow from the counts of the levels to nearest, in each scale class by its own,
so that a level that costs b bits more than its lower neighbour has to be b/16 of a step beyond the middle.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from tersegrad.core.targets import toward_zero
from tersegrad.kernels.reference.classes import BLOCK, COUNTED, EXACT
from tersegrad.kernels.reference.rounding import ordered_sum

__all__ = ["Block", "fitted", "log2_sixteenths", "lowered", "lowered_alone", "recount", "thresholds"]

# Levels up to this one may be lowered; where levels are escaped, windows are larger.
HIGHEST = 7
# Bits count in sixteenths, up to six; each sixteenth is 1/256 of a step.
MOST, STEP = 96, 256


@dataclasses.dataclass(frozen=True)
class Block:
    """Levels that share a scale: how they came about, and what they tell of the coordinates."""

    k: Tensor
    step: float
    scale: float = 0.0
    norm: float = 0.0
    error: float = 0.0
    dot: float = 0.0  # <x, k>
    energy: float = 0.0  # ||k||^2


def fitted(k: Tensor, step: float, norm: float, dot: float, energy: float) -> Block:
    """A block with its least-squares scale, 0 where there are no levels but zero."""
    scale = toward_zero(dot / energy) if energy else 0.0
    return Block(k, step, scale, norm, norm - 2 * scale * dot + scale * scale * energy, dot, energy)


def log2_sixteenths(a: int, b: int) -> int:
    """16 log2(a / b), nearly and in whole numbers, for b <= a < 2^32.

    >>> log2_sixteenths(8, 1), log2_sixteenths(3, 2), log2_sixteenths(5, 5)
    (48, 9, 0)
    """
    m = (a << 31) // b
    found = m.bit_length() - 32
    m >>= found
    for _ in range(4):
        m = m * m >> 31
        up = m >> 32
        found, m = 2 * found + up, m >> up
    return found


def thresholds(counts: Tensor) -> Tensor:
    """For each table, and for a level of 0, 1, ..., HIGHEST and above: from which |x| / step on it stays, float32."""
    window = counts.shape[1] // 2
    rows = []
    for row in counts.tolist():
        # A level below another with the same sign; zero counts as one of each.
        each = [2 * row[window]] + [row[window - j] + row[window + j] for j in range(1, min(window, HIGHEST) + 1)]
        at = [0.0] * (HIGHEST + 2)
        for j in range(1, len(each)):
            dearer = MOST if not each[j] else min(log2_sixteenths(each[j - 1], each[j]), MOST) if each[j - 1] > each[j] else 0
            at[j] = j - 0.5 + dearer / STEP
        rows.append(at)
    return torch.tensor(rows, dtype=torch.float32, device=counts.device)


def lower(x: Tensor, block: Block, least: Tensor, contexts: Tensor | None = None) -> tuple[Tensor, float, float]:
    """The levels of a block with some of them one lower, and what <x, k> and ||k||^2 lose."""
    size = block.k.abs()
    table = torch.zeros_like(size) if contexts is None else contexts.long()
    y = (x * (1.0 / torch.tensor(block.step, dtype=torch.float32, device=x.device))).abs()
    down = y < least[table, size.clamp(max=HIGHEST + 1)]
    dot = float(ordered_sum(x.abs().masked_fill(~down, 0).double(), lambda v: v))
    return block.k - torch.sign(block.k) * down, dot, float((2 * size - 1)[down].sum())


def lowered(x: Tensor, blocks: Sequence[Block], contexts: Tensor | None, counts: Tensor) -> list[Block]:
    """The blocks of a segment, their levels coded by tables with these counts, with levels that take fewer bits."""
    found, at, least = [], 0, thresholds(counts)
    for b in blocks:
        part = slice(at, at + b.k.numel())
        k, dot, energy = lower(x[part], b, least, None if contexts is None else contexts[part])
        found.append(fitted(k, b.step, b.norm, b.dot - dot, b.energy - energy))
        at += b.k.numel()
    return found


def lowered_alone(x: Tensor, k: Tensor, step: float) -> Tensor:
    """The levels of a vector that has one scale, with some of them one lower."""
    symbols = k.clamp(-HIGHEST - 1, HIGHEST + 1) + HIGHEST + 1
    return lower(x, Block(k, step), thresholds(torch.bincount(symbols, minlength=2 * HIGHEST + 3)[None]))[0]


def recount(counts: Tensor, contexts: Tensor, before: Tensor, after: Tensor) -> Tensor:
    """The counts of scale classes once symbols have changed: of those coordinates that were counted."""
    n = before.numel()
    taken = torch.arange(n, device=before.device) // BLOCK % (COUNTED if n >= EXACT else 1) == 0
    table = contexts[taken].long() * counts.shape[1]
    old, new = (torch.bincount(table + s[taken].long(), minlength=counts.numel()) for s in (before, after))
    return counts + (new - old).view_as(counts)

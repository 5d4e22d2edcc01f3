"""Rate-distortion-optimised trellis codes in plain torch: their definition. Nothing on the wire changes.

The nearest admissible sequence has the smallest error at a step. Where some of its integers are dear, another sequence and a smaller
step take fewer bits at the same error: the one with the least squared error plus half a squared step per bit. Bits follow from the
counts of the integers that were chosen before, in each scale class and each parity by its own; the first ones are the nearest.
Viterbi's algorithm finds it, because what an integer costs depends on its state alone. Still classes round toward zero by the same price.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tersegrad.kernels.reference.lowering import log2_sixteenths
from tersegrad.kernels.reference.trellis_classes import Found
from tersegrad.kernels.reference.trellis_code import GRID, integers

__all__ = ["PASSES", "prices"]

# Searches after the first one.
PASSES = 2
# Integers of -WINDOW to WINDOW - 1 are counted by themselves, larger ones with the last ones of their parity.
WINDOW = 16
# Bits count in sixteenths, up to six more than the cheapest integer of a class has; the metric of each.
MOST, METRIC = 96, GRID * GRID // 32


def prices(y: Tensor, label: Tensor, found: Found | None) -> Tensor:
    """What the integer nearest to y / 32 with each label, n mod 4, adds to its metric, (count, 4), if these labels were chosen before."""
    number = torch.zeros_like(y) if found is None else found.number
    moves = torch.ones_like(y, dtype=torch.bool) if found is None else ~found.still_each
    tables = 1 if found is None else len(found.still)
    places = 2 * WINDOW * number + _place(integers(y, label))
    counts = torch.bincount(places[moves], minlength=2 * WINDOW * tables).view(tables, WINDOW, 2)
    costs = torch.tensor([_costs(row) for row in counts.tolist()], device=y.device).flatten()
    every = integers(y[:, None], torch.arange(4, device=y.device))
    return costs[2 * WINDOW * number[:, None] + _place(every)]


def _place(n: Tensor) -> Tensor:
    odd = n & 1
    return torch.minimum(torch.maximum(n, odd - WINDOW), odd + WINDOW - 2) + WINDOW


def _costs(counts: list[list[int]]) -> list[int]:
    """Of the integers of a class, -WINDOW and -WINDOW + 1 first; ``counts`` has the even and the odd one of each pair."""
    # Half a count more for each, so that none is zero.
    totals = [2 * sum(pair[odd] for pair in counts) + WINDOW for odd in (0, 1)]
    bits = [log2_sixteenths(totals[odd], 2 * pair[odd] + 1) for pair in counts for odd in (0, 1)]
    return [METRIC * min(b - min(bits), MOST) for b in bits]

"""The trellis codes, in plain torch: which integer sequences are admissible, and the nearest of them.

In state s a coordinate may take the integers n with n = s mod 2. With z0 = n mod 2 and z1 = n div 2 mod 2 the next state is
(s >> 1) ^ g1 z1 ^ g0 z0. A block of coordinates is cut into runs; in a run coordinate i belongs to lane i mod lanes, every lane is
a trellis of its own, and all of them start in state 0. The end is free.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

# (g0, g1) by the number of states: Ungerboeck's parity-check polynomials without their lowest bit.
GENERATORS = {4: (2, 1), 8: (5, 2), 16: (9, 2), 32: (18, 4)}
# Metrics count in squares of 1/32 of a step.
GRID = 32


def next_state(states: int, s: int, z1: int) -> int:
    """Where a state leads; z0 is its lowest bit.

    >>> [(next_state(8, s, 0), next_state(8, s, 1)) for s in range(8)]
    [(0, 2), (5, 7), (1, 3), (4, 6), (2, 0), (7, 5), (3, 1), (6, 4)]
    """
    g0, g1 = GENERATORS[states]
    return s >> 1 ^ (g1 if z1 else 0) ^ (g0 if s & 1 else 0)


@functools.cache
def branches(states: int) -> tuple[tuple[tuple[int, int], ...], tuple[tuple[int, int], ...]]:
    """The two predecessors of every state and the labels (n mod 4) that lead from them, in the order that decides ties."""
    into: list[list[tuple[int, int]]] = [[] for _ in range(states)]
    for s in range(states):
        for z1 in (0, 1):
            into[next_state(states, s, z1)].append((s, 2 * z1 + (s & 1)))
    pairs = [(a, b) for a, b in into]
    return tuple((a[0], b[0]) for a, b in pairs), tuple((a[1], b[1]) for a, b in pairs)


def start_penalty(states: int, most: int) -> int:
    """More than any path can gain by a start outside of state 0, which it could leave in log2(states) steps of at most so much."""
    return most * (states.bit_length() - 1) + 1


def integers(y: Tensor, label: Tensor) -> Tensor:
    """The integers nearest to y / 32 that have these labels."""
    return 4 * (y - GRID * label + 2 * GRID >> 7) + label


class Grid:
    """How a block of ``count`` coordinates lies in runs, steps and lanes."""

    def __init__(self, count: int, lanes: int, run: int) -> None:
        self.count, self.lanes = count, lanes
        # Blocks of few lanes are one run.
        self.run = run if count > run else -(-count // lanes) * lanes
        self.runs = -(-count // self.run) if count else 0

    def steps_first(self, values: Tensor) -> Tensor:
        """(steps, runs * lanes), padded with zeros."""
        padded = values.new_zeros(self.runs * self.run)
        padded[: self.count] = values
        return padded.view(self.runs, -1, self.lanes).transpose(0, 1).reshape(-1, self.runs * self.lanes)

    def flat(self, values: Tensor) -> Tensor:
        """The reverse of :meth:`steps_first`."""
        return values.view(-1, self.runs, self.lanes).transpose(0, 1).reshape(-1)[: self.count]

    def active(self, device: torch.device) -> Tensor:
        return self.steps_first(torch.ones(self.count, dtype=torch.bool, device=device))


def nearest_labels(y: Tensor, grid: Grid, states: int, still: Tensor | None = None, prices: Tensor | None = None) -> Tensor:
    """The labels, n mod 4, of the admissible integers nearest to y / 32 (Viterbi's algorithm, y an integer vector); uint8.

    Coordinates that are ``still`` leave the states alone; their labels mean nothing. ``prices``, (count, 4): what each label adds to
    the squared distance.
    """
    device = y.device
    rows, active = grid.steps_first(y), grid.active(device)
    if still is not None:
        active = active & ~grid.steps_first(still)
    before, label = (torch.tensor(t, device=device) for t in branches(states))
    most = 4 * GRID * GRID + (0 if prices is None else int(prices.max()))
    added = None if prices is None else torch.stack([grid.steps_first(p.contiguous()) for p in prices.unbind(1)], 1).int()
    cost = torch.full((states, rows.shape[1]), start_penalty(states, most), dtype=torch.int32, device=device)
    cost[0] = 0
    subsets = GRID * torch.arange(4, dtype=rows.dtype, device=device)[:, None]
    taken = torch.empty((rows.shape[0], *cost.shape), dtype=torch.bool, device=device)
    for t in range(rows.shape[0]):
        f = (rows[t] - subsets + 2 * GRID & 4 * GRID - 1) - 2 * GRID
        metric = (f * f).to(torch.int32) if added is None else (f * f).to(torch.int32) + added[t]
        first = cost[before[:, 0]] + metric[label[:, 0]]
        second = cost[before[:, 1]] + metric[label[:, 1]]
        taken[t] = second < first
        cost = torch.where(active[t], torch.minimum(first, second), cost)
    # The lowest state among the cheapest.
    state = (cost.long() * states + torch.arange(states, device=device)[:, None]).amin(0) % states
    labels = torch.zeros(rows.shape, dtype=torch.uint8, device=device)
    for t in range(rows.shape[0] - 1, -1, -1):
        choice = taken[t].gather(0, state[None])[0].long()
        labels[t] = label[state, choice].to(torch.uint8)
        state = torch.where(active[t], before[state, choice], state)
    return grid.flat(labels)


def parities(bits: Tensor, flips: Tensor | None, grid: Grid, states: int, still: Tensor | None = None) -> Tensor:
    """z0 of every coordinate of a block, from the lowest bits of its indices; 0 where they are ``still``.

    z1 is the bit, or with ``flips``, (count, 2), the exclusive or of the bit and the column of z0.
    """
    g0, g1 = GENERATORS[states]
    rows = grid.steps_first(bits)
    turned = None if flips is None else (grid.steps_first(flips[:, 0]), grid.steps_first(flips[:, 1]))
    moves = None if still is None else ~grid.steps_first(still)
    state = torch.zeros(rows.shape[1], dtype=torch.int64, device=bits.device)
    odd = torch.empty(rows.shape, dtype=torch.uint8, device=bits.device)
    for t in range(rows.shape[0]):
        z0 = state & 1
        odd[t] = z0 if moves is None else z0 * moves[t]
        z1 = rows[t].long()
        if turned is not None:
            z1 = z1 ^ torch.where(z0 == 1, turned[1][t], turned[0][t]).long()
        after = state >> 1 ^ g1 * z1 ^ g0 * z0
        state = after if moves is None else torch.where(moves[t], after, state)
    return grid.flat(odd)

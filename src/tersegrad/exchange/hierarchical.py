"""Hierarchical: dense inside a node, where links are fast; compressed between nodes, where they are not.

Ranks r n .. r n + n - 1 form node r (the last node may be smaller). The buffer is cut into lanes, one for each rank of a full node. Inside
a node every lane is summed, exactly, by its owner; the owners of a lane, one in each node, average their sums by any other exchange
(two-shot or all-gather) with any compressor; the owners then hand the mean to the ranks of their node, exactly.

Compared with one exchange over all ranks, 1/n of the bytes leave a node's ranks towards other nodes, messages are averages of n ranks
(less noise to encode), and residuals take 1/n of the memory. The error is that of the exchange between nodes over the nodes' means
v_k, and (1/K) sum ||v_k||^2 <= (1/p) sum ||x_i||^2 where nodes are of one size: its guarantee carries over.

No process group but the given one is needed: what a lane's owners exchange among themselves is an all-to-all of the whole group in which
all others take part with nothing. A rank that owns several lanes (in a smaller node) sends their bytes together.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tersegrad.core import trust
from tersegrad.core.protocol import Context, Spec, Stats, flat_float32
from tersegrad.core.state import slice_spec
from tersegrad.core.text import require
from tersegrad.exchange.exact import sum_in_order
from tersegrad.exchange.steps import AllGather, AllToAll, Collective, Exchange, Part, Steps
from tersegrad.exchange.two_shot import borders


@dataclasses.dataclass(frozen=True)
class Nodes:
    """Which ranks share a node, and which of them owns a lane."""

    size: int
    per_node: int

    @property
    def count(self) -> int:
        return -(-self.size // self.per_node)

    @property
    def lanes(self) -> int:
        return min(self.per_node, self.size)

    def members(self, node: int) -> range:
        return range(node * self.per_node, min(self.size, (node + 1) * self.per_node))

    def owner(self, lane: int, node: int) -> int:
        members = self.members(node)
        return members[lane * len(members) // self.lanes]

    def owned(self, rank: int) -> list[int]:
        """The lanes of a rank; they are neighbours."""
        return [lane for lane in range(self.lanes) if self.owner(lane, rank // self.per_node) == rank]


@dataclasses.dataclass(frozen=True)
class HierarchicalState:
    """States of the exchange between nodes, for the lanes that this rank owns; none where there is one node only."""

    lanes: tuple[Any, ...]


@dataclasses.dataclass(frozen=True)
class HierarchicalExchange:
    """Mean over ranks: exact inside nodes of ``ranks_per_node`` ranks, by the exchange ``between`` among nodes."""

    between: Exchange[Any]
    ranks_per_node: int

    def __post_init__(self) -> None:
        require(self.ranks_per_node >= 1, f"ranks_per_node is at least 1, got {self.ranks_per_node}")

    def _lanes(self, spec: Spec, rank: int, size: int) -> tuple[Nodes, list[int], dict[int, Spec]]:
        """The nodes, where lanes begin and end, and the specs of the lanes that a rank owns and exchanges."""
        nodes = Nodes(size, self.ranks_per_node)
        at = borders(spec.numel, nodes.lanes)
        owned = nodes.owned(rank) if nodes.count > 1 else []
        return nodes, at, {lane: slice_spec(spec, at[lane], at[lane + 1]) for lane in owned}

    def init(self, spec: Spec, device: torch.device | str, rank: int, size: int) -> HierarchicalState:
        nodes, _, lanes = self._lanes(spec, rank, size)
        node = rank // self.ranks_per_node
        return HierarchicalState(tuple(self.between.init(part, device, node, nodes.count) for part in lanes.values()))

    def steps(
        self,
        x: Tensor,
        state: HierarchicalState,
        spec: Spec,
        ctx: Context,
        rank: int,
        size: int,
        stats: Stats | None = None,
        into: Tensor | None = None,
    ) -> Steps[HierarchicalState]:
        nodes, at, lanes = self._lanes(spec, rank, size)
        node = rank // self.ranks_per_node
        # The mean over nodes of what they exchange is the mean over ranks.
        weight = nodes.count / size
        total = yield from self._sum_inside(flat_float32(x), nodes, at, rank)
        total.mul_(weight)
        shares: list[Stats | None] = [None] * len(lanes)
        if stats is not None and stats.second_moment is not None:
            moment = yield from self._sum_inside(flat_float32(stats.second_moment), nodes, at, rank)
            moment.mul_(weight**2)
            shares = [Stats(part) for part in moment.split([part.numel for part in lanes.values()])] if lanes else []
        if lanes:
            vectors = total.split([part.numel for part in lanes.values()])
            running = {
                lane: self.between.steps(vector, before, part, ctx.child(lane), node, nodes.count, share)
                for (lane, part), vector, before, share in zip(lanes.items(), vectors, state.lanes, shares, strict=True)
            }
            ended = yield from _together(running, nodes, size)
            total = torch.cat([mean for mean, _ in ended.values()])
            state = HierarchicalState(tuple(after for _, after in ended.values()))
        mean = yield from self._spread_inside(total, nodes, at, rank)
        return mean, state

    def _sum_inside(self, x: Tensor, nodes: Nodes, at: Sequence[int], rank: int) -> Any:
        """The sum over this node's ranks of the lanes that this rank owns."""
        widths = _widths(nodes, at, rank // self.ranks_per_node)
        send = tuple(4 * widths.get(r, 0) for r in range(nodes.size))
        receive = tuple(4 * widths[rank] if r in widths else 0 for r in range(nodes.size))
        arrived = yield AllToAll(x.view(torch.uint8), send, receive, intra_node=True)
        return sum_in_order(arrived.view(torch.float32).view(len(widths), widths[rank]).unbind(0))

    def _spread_inside(self, mine: Tensor, nodes: Nodes, at: Sequence[int], rank: int) -> Any:
        """The lanes of all ranks of this node, one after another."""
        widths = _widths(nodes, at, rank // self.ranks_per_node)
        send = tuple(4 * widths[rank] if r in widths else 0 for r in range(nodes.size))
        receive = tuple(4 * widths.get(r, 0) for r in range(nodes.size))
        arrived = yield AllToAll(mine.view(torch.uint8).repeat(len(widths)), send, receive, intra_node=True)
        return arrived.view(torch.float32)

    def parts(self, state: HierarchicalState, spec: Spec, rank: int, size: int) -> list[Part]:
        nodes, at, lanes = self._lanes(spec, rank, size)
        found = []
        for (lane, sub), inner in zip(lanes.items(), state.lanes, strict=True):
            for part in self.between.parts(inner, sub, rank // self.ranks_per_node, nodes.count):
                found.append(dataclasses.replace(part, start=part.start + at[lane], stop=part.stop + at[lane]))
        return found

    def join(self, parts: Sequence[Any], spec: Spec, rank: int, size: int) -> HierarchicalState:
        nodes, _, lanes = self._lanes(spec, rank, size)
        if not lanes:
            return HierarchicalState(())
        each = len(parts) // len(lanes)
        groups = [parts[k * each : (k + 1) * each] for k in range(len(lanes))]
        node = rank // self.ranks_per_node
        joined = [self.between.join(group, sub, node, nodes.count) for group, sub in zip(groups, lanes.values())]
        return HierarchicalState(tuple(joined))


def _widths(nodes: Nodes, at: Sequence[int], node: int) -> dict[int, int]:
    """How many coordinates each rank of a node owns."""
    widths = dict.fromkeys(nodes.members(node), 0)
    for lane in range(nodes.lanes):
        widths[nodes.owner(lane, node)] += at[lane + 1] - at[lane]
    return widths


def _together(lanes: Mapping[int, Steps[Any]], nodes: Nodes, size: int) -> Any:
    """Run the exchanges of several lanes step by step; their collectives among owners become one all-to-all of all ranks."""
    answers: dict[int, Tensor | None] = dict.fromkeys(lanes)
    while True:
        requests: dict[int, Collective] = {}
        ended: dict[int, tuple[Tensor, Any]] = {}
        for lane, steps in lanes.items():
            answer = answers[lane]
            try:
                # What a lane ends with is sent on at once.
                with trust.postponing(None):
                    requests[lane] = next(steps) if answer is None else steps.send(answer)
            except StopIteration as stop:
                ended[lane] = stop.value
        if not requests:
            return ended
        outgoing: list[list[Tensor]] = [[] for _ in range(size)]
        # Bytes of each lane, in the order of the lanes.
        incoming: list[list[int]] = [[] for _ in range(size)]
        for lane, request in requests.items():
            if isinstance(request, AllGather):
                pieces, lengths = (request.data,) * nodes.count, (request.data.numel(),) * nodes.count
            else:
                assert isinstance(request, AllToAll)
                pieces, lengths = torch.split(request.data, list(request.send)), request.receive
            for node in range(nodes.count):
                outgoing[nodes.owner(lane, node)].append(pieces[node])
                incoming[nodes.owner(lane, node)].append(lengths[node])
        send = tuple(sum(piece.numel() for piece in pieces) for pieces in outgoing)
        arrived = yield AllToAll(torch.cat(list(itertools.chain(*outgoing))), send, tuple(map(sum, incoming)))
        received = [iter(torch.split(part, n)) for part, n in zip(torch.split(arrived, [sum(n) for n in incoming]), incoming)]
        for lane in requests:
            answers[lane] = torch.cat([next(received[nodes.owner(lane, node)]) for node in range(nodes.count)])

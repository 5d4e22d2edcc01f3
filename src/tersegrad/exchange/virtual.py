"""n ranks in one process: the same exchange code and the same bytes, without a network.

What tests compare real process groups with, and what single-device experiments use. The generators of all ranks advance in
lockstep; a rank that asks for another collective than the others is an error here, where it would hang in a process group.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from tersegrad.core.protocol import Context, Spec, Stats
from tersegrad.exchange.exact import sum_in_order
from tersegrad.exchange.steps import AllGather, AllReduce, AllToAll, Collective, Exchange, Steps

R = TypeVar("R")


@dataclasses.dataclass(frozen=True)
class Outcome(Generic[R]):
    """What an exchange between virtual ranks gave."""

    mean: Tensor  # the same on every rank
    states: tuple[R, ...]
    sent: tuple[int, ...]  # bytes that left each rank
    intra_node: tuple[int, ...]  # of them, bytes that stayed within its node


def run(
    exchange: Exchange[R],
    xs: Sequence[Tensor],
    states: Sequence[R],
    spec: Spec,
    ctx: Context,
    stats: Sequence[Stats | None] | None = None,
) -> Outcome[R]:
    """Exchange one vector a rank; raises if the ranks do not end with the same bits."""
    size = len(xs)
    given = stats if stats is not None else [None] * size
    steps: list[Steps[R]] = [
        exchange.steps(x, state, spec, ctx, rank, size, share)
        for rank, (x, state, share) in enumerate(zip(xs, states, given, strict=True))
    ]
    sent, intra_node = [0] * size, [0] * size
    values: list[Tensor | None] = [None] * size
    results: list[tuple[Tensor, R]] = []
    while True:
        requests: list[Collective] = []
        for rank, generator in enumerate(steps):
            value = values[rank]
            try:
                requests.append(next(generator) if value is None else generator.send(value))
            except StopIteration as stop:
                results.append(stop.value)
        if results:
            break
        values = list(deliver(requests, sent, intra_node))
    if requests or len(results) != size:
        raise RuntimeError(f"{len(results)} of {size} ranks ended while others still exchange: their steps differ")
    mean = results[0][0]
    for rank, (other, _) in enumerate(results):
        if not torch.equal(mean.view(torch.int32), other.view(torch.int32)):
            raise RuntimeError(f"rank {rank} decoded another mean than rank 0")
    return Outcome(mean, tuple(state for _, state in results), tuple(sent), tuple(intra_node))


def init(exchange: Exchange[R], spec: Spec, size: int, device: torch.device | str = "cpu") -> list[R]:
    """The first states of all ranks."""
    return [exchange.init(spec, device, rank, size) for rank in range(size)]


def deliver(requests: Sequence[Any], sent: list[int], intra_node: list[int]) -> list[Tensor]:
    """What each rank receives from one collective of all; the bytes that leave each of them are added to ``sent``."""
    size = len(requests)
    kinds = {type(r) for r in requests}
    if len(kinds) != 1:
        raise RuntimeError("the ranks ask for different collectives")
    if kinds == {AllGather}:
        lengths = {r.data.numel() for r in requests}
        if len(lengths) != 1:
            raise RuntimeError(f"an all-gather needs equal lengths, got {sorted(lengths)}")
        for rank in range(size):
            sent[rank] += requests[rank].data.numel() * (size - 1)
        return [torch.cat([r.data for r in requests])] * size
    if kinds == {AllReduce}:
        total = sum_in_order([r.data for r in requests])
        for rank, request in enumerate(requests):
            sent[rank] += request.sent(size)
        return [total.clone() for _ in requests]
    pieces = [torch.split(r.data, list(r.send)) for r in requests]
    for a, request in enumerate(requests):
        left = sum(request.send) - request.send[a]
        sent[a] += left
        intra_node[a] += left if request.intra_node else 0
        for b, other in enumerate(requests):
            if request.send[b] != other.receive[a]:
                raise RuntimeError(f"rank {a} sends {request.send[b]} bytes to rank {b}, which expects {other.receive[a]}")
    assert kinds == {AllToAll}
    return [torch.cat([pieces[a][b] for a in range(size)]) for b in range(size)]

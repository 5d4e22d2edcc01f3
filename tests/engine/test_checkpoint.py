"""States of every exchange by parameter: saved, read back bit for bit, and averaged for another world size."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import tersegrad
from tersegrad.core.errors import BadConfiguration
from tersegrad.core.protocol import Context, Piece, Spec
from tersegrad.engine import Group, Lane, checkpoint
from tersegrad.exchange import Exchange, scheme, virtual
from tests.exchange.test_exchange import vector

SPEC = Spec(
    tuple(Piece(s, 0, torch.Size(s).numel(), n) for n, s in (("a", (20, 30)), ("b", (30,)), ("c", (40, 11)), ("d", (3, 5))))
)
COMPRESSOR = tersegrad.parse("by_tensor(error_feedback(top_k(fraction=0.1)), small=identity, below=20)")
TWICE = f"two_shot(second={COMPRESSOR})"  # a residual in both rounds
KINDS = (
    "all_gather",
    "two_shot",
    TWICE,
    "hierarchical(ranks_per_node=2)",
    "hierarchical(ranks_per_node=3, between=all_gather)",
    "power_sgd(rank=2)",
    "power_sgd(rank=2, factors=subtractive_dithering(omega=0.1))",
)


def lane(exchange: Exchange[Any], state: Any, rank: int, size: int) -> Lane:
    """One rank's exchange and state, without a process group."""
    link: Any = SimpleNamespace(rank=rank, size=size)
    return Lane(Group(0, SPEC, torch.float32, torch.device("cpu")), link, COMPRESSOR, scheme("two_shot"), exchange, state)


def trained(exchange: Exchange[Any], size: int, first: int, last: int, states: list[Any]) -> tuple[list[Any], list[bytes]]:
    means = []
    for step in range(first, last):
        xs = [vector(SPEC.numel, r, step) for r in range(size)]
        outcome = virtual.run(exchange, xs, states, SPEC, Context(seed=2, step=step))
        states = list(outcome.states)
        means.append(outcome.mean.numpy().tobytes())
    return states, means


def residuals(exchange: Exchange[Any], states: list[Any], size: int) -> dict[str, tuple[Tensor, Tensor]]:
    """By round and parameter, the sum over ranks of what they keep, and how many ranks keep each element."""
    found: dict[str, tuple[Tensor, Tensor]] = {}
    for rank, state in enumerate(states):
        for round_, parameters in checkpoint.save(lane(exchange, state, rank, size)).items():
            for name, ranges in parameters.items():
                numel = next(p.numel for p in SPEC.pieces if p.name == name)
                total, count = found.setdefault(f"{round_}.{name}", (torch.zeros(numel), torch.zeros(numel)))
                for key, entries in ranges.items():
                    a, b = map(int, key.split(":"))
                    (value,) = [v for k, v in entries.items() if k.endswith("residual")]
                    total[a:b] += value
                    count[a:b] += 1
    return found


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [1, 3, 5])
def test_a_rank_continues_from_what_it_saved(kind: str, size: int) -> None:
    exchange = scheme(kind).make(COMPRESSOR)
    states, _ = trained(exchange, size, 0, 3, virtual.init(exchange, SPEC, size))
    saved = [checkpoint.save(lane(exchange, state, rank, size)) for rank, state in enumerate(states)]
    fresh = virtual.init(exchange, SPEC, size)
    again = [checkpoint.restore(lane(exchange, f, rank, size), [saved[rank]]) for rank, f in enumerate(fresh)]
    assert trained(exchange, size, 3, 5, states)[1] == trained(exchange, size, 3, 5, again)[1]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("old", "new"), [(4, 2), (3, 5), (5, 1), (2, 4)])
def test_another_world_size_starts_from_the_mean(kind: str, old: int, new: int) -> None:
    exchange = scheme(kind).make(COMPRESSOR)
    states, _ = trained(exchange, old, 0, 3, virtual.init(exchange, SPEC, old))
    saved = [checkpoint.save(lane(exchange, state, rank, old)) for rank, state in enumerate(states)]
    fresh = virtual.init(exchange, SPEC, new)
    again = [checkpoint.restore(lane(exchange, f, rank, new), saved) for rank, f in enumerate(fresh)]
    before, after = residuals(exchange, states, old), residuals(exchange, again, new)
    one_node = [size <= getattr(exchange, "ranks_per_node", 0) for size in (old, new)]  # which keeps nothing
    assert not before if one_node[0] else before
    assert not after if one_node[1] else after
    for name, (total, count) in after.items():
        mean = torch.zeros_like(total) if one_node[0] else before[name][0] / before[name][1]
        torch.testing.assert_close(total / count, mean)
    trained(exchange, new, 3, 4, again)  # ranks agree


def test_a_missing_rank_is_named() -> None:
    exchange = scheme(TWICE).make(COMPRESSOR)
    states, _ = trained(exchange, 4, 0, 2, virtual.init(exchange, SPEC, 4))
    saved = [checkpoint.save(lane(exchange, state, rank, 4)) for rank, state in enumerate(states)]
    (fresh,) = virtual.init(exchange, SPEC, 1)
    with pytest.raises(BadConfiguration, match="not saved: pass the states of all ranks"):
        checkpoint.restore(lane(exchange, fresh, 0, 1), saved[:2])

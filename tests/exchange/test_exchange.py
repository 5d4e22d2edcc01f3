"""Exchanges on real process groups equal the virtual ones bit for bit, and ranks agree."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import tersegrad
from tersegrad.core.protocol import Context, Spec
from tersegrad.exchange import AllGatherExchange, Exchange, ProcessGroup, TwoShotExchange, start, virtual
from tests.exchange.pool import Pool, pool

KINDS: dict[str, type[Any]] = {"all_gather": AllGatherExchange, "two_shot": TwoShotExchange}
TEXTS = (
    "identity",
    "bf16",
    "qsgd(norm=max)",
    "sparse_dithering(alpha=0.1)",
    "error_feedback(top_k(fraction=0.05))",
    "error_feedback(random_k(fraction=0.1))",
    "random_sparse_dithering(omega=0.5)",
)
SIZES = (0, 1, 65, 3001)


def vector(d: int, rank: int, step: int) -> Tensor:
    return torch.randn(d, generator=torch.Generator().manual_seed(1000 * step + rank)) * (1 + rank)


def make(kind: str, text: str) -> Exchange[Any]:
    exchange: Exchange[Any] = KINDS[kind](tersegrad.parse(text))
    return exchange


def real_steps(kind: str, text: str, d: int, steps: int) -> list[tuple[bytes, int]]:
    group = ProcessGroup()
    exchange, spec = make(kind, text), Spec.flat(d)
    state = exchange.init(spec, "cpu", group.rank, group.size)
    results = []
    for step in range(steps):
        pending = start(exchange, vector(d, group.rank, step), state, spec, Context(seed=5, step=step), group)
        mean, state = pending.wait()
        results.append((mean.numpy().tobytes(), pending.sent))
    return results


def interleaved(d: int) -> bytes:
    """Three exchanges under way at once, advanced in one order on all ranks."""
    group, spec = ProcessGroup(), Spec.flat(d)
    exchange = make("two_shot", "sparse_dithering(alpha=0.1)")
    pendings = [
        start(
            exchange,
            vector(d, group.rank, k),
            exchange.init(spec, "cpu", group.rank, group.size),
            spec,
            Context(buffer=k),
            group,
        )
        for k in range(3)
    ]
    while not all(p.done for p in pendings):
        for p in pendings:
            p.advance()
    return b"".join(p.wait()[0].numpy().tobytes() for p in pendings)


@pytest.fixture(scope="module")
def workers() -> Iterator[Pool]:
    with pool(3) as p:
        yield p


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("text", TEXTS)
def test_process_groups_equal_virtual_ranks_bit_for_bit(workers: Pool, kind: str, text: str) -> None:
    exchange, steps, size = make(kind, text), 2, workers.size
    for d in SIZES:
        spec = Spec.flat(d)
        real = workers.run(real_steps, kind, text, d, steps)
        states = virtual.init(exchange, spec, size)
        for step in range(steps):
            outcome = virtual.run(exchange, [vector(d, r, step) for r in range(size)], states, spec, Context(seed=5, step=step))
            states = list(outcome.states)
            for rank in range(size):
                assert real[rank][step] == (outcome.mean.numpy().tobytes(), outcome.sent[rank])


def test_several_exchanges_under_way_at_once(workers: Pool) -> None:
    results = workers.run(interleaved, 5000)
    assert len(set(results)) == 1
    exchange, spec = make("two_shot", "sparse_dithering(alpha=0.1)"), Spec.flat(5000)
    expected = b""
    for k in range(3):
        xs = [vector(5000, r, k) for r in range(workers.size)]
        expected += (
            virtual.run(exchange, xs, virtual.init(exchange, spec, workers.size), spec, Context(buffer=k))
            .mean.numpy()
            .tobytes()
        )
    assert results[0] == expected


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
def test_identity_gives_the_mean_in_rank_order(kind: str, size: int) -> None:
    for d in (0, 1, 63, 64, 65, 1000):
        exchange, spec = make(kind, "identity"), Spec.flat(d)
        xs = [vector(d, r, 0) for r in range(size)]
        outcome = virtual.run(exchange, xs, virtual.init(exchange, spec, size), spec, Context())
        total = torch.zeros(d)
        for x in xs:
            total += x
        assert torch.equal(outcome.mean, total * (1.0 / size))


def test_traffic_follows_the_formulas() -> None:
    d = 1 << 16
    spec, text = Spec.flat(d), "sparse_dithering(alpha=0.1)"
    alone, _ = tersegrad.parse(text).encode(vector(d, 0, 0), None, Context())
    for size in (2, 4, 8):
        for kind, messages in (("all_gather", size - 1), ("two_shot", 2 * (size - 1) / size)):
            exchange = make(kind, text)
            xs = [vector(d, r, 0) for r in range(size)]
            sent = virtual.run(exchange, xs, virtual.init(exchange, spec, size), spec, Context()).sent
            for n in sent:
                assert abs(n / (messages * int(alone.nbytes)) - 1) < 0.1


def test_two_shot_error_bounds() -> None:
    d, size, alpha = 4096, 4, 0.1
    spec = Spec.flat(d)
    for seed in range(5):
        xs = [vector(d, r, seed) for r in range(size)]
        exchange = make("two_shot", f"sparse_dithering(alpha={alpha})")
        outcome = virtual.run(exchange, xs, virtual.init(exchange, spec, size), spec, Context(seed=seed))
        error = float((outcome.mean - torch.stack(xs).mean(0)).double().norm())
        power = math.sqrt(sum(float(x.double().square().sum()) for x in xs) / size)
        root = math.sqrt(alpha)
        assert error <= (root + root * (1 + root)) * power * (1 + 1e-6)


def test_non_finite_on_one_rank_is_nan_on_all() -> None:
    for kind in KINDS:
        exchange, spec = make(kind, "error_feedback(sparse_dithering(nu=0.1))"), Spec.flat(500)
        xs = [vector(500, r, 0) for r in range(3)]
        xs[1][7] = math.inf
        outcome = virtual.run(exchange, xs, virtual.init(exchange, spec, 3), spec, Context())
        assert bool(torch.isnan(outcome.mean).any())


def test_steps_that_differ_are_an_error_not_a_hang() -> None:
    spec = Spec.flat(100)

    class Odd(AllGatherExchange):
        def steps(self, x: Tensor, state: Any, spec: Spec, ctx: Context, rank: int, size: int, stats: Any = None) -> Any:
            other = TwoShotExchange(self.compressor)
            return (
                super().steps(x, state, spec, ctx, rank, size)
                if rank
                else other.steps(x, other.init(spec, "cpu", 0, size), spec, ctx, 0, size)
            )

    exchange = Odd(tersegrad.parse("identity"))
    with pytest.raises(RuntimeError):
        virtual.run(exchange, [torch.ones(100)] * 2, virtual.init(exchange, spec, 2), spec, Context())

"""PowerSGD: the method of its paper, on virtual ranks and on real ones."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import Tensor

import tersegrad
from tersegrad.compressors import Identity
from tersegrad.core import state as states
from tersegrad.core.errors import BadConfiguration
from tersegrad.core.protocol import Compressor, Context, Piece, Spec
from tersegrad.core.state import Parts
from tersegrad.exchange import PowerSGDExchange, ProcessGroup, scheme, start, virtual
from tests.exchange.pool import Pool, as_in_a_rank
from tests.exchange.test_exchange import vector

SHAPES = {
    "conv": (8, 6, 3, 3),
    "bias": (30,),
    "wide": (12, 90),
    "thin": (1, 40),
    "empty": (0, 5),
    "tall": (70, 20),
    "two": (2, 2),
}
SPEC = Spec(tuple(Piece(shape, 0, math.prod(shape), name) for name, shape in SHAPES.items()))
DITHERED: Compressor[Any] = tersegrad.parse("subtractive_dithering(omega=0.1)")


def test_what_is_a_matrix() -> None:
    exchange = PowerSGDExchange(2)
    sizes = {p.name: exchange.matrix(p) for p in SPEC.pieces}
    assert sizes == {
        "conv": (8, 54), "bias": None, "wide": (12, 90), "thin": None, "empty": None, "tall": (70, 20), "two": None,
    }  # fmt: skip
    assert set(exchange.sent_exactly(SPEC)) == {"bias", "thin", "empty", "two"}
    assert exchange.matrix(Piece((70, 20), 0, 700)) is None
    assert exchange.sent_exactly(Spec((Piece((70, 20), 0, 700, "cut"),))) == {"cut": "cut out of a tensor"}


def low_rank(n: int, m: int, r: int, seed: int) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(n, r, generator=g) @ torch.randn(r, m, generator=g)


def test_a_mean_of_low_rank_is_sent_exactly() -> None:
    spec, size = Spec((Piece((50, 40), 0, 2000, "w"),)), 3
    exchange = PowerSGDExchange(3)
    noise = [vector(2000, r, 0) for r in range(size)]
    centre = torch.stack(noise).mean(0)
    target = low_rank(50, 40, 3, 1).view(-1)
    outcome = virtual.run(exchange, [target + x - centre for x in noise], virtual.init(exchange, spec, size), spec, Context())
    torch.testing.assert_close(outcome.mean, target, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_residuals_hold_what_was_not_sent(size: int) -> None:
    exchange = PowerSGDExchange(2)
    kept = virtual.init(exchange, SPEC, size)
    sent, given = torch.zeros(SPEC.numel, dtype=torch.float64), torch.zeros(SPEC.numel, dtype=torch.float64)
    for step in range(12):
        xs = [vector(SPEC.numel, r, step) for r in range(size)]
        before = kept
        outcome = virtual.run(exchange, xs, kept, SPEC, Context(step=step))
        kept = list(outcome.states)
        sent += outcome.mean
        given += torch.stack(xs).double().mean(0)
        for x, old, new in zip(xs, before, kept):
            for (j, a), (_, b) in zip(old.states, new.states):
                piece = x.split([p.numel for p in SPEC.pieces])[j]
                assert float(b.residual.norm()) <= float((piece + a.residual).norm()) * (1 + 1e-5)
    left = torch.zeros(SPEC.numel, dtype=torch.float64)
    for state in kept:
        for j, matrix in state.states:
            at = sum(p.numel for p in SPEC.pieces[:j])
            left[at : at + matrix.residual.numel()] += matrix.residual.double() / size
    torch.testing.assert_close(sent + left, given, rtol=1e-4, atol=1e-4)


def test_the_iteration_finds_the_best_factors() -> None:
    """A matrix with a spectrum that falls: after a few steps the projection loses hardly more than the best one of its rank."""
    n, m, r = 60, 50, 4
    u, v = (torch.linalg.qr(torch.randn(k, 50, generator=torch.Generator().manual_seed(k)))[0] for k in (n, m))
    matrix = u @ torch.diag(0.7 ** torch.arange(50.0)) @ v.T
    spec, exchange = Spec((Piece((n, m), 0, n * m, "w"),)), PowerSGDExchange(r)
    best = float(torch.linalg.svdvals(matrix)[r:].square().sum())
    (state,) = virtual.init(exchange, spec, 1)
    losses = []
    for step in range(5):
        outcome = virtual.run(exchange, [matrix.reshape(-1)], [state], spec, Context(step=step))
        losses.append(float((outcome.mean.view(n, m) - matrix).square().sum()))
        ((j, after),) = outcome.states[0].states  # without the residual, to see the iteration alone
        clean = dataclasses.replace(after, residual=torch.zeros(n * m))
        state = dataclasses.replace(outcome.states[0], states=((j, clean),))
    assert losses[0] > losses[-1]
    assert best <= losses[-1] * (1 + 1e-4) <= 1.05 * best


def test_a_gradient_of_zeros_does_not_end_the_iteration() -> None:
    spec, exchange = Spec((Piece((30, 20), 0, 600, "w"),)), PowerSGDExchange(2)
    kept = virtual.init(exchange, spec, 2)
    kept = list(virtual.run(exchange, [torch.zeros(600)] * 2, kept, spec, Context()).states)
    target = low_rank(30, 20, 2, 5).view(-1)
    sent = torch.zeros(600)
    for step in (1, 2):
        outcome = virtual.run(exchange, [target] * 2, kept, spec, Context(step=step))
        kept = list(outcome.states)
        sent += outcome.mean
    torch.testing.assert_close(sent, 2 * target, rtol=1e-3, atol=1e-3)  # what the first left out came with the second


def test_traffic_is_two_means_of_the_factors() -> None:
    exchange = PowerSGDExchange(4)
    spec = Spec((Piece((300, 500), 0, 150000, "w"), Piece((500,), 0, 500, "b")))
    assert exchange.message_nbytes(spec) == 4 * (4 * 800 + 500)
    for size in (2, 4, 8):
        xs = [vector(spec.numel, r, 0) for r in range(size)]
        sent = virtual.run(exchange, xs, virtual.init(exchange, spec, size), spec, Context()).sent
        expected = 2 * (size - 1) / size * 4 * (4 * 800 + 500)
        assert all(expected <= n <= expected + 2 * 2 * 4 * size for n in sent)


@pytest.mark.parametrize("factors", [None, DITHERED], ids=str)
def test_non_finite_input_is_nan_everywhere_and_leaves_the_state(factors: Compressor[Any] | None) -> None:
    exchange = PowerSGDExchange(2, factors)
    kept = virtual.init(exchange, SPEC, 3)
    xs = [vector(SPEC.numel, r, 0) for r in range(3)]
    xs[1][5] = math.inf
    outcome = virtual.run(exchange, xs, kept, SPEC, Context())
    assert bool(torch.isnan(outcome.mean[: 8 * 54]).all())
    assert all(a is b for a, b in zip(outcome.states, kept))


@pytest.mark.parametrize("factors", [None, DITHERED], ids=str)
def test_the_state_is_cut_and_joined_by_parameter(factors: Compressor[Any] | None) -> None:
    exchange = PowerSGDExchange(2, factors)
    (state,) = virtual.run(exchange, [vector(SPEC.numel, 0, 0)], virtual.init(exchange, SPEC, 1), SPEC, Context()).states
    parts = states.split(state, SPEC)
    joined: Parts = states.concat(parts, [Spec((piece,)) for piece in SPEC.pieces])
    for (a, one), (b, other) in zip(joined.states, state.states, strict=True):
        assert a == b
        assert torch.equal(one.residual, other.residual)
        assert torch.equal(one.q, other.q)
    assert states.nbytes(state) == 4 * sum(m.residual.numel() + m.q.numel() for _, m in state.states)


CODED = PowerSGDExchange(2, DITHERED)


def test_exact_factors_in_messages_give_what_exact_means_give() -> None:
    plain, coded, size = PowerSGDExchange(2), PowerSGDExchange(2, Identity()), 3
    kept, coded_kept = virtual.init(plain, SPEC, size), virtual.init(coded, SPEC, size)
    for step in range(4):
        xs = [vector(SPEC.numel, r, step) for r in range(size)]
        one, other = (virtual.run(e, xs, k, SPEC, Context(step=step)) for e, k in ((plain, kept), (coded, coded_kept)))
        torch.testing.assert_close(one.mean, other.mean, rtol=1e-3, atol=1e-3)
        kept, coded_kept = list(one.states), list(other.states)


def test_residuals_hold_what_messages_of_factors_erred() -> None:
    """With an exact second round all that was given has been sent or is waiting, vectors included."""
    size, exchange = 3, PowerSGDExchange(2, tersegrad.parse("qsgd(bits=3, bucket=64)"))
    assert exchange._coded is not None
    exchange.__dict__["_coded"] = dataclasses.replace(exchange._coded, second=Identity())
    kept = virtual.init(exchange, SPEC, size)
    sent, given = torch.zeros(SPEC.numel, dtype=torch.float64), torch.zeros(SPEC.numel, dtype=torch.float64)
    for step in range(6):
        xs = [vector(SPEC.numel, r, step) for r in range(size)]
        outcome = virtual.run(exchange, xs, kept, SPEC, Context(step=step))
        kept = list(outcome.states)
        sent += outcome.mean
        given += torch.stack(xs).double().mean(0)
    left = torch.stack([torch.cat([m.residual for _, m in state.states]) for state in kept]).double().mean(0)
    assert float(left.norm()) > 0.1 * float(given.norm())
    torch.testing.assert_close(sent + left, given, rtol=1e-4, atol=1e-4)


def test_coded_tensors_of_unlike_scale_arrive_alike() -> None:
    """What came out for a tensor before is the unit of its factors, so that a small one is not lost in the noise of a large one.

    The first steps, in which the units are found, are left out.
    """
    spec = Spec((Piece((60, 80), 0, 4800, "large"), Piece((60, 80), 0, 4800, "small"), Piece((500,), 0, 500, "bias")))
    units = (1.0, 1e-3, 1e-2)
    parts = [low_rank(60, 80, 2, 1), low_rank(60, 80, 2, 2) * units[1], low_rank(20, 25, 20, 3) * units[2]]
    target, size, first, steps = torch.cat([p.reshape(-1) for p in parts]), 4, 20, 60
    kept, sent = virtual.init(CODED, spec, size), torch.zeros(spec.numel)
    for step in range(steps):
        outcome = virtual.run(CODED, [target] * size, kept, spec, Context(step=step))
        kept = list(outcome.states)
        sent += outcome.mean * (step >= first) / (steps - first)
    for part, wanted in zip(sent.split([p.numel for p in spec.pieces]), parts):
        assert float((part - wanted.reshape(-1)).norm() / wanted.norm()) < 0.15


def test_coded_factors_take_their_bits() -> None:
    text = "dithered_trellis(omega=0.1)"
    exchange, size = PowerSGDExchange(4, tersegrad.parse(text)), 4
    spec = Spec((Piece((300, 500), 0, 150000, "w"), Piece((500,), 0, 500, "b")))
    assert exchange.message_nbytes(spec) is None
    assert exchange.sent_exactly(spec) == {}
    xs = [vector(spec.numel, r, 0) for r in range(size)]
    sent = virtual.run(exchange, xs, virtual.init(exchange, spec, size), spec, Context()).sent
    numbers = 4 * 800 + 500
    assert 0.5 * math.log2(11) < 8 * sum(sent) / size / (2 * (size - 1) / size) / numbers < 2.6


@pytest.mark.parametrize("factors", ["vgc(alpha=1)", "error_feedback(qsgd)"])
def test_factors_that_cannot_be_fed_back_are_refused(factors: str) -> None:
    with pytest.raises(BadConfiguration):
        scheme(f"power_sgd(factors={factors})")


def test_the_text_form_of_coded_factors() -> None:
    text = "power_sgd(rank=2, factors=subtractive_dithering(omega=0.1))"
    assert str(scheme(text)) == text
    assert scheme(text).make(Identity()) == CODED


EXCHANGES = {"rank 1": PowerSGDExchange(1), "rank 3": PowerSGDExchange(3), "coded": CODED}


def real_steps(name: str, count: int) -> list[tuple[bytes, int]]:
    group, exchange = ProcessGroup(), EXCHANGES[name]
    state = exchange.init(SPEC, "cpu", group.rank, group.size)
    results = []
    for step in range(count):
        pending = start(exchange, vector(SPEC.numel, group.rank, step), state, SPEC, Context(step=step), group)
        mean, state = pending.wait()
        results.append((mean.numpy().tobytes(), pending.sent))
    return results


@pytest.mark.parametrize("name", EXCHANGES)
@as_in_a_rank()
def test_process_groups_equal_virtual_ranks_bit_for_bit(workers: Pool, name: str) -> None:
    exchange, size = EXCHANGES[name], workers.size
    real = workers.run(real_steps, name, 3)
    kept = virtual.init(exchange, SPEC, size)
    for step in range(3):
        outcome = virtual.run(exchange, [vector(SPEC.numel, r, step) for r in range(size)], kept, SPEC, Context(step=step))
        kept = list(outcome.states)
        for r in range(size):
            assert real[r][step] == (outcome.mean.numpy().tobytes(), outcome.sent[r])

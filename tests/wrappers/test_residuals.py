"""How error feedback keeps its residual: fading, packed, in host memory, in checkpoints and at another world size."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import tersegrad
from tersegrad.core import state as states
from tersegrad.core.errors import BadConfiguration
from tersegrad.core.packed import BLOCK, Packed, pack
from tersegrad.core.protocol import Context, Piece, Spec
from tersegrad.engine import Group, Lane, checkpoint
from tersegrad.exchange import scheme, virtual
from tersegrad.wrappers import ErrorFeedback

SPEC = Spec((Piece((20, 30), 0, 600, "a"), Piece((7,), 0, 7, "b"), Piece((40, 11), 0, 440, "c")))
INT8 = tersegrad.parse("error_feedback(top_k(fraction=0.1), residual=int8, decay=0.9, place=cpu)")


def gaussian(seed: int, d: int = SPEC.numel) -> Tensor:
    return torch.randn(d, generator=torch.Generator().manual_seed(seed))


def test_the_text_form_without_new_options_is_as_before() -> None:
    c = tersegrad.parse("error_feedback(top_k(fraction=0.1), residual=bfloat16)")
    assert str(c) == "error_feedback(top_k(fraction=0.1), residual=bfloat16)"
    assert c == ErrorFeedback(c.inner, "bfloat16")  # type: ignore[attr-defined]


@pytest.mark.parametrize("bad", ["decay=1.5", "decay=-0.1", "residual=int4", "place=disk"])
def test_bad_options_are_refused(bad: str) -> None:
    with pytest.raises(BadConfiguration, match=bad.split("=")[0]):
        tersegrad.parse(f"error_feedback(sign, {bad})")


def test_residuals_fade() -> None:
    c, x = tersegrad.parse("error_feedback(top_k(k=3), decay=0.95)"), gaussian(1)
    state, left = c.init(SPEC, "cpu"), torch.zeros(SPEC.numel)
    for step in range(4):
        message, state = c.encode(x, SPEC, state, Context(step=step))
        left = left * 0.95
        left = left + x
        left = left - c.decode(message, SPEC, Context(step=step))
        assert torch.equal(state.residual, left)


def test_eight_bits_are_within_half_a_step_of_their_block() -> None:
    x = gaussian(2, 1000) * 10.0 ** gaussian(3, 1000)
    y = pack(x).unpacked()
    for a in range(0, 1000, BLOCK):
        top = float(x[a : a + BLOCK].abs().max())
        # The step is a power of two, at most 2/127 of the largest, and rounding errs by half of it.
        assert float((x - y)[a : a + BLOCK].abs().max()) <= top / 127
    assert pack(x).nbytes == 1000 + 4 * 3


EXTREMES = (torch.zeros(0), torch.zeros(5), torch.full((300,), 3e38), torch.full((3,), 1e-44), torch.tensor([127.4, 0.5]))


@pytest.mark.parametrize("x", EXTREMES, ids=range(5))
def test_packing_what_was_unpacked_changes_nothing_however_it_was_cut(x: Tensor) -> None:
    for values in (x, torch.cat((x, gaussian(4, 700), x))):
        packed = pack(values)
        y = packed.unpacked()
        assert bool(torch.isfinite(y).all())
        assert torch.equal(pack(y, packed.lengths).unpacked(), y)
        for at in (0, 1, 255, 256, 300):
            parts = [packed.cut(0, at), packed.cut(min(at, y.numel()), y.numel())]
            assert torch.equal(torch.cat([part.unpacked() for part in parts]), y)
            joined = Packed.joined(parts)
            assert torch.equal(joined.unpacked(), y)
            assert torch.equal(pack(joined.unpacked(), packed.lengths).unpacked(), y)


def test_states_of_eight_bits_are_cut_joined_saved_and_carried() -> None:
    state = INT8.init(SPEC, "cpu")
    for step in range(3):
        _, state = INT8.encode(gaussian(step), SPEC, state, Context(step=step))
    assert isinstance(state.residual, Packed)
    kept = state.residual.unpacked()
    assert states.nbytes(state) == SPEC.numel + 5 * 3
    assert torch.equal(states.carried(state, SPEC), kept)  # type: ignore[arg-type]
    joined = states.concat(states.split(state, SPEC), [Spec((p,)) for p in SPEC.pieces])
    assert torch.equal(joined.residual.unpacked(), kept)
    assert torch.equal(states.slice(state, SPEC, 100, 620).residual.unpacked(), kept[100:620])
    loaded = states.load(INT8.init(SPEC, "cpu"), states.state_dict(state))
    assert torch.equal(loaded.residual.unpacked(), kept)
    halved = states.map_tensors(lambda a, b: (a + b) / 2, state, INT8.init(SPEC, "cpu"))
    assert float((halved.residual.unpacked() - kept / 2).abs().max()) <= float(kept.abs().max()) / 127
    moved, rest = states.carry(state, SPEC, torch.full((SPEC.numel,), math.pi))
    assert float((moved.residual.unpacked() - kept - math.pi).abs().max()) <= (float(kept.abs().max()) + math.pi) / 127
    # What rounding takes is not lost without a word.
    assert bool(rest.any())
    torch.testing.assert_close(moved.residual.unpacked() + rest, kept + math.pi, rtol=0, atol=1e-6)


def test_the_residual_of_eight_bits_stays_near_the_exact_one() -> None:
    exact, rough = (
        tersegrad.parse("error_feedback(top_k(fraction=0.05))"),
        tersegrad.parse("error_feedback(top_k(fraction=0.05), residual=int8)"),
    )
    sums = []
    for c in (exact, rough):
        state, sent = c.init(SPEC, "cpu"), torch.zeros(SPEC.numel)
        for step in range(60):
            message, state = c.encode(gaussian(0) + 0.1 * gaussian(step), SPEC, state, Context(step=step))
            sent += c.decode(message, SPEC, Context(step=step))
        sums.append(sent / 60)
    assert float((sums[0] - sums[1]).norm() / sums[0].norm()) < 0.05


def test_a_buffer_that_is_not_finite_leaves_the_state() -> None:
    state = INT8.init(SPEC, "cpu")
    _, state = INT8.encode(gaussian(1), SPEC, state, Context())
    _, after = INT8.encode(torch.full((SPEC.numel,), torch.inf), SPEC, state, Context(step=1))
    assert after is state


def lane(state: Any, rank: int, size: int) -> Lane:
    link: Any = SimpleNamespace(rank=rank, size=size)
    exchange = scheme("all_gather").make(INT8)
    return Lane(Group(0, SPEC, torch.float32, torch.device("cpu")), link, INT8, scheme("all_gather"), exchange, state)


def trained(size: int, first: int, last: int, found: list[Any]) -> tuple[list[Any], list[Tensor]]:
    exchange = scheme("all_gather").make(INT8)
    means: list[Tensor] = []
    for step in range(first, last):
        xs = [gaussian(100 * step + rank) for rank in range(size)]
        outcome = virtual.run(exchange, xs, found, SPEC, Context(step=step))
        found, means = list(outcome.states), [*means, outcome.mean]
    return found, means


def test_checkpoints_go_on_bit_for_bit_and_another_world_size_starts_from_the_mean() -> None:
    exchange = scheme("all_gather").make(INT8)
    found, _ = trained(4, 0, 3, virtual.init(exchange, SPEC, 4))
    saved = [checkpoint.save(lane(state, rank, 4)) for rank, state in enumerate(found)]
    fresh = virtual.init(exchange, SPEC, 4)
    again = [checkpoint.restore(lane(f, rank, 4), [saved[rank]]) for rank, f in enumerate(fresh)]
    for a, b in zip(trained(4, 3, 5, found)[1], trained(4, 3, 5, again)[1]):
        assert torch.equal(a, b)
    mean = torch.stack([state.residual.unpacked() for state in found]).mean(0)
    fewer = checkpoint.restore(lane(virtual.init(exchange, SPEC, 3)[0], 0, 3), saved)
    assert float((fewer.residual.unpacked() - mean).abs().max()) <= float(mean.abs().max()) / 127

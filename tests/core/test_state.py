"""Cutting, joining and carrying states, on any spec, any nesting and any cuts."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any, ClassVar

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tersegrad.core import state as states
from tersegrad.core.protocol import Piece, Spec
from tersegrad.core.state import Parts


@dataclasses.dataclass(frozen=True)
class Residual:
    """A leaf: aligned with the buffer, and added to the next gradient."""

    carries: ClassVar[str] = "residual"
    residual: Tensor
    note: int = 7


@dataclasses.dataclass(frozen=True)
class Wrapped:
    """A wrapper's state around another one of the same buffer."""

    average: Tensor
    inner: Any


@st.composite
def specs(draw: st.DrawFn) -> Spec:
    """Pieces of tensors, whole and cut, some of them empty."""
    pieces = []
    for number, count in enumerate(draw(st.lists(st.integers(0, 9), min_size=1, max_size=7))):
        before, after = draw(st.integers(0, 3)), draw(st.integers(0, 3))
        pieces.append(Piece((before + count + after,), before, before + count, f"t{number}"))
    return Spec(tuple(pieces))


def make(kind: int, spec: Spec, groups: list[int], seed: int) -> Any:
    """A nested state of ``spec``: bit 0 wraps it, bit 1 cuts it into parts by group, bit 2 wraps the parts."""
    generator = torch.Generator().manual_seed(seed)

    def leaf(numel: int) -> Any:
        state: Any = Residual(torch.randn(numel, generator=generator))
        return Wrapped(torch.randn(numel, generator=generator), state) if kind & 1 else state

    if not kind & 2:
        return leaf(spec.numel)
    parts = Parts(tuple(groups), tuple((g, leaf(sub.numel)) for g, sub in states.subspecs(spec, groups).items()))
    return Wrapped(torch.randn(spec.numel, generator=generator), parts) if kind & 4 else parts


def same(one: Any, other: Any) -> bool:
    """Equal states: the same structure, the same groups, tensors equal bit for bit."""
    if isinstance(one, Tensor):
        return isinstance(other, Tensor) and torch.equal(one, other)
    if isinstance(one, Parts):
        return isinstance(other, Parts) and one.groups == other.groups and same(one.states, other.states)
    if isinstance(one, tuple):
        return isinstance(other, tuple) and len(one) == len(other) and all(same(a, b) for a, b in zip(one, other))
    if dataclasses.is_dataclass(one):
        return type(one) is type(other) and all(
            same(getattr(one, f.name), getattr(other, f.name)) for f in dataclasses.fields(one)
        )
    return bool(one == other)


situations = st.tuples(specs(), st.integers(0, 7), st.lists(st.integers(0, 2), min_size=7, max_size=7), st.integers(0, 99))


@settings(max_examples=60, deadline=None)
@given(situations, st.lists(st.floats(0, 1), max_size=4))
def test_slices_join_to_the_whole(situation: tuple[Spec, int, list[int], int], fractions: list[float]) -> None:
    spec, kind, numbers, seed = situation
    state = make(kind, spec, numbers[: len(spec.pieces)], seed)
    edges = [0, *sorted(int(f * spec.numel) for f in fractions), spec.numel]
    cuts = [(a, b) for a, b in itertools.pairwise(edges) if a < b] or [(0, spec.numel)]
    parts = [states.slice(state, spec, a, b) for a, b in cuts]
    subs = [states.slice_spec(spec, a, b) for a, b in cuts]
    joined, whole = states.concat(parts, subs), states.concat_specs(subs)
    kept = Spec(tuple(p for p in spec.pieces if p.numel), spec.dtype)
    assert whole == kept
    filled = [g for g, p in zip(numbers, spec.pieces) if p.numel]
    expected = make(kind, kept, filled, seed)
    assert same(joined, expected)
    carried = states.carried(state, spec)
    assert carried is not None or spec.numel == 0
    if carried is not None:
        pieces = [states.carried(part, sub) for part, sub in zip(parts, subs)]
        assert torch.equal(torch.cat([p for p in pieces if p is not None]), carried)


@settings(max_examples=60, deadline=None)
@given(situations)
def test_what_a_checkpoint_splits_joins_again(situation: tuple[Spec, int, list[int], int]) -> None:
    spec, kind, numbers, seed = situation
    state = make(kind, spec, numbers[: len(spec.pieces)], seed)
    alone = [Spec((p,), spec.dtype) for p in spec.pieces]
    assert same(states.concat(states.split(state, spec), alone), state)


@settings(max_examples=60, deadline=None)
@given(situations)
def test_what_is_carried_arrives(situation: tuple[Spec, int, list[int], int]) -> None:
    spec, kind, numbers, seed = situation
    state = make(kind, spec, numbers[: len(spec.pieces)], seed)
    amount = torch.randn(spec.numel, generator=torch.Generator().manual_seed(seed + 1))
    before = states.carried(state, spec)
    after, left = states.carry(state, spec, amount)
    assert not left.any()
    if before is not None:
        now = states.carried(after, spec)
        assert now is not None
        assert torch.equal(now, before + amount)
    assert same(states.load(make(kind, spec, numbers[: len(spec.pieces)], seed + 2), states.state_dict(after)), after)

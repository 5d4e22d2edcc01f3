"""Cutting, joining, mapping and saving nested states."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tersegrad
from tersegrad.core import state as states
from tersegrad.core.errors import BadConfiguration
from tersegrad.core.protocol import Context, Piece, Spec
from tersegrad.wrappers import ByTensor, ErrorFeedback, Metered
from tests.wrappers.toys import Largest, Lottery, Toy

SPEC = Spec(tuple(Piece((n,), 0, n, name) for name, n in (("a", 30), ("b", 4), ("c", 50), ("d", 6), ("e", 1))))
NESTED = Metered(
    ByTensor(ErrorFeedback(Largest(k=2)), small=ErrorFeedback(Lottery(), residual="bfloat16"), below=10, rules=(("e", Toy()),))
)


def advanced(spec: Spec = SPEC, steps: int = 3) -> Any:
    state = NESTED.init(spec, "cpu")
    for t in range(steps):
        x = torch.randn(spec.numel, generator=torch.Generator().manual_seed(t))
        _, state = NESTED.encode(x, spec, state, Context(step=t))
    return state


def same(a: Any, b: Any) -> bool:
    left, right = states.state_dict(a), states.state_dict(b)
    equal = (torch.equal(v, right[k]) if isinstance(v, torch.Tensor) else v == right[k] for k, v in left.items())
    return left.keys() == right.keys() and all(equal) and a.inner.groups == b.inner.groups


def test_tensors_and_memory() -> None:
    state = advanced()
    found = states.tensors(state)
    assert [(t.numel(), t.dtype) for t in found] == [(80, torch.float32), (10, torch.bfloat16)]
    assert states.nbytes(state) == 80 * 4 + 10 * 2
    assert states.tensors(None) == []


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, SPEC.numel), max_size=5))
def test_any_cut_joins_to_the_same_state(cuts: list[int]) -> None:
    state = advanced()
    borders = [0, *sorted(cuts), SPEC.numel]
    parts = [states.slice(state, SPEC, a, b) for a, b in itertools.pairwise(borders)]
    specs = [states.slice_spec(SPEC, a, b) for a, b in itertools.pairwise(borders)]
    assert same(states.concat(parts, specs), state)
    assert states.concat_specs(specs) == SPEC
    for part, spec in zip(parts, specs):
        assert sum(t.numel() for t in states.tensors(part)) == sum(p.numel for p in spec.pieces if p.name != "e")
        assert part.inner.groups == NESTED.inner.init(spec, "cpu").groups


def test_split_by_parameter_and_join_in_another_order() -> None:
    state = advanced()
    by_name = dict(zip((p.name for p in SPEC.pieces), states.split(state, SPEC)))
    order = ("d", "c", "e", "a", "b")
    spec = Spec(tuple(next(p for p in SPEC.pieces if p.name == n) for n in order))
    moved = states.concat([by_name[n] for n in order], [Spec((piece,)) for piece in spec.pieces])
    assert moved.inner.groups == NESTED.inner.init(spec, "cpu").groups
    big = state.inner.states[0][1].residual
    assert torch.equal(moved.inner.states[0][1].residual, torch.cat([big[30:], big[:30]]))
    message, _ = NESTED.encode(torch.ones(spec.numel), spec, moved, Context())  # an ordinary state of the new buffer
    assert NESTED.decode(message, spec, Context()).shape == (spec.numel,)


def test_slices_are_copies_and_map_is_not_in_place() -> None:
    state = advanced()
    before = [t.clone() for t in states.tensors(state)]
    for t in states.tensors(states.slice(state, SPEC, 0, SPEC.numel)):
        t.zero_()
    doubled = states.map_tensors(lambda t: 2 * t, state)
    assert all(torch.equal(a, b) for a, b in zip(before, states.tensors(state)))
    assert all(torch.equal(2 * a, b) for a, b in zip(before, states.tensors(doubled)))
    mean = states.map_tensors(lambda *t: torch.stack(t).mean(0), state, doubled)
    torch.testing.assert_close(states.tensors(mean)[0], 1.5 * before[0])


def test_save_and_load() -> None:
    state = advanced()
    saved = states.state_dict(state)
    assert "inner.0.residual" in saved
    assert saved["messages"] == 3
    restored = states.load(NESTED.init(SPEC, "cpu"), saved)
    assert same(restored, state)
    assert states.tensors(restored)[0].data_ptr() != states.tensors(state)[0].data_ptr()
    for change, words in (
        ({"inner.0.residual": torch.zeros(3)}, "shape"),
        ({"other": 1}, "does not keep"),
    ):
        with pytest.raises(BadConfiguration, match=words):
            states.load(NESTED.init(SPEC, "cpu"), {**saved, **change})
    with pytest.raises(BadConfiguration, match="lacks"):
        states.load(NESTED.init(SPEC, "cpu"), {})


def test_mismatched_states_are_refused() -> None:
    with pytest.raises(BadConfiguration, match="different kinds"):
        states.concat([advanced(), None], [SPEC, SPEC])
    with pytest.raises(BadConfiguration, match="at least one"):
        states.concat([], [])
    with pytest.raises(BadConfiguration, match="groups"):
        states.map_tensors(lambda a, b: a, advanced(), advanced(Spec.flat(5)))
    assert states.concat([None, None], [SPEC, SPEC]) is None
    assert states.slice(None, SPEC, 0, 5) is None


def test_carrying_says_what_found_no_place() -> None:
    spec = Spec((Piece((8,), 0, 8, "a"), Piece((4,), 0, 4, "b"), Piece((2,), 0, 2, "a.c")))
    compressor = tersegrad.parse('metered(by_tensor(int8, rules={"a*": metered(error_feedback(sign, residual=bfloat16))}))')
    amount = torch.arange(14.0) + 1
    fresh = compressor.init(spec, "cpu")
    state, left = states.carry(fresh, spec, amount)
    place = torch.tensor([0.0] * 8 + [1.0] * 4 + [0.0] * 2)
    assert torch.equal(left, amount * place)
    found = states.carried(state, spec)
    assert found is not None
    assert torch.equal(found, amount * (1 - place))
    before = states.carried(fresh, spec)
    assert before is not None
    assert not before.any()
    assert states.carried(None, spec) is None
    assert torch.equal(states.carry(None, spec, amount)[1], amount)

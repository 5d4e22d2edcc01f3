"""Metering: the same bytes, and counters that add up."""

from __future__ import annotations

import math

import pytest
import torch

from tersegrad.core.protocol import Context, Spec
from tersegrad.wrappers import ErrorFeedback, Metered
from tests.wrappers.toys import Adding, Largest, Lottery

X = torch.randn(200, generator=torch.Generator().manual_seed(0))
SPEC = Spec.flat(200)


def test_same_bytes_and_promises() -> None:
    for inner in (Largest(k=3), Lottery(), Adding(k=2)):
        c = Metered(inner)
        message, _ = c.encode(X, SPEC, c.init(SPEC, "cpu"), Context(seed=4))
        assert message.tobytes() == inner.encode(X, Spec.of(X), None, Context(seed=4))[0].tobytes()
        assert c.guarantee(SPEC) == inner.guarantee(SPEC)
        assert c.max_nbytes(SPEC) == inner.max_nbytes(SPEC)
        base = torch.ones(200)
        added = c.decode_add(message, SPEC, Context(seed=4), base.clone(), 0.5)
        assert torch.equal(added, base + 0.5 * inner.decode(message, SPEC, Context(seed=4)))


def test_counters_add_up() -> None:
    c = Metered(Largest(k=20))
    start = state = c.init(SPEC, "cpu")
    error = norm = 0.0
    for t in range(3):
        x = X * (t + 1)
        message, state = c.encode(x, SPEC, state, Context(step=t))
        decoded = c.decode(message, SPEC, Context(step=t))
        error += float((decoded - x).double().square().sum())
        norm += float(x.double().square().sum())
    assert (state.messages, state.nbytes, state.coordinates, state.nonfinite) == (3, 2400, 600, 0)
    assert state.summary()["bits_per_coordinate"] == 32.0
    assert state.relative_error == pytest.approx(error / norm)
    assert state.summary()["relative_error"] == state.relative_error
    assert state.seconds > 0
    assert start.messages == 0
    assert start.summary()["relative_error"] == 0.0


def test_non_finite_messages_are_counted_apart() -> None:
    c = Metered(Largest())
    x = X.clone()
    x[0] = math.inf
    _, state = c.encode(x, SPEC, c.init(SPEC, "cpu"), Context())
    assert (state.messages, state.nonfinite, state.error) == (1, 1, 0.0)


def test_around_error_feedback_and_without_error() -> None:
    c = Metered(ErrorFeedback(Largest(k=10)), error=False)
    _, state = c.encode(X, SPEC, c.init(SPEC, "cpu"), Context())
    assert state.error == 0.0
    assert bool(state.inner.residual.any())

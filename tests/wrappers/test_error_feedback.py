"""Error feedback: nothing is lost, the residual stays bounded as theory says, and what has no promise is refused."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tersegrad.core.errors import BadConfiguration
from tersegrad.core.protocol import Compressor, Context, Guarantee, Message, Spec
from tersegrad.wrappers import ByTensor, ErrorFeedback, Metered
from tests.wrappers.toys import Adding, Largest, Lottery, Promiseless

D = 64


def gaussian(seed: int, d: int = D) -> Tensor:
    return torch.randn(d, generator=torch.Generator().manual_seed(seed))


def steps(c: Compressor[Any], gradients: list[Tensor]) -> tuple[Tensor, list[float], Any]:
    """The sum of decoded messages, the norm of each residual, and the last state."""
    spec = Spec.flat(gradients[0].numel())
    state = c.init(spec, "cpu")
    sent, norms = torch.zeros(spec.numel, dtype=torch.float64), []
    for t, x in enumerate(gradients):
        message, state = c.encode(x, spec, state, Context(step=t))
        sent += c.decode(message, spec, Context(step=t)).double()
        norms.append(float(state.residual.double().norm()))
    return sent, norms, state


@pytest.mark.parametrize("inner", [Largest(k=4), Adding(k=4), Lottery(p=0.25)], ids=str)
def test_what_was_sent_and_what_is_left_is_what_came(inner: Compressor[Any]) -> None:
    gradients = [gaussian(t) for t in range(50)]
    sent, _, state = steps(ErrorFeedback(inner), gradients)
    total = torch.stack(gradients).double().sum(0)
    torch.testing.assert_close(sent + state.residual.double(), total, rtol=0, atol=50 * 2**-22)


def worst_direction(c: ErrorFeedback, rounds: int) -> list[float]:
    """Residual norms when each gradient, of norm 1, points along the residual: the adversary of the bound."""
    spec, x, norms = Spec.flat(D), torch.ones(D) / math.sqrt(D), []
    state = c.init(spec, "cpu")
    for t in range(rounds):
        _, state = c.encode(x, spec, state, Context(step=t))
        norms.append(float(state.residual.double().norm()))
        x = state.residual.float() / max(norms[-1], 1e-30)
    return norms


@pytest.mark.parametrize("k", [1, 4, 32])
def test_residual_obeys_the_bound_for_a_sure_promise(k: int) -> None:
    c = ErrorFeedback(Largest(k=k))
    root = math.sqrt(c.guarantee(Spec.flat(D)).value)
    bound = root / (1 - root)
    adversaries = (
        worst_direction(c, 400),
        steps(c, [torch.ones(D) / math.sqrt(D)] * 400)[1],
        steps(c, [gaussian(t) / gaussian(t).norm() for t in range(400)])[1],
        steps(c, [torch.eye(D)[t % D] * (1 - 2 * (t % 2)) for t in range(400)])[1],
    )
    for norms in adversaries:
        assert max(norms) <= bound * (1 + 1e-5)
    assert max(adversaries[0]) > 0.2 * bound  # the test reaches the region that it guards


def test_scaling_keeps_an_unbiased_part_bounded_and_not_scaling_does_not() -> None:
    p = 0.05
    c = ErrorFeedback(Lottery(p=p))
    x = torch.ones(D) / math.sqrt(D)
    _, norms, _ = steps(c, [x] * 500)
    # Each coordinate is sent whole (p * y / p) with probability p: a geometric waiting time, mean 1/p steps of |x_i|.
    assert sum(norms[-200:]) / 200 <= 2 / p
    unscaled = torch.zeros(D)
    for t in range(60):
        y = x + unscaled
        unscaled = y - Lottery(p=p).lossy(y, Context(step=t))
    assert float(unscaled.norm()) > 100 * max(norms)


def test_decoded_is_scaled_by_one_over_one_plus_omega() -> None:
    c, spec = ErrorFeedback(Lottery(p=0.25)), Spec.flat(D)
    message, _ = c.encode(torch.ones(D), spec, c.init(spec, "cpu"), Context())
    assert set(c.decode(message, spec, Context()).tolist()) == {0.0, 1.0}
    assert set(Lottery(p=0.25).decode(message, spec, Context()).tolist()) == {0.0, 4.0}
    into = torch.full((D,), 0.5)
    assert c.decode_add(message, spec, Context(), into, 2.0) is into
    assert set(into.tolist()) == {0.5, 2.5}


def test_guarantee_is_the_scaled_part_s() -> None:
    promise = ErrorFeedback(Lottery(p=0.25)).guarantee(Spec.flat(D))
    assert (promise.kind, promise.sure) == ("contractive", False)
    assert promise.value == pytest.approx(0.75)
    assert ErrorFeedback(Largest(k=16)).guarantee(Spec.flat(D)).sure
    assert ErrorFeedback(Promiseless(), force=True).guarantee(Spec.flat(D)).kind == "none"


def test_descent_on_a_quadratic_reaches_the_minimum_only_with_feedback() -> None:
    target, curvature = gaussian(1), torch.linspace(0.1, 1, D)

    def descend(c: Compressor[Any]) -> float:
        spec, w = Spec.flat(D), torch.zeros(D)
        state = c.init(spec, "cpu")
        for t in range(1200):
            message, state = c.encode(curvature * (w - target), spec, state, Context(step=t))
            w = w - 0.1 * c.decode(message, spec, Context(step=t))
        return float((w - target).norm() / target.norm())

    assert descend(ErrorFeedback(Largest(k=2))) < 1e-3
    assert descend(ErrorFeedback(Lottery(p=0.2))) < 1e-3
    assert descend(ErrorFeedback(Promiseless(tau=0.5), force=True)) < 0.2
    assert descend(Promiseless(tau=0.5)) > 0.5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("inner", [Largest(k=4), Adding(k=4), Lottery()], ids=str)
def test_non_finite_input_poisons_nothing(dtype: torch.dtype, bad: float, inner: Compressor[Any]) -> None:
    c, spec = ErrorFeedback(inner, residual="bfloat16" if dtype == torch.bfloat16 else "float32"), Spec.flat(D)
    _, state = c.encode(gaussian(0), spec, c.init(spec, "cpu"), Context())
    x = gaussian(1)
    x[3] = bad
    message, after = c.encode(x, spec, state, Context(step=1))
    assert bool(torch.isnan(c.decode(message, spec, Context(step=1))).all())
    assert after is state
    assert after.residual.dtype == dtype


def test_large_finite_residuals_are_kept() -> None:
    c, spec = ErrorFeedback(Largest(k=1)), Spec.flat(D)
    _, state = c.encode(torch.full((D,), 3e38), spec, c.init(spec, "cpu"), Context())
    assert int((state.residual == 3e38).sum()) == D - 1  # their sum overflows, they do not


def test_state_is_a_value() -> None:
    c, spec, x = ErrorFeedback(Adding(k=4)), Spec.flat(D), gaussian(0)
    state = c.init(spec, "cpu")
    _, first = c.encode(x, spec, state, Context())
    before, input_before = first.residual.clone(), x.clone()
    one, _ = c.encode(x, spec, first, Context(step=1))
    two, _ = c.encode(x, spec, first, Context(step=1))
    assert one.tobytes() == two.tobytes()
    assert torch.equal(first.residual, before)
    assert torch.equal(x, input_before)
    assert not bool(state.residual.any())


def test_message_is_the_inner_one_and_out_is_passed_on() -> None:
    c, spec, x = ErrorFeedback(Largest(k=4)), Spec.flat(D), gaussian(0)
    buffer = torch.empty(c.max_nbytes(spec), dtype=torch.uint8)
    message, _ = c.encode(x, spec, c.init(spec, "cpu"), Context(), out=buffer)
    assert message.data is buffer
    assert message.tobytes() == Largest(k=4).encode(x, Spec.of(x), None, Context())[0].tobytes()
    target = torch.empty(D)
    assert c.decode(message, spec, Context(), out=target) is target


def test_fused_decode_is_used() -> None:
    Adding.calls.clear()
    c, spec = ErrorFeedback(Adding(k=4)), Spec.flat(D)
    message, _ = c.encode(gaussian(0), spec, c.init(spec, "cpu"), Context())
    assert Adding.calls == [-1.0]
    c.decode_add(message, spec, Context(), torch.zeros(D), 0.5)
    assert Adding.calls == [-1.0, 0.5]


def test_bfloat16_input_and_residual() -> None:
    c, spec = ErrorFeedback(Largest(k=4), residual="bfloat16"), Spec.flat(D, torch.bfloat16)
    state = c.init(spec, "cpu")
    assert state.residual.dtype == torch.bfloat16
    message, state = c.encode(gaussian(0).bfloat16(), spec, state, Context())
    assert state.residual.dtype == torch.bfloat16
    assert c.decode(message, spec, Context()).dtype == torch.float32


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: ErrorFeedback(Promiseless()), "no guarantee"),
        (lambda: ErrorFeedback(ErrorFeedback(Largest())), "residual of its own"),
        (lambda: ErrorFeedback(ByTensor(Largest(), rules=(("a", ErrorFeedback(Largest())),))), "residual of its own"),
        (lambda: ErrorFeedback(Metered(ErrorFeedback(Largest()))), "residual of its own"),
        (lambda: ErrorFeedback("top_k"), "wraps a compressor"),  # type: ignore[arg-type]
        (lambda: ErrorFeedback(Largest(), residual="float64"), "bfloat16 or int8"),  # type: ignore[arg-type]
        (lambda: ErrorFeedback(ByTensor(Lottery(p=0.25), small=Promiseless())).init(Spec.flat(5), "cpu"), "no guarantee"),
    ],
)
def test_refusals(make: Any, words: str) -> None:
    with pytest.raises(BadConfiguration, match=words):
        make()


def test_a_state_of_another_size_is_refused() -> None:
    c = ErrorFeedback(Largest())
    with pytest.raises(BadConfiguration, match="64 coordinates, got 65"):
        c.encode(torch.zeros(65), Spec.flat(64), c.init(Spec.flat(64), "cpu"), Context())


def test_empty_buffer() -> None:
    c, spec = ErrorFeedback(Largest()), Spec.flat(0)
    message, state = c.encode(torch.zeros(0), spec, c.init(spec, "cpu"), Context())
    assert c.decode(Message.frombytes(message.tobytes()), spec, Context()).shape == (0,)
    assert state.residual.shape == (0,)


@dataclasses.dataclass(frozen=True)
class Sharper(Lottery):
    """The same messages as Lottery, with a better proof."""

    def guarantee(self, spec: Spec) -> Guarantee:
        return Guarantee("unbiased", super().guarantee(spec).value / 2)


def test_a_sharper_guarantee_decodes_old_messages_alike() -> None:
    old, new = ErrorFeedback(Lottery(p=0.25)), ErrorFeedback(Sharper(p=0.25))
    x, ctx = torch.linspace(-1, 1, 100), Context(seed=3)
    spec = Spec.of(x)
    message, _ = old.encode(x, spec, old.init(spec, "cpu"), ctx)
    assert torch.equal(new.decode(message, spec, ctx), old.decode(message, spec, ctx))
    assert new.encode(x, spec, new.init(spec, "cpu"), ctx)[0].tobytes() == message.tobytes()
    # Scaled for omega = 3 with a variance of 1.5: (9 + 1.5) / 16.
    assert new.guarantee(spec).value == pytest.approx(10.5 / 16)
    assert new.guarantee(spec).value < old.guarantee(spec).value


@dataclasses.dataclass(frozen=True)
class Unstated(Lottery):
    """Unbiased, without a factor that the wire fixes."""

    wire_omega = None  # type: ignore[assignment]


def test_an_unbiased_compressor_states_its_factor() -> None:
    with pytest.raises(BadConfiguration, match="wire_omega"):
        ErrorFeedback(Unstated(p=0.5))

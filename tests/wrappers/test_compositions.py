"""The wrappers around the real compressors: the laws that only a composition can break."""

from __future__ import annotations

import math

import pytest
import torch

import tersegrad
from tersegrad import Context, Piece, Spec
from tersegrad.core import state as states

D = 300
PARTS = (
    "identity",
    "bf16",
    "fp8",
    "int4",
    "sign",
    "ternary",
    "natural",
    "qsgd",
    "qsgd(bits=3, norm=max, coder=rans)",
    "top_k(fraction=0.05)",
    "random_k(fraction=0.2)",
    "rotated(int4)",
    "rotated(sign, block=64)",
    "by_tensor(sign, small=bf16)",
)


def gradients(count: int) -> list[torch.Tensor]:
    """Unit vectors: Gaussian, then one direction for ever, which is what piles up in a residual."""
    raw = [torch.randn(D, generator=torch.Generator().manual_seed(t)) for t in range(count // 2)]
    raw += [torch.linspace(0.01, 1, D) ** 4] * (count - len(raw))
    return [g / g.norm() for g in raw]


@pytest.mark.parametrize("text", PARTS)
@pytest.mark.parametrize("residual", ["float32", "bfloat16"])
def test_error_feedback_loses_nothing_and_stays_bounded(text: str, residual: str) -> None:
    c = tersegrad.parse(f"error_feedback({text}, residual={residual})")
    spec = Spec.flat(D)
    promise = c.guarantee(spec)
    state, sent, total, top = c.init(spec, "cpu"), torch.zeros(D).double(), torch.zeros(D).double(), 0.0
    count = 120
    for t, x in enumerate(gradients(count)):
        message, state = c.encode(x, spec, state, Context(seed=1, step=t))
        sent += c.decode(message, spec, Context(seed=1, step=t)).double()
        total += x.double()
        top = max(top, float(state.residual.double().norm()))
    rounding = count * top * (2.0**-8 if residual == "bfloat16" else 2.0**-22) + 1e-5
    assert float((sent + state.residual.double() - total).norm()) <= rounding
    root = math.sqrt(promise.value) + (2.0**-8 if residual == "bfloat16" else 1e-6)
    if promise.sure and root < 1:
        assert top <= root / (1 - root)
    else:
        assert top <= 4 * math.sqrt(count)  # far below the sum of all gradients, had nothing been sent


def test_decoding_needs_no_state_and_frames_explain_compositions() -> None:
    x = gradients(1)[0]
    for text in PARTS:
        data = tersegrad.to_frame(f"error_feedback({text})", x, Context(seed=5, step=1, sender=3))
        assert tersegrad.from_frame(data).shape == (D,)


def test_residuals_survive_a_rebuild_of_the_buckets() -> None:
    pieces = tuple(Piece((n,), 0, n, name) for name, n in (("a.weight", 200), ("a.bias", 10), ("b.weight", 90)))
    c = tersegrad.parse('by_tensor(error_feedback(top_k(fraction=0.05)), rules={"*.bias": error_feedback(sign)})')
    one = Spec(pieces)
    state = c.init(one, "cpu")
    x = torch.randn(D, generator=torch.Generator().manual_seed(9))
    _, state = c.encode(x, one, state, Context())
    a, bias, b = states.split(state, one)
    for specs, parts in (((pieces[2], pieces[0]), (b, a)), ((pieces[1],), (bias,))):
        rebuilt = states.concat(parts, [Spec((piece,)) for piece in specs])
        spec = Spec(specs)
        assert rebuilt.groups == c.init(spec, "cpu").groups
        message, _ = c.encode(torch.zeros(spec.numel), spec, rebuilt, Context(step=1))
        assert bool(c.decode(message, spec, Context(step=1)).any())  # what was left is sent now

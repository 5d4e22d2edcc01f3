"""Error feedback in one pass with the quantiser writes the bytes and keeps the residual of error feedback in several."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tersegrad import kernels
from tersegrad.core.protocol import Context, Spec, Splitter
from tersegrad.kernels import reference
from tersegrad.recipes import parse
from tersegrad.wrappers import ErrorFeedback
from tests.device import Device

PACKED = ("int8", "int4", "int4(block=128)", "qsgd(bits=4)", "qsgd(bits=8, norm=max)", "qsgd(bits=2, bucket=128)")
# What is not kept as plain float32, or not of packed blocks, takes the other way.
OTHERS = (
    "error_feedback(qsgd, residual=bfloat16)",
    "error_feedback(int4, decay=0.5)",
    "error_feedback(int8, residual=int8)",
    "error_feedback(qsgd(coder=rans))",
)


def _watched(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A backend that splits in one pass; the lengths that it was given."""
    found: list[int] = []

    def split_blocks(x: Tensor, *arguments: Any, **options: Any) -> Tensor:
        found.append(x.numel())
        return reference.split_blocks(x, *arguments, **options)

    made = kernels.get(device)
    monkeypatch.setattr(made, "split_blocks", split_blocks)
    monkeypatch.setitem(made.sources, "split_blocks", "toy")  # type: ignore[attr-defined]
    return found


def steps(c: Any, numel: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Messages and residuals of several steps; the third vector is not finite, the fourth is huge."""
    spec, found = Spec.flat(numel, dtype), []
    state = c.init(spec, "cpu")
    for step in range(5):
        x = torch.randn(numel, generator=torch.Generator().manual_seed(step))
        if step == 2:
            x[numel // 2] = torch.inf
        if step == 3:
            x[0] = torch.finfo(torch.float32).max
        out = torch.zeros(c.max_nbytes(spec) + 3, dtype=torch.uint8)
        message, state = c.encode(x.to(dtype), spec, state, Context(seed=5, step=step), out=out)
        assert message.data is out
        found += [message.payload.clone(), torch.as_tensor(message.nbytes)]
        if isinstance(state.residual, Tensor):
            assert bool(state.residual.isfinite().all())
            found.append(state.residual.clone())
    return found


@pytest.mark.parametrize("text", PACKED)
def test_the_same_messages_and_residuals(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    c = ErrorFeedback(parse(text))
    assert isinstance(c.inner, Splitter)
    cases = [(1, torch.float32), (1003, torch.float32), (600, torch.bfloat16)]
    expected = [steps(c, *case) for case in cases]
    calls = _watched(torch.device("cpu"), monkeypatch)
    for case, wanted in zip(cases, expected, strict=True):
        calls.clear()
        for a, b in zip(steps(c, *case), wanted, strict=True):
            assert torch.equal(a, b)
        assert calls == [case[0]] * 5


@pytest.mark.parametrize("text", ["sign", "sign(block=64)"])
def test_signs_are_split_by_a_kernel_of_their_own(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    c = ErrorFeedback(parse(text))
    made = kernels.get(torch.device("cpu"))
    assert c.inner.splits(torch.device("cpu"), 1.0)  # type: ignore[attr-defined]
    for case in ((1, torch.float32), (9001, torch.float32), (600, torch.bfloat16)):
        at_once = steps(c, *case)
        with monkeypatch.context() as patch:
            patch.delitem(made.sources, "sign_split")  # type: ignore[attr-defined]
            for a, b in zip(at_once, steps(c, *case), strict=True):
                assert torch.equal(a, b)
    assert not parse("sign(block=none)").splits(torch.device("cpu"), 1.0)  # type: ignore[attr-defined]
    assert not parse("sign(block=8192)").splits(torch.device("cpu"), 1.0)  # type: ignore[attr-defined]


@pytest.mark.parametrize("text", OTHERS)
def test_others_take_the_other_way(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = _watched(torch.device("cpu"), monkeypatch)
    steps(parse(text), 300)
    assert not calls


@pytest.mark.parametrize("text", ["error_feedback(int8)", "error_feedback(qsgd(norm=max))"])
def test_nothing_waits_for_a_device(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "FASTER", {"cpu": ("native",)})
    c, spec = parse(text), Spec.flat(1000)
    with Device() as device:
        calls = _watched(device.device, monkeypatch)
        x = torch.randn(1000, generator=torch.Generator().manual_seed(1))
        _, first = c.encode(device.to(x), spec, c.init(spec, device.device), Context())
        _, second = c.encode(device.to(x * torch.inf), spec, first, Context(step=1))
        assert device.count == 0
        assert len(calls) == 2
        assert torch.equal(device.back(second.residual), device.back(first.residual))
        assert device.back(first.residual).any()

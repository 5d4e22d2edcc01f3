"""Messages that are added up at once have the sum of those that are added one after another, bit for bit."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from tersegrad import kernels
from tersegrad.core.protocol import Accumulator, Compressor, Context, Message, Spec, Summer
from tersegrad.core.sums import sums_at_once
from tersegrad.engine.meter import Meter, watch
from tersegrad.exchange import virtual
from tersegrad.exchange.all_gather import AllGatherExchange
from tersegrad.exchange.two_shot import TwoShotExchange
from tersegrad.kernels import reference
from tersegrad.recipes import parse
from tests.laws.cases import every_case
from tests.laws.inputs import given, pieces

CPU, CTX = torch.device("cpu"), Context(seed=21, step=3)
SUMMED = (
    "bf16",
    "fp16",
    "sign",
    "sign(block=64)",
    "natural",
    "error_feedback(natural)",
    "int8",
    "int4",
    "qsgd(bits=3)",
    "error_feedback(qsgd(bits=4, norm=max))",
    "error_feedback(int4)",
    "metered(int8, error=false)",
    "by_tensor(error_feedback(qsgd), small=bf16, below=20)",
    'by_tensor(bf16, rules={"head.*": int4, "bias": int8})',
)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A backend for the CPU that adds up messages at once; how many it was given each time."""
    found: list[int] = []
    made = kernels.get(CPU)

    def dequantise_messages(messages: Any, out: Tensor, **options: Any) -> Tensor:
        found.append(len(messages))
        return reference.dequantise_messages(messages, out, **options)

    def sum_casts(cast: Any, messages: Any, out: Tensor, weight: float = 1.0, block: int = 0) -> None:
        found.append(len(messages))
        reference.sum_casts(cast, messages, out, weight, block)

    for operation in (dequantise_messages, sum_casts):
        monkeypatch.setattr(made, operation.__name__, operation)
        monkeypatch.setitem(made.sources, operation.__name__, "toy")  # type: ignore[attr-defined]
    return found


def messages(c: Compressor[Any], spec: Spec, bad: bool = False) -> tuple[list[Message], list[Context]]:
    """Those of five senders."""
    found, contexts = [], [dataclasses.replace(CTX, sender=sender) for sender in range(5)]
    for k, ctx in enumerate(contexts):
        x = torch.randn(spec.numel, generator=torch.Generator().manual_seed(k))
        if bad and k == 2:
            x[-1] = torch.nan
        found.append(c.encode(x, spec, c.init(spec, "cpu"), ctx, **given(c, x))[0])
    return found, contexts


def one_by_one(c: Any, found: list[Message], spec: Spec, contexts: list[Context], weight: float) -> Tensor:
    out: Tensor = c.decode(found[0], spec, contexts[0]).clone().mul_(weight)
    for message, ctx in zip(found[1:], contexts[1:]):
        if isinstance(c, Accumulator):
            c.decode_add(message, spec, ctx, out, weight)
        else:
            out += weight * c.decode(message, spec, ctx)
    return out


def same(a: Tensor, b: Tensor) -> bool:
    return bool(((a.view(torch.int32) == b.view(torch.int32)) | (a.isnan() & b.isnan())).all())


@every_case
def test_every_sum_is_that_of_one_after_another(text: str, calls: list[int]) -> None:
    c = parse(text)
    if not isinstance(c, Summer):
        return
    for d in (1, 1000):
        spec = pieces(d)
        found, contexts = messages(c, spec)
        for weight in (1.0, -0.5):
            out = torch.full((d,), 7.0)
            assert c.decode_sum(found, spec, contexts, out, weight) is out
            assert same(out, one_by_one(c, found, spec, contexts, weight))
    assert not calls or sums_at_once(c, CPU)


@pytest.mark.parametrize("bad", [False, True])
@pytest.mark.parametrize("text", SUMMED)
def test_fixed_rates_are_added_up_at_once(text: str, bad: bool, calls: list[int]) -> None:
    plain, spec = parse(text), pieces(1000)
    for c in (plain, watch(plain, Meter())):
        found, contexts = messages(plain, spec, bad)
        out = torch.full((1000,), 7.0)
        calls.clear()
        assert isinstance(c, Summer)
        c.decode_sum(found, spec, contexts, out)
        assert calls
        assert set(calls) == {5}
        assert same(out, one_by_one(c, found, spec, contexts, 1.0))
        assert bool(out.isnan().any()) == bad


@pytest.mark.parametrize("text", SUMMED)
def test_exchanges_have_the_same_mean(text: str, calls: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    spec = pieces(1000)
    xs = [torch.randn(1000, generator=torch.Generator().manual_seed(r)) for r in range(3)]
    for exchange in (AllGatherExchange(parse(text)), TwoShotExchange(parse(text))):
        calls.clear()
        at_once = virtual.run(exchange, xs, virtual.init(exchange, spec, 3), spec, CTX).mean
        assert calls
        with monkeypatch.context() as patch:
            for name in ("dequantise_messages", "sum_casts"):
                patch.delitem(kernels.get(CPU).sources, name)  # type: ignore[attr-defined]
            calls.clear()
            one_after_another = virtual.run(exchange, xs, virtual.init(exchange, spec, 3), spec, CTX).mean
            assert not calls
        assert same(at_once, one_after_another)

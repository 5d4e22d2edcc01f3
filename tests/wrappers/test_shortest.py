"""The shortest of several messages: longer than none of them but for a byte, with the weakest of their promises."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import tersegrad
from tersegrad.core.errors import BadConfiguration, CorruptMessage
from tersegrad.core.protocol import Context, Guarantee, Message, Spec
from tests.device import Device
from tests.wrappers.test_aligned import gradient

CHOICES = ("sparse_dithering(alpha=0.1)", "trellis(alpha=0.1)")
BOTH = f"shortest([{', '.join(CHOICES)}])"


def sent(text: str, x: Tensor, spec: Spec | None = None) -> tuple[bytes, Tensor]:
    c, spec, ctx = tersegrad.parse(text), spec or Spec.of(x), Context(seed=1)
    message, _ = c.encode(x, spec, c.init(spec, "cpu"), ctx)
    assert int(message.nbytes) <= c.max_nbytes(spec)
    return message.tobytes(), c.decode(Message.frombytes(message.tobytes()), spec, ctx)


def gaussian(d: int) -> Tensor:
    return torch.randn(d, generator=torch.Generator().manual_seed(d))


@pytest.mark.parametrize(("d", "wins"), [(100, 0), (30_000, 1)])
def test_the_shortest_one_is_sent_behind_its_number(d: int, wins: int) -> None:
    x = gaussian(d)
    data, values = sent(BOTH, x)
    alone = [sent(text, x) for text in CHOICES]
    assert len(data) == 1 + min(len(message) for message, _ in alone)
    assert data == bytes([wins]) + alone[wins][0]
    assert torch.equal(values, alone[wins][1])
    assert tersegrad.parse(BOTH).mode(data) == str(tersegrad.parse(CHOICES[wins]))  # type: ignore[attr-defined]


def test_the_first_of_equals_is_sent() -> None:
    assert sent("shortest([bf16, bf16])", gaussian(10))[0][0] == 0


def test_promises() -> None:
    spec = Spec.flat(1000)
    assert tersegrad.parse(BOTH).guarantee(spec) == Guarantee("contractive", 0.1, sure=True)
    weaker = tersegrad.parse("shortest([trellis(alpha=0.1), sparse_dithering(alpha=0.3)])").guarantee(spec)
    assert weaker == Guarantee("contractive", 0.3, sure=True)
    for bad, match in (
        ("shortest([qsgd, int8])", "every outcome"),
        ("shortest([random_k(k=3, unbiased=false)])", "every outcome"),
        ("shortest([error_feedback(int8)])", r"error_feedback\(shortest"),
        ("shortest([])", "1 to 16"),
        (f"shortest([{', '.join(17 * ['bf16'])}])", "1 to 16"),
    ):
        with pytest.raises(BadConfiguration, match=match):
            tersegrad.parse(bad)


def test_bad_messages_are_refused() -> None:
    c, spec = tersegrad.parse("shortest([bf16, int8])"), Spec.flat(20)
    for data in (b"", b"\2" + bytes(40), b"\0" + bytes(39)):
        with pytest.raises(CorruptMessage):
            c.decode(Message.frombytes(data), spec, Context())


def test_in_error_feedback_nothing_is_lost() -> None:
    c, spec, ctx = tersegrad.parse(f"error_feedback({BOTH})"), Spec.flat(3000), Context(seed=1)
    state = c.init(spec, "cpu")
    given, got = torch.zeros(3000), torch.zeros(3000)
    for step in range(4):
        x = gaussian(3000) * (step + 1)
        message, state = c.encode(x, spec, state, ctx)
        given, got = given + x, got + c.decode(message, spec, ctx)
    assert float((given - got).norm()) <= 0.5 * float(gaussian(3000).norm() * 4)


def test_on_a_device_it_is_the_same() -> None:
    x = gaussian(5000)
    c, spec, ctx = tersegrad.parse(BOTH), Spec.flat(5000), Context(seed=1)
    data, values = sent(BOTH, x)
    with Device() as device:
        there, _ = c.encode(device.to(x), spec, None, ctx)
        assert bytes(device.back(there.payload).tolist()) == data
        assert torch.equal(device.back(c.decode(there, spec, ctx)), values)


@pytest.mark.parametrize("alpha", [0.25, 0.1, 0.03])
def test_fewest_bits_is_never_longer_than_what_it_tries(alpha: float) -> None:
    """But for two bytes, and with the error that was asked for."""
    text = f"fewest_bits(alpha={alpha})"
    others = (f"sparse_dithering(alpha={alpha})", f"trellis(alpha={alpha})")
    x, spec = gradient(0.05)
    flat = gaussian(20_000)
    for vector, known in ((x, spec), (flat, Spec.flat(20_000)), (flat**5, Spec.flat(20_000)), (flat[:50], Spec.flat(50))):
        data, values = sent(text, vector, known)
        assert float((values - vector).square().sum()) <= alpha * float(vector.square().sum()) * (1 + 1e-6)
        assert all(len(data) <= 2 + len(sent(other, vector, known)[0]) for other in others)
    assert len(sent(text, x, spec)[0]) < 0.85 * len(sent(others[1], x, spec)[0])
    assert tersegrad.parse(text).guarantee(spec) == Guarantee("contractive", alpha, sure=True)

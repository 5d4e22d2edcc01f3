"""How often the host waits for a device in an exchange, counted on a simulated one.

Fixed rates: never. A compressor whose messages stay on the device: one read of all lengths per round, however many ranks there are.
One that codes on the host: one read per message that it writes, and in a round one of all lengths and one of all that arrived.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from tersegrad import kernels
from tersegrad.core.protocol import Compressor, Context, Guarantee, Piece, Spec
from tersegrad.core.stateless import Stateless
from tersegrad.exchange import scheme, virtual
from tersegrad.exchange.all_gather import AllGatherExchange
from tersegrad.exchange.power_sgd import PowerSGDExchange
from tersegrad.exchange.two_shot import TwoShotExchange
from tersegrad.recipes import parse
from tests.device import Device

NUMEL, CTX = 640, Context(seed=3, step=1, buffer=4)


@dataclasses.dataclass(frozen=True)
class OnDevice(Stateless):
    """What a GPU backend makes possible: messages of variable length that are written and read on the device."""

    name: ClassVar[str] = "on_device"
    wire_id: ClassVar[int] = 250

    def max_nbytes(self, spec: Spec) -> int:
        return 4 * spec.numel

    def codes_on_host(self, device: torch.device) -> bool:
        return False

    def write(self, x: Tensor, data: Tensor, spec: Spec, ctx: Context) -> Tensor:
        data.copy_(x.view(torch.uint8))
        # All but the zeros at the end.
        last = torch.where(x != 0, torch.arange(1, x.numel() + 1, device=x.device), 0).max()
        return 4 * last

    def read(self, data: Tensor, spec: Spec, ctx: Context, out: Tensor, weight: float | None) -> None:
        values = torch.zeros_like(out)
        values[: data.numel() // 4] = data.clone().view(torch.float32)
        _ = out.copy_(values) if weight is None else out.add_(values * weight)

    def guarantee(self, spec: Spec) -> Guarantee:
        return Guarantee("contractive", 0.0, sure=True)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    monkeypatch.setattr(kernels, "FASTER", {"cpu": ("native",)})
    with Device() as made:
        yield made


def vectors(size: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    drawn = torch.randn(size, NUMEL, generator=generator)
    drawn[:, NUMEL // 2 + 5 : NUMEL // 2 + 40] = 0.0
    return list(drawn)


def waits(exchange: Any, size: int, device: Device, spec: Spec | None = None) -> int:
    """Waits of all ranks together in one exchange, which gives the same mean as on the CPU."""
    spec, xs = spec or Spec.flat(NUMEL), vectors(size)
    expected = virtual.run(exchange, xs, virtual.init(exchange, spec, size), spec, CTX).mean
    states, there = virtual.init(exchange, spec, size, device.device), [device.to(x) for x in xs]
    device.waits.clear()
    steps = [exchange.steps(x, s, spec, CTX, rank, size) for rank, (x, s) in enumerate(zip(there, states))]
    values: list[Tensor | None] = [None] * size
    results: list[Tensor] = []
    while not results:
        requests = []
        for generator, value in zip(steps, values):
            try:
                requests.append(next(generator) if value is None else generator.send(value))
            except StopIteration as stop:
                results.append(stop.value[0])
        if requests:
            values = list(virtual.deliver(requests, [0] * size, [0] * size))
    for mean in results:
        torch.testing.assert_close(device.back(mean), expected, rtol=0, atol=0)
    return device.count


FIXED = ("bf16", "qsgd(bits=4)", "error_feedback(sign)", "random_k(fraction=0.1)")


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("text", FIXED)
def test_fixed_rates_never_wait(text: str, size: int, device: Device) -> None:
    c: Compressor[Any] = parse(text)
    assert waits(TwoShotExchange(c), size, device) == 0
    assert waits(AllGatherExchange(c), size, device) == 0


@pytest.mark.parametrize("size", [2, 3])
def test_messages_on_the_device_take_one_read_of_all_lengths_per_round(size: int, device: Device) -> None:
    assert waits(AllGatherExchange(OnDevice()), size, device) == size
    assert waits(TwoShotExchange(OnDevice()), size, device) == 2 * size


@pytest.mark.parametrize("text", ["top_k(fraction=0.1)", "sparse_dithering(nu=0.1)", "error_feedback(top_k(fraction=0.1))"])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_messages_on_the_host(text: str, size: int, device: Device) -> None:
    c: Compressor[Any] = parse(text)
    # Alone, a rank reads once per message: neither lengths nor bytes arrive.
    arriving = 2 if size > 1 else 0
    assert waits(AllGatherExchange(c), size, device) <= size * (1 + arriving)
    assert waits(TwoShotExchange(c), size, device) <= size * (size + arriving) + size * (1 + arriving)


@pytest.mark.parametrize("rule", ["gate=10", "clip=median", "mean=senders, clip=median, gate=10"])
def test_norms_of_all_tensors_and_ranks_take_one_read(rule: str, device: Device) -> None:
    spec = Spec((Piece((20, 20), 0, 400, "a"), Piece((7,), 0, 0, "none of it"), Piece((240,), 0, 240, "b")))
    exchange = scheme(f"all_gather({rule})").make(parse("bf16"))
    assert waits(exchange, 3, device, spec) == 3


def test_power_sgd_never_waits(device: Device) -> None:
    spec = Spec.of(torch.zeros(20, 30), torch.zeros(40))
    assert waits(PowerSGDExchange(rank=2), 2, device, spec) == 0

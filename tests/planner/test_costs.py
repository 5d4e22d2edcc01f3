"""The cost model: the published table, its limits, and what exchanges really send."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import tersegrad
from tersegrad import theory
from tersegrad.core.errors import BadConfiguration
from tersegrad.core.protocol import Context, Spec
from tersegrad.exchange import scheme, virtual
from tersegrad.planner import costs, predict
from tersegrad.planner.costs import Link
from tersegrad.planner.trips import Coding

GIGABIT = Link(1e9)
VGG = 7_580_000
RATIOS = (100, 383.6, 913.4, 12822)
SPEEDUPS = {  # break-even, then the speed-up at each of the ratios
    2: (2.0, 50.0, 191.8, 456.7, 6411.2),
    8: (4.6, 21.9, 83.9, 199.8, 2804.9),
    32: (16.5, 6.1, 23.2, 55.3, 776.4),
    256: (128.5, 0.8, 3.0, 7.1, 99.8),
}


@pytest.mark.parametrize("workers", SPEEDUPS)
def test_the_published_speed_ups_are_ratios_of_our_times(workers: int) -> None:
    dense = costs.ring_all_reduce(workers, 4 * VGG, GIGABIT)
    for ratio, expected in zip((theory.break_even_ratio(workers), *RATIOS), (1.0, *SPEEDUPS[workers][1:])):
        gathered = costs.all_gather_pipelined([4 * VGG / ratio] * workers, GIGABIT)
        assert dense / gathered == pytest.approx(expected, rel=2e-4, abs=0.05)
        assert dense / gathered == pytest.approx(theory.all_gather_speedup(workers, ratio))
    assert float(theory.break_even_ratio(workers)) == pytest.approx(SPEEDUPS[workers][0], abs=0.05)


def test_examples_in_seconds() -> None:
    assert costs.ring_all_reduce(8, 4 * VGG, GIGABIT) == pytest.approx(0.42, abs=0.005)
    assert costs.all_gather_pipelined([4 * VGG / 383.6] * 8, GIGABIT) == pytest.approx(5.1e-3, abs=5e-5)
    assert costs.ring_all_reduce(16, 4 * 25.6e6, GIGABIT) == pytest.approx(1.54, abs=0.005)
    assert costs.all_gather_pipelined([4 * 25.6e6 / 1000] * 16, GIGABIT) == pytest.approx(13e-3, abs=2e-4)


def test_uneven_messages_hurt_only_the_ring_that_waits() -> None:
    even, uneven = [1e6] * 8, [8e6 - 7e3] + [1e3] * 7
    assert sum(even) == pytest.approx(sum(uneven))
    assert costs.all_gather_pipelined(uneven, GIGABIT) == costs.all_gather_pipelined(even, GIGABIT)
    assert costs.all_gather_naive(uneven, GIGABIT) > 7 * costs.all_gather_naive(even, GIGABIT)
    # Directly, the sender of a large message pays for every copy of it.
    assert costs.direct_all_gather(even, GIGABIT) == pytest.approx(GIGABIT.seconds(7e6))
    assert costs.direct_all_gather(uneven, GIGABIT) == pytest.approx(GIGABIT.seconds(7 * uneven[0]))


def test_blocks_and_latency() -> None:
    slow = Link(1e9, latency=1e-4)
    messages = [1e5] * 8
    assert costs.all_gather_pipelined(messages, GIGABIT, 1e3) > costs.all_gather_pipelined(messages, GIGABIT)
    fine, coarse = (costs.all_gather_pipelined(messages, slow, block) for block in (1e2, 1e5))
    assert fine > coarse  # small blocks pay the latency often
    assert costs.ring_all_reduce(8, 0, slow) == pytest.approx(14e-4)
    assert costs.direct_all_gather([0.0] * 8, slow, rounds=2) == pytest.approx(2e-4)
    assert costs.two_shot(8, 0, slow) == pytest.approx(2e-4)
    # At a ratio of 12,822 latency is most of what is left.
    tiny = costs.direct_all_gather([4 * VGG / 12822] * 8, slow, rounds=2)
    assert 2e-4 / tiny > 0.5


def test_computation() -> None:
    assert costs.moments_operations(VGG, 64) == 2 * VGG * 64


@pytest.mark.parametrize("workers", [2, 4])
@pytest.mark.parametrize(("exchange", "text"), [("two_shot", "int8"), ("all_gather", "sign"), ("two_shot", "bf16")])
def test_predicted_bytes_are_those_that_exchanges_send(exchange: str, text: str, workers: int) -> None:
    numel = 4096 * workers
    spec, compressor = Spec.flat(numel), tersegrad.parse(text)
    made = scheme(exchange).make(compressor)
    vectors = [torch.randn(numel, generator=torch.Generator().manual_seed(rank)) for rank in range(workers)]
    outcome = virtual.run(made, vectors, virtual.init(made, spec, workers), spec, Context())
    bits = 8 * compressor.max_nbytes(spec) / numel
    predicted = predict(exchange, numel, workers, GIGABIT, bits, fixed_size=True)  # type: ignore[arg-type]
    assert outcome.sent[0] == pytest.approx(predicted.sent, rel=0.01)
    assert predicted.wire == pytest.approx(GIGABIT.seconds(outcome.sent[0]), rel=0.01)


def test_predict_adds_up() -> None:
    link, coding = Link(100e6, 1e-3, costs.ETHERNET), Coding(1e-8, 2e-8)
    gathered = predict("all_gather", 10**6, 4, link, 0.1, coding)
    assert gathered.coding == pytest.approx(0.01 + 4 * 0.02)
    assert gathered.seconds == gathered.wire + gathered.coding
    # Lengths go around the ring, messages directly.
    assert gathered.wire == pytest.approx(3 * (1e5 + 8 * 8) / 100e6 * costs.ETHERNET + 4e-3)
    two = predict("two_shot", 10**6, 4, link, 0.1, coding, fixed_size=True)
    assert two.coding == pytest.approx(1.25 * 0.01 + 2 * 0.02)
    assert two.wire == pytest.approx(1.5 * 1e5 / 100e6 * costs.ETHERNET + 4e-3)
    assert predict("all_reduce", 10**6, 1, link).wire == 0
    faster = dataclasses.replace(link, bits_per_second=1e9)
    assert predict("all_reduce", 10**6, 4, faster).seconds < predict("all_reduce", 10**6, 4, link).seconds


def test_bad_input() -> None:
    for bad in (
        {"bits_per_second": 0},
        {"bits_per_second": 1e9, "latency": -1},
        {"bits_per_second": 1e9, "framing": 0.5},
        {"bits_per_second": 1e9, "toll": -1},
    ):
        with pytest.raises(BadConfiguration):
            Link(**bad)
    with pytest.raises(BadConfiguration, match="all_reduce"):
        predict("ring", 10, 2, GIGABIT)  # type: ignore[arg-type]
    with pytest.raises(BadConfiguration, match="worker"):
        costs.ring_all_reduce(0, 10, GIGABIT)
    with pytest.raises(BadConfiguration, match="block"):
        costs.all_gather_pipelined([1.0, 2.0], GIGABIT, -1)


def test_direct_exchanges_reach_a_share_of_the_rate() -> None:
    half = costs.Link(1e9, direct=0.5)
    assert costs.two_shot(4, 1e6, half) == 2 * costs.two_shot(4, 1e6, costs.Link(1e9))
    assert costs.direct_all_gather([1e6] * 4, half) == 2 * costs.direct_all_gather([1e6] * 4, costs.Link(1e9))
    assert costs.ring_all_reduce(4, 1e6, half) == costs.ring_all_reduce(4, 1e6, costs.Link(1e9))  # one sender a receiver
    with pytest.raises(BadConfiguration, match="share"):
        costs.Link(1e9, direct=0.0)

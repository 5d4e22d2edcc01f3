"""Hostile replies, 150 of every kind (``make experiments-federated`` sends 1,000).

None crashes the server, none changes the aggregate, each is reported with its reason.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import random
import resource
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("flwr")

from experiments.federated import hostile
from experiments.federated.hostile import Attack, Forgery, Material
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import FedAvg

import tersegrad
from tersegrad.core import frame
from tersegrad.integrations import flower
from tersegrad.integrations.flower import envelope
from tersegrad.integrations.flower.envelope import Answer, Order

logging.getLogger("flwr").setLevel(logging.CRITICAL)
TEXT = "error_feedback(sparse_dithering(alpha=0.25))"
NUMEL = 700
HOSTILE, HONEST = 150, 2  # nodes


SPEC = tersegrad.Spec((tersegrad.Piece((NUMEL - 1,), 0, NUMEL - 1, "w"), tersegrad.Piece((1,), 0, 1, "b")))


@functools.cache
def payload(text: str, number: int) -> tuple[tersegrad.Compressor[Any], tersegrad.Message]:
    """An honest update: these compressors draw no randomness, so it serves every context."""
    compressor = tersegrad.parse(text)
    update = torch.randn(NUMEL, generator=torch.Generator().manual_seed(number))
    return compressor, compressor.encode(update, SPEC, compressor.init(SPEC, "cpu"), tersegrad.Context())[0]


def encoded(order: Order, update: torch.Tensor | int, text: str | None = None) -> bytes:
    context = tersegrad.Context(order.seed, order.step, envelope.UP, order.sender)
    if isinstance(update, int):
        compressor, message = payload(text or order.uplink, update)
    else:
        compressor = tersegrad.parse(text or order.uplink)
        message, _ = compressor.encode(update, SPEC, compressor.init(SPEC, "cpu"), context)
    return envelope.pack_frame(message, compressor, SPEC, context)


def reply_to(message: Message, framed: bytes) -> Message:
    data = Answer(0.1, False).pack(framed)
    arrays = {"tersegrad": Array("uint8", (len(data),), envelope.UPDATE, data), "count": Array(np.array(7))}
    metrics = MetricRecord({"num-examples": 10, "loss": 1.0})
    return Message(RecordDict({"arrays": ArrayRecord(arrays), "metrics": metrics}), reply_to=message)


class Nodes(flower.LocalGrid):
    """Many nodes that never run anything."""

    def __init__(self, count: int) -> None:
        from flwr.clientapp import ClientApp

        super().__init__(ClientApp(), count)


def round_trip(
    attack: Attack | None, nodes: int, seed: int = 0, honest: int = HONEST, **options: Any
) -> tuple[flower.CompressedStrategy, Any]:
    """One round in which the last two nodes are honest. Returns strategy and aggregate."""
    random.seed(0)
    model = ArrayRecord(
        {"w": Array(np.ones(NUMEL - 1, np.float32)), "count": Array(np.array(7)), "b": Array(np.ones(1, np.float32))}
    )
    inner = FedAvg(fraction_evaluate=0.0, min_train_nodes=1, min_available_nodes=1)
    uplink = {"ours": TEXT, "exact": "identity"}
    strategy = flower.CompressedStrategy(inner, uplink, seed=1, max_weight=1000, **options)
    messages = list(strategy.configure_train(1, model, ConfigRecord(), Nodes(nodes)))
    rng, replies = random.Random(seed), []
    for message in sorted(messages, key=lambda m: m.metadata.dst_node_id):
        order, _ = Order.unpack(message.content.array_records["arrays"]["tersegrad"].data)
        good = message.metadata.dst_node_id >= nodes - honest
        reply = reply_to(message, encoded(order, message.metadata.dst_node_id - nodes if good else 0))
        if good:
            replies.append(reply)
        elif attack is not None:
            replies.append(hostile.forge(reply, attack(rng, hostile.material(reply))))
    arrays, _ = strategy.aggregate_train(1, replies)
    return strategy, arrays


@functools.cache
def expected() -> dict[str, np.ndarray[Any, Any]]:
    """The aggregate of the honest alone."""
    _, arrays = round_trip(None, HONEST)
    return {name: a.numpy() for name, a in arrays.items()}


@pytest.mark.parametrize("name", hostile.MAIN)
def test_many_of_every_kind(name: str) -> None:
    kind = hostile.KINDS[name]
    strategy, arrays = round_trip(kind.attack, HOSTILE + HONEST)
    refused = Counter(r.kind for r in strategy.rejections)
    assert refused.total() == strategy.report()["rejected"] == HOSTILE
    assert set(refused) <= kind.reasons
    assert all(r.reason and 0 <= r.node < HOSTILE for r in strategy.rejections)
    assert strategy.rounds[0].accepted == HONEST
    assert sum(p.outcome == "accepted" for p in strategy.rounds[0].parcels.values()) == HONEST
    assert all(np.array_equal(arrays[n].numpy(), wanted) for n, wanted in expected().items())


@functools.cache
def silence() -> hostile.Outcome:
    return hostile.federation(None, hostile=5, honest=2, rounds=2)


@pytest.mark.parametrize("name", list(hostile.KINDS))
def test_attackers_change_no_more_than_silence_would(name: str) -> None:
    outcome = hostile.federation(name, hostile=5, honest=2, rounds=2)
    assert outcome.replies == 10
    assert hostile.handled(outcome, silence())
    assert hostile.verdict(outcome, silence()) == "identical" or hostile.KINDS[name].lie
    assert len(set(outcome.aggregates)) == 3  # the honest went on training
    assert outcome.finite


def test_the_experiment_notices_what_goes_wrong() -> None:
    fine = silence()
    wrong = dataclasses.replace(fine, kind="corrupt", replies=10, reasons={"corrupt": 10}, aggregates=("0",))
    assert not hostile.handled(wrong, fine)
    assert hostile.handled(dataclasses.replace(wrong, aggregates=fine.aggregates), fine)
    assert not hostile.handled(dataclasses.replace(wrong, aggregates=fine.aggregates, reasons={"corrupt": 9}), fine)
    assert not hostile.handled(dataclasses.replace(wrong, aggregates=fine.aggregates, reasons={"error": 10}), fine)
    assert "WRONG" in hostile.table([wrong], fine).markdown()


def test_duplicates_strangers_and_yesterdays_answers() -> None:
    random.seed(0)
    model = ArrayRecord(
        {"w": Array(np.ones(NUMEL - 1, np.float32)), "count": Array(np.array(7)), "b": Array(np.ones(1, np.float32))}
    )
    inner = FedAvg(fraction_evaluate=0.0, min_train_nodes=1, min_available_nodes=1)
    strategy = flower.CompressedStrategy(inner, TEXT)
    grid = Nodes(4)

    def answers() -> list[Message]:
        found = []
        for message in strategy.configure_train(1, model, ConfigRecord(), grid):
            order, _ = Order.unpack(message.content.array_records["arrays"]["tersegrad"].data)
            found.append(reply_to(message, encoded(order, torch.ones(NUMEL))))
        return found

    first = answers()
    copies = [_copy(m) for m in first]
    strategy.aggregate_train(1, [*first, *(_copy(m) for m in copies * 250)])
    assert Counter(r.kind for r in strategy.rejections) == {"duplicate": 1000}
    answers()
    assert strategy.aggregate_train(2, [_copy(m) for m in copies])[0] is None  # a whole round of replays
    assert Counter(r.kind for r in strategy.rejections)["replayed"] == 4
    stranger = _copy(copies[0])
    stranger.metadata.__dict__["_src_node_id"] = 99
    impostor = _copy(copies[0])
    impostor.metadata.__dict__["_src_node_id"] = 1  # node 0's answer under node 1's name
    answers()
    strategy.aggregate_train(3, [stranger, impostor])
    assert [r.kind for r in strategy.rejections[-2:]] == ["unasked", "replayed"]


def _copy(message: Message) -> Message:
    made = Message(RecordDict(dict(message.content)), reply_to=message)
    made.metadata.__dict__.update(message.metadata.__dict__)
    return made


def test_a_frame_allocates_no_more_than_its_model() -> None:
    """In a process that may grow by 256 MiB, frames that claim up to 2^64 coordinates are refused before any memory is asked for."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    with open("/proc/self/statm") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (256 << 20), hard))
    try:
        for name in ("wrong shape", "odd records", "oversized"):
            strategy, _ = round_trip(hostile.KINDS[name].attack, 60 + HONEST, seed=3)
            assert strategy.report()["rejected"] == 60
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def test_a_round_of_attackers_only_leaves_the_model_alone() -> None:
    strategy, arrays = round_trip(lambda rng, mine: Forgery(mine.framed[:-1]), 12, honest=0)
    assert arrays is None
    assert strategy.report()["rejected"] == 12


def test_huge_updates_are_clipped_or_leave_the_model_alone() -> None:
    def huge(rng: random.Random, mine: Material) -> Forgery:
        context, exact = frame.unpack(mine.framed).context, tersegrad.parse("identity")
        message, _ = exact.encode(torch.full((NUMEL,), 3.4e38), SPEC, None, context)
        return Forgery(envelope.pack_frame(message, exact, SPEC, context), metrics={"num-examples": 999, "loss": 1.0})

    strategy, arrays = round_trip(huge, 12, clip=2.0)
    assert strategy.rounds[0].accepted == 12
    assert np.linalg.norm(arrays["w"].numpy() - 1) <= 2.0
    strategy, arrays = round_trip(huge, 12)
    assert arrays is None or all(np.isfinite(a.numpy()).all() for a in arrays.values())

"""Hostile replies: 1,000 of every kind. None crashes the server, none changes the aggregate, each is reported with its reason."""

from __future__ import annotations

import functools
import logging
import random
import resource
import struct
import zlib
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("flwr")

from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import FedAvg

import tersegrad
from tersegrad.core import frame
from tersegrad.integrations import flower
from tersegrad.integrations.flower import envelope
from tersegrad.integrations.flower.envelope import Answer, Order

logging.getLogger("flwr").setLevel(logging.CRITICAL)
TEXT = "error_feedback(sparse_dithering(alpha=0.25))"
NUMEL = 700
HOSTILE, HONEST = 1000, 2  # nodes
Attack = Callable[[random.Random, Order, bytes], tuple[bytes, dict[str, Any]]]


def reframed(framed: bytes, **changes: Any) -> bytes:
    """A well-formed frame with a right checksum whose facts were changed."""
    opened = frame.unpack(framed)
    facts: dict[str, Any] = {
        "wire_id": opened.wire_id, "text": opened.text, "numel": opened.numel, "dtype": opened.dtype, "payload": opened.payload
    } | {k: v for k, v in changes.items() if k != "context"}  # fmt: skip
    context = changes.get("context", opened.context)
    label = facts["text"].encode()
    header = struct.pack(
        "<4sBBHQIHHQQB", b"TGRD", 1, frame.DTYPES.index(facts["dtype"]), facts["wire_id"], context.seed, context.step,
        context.buffer, context.sender, facts["numel"], len(facts["payload"]), len(label),
    )  # fmt: skip
    body: bytes = header + label + facts["payload"]
    return body + struct.pack("<I", zlib.crc32(body))


def _corrupt(rng: random.Random, order: Order, framed: bytes) -> tuple[bytes, dict[str, Any]]:
    data = bytearray(framed)
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    return bytes(data), {}


def _payload(rng: random.Random, order: Order, framed: bytes) -> tuple[bytes, dict[str, Any]]:
    """Damaged before the checksum was computed; may decode to something finite, which is then only a bad update: not counted."""
    payload = frame.unpack(framed).payload
    return reframed(framed, payload=payload[: rng.randrange(1, 5)] + rng.randbytes(rng.randrange(40))), {"may_pass": True}


def _truncated(rng: random.Random, order: Order, framed: bytes) -> tuple[bytes, dict[str, Any]]:
    return framed[: rng.randrange(len(framed))], {}


def _oversized(rng: random.Random, order: Order, framed: bytes) -> tuple[bytes, dict[str, Any]]:
    return reframed(framed, payload=rng.randbytes(rng.randrange(20 * NUMEL, 60 * NUMEL))), {}


def _shape(rng: random.Random, order: Order, framed: bytes) -> tuple[bytes, dict[str, Any]]:
    if rng.random() < 0.3:
        return reframed(framed, dtype=rng.choice([torch.float16, torch.bfloat16])), {}
    return reframed(framed, numel=rng.choice([0, 1, NUMEL - 1, NUMEL + 1, 1 << 20, 1 << 40, (1 << 64) - 1])), {}


def _version(rng: random.Random, order: Order, framed: bytes) -> tuple[bytes, dict[str, Any]]:
    body = framed[:4] + bytes([rng.choice([0, *range(2, 256)])]) + framed[5:-4]
    return body + struct.pack("<I", zlib.crc32(body)), {}


def _replayed(rng: random.Random, order: Order, framed: bytes) -> tuple[bytes, dict[str, Any]]:
    context = frame.unpack(framed).context
    changes = {"step": context.step - 1, "sender": (context.sender + 1) % 0xFFFF, "seed": context.seed ^ 1, "buffer": 1}
    name = rng.choice(list(changes))
    facts = {"seed": context.seed, "step": context.step, "buffer": context.buffer, "sender": context.sender} | {
        name: changes[name]
    }
    return reframed(framed, context=tersegrad.Context(**facts)), {}


def _not_finite(rng: random.Random, order: Order, framed: bytes) -> tuple[bytes, dict[str, Any]]:
    bad = torch.randn(NUMEL)
    bad[rng.randrange(NUMEL)] = rng.choice([float("nan"), float("inf"), -float("inf")])
    return encoded(order, bad), {}


def _compressor(rng: random.Random, order: Order, framed: bytes) -> tuple[bytes, dict[str, Any]]:
    texts = [
        "spherical(alpha=0.01,block=64)",
        "identity(",
        "",
        "top_k(fraction=1e-9)",
        "x" * 255,
        "((((" * 50,
        "error_feedback(sign)",
    ]
    return reframed(framed, text=rng.choice(texts)), {}


def _wire_id(rng: random.Random, order: Order, framed: bytes) -> tuple[bytes, dict[str, Any]]:
    return reframed(framed, wire_id=rng.choice([0, 1, 65, 65535])), {}


def _metrics(rng: random.Random, order: Order, framed: bytes) -> tuple[bytes, dict[str, Any]]:
    bad: list[dict[str, Any]] = [
        {}, {"num-examples": float("nan")}, {"num-examples": -1}, {"num-examples": 0}, {"num-examples": [1.0]},
        {"num-examples": 10, "loss": float("inf")}, {"num-examples": 10**6, "loss": 1.0}, {"num-examples": 10, f"other{rng.random()}": 1.0},
        {"num-examples": 10, "loss": [1.0] * rng.randrange(1, 2000)}, {"loss": 1.0},
    ]  # fmt: skip
    return framed, {"metrics": rng.choice(bad)}


def _records(rng: random.Random, order: Order, framed: bytes) -> tuple[bytes, dict[str, Any]]:
    choices = [
        "two-arrays",
        "no-arrays",
        "two-metrics",
        "no-metrics",
        "other-name",
        "stype",
        "extra",
        "missing",
        "bomb",
        "text",
    ]
    return framed, {"records": rng.choice(choices)}


def _error(rng: random.Random, order: Order, framed: bytes) -> tuple[bytes, dict[str, Any]]:
    return framed, {"error": True}


ATTACKS: dict[str, tuple[Attack, set[str]]] = {
    "corrupt": (_corrupt, {"corrupt", "wrong-version", "wrong-shape", "oversized", "replayed"}),
    "corrupt before the checksum": (_payload, {"corrupt", "non-finite"}),
    "truncated": (_truncated, {"corrupt"}),
    "oversized": (_oversized, {"oversized"}),
    "wrong shape": (_shape, {"wrong-shape"}),
    "wrong version": (_version, {"wrong-version"}),
    "replayed": (_replayed, {"replayed"}),
    "not finite": (_not_finite, {"non-finite"}),
    "another compressor": (_compressor, {"not-offered"}),
    "another wire id": (_wire_id, {"corrupt"}),
    "odd metrics": (_metrics, {"metrics"}),
    "odd records": (_records, {"no-update", "metrics", "corrupt"}),
    "error": (_error, {"error"}),
}


LISTED = ("corrupt", "truncated", "oversized", "wrong shape", "wrong version", "replayed", "not finite")
SPEC = tersegrad.Spec((tersegrad.Piece((NUMEL - 1,), 0, NUMEL - 1, "w"), tersegrad.Piece((1,), 0, 1, "b")))


@functools.cache
def payload(text: str, number: int) -> tuple[tersegrad.Compressor[Any], tersegrad.Message]:
    """An honest update: these compressors draw no randomness, so it serves every context."""
    compressor = tersegrad.parse(text)
    update = torch.randn(NUMEL, generator=torch.Generator().manual_seed(number))
    return compressor, compressor.encode(update, compressor.init(SPEC, "cpu"), tersegrad.Context())[0]


def encoded(order: Order, update: torch.Tensor | int, text: str | None = None) -> bytes:
    context = tersegrad.Context(order.seed, order.step, envelope.UP, order.sender)
    if isinstance(update, int):
        compressor, message = payload(text or order.uplink, update)
    else:
        compressor = tersegrad.parse(text or order.uplink)
        message, _ = compressor.encode(update, compressor.init(SPEC, "cpu"), context)
    return envelope.pack_frame(message, compressor, SPEC, context)


def reply_to(message: Message, framed: bytes, how: dict[str, Any]) -> Message:
    if how.get("error"):
        return Message(Error(0, "no"), reply_to=message)
    data = Answer(0.1, False).pack(framed)
    kind = how.get("records", "")
    count = np.array(7)
    bomb = (
        b"\x93NUMPY\x01\x00v\x00"
        + b"{'descr': '<f8', 'fortran_order': False, 'shape': (1099511627776,), }".ljust(117)
        + b"\n"
        + bytes(64)
    )
    arrays = {
        "tersegrad": Array("uint8", (len(data),), "numpy.ndarray" if kind == "stype" else envelope.UPDATE, data),
        "count": Array(count) if kind != "bomb" else Array("float64", (1 << 40,), "numpy.ndarray", bomb),
    }
    if kind == "text":
        arrays["count"] = Array("<U4", (1,), "numpy.ndarray", Array(np.array(["evil"])).data)
    if kind == "extra":
        arrays["more"] = Array(np.zeros(3))
    if kind == "missing":
        del arrays["count"]
    metrics = MetricRecord(how.get("metrics", {"num-examples": 10, "loss": 1.0}))
    content = RecordDict({"arrays": ArrayRecord(arrays), "metrics": metrics})
    if kind in ("no-arrays", "other-name"):
        del content["arrays"]
    if kind == "two-arrays":
        content["again"] = ArrayRecord(arrays)
    if kind in ("two-metrics", "other-name"):
        content["other"] = MetricRecord({"num-examples": 10, "loss": 1.0})
    if kind == "no-metrics":
        del content["metrics"]
    return Message(content, reply_to=message)


class Nodes(flower.LocalGrid):
    """Many nodes that never run anything."""

    def __init__(self, count: int) -> None:
        from flwr.clientapp import ClientApp

        super().__init__(ClientApp(), count)


def round_trip(
    attack: Attack | None, nodes: int, seed: int = 0, honest: int = HONEST, usual: Any = None, **options: Any
) -> tuple[flower.CompressedStrategy, Any, int]:
    """One round in which the last two nodes are honest. Returns strategy, aggregate, and how many attacks may have passed."""
    random.seed(0)
    model = ArrayRecord(
        {"w": Array(np.ones(NUMEL - 1, np.float32)), "count": Array(np.array(7)), "b": Array(np.ones(1, np.float32))}
    )
    inner = FedAvg(fraction_evaluate=0.0, min_train_nodes=1, min_available_nodes=1)
    uplink = {"ours": TEXT, "exact": "identity"}
    strategy = flower.CompressedStrategy(inner, uplink, seed=1, max_weight=1000, **options)
    if usual is not None:
        strategy._usual[True] = usual
    messages = list(strategy.configure_train(1, model, ConfigRecord(), Nodes(nodes)))
    rng, replies, passing = random.Random(seed), [], 0
    for message in sorted(messages, key=lambda m: m.metadata.dst_node_id):
        order, _ = Order.unpack(message.content.array_records["arrays"]["tersegrad"].data)
        good = message.metadata.dst_node_id >= nodes - honest
        how: dict[str, Any] = {}
        framed = encoded(order, message.metadata.dst_node_id - nodes if good else 0)
        if not good and attack is not None:
            framed, how = attack(rng, order, framed)
            passing += "may_pass" in how
        if good or attack is not None:
            replies.append(reply_to(message, framed, how))
    arrays, _ = strategy.aggregate_train(1, replies)
    return strategy, arrays, passing


@functools.cache
def expected() -> dict[str, np.ndarray[Any, Any]]:
    """The aggregate of the honest alone."""
    _, arrays, _ = round_trip(None, HONEST)
    return {name: a.numpy() for name, a in arrays.items()}


@pytest.mark.parametrize("name", list(ATTACKS))
def test_a_thousand_of_every_kind(name: str) -> None:
    attack, kinds = ATTACKS[name]
    hostile = HOSTILE if name in LISTED else HOSTILE // 4
    nodes = hostile + HONEST
    strategy, arrays, passing = round_trip(attack, nodes)
    refused = Counter(r.kind for r in strategy.rejections)
    if passing:  # damage under a right checksum: refused, or an update like any other, finite and of the right shape
        assert refused.total() + strategy.rounds[0].accepted == nodes
        assert strategy.rounds[0].accepted >= HONEST
        assert all(np.isfinite(a.numpy()).all() for a in arrays.values())
    else:
        assert refused.total() == hostile
        assert strategy.rounds[0].accepted == HONEST
        wanted = expected()
        assert all(np.array_equal(arrays[n].numpy(), wanted[n]) for n in wanted)
    assert set(refused) <= kinds
    assert all(r.reason and 0 <= r.node < hostile for r in strategy.rejections)
    assert sum(p.outcome == "accepted" for p in strategy.rounds[0].parcels.values()) == strategy.rounds[0].accepted
    assert strategy.report()["rejected"] == refused.total()


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
            found.append(reply_to(message, encoded(order, torch.ones(NUMEL)), {}))
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
            strategy, _, _ = round_trip(ATTACKS[name][0], 60 + HONEST, seed=3)
            assert strategy.report()["rejected"] == 60
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def test_a_round_of_attackers_only_leaves_the_model_alone() -> None:
    strategy, arrays, _ = round_trip(lambda rng, order, framed: (framed[:-1], {}), 12, honest=0)
    assert arrays is None
    assert strategy.report()["rejected"] == 12


def test_huge_updates_are_clipped_or_leave_the_model_alone() -> None:
    def huge(rng: random.Random, order: Order, framed: bytes) -> tuple[bytes, dict[str, Any]]:
        return encoded(order, torch.full((NUMEL,), 3.4e38), "identity"), {"metrics": {"num-examples": 999, "loss": 1.0}}

    strategy, arrays, _ = round_trip(huge, 12, clip=2.0)
    assert strategy.rounds[0].accepted == 12
    assert np.linalg.norm(arrays["w"].numpy() - 1) <= 2.0
    strategy, arrays, _ = round_trip(huge, 12)
    assert arrays is None or all(np.isfinite(a.numpy()).all() for a in arrays.values())


def test_the_usual_structure_outvotes_any_number_of_attackers() -> None:
    strategy, _, _ = round_trip(None, HONEST)
    alike = strategy._usual[True]

    def other(rng: random.Random, order: Order, framed: bytes) -> tuple[bytes, dict[str, Any]]:
        return framed, {"metrics": {"num-examples": 10, "other": 1.0}}

    strategy, arrays, _ = round_trip(other, 50, usual=alike)
    assert strategy.report()["rejected_metrics"] == 48
    assert all(np.array_equal(arrays[n].numpy(), a) for n, a in expected().items())

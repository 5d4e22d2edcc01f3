"""What a reply may carry: weights, arrays beside the update, metrics, sizes. The round goes on without those that break a rule."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("flwr")
pytest.importorskip("sklearn")

from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import DifferentialPrivacyClientSideAdaptiveClipping, FedAdam, FedAvg, QFedAvg
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects

import tersegrad
from tersegrad.core.errors import CorruptMessage
from tersegrad.integrations import flower
from tersegrad.integrations.flower import envelope
from tests.integrations.flower.federation import accuracy, client_app, fedavg, network, run

logging.getLogger("flwr").setLevel(logging.CRITICAL)

Spoil = Callable[[int, dict[str, Any]], None]


def federation(
    spoil: Spoil, nodes: int = 4, rounds: int = 2, norm: bool = False, grid: flower.LocalGrid | None = None, **options: Any
) -> tuple[flower.CompressedStrategy, ArrayRecord | None]:
    """Rounds in which ``spoil`` may change the records of each node's reply; returns the strategy and the last aggregate."""

    def deliver(reply: Message) -> Iterable[Message]:
        if reply.has_error():
            return [reply]
        arrays, metrics = dict(reply.content.array_records["arrays"]), dict(reply.content.metric_records["metrics"])
        records: dict[str, Any] = {"arrays": arrays, "metrics": metrics}
        spoil(reply.metadata.src_node_id, records)
        made = {
            name: ArrayRecord(r) if name == "arrays" else MetricRecord(r) if name == "metrics" else r
            for name, r in records.items()
        }
        forged = Message(RecordDict(made), reply_to=reply)
        forged.metadata.__dict__.update(reply.metadata.__dict__)
        return [forged]

    inner = options.pop("inner", None) or fedavg()
    strategy = flower.CompressedStrategy(inner, seed=1, **options)
    grid = grid or flower.LocalGrid(client_app([flower.compress_mod()], norm=norm), nodes, deliver=deliver)
    result = run(strategy, grid, rounds, flower.to_arrays(network(norm=norm).state_dict()))
    return strategy, result.arrays


def refused(strategy: flower.CompressedStrategy) -> set[tuple[int, str]]:
    return {(r.node, r.kind) for r in strategy.rejections}


# ---- weights


@pytest.mark.parametrize("claim", [1.7e308, 1e18, 2.0**31 * 1.01])
def test_huge_weights_are_not_believed(claim: float) -> None:
    """Two weights whose sum overflows made every share of the mean zero, and with it the model; one of 1e18 owned the mean."""

    def claims(node: int, records: dict[str, Any]) -> None:
        if node < 2:
            records["metrics"]["num-examples"] = claim

    strategy, arrays = federation(claims)
    assert arrays is not None
    assert float(np.abs(arrays["0.weight"].numpy()).max()) > 0.01
    assert refused(strategy) == {(0, "metrics"), (1, "metrics")}
    assert strategy.report()["updates"] == 4
    assert accuracy(arrays) > 0.2


def test_a_bound_on_weights_is_finite() -> None:
    for bound in (0, -1.0, float("inf"), float("nan"), 1e300, None):
        with pytest.raises(tersegrad.BadConfiguration, match="max_weight"):
            flower.CompressedStrategy(fedavg(), max_weight=bound)  # type: ignore[arg-type]


# ---- arrays beside the frame


def beside(name: str, value: Any) -> Spoil:
    def spoil(node: int, records: dict[str, Any]) -> None:
        if node == 0:
            records["arrays"][name] = Array(np.asarray(value))

    return spoil


MEAN, VARIANCE, COUNTER = "1.running_mean", "1.running_var", "1.num_batches_tracked"


@pytest.mark.parametrize(
    "spoil",
    [
        beside(MEAN, np.full(48, 1e300)),
        beside(MEAN, np.zeros(48, np.float64)),
        beside(MEAN, np.zeros(48, np.longdouble)),
        beside(VARIANCE, np.full(48, -5.0, np.float32)),
        beside(COUNTER, np.float64(3.0)),
        beside(COUNTER, np.int64(-(10**15))),
        beside(COUNTER, np.int64(2**62)),
    ],
    ids=["float64 1e300", "float64", "longdouble", "negative variance", "float counter", "negative counter", "huge counter"],
)
def test_one_odd_array_beside_the_frame_costs_nothing_but_its_own_reply(spoil: Spoil) -> None:
    """A float64 beyond float32's range once made every round's aggregate overflow, with nobody refused."""
    strategy, arrays = federation(spoil, norm=True, rounds=4)
    assert arrays is not None
    assert {node for node, _ in refused(strategy)} == {0}
    assert {kind for _, kind in refused(strategy)} <= {"beside", "corrupt"}
    assert strategy.report()["updates"] == 12
    assert (arrays[VARIANCE].numpy() > 0).all()
    assert accuracy(arrays, norm=True) > 0.5


@pytest.mark.parametrize(("options", "bound"), [({"clip": 1.0}, 1.0), ({"clip": 0.1, "clip_beside": 3.0}, 3.0)])
@pytest.mark.parametrize("spoiled", [MEAN, VARIANCE, COUNTER])
def test_clip_bounds_what_lies_beside_the_frame(spoiled: str, options: dict[str, Any], bound: float) -> None:
    value = np.int64(10**15) if spoiled == COUNTER else np.full(48, 1e30, np.float32)
    strategy, arrays = federation(beside(spoiled, value), norm=True, rounds=1, **options)
    assert arrays is not None
    assert strategy.report()["updates"] == 4
    start = network(norm=True).state_dict()
    moved = {n: arrays[n].numpy().astype(float) - start[n].double().numpy() for n in start}
    assert np.sqrt(sum(np.square(moved[n]).sum() for n in (MEAN, VARIANCE))) <= bound * (1 + 1e-5)
    assert abs(moved[COUNTER]) <= bound
    rest = [moved[n] for n in moved if n not in (MEAN, VARIANCE, COUNTER)]
    assert np.sqrt(sum(np.square(value).sum() for value in rest)) <= options["clip"] * (1 + 1e-5)


def test_dtypes_of_the_model_stay() -> None:
    """Means of integers are integers again, so that honest replies fit; 16-bit clients send what the server keeps in float32."""
    _, arrays = federation(lambda node, records: None, norm=True, rounds=3)
    assert arrays is not None
    assert {n: a.dtype for n, a in arrays.items() if n in (MEAN, COUNTER)} == {MEAN: "float32", COUNTER: "int64"}
    assert int(arrays[COUNTER].numpy()) == 3 * 18  # batches of 20 of 350 rows
    strategy = flower.CompressedStrategy(fedavg(), seed=1)
    grid = flower.LocalGrid(client_app([flower.compress_mod()], torch.bfloat16, norm=True), 3)
    run(strategy, grid, 3, flower.to_arrays(network(torch.bfloat16, norm=True).state_dict()))
    assert strategy.report()["updates"] == 9


# ---- metrics


def test_who_was_alone_once_locks_nobody_out() -> None:
    """A client that answers alone in one round added a metric; from then on every honest reply was refused."""
    alone = [True]

    def deliver(reply: Message) -> list[Message]:
        node = reply.metadata.src_node_id
        if node == 0:
            reply.content.metric_records["metrics"]["mine"] = 1.0
        return [reply] if node == 0 or not alone[0] else []

    grid = flower.LocalGrid(client_app([flower.compress_mod()]), 4, deliver=deliver)
    strategy = flower.CompressedStrategy(fedavg(), seed=1)
    result = run(strategy, grid, 1)
    assert strategy.report()["updates"] == 1
    alone[0] = False
    result = run(strategy, grid, 3, result.arrays)
    assert strategy.report()["rejected"] == 0
    assert strategy.report()["updates"] == 13  # the odd metric is left out, its sender is not
    assert set(result.train_metrics_clientapp[1]) == {
        "loss", "uplink-bytes", "downlink-bytes", "updates-used", "updates-rejected"
    }  # fmt: skip


@pytest.mark.parametrize("change", [{"mine": 1.0}, {"loss": None}, {"loss": [1.0, 2.0]}])
def test_one_of_two_cannot_refuse_the_other(change: dict[str, Any]) -> None:
    """Two clients per round: whoever came first decided. Now what both have is used."""

    def odd(node: int, records: dict[str, Any]) -> None:
        if node == 0:
            metrics = records["metrics"] | change
            records["metrics"] = {name: value for name, value in metrics.items() if value is not None}

    strategy, _ = federation(odd, nodes=2, rounds=3)
    assert strategy.report()["rejected"] == 0
    assert strategy.report()["updates"] == 6


def test_who_lacks_the_others_metrics_is_refused() -> None:
    def lacking(node: int, records: dict[str, Any]) -> None:
        if node == 0:
            del records["metrics"]["loss"]

    strategy, arrays = federation(lacking, rounds=2)
    assert refused(strategy) == {(0, "metrics")}
    assert strategy.report()["updates"] == 6
    assert arrays is not None


def test_other_names_of_records_do_not_stop_a_round() -> None:
    def renamed(node: int, records: dict[str, Any]) -> None:
        if node == 0:
            records["zzz"] = ArrayRecord(records.pop("arrays"))
            records["aaa"] = MetricRecord(records.pop("metrics"))

    strategy, arrays = federation(renamed, nodes=3, rounds=2)
    assert strategy.report()["updates"] == 6
    assert arrays is not None


def test_a_strategy_gets_the_metrics_that_it_reads() -> None:
    """QFedAvg stops the whole run where one reply has no loss."""

    def lacking(node: int, records: dict[str, Any]) -> None:
        if node == 0:
            del records["metrics"]["loss"]

    inner = QFedAvg(
        client_learning_rate=0.2, q=0.1, train_loss_key="loss", fraction_evaluate=0.0, min_train_nodes=1, min_available_nodes=1
    )
    strategy, arrays = federation(lacking, nodes=2, rounds=2, inner=inner)
    assert refused(strategy) == {(0, "metrics")}
    assert arrays is not None


@pytest.mark.parametrize("loss", [-1.0, -0.5, -1e308])
def test_a_negative_loss_does_not_stop_training(loss: float) -> None:
    """QFedAvg takes a power of the loss: one negative number made every aggregate NaN, with nobody refused."""

    def negative(node: int, records: dict[str, Any]) -> None:
        if node == 0:
            records["metrics"]["loss"] = loss

    inner = QFedAvg(
        client_learning_rate=0.2, q=0.1, train_loss_key="loss", fraction_evaluate=0.0, min_train_nodes=1, min_available_nodes=1
    )
    strategy, arrays = federation(negative, inner=inner)
    assert refused(strategy) == {(0, "metrics")}
    assert arrays is not None
    assert float(np.abs(arrays["0.weight"].numpy() - network().state_dict()["0.weight"].numpy()).max()) > 0.01


@pytest.mark.parametrize("bit", [1e6, -1e6, 1.5])
def test_the_bound_of_adaptive_clipping_is_not_anybodys(bit: float) -> None:
    """Its exponential is the bound's factor: one large number made the bound zero for good, and a negative one infinite."""

    def claims(node: int, records: dict[str, Any]) -> None:
        records["metrics"]["norm_bit"] = bit if node == 0 else node % 2

    inner = DifferentialPrivacyClientSideAdaptiveClipping(fedavg(), noise_multiplier=0.0, num_sampled_clients=3)
    strategy, _ = federation(claims, inner=inner)
    assert refused(strategy) == {(0, "metrics")}
    assert 0.05 < inner.clipping_norm < 0.2


@pytest.mark.parametrize("kind", ["lacking", "more", "weight", "large", "arrays"])
def test_evaluation_goes_on_too(kind: str) -> None:
    def deliver(reply: Message) -> list[Message]:
        if reply.metadata.src_node_id == 0 and reply.metadata.message_type.startswith("evaluate"):
            metrics = reply.content.metric_records["metrics"]
            if kind == "lacking":
                del metrics["accuracy"]
            elif kind == "more":
                metrics["mine"] = 1.0
            elif kind == "weight":
                metrics["num-examples"] = 1.7e308
            elif kind == "large":
                reply.content["more"] = ConfigRecord({"much": b"0" * 1_000_000})
            else:
                reply.content["more"] = ArrayRecord({"tersegrad": Array(np.zeros(3)), "x": Array(np.full(3, np.nan))})
        return [reply]

    strategy = flower.CompressedStrategy(fedavg(evaluate=1.0), seed=1)
    result = run(strategy, flower.LocalGrid(client_app([flower.compress_mod()]), 3, deliver=deliver), 2)
    wanted = {"lacking": "metrics", "weight": "metrics", "large": "oversized"}
    assert refused(strategy) == ({(0, wanted[kind])} if kind in wanted else set())
    assert set(result.evaluate_metrics_clientapp[2]) == {"accuracy"}
    assert strategy.report()["updates"] == 6


# ---- sizes


@pytest.mark.parametrize(
    "record",
    [
        ConfigRecord({"much": b"\0" * (2 << 20)}),
        ConfigRecord({"much": ["x" * 1000] * 1000}),
        ConfigRecord({"x" * (1 << 20): 1}),
        ConfigRecord({f"{i:0100}": 0 for i in range(5_000)}),
    ],
    ids=["bytes", "strings", "name", "names"],
)
def test_nothing_large_rides_along(record: ConfigRecord) -> None:
    def riding(node: int, records: dict[str, Any]) -> None:
        if node == 0:
            records["more"] = record

    strategy, arrays = federation(riding, rounds=1)
    assert refused(strategy) == {(0, "oversized")}
    assert strategy.report()["updates"] == 3
    assert strategy.rounds[0].parcels[0].uplink > 300_000
    assert arrays is not None
    strategy, _ = federation(riding, rounds=1, max_extra=64 << 20)
    assert strategy.report()["updates"] == 4


def test_long_metrics_and_odd_arrays_are_large_too() -> None:
    def metrics(node: int, records: dict[str, Any]) -> None:
        records["metrics"]["loss"] = [1.0] * (100_000 if node == 0 else 2)

    def shape(node: int, records: dict[str, Any]) -> None:
        if node == 0:
            own = records["arrays"]["tersegrad"]
            records["arrays"]["tersegrad"] = Array(own.dtype, (1,) * 100_000, own.stype, own.data)

    for spoil in (metrics, shape):
        assert refused(federation(spoil, rounds=1)[0]) == {(0, "oversized")}


def serialised(message: Message) -> int:
    return sum(len(part.deflate()) for part in get_all_nested_objects(message).values())


def test_messages_are_counted_exactly_without_being_serialised(monkeypatch: pytest.MonkeyPatch) -> None:
    zeros = Array(np.zeros(1000, np.float32))
    large = Array("uint8", (25 << 20,), "tersegrad.update", bytes(range(256)) * (100 << 10))
    text = ConfigRecord({"a": 1, "b": [1.5, 2.0], "c": "ä", "d": b"\xff", "e": True, "f": ["x", "y"]})
    metrics = MetricRecord({"loss": 0.5, "n": -3, "list": [1, 2, 3]})
    contents: list[dict[str, Any]] = [
        {},
        {"arrays": ArrayRecord({"a": zeros, "b": zeros, "ü": Array(np.zeros(1000))}), "m": metrics, "c": text},
        {
            "one": ArrayRecord({"a": zeros}),
            "two": ArrayRecord({"a": zeros}),
            "m": metrics,
            "again": MetricRecord(dict(metrics)),
        },
        {"arrays": ArrayRecord({"tersegrad": large, "empty": Array("uint8", (0,), "x", b"")}), "none": MetricRecord()},
    ]
    messages = [Message(RecordDict(content), 7, "train") for content in contents]
    messages.append(Message(Error(3, "what went wrong"), reply_to=messages[0]))
    wanted = [serialised(message) for message in messages]
    assert [flower.wire_nbytes(message) for message in messages] == wanted
    before = [message.content for message in messages[:-1]]
    called: list[int] = []
    monkeypatch.setattr(Array, "deflate", lambda self: called.append(1))
    assert [flower.wire_nbytes(message) for message in messages] == wanted
    assert called == []
    assert [message.content for message in messages[:-1]] == before


def test_the_server_reads_its_model_once_per_round(monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[int] = []
    inside: list[bool] = []
    original, aggregate = Array.numpy, FedAvg.aggregate_train

    def numpy(array: Array) -> Any:
        reads.append(len(array.data)) if not inside else None
        return original(array)

    def read_tensor(array: Array) -> Any:
        reads.append(len(array.data)) if not inside else None
        return keep(array)

    def aggregate_train(*args: Any) -> Any:
        inside.append(True)
        found = aggregate(*args)
        inside.clear()
        return found

    keep = envelope.read_tensor
    strategy = flower.CompressedStrategy(fedavg(), seed=1)
    grid = flower.LocalGrid(client_app([flower.compress_mod()]), 6)
    random_messages = list(strategy.configure_train(1, flower.to_arrays(network().state_dict()), ConfigRecord(), grid))
    replies = list(grid.send_and_receive(random_messages))
    monkeypatch.setattr(Array, "numpy", numpy)
    monkeypatch.setattr(envelope, "read_tensor", read_tensor)
    monkeypatch.setattr(FedAvg, "aggregate_train", aggregate_train)
    arrays, _ = strategy.aggregate_train(1, replies)
    assert arrays is not None
    assert len(reads) == len(arrays)  # the aggregate, which is checked


# ---- what is kept of it


def test_reasons_are_cut_and_printable() -> None:
    def deliver(reply: Message) -> list[Message]:
        error = Message(Error(0, "no\n" + "x" * 10_000_000), reply_to=reply)
        error.metadata.__dict__.update(reply.metadata.__dict__)
        return [error]

    strategy = flower.CompressedStrategy(fedavg(), seed=1)
    run(strategy, flower.LocalGrid(client_app([flower.compress_mod()]), 2, deliver=deliver), 1)
    assert {len(r.reason) for r in strategy.rejections} == {300}
    assert all(r.reason.isprintable() for r in strategy.rejections)


def test_only_the_last_rounds_are_kept_and_totals_are_of_all() -> None:
    def bad(node: int, records: dict[str, Any]) -> None:
        if node == 0:
            records["metrics"]["num-examples"] = -1

    strategy, _ = federation(bad, rounds=7, history=3)
    whole, _ = federation(bad, rounds=7, history=100)
    assert [r.round for r in strategy.rounds] == [5, 6, 7]
    assert len(strategy.rejections) == 3
    assert strategy.report() == whole.report()
    assert whole.report()["rejected_metrics"] == 7
    with pytest.raises(tersegrad.BadConfiguration, match="at least 1"):
        flower.CompressedStrategy(fedavg(), history=0)


def test_a_round_in_which_nobody_is_asked_counts_nothing() -> None:
    class Every(FedAvg):
        def configure_train(self, server_round: int, *rest: Any) -> Iterable[Message]:
            return super().configure_train(server_round, *rest) if server_round != 2 else []

    inner = Every(fraction_evaluate=0.0, min_train_nodes=1, min_available_nodes=1)
    strategy = flower.CompressedStrategy(inner, seed=1)
    result = run(strategy, flower.LocalGrid(client_app([flower.compress_mod()]), 2), 3)
    counts = [dict(result.train_metrics_clientapp[n]) for n in (1, 2, 3)]
    assert counts[1] == {"uplink-bytes": 0, "downlink-bytes": 0, "updates-used": 0, "updates-rejected": 0}
    assert counts[0]["updates-used"] == counts[2]["updates-used"] == 2
    stranger = Message(RecordDict(), reply_to=Message(RecordDict(), 99, "train"))
    _, metrics = strategy.aggregate_train(4, [stranger])
    assert metrics is not None
    assert (metrics["updates-rejected"], metrics["uplink-bytes"]) == (1, 0)
    assert strategy.rounds[-1].round == 4
    assert strategy.rounds[-2].rejections == []


# ---- configurations


@pytest.mark.parametrize("text", ["vgc(alpha=2.0)", "hybrid(alpha=2.0,tau=0.1)", "by_tensor(vgc(alpha=2.0))"])
def test_compressors_that_need_a_second_moment_are_refused_at_once(text: str) -> None:
    for options in ({"uplink": text}, {"uplink": {"a": "int8", "b": text}}, {"snapshot": text}):
        with pytest.raises(tersegrad.BadConfiguration, match="second moment"):
            flower.CompressedStrategy(fedavg(), **options)
    with pytest.raises(tersegrad.BadConfiguration, match="second moment"):
        flower.compress_mod(text)


@pytest.mark.parametrize("size", [float("inf"), float("nan"), 1e308, "x", None])
def test_a_layout_with_odd_sizes_is_a_clear_error(size: Any) -> None:
    with pytest.raises(CorruptMessage):
        envelope.Layout.from_facts([["w", [size], 1]], 1000)


def test_a_client_answers_an_infinite_layout_with_an_error() -> None:
    order = envelope.Order(1, 2, 3, 4, None, "int8", layout=[["w", [float("inf")], 1]])
    data = order.pack(tersegrad.to_frame("identity", torch.zeros(8)))
    content = RecordDict({"arrays": ArrayRecord({"tersegrad": Array("uint8", (len(data),), envelope.MODEL, data)})})
    (reply,) = flower.LocalGrid(client_app([flower.compress_mod()]), 1).send_and_receive([Message(content, 0, "train")])
    assert "layout of the model is not understood" in str(reply.error.reason)


def test_one_huge_number_does_not_stay_in_the_second_moments() -> None:
    """FedAdam squares what moved: one overflow froze those parameters for ever."""
    inner = FedAdam(fraction_evaluate=0.0, min_train_nodes=1, min_available_nodes=1, eta=0.01)
    strategy = flower.CompressedStrategy(inner, {"ours": "int8", "exact": "identity"}, seed=1, snapshot="identity")
    nodes: dict[int, dict[str, Any]] = {n: {"partition-id": n, "num-partitions": 2} for n in range(2)}
    nodes[0]["tersegrad"] = "exact"

    def train(model: Any, context: Any) -> None:
        if context.node_id == 0:
            with torch.no_grad():
                model[0].weight[0, 0] = 1e20

    run(strategy, flower.LocalGrid(client_app([flower.compress_mod()], train=train), nodes), 2)
    assert refused(strategy) == {(0, "non-finite")}
    assert all(np.isfinite(v).all() for v in strategy.inner.v_t.values())  # type: ignore[attr-defined]

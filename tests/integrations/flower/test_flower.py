"""The mod and the strategy: what travels, what is remembered, what happens when clients come and go."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("flwr")
pytest.importorskip("sklearn")

from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp.mod import fixedclipping_mod
from flwr.serverapp.strategy import (
    DifferentialPrivacyClientSideFixedClipping,
    DifferentialPrivacyServerSideFixedClipping,
    FedAdam,
    FedAvgM,
    FedMedian,
    FedProx,
    Krum,
    Strategy,
)

import tersegrad
from tersegrad.integrations import flower
from tersegrad.integrations.flower import envelope
from tersegrad.integrations.flower.memory import Memory
from tests.integrations.flower.federation import accuracy, client_app, fedavg, network, run

logging.getLogger("flwr").setLevel(logging.ERROR)
NUMEL = sum(p.numel() for p in network().parameters())
UPLINK = "error_feedback(sparse_dithering(alpha=0.25))"


def compressed(**options: Any) -> flower.CompressedStrategy:
    """A strategy whose clients keep residuals, unless told otherwise."""
    inner = options.pop("inner", None) or fedavg(options.pop("fraction", 1.0), options.pop("evaluate", 0.0))
    return flower.CompressedStrategy(inner, options.pop("uplink", UPLINK), seed=options.pop("seed", 1), **options)


def flat(arrays: ArrayRecord) -> torch.Tensor:
    return torch.cat([torch.tensor(a.numpy()).reshape(-1).float() for a in arrays.values()])


def test_learns_as_well_as_plain_flower_with_a_tenth_of_the_bytes() -> None:
    plain_grid = flower.LocalGrid(client_app([]), 6)
    plain = run(fedavg(), plain_grid, 8)
    grid = flower.LocalGrid(client_app([flower.compress_mod()]), 6)
    strategy = flower.CompressedStrategy(fedavg(), seed=1)
    result = run(strategy, grid, 8)
    assert accuracy(result.arrays) > accuracy(plain.arrays) - 0.02
    assert accuracy(plain.arrays) > 0.8
    assert grid.bytes_up < plain_grid.bytes_up / 8
    assert grid.bytes_down < plain_grid.bytes_down / 7
    report = strategy.report()
    assert (report["uplink_bytes"], report["downlink_bytes"]) == (grid.bytes_up, grid.bytes_down)
    assert report["rejected"] == report["silent"] == report["residual_restarts"] == 0
    assert report["residuals_from_zero"] == report["models_as_snapshot"] == report["clients"] == 6
    assert result.train_metrics_clientapp[8]["uplink-bytes"] == strategy.rounds[-1].uplink


def test_exact_messages_change_nothing() -> None:
    plain = run(fedavg(), flower.LocalGrid(client_app([]), 3), 3)
    grid = flower.LocalGrid(client_app([flower.compress_mod()]), 3)
    exact = run(compressed(uplink="identity", downlink="identity", snapshot="identity"), grid, 3)
    assert torch.allclose(flat(exact.arrays), flat(plain.arrays), atol=2e-6)


def test_snapshots_take_at_most_four_bits_and_differences_fewer() -> None:
    strategy = compressed()
    run(strategy, flower.LocalGrid(client_app([flower.compress_mod()]), 2), 3)
    first, last = strategy.rounds[0], strategy.rounds[-1]
    assert {p.kind for p in first.parcels.values()} == {"snapshot"}
    assert {p.kind for p in last.parcels.values()} == {"difference"}
    assert max(p.downlink for p in last.parcels.values()) < min(p.downlink for p in first.parcels.values()) * 0.6
    x = torch.randn(100_000)
    assert 8 * len(tersegrad.to_frame(strategy.broadcast.snapshot, x)) / x.numel() <= 4


def test_a_model_is_sent_once() -> None:
    """Who evaluated a model and then trains on it receives nothing but a header."""
    strategy = compressed(evaluate=1.0)
    run(strategy, flower.LocalGrid(client_app([flower.compress_mod()]), 2), 2)
    assert [{p.kind for p in r.parcels.values()} for r in strategy.rounds] == [
        {"snapshot"}, {"difference"}, {"same"}, {"difference"}
    ]  # fmt: skip
    assert max(p.downlink for p in strategy.rounds[2].parcels.values()) < 1300


def test_one_encoding_serves_all_that_hold_a_version() -> None:
    strategy = compressed()
    calls = []
    encode = strategy.broadcast._encode
    strategy.broadcast._encode = lambda *a: calls.append(a) or encode(*a)  # type: ignore[method-assign, func-returns-value]
    run(strategy, flower.LocalGrid(client_app([flower.compress_mod()]), 5), 3)
    assert len(calls) == 3
    assert len(strategy.broadcast.versions) <= 2


@pytest.mark.parametrize(
    "inner",
    [
        FedAdam(fraction_evaluate=0.0, min_train_nodes=1, min_available_nodes=1, eta=0.01),
        FedAvgM(fraction_evaluate=0.0, min_train_nodes=1, min_available_nodes=1, server_momentum=0.5),
        FedProx(fraction_evaluate=0.0, min_train_nodes=1, min_available_nodes=1, proximal_mu=0.1),
        FedMedian(fraction_evaluate=0.0, min_train_nodes=1, min_available_nodes=1),
        Krum(fraction_evaluate=0.0, min_train_nodes=1, min_available_nodes=1, num_malicious_nodes=1),
    ],
    ids=lambda s: type(s).__name__,
)
def test_any_strategy_inside(inner: Strategy) -> None:
    strategy = compressed(inner=inner)
    result = run(strategy, flower.LocalGrid(client_app([flower.compress_mod()]), 4), 6)
    assert strategy.report()["updates"] == 24
    assert accuracy(result.arrays) > 0.5


def test_residuals_of_absent_clients_wait() -> None:
    grid = flower.LocalGrid(client_app([flower.compress_mod()]), 10)
    strategy = compressed(fraction=0.3)
    arrays, seen = None, set[int]()
    for number in range(4):
        before = {node: _residual(context) for node, context in grid.contexts.items()}
        arrays = run(strategy, grid, 1, arrays, seed=number).arrays
        asked = set(strategy.rounds[-1].parcels)
        after = {node: _residual(context) for node, context in grid.contexts.items()}
        assert all(after[node] == before[node] for node in after if node not in asked)
        assert all(after[node] != before[node] for node in asked)
        seen |= asked
    report = strategy.report()
    assert report["residual_restarts"] == 0
    assert report["residuals_from_zero"] == report["clients"] == len(seen)


def _residual(context: Context) -> bytes:
    record = context.state.get("tersegrad.arrays")
    return b"" if record is None else record["state.residual"].data  # type: ignore[union-attr]


def test_versions_beyond_the_memory_are_forgotten() -> None:
    grid = flower.LocalGrid(client_app([flower.compress_mod()]), 8)
    strategy = compressed(fraction=0.25, memory=3 * 4 * NUMEL)
    result = run(strategy, grid, 12)
    assert len(strategy.broadcast.versions) <= 4
    report = strategy.report()
    assert report["models_as_snapshot"] > report["clients"]
    assert report["rejected"] == 0
    assert accuracy(result.arrays) > 0.5


def test_a_restarted_client_gets_a_snapshot_and_is_counted() -> None:
    grid = flower.LocalGrid(client_app([flower.compress_mod()]), 3)
    strategy = compressed()
    result = run(strategy, grid, 2)
    grid.restart(1)
    result = run(strategy, grid, 2, result.arrays)
    rejected = strategy.rejections
    assert [(r.node, r.kind) for r in rejected] == [(1, "error")]
    assert "send a snapshot" in rejected[0].reason
    assert strategy.rounds[2].parcels[1].kind == "difference"
    assert strategy.rounds[3].parcels[1].kind == "snapshot"
    assert strategy.rounds[3].parcels[1].fresh
    assert strategy.report()["residual_restarts"] == 1


def test_a_file_keeps_the_residual_over_a_restart(tmp_path: Path) -> None:
    grid = flower.LocalGrid(client_app([flower.compress_mod(store=tmp_path)]), 3)
    strategy = compressed()
    result = run(strategy, grid, 2)
    grid.restart(1)
    run(strategy, grid, 2, result.arrays)
    assert strategy.rejections == []
    assert strategy.report()["residual_restarts"] == 0
    path = next(iter(tmp_path.glob("client-1.state")))
    data = path.read_bytes()
    assert Memory.frombytes(data).step == 4
    for damaged in (data[:-5], data[:100] + b"?" + data[101:], b""):
        path.write_bytes(damaged)
        grid.restart(1)
        run(strategy, grid, 2, result.arrays)  # turned away, then brought up to date by a snapshot
    assert strategy.report()["rejected_error"] == strategy.report()["residual_restarts"] == 3


def test_a_lost_update_returns_to_the_residual() -> None:
    """Sum of what the server got plus the residual is the sum of all updates, though one reply was lost on the way."""
    lost: list[int] = []
    spent: list[torch.Tensor] = []
    grid = flower.LocalGrid(client_app([flower.compress_mod(), _recording(spent)]), 1)
    strategy = compressed(downlink="identity", snapshot="identity")
    got = torch.zeros(NUMEL)
    arrays = flower.to_arrays(network().state_dict())
    for number in range(4):
        grid.deliver = (lambda reply: lost.append(1) or []) if number == 1 else None  # type: ignore[func-returns-value]
        before = flat(arrays)
        result = run(strategy, grid, 1, arrays)
        if number != 1:
            got += flat(result.arrays) - before
            arrays = result.arrays
    assert lost == [1]
    memory = Memory.from_records(
        grid.contexts[0].state.array_records["tersegrad.arrays"], grid.contexts[0].state.config_records["tersegrad.facts"]
    )
    assert torch.allclose(got + memory.entries["residual"], torch.stack(spent).sum(0), atol=1e-4)
    assert strategy.report()["silent"] == 1


def _recording(into: list[torch.Tensor]) -> Any:
    def mod(message: Message, context: Context, call_next: Any) -> Message:
        before = flat(message.content.array_records["arrays"])
        reply: Message = call_next(message, context)
        into.append(flat(reply.content.array_records["arrays"]) - before)
        return reply

    return mod


def test_a_server_that_restarts_goes_on(tmp_path: Path) -> None:
    def inner() -> Strategy:
        return FedAdam(fraction_evaluate=0.0, min_train_nodes=1, min_available_nodes=1, eta=0.01)

    grid = flower.LocalGrid(client_app([flower.compress_mod()]), 4)
    first = compressed(inner=inner(), checkpoint=tmp_path / "run" / "server.npz")
    before = run(first, grid, 3)
    again = flower.CompressedStrategy(inner(), UPLINK)  # nothing but the file and the clients survived
    arrays = again.resume(tmp_path / "run" / "server.npz")
    assert torch.equal(flat(arrays), flat(before.arrays))
    assert again.completed == 3
    momenta: Any = again.inner
    assert all(np.array_equal(momenta.m_t[k], v) for k, v in first.inner.m_t.items())  # type: ignore[attr-defined]
    after = run(again, grid, 3, arrays)
    assert {p.kind for p in again.rounds[0].parcels.values()} == {"snapshot"}
    assert again.report()["rejected"] == again.report()["residuals_from_zero"] == 0  # the clients kept their residuals
    assert again.completed == 6
    assert accuracy(after.arrays) >= accuracy(before.arrays) - 0.02


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_models_of_other_precisions(dtype: torch.dtype) -> None:
    model = network(dtype)
    strategy = compressed()
    grid = flower.LocalGrid(client_app([flower.compress_mod()], dtype), 4)
    result = run(strategy, grid, 8, flower.to_arrays(model.state_dict()))
    assert strategy.report()["updates"] == 32
    assert accuracy(result.arrays, dtype) > 0.7
    assert {a.dtype for a in result.arrays.values()} == {"float64" if dtype == torch.float64 else "float32"}


def test_a_16_bit_client_sends_what_training_changed_and_not_the_rounding() -> None:
    base = torch.randn(1000)
    layout = envelope.Layout(("w",), ((1000,),), (True,))
    unchanged = flower.to_arrays({"w": base.to(torch.bfloat16)})
    assert not layout.update(unchanged, base).any()


def test_running_statistics_and_counters_travel_beside() -> None:
    strategy = compressed()
    grid = flower.LocalGrid(client_app([flower.compress_mod()], norm=True), 3)
    result = run(strategy, grid, 4, flower.to_arrays(network(norm=True).state_dict()))
    assert set(strategy.uncompressed()) == {"1.running_mean", "1.running_var", "1.num_batches_tracked"}
    assert strategy.report()["rejected"] == 0
    assert (result.arrays["1.running_var"].numpy() > 0).all()
    assert result.arrays["1.num_batches_tracked"].numpy() > 0
    assert accuracy(result.arrays, norm=True) > 0.7


def test_clients_choose_their_budget_by_node_config() -> None:
    budgets = {"middle": UPLINK, "thin": "error_feedback(top_k(fraction=0.01))", "wide": "int8"}
    nodes = {n: {"partition-id": n, "num-partitions": 4} for n in range(4)}
    nodes[1]["tersegrad"] = "thin"  # type: ignore[assignment]
    nodes[2]["tersegrad"] = "int8"  # type: ignore[assignment]
    nodes[3]["tersegrad"] = "natural"  # type: ignore[assignment]
    strategy = compressed(uplink=budgets)
    run(strategy, flower.LocalGrid(client_app([flower.compress_mod()]), nodes), 2)
    sent = strategy.rounds[-1].parcels
    assert [sent[n].compressor for n in range(3)] == [str(tersegrad.parse(budgets[b])) for b in ("middle", "thin", "wide")]
    assert sent[1].uplink < sent[0].uplink < sent[2].uplink
    assert {(r.node, r.kind) for r in strategy.rejections} == {(3, "not-offered")}


def test_a_server_may_accept_a_family_of_compressors() -> None:
    def wanted(compressor: Any) -> bool:
        return isinstance(compressor, tersegrad.ErrorFeedback) and isinstance(compressor.inner, tersegrad.SparseDithering)

    texts = ["error_feedback(sparse_dithering(alpha=0.7))", "error_feedback(sparse_dithering(alpha=0.05))", "natural"]
    nodes = {n: {"partition-id": n, "num-partitions": 3, "tersegrad": text} for n, text in enumerate(texts)}
    strategy = compressed(accept=wanted)
    run(strategy, flower.LocalGrid(client_app([flower.compress_mod()]), nodes), 1)
    sent = strategy.rounds[0].parcels
    assert 2 * sent[0].frame < sent[1].frame
    assert [r.kind for r in strategy.rejections] == ["not-offered"]


def test_the_server_chooses_by_measured_bandwidth() -> None:
    budgets = {"thin": "error_feedback(sparse_dithering(alpha=0.7))", "wide": "int8"}
    strategy = compressed(uplink=budgets, choose=flower.by_bandwidth({"thin": 0, "wide": 1e5}))
    grid = flower.LocalGrid(client_app([flower.compress_mod("bf16")]), 2)  # what the mod would like does not count
    result = run(strategy, grid, 1)
    assert {p.compressor for p in strategy.rounds[0].parcels.values()} == {str(tersegrad.parse(budgets["thin"]))}
    assert all(c.bytes_per_second is not None for c in strategy.clients.values())
    strategy.clients[0].bytes_per_second, strategy.clients[1].bytes_per_second = 1e4, 1e6
    run(strategy, grid, 1, result.arrays)
    assert [strategy.rounds[1].parcels[n].compressor for n in range(2)] == [
        str(tersegrad.parse(budgets["thin"])), "int8"
    ]  # fmt: skip


def test_a_changed_budget_keeps_the_residual() -> None:
    budgets = {"thin": "error_feedback(sparse_dithering(alpha=0.7))", "wide": UPLINK}
    turns = iter(["thin", "thin", "wide", "wide"])
    spent: list[torch.Tensor] = []
    strategy = compressed(uplink=budgets, choose=lambda client: next(turns), downlink="identity", snapshot="identity")
    grid = flower.LocalGrid(client_app([flower.compress_mod(), _recording(spent)]), 1)
    start = flower.to_arrays(network().state_dict())
    result = run(strategy, grid, 4, start)
    left = torch.tensor(np.frombuffer(_residual(grid.contexts[0])[-4 * NUMEL :], np.float32))
    assert torch.allclose(flat(result.arrays) - flat(start) + left, torch.stack(spent).sum(0), atol=1e-4)
    assert left.norm() > 0.1


def test_clipping_bounds_every_client() -> None:
    strategy = compressed(clip=0.05, uplink="sparse_dithering(alpha=0.25)")
    start = flower.to_arrays(network().state_dict())
    result = run(strategy, flower.LocalGrid(client_app([flower.compress_mod()]), 3), 1, start)
    moved = (flat(result.arrays).double() - flat(start).double()).norm()
    assert 0.02 < moved < 0.05 * (1 + 1e-5)


@pytest.mark.parametrize("wrapper", [DifferentialPrivacyClientSideFixedClipping, DifferentialPrivacyServerSideFixedClipping])
def test_flowers_differential_privacy_goes_inside(wrapper: Any) -> None:
    norms: list[float] = []

    def watch(message: Message, context: Context, call_next: Any) -> Message:
        before = flat(message.content.array_records["arrays"])
        reply: Message = call_next(message, context)
        norms.append(float((flat(reply.content.array_records["arrays"]) - before).norm()))
        return reply

    client_side = wrapper is DifferentialPrivacyClientSideFixedClipping
    mods = [flower.compress_mod(), watch, *([fixedclipping_mod] if client_side else [])]
    inner = wrapper(fedavg(), noise_multiplier=0.01, clipping_norm=0.5, num_sampled_clients=4)
    strategy = compressed(inner=inner, clip=0.5)
    result = run(strategy, flower.LocalGrid(client_app(mods), 4), 5)
    assert strategy.report()["updates"] == 20
    assert (max(norms) <= 0.5 + 1e-4) == client_side
    assert accuracy(result.arrays) > 0.4


def test_a_message_of_plain_flower_is_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    logging.getLogger("flwr").propagate = True
    with caplog.at_level(logging.WARNING, "flwr"):
        result = run(fedavg(), flower.LocalGrid(client_app([flower.compress_mod()]), 2), 1)
    logging.getLogger("flwr").propagate = False
    logging.getLogger("flwr").setLevel(logging.ERROR)
    assert accuracy(result.arrays) > 0.1
    assert any("left alone" in record.message for record in caplog.records)


def test_a_client_without_the_mod_is_told() -> None:
    strategy = compressed()
    run(strategy, flower.LocalGrid(client_app([]), 2), 1)
    assert {r.kind for r in strategy.rejections} == {"error"}


def test_a_client_believes_no_model_that_is_too_large_or_damaged() -> None:
    mod = flower.compress_mod(max_numel=1000)
    strategy = compressed()
    run(strategy, flower.LocalGrid(client_app([mod]), 1), 1)
    assert "at most 1000 are accepted" in strategy.rejections[0].reason
    order = envelope.Order(1, 2, 3, 4, None, UPLINK, layout=[["w", [1 << 40], 1]])
    good = order.pack(tersegrad.to_frame("identity", torch.zeros(8)))
    grid = flower.LocalGrid(client_app([flower.compress_mod()]), 1)
    rng = np.random.default_rng(0)
    for trial in range(300):
        data = bytearray(good)
        if trial:
            data[rng.integers(len(data))] ^= 1 << rng.integers(8)
        content = RecordDict(
            {
                "arrays": ArrayRecord({"tersegrad": Array("uint8", (len(data),), envelope.MODEL, bytes(data))}),
                "config": ConfigRecord(),
            }
        )
        (reply,) = grid.send_and_receive([Message(content, 0, "train")])
        assert reply.has_error()
        assert "tersegrad" in str(reply.error.reason)


def test_bad_configurations_say_so() -> None:
    good = fedavg()
    for options, message in (
        ({"downlink": "error_feedback(sign)"}, "feed errors back already"),
        ({"downlink": "threshold(tau=1)"}, "promises nothing"),
        ({"uplink": {}}, "at least one budget"),
        ({"clip": 0.0}, "above zero"),
        ({"clip_beside": -1.0}, "clip_beside is a norm"),
        ({"max_extra": -1}, "number of bytes"),
    ):
        with pytest.raises(tersegrad.BadConfiguration, match=message):
            flower.CompressedStrategy(good, **options)
    with pytest.raises(tersegrad.BadConfiguration, match="Strategy"):
        flower.CompressedStrategy("fedavg")  # type: ignore[arg-type]
    with pytest.raises(tersegrad.BadConfiguration, match="nothing to compress"):
        run(compressed(), flower.LocalGrid(client_app([flower.compress_mod()]), 1), 1, ArrayRecord([np.arange(3)]))
    with pytest.raises(tersegrad.TersegradError, match="not finite"):
        run(compressed(), flower.LocalGrid(client_app([flower.compress_mod()]), 1), 1, ArrayRecord([np.full(3, np.nan)]))


def test_unbiased_downlinks_are_made_contractive() -> None:
    strategy = compressed(downlink="natural")
    assert str(strategy.broadcast.downlink) == "error_feedback(natural)"
    result = run(strategy, flower.LocalGrid(client_app([flower.compress_mod()]), 2), 4)
    assert accuracy(result.arrays) > 0.5


def test_the_same_seed_sends_the_same_bytes() -> None:
    runs = [run(compressed(fraction=0.5), flower.LocalGrid(client_app([flower.compress_mod()]), 4), 3) for _ in range(2)]
    assert torch.equal(flat(runs[0].arrays), flat(runs[1].arrays))
    secret = flower.CompressedStrategy(fedavg())
    other = flower.CompressedStrategy(fedavg())
    assert secret.broadcast.draw(b"client", 1) != other.broadcast.draw(b"client", 1)


def test_metrics_survive() -> None:
    result = run(compressed(evaluate=1.0), flower.LocalGrid(client_app([flower.compress_mod()]), 2), 2)
    assert isinstance(result.train_metrics_clientapp[1], MetricRecord)
    assert result.train_metrics_clientapp[1]["loss"] == pytest.approx(0.5)
    assert 0 < float(result.evaluate_metrics_clientapp[2]["accuracy"]) <= 1  # type: ignore[arg-type]

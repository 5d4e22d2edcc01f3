"""What clients and the server remember: lost updates return, changed compressors carry over, checkpoints hold what a run needs."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("flwr")
pytest.importorskip("sklearn")

from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord
from flwr.serverapp.strategy import (
    DifferentialPrivacyServerSideAdaptiveClipping,
    FedAdam,
    FedAvg,
    FedAvgM,
    FedYogi,
    Strategy,
)

import tersegrad
from tersegrad.integrations import flower
from tersegrad.integrations.flower import envelope
from tersegrad.integrations.flower.memory import Memory
from tests.integrations.flower.federation import client_app, fedavg, network, run

logging.getLogger("flwr").setLevel(logging.CRITICAL)

UPLINK = "error_feedback(sparse_dithering(alpha=0.25))"
NESTED = [
    UPLINK,
    f"metered({UPLINK})",
    f"by_tensor({UPLINK}, small=error_feedback(top_k(fraction=0.1)), below=500)",
    f'metered(by_tensor({UPLINK}, small=error_feedback(sign), below=500, rules={{"2.*": metered(error_feedback(int4))}}))',
    "error_feedback(sparse_dithering(alpha=0.25), residual=bfloat16)",
]


def flat(arrays: ArrayRecord) -> torch.Tensor:
    return torch.cat([torch.tensor(a.numpy()).reshape(-1).float() for a in arrays.values()])


def recording(into: list[torch.Tensor]) -> Any:
    def mod(message: Message, context: Context, call_next: Any) -> Message:
        before = flat(message.content.array_records["arrays"])
        reply: Message = call_next(message, context)
        into.append(flat(reply.content.array_records["arrays"]) - before)
        return reply

    return mod


def remembered(context: Context) -> Memory:
    return Memory.from_records(context.state.array_records["tersegrad.arrays"], context.state.config_records["tersegrad.facts"])


def left(context: Context) -> torch.Tensor:
    """The residual of a client, by coordinate."""
    memory = remembered(context)
    assert memory.layout is not None
    spec = memory.layout.spec
    state = tersegrad.core.state.load(tersegrad.parse(memory.compressor).init(spec, "cpu"), memory.entries)
    found = tersegrad.core.state.carried(state, spec)
    return torch.zeros(spec.numel) if found is None else found.float()


class One:
    """One client, whose replies may be lost, and all that it trained; exact broadcasts."""

    def __init__(self, uplink: Any, **options: Any) -> None:
        self.spent: list[torch.Tensor] = []
        self.grid = flower.LocalGrid(client_app([flower.compress_mod(), recording(self.spent)]), 1)
        self.options = {"downlink": "identity", "snapshot": "identity", "uplink": uplink, **options}
        self.strategy = self.server(seed=1)
        self.start = self.arrays = flower.to_arrays(network().state_dict())

    def server(self, **options: Any) -> flower.CompressedStrategy:
        return flower.CompressedStrategy(fedavg(), **{**self.options, **options})

    def round(self, lost: bool = False) -> None:
        self.grid.deliver = (lambda reply: []) if lost else None
        result = run(self.strategy, self.grid, 1, self.arrays)
        if not lost:
            assert self.strategy.rejections == []
            self.arrays = result.arrays

    def nothing_is_missing(self, atol: float = 1e-4) -> bool:
        """Whether the model's way plus the residual is the sum of all updates."""
        got = flat(self.arrays) - flat(self.start) + left(self.grid.contexts[0])
        return torch.allclose(got, torch.stack(self.spent).sum(0), atol=atol)


@pytest.mark.parametrize("uplink", NESTED)
def test_lost_updates_return_wherever_error_feedback_sits(uplink: str) -> None:
    one = One(uplink)
    for lost in (False, True, True, False, True, False):
        one.round(lost)
    assert len(one.spent) == 6
    assert one.nothing_is_missing(3e-2 if "bfloat16" in uplink else 1e-4)


@pytest.mark.parametrize("uplink", NESTED[:3])
def test_the_very_first_update_returns_too(uplink: str) -> None:
    one = One(uplink)
    for lost in (True, True, False, False):
        one.round(lost)
    assert one.nothing_is_missing()


@pytest.mark.parametrize("rounds", [0, 2])
def test_an_update_lost_while_the_server_restarts_returns(tmp_path: Path, rounds: int) -> None:
    """A reply was lost, the server with it, and a new one goes on from the checkpoint; also where the client had never been heard."""
    one = One(UPLINK, checkpoint=tmp_path / "server.npz")
    for _ in range(rounds):
        one.round()
    if not rounds:
        one.strategy.save(tmp_path / "server.npz", one.arrays)
    one.round(lost=True)
    one.strategy = one.server()
    one.arrays = one.strategy.resume(tmp_path / "server.npz")
    one.round()
    one.round()
    assert one.nothing_is_missing()
    assert one.strategy.completed == rounds + 2


def test_what_was_used_does_not_return_after_a_restart(tmp_path: Path) -> None:
    one = One(UPLINK, checkpoint=tmp_path / "server.npz")
    one.round()
    one.round()
    one.strategy = one.server()
    one.arrays = one.strategy.resume(tmp_path / "server.npz")
    one.round()
    assert one.nothing_is_missing()
    one.strategy = one.server()  # not resumed: it knows nothing of what the client sent before, and the model has it
    one.round()
    assert one.nothing_is_missing()


def test_a_question_that_comes_twice_has_one_answer() -> None:
    one = One(UPLINK)
    one.round()
    questions = list(one.strategy.configure_train(2, one.arrays, ConfigRecord(), one.grid))
    first, second = [list(one.grid.send_and_receive(questions)) for _ in range(2)]
    del one.spent[-1]
    arrays, _ = one.strategy.aggregate_train(2, second + first)
    assert arrays is not None
    one.arrays = arrays
    assert [r.kind for r in one.strategy.rejections] == ["duplicate"]
    one.strategy.ledger.rounds.clear()
    one.round()
    assert one.nothing_is_missing()


def test_a_changed_compressor_takes_the_residual_over() -> None:
    mixed = 'by_tensor(identity, rules={"0.*": error_feedback(sign)})'
    texts = [UPLINK, NESTED[2], NESTED[3], UPLINK, "identity", UPLINK, mixed, UPLINK]
    turns = iter(texts)
    one = One({text: text for text in texts}, choose=lambda client: next(turns))
    for number, text in enumerate(texts):
        one.round(lost=number == 2)
        # What a client without a residual is asked to keep goes with its update; a lost update is back after the next round.
        assert number == 2 or one.nothing_is_missing(), text
    assert one.strategy.report()["residual_restarts"] == 0
    assert one.strategy.report()["residuals_from_zero"] == 1


@pytest.mark.parametrize("damage", ["shape", "missing"])
def test_a_residual_that_does_not_fit_is_counted_as_a_restart(damage: str) -> None:
    one = One(UPLINK)
    one.round()
    memory = remembered(one.grid.contexts[0])
    memory.entries = {"residual": torch.zeros(5)} if damage == "shape" else {}
    state = one.grid.contexts[0].state
    state["tersegrad.arrays"], state["tersegrad.facts"] = memory.records()
    one.round()
    assert one.strategy.rounds[-1].parcels[0].fresh
    assert one.strategy.report()["residual_restarts"] == 1


# ---- the server's checkpoint

QUIET: dict[str, Any] = {"fraction_evaluate": 0.0, "min_train_nodes": 1, "min_available_nodes": 1}


def resumed(inner: Any, path: Path, **options: Any) -> tuple[flower.CompressedStrategy, flower.CompressedStrategy, ArrayRecord]:
    """A run of two rounds with a checkpoint, and a strategy that resumes from it."""
    grid = flower.LocalGrid(client_app([flower.compress_mod()]), 2)
    first = flower.CompressedStrategy(inner(), seed=1, checkpoint=path, **options)
    run(first, grid, 2)
    again = flower.CompressedStrategy(inner(), **options)
    return first, again, again.resume(path)


@pytest.mark.parametrize(
    ("inner", "names"),
    [
        (lambda: FedAdam(eta=0.01, **QUIET), ["m_t", "v_t"]),
        (lambda: FedYogi(eta=0.01, **QUIET), ["m_t", "v_t"]),
        (lambda: FedAvgM(server_momentum=0.5, **QUIET), ["momentum_vector"]),
    ],
    ids=["FedAdam", "FedYogi", "FedAvgM"],
)
def test_momenta_of_flowers_strategies_are_saved(tmp_path: Path, inner: Any, names: list[str]) -> None:
    first, again, _ = resumed(inner, tmp_path / "server.npz")
    for name in names:
        old, new = getattr(first.inner, name), getattr(again.inner, name)
        assert type(old) is type(new)
        pairs = zip(old.values(), new.values()) if isinstance(old, dict) else zip(old, new)
        assert all(np.array_equal(a, b) and a.dtype == b.dtype for a, b in pairs)
        assert len(old) == len(new) == 4


def test_the_norm_of_adaptive_clipping_is_saved(tmp_path: Path) -> None:
    def inner() -> Strategy:
        return DifferentialPrivacyServerSideAdaptiveClipping(FedAvg(**QUIET), 0.01, 2)

    first, again, _ = resumed(inner, tmp_path / "server.npz")
    assert again.inner.clipping_norm == first.inner.clipping_norm != 0.1  # type: ignore[attr-defined]


class Restless(FedAvg):
    """A strategy of somebody's own that keeps arrays."""

    velocity: dict[str, Any]

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> tuple[ArrayRecord | None, MetricRecord | None]:
        arrays, metrics = super().aggregate_train(server_round, replies)
        assert arrays is not None
        self.velocity = {name: array.numpy() * server_round for name, array in arrays.items()}
        self.seen = [array.numpy() for array in arrays.values()]
        return arrays, metrics


def test_an_unknown_strategy_that_keeps_arrays_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(
        tersegrad.BadConfiguration, match=r"Restless keeps arrays in velocity, seen.*keep=\['velocity', 'seen'\]"
    ):
        resumed(lambda: Restless(**QUIET), tmp_path / "server.npz")
    first, again, _ = resumed(lambda: Restless(**QUIET), tmp_path / "server.npz", keep=["velocity"])
    old, new = first.inner.velocity, again.inner.velocity  # type: ignore[attr-defined]
    assert all(np.array_equal(old[name], new[name]) for name in old)
    assert not hasattr(again.inner, "seen")
    _, again, _ = resumed(lambda: Restless(**QUIET), tmp_path / "server.npz", keep=[])
    assert not hasattr(again.inner, "velocity")


def test_a_checkpoint_of_another_strategy_or_a_damaged_one_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "server.npz"
    resumed(lambda: FedAdam(eta=0.01, **QUIET), path)
    plain = flower.CompressedStrategy(FedAvg(**QUIET))
    with pytest.raises(tersegrad.BadConfiguration, match="FedAvg does not keep"):
        plain.resume(path)
    data = path.read_bytes()
    for damaged in (b"", data[:1000], data[: len(data) // 2], b"?" * 100):
        path.write_bytes(damaged)
        with pytest.raises(tersegrad.BadConfiguration, match="not a checkpoint"):
            plain.resume(path)
    np.savez(path, facts=np.frombuffer(b'{"completed": 1}', np.uint8))
    with pytest.raises(tersegrad.BadConfiguration, match="not a checkpoint"):
        plain.resume(path)
    with pytest.raises(FileNotFoundError):
        plain.resume(tmp_path / "none.npz")
    assert (plain.completed, plain.broadcast.step, plain.clients) == (0, 0, {})


def test_integers_beside_stay_integers_over_a_restart(tmp_path: Path) -> None:
    """Averages once made them floating-point, which the next server took for another model: all residuals were dropped."""
    model = flower.to_arrays({"w": torch.zeros(100), "count": torch.tensor(3)})
    app = flower.LocalGrid(_counting(), 2)
    strategy = flower.CompressedStrategy(FedAvg(**QUIET), seed=1, checkpoint=tmp_path / "server.npz")
    run(strategy, app, 2, model)
    again = flower.CompressedStrategy(FedAvg(**QUIET))
    arrays = again.resume(tmp_path / "server.npz")
    assert (arrays["count"].dtype, int(arrays["count"].numpy())) == ("int64", 5)
    run(again, app, 1, arrays)
    assert again.uncompressed() == {"count": "not floating-point"}
    assert again.report()["residuals_from_zero"] == 0


def _counting() -> Any:
    from flwr.app import RecordDict
    from flwr.clientapp import ClientApp

    app = ClientApp(mods=[flower.compress_mod()])

    @app.train()
    def train(message: Message, context: Context) -> Message:
        model = flower.to_state_dict(message.content.array_records["arrays"])
        model["w"] += 1.0
        model["count"] += 1
        content: dict[str, Any] = {"arrays": flower.to_arrays(model), "metrics": MetricRecord({"num-examples": 1})}
        return Message(RecordDict(content), reply_to=message)

    return app


def test_numbers_of_versions_hold_many_rounds() -> None:
    """The run of the server stays readable in them, after 65,536 broadcasts too."""
    order = envelope.Order(1, 2, 3, envelope.version_number(7, 2**32 - 1, 0xFFFF), None, UPLINK)
    assert order.epoch == 7
    strategy = flower.CompressedStrategy(fedavg(), seed=1)
    strategy.broadcast.step = 70_000
    list(
        strategy.configure_train(1, flower.to_arrays(network().state_dict()), ConfigRecord(), flower.LocalGrid(_counting(), 2))
    )
    assert {number >> 32 for number in strategy.broadcast.versions} == {1}

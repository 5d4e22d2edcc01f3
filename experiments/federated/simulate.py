"""One federation in this process: real ClientApp, mod and strategy, every message serialised and counted."""

from __future__ import annotations

import dataclasses
import logging
import random
import time
from pathlib import Path
from typing import Any

import torch
from examples.flower.federated import tasks
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg, Strategy

from tersegrad.integrations import flower


@dataclasses.dataclass(frozen=True)
class Setting:
    """What all methods of a comparison share."""

    task: str = "digits"
    folder: str = ""
    clients: int = 20
    fraction: float = 0.5
    rounds: int = 30
    epochs: int = 2
    rate: float = 0.1
    batch: int = 20
    skew: float = 0.3
    every: int = 5  # rounds between evaluations


@dataclasses.dataclass(frozen=True)
class Method:
    """A way to send updates and models; without an uplink it is plain Flower."""

    label: str
    uplink: str | None
    downlink: str = "sparse_dithering(alpha=0.1)"
    snapshot: str = "sparse_dithering(bits=3.9)"

    @property
    def family(self) -> str:
        """The label without the strength behind its comma."""
        return self.label.partition(", ")[0]


@dataclasses.dataclass(frozen=True)
class Point:
    """The state after some rounds; bytes are totals over all clients so far, whole Flower messages."""

    round: int
    uplink: int
    downlink: int
    score: float


@dataclasses.dataclass(frozen=True)
class Run:
    """One federation."""

    method: Method
    setting: Setting
    seed: int
    points: tuple[Point, ...]
    updates: int  # replies with an update
    parameters: int
    seconds: float  # of processor time
    rejected: int

    @property
    def last(self) -> Point:
        return self.points[-1]

    @property
    def uplink_message(self) -> float:
        """Mean bytes of a reply."""
        return self.last.uplink / self.updates

    @property
    def downlink_message(self) -> float:
        """Mean bytes of a broadcast to one client."""
        return self.last.downlink / self.updates


def simulate(method: Method, setting: Setting, seed: int) -> Run:
    """Train; the same seed gives every method the same split, initial model, samples of clients and order of examples."""
    logging.getLogger("flwr").setLevel(logging.ERROR)
    began = time.process_time()
    task = tasks.load(setting.task, Path(setting.folder))
    shares = task.shares(setting.clients, setting.skew, seed)
    torch.manual_seed(seed)
    model = task.model()
    updates = 0
    app = ClientApp(mods=[flower.compress_mod()] if method.uplink else [])

    @app.train()
    def train(message: Message, context: Context) -> Message:
        nonlocal updates
        updates += 1
        worker = task.model()
        worker.load_state_dict(message.content.array_records["arrays"].to_torch_state_dict())
        share = shares[context.node_id]
        order = 10_000_000 * seed + 1000 * int(str(message.content.config_records["config"]["server-round"])) + context.node_id
        tasks.train(worker, task, share, setting.epochs, setting.rate, setting.batch, order)
        content: dict[str, Any] = {
            "arrays": ArrayRecord(worker.state_dict()),
            "metrics": MetricRecord({"num-examples": len(share.y)}),
        }
        return Message(RecordDict(content), reply_to=message)

    sampled = max(1, round(setting.fraction * len(shares)))
    inner = FedAvg(fraction_train=setting.fraction, fraction_evaluate=0.0, min_train_nodes=sampled, min_available_nodes=sampled)
    strategy: Strategy = inner
    if method.uplink:
        strategy = flower.CompressedStrategy(inner, method.uplink, method.downlink, snapshot=method.snapshot, seed=seed)
    grid = flower.LocalGrid(app, len(shares))
    points: list[Point] = []

    def evaluate(server_round: int, arrays: ArrayRecord) -> None:
        if server_round % setting.every == 0 or server_round == setting.rounds:
            model.load_state_dict(arrays.to_torch_state_dict())
            points.append(Point(server_round, grid.bytes_up, grid.bytes_down, task.score(model)))

    random.seed(seed)  # Flower samples clients with it
    strategy.start(grid, ArrayRecord(model.state_dict()), setting.rounds, evaluate_fn=evaluate)
    rejected = strategy.report()["rejected"] if isinstance(strategy, flower.CompressedStrategy) else 0
    numel = sum(p.numel() for p in model.parameters())
    return Run(method, setting, seed, tuple(points), updates, numel, time.process_time() - began, rejected)

"""A small federation on scikit-learn's digits, for the tests: real ClientApp, real strategies, clients in this process."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg, Result, Strategy
from torch import Tensor, nn

from tersegrad.integrations import flower


@functools.cache
def digits() -> tuple[Tensor, Tensor]:
    from sklearn.datasets import load_digits

    found = load_digits()
    order = torch.randperm(len(found.target), generator=torch.Generator().manual_seed(0))
    return torch.tensor(found.data / 16, dtype=torch.float32)[order], torch.tensor(found.target)[order]


def network(dtype: torch.dtype = torch.float32, norm: bool = False) -> nn.Sequential:
    torch.manual_seed(0)
    middle: list[nn.Module] = [nn.BatchNorm1d(48)] if norm else []
    return nn.Sequential(nn.Linear(64, 48), *middle, nn.ReLU(), nn.Linear(48, 10)).to(dtype)


def client_app(
    mods: Sequence[Any], dtype: torch.dtype = torch.float32, norm: bool = False, train: Callable[..., None] | None = None
) -> ClientApp:
    """Clients that train one epoch on their share of the digits; ``train`` may spoil the model before it is sent."""
    app = ClientApp(mods=list(mods))

    @app.train()
    def train_(message: Message, context: Context) -> Message:
        model = network(dtype, norm)
        model.load_state_dict(flower.to_state_dict(message.content.array_records["arrays"]))
        x, y = digits()
        mine = slice(int(context.node_config["partition-id"]), 1400, int(context.node_config["num-partitions"]))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
        rows = x[mine].to(dtype)
        for start in range(0, len(rows), 20):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(rows[start : start + 20]), y[mine][start : start + 20]).backward()
            optimizer.step()
        if train is not None:
            train(model, context)
        content: dict[str, Any] = {
            "arrays": flower.to_arrays(model.state_dict()),
            "metrics": MetricRecord({"num-examples": len(rows), "loss": 0.5}),
        }
        return Message(RecordDict(content), reply_to=message)

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        value = accuracy(message.content.array_records["arrays"], dtype, norm)
        return Message(RecordDict({"metrics": MetricRecord({"num-examples": 1, "accuracy": value})}), reply_to=message)

    return app


def accuracy(arrays: ArrayRecord, dtype: torch.dtype = torch.float32, norm: bool = False) -> float:
    model = network(dtype, norm)
    model.load_state_dict(flower.to_state_dict(arrays))
    model.eval()
    x, y = digits()
    with torch.no_grad():
        return float((model(x[1400:].to(dtype)).argmax(1) == y[1400:]).float().mean())


def fedavg(fraction: float = 1.0, evaluate: float = 0.0, least: int = 1) -> FedAvg:
    return FedAvg(
        fraction_train=fraction, fraction_evaluate=evaluate, min_train_nodes=least, min_evaluate_nodes=0, min_available_nodes=1
    )


def run(strategy: Strategy, grid: Any, rounds: int = 3, arrays: ArrayRecord | None = None, seed: int = 0) -> Result:
    random.seed(seed)  # Flower's strategies sample clients with it
    return strategy.start(grid, flower.to_arrays(network().state_dict()) if arrays is None else arrays, rounds)

"""The server: FedAvg, wrapped."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from flwr.app import ArrayRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import DifferentialPrivacyClientSideFixedClipping, FedAvg, Strategy

from tersegrad.integrations import flower

from .tasks import load

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the federation, and write a report where one is asked for."""
    run = context.run_config
    task = load(str(run["task"]), str(run["folder"]))
    torch.manual_seed(0)
    model = task.model()
    nodes, bound = int(run["min-nodes"]), float(run["clip"])
    inner: Strategy = FedAvg(
        fraction_train=float(run["fraction-train"]), fraction_evaluate=0.0, min_train_nodes=nodes, min_available_nodes=nodes
    )
    if bound > 0:
        inner = DifferentialPrivacyClientSideFixedClipping(inner, float(run["noise"]), bound, nodes)
    strategy = flower.CompressedStrategy(
        inner,
        uplink={"normal": str(run["uplink"] or "identity"), "thin": str(run["thin-uplink"])},
        downlink=str(run["downlink"]),
        clip=bound or None,  # what arrives is bounded again: compression and error feedback may lengthen an update
        patience=float(run["patience"]),
        checkpoint=str(run["checkpoint"]) or None,
    )
    arrays = ArrayRecord(model.state_dict())
    if strategy.checkpoint is not None and strategy.checkpoint.exists():
        arrays = strategy.resume(strategy.checkpoint)
        print(f"resumed after round {strategy.completed}")

    def evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord:
        model.load_state_dict(arrays.to_torch_state_dict())
        return MetricRecord({"score": task.score(model)})

    left = max(0, int(run["num-server-rounds"]) - strategy.completed)
    chosen: Strategy = strategy if run["uplink"] else inner  # the client's mod leaves plain messages alone
    result = chosen.start(grid, arrays, left, timeout=float(run["timeout"]), evaluate_fn=evaluate)
    report = strategy.report() | {"scores": {r: m["score"] for r, m in result.evaluate_metrics_serverapp.items()}}
    print(json.dumps(report, indent=1))
    for rejection in strategy.rejections:
        print("turned away:", rejection)
    if run["result"]:
        rounds = [{n: vars(p) for n, p in r.parcels.items()} for r in strategy.rounds]
        Path(str(run["result"])).write_text(
            json.dumps(report | {"parcels": rounds, "rejections": [vars(r) for r in strategy.rejections]})
        )

"""The client: an ordinary Flower app; the only line about compression is the list of mods."""

from __future__ import annotations

import time
from typing import Any

from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.mod import fixedclipping_mod

from tersegrad.integrations import flower

from .tasks import load, train


def clip(message: Message, context: Context, call_next: Any) -> Message:
    """Flower's fixed clipping, where the run asks for it."""
    if float(context.run_config["clip"]) > 0:
        return fixedclipping_mod(message, context, call_next)
    reply: Message = call_next(message, context)
    return reply


app = ClientApp()


# First in the list means outermost: updates are clipped first and compressed last.
@app.train(mods=[flower.compress_mod(), clip])
def train_(message: Message, context: Context) -> Message:
    """Train on this node's share and reply with the model."""
    run, node = context.run_config, context.node_config
    task = load(str(run["task"]), str(run["folder"]))
    shares = task.shares(int(node["num-partitions"]), float(run["skew"]))
    share = shares[int(node["partition-id"]) % len(shares)]
    time.sleep(float(node.get("delay", 0)))  # imitates a slow device
    model = task.model()
    model.load_state_dict(message.content.array_records["arrays"].to_torch_state_dict())
    seed = 1000 * int(str(message.content.config_records["config"]["server-round"])) + int(node["partition-id"])
    loss = train(model, task, share, int(run["local-epochs"]), float(run["learning-rate"]), int(run["batch-size"]), seed)
    metrics = MetricRecord({"num-examples": len(share.y), "loss": loss})
    return Message(RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics}), reply_to=message)

"""Exchanges: every rank's vector in, the mean over ranks out, through compressed messages.

>>> import torch, tersegrad
>>> from tersegrad.exchange import AllGatherExchange, virtual
>>> spec = tersegrad.Spec.flat(1000)
>>> exchange = AllGatherExchange(tersegrad.parse("identity"))
>>> vectors = [torch.full((1000,), float(rank)) for rank in range(4)]
>>> outcome = virtual.run(exchange, vectors, virtual.init(exchange, spec, 4), spec, tersegrad.Context(seed=1))
>>> float(outcome.mean[0]), outcome.sent[0]
(1.5, 12024)
"""

from tersegrad.exchange import virtual
from tersegrad.exchange.all_gather import AllGatherExchange
from tersegrad.exchange.steps import AllGather, AllToAll, Exchange, Pending, Pipeline, ProcessGroup, Steps, start
from tersegrad.exchange.two_shot import TwoShotExchange

__all__ = [
    "AllGather", "AllGatherExchange", "AllToAll", "Exchange", "Pending", "Pipeline", "ProcessGroup", "Steps", "TwoShotExchange", "start",
    "virtual",
]  # fmt: skip

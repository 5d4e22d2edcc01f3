"""Exchanges: every rank's vector in, the mean over ranks out, through compressed messages.

>>> import torch, tersegrad
>>> from tersegrad.exchange import AllGatherExchange, virtual
>>> spec = tersegrad.Spec.flat(1000)
>>> exchange = AllGatherExchange(tersegrad.parse("identity"))
>>> vectors = [torch.full((1000,), float(rank)) for rank in range(4)]
>>> outcome = virtual.run(exchange, vectors, virtual.init(exchange, spec, 4), spec, tersegrad.Context(seed=1))
>>> float(outcome.mean[0]), outcome.sent[0]
(1.5, 12000)
"""

from tersegrad.exchange import virtual
from tersegrad.exchange.all_gather import AllGatherExchange
from tersegrad.exchange.all_reduce import AllReduceExchange
from tersegrad.exchange.hierarchical import HierarchicalExchange
from tersegrad.exchange.power_sgd import PowerSGDExchange
from tersegrad.exchange.reduce_scatter import ReduceScatterExchange
from tersegrad.exchange.schemes import Scheme, scheme
from tersegrad.exchange.steps import AllGather, AllToAll, Exchange, Part, Pending, Pipeline, ProcessGroup, Steps, start
from tersegrad.exchange.two_shot import TwoShotExchange

__all__ = [
    "AllGather", "AllGatherExchange", "AllReduceExchange", "AllToAll", "Exchange", "HierarchicalExchange", "Part", "Pending", "Pipeline",
    "PowerSGDExchange", "ProcessGroup", "ReduceScatterExchange", "Scheme", "Steps", "TwoShotExchange", "scheme", "start", "virtual",
]  # fmt: skip

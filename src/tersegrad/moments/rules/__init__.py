"""Rules: for each kind of module, how its forward is run so that the shares of its parameters can be found.

A rule applies to a module whose ``forward`` is the one it was written for and whose parameters are plain ones (a subclass with a
forward of its own, or a weight under a parametrisation, has no rule).
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn import Parameter

from tersegrad.moments.rules.attention import attention
from tersegrad.moments.rules.convolution import convolution, transposed_convolution
from tersegrad.moments.rules.embedding import embedding
from tersegrad.moments.rules.linear import linear
from tersegrad.moments.rules.normalisation import (
    batch_norm,
    group_norm,
    instance_norm,
    layer_norm,
    prelu,
    rms_norm,
    worker_batch_norm,
)
from tersegrad.moments.site import Rule
from tersegrad.moments.worker_norm import WorkerBatchNorm1d, WorkerBatchNorm2d, WorkerBatchNorm3d

RULES: dict[type[nn.Module], Rule] = {
    nn.Linear: linear,
    nn.Conv1d: convolution,
    nn.Conv2d: convolution,
    nn.Conv3d: convolution,
    nn.ConvTranspose1d: transposed_convolution,
    nn.ConvTranspose2d: transposed_convolution,
    nn.ConvTranspose3d: transposed_convolution,
    nn.Embedding: embedding,
    nn.BatchNorm1d: batch_norm,
    nn.BatchNorm2d: batch_norm,
    nn.BatchNorm3d: batch_norm,
    WorkerBatchNorm1d: worker_batch_norm,
    WorkerBatchNorm2d: worker_batch_norm,
    WorkerBatchNorm3d: worker_batch_norm,
    nn.LayerNorm: layer_norm,
    nn.RMSNorm: rms_norm,
    nn.GroupNorm: group_norm,
    nn.InstanceNorm1d: instance_norm,
    nn.InstanceNorm2d: instance_norm,
    nn.InstanceNorm3d: instance_norm,
    nn.PReLU: prelu,
    nn.MultiheadAttention: attention,
}


def find(module: nn.Module) -> Rule | None:
    """The rule of ``module``, or None."""
    own: Any = type(module)
    for kind in own.__mro__:
        rule = RULES.get(kind)
        if rule is not None:
            return rule if own.forward is kind.forward and not hasattr(module, "parametrizations") else None
    return None


def covered(module: nn.Module) -> list[Parameter]:
    """The parameters that the rule of ``module`` gives the shares of."""
    own = list(module.parameters(recurse=False))
    if isinstance(module, nn.MultiheadAttention):
        extra = [p for p in (module.bias_k, module.bias_v) if p is not None]
        return [*(p for p in own if not any(p is q for q in extra)), *module.out_proj.parameters()]
    return own

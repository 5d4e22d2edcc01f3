"""Published methods of low-communication training, whole: compressor, exchange and outer optimiser as they were run.

>>> published("sparse_loco")["exchange"]
'all_gather(mean=senders, clip=median)'

Local steps (SparseLoCo, Streaming DiLoCo)::

    handle = local_sgd.attach(model, **outer.published("sparse_loco"))

Every step (DeMo, DisTrO), where the optimiser steps along the signs of the update::

    ddp.attach(model, **outer.published("demo"))
    outer.sign_updates(torch.optim.SGD(model.parameters(), lr=1e-3))
"""

from __future__ import annotations

from typing import Any

import torch

from tersegrad.core.text import require

# What each method sends, how the messages are combined, and, for local steps, when and how the outer optimiser steps.
METHODS: dict[str, dict[str, str]] = {
    "sparse_loco": {"compressor": "sparse_loco", "exchange": "all_gather(mean=senders, clip=median)", "how": "sparse_loco"},
    "streaming_diloco": {"compressor": "streaming_diloco", "exchange": "all_gather", "how": "streaming_diloco"},
    "demo": {"compressor": "demo", "exchange": "all_gather(mean=senders)"},
    "distro": {"compressor": "distro", "exchange": "all_gather(mean=senders)"},
}


def published(name: str, **changes: str) -> dict[str, Any]:
    """Arguments for ``local_sgd.attach`` or ``ddp.attach``; ``changes`` replace some, as in ``how="sparse_loco(every=15)"``.

    The gate against workers that send nonsense is not part of any of them: ``exchange="all_gather(mean=senders, clip=median, gate=10)"``.
    """
    require(name in METHODS, f"the published methods are {', '.join(METHODS)}, got {name!r}")
    # They compress every tensor, small ones too.
    return {**METHODS[name], "dense_below": 0, **changes}


def sign_updates(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The same optimiser, stepping along the sign of every coordinate of the gradient (DeMo, DisTrO)."""

    def to_signs(which: torch.optim.Optimizer, *_: Any) -> None:
        for group in which.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    # NaN has no sign, and must not become a step of zero.
                    parameter.grad.copy_(torch.where(parameter.grad.isnan(), parameter.grad, parameter.grad.sign()))

    optimizer.register_step_pre_hook(to_signs)
    return optimizer

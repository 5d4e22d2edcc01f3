"""Accelerate: ``handle = attach(accelerator, model, "error_feedback(sparse_dithering(alpha=0.1))")`` after ``accelerator.prepare``.

(``DistributedDataParallelKwargs(comm_hook=...)`` chooses among torch's built-in hooks and takes no other: leave it at its default.)
"""

from __future__ import annotations

from typing import Any

import torch

from tersegrad import engine
from tersegrad.core.protocol import Compressor
from tersegrad.exchange import Scheme
from tersegrad.integrations import frameworks


def attach(
    accelerator: Any,
    model: torch.nn.Module,
    compressor: Compressor[Any] | str | None,
    exchange: Scheme | str | None = None,
    *,
    log_every: int = 50,
    layers: bool = False,
    save: bool = True,
    **options: Any,
) -> engine.Handle:
    """Exchange the gradients of a model that ``accelerator.prepare`` returned, by DDP or FSDP2.

    Its GradScaler is told of. With trackers (``Accelerator(log_with=...)``), bits, error and times are logged every ``log_every``
    steps. With ``save``, ``accelerator.save_state`` and ``load_state`` hold the residuals of all ranks. ``options``: see
    :func:`tersegrad.integrations.ddp.attach`.
    """
    handle = frameworks.attach(model, compressor, exchange, **{"scaler": accelerator.scaler, **options})
    if save:
        accelerator.register_for_checkpointing(frameworks.AllRanks(handle))
    if log_every:
        handle.log_to(lambda numbers, step: _log(accelerator, numbers, step), every=log_every, layers=layers)
    return handle


def _log(accelerator: Any, numbers: dict[str, float], step: int) -> None:
    # Trackers come with init_trackers, which may be called later.
    if accelerator.trackers:
        accelerator.log({f"tersegrad/{name}": value for name, value in numbers.items()}, step=step)

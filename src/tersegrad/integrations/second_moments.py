"""Second moments of per-sample gradients for an integration: collected while a compressor asks for them, by group."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from tersegrad.core import buffers
from tersegrad.core.errors import MissingStatistics
from tersegrad.engine import Group
from tersegrad.moments import Collector


class Moments:
    """A collector that comes and goes with the compressor; without a module it stays empty."""

    def __init__(self, module: torch.nn.Module | None = None) -> None:
        self._module = module
        self._collector: Collector | None = None
        self._taken: dict[Any, Tensor] = {}

    def observe(self, wanted: bool) -> None:
        """Collect from the next forward pass on, or stop."""
        if wanted and self._collector is None and self._module is not None:
            self._collector = Collector(self._module)
        elif not wanted and self._collector is not None:
            self._collector.remove()
            self._collector = None

    def take(self) -> None:
        """The moments of the pass that has ended."""
        self._taken = {} if self._collector is None else dict(self._collector.take())

    def clear(self) -> None:
        """Forget what was collected."""
        self._taken = {}
        if self._collector is not None:
            self._collector.clear()

    def of(self, group: Group, parameters: Mapping[str, Tensor], gradient: Tensor) -> Tensor:
        """The moments of a group, laid out like its gradient."""
        second, at = torch.zeros_like(gradient), 0
        places, found = [], []
        for piece, place in zip(group.spec.pieces, second.split([p.numel for p in group.spec.pieces]), strict=True):
            moment = self._taken.get(parameters[piece.name])
            if moment is not None:
                places.append(place.view(moment.shape))
                found.append(moment)
            elif bool(gradient[at : at + piece.numel].any()):
                raise MissingStatistics(
                    f"{piece.name} has a gradient but no second moment: attach(model, ...) or handle.bind(model) before the forward "
                    "pass, and run the model through DistributedDataParallel"
                )
            at += piece.numel
        buffers.copy_all(found, places)
        return second

    def report(self) -> dict[str, float | str]:
        """What a report says of them."""
        return {} if self._collector is None else {"moments/fallbacks": len(self._collector.fallbacks)}

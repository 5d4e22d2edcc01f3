"""Lightning: ``Trainer(strategy="ddp", callbacks=[Compress("error_feedback(sparse_dithering(alpha=0.1))")])``.

The callback attaches to the model that the strategy has wrapped, for DDP strategies and for FSDP2 (``ModelParallelStrategy``), writes
bits, error and times to the trainer's loggers, and puts the residuals of all ranks into Lightning's checkpoints.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from tersegrad import engine
from tersegrad.core.protocol import Compressor
from tersegrad.exchange import Scheme
from tersegrad.integrations import frameworks

# Of the package that the script uses: the two have classes of their own.
_ORDER = ("pytorch_lightning", "lightning.pytorch") if "pytorch_lightning" in sys.modules else ("lightning.pytorch",)
_Callback: Any = frameworks.base((*_ORDER, "pytorch_lightning"), "Callback")


class Compress(_Callback):  # type: ignore[misc]
    """Compressed gradients for a Lightning trainer; ``handle`` is there once training has started."""

    def __init__(
        self,
        compressor: Compressor[Any] | str | None,
        exchange: Scheme | str | None = None,
        *,
        log_every: int = 50,
        layers: bool = False,
        **options: Any,
    ) -> None:
        """The options are those of :func:`tersegrad.integrations.ddp.attach`; ``log_every=0`` writes to no logger."""
        frameworks.require_base(_Callback, "lightning")
        super().__init__()
        self.handle: engine.Handle | None = None
        self._given, self._options = (compressor, exchange), options
        self._every, self._layers = log_every, layers
        self._saved: Mapping[str, Any] | None = None

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Attach to what the strategy has wrapped."""
        options = {"scaler": getattr(trainer.precision_plugin, "scaler", None), **self._options}
        self.handle = frameworks.attach(trainer.strategy.model, *self._given, **options)
        if self._saved is not None:
            frameworks.AllRanks(self.handle).load_state_dict(self._saved)
        for logger in trainer.loggers if self._every else ():
            self.handle.log_to(_named(logger.log_metrics), every=self._every, layers=self._layers)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Leave the model to Lightning."""
        if self.handle is not None:
            self.handle.detach()

    def state_dict(self) -> dict[str, Any]:
        """The residuals of all ranks (Lightning calls it on every rank)."""
        return {} if self.handle is None else frameworks.AllRanks(self.handle).state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep what was saved until there is a model."""
        self._saved = state_dict


def _named(log: Any) -> Any:
    return lambda numbers, step: log({f"tersegrad/{name}": value for name, value in numbers.items()}, step)

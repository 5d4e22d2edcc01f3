"""Hugging Face Trainer: ``compress(trainer, "error_feedback(sparse_dithering(alpha=0.1))")`` before ``trainer.train()``.

A callback attaches to the model that the trainer has wrapped (DDP or FSDP2), sends bits, error and times through the trainer's own log, and
saves every rank's residuals in the trainer's checkpoints (``checkpoint-<step>/tersegrad-rank<r>.pt``).
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch

from tersegrad import engine
from tersegrad.core.protocol import Compressor
from tersegrad.exchange import Scheme
from tersegrad.integrations import frameworks

_Callback: Any = frameworks.base(("transformers.trainer_callback",), "TrainerCallback")

log = logging.getLogger("tersegrad")


class Compress(_Callback):  # type: ignore[misc]
    """The callback that :func:`compress` adds; ``handle`` is there once training has started."""

    def __init__(
        self,
        trainer: Any,
        compressor: Compressor[Any] | str | None,
        exchange: Scheme | str | None,
        log_every: int | None,
        layers: bool,
        options: dict[str, Any],
    ) -> None:
        frameworks.require_base(_Callback, "transformers")
        self.handle: engine.Handle | None = None
        self._trainer, self._given, self._options = trainer, (compressor, exchange), options
        self._every, self._layers = log_every, layers
        self._lines: list[dict[str, float]] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Attach to what the trainer has wrapped, and go on where a checkpoint was."""
        options = {"scaler": self._trainer.accelerator.scaler, **self._options}
        self.handle = frameworks.attach(self._trainer.model_wrapped, *self._given, **options)
        if state.global_step:
            self._load(_folder(args, state))
        every = max(1, int(args.logging_steps)) if self._every is None else self._every
        if every:
            self.handle.log_to(lambda numbers, step: self._lines.append(numbers), every=every, layers=self._layers)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Log what was measured in the step before.

        Not at its end: a log takes back the flag by which the trainer's own log, with its collectives, is due on every rank.
        """
        self._log()

    def _log(self) -> None:
        lines, self._lines = self._lines, []
        for numbers in lines:
            self._trainer.log({f"tersegrad/{name}": value for name, value in numbers.items()})

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Every rank saves its own state."""
        assert self.handle is not None
        folder = _folder(args, state)
        folder.mkdir(parents=True, exist_ok=True)
        torch.save(self.handle.state_dict(), folder / f"tersegrad-rank{self.handle.rank}.pt")

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Leave the model to the trainer."""
        self._log()
        if self.handle is not None:
            self.handle.detach()

    def _load(self, folder: Path) -> None:
        assert self.handle is not None
        files = sorted(folder.glob("tersegrad-rank*.pt"))
        if files:
            self.handle.load_state_dicts([torch.load(file, map_location="cpu", weights_only=True) for file in files])
        else:
            log.warning("%s holds no state of a compressed exchange: residuals start at zero", folder)


def _folder(args: Any, state: Any) -> Path:
    return Path(args.output_dir) / f"checkpoint-{state.global_step}"


def compress(
    trainer: Any,
    compressor: Compressor[Any] | str | None,
    exchange: Scheme | str | None = None,
    *,
    log_every: int | None = None,
    layers: bool = False,
    **options: Any,
) -> Compress:
    """Exchange a trainer's gradients through ``compressor``; call it before ``trainer.train()``, on every rank.

    ``log_every``: by default the trainer's ``logging_steps``; 0 for no logs. ``options``: see :func:`tersegrad.integrations.ddp.attach`.
    """
    callback = Compress(trainer, compressor, exchange, log_every, layers, options)
    trainer.add_callback(callback)
    return callback

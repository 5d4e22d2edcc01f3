"""Which models are exchanged by which handle, so that a second one is refused instead of exchanging the same gradients twice."""

from __future__ import annotations

import weakref
from collections.abc import Iterable

import torch

from tersegrad import engine
from tersegrad.core.errors import BadConfiguration

# A handle that nobody keeps exchanges nothing.
_handles: weakref.WeakKeyDictionary[torch.nn.Module, weakref.ref[engine.Handle]] = weakref.WeakKeyDictionary()


def free(*models: torch.nn.Module) -> None:
    """Raise unless none of the models has a handle."""
    for model in models:
        held = _handles.get(model)
        handle = None if held is None else held()
        if handle is not None and not handle.detached:
            raise BadConfiguration(
                f"this model is attached already, with {handle.compressor} through {handle.exchange}: change them with "
                "handle.change(...), or call handle.detach() first"
            )


def claim(models: Iterable[torch.nn.Module], handle: engine.Handle) -> None:
    """Note that a handle exchanges what these models compute."""
    for model in models:
        _handles[model] = weakref.ref(handle)

"""Which models are exchanged by which handle, so that a second one is refused instead of exchanging the same gradients twice."""

from __future__ import annotations

import atexit
import functools
import gc
import weakref
from collections.abc import Iterable
from typing import Any

import torch

from tersegrad import engine
from tersegrad.core import private
from tersegrad.core.errors import BadConfiguration
from tersegrad.core.text import require

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
    _end_threads_at_exit()
    for model in models:
        _handles[model] = weakref.ref(handle)


@functools.cache
def _end_threads_at_exit() -> None:
    """Free models and handles that nobody uses any more before the interpreter ends.

    They hold one another and, although it was destroyed, their process group with its threads. One of these that frees a tensor while the
    interpreter ends aborts the process.
    """
    atexit.register(gc.collect)


def last_hook(model: torch.nn.Module) -> Any:
    """The detached handle whose hook a DDP model has, or None where it has none; any other hook is refused.

    DDP takes one hook for good: that of a detached handle hands on to its successor.
    """
    found: Any = next((state for _, state in private.comm_hooks(model)), None)
    while isinstance(found, engine.Handle) and getattr(found, "successor", None) is not None:
        found = found.successor  # type: ignore[attr-defined]
    ended = found is None or (isinstance(found, engine.Handle) and found.detached)
    require(ended, "this model has a communication hook already: attach once, right after building DDP")
    return found


def register(model: Any, before: Any, handle: engine.Handle, hook: Any) -> None:
    """Give a DDP model the hook of a handle, or the handle to that of the one ``before``."""
    if before is None:
        model.register_comm_hook(handle, hook)
    else:
        before.successor = handle
    claim([model], handle)


def advice(model: torch.nn.Module) -> str:
    """What to do with a model that is not DDP's."""
    if type(model).__name__ == "FullyShardedDataParallel":
        return "FSDP1 is not supported; shard with fully_shard (FSDP2) and use tersegrad.integrations.fsdp"
    if any(type(module).__name__.startswith("FSDP") for module in model.modules()):
        return "for fully_shard there is tersegrad.integrations.fsdp"
    return "wrap it first"

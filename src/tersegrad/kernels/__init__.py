"""Backends of the hot operations, and the one place that chooses between them.

``reference`` implements every operation and runs anywhere. A faster backend implements as many as it likes, for one kind of device;
what it implements is laid over the reference, once per kind of device. ``docs/add-a-kernel.md`` shows how to add one.

>>> import torch
>>> get(torch.device("cpu")) is get(torch.device("cpu"))
True
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import os
import types
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal

import torch

from tersegrad.kernels import native, reference
from tersegrad.kernels.schema import Kernels

Backend = Literal["auto", "reference", "native"]

# By kind of device: the modules below this one that are faster there, each over those before it. They are imported when the first
# tensor of the kind comes. A backend says by available() whether it can run here, and by OPERATIONS what it implements.
FASTER: dict[str, tuple[str, ...]] = {"cpu": ("native",), "cuda": ("triton", "triton.backend", "cuda")}

if TYPE_CHECKING:
    _complete: Kernels = reference

_forced: Backend = "auto"
_warned = False
_chosen: dict[str, Overlay] = {}


class Overlay(types.SimpleNamespace):
    """The operations of the reference, some of them replaced by faster ones."""

    # By name, the backend of each operation that is not the reference's.
    sources: dict[str, str]


def get(device: torch.device) -> Kernels:
    """The fastest operations for tensors on ``device``."""
    found: Any = _chosen.get(device.type)
    operations: Kernels = _choose(device.type) if found is None else found
    return operations


def _choose(kind: str) -> Any:
    """The operations for a kind of device, chosen once."""
    backends: list[Any] = []
    if _forced != "reference":
        found = [_module(name) for name in FASTER.get(kind, ())]
        backends = [backend for backend in found if backend is not None and backend.available()]
    if kind == "cpu" and not backends and _forced != "reference":
        _warn_once()
    _chosen[kind] = overlay(*backends)
    return _chosen[kind]


def _module(name: str) -> Any:
    """A module below this one, or nothing where it needs Triton and Triton is not there."""
    try:
        return importlib.import_module(f"{__name__}.{name}")
    except ModuleNotFoundError as error:
        if error.name != "triton":
            raise
        return None


def overlay(*backends: Any) -> Overlay:
    """The reference with what ``backends`` implement laid over it, the last one on top."""
    made = Overlay(**{name: getattr(reference, name) for name in operations()}, sources={})
    for backend in backends:
        unknown = set(backend.OPERATIONS) - set(operations())
        if unknown:
            raise ValueError(f"{backend.__name__} implements {sorted(unknown)}, which the schema does not have")
        for name in backend.OPERATIONS:
            setattr(made, name, getattr(backend, name))
            made.sources[name] = backend.__name__.removeprefix(f"{__name__}.").partition(".")[0]
    return made


def operations() -> list[str]:
    """The names of all operations of the schema."""
    return [name for name, _ in inspect.getmembers(Kernels, inspect.isfunction) if not name.startswith("_")]


def faster(device: torch.device, *names: str) -> bool:
    """Whether all these operations have a faster version than the reference for tensors on ``device``."""
    kind = device.type
    found = _chosen.get(kind)
    sources = (_choose(kind) if found is None else found).sources
    return sources.keys() >= {*names}


def backends(device: torch.device) -> list[str]:
    """The names of the faster backends that are in use for tensors on ``device``."""
    get(device)
    return sorted(set(_chosen[device.type].sources.values()))


def _warn_once() -> None:
    """Say that CPU tensors run on plain torch: once per process, and of the workers on one machine only the first."""
    global _warned
    if not _warned and os.environ.get("LOCAL_RANK", "0") == "0":
        _warned = True
        warnings.warn(
            f"tersegrad runs on its plain-torch kernels, which write the same bytes many times slower: {native.why_missing()}. "
            f"For the fast ones {native.REMEDY}",
            RuntimeWarning,
            stacklevel=4,
        )


def forced() -> Backend:
    """The backend that :func:`force` asks for just now."""
    return _forced


@contextlib.contextmanager
def force(backend: Backend) -> Iterator[None]:
    """Use one backend for all operations inside the block (for tests and benchmarks)."""
    global _forced, _chosen
    if backend == "native" and not native.available():
        raise RuntimeError(
            f"the native kernels are not there: {native.why_missing()}; {native.REMEDY}, or use the reference backend"
        )
    before = _forced, _chosen
    if backend != _forced:
        _forced, _chosen = backend, _kept.setdefault(backend, {})
    try:
        yield
    finally:
        _forced, _chosen = before


# What was chosen under each forced backend.
_kept: dict[Backend, dict[str, Overlay]] = {"auto": _chosen}

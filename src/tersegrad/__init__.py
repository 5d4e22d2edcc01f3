"""tersegrad: distributed and federated training that sends few bits.

>>> import torch, tersegrad
>>> result = tersegrad.roundtrip("rotated(sign)", torch.ones(4096))
>>> result.nbytes, round(result.bits_per_coordinate, 2)
(517, 1.01)
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tersegrad import theory as theory
    from tersegrad.compressors import *  # noqa: F403 - the register lists the classes once
    from tersegrad.core import frame as frame
    from tersegrad.core import state as state
    from tersegrad.core.errors import BadConfiguration as BadConfiguration
    from tersegrad.core.errors import CorruptMessage as CorruptMessage
    from tersegrad.core.errors import MissingExtra as MissingExtra
    from tersegrad.core.errors import MissingStatistics as MissingStatistics
    from tersegrad.core.errors import TersegradError as TersegradError
    from tersegrad.core.protocol import Accumulator as Accumulator
    from tersegrad.core.protocol import Compressor as Compressor
    from tersegrad.core.protocol import Context as Context
    from tersegrad.core.protocol import Guarantee as Guarantee
    from tersegrad.core.protocol import Message as Message
    from tersegrad.core.protocol import Piece as Piece
    from tersegrad.core.protocol import Spec as Spec
    from tersegrad.core.protocol import Stats as Stats
    from tersegrad.recipes import names as names
    from tersegrad.recipes import parse as parse
    from tersegrad.tensors import RoundTrip as RoundTrip
    from tersegrad.tensors import from_frame as from_frame
    from tersegrad.tensors import roundtrip as roundtrip
    from tersegrad.tensors import to_frame as to_frame
    from tersegrad.wrappers import DCT as DCT
    from tersegrad.wrappers import Aligned as Aligned
    from tersegrad.wrappers import ByTensor as ByTensor
    from tersegrad.wrappers import ErrorFeedback as ErrorFeedback
    from tersegrad.wrappers import Metered as Metered
    from tersegrad.wrappers import Rotated as Rotated
    from tersegrad.wrappers import Shortest as Shortest

__version__ = "0.1.0"

# Public names by the module they live in. They are imported when first used, so that `tersegrad --help` need not wait for torch.
_HOMES = {
    "core.errors": ("BadConfiguration", "CorruptMessage", "MissingExtra", "MissingStatistics", "TersegradError"),
    "core.protocol": ("Accumulator", "Compressor", "Context", "Guarantee", "Message", "Piece", "Spec", "Stats"),
    "tensors": ("RoundTrip", "from_frame", "roundtrip", "to_frame"),
    "recipes": ("names", "parse"),
    "wrappers": ("DCT", "Aligned", "ByTensor", "ErrorFeedback", "Metered", "Rotated", "Shortest"),
}
_MODULES = {"frame": "core.frame", "state": "core.state", "theory": "theory"}


def _everything() -> list[str]:
    register: list[str] = importlib.import_module("tersegrad.compressors").__all__
    return sorted([*_MODULES, *register, *(name for names in _HOMES.values() for name in names)])


def __getattr__(name: str) -> Any:
    found: Any
    if name == "__all__":
        found = _everything()
    elif name in _MODULES:
        found = importlib.import_module(f"tersegrad.{_MODULES[name]}")
    elif home := next((module for module, names in _HOMES.items() if name in names), None):
        found = getattr(importlib.import_module(f"tersegrad.{home}"), name)
    elif name[:1].isupper() and name in (register := importlib.import_module("tersegrad.compressors")).__all__:
        found = getattr(register, name)
    else:
        raise AttributeError(f"module 'tersegrad' has no attribute {name!r}")
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *_everything()})

"""What is known of the strategies that go inside: what they read of a reply, and what they keep between rounds."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord
from flwr.serverapp.strategy import (
    DifferentialPrivacyClientSideAdaptiveClipping,
    DifferentialPrivacyServerSideAdaptiveClipping,
    FedAdagrad,
    FedAdam,
    FedAvgM,
    FedYogi,
    Strategy,
)
from torch import Tensor

from tersegrad.core.errors import BadConfiguration

# Attributes that a run cannot go on without: momenta, and the bound that adaptive clipping has reached.
KEPT: tuple[tuple[type[Strategy], tuple[str, ...]], ...] = (
    (FedAdagrad, ("m_t", "v_t")),
    (FedAdam, ("m_t", "v_t")),
    (FedYogi, ("m_t", "v_t")),
    (FedAvgM, ("momentum_vector",)),
    (DifferentialPrivacyClientSideAdaptiveClipping, ("clipping_norm",)),
    (DifferentialPrivacyServerSideAdaptiveClipping, ("clipping_norm",)),
)
# Copies of the global model, which Flower's strategies make again from the model they are given.
MODELS = ("current_arrays",)

Value = float | dict[str, np.ndarray[Any, Any]] | list[np.ndarray[Any, Any]] | None


def nested(strategy: Any) -> list[Any]:
    """A strategy and those that it wraps (differential privacy)."""
    found = [strategy]
    while isinstance(inner := getattr(found[-1], "strategy", None), Strategy):
        found.append(inner)
    return found


def weight_key(strategy: Any) -> str | None:
    """The metric by which replies are weighted."""
    return next((s.weighted_by_key for s in nested(strategy) if hasattr(s, "weighted_by_key")), None)


def metrics_read(strategy: Any) -> dict[str, float]:
    """Other metrics that a strategy computes with, and how large they may be; none may be negative.

    QFedAvg gives up the round without a loss, and takes a power of it: a negative one makes the model NaN. Adaptive clipping scales its
    bound by the exponential of the mean of bits: a large one would make the bound zero for good, a negative one infinite.
    """
    found = {s.train_loss_key: math.inf for s in nested(strategy) if hasattr(s, "train_loss_key")}
    if any(isinstance(s, DifferentialPrivacyClientSideAdaptiveClipping) for s in nested(strategy)):
        found["norm_bit"] = 1
    return found


def _names(strategy: Any, keep: Sequence[str] | None) -> tuple[str, ...]:
    """The attributes of one strategy that belong into a checkpoint."""
    known = {name for kind, names in KEPT if isinstance(strategy, kind) for name in names}
    if keep is None:
        unknown = [name for name, value in vars(strategy).items() if name not in {*known, *MODELS} and _holds_arrays(value)]
        if unknown:
            raise BadConfiguration(
                f"{type(strategy).__name__} keeps arrays in {', '.join(unknown)}, and it is not known whether a checkpoint needs "
                f"them: say CompressedStrategy(..., keep={unknown!r}) to have them saved, or keep=[] if they need not be"
            )
    return tuple(sorted({*known, *(keep or ())}))


def _holds_arrays(value: Any) -> bool:
    if isinstance(value, (np.ndarray, Tensor, Array, ArrayRecord)):
        return True
    if isinstance(value, Mapping):
        value = list(value.values())
    return isinstance(value, (list, tuple)) and any(isinstance(v, (np.ndarray, Tensor, Array, ArrayRecord)) for v in value)


def kept(strategy: Any, keep: Sequence[str] | None = None) -> dict[tuple[int, str], Value]:
    """What the strategies keep, by level and attribute: numbers, and dicts or lists of numpy arrays."""
    found: dict[tuple[int, str], Value] = {}
    for level, each in enumerate(nested(strategy)):
        for name in _names(each, keep):
            if not hasattr(each, name):
                continue
            value = getattr(each, name)
            parts = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else []
            plain = value is None or isinstance(value, (int, float, dict, list))
            if not plain or not all(isinstance(part, np.ndarray) for part in parts):
                raise BadConfiguration(
                    f"{type(each).__name__}.{name} is neither a number nor a dict or list of numpy arrays: it cannot be saved"
                )
            found[level, name] = value
    return found


def check(strategy: Any, values: Mapping[tuple[int, str], Value], keep: Sequence[str] | None = None) -> None:
    """Raise unless these values belong to these strategies."""
    wanted = {(level, name) for level, each in enumerate(nested(strategy)) for name in _names(each, keep)}
    if strange := sorted(f"{name} (level {level})" for level, name in values.keys() - wanted):
        kinds = " around ".join(type(each).__name__ for each in nested(strategy))
        raise BadConfiguration(f"the checkpoint holds {', '.join(strange)}, which {kinds} does not keep: use the same strategy")


def restore(strategy: Any, values: Mapping[tuple[int, str], Value]) -> None:
    """Give the strategies back what :func:`kept` found."""
    levels = nested(strategy)
    for (level, name), value in values.items():
        setattr(levels[level], name, value)

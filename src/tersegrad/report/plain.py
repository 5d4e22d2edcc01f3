"""Results as plain JSON values."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any


def as_json(value: Any) -> Any:
    """Dataclasses (with their properties), lists and numbers as JSON values; what is not finite becomes null.

    >>> as_json([1, math.inf, "x", None])
    [1, None, 'x', None]
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [f.name for f in dataclasses.fields(value)]
        names += [n for n, member in vars(type(value)).items() if isinstance(member, property)]
        return {name: as_json(getattr(value, name)) for name in names}
    if isinstance(value, dict):
        return {str(k): as_json(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [as_json(v) for v in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, str | int | bool):
        return value
    return str(value) if isinstance(value, Path) else repr(value)

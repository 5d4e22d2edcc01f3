"""Numbers in, numbers out: every function of this package takes plain numbers or numpy arrays, and checks them.

Arrays broadcast against one another as in numpy and give a float64 array; when all arguments are plain numbers the answer is
a Python ``float``. Strings, booleans and other objects are options and are passed through.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Protocol, TypeAlias, overload

import numpy as np
from numpy.typing import ArrayLike, NDArray

from tersegrad.core.errors import BadConfiguration

Array: TypeAlias = NDArray[np.float64]


class Elementwise(Protocol):
    """A function of numbers that also broadcasts over arrays."""

    __name__: str

    @overload
    def __call__(self, *values: float, **named: float | str) -> float: ...
    @overload
    def __call__(self, *values: ArrayLike, **named: ArrayLike) -> Array: ...


def _is_option(value: object) -> bool:
    return (
        value is None
        or isinstance(value, str | bool)
        or not isinstance(value, int | float | np.generic | np.ndarray | list | tuple)
    )


def _prepare(
    function: Callable[..., object], values: tuple[Any, ...], named: dict[str, Any]
) -> tuple[list[Array], list[str], dict[str, Any]]:
    """Positional and named numbers as broadcast float64 arrays, in one list; the names of the named ones; the options."""
    if any(_is_option(v) for v in values):
        raise BadConfiguration(f"{function.__name__} takes numbers by position and options by name")
    numbers = {k: v for k, v in named.items() if not _is_option(v)}
    try:
        arrays = [np.asarray(v, dtype=np.float64) for v in (*values, *numbers.values())]
        return list(np.broadcast_arrays(*arrays)), list(numbers), {k: v for k, v in named.items() if k not in numbers}
    except ValueError as error:
        raise BadConfiguration(f"{function.__name__}: {error}") from None


def vectorised(function: Callable[..., Any]) -> Elementwise:
    """Make a body written with numpy operations accept plain numbers and lists too."""

    @functools.wraps(function)
    def wrapper(*values: Any, **named: Any) -> Any:
        arrays, names, options = _prepare(function, values, named)
        result = function(*arrays[: len(values)], **dict(zip(names, arrays[len(values) :])), **options)
        return float(result) if np.ndim(result) == 0 else np.asarray(result, dtype=np.float64)

    return wrapper


def looped(function: Callable[..., float]) -> Elementwise:
    """Make a body written for plain floats broadcast over arrays, one element at a time."""

    @functools.wraps(function)
    def wrapper(*values: Any, **named: Any) -> Any:
        arrays, names, options = _prepare(function, values, named)
        shape = arrays[0].shape if arrays else ()
        result = np.empty(shape, dtype=np.float64)
        flat = result.reshape(-1)
        for i, row in enumerate(zip(*(a.ravel().tolist() for a in arrays))):
            flat[i] = function(*row[: len(values)], **dict(zip(names, row[len(values) :])), **options)
        return float(result) if shape == () else result

    return wrapper


def _require_all(holds: Any, name: str, value: Any, what: str) -> None:
    if not np.all(holds):
        bad = np.asarray(value, dtype=np.float64)[~np.asarray(holds)].ravel()[0] if np.ndim(value) else value
        raise BadConfiguration(f"{name} must {what}, got {float(bad):g}")


def require_between_zero_and_one(name: str, value: Any) -> None:
    """Reject values outside the open interval (0, 1); NaN included."""
    _require_all((value > 0) & (value < 1), name, value, "lie strictly between 0 and 1")


def require_probability(name: str, value: Any) -> None:
    """Reject values outside the closed interval [0, 1]; NaN included."""
    _require_all((value >= 0) & (value <= 1), name, value, "lie between 0 and 1")


def require_positive(name: str, value: Any) -> None:
    """Reject zero, negative values, infinity and NaN."""
    _require_all((value > 0) & (value < np.inf), name, value, "be positive and finite")


def require_at_least(name: str, value: Any, least: float) -> None:
    """Reject values below ``least``, infinity and NaN."""
    _require_all((value >= least) & (value < np.inf), name, value, f"be at least {least:g} and finite")


def require_whole(name: str, value: Any, least: float) -> None:
    """Reject values that are not whole numbers of at least ``least`` (and below 2^53, where floats stop counting)."""
    _require_all(
        (value >= least) & (value < 2.0**53) & (value == np.floor(value)),
        name,
        value,
        f"be a whole number of at least {least:g}",
    )

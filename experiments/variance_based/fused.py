"""torch.compile where it works: a function that runs compiled on CUDA, and as plain torch elsewhere or after a failure.

A failure is said aloud once, with its reason; the result is the same.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import torch

F = TypeVar("F", bound=Callable[..., Any])

enabled = True  # --no-compile turns it off
everywhere = False  # compile on the CPU too, for tests
failures: list[str] = []


def _settle() -> None:
    """One compiled version for every shape and method of a run."""
    config: Any = torch._dynamo.config
    for name in ("recompile_limit", "cache_size_limit"):
        if hasattr(config, name):
            setattr(config, name, 256)
    for name in ("accumulated_recompile_limit", "accumulated_cache_size_limit"):
        if hasattr(config, name):
            setattr(config, name, 4096)


def fused(function: F) -> F:
    """``function``, compiled when its first tensor is on CUDA."""
    compiled: list[Any] = [None]

    @functools.wraps(function)
    def call(*args: Any, **keywords: Any) -> Any:
        first = next(a for a in args if isinstance(a, torch.Tensor))
        if not (enabled and (first.is_cuda or everywhere)) or compiled[0] is False:
            return function(*args, **keywords)
        if compiled[0] is None:
            _settle()
            compiled[0] = torch.compile(function, dynamic=False)
        try:
            return compiled[0](*args, **keywords)
        except Exception as error:  # a compiler that is missing or refuses: plain torch gives the same
            compiled[0] = False
            failures.append(
                f"{function.__name__}: {type(error).__name__}: {str(error).splitlines()[0][:200] if str(error) else ''}"
            )
            print(f"not compiled, plain torch instead: {failures[-1]}", file=sys.stderr, flush=True)
            return function(*args, **keywords)

    return call  # type: ignore[return-value]

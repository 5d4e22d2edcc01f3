"""Exponents as symbols of one table by CUDA kernels, in two passes over them."""

from __future__ import annotations

from torch import Tensor

from tersegrad.kernels.cuda import replay, scratch
from tersegrad.kernels.cuda.loader import launch

__all__ = ["exponent_bytes", "exponent_symbols"]

SOURCE = "exponents.cu"
THREADS, BLOCKS = 256, 1056
# As in exponents.cu.
FOUND, PLACES = 2, 5


def _blocks(n: int) -> int:
    return max(1, min(-(-n // (16 * THREADS)), BLOCKS))


def exponent_symbols(exponents: Tensor, symbols: Tensor) -> Tensor:
    return _symbols(exponents.contiguous(), symbols)


@replay.operation
def _symbols(exponents: Tensor, symbols: Tensor) -> Tensor:
    n, (found, _) = exponents.numel(), scratch.kept(exponents.device, 8 * PLACES)
    launch(SOURCE, "exponent_range", _blocks(n), THREADS, exponents, n, found)
    launch(SOURCE, "exponent_symbols", _blocks(n), THREADS, exponents, n, found, symbols)
    return found[FOUND:PLACES]


def exponent_bytes(symbols: Tensor, below: int, out: Tensor) -> None:
    n = symbols.numel()
    launch(SOURCE, "exponent_bytes", _blocks(n), THREADS, symbols.contiguous(), n, below, out)

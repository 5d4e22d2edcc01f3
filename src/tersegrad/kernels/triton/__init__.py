"""Triton kernels for CUDA tensors. Their modules import Triton, so they are imported where they are first used."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = [
    "OPERATIONS",
    "available",
    "share_affine",
    "share_convolution",
    "share_linear_squares",
    "share_norm_squares",
    "share_norm_sums",
]

OPERATIONS = (
    "share_affine",
    "share_convolution",
    "share_linear_squares",
    "share_norm_squares",
    "share_norm_sums",
)


@functools.cache
def available() -> bool:
    """Whether the kernels are there and right on this machine: they are compared once with the reference."""
    if importlib.util.find_spec("triton") is None:
        return False
    try:
        for call in range(2):  # Triton's way, then directly
            _shares().agree(1 + call, "cuda", torch.bfloat16)
            _squares().agree(1 + call, "cuda", torch.bfloat16)
    except Exception as error:
        warnings.warn(f"plain torch instead of the Triton kernels: {type(error).__name__}: {error}", stacklevel=2)
        return False
    return True


@functools.cache
def _shares() -> Any:
    return importlib.import_module("tersegrad.kernels.triton.shares")


@functools.cache
def _squares() -> Any:
    return importlib.import_module("tersegrad.kernels.triton.squares")


def share_convolution(
    x: Tensor,
    delta: Tensor,
    kernel: tuple[int, ...],
    stride: tuple[int, ...],
    dilation: tuple[int, ...],
    padding: tuple[int, ...],
    workers: int,
    bias: bool,
) -> Tensor:
    """Sums and squares of the shares of a convolution's weight; see the schema."""
    found: Tensor = _shares().convolution(x, delta, kernel, stride, dilation, padding, workers, bias)
    return found


def share_norm_sums(x: Tensor, delta: Tensor, mean: Tensor, inverse: Tensor) -> Tensor:
    """Sums of a normalisation's shares; see the schema."""
    found: Tensor = _shares().norm_sums(x, delta, mean, inverse)
    return found


def share_affine(x: Tensor, scale: Tensor, shift: Tensor, delta: Tensor | None = None, factor: Tensor | None = None) -> Tensor:
    """What batch norm and its backward pass do with each worker's part; see the schema."""
    found: Tensor = _shares().affine(x, scale, shift, delta, factor)
    return found


def share_norm_squares(parts: Sequence[tuple[Tensor, Tensor, Tensor, Tensor]]) -> list[tuple[Tensor, Tensor]]:
    """Squares of the shares of normalisations; see the schema."""
    found: list[tuple[Tensor, Tensor]] = _squares().norm(parts)
    return found


def share_linear_squares(parts: Sequence[tuple[Tensor, Tensor]]) -> list[tuple[Tensor, Tensor]]:
    """Squares of the shares of linear layers; see the schema."""
    found: list[tuple[Tensor, Tensor]] = _squares().linear(parts)
    return found

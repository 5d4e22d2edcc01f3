"""Shared dither and codebook rows in C++."""

from __future__ import annotations

import torch
from torch import Tensor

from tersegrad.core.philox import Purpose
from tersegrad.core.protocol import Context
from tersegrad.kernels.native.module import module
from tersegrad.kernels.native.rounding import random_u16
from tersegrad.kernels.reference import drawn as reference
from tersegrad.kernels.reference import sphere

__all__ = [
    "random_rows",
    "sphere_first",
    "sphere_points",
    "sphere_search",
    "subtractive_bins",
    "subtractive_octaves",
    "subtractive_quantise",
    "subtractive_restore",
]


def _draws(ctx: Context, purpose: int) -> tuple[int, int, int, int]:
    return ctx.seed, int(purpose), ctx.step, ctx.buffer << 16 | ctx.sender


def subtractive_bins(ctx: Context, start: int, out: Tensor) -> None:
    module.subtractive_bins(_draws(ctx, Purpose.DITHER), start, out)


def subtractive_octaves(ctx: Context, start: int, out: Tensor) -> None:
    module.subtractive_octaves(_draws(ctx, Purpose.DITHER), start, out)


def subtractive_quantise(x: Tensor, step: float, ctx: Context, start: int, levels: Tensor) -> int | Tensor:
    return int(module.subtractive_quantise(x, step, _draws(ctx, Purpose.DITHER), start, levels))


def subtractive_restore(levels: Tensor, step: float, ctx: Context, start: int, out: Tensor, weight: float | None) -> None:
    if weight is None:
        module.subtractive_restore(levels, step, _draws(ctx, Purpose.DITHER), start, out)
    else:
        module.subtractive_restore_add(levels, step, _draws(ctx, Purpose.DITHER), start, weight, out)


def random_rows(ctx: Context, purpose: int, rows: Tensor, width: int) -> Tensor:
    out = torch.empty(rows.numel() * width, dtype=torch.int32)
    module.random_rows(_draws(ctx, purpose), rows, width, out)
    return out.view(rows.numel(), width)


def sphere_first(book: Tensor, units: Tensor, least: Tensor, start: Tensor) -> Tensor:
    if book.dtype != torch.float32:
        return reference.sphere_first(book, units, least, start)
    first = torch.empty_like(start)
    d, words = book.shape
    module.sphere_first(book.view(-1), words, units.reshape(-1), d, least, start, first)
    return first


def sphere_search(
    ctx: Context,
    x: Tensor,
    scale: Tensor,
    square: Tensor,
    alpha: float,
    probability: float,
    width: int,
    start: int | None,
    table: Tensor,
) -> Tensor:
    return sphere.find(random_u16, sphere_first, ctx, x, scale, square, alpha, probability, width, start, table)


def sphere_points(
    ctx: Context,
    index: Tensor,
    scale: Tensor,
    width: int,
    start: int | None,
    table: Tensor,
    out: Tensor,
    weight: float | None = None,
) -> None:
    sphere.restore(random_u16, random_rows, ctx, index, scale, width, start, table, out, weight)

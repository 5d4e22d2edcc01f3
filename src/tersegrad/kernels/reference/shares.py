"""Sums and sums of squares of per-sample gradients in plain torch, one sample at a time: the definition.

Exact in float64 where the fast kernels accumulate in float32; the rules of ``moments`` have their own, faster way in plain torch.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["share_affine", "share_convolution", "share_linear_squares", "share_norm_squares", "share_norm_sums"]


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
    weight = torch.zeros(delta.shape[1], x.shape[1], *kernel, dtype=torch.float64, device=x.device)
    options = (list(stride), list(padding), list(dilation), False, [0, 0], 1, [False, True, False])
    rows = []
    for one, d in zip(x.double(), delta.double()):
        _, share, _ = torch.ops.aten.convolution_backward(d[None], one[None], weight, None, *options)
        parts = [share.permute(0, 2, 3, 1).flatten()]
        rows.append(torch.cat([*parts, d.sum((1, 2))] if bias else parts))
    shares = torch.stack(rows).unflatten(0, (workers, -1))
    return torch.stack((shares.sum(1), shares.square().sum(1)), 1).float()


def share_norm_sums(x: Tensor, delta: Tensor, mean: Tensor, inverse: Tensor) -> Tensor:
    """Sums of a normalisation's shares; see the schema."""
    samples, channels = x.shape[:2]
    each = samples * channels // mean.numel()
    # One row of statistics per worker, for each of the worker's samples.
    centre, scale = (
        t.reshape(-1, 1, channels).expand(-1, each, -1).reshape(samples, channels).double() for t in (mean, inverse)
    )
    d, places = delta.double().reshape(samples, channels, -1), x.double().reshape(samples, channels, -1)
    sums = torch.stack(((d * (places - centre[:, :, None])).sum(2) * scale, d.sum(2)))
    return torch.cat((sums, sums.square())).float()


def share_affine(x: Tensor, scale: Tensor, shift: Tensor, delta: Tensor | None = None, factor: Tensor | None = None) -> Tensor:
    """What batch norm and its backward pass do with each worker's part; see the schema."""
    workers = scale.numel() // x.shape[1]
    a, b, f = (None if t is None else t.reshape(workers, 1, -1, *[1] * (x.ndim - 2)) for t in (scale, shift, factor))
    assert a is not None
    assert b is not None
    out, parts = torch.empty_like(x), x.unflatten(0, (workers, -1))
    place = out.unflatten(0, (workers, -1))
    if delta is None or f is None:
        torch.addcmul(b, parts, a, out=place)
    else:
        torch.addcmul(torch.addcmul(b, parts, a), delta.unflatten(0, (workers, -1)), f, out=place)
    return out


def share_norm_squares(parts: Sequence[tuple[Tensor, Tensor, Tensor, Tensor]]) -> list[tuple[Tensor, Tensor]]:
    """Squares of the shares of normalisations; see the schema."""
    found = (share_norm_sums(*part).sum(1) for part in parts)
    return [(scale, shift) for _, _, scale, shift in found]


def share_linear_squares(parts: Sequence[tuple[Tensor, Tensor]]) -> list[tuple[Tensor, Tensor]]:
    """Squares of the shares of linear layers; see the schema."""
    squared = ((x.double().square(), delta.double().square()) for x, delta in parts)
    return [((d.T @ x).float(), d.sum(0).float()) for x, d in squared]

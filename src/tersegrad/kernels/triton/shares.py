# mypy: ignore-errors
"""Sums and sums of squares of per-sample gradients, without ever storing one.

``convolution``: a program owns a tile of the weight and walks through the samples of one worker; a sample's tile of the weight
gradient is accumulated in float32 registers, added to the sum, squared and added to the squares. The bias is one more column of
the weight, against an input of ones. ``norm_sums``: per sample and channel, the sums of delta * xhat and of delta.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _convolution(
    x, delta, out, height, width, samples_each, stride_y, stride_x, dilation_y, dilation_x, pad_y, pad_x, half,
    C: tl.constexpr, O: tl.constexpr, KW: tl.constexpr, K: tl.constexpr, OW: tl.constexpr, L: tl.constexpr,
    BIAS: tl.constexpr, BO: tl.constexpr, BK: tl.constexpr, BL: tl.constexpr,
):  # fmt: skip
    o = tl.program_id(1) * BO + tl.arange(0, BO)
    k = tl.program_id(0) * BK + tl.arange(0, BK)
    group = tl.program_id(2).to(tl.int64)
    ky = k // (KW * C)
    kx = k // C % KW
    c = k % C
    inside = k < K
    at_y = ky * dilation_y - pad_y
    at_x = kx * dilation_x - pad_x
    first = group * samples_each
    total = tl.zeros((BO, BK), tl.float32)
    squares = tl.zeros((BO, BK), tl.float32)
    share = tl.zeros((BO, BK), tl.float32)
    STEPS: tl.constexpr = (L + BL - 1) // BL
    for step in range(samples_each * STEPS):
        z = first + step // STEPS
        place = step % STEPS * BL + tl.arange(0, BL)
        within = place < L
        d = tl.load(delta + (z * L + place[:, None]) * O + o[None, :], mask=within[:, None] & (o < O)[None, :], other=0.0)
        y = (place // OW * stride_y)[:, None] + at_y[None, :]
        w = (place % OW * stride_x)[:, None] + at_x[None, :]
        ok = within[:, None] & inside[None, :] & (y >= 0) & (y < height) & (w >= 0) & (w < width)
        u = tl.load(x + ((z * height + y) * width + w) * C + c[None, :], mask=ok, other=0.0)
        if BIAS:
            u = tl.where((k == K)[None, :] & within[:, None], 1.0, u).to(d.dtype)
        share = tl.dot(tl.trans(d), u, share)
        if step % STEPS == STEPS - 1:
            total += share
            squares += share * share
            share = tl.zeros((BO, BK), tl.float32)
    row = out + group * (O * K + (O if BIAS else 0))
    spot = o[:, None] * K + k[None, :]
    keep = (o < O)[:, None] & inside[None, :]
    tl.store(row + spot, total, mask=keep)
    tl.store(row + half + spot, squares, mask=keep)
    if BIAS:
        spot = O * K + o[:, None] + 0 * k[None, :]
        keep = (o < O)[:, None] & (k == K)[None, :]
        tl.store(row + spot, total, mask=keep)
        tl.store(row + half + spot, squares, mask=keep)


def convolution(
    x: Tensor,
    delta: Tensor,
    kernel: Sequence[int],
    stride: Sequence[int],
    dilation: Sequence[int],
    padding: Sequence[int],
    workers: int,
    bias: bool,
) -> Tensor:
    """(2, workers, o * k [+ o]) float32: sums, then squares; a worker's row is the weight as (o, y, x, i), then the bias.

    ``x`` (samples, i, height, width) and ``delta`` (samples, o, ...) are channels-last, bfloat16 or float16.
    """
    samples, c, height, width = x.shape
    o, places = delta.shape[1], delta.shape[2] * delta.shape[3]
    k = kernel[0] * kernel[1] * c
    columns = k + bias
    bo = 64 if o <= 64 else 128
    bk = 32 if columns <= 32 else 64
    bl = 64 if places >= 64 else 32
    tiles = triton.cdiv(columns, bk) * triton.cdiv(o, bo) * workers
    part = samples // workers
    splits = 1
    while tiles * splits < 264 and part % (2 * splits) == 0:
        splits *= 2
    row = o * k + (o if bias else 0)
    out = torch.empty((2, workers, splits, row), dtype=torch.float32, device=x.device)
    grid = (triton.cdiv(columns, bk), triton.cdiv(o, bo), workers * splits)
    _convolution[grid](
        x, delta, out, height, width, part // splits, *stride, *dilation, *padding, workers * splits * row,
        C=c, O=o, KW=kernel[1], K=k, OW=delta.shape[3], L=places, BIAS=bias, BO=bo, BK=bk, BL=bl,
        num_warps=8 if bo == 128 else 4, num_stages=3,
    )  # fmt: skip
    return out.sum(2) if splits > 1 else out.squeeze(2)


@triton.jit
def _norm_sums(x, delta, mean, inverse, out, part, half, C: tl.constexpr, L: tl.constexpr, BC: tl.constexpr, BL: tl.constexpr):
    z = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    real = c < C
    worker = z // part
    m = tl.load(mean + worker * C + c, mask=real, other=0.0)
    i = tl.load(inverse + worker * C + c, mask=real, other=0.0)
    by_scale = tl.zeros((BC,), tl.float32)
    by_shift = tl.zeros((BC,), tl.float32)
    for low in range(0, L, BL):
        place = low + tl.arange(0, BL)
        mask = (place < L)[:, None] & real[None, :]
        spot = (z * L + place[:, None]) * C + c[None, :]
        d = tl.load(delta + spot, mask=mask, other=0.0).to(tl.float32)
        v = tl.load(x + spot, mask=mask, other=0.0).to(tl.float32)
        by_scale += tl.sum(d * (v - m[None, :]), 0)
        by_shift += tl.sum(d, 0)
    tl.store(out + z * C + c, by_scale * i, mask=real)
    tl.store(out + half + z * C + c, by_shift, mask=real)


def norm_sums(x: Tensor, delta: Tensor, mean: Tensor, inverse: Tensor) -> Tensor:
    """(2, samples, channels) float32: sums over positions of delta * (x - mean) * inverse, and of delta.

    ``x`` and ``delta`` are channels-last (or have no positions); the statistics are (workers, channels), one row a worker.
    """
    samples, c = x.shape[:2]
    places = x[0, 0].numel()
    out = torch.empty((2, samples, c), dtype=torch.float32, device=x.device)
    block = min(64, triton.next_power_of_2(c))
    part = samples * c // mean.numel()
    _norm_sums[(samples, triton.cdiv(c, block))](
        x, delta, mean, inverse, out, part, samples * c, C=c, L=places, BC=block, BL=min(64, triton.next_power_of_2(places))
    )
    return out


def check() -> None:
    """Raise unless both kernels agree with plain torch here, on shapes with a rest in every tile."""
    generator = torch.Generator("cuda").manual_seed(1)

    def made(*shape: int) -> Tensor:
        drawn = torch.randn(shape, generator=generator, device="cuda", dtype=torch.bfloat16)
        return drawn.to(memory_format=torch.channels_last)

    for samples, c, o, height, width, stride, dilation, padding in ((6, 5, 70, 9, 8, 2, 1, 1), (4, 64, 130, 8, 10, 1, 2, 2)):
        x = made(samples, c, height, width)
        weight = torch.zeros(o, c, 3, 2, device="cuda")
        out = torch.nn.functional.conv2d(x.float(), weight, None, stride, padding, dilation)
        delta = made(*out.shape)
        sums, squares = convolution(x, delta, (3, 2), (stride,) * 2, (dilation,) * 2, (padding,) * 2, 2, True)
        rows = []
        for z in range(samples):
            options = ([stride] * 2, [padding] * 2, [dilation] * 2, False, [0, 0], 1, [False, True, False])
            one = torch.ops.aten.convolution_backward(
                delta[z : z + 1].double(), x[z : z + 1].double(), weight.double(), None, *options
            )
            rows.append(torch.cat([one[1].permute(0, 2, 3, 1).flatten(), delta[z].double().sum((1, 2))]))
        shares = torch.stack(rows).unflatten(0, (2, -1))
        _agree("convolution", sums, shares.sum(1))
        _agree("squares of a convolution", squares, shares.square().sum(1))
        mean, inverse = (torch.rand((2, c), generator=generator, device="cuda") + 0.5 for _ in range(2))
        d = made(*x.shape)
        by_sample = mean.repeat_interleave(samples // 2, 0)[:, :, None, None]
        expected = (d.double() * (x.double() - by_sample)).sum((2, 3)) * inverse.repeat_interleave(samples // 2, 0)
        _agree("norm", norm_sums(x, d, mean, inverse), torch.stack([expected, d.double().sum((2, 3))]))


def _agree(what: str, found: Tensor, expected: Tensor) -> None:
    error = float((found - expected).norm() / expected.norm())
    if not error < 1e-4:
        raise ArithmeticError(f"{what} is off by {error:.2g}")

"""Norms, draws and the block quantisers by themselves: the speed of reading, and what randomness costs."""

from __future__ import annotations

import torch

from benchmarks.cases.inputs import gaussian
from benchmarks.registry import Work, benchmark, refuse_unless
from tersegrad.core.philox import Purpose
from tersegrad.core.protocol import Context
from tersegrad.kernels import native, reference


@benchmark("norms")
def norms(numel: int) -> Work:
    x = gaussian(numel)

    def verify() -> None:
        exact = float(x.double().square().sum())
        refuse_unless(abs(float(native.sum_squares(x)) - exact) <= 1e-9 * exact, "the sum of squares is wrong")
        refuse_unless(float(native.abs_max(x)) == float(x.abs().max()), "the largest magnitude is wrong")

    verify()
    bodies = {
        "sum of squares": lambda: native.sum_squares(x),
        "sum of magnitudes": lambda: native.sum_abs(x),
        "largest magnitude": lambda: native.abs_max(x),
        "largest magnitudes of 512": lambda: native.block_abs_max(x, 512),
    }
    return Work(bodies, 4 * numel, verify)


@benchmark("philox, 16 bits per coordinate", numel=16 << 20)
def draws(numel: int) -> Work:
    ctx = Context(seed=1)

    def verify() -> None:
        expected = reference.random_u16(ctx, Purpose.TEST, 1000, 5000)
        refuse_unless(torch.equal(native.random_u16(ctx, Purpose.TEST, 1000, 5000), expected), "the draws are wrong")

    verify()
    return Work({"draw": lambda: native.random_u16(ctx, Purpose.TEST, 0, numel)}, 4 * numel, verify)

"""The simple codecs and the rotation: bit packing, trits and Walsh-Hadamard, 4 bytes counted for a code or coordinate."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from benchmarks.cases.inputs import gaussian
from benchmarks.registry import Body, Fact, Work, benchmark, refuse_unless
from tersegrad import kernels
from tersegrad.bench.clock import touched
from tersegrad.codecs import bitpack, elias, rice, trits
from tersegrad.core.protocol import Context

for width in (1, 2, 3, 4, 8):

    @benchmark(f"bit packing/{width} bit")
    def packing(numel: int, width: int = width) -> Work:
        codes = torch.randint(1 << width, (numel,), dtype=torch.uint8, generator=torch.Generator().manual_seed(width))
        packed, unpacked = touched(bitpack.nbytes(numel, width)), touched(numel)
        bodies: dict[str, Body] = {
            "pack": lambda: bitpack.pack(codes, width, out=packed),
            "unpack": lambda: bitpack.unpack(packed, width, numel, out=unpacked),
        }
        for body in bodies.values():
            body()

        def verify() -> None:
            refuse_unless(torch.equal(unpacked, codes), "packed codes do not come back")

        verify()
        return Work(bodies, 4 * numel, verify)


@benchmark("trits")
def trit_packing(numel: int) -> Work:
    codes = torch.randint(3, (numel,), dtype=torch.uint8, generator=torch.Generator().manual_seed(3))
    packed, unpacked = touched(trits.nbytes(numel)), touched(numel)
    bodies: dict[str, Body] = {
        "pack": lambda: trits.pack(codes, out=packed),
        "unpack": lambda: trits.unpack(packed, numel, out=unpacked),
    }
    for body in bodies.values():
        body()

    def verify() -> None:
        refuse_unless(torch.equal(unpacked, codes), "packed trits do not come back")

    verify()
    return Work(bodies, 4 * numel, verify)


def integers(numel: int) -> Tensor:
    """Gaps of a random set that holds one number in a hundred: geometric, from 1."""
    uniform = torch.rand(numel, generator=torch.Generator().manual_seed(5)).clamp_(min=1e-7)
    return uniform.log_().div_(math.log(0.99)).floor_().long() + 1


@benchmark("elias gamma", numel=4 << 20)
def elias_gamma(numel: int) -> Work:
    values = integers(numel)
    data = elias.encode(values)

    def verify() -> None:
        refuse_unless(torch.equal(elias.decode(data, numel)[0], values), "Elias codes do not come back")

    verify()
    bodies: dict[str, Body] = {"encode": lambda: elias.encode(values), "decode": lambda: elias.decode(data, numel)}
    return Work(bodies, 4 * numel, verify, {"bits per number": Fact(8 * data.numel() / numel, "bits")})


@benchmark("rice", numel=4 << 20)
def rice_code(numel: int) -> Work:
    values = integers(numel) - 1
    k = rice.best_k(values)
    data = rice.encode(values, k)

    def verify() -> None:
        refuse_unless(torch.equal(rice.decode(data, numel, k)[0], values), "Rice codes do not come back")

    verify()
    bodies: dict[str, Body] = {"encode": lambda: rice.encode(values, k), "decode": lambda: rice.decode(data, numel, k)}
    return Work(bodies, 4 * numel, verify, {"bits per number": Fact(8 * data.numel() / numel, "bits")})


@benchmark("walsh-hadamard/blocks of 4096")
def rotation(numel: int) -> Work:
    x, ctx, block = gaussian(numel), Context(seed=1), 4096
    turned, back = torch.ones_like(x), torch.ones_like(x)
    ops = kernels.get(x.device)
    bodies: dict[str, Body] = {
        "rotate": lambda: ops.rotate(x, turned, block, ctx),
        "unrotate": lambda: ops.unrotate(turned, back, block, ctx),
    }
    for body in bodies.values():
        body()

    def verify() -> None:
        refuse_unless(torch.allclose(back, x, rtol=1e-5, atol=1e-5), "the rotation is not undone")
        same = torch.isclose(turned.double().square().sum(), x.double().square().sum(), rtol=1e-5)
        refuse_unless(bool(same), "the rotation changes the length")

    verify()
    return Work(bodies, 4 * numel, verify)

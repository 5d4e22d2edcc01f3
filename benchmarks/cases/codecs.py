"""The simple codecs and the rotation: bit packing, trits and Walsh-Hadamard, 4 bytes counted for a code or coordinate."""

from __future__ import annotations

import torch

from benchmarks.cases.inputs import gaussian
from benchmarks.registry import Body, Work, benchmark, refuse_unless
from tersegrad import kernels
from tersegrad.bench.clock import touched
from tersegrad.codecs import bitpack, trits
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

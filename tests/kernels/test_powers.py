"""Signs and powers of two: both backends write and read the same bits, odd ends and hostile numbers included."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from tersegrad.kernels import native, reference


def vectors(numel: int) -> dict[str, Tensor]:
    x = torch.randn(numel, generator=torch.Generator().manual_seed(numel))
    levels = torch.tensor([0.75, 1.5, 1.0, 2.0**-7, 0.0078124, -0.0, 3.0, 2.0**-8])
    spread = x * 2.0 ** (20 * x.roll(1))
    special = x.clone()
    special[:: max(1, numel // 3)] = math.inf
    return {
        "normal": x,
        "borders": levels.repeat(numel // 8 + 1)[:numel].contiguous(),
        "spread": spread,
        "tiny": x * 2.0**-121,
        "denormal": x * 2.0**-140,
        "huge": x.clamp(-1, 1) * 3.4e38,
        "zero": torch.zeros(numel),
        "infinite": special,
    }


@pytest.mark.parametrize("numel", [1, 7, 8, 255, 256, 1001, 70_001])
@pytest.mark.parametrize("block", [8, 64, 256])
def test_backends_agree(numel: int, block: int) -> None:
    sizes = 4 * -(-numel // block), -(-numel // 2)
    for name, x in vectors(numel).items():
        expected = [torch.full((size,), 255, dtype=torch.uint8) for size in sizes]
        reference.powers_encode(x, block, expected[0], expected[1])
        dense, added = torch.full((numel,), 7.0), torch.arange(numel, dtype=torch.float32)
        reference.powers_decode(expected[0], expected[1], block, dense)
        reference.powers_decode(expected[0], expected[1], block, added, -0.3)
        assert bool(dense.isnan().all()) == (name == "infinite")
        for isa in native.supported_isas():
            with native.using(isa=isa, threads=1 + (isa == "portable")):
                found = [torch.full((size,), 255, dtype=torch.uint8) for size in sizes]
                native.powers_encode(x, block, found[0], found[1])
                assert all(torch.equal(a, b) for a, b in zip(found, expected)), (name, isa)
                theirs, more = torch.full((numel,), 7.0), torch.arange(numel, dtype=torch.float32)
                native.powers_decode(found[0], found[1], block, theirs)
                native.powers_decode(found[0], found[1], block, more, -0.3)
                for a, b in ((theirs, dense), (more, added)):
                    assert torch.equal(a.isnan(), b.isnan())
                    assert torch.equal(a.nan_to_num(0).view(torch.int32), b.nan_to_num(0).view(torch.int32)), (name, isa)


def test_any_bytes_are_read_alike() -> None:
    """Negative and huge scales, and codes that no encoder writes."""
    numel, block = 1003, 64
    generator = torch.Generator().manual_seed(3)
    scales = torch.randn(-(-numel // block), generator=generator) * 3e38
    scales = scales.clamp(-3.4028234e38, 3.4028234e38)
    codes = torch.randint(0, 256, (-(-numel // 2),), generator=generator, dtype=torch.uint8)
    outs = [torch.empty(numel) for _ in range(2)]
    reference.powers_decode(scales.view(torch.uint8), codes, block, outs[0])
    native.powers_decode(scales.view(torch.uint8), codes, block, outs[1])
    assert torch.equal(outs[0].view(torch.int32), outs[1].view(torch.int32))

"""Index sets: bits per index against log2 C(d, k) / k, the least that names a random set."""

from __future__ import annotations

import torch

from benchmarks.registry import Fact, Work, benchmark, refuse_unless
from tersegrad import theory
from tersegrad.codecs import index

DENSITIES = (1e-4, 1e-3, 0.01, 0.03, 0.1, 0.2, 0.3)

for density in DENSITIES:

    @benchmark(f"index set/density {density:g}", numel=1 << 20, targets={"above log2 C(d,k)/k": 0.1}, shrinks=False)
    def index_set(numel: int, density: float = density) -> Work:
        k = round(density * numel)
        generator = torch.Generator().manual_seed(k)
        indices = torch.randperm(numel, generator=generator)[:k].sort().values.int()
        message = index.encode(indices, numel).clone()
        decoded, used = index.decode(message, k, numel)

        def verify() -> None:
            refuse_unless(
                used == message.numel() and torch.equal(decoded.long(), indices.long()), "the index set is not decoded"
            )

        verify()
        excess = (8 * message.numel() - theory.log2_binomial(numel, k)) / k
        return Work({}, 4 * k, verify, {"above log2 C(d,k)/k": Fact(excess, "bits per index")})

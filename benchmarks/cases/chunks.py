"""SparseLoCo's message of a pseudo-gradient of 25 MB, the size of one of DistributedDataParallel's buckets."""

from __future__ import annotations

import torch

from benchmarks.cases.inputs import gaussian
from benchmarks.registry import Fact, Work, benchmark, refuse_unless
from tersegrad import recipes
from tersegrad.bench.clock import touched
from tersegrad.core.protocol import Context, Message, Piece, Spec

COLUMNS, TILE, KEPT = 1024, 64, 64


def work_of(numel: int) -> Work:
    """A matrix, with the residual of the round before; checked tile by tile."""
    x, compressor, ctx = gaussian(numel), recipes.parse("sparse_loco"), Context(seed=1)
    rows = numel // COLUMNS
    spec = Spec((Piece((rows, COLUMNS), 0, numel, "weight"),))
    _, state = compressor.encode(x.flip(0), spec, compressor.init(spec, x.device), ctx)
    buffer, target = touched(compressor.max_nbytes(spec)), torch.ones_like(x)
    first, after = compressor.encode(x, spec, state, ctx)
    message = Message(first.payload.clone(), int(first.nbytes))
    expected = compressor.decode(message, spec, ctx)
    tiles = expected.view(rows // TILE, TILE, COLUMNS // TILE, TILE).transpose(1, 2).flatten(2)
    refuse_unless(bool((tiles.count_nonzero(2) == KEPT).all()), f"a tile does not send {KEPT} values")
    fed = state.residual * torch.tensor(0.95) + x
    refuse_unless(torch.equal(fed - expected, after.residual), "what is left is not what was not sent")

    def verify() -> None:
        refuse_unless(torch.equal(buffer[: int(message.nbytes)], message.payload), "other bytes when run again")
        refuse_unless(torch.equal(target, expected), "decoded to other values when run again")

    bodies = {
        "encode": lambda: compressor.encode(x, spec, state, ctx, out=buffer),
        "decode": lambda: compressor.decode(message, spec, ctx, out=target),
    }
    for body in bodies.values():
        body()
    verify()
    sent = tiles.shape[0] * tiles.shape[1] * KEPT
    return Work(bodies, 4 * numel, verify, {"bits per sent value": Fact(8 * int(message.nbytes) / sent, "bits")})


for isa in ("avx512", "avx2"):
    best = isa == "avx512"
    targets = {"encode": 0.3, "decode": 0.8, "bits per sent value": 9.0}

    @benchmark(f"sparse_loco, a matrix of 25 MB/{isa}", numel=100 << 16, isa=isa, targets=targets if best else {})
    def sparse_loco(numel: int) -> Work:
        return work_of(numel - numel % (TILE * COLUMNS) if numel >= TILE * COLUMNS else TILE * COLUMNS)

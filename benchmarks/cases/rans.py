"""Interleaved rANS: speed with 4 bytes counted for a symbol (the float32 it stands for), and size against the entropy."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from benchmarks.cases.inputs import gaussian
from benchmarks.registry import Body, Fact, Work, benchmark, refuse_unless
from tersegrad.bench.clock import touched
from tersegrad.codecs import rans

SYMBOLS = (3, 16, 32, 64)


@functools.lru_cache(maxsize=1)
def quantised(numel: int, alphabet: int) -> Tensor:
    """Gaussian samples rounded to ``alphabet`` levels over +-4: the symbols of a uniform quantiser."""
    step = 8 / alphabet if alphabet > 3 else 1.4  # three levels: -1, 0, 1 with about half zeros
    middle = alphabet // 2 + 0.5 * (alphabet % 2)
    return gaussian(numel).div(step).add_(middle).floor_().clamp_(0, alphabet - 1).to(torch.uint8)


def entropy(symbols: Tensor, alphabet: int) -> float:
    """Empirical entropy in bits per symbol."""
    p = torch.bincount(symbols, minlength=alphabet).double() / symbols.numel()
    p = p[p > 0]
    return float(-(p * p.log2()).sum())


def work_of(numel: int, alphabet: int, chunk: rans.Chunk = "auto") -> Work:
    """Encode (histogram included) and decode of ``numel`` symbols."""
    symbols = quantised(numel, alphabet)
    buffer, target = touched(rans.max_nbytes(numel, alphabet)), touched(numel)
    message = rans.encode(symbols, alphabet, chunk=chunk).clone()

    def verify() -> None:
        refuse_unless(torch.equal(buffer[: message.numel()], message), "rANS writes other bytes when run again")
        refuse_unless(torch.equal(target, symbols), "rANS does not decode to the symbols")

    bodies: dict[str, Body] = {
        "encode": lambda: rans.encode(symbols, alphabet, chunk=chunk, out=buffer),
        "decode": lambda: rans.decode(message, numel, alphabet, out=target),
    }
    for body in bodies.values():
        body()
    verify()
    excess = 8 * message.numel() / numel - entropy(symbols, alphabet)
    return Work(bodies, 4 * numel, verify, {"above entropy": Fact(excess, "bits per symbol")})


for isa in ("avx512", "avx2"):
    for alphabet in SYMBOLS:
        fast = {"avx512": (0.7, 0.8), "avx2": (0.25, 0.2)}[isa]
        targets = {"encode": fast[0], "decode": fast[1]} if alphabet <= 32 else {}

        @benchmark(f"rans/{alphabet} symbols/{isa}", isa=isa, targets=targets)
        def rans_speed(numel: int, alphabet: int = alphabet) -> Work:
            return work_of(numel, alphabet)


# Chunks that many cores of a GPU read at once cost bits, long ones nothing.
CHUNKS: tuple[tuple[rans.Chunk, float], ...] = (("auto", 0.02), (18, 0.015))
for chunk, most in CHUNKS:
    for alphabet in (3, 16, 64):

        @benchmark(
            f"rans/{alphabet} symbols, chunk={chunk}/size at 1 Mi",
            numel=1 << 20,
            targets={"above entropy": most},
            shrinks=False,
        )
        def rans_size(numel: int, alphabet: int = alphabet, chunk: rans.Chunk = chunk) -> Work:
            work = work_of(numel, alphabet, chunk)
            return Work({}, work.nbytes, work.verify, work.facts)

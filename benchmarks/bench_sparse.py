"""Speed of the sparse compressors as ratios to memmove of the same bytes, alternating in one run (medians).

    python benchmarks/bench_sparse.py [--numel 67108864] [--threads 1] [--repeat 7]

Every output is checked before it is timed.
"""

from __future__ import annotations

import argparse
import ctypes
import math
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

from tersegrad.codecs import index
from tersegrad.compressors.random_k import RandomK
from tersegrad.compressors.threshold import Threshold
from tersegrad.compressors.top_k import TopK
from tersegrad.core.protocol import Context, Message, Spec
from tersegrad.kernels import native


def seconds(function: Callable[[], object]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def ratio(function: Callable[[], object], x: Tensor, copy: Tensor, repeat: int) -> tuple[float, float]:
    """Median speed relative to memmove, and in GB/s."""
    times, moves = [], []
    for _ in range(repeat + 1):
        moves.append(seconds(lambda: ctypes.memmove(copy.data_ptr(), x.data_ptr(), x.numel() * 4)))
        times.append(seconds(function))
    moved, took = statistics.median(moves[1:]), statistics.median(times[1:])
    return moved / took, x.numel() * 4 / took / 1e9


def log2_choose(n: int, k: int) -> float:
    return (math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)) / math.log(2)


def report(name: str, compressor: TopK | RandomK | Threshold, x: Tensor, copy: Tensor, repeat: int) -> None:
    spec, ctx = Spec.flat(x.numel()), Context(seed=1)
    buffer = torch.zeros(compressor.max_nbytes(spec), dtype=torch.uint8)
    message, _ = compressor.encode(x, None, ctx, out=buffer)
    sent = Message(message.payload.clone(), int(message.nbytes))
    out = torch.zeros_like(x)
    compressor.decode(sent, spec, ctx, out)
    total = torch.zeros_like(x)
    compressor.decode_add(sent, spec, ctx, total, 0.5)
    assert torch.equal(total, out * 0.5), "decode_add disagrees with decode"
    if isinstance(compressor, TopK) and compressor.exact and compressor.values == "float32":
        kept = out != 0
        assert torch.equal(out[kept], x[kept]), "a sent value changed"
        rest = x[~kept].abs().max() if not bool(kept.all()) else torch.tensor(0.0)
        assert not bool(kept.any()) or out[kept].abs().min() >= rest, "a larger coordinate was left out"
    figures = [
        ratio(lambda: compressor.encode(x, None, ctx, out=buffer), x, copy, repeat),
        ratio(lambda: compressor.decode(sent, spec, ctx, out), x, copy, repeat),
        ratio(lambda: compressor.decode_add(sent, spec, ctx, out, 0.5), x, copy, repeat),
    ]
    text = "  ".join(f"{r:6.3f} ({g:6.2f} GB/s)" for r, g in figures)
    print(f"{name:28s} {8 * sent.nbytes / x.numel():8.4f} bit/coord   encode, decode, decode_add: {text}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--numel", type=int, default=1 << 26)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--isa", default=None)
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("--only", default="")
    arguments = parser.parse_args()
    d = arguments.numel
    generator = torch.Generator().manual_seed(0)
    gaussian = torch.randn(d, generator=generator)
    zeros = torch.where(torch.rand(d, generator=generator) < 0.005, gaussian, torch.zeros(()))
    ties = torch.where(zeros == 0, torch.ones(()), gaussian * 10)
    copy = torch.zeros(d)
    torch.set_num_threads(arguments.threads)
    with native.using(isa=arguments.isa, threads=arguments.threads):
        print(f"{d} float32, {native.isa()}, {native.threads()} thread(s)")
        cases: list[tuple[str, TopK | RandomK | Threshold, Tensor]] = [
            ("top_k 1% gaussian", TopK(fraction=0.01), gaussian),
            ("top_k 1% 99.5% zeros", TopK(fraction=0.01), zeros),
            ("top_k 1% 99.5% ones", TopK(fraction=0.01), ties),
            ("top_k 1% estimate", TopK(fraction=0.01, exact=False), gaussian),
            ("top_k 1% bf16", TopK(fraction=0.01, values="bf16"), gaussian),
            ("top_k 0.1% gaussian", TopK(fraction=0.001), gaussian),
            ("top_k 10% gaussian", TopK(fraction=0.1), gaussian),
            ("random_k 1%", RandomK(fraction=0.01), gaussian),
            ("threshold 2.576", Threshold(tau=2.5758), gaussian),
            ("threshold 2.576 sign", Threshold(tau=2.5758, values="sign"), gaussian),
        ]
        for name, compressor, x in cases:
            if arguments.only in name:
                report(name, compressor, x, copy, arguments.repeat)
        if not arguments.only:
            k = max(1, d // 100)
            indices = TopK(k=k)._select(gaussian)[0]
            data = index.encode(indices, d)
            assert torch.equal(index.decode(data, k, d)[0], indices)
            buffer = torch.zeros(index.max_nbytes(k, d), dtype=torch.uint8)
            for name, function in (
                ("encode", lambda: index.encode(indices, d, buffer)),
                ("decode", lambda: index.decode(data, k, d)),
            ):
                took = statistics.median(seconds(function) for _ in range(arguments.repeat))
                print(f"index set {name}: {took / k * 1e9:.2f} ns an index")
            print(f"index set: {8 * data.numel() / k - log2_choose(d, k) / k:.4f} bit an index above log2 C(d, k) / k")


if __name__ == "__main__":
    main()

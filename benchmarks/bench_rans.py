"""Speed and size of the rANS codec: rounded Gaussian symbols, ratio to C memmove of four bytes a symbol in the same run.

python benchmarks/bench_rans.py [--count 67108864] [--isa avx512] [--threads 1] [--alphabets 3,16,32,64] [--contexts step]
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
import time
from collections.abc import Callable

import torch

from tersegrad.codecs import rans
from tersegrad.kernels import native

STEPS = {2: 3.0, 3: 1.5, 4: 1.5, 8: 0.9, 16: 0.5, 32: 0.25, 64: 0.125, 128: 0.06, 256: 0.03}


def gaussian(count: int, alphabet: int) -> torch.Tensor:
    """Rounded Gaussian samples whose tails just reach the ends of the alphabet."""
    generator = torch.Generator().manual_seed(alphabet)
    part = torch.randn(min(count, 1 << 22), generator=generator)
    symbols = (torch.round(part / STEPS[alphabet]) + alphabet // 2).clamp(0, alphabet - 1).to(torch.uint8)
    return symbols.repeat(-(-count // symbols.numel()))[:count].contiguous()


def timed(action: Callable[[], object]) -> float:
    begin = time.perf_counter()
    action()
    return time.perf_counter() - begin


def entropy(symbols: torch.Tensor) -> float:
    p = torch.bincount(symbols.int()).double() / symbols.numel()
    return float(-(p * p.clamp_min(1e-300).log2()).sum())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=1 << 26)
    parser.add_argument("--isa", default=native.isa())
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--alphabets", default="3,16,32,64")
    parser.add_argument("--contexts", choices=["none", "step", "symbol"], default="none")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    count = args.count
    source, target = torch.ones(count), torch.ones(count)
    memmove = ctypes.CDLL(None).memmove
    memmove.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
    loops = max(1, (1 << 24) // count)

    def copy() -> None:
        for _ in range(loops):
            memmove(target.data_ptr(), source.data_ptr(), 4 * count)

    print(f"{args.isa}, {args.threads} thread(s), {count} symbols, contexts: {args.contexts}; GB/s counts four bytes a symbol")
    print("alphabet  memmove GB/s  encode GB/s (ratio)  decode GB/s (ratio)  bits/symbol  above entropy")
    with native.using(isa=args.isa, threads=args.threads):
        for alphabet in map(int, args.alphabets.split(",")):
            symbols = gaussian(count, alphabet)
            contexts, tables = None, 1
            if args.contexts != "none":
                tables = 2
                size = -(-count // 64) if args.contexts == "step" else count
                contexts = torch.randint(0, tables, (size,), dtype=torch.uint8)
            room = torch.ones(rans.max_nbytes(count, alphabet), dtype=torch.uint8)
            decoded = torch.ones(count, dtype=torch.uint8)
            data = rans.encode(symbols, alphabet, contexts, tables, out=room)

            def encode(
                symbols: torch.Tensor = symbols,
                alphabet: int = alphabet,
                contexts: torch.Tensor | None = contexts,
                tables: int = tables,
                room: torch.Tensor = room,
            ) -> None:
                for _ in range(loops):
                    rans.encode(symbols, alphabet, contexts, tables, out=room)

            def decode(
                data: torch.Tensor = data,
                alphabet: int = alphabet,
                contexts: torch.Tensor | None = contexts,
                tables: int = tables,
                decoded: torch.Tensor = decoded,
            ) -> None:
                for _ in range(loops):
                    rans.decode(data, count, alphabet, contexts, tables, out=decoded)

            decode()
            if not torch.equal(decoded, symbols):
                raise SystemExit("the output is wrong: not timed")
            times = [(timed(copy), timed(encode), timed(decode)) for _ in range(args.rounds)]
            m, e, d = (4e-9 * count * loops / statistics.median(column) for column in zip(*times))
            bits = 8 * data.numel() / count
            above = bits - entropy(symbols)
            print(f"{alphabet:8d} {m:13.2f} {e:12.2f} ({e / m:.2f}) {d:13.2f} ({d / m:.2f}) {bits:12.4f} {above:14.4f}")


if __name__ == "__main__":
    main()

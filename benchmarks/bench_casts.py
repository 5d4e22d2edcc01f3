"""Speed of the fixed-rate casts as a ratio to memmove of the same float32 bytes, alternating, medians.

python benchmarks/bench_casts.py [--elements 67108864] [--threads 1] [--isa avx512] [--only fp8,sign] [--repeat 5]
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

from tersegrad.core.protocol import Context
from tersegrad.kernels import native, reference
from tersegrad.kernels.schema import Kernels

CTX = Context(seed=1, step=2)
Encode = Callable[[Kernels, Tensor, Tensor], None]
Decode = Callable[[Kernels, Tensor, Tensor, float | None], None]


def cases(d: int) -> dict[str, tuple[int, Encode, Decode]]:
    whole = -(-d // 64) * 64

    def ternary(bucket: int) -> tuple[int, Encode, Decode]:
        return (
            4 * -(-d // bucket) + -(-d // 5),
            lambda k, x, m: k.ternary_encode(x, m, bucket, CTX),
            lambda k, m, y, w: k.ternary_decode(m, y, bucket, w),
        )

    def dithering(bucket: int) -> tuple[int, Encode, Decode]:
        return (
            4 * -(-d // bucket) + -(-d * 5 // 8),
            lambda k, x, m: k.dithering_encode(x, m, bucket, 8, 5, CTX),
            lambda k, m, y, w: k.dithering_decode(m, y, bucket, 8, 5, w),
        )

    return {
        "bf16": (2 * d, lambda k, x, m: k.bf16_encode(x, m), lambda k, m, y, w: k.bf16_decode(m, y, w)),
        "fp16": (4 + 2 * d, lambda k, x, m: k.fp16_encode(x, m), lambda k, m, y, w: k.fp16_decode(m, y, w)),
        "fp8": (-(-d // 32) + d, lambda k, x, m: k.fp8_encode(x, m, 32), lambda k, m, y, w: k.fp8_decode(m, y, 32, w)),
        "sign": (4 + -(-d // 8), lambda k, x, m: k.sign_encode(x, m), lambda k, m, y, w: k.sign_decode(m, y, w)),
        "natural": (-(-d // 8) + d, lambda k, x, m: k.natural_encode(x, m, CTX), lambda k, m, y, w: k.natural_decode(m, y, w)),
        "ternary": ternary(whole),
        "ternary(bucket=512)": ternary(512),
        "dithering": dithering(whole),
        "dithering(bucket=512)": dithering(512),
    }


def check(name: str, encode: Encode, decode: Decode) -> None:
    """Refuse to time what has not been compared with the reference."""
    d = 10_007
    x = torch.randn(d)
    nbytes, encode, decode = cases(d)[name]
    wanted, got = torch.empty(nbytes, dtype=torch.uint8), torch.empty(nbytes, dtype=torch.uint8)
    encode(reference, x, wanted)
    encode(native, x, got)
    a, b = torch.empty(d), torch.empty(d)
    decode(reference, wanted, a, None)
    decode(native, got, b, None)
    if not torch.equal(wanted, got) or not torch.equal(a, b):
        raise SystemExit(f"{name}: native and reference differ")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--elements", type=int, default=64 << 20)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--isa", default=native.isa())
    parser.add_argument("--only", default="")
    parser.add_argument("--repeat", type=int, default=5)
    options = parser.parse_args()
    d = options.elements
    torch.set_num_threads(1)
    x = torch.randn(min(d, 1 << 20)).repeat(-(-d // (1 << 20)))[:d].contiguous()
    y, message = torch.zeros(d), torch.zeros(4 * d, dtype=torch.uint8)
    chosen = {k: v for k, v in cases(d).items() if not options.only or k.split("(")[0] in options.only.split(",")}
    times: dict[str, list[float]] = {}

    def clock(label: str, work: Callable[[], object]) -> None:
        loops = max(1, (1 << 22) // d)
        begin = time.perf_counter()
        for _ in range(loops):
            work()
        times.setdefault(label, []).append((time.perf_counter() - begin) / loops)

    with native.using(isa=options.isa, threads=options.threads):
        for name, (_, encode, decode) in chosen.items():
            check(name, encode, decode)
        for _ in range(options.repeat + 1):
            clock("memmove", lambda: ctypes.memmove(y.data_ptr(), x.data_ptr(), 4 * d))
            for name, (nbytes, encode, decode) in chosen.items():
                data = message[:nbytes]
                clock(f"{name} encode", lambda e=encode, m=data: e(native, x, m))  # type: ignore[misc]
                clock(f"{name} decode", lambda f=decode, m=data: f(native, m, y, None))  # type: ignore[misc]
                y.zero_()
                clock(f"{name} add", lambda f=decode, m=data: f(native, m, y, 0.5))  # type: ignore[misc]
    median = {label: statistics.median(t[1:]) for label, t in times.items()}
    base = median["memmove"]
    print(f"{d} float32, {options.isa}, {options.threads} thread(s); memmove {4 * d / base / 1e9:.1f} GB/s of float32")
    print(f"{'':24}{'bits':>7}{'encode':>9}{'decode':>9}{'add':>9}   (ratio to memmove)")
    for name, (nbytes, _, _) in chosen.items():
        rates = "".join(f"{base / median[f'{name} {what}']:9.2f}" for what in ("encode", "decode", "add"))
        print(f"{name:24}{8 * nbytes / d:7.2f}{rates}")


if __name__ == "__main__":
    main()

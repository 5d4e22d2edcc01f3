"""Speed of the bit codecs: ratios to memmove of the same codes for packing, millions of symbols a second for Elias and Rice.

Runs are alternated with memmove in one process and medians are printed. Every result is checked before it is timed.

    python benchmarks/bench_bits.py [codes, default 64 Mi] [rounds, default 5]
"""

from __future__ import annotations

import ctypes
import sys
import time
from collections.abc import Callable

import torch

from tersegrad.codecs import bitpack, elias, rice, trits
from tersegrad.kernels import native


def seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]


def versus_memmove(calls: dict[str, Callable[[], object]], nbytes: int, rounds: int) -> None:
    """Print how fast each call is compared with memmove of ``nbytes``."""
    source, target = torch.ones(nbytes, dtype=torch.uint8), torch.ones(nbytes, dtype=torch.uint8)
    move = ctypes.memmove
    ratios: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            base = seconds(lambda: move(target.data_ptr(), source.data_ptr(), nbytes))
            ratios[name].append(base / seconds(call))
    print("  " + "  ".join(f"{name} {median(values):.2f}" for name, values in ratios.items()))


def packing(count: int, rounds: int, widths: range | tuple[int, ...]) -> None:
    for width in widths:
        codes = torch.randint(0, 256, (count,)).to(torch.uint8)
        codes = codes & (1 << width) - 1 if width <= 8 else codes.int() * 257 & (1 << width) - 1
        data = torch.ones(bitpack.nbytes(count, width), dtype=torch.uint8)
        back = torch.ones_like(codes)
        bitpack.pack(codes, width, data)
        assert torch.equal(bitpack.unpack(data, width, count, back), codes)
        calls = {
            f"pack {width:2}": lambda c=codes, w=width, d=data: bitpack.pack(c, w, d),
            f"unpack {width:2}": lambda c=count, w=width, d=data, b=back: bitpack.unpack(d, w, c, b),
        }
        versus_memmove(calls, codes.numel() * codes.element_size(), rounds)


def ternary(count: int, rounds: int) -> None:
    values = torch.randint(0, 3, (count,)).to(torch.uint8)
    data, back = trits.pack(values), torch.ones_like(values)
    assert torch.equal(trits.unpack(data, count, back), values)
    versus_memmove(
        {"pack trits": lambda: trits.pack(values, data), "unpack trits": lambda: trits.unpack(data, count, back)}, count, rounds
    )


def symbols(name: str, values: torch.Tensor, rounds: int) -> None:
    """Millions of symbols a second of every variable-length code."""
    count = values.numel()
    k = rice.best_k(values - 1)
    calls: list[tuple[str, Callable[[], torch.Tensor], Callable[[torch.Tensor], torch.Tensor]]] = [
        (code, lambda c=code: elias.encode(values, c), lambda d, c=code: elias.decode(d, count, c)[0]) for code in elias.CODES
    ]
    calls.append((f"rice {k}", lambda: rice.encode(values - 1, k), lambda d: rice.decode(d, count, k)[0] + 1))
    print(f"{name}: best_k {count / median([seconds(lambda: rice.best_k(values)) for _ in range(rounds)]) / 1e6:.0f} M/s")
    for label, encode, decode in calls:
        data = encode()
        assert torch.equal(decode(data), values)
        writes = median([seconds(encode) for _ in range(rounds)])
        reads = median([seconds(lambda d=data, call=decode: call(d)) for _ in range(rounds)])
        bits = 8 * data.numel() / count
        print(f"  {label:7} {bits:5.2f} bits  encode {count / writes / 1e6:4.0f} M/s  decode {count / reads / 1e6:4.0f} M/s")


def main() -> None:
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 64 << 20
    rounds = int(sys.argv[2]) if len(sys.argv) > 2 else 5
    torch.manual_seed(0)
    for isa in reversed(native.supported_isas()):
        with native.using(isa=isa):
            print(f"{isa}, {native.threads()} threads, {count} codes: ratio to memmove of the codes")
            packing(count, rounds, (1, 2, 3, 4, 7, 8, 9, 16))
            ternary(count, rounds)
            symbols("geometric, p = 0.5", torch.empty(1 << 20).geometric_(0.5).long(), rounds)
            symbols("geometric, p = 0.01", torch.empty(1 << 20).geometric_(0.01).long(), rounds)


if __name__ == "__main__":
    main()

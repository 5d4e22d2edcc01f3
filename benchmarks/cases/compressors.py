"""Whole compressors at 64 Mi coordinates: what a training step pays."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.cases import rans
from benchmarks.cases.inputs import gaussian, mostly_zero
from benchmarks.registry import Body, Fact, Versus, Work, benchmark, refuse_unless
from tersegrad import bench, recipes, theory
from tersegrad.bench.clock import touched
from tersegrad.core.protocol import Accumulator, Compressor, Context, Message, Spec
from tersegrad.kernels import native
from tersegrad.report.catalog import CONFIGURATIONS

Measure = Callable[[Compressor[Any], Spec, int], dict[str, Fact]]


def work_of(text: str, x: Tensor, facts: Measure = lambda c, spec, nbytes: {}) -> Work:
    """Check ``text`` on ``x`` and make its encode and decode into touched buffers the timed bodies."""
    compressor = recipes.parse(text)
    ctx, spec = Context(seed=1), Spec.flat(x.numel())
    checked = bench.check(compressor, x, context=ctx, trials=1)  # 64 Mi coordinates average enough
    state = compressor.init(spec, x.device)
    buffer, target = touched(compressor.max_nbytes(spec)), torch.ones_like(x)
    first, _ = compressor.encode(x, spec, state, ctx)
    message = Message(first.payload.clone(), int(first.nbytes))
    expected = compressor.decode(message, spec, ctx)

    def verify() -> None:
        refuse_unless(torch.equal(buffer[: int(message.nbytes)], message.payload), f"{text} writes other bytes when run again")
        refuse_unless(torch.equal(target, expected), f"{text} decodes to other values when run again")

    bodies: dict[str, Body] = {
        "encode": lambda: compressor.encode(x, spec, state, ctx, out=buffer),
        "decode": lambda: compressor.decode(message, spec, ctx, out=target),
    }
    for body in bodies.values():
        body()
    verify()
    if isinstance(compressor, Accumulator):
        accumulator, total = compressor, torch.zeros_like(x)
        bodies["decode+add"] = lambda: accumulator.decode_add(message, spec, ctx, total, 1e-3)
    sizes = {"bits per coordinate": Fact(checked.bits_per_coordinate, "bits")}
    return Work(bodies, 4 * x.numel(), verify, {**sizes, **facts(compressor, spec, checked.nbytes)})


def over_sparse_ideal(fraction: float, value_bits: int) -> Measure:
    """Message size over k (log2 C(d,k)/k + value bits)."""

    def facts(compressor: Compressor[Any], spec: Spec, nbytes: int) -> dict[str, Fact]:
        k = math.ceil(fraction * spec.numel)
        return {
            "message over ideal": Fact(
                8 * nbytes / (theory.log2_binomial(spec.numel, k) + k * value_bits), "of k (log2 C(d,k)/k + 32)"
            )
        }

    return facts


def selection(x: Tensor) -> Work:
    """The kernel that finds the largest 1 %, alone."""
    k = x.numel() // 100
    indices, values, _ = native.select_top_k(x, k)

    def verify() -> None:
        with native.using(threads=2):
            again = native.select_top_k(x, k)
        refuse_unless(torch.equal(again[0], indices) and torch.equal(again[1], values), "two threads select other coordinates")

    verify()
    return Work({"encode": lambda: native.select_top_k(x, k)}, 4 * x.numel(), verify)


def threads_work(text: str, part: str, x: Tensor) -> Work:
    """One part (encode or decode) of a compressor, or a kernel of one, with one thread and with two."""
    if text == "top-k selection":
        work = selection(x)
    elif text == "rANS, 16 symbols":
        work = rans.work_of(x.numel(), 16)
    else:
        work = work_of(text, x)
    body = work.bodies[part]

    def with_threads(count: int) -> Body:
        def run() -> object:
            with native.using(threads=count):
                return body()

        return run

    return Work({"one thread": with_threads(1), "two threads": with_threads(2)}, work.nbytes, work.verify)


for isa in ("avx512", "avx2"):
    best = isa == "avx512"

    @benchmark(f"qsgd 4-bit/{isa}", isa=isa, targets={"encode": 0.75, "decode": 0.7} if best else {})
    def qsgd(numel: int) -> Work:
        return work_of("qsgd(bits=4)", gaussian(numel))

    for states, least in ((8, {"encode": 0.3, "decode": 0.6}), (32, {"encode": 0.18})):

        @benchmark(f"trellis, {states} states/{isa}", isa=isa, targets=least if best else {})
        def trellis(numel: int, states: int = states) -> Work:
            return work_of(f"trellis(nu=0.1, states={states})", gaussian(numel))

    @benchmark(f"top-k 1 %, Gaussian/{isa}", isa=isa, targets={"encode": 0.6, "message over ideal": 1.02} if best else {})
    def top_k(numel: int) -> Work:
        return work_of("top_k(fraction=0.01)", gaussian(numel), over_sparse_ideal(0.01, 32))

    @benchmark(f"top-k 1 %, 99.5 % zeros/{isa}", isa=isa, targets={"encode": 0.3} if best else {})
    def top_k_zeros(numel: int) -> Work:
        return work_of("top_k(fraction=0.01)", mostly_zero(numel))


def measured_above(text: str) -> bool:
    """Whether a benchmark with targets measures the same already."""
    return text in ("qsgd(bits=4)", "top_k(fraction=0.01)")


for text in CONFIGURATIONS:
    if measured_above(text):
        continue
    slow = getattr(recipes.parse(text), "slow", False)

    @benchmark(f"compressor/{text}", numel=1 << 20 if slow else 64 << 20)
    def any_compressor(numel: int, text: str = text) -> Work:
        return work_of(text, gaussian(numel))


# Memory-bound: little arithmetic for every byte. Compute-bound: random numbers or entropy coding for every coordinate. Whole compressors
# of several stages, some of which (bit streams) follow one another, have no target.
SCALING: tuple[tuple[str, float | None, tuple[tuple[str, str], ...]], ...] = (
    ("memory-bound", 1.7, (("bf16", "encode"), ("int8", "decode"), ("top-k selection", "encode"))),
    ("compute-bound", 1.5, (("qsgd(bits=4)", "encode"), ("natural", "encode"), ("rANS, 16 symbols", "encode"))),
    ("several stages", None, (("top_k(fraction=0.01)", "encode"), ("qsgd(levels=1, coder=rans)", "encode"))),
)
for bound, faster, pairs in SCALING:
    for text, part in pairs:
        versus = {"speed-up": Versus(fast="two threads", slow="one thread")}
        targets = {} if faster is None else {"speed-up": faster}

        @benchmark(f"two threads, large/{bound}/{text} {part}", threads=2, targets=targets, versus=versus)
        def scaling(numel: int, text: str = text, part: str = part) -> Work:
            return threads_work(text, part, gaussian(numel))

        # "Not slower": a call takes ten microseconds here, and the clock of a busy machine is not finer than a few per cent.
        @benchmark(
            f"two threads, small/{bound}/{text} {part}",
            numel=64 << 10,
            threads=2,
            targets={"speed-up": 0.95},
            versus=versus,
            shrinks=False,
        )
        def small(numel: int, text: str = text, part: str = part) -> Work:
            return threads_work(text, part, gaussian(numel))

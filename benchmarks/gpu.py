"""Compressors on one GPU: ``python -m benchmarks.gpu [--only PATTERN] [--sizes 64Mi 25MB 1Mi] [--dtypes float32 bfloat16]``
``[--inputs normal rows] [--json FILE]``.

One table: encode, decode, and decode-accumulate of 8 messages, in GB/s of the float32 vector (2 bytes per coordinate count double for
bfloat16 input, so that columns compare), the share of a copy in the same run, bits per coordinate, error, launches, and host
synchronisations. Medians by CUDA events, caches flushed before every run. Bytes are compared with the CPU's before anything is timed.
An encoder's time has the wait for the length of its message. Decoders run as exchanges run them: whether messages were well-formed is read
once, after the clock, as an engine reads it once per step for all of them.
Needs torch, Triton and this package's sources on the path, nothing else.
"""

from __future__ import annotations

import argparse
import dataclasses
import fnmatch
import itertools
import json
import sys
import warnings
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch import Tensor

import tersegrad
from tersegrad import Context, Message, Piece, Spec, Stats, kernels
from tersegrad.core import trust
from tersegrad.core.protocol import needs_second_moment
from tersegrad.core.sums import decode_sum

SIZES = {"64Mi": 1 << 26, "25MB": 26 << 18, "1Mi": 1 << 20}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
CHECKED = 1 << 16
COLUMNS = 1024
# One normal number in a hundred is larger.
RARE = 2.5758
TEXTS = (
    "bf16", "fp16", "fp8", "int8", "int4", "sign", "ternary", "natural", "natural_dithering(levels=8)",
    "qsgd(bits=4)", "qsgd(bits=4, norm=max)", "qsgd(bits=4, coder=rans)", "natural(coder=rans)",
    "top_k(fraction=0.01)", "top_k(fraction=0.01, exact=false)", "random_k(fraction=0.01)", "threshold(tau=2.5)",
    "sparse_dithering(nu=0.1)", "sparse_dithering(nu=0.1, chunk=15)", "sparse_dithering(alpha=0.1)",
    "random_sparse_dithering(omega=1)", "subtractive_dithering(omega=1)", "vgc(alpha=6)", "rotated(int4)",
    "trellis(nu=0.1)", "trellis(nu=0.1, states=4)", "trellis(nu=0.1, states=16)", "trellis(nu=0.1, states=32)", "trellis(alpha=0.1)",
    "dithered_trellis(omega=0.1)", "error_feedback(trellis(nu=0.1))",
    "error_feedback(qsgd(bits=4))", "error_feedback(top_k(fraction=0.01))",
    "chunk_top_k", "chunk_top_k(values=sign)", "chunk_top_k(values=bins)", "sparse_loco", "spherical(alpha=0.5, block=4)",
)  # fmt: skip


@dataclasses.dataclass
class Row:
    """One line of the table."""

    text: str
    size: str
    dtype: str
    encode: float
    decode: float
    accumulate: float
    copy: float
    bits: float
    error: float
    launches: int
    synchronisations: int
    input: str = "normal"


class Timer:
    """Medians of runs after the caches were flushed, in seconds."""

    def __init__(self, repeats: int) -> None:
        self.repeats = repeats
        self.flushed = torch.empty(1 << 28, dtype=torch.float32, device="cuda")

    def __call__(self, run: Callable[[], object], after: Callable[[], object] = lambda: None) -> float:
        for _ in range(3):
            run()
            after()
        times: list[float] = []
        for _ in range(self.repeats):
            self.flushed.fill_(1.0)
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            run()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) / 1e3)
            after()
        return sorted(times)[len(times) // 2]


def synchronisations(run: Callable[[], object]) -> int:
    """How often the host waits for the device in ``run``, as torch sees it, or for an event, of which torch does not warn."""
    run()
    torch.cuda.synchronize()
    events: list[torch.cuda.Event] = []
    wait = torch.cuda.Event.synchronize

    def counted(event: torch.cuda.Event) -> None:
        events.append(event)
        wait(event)

    with warnings.catch_warnings(record=True) as seen, mock.patch.object(torch.cuda.Event, "synchronize", counted):
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            run()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return len(events) + sum("called a synchronizing" in str(w.message) for w in seen)


def launches(run: Callable[[], object]) -> int:
    """Kernels, copies and fills that ``run`` puts on the device; -1 where the profiler cannot tell."""
    try:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            run()
            torch.cuda.synchronize()
    except RuntimeError:
        return -1
    return sum(e.count for e in profile.key_averages() if e.device_type == torch.profiler.DeviceType.CUDA) or -1


def encoder(compressor: Any, x: Tensor, spec: Spec, ctx: Context) -> Callable[[], Message]:
    """A call that encodes x, from an empty state."""
    state = compressor.init(spec, x.device)
    # A second moment by which one normal number in a hundred is sent, where the variance decides.
    stats = (
        Stats(torch.full_like(x, RARE**2 / compressor.alpha, dtype=torch.float32)) if needs_second_moment(compressor) else None
    )
    room = torch.empty(compressor.max_nbytes(spec), dtype=torch.uint8, device=x.device)
    return lambda: compressor.encode(x, spec, state, ctx, stats=stats, out=room)[0]


def check(text: str) -> None:
    """Raise unless bytes and decoded values are those of the CPU."""
    x = torch.randn(CHECKED, generator=torch.Generator().manual_seed(1))
    spec, ctx, compressor = Spec.flat(CHECKED), Context(seed=5, step=7), tersegrad.parse(text)
    results = []
    for device in ("cpu", "cuda"):
        message = encoder(compressor, x.to(device), spec, ctx)()
        data = message.data[: int(message.nbytes)]
        results.append((data.cpu(), compressor.decode(Message(data, data.numel()), spec, ctx).cpu()))
    if not torch.equal(results[0][0], results[1][0]):
        raise ArithmeticError(f"{text}: the GPU's bytes are not the CPU's")
    if not torch.equal(results[0][1].view(torch.int32), results[1][1].view(torch.int32)):
        raise ArithmeticError(f"{text}: the GPU's values are not the CPU's")


def made(kind: str, n: int, dtype: torch.dtype) -> tuple[Tensor, Spec]:
    """Normal numbers without a shape, or a matrix whose rows differ in scale by up to 64 times: what scale classes are for."""
    generator = torch.Generator("cuda").manual_seed(1)
    x = torch.randn(n, generator=generator, device="cuda")
    if kind == "normal":
        return x.to(dtype), Spec.flat(n, dtype)
    scales = torch.exp2(-6 * torch.rand(n // COLUMNS, 1, generator=generator, device="cuda"))
    return (x.view(-1, COLUMNS) * scales).flatten().to(dtype), Spec((Piece((n // COLUMNS, COLUMNS), 0, n, "weight"),), dtype)


def measure(text: str, size: str, dtype: torch.dtype, timer: Timer, kind: str = "normal") -> Row:
    """One line of the table."""
    n = SIZES[size]
    (x, spec), ctx, compressor = made(kind, n, dtype), Context(seed=5, step=7), tersegrad.parse(text)
    encode = encoder(compressor, x, spec, ctx)
    message = encode()
    data = message.data[: int(message.nbytes)].clone()
    whole = Message(data, data.numel())
    out = torch.empty(n, device="cuda")
    decoded = compressor.decode(whole, spec, ctx, out=out)
    error = float((decoded.double() - x.double()).square().sum() / x.double().square().sum())

    doubts: list[trust.Doubt] = []

    def trusted(body: Callable[[], Tensor]) -> None:
        with trust.postponing(doubts):
            trust.decoded(body)

    def verdict() -> None:
        again, _ = trust.settle(doubts)
        if again:
            raise ArithmeticError(f"{text}: a message was decoded twice")

    def decode() -> None:
        trusted(lambda: compressor.decode(whole, spec, ctx, out=out))

    messages = [Message(data.clone(), data.numel()) for _ in range(8)]

    def accumulate() -> None:
        trusted(lambda: decode_sum(compressor, messages, spec, [ctx] * 8, out, 0.125))

    source, target = x.float(), torch.empty(n, device="cuda")
    rate = 4 * n / 1e9
    return Row(
        text, size, str(dtype).removeprefix("torch."),
        rate / timer(encode), rate / timer(decode, verdict), rate / timer(accumulate, verdict),
        rate / timer(lambda: target.copy_(source)), 8 * data.numel() / n, error, launches(encode), synchronisations(encode), kind,
    )  # fmt: skip


def show(rows: list[Row]) -> str:
    """The table as Markdown."""
    lines = [
        "| compressor | size | input | encode GB/s | decode GB/s | accumulate 8 GB/s | of a copy (encode / decode) "
        "| bits | error | launches | host waits |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for r in rows:
        shares = f"{r.encode / r.copy:.2f} / {r.decode / r.copy:.2f}"
        what = r.dtype if r.input == "normal" else f"{r.dtype}, {r.input}"
        lines.append(
            f"| `{r.text}` | {r.size} | {what} | {r.encode:.0f} | {r.decode:.0f} | {r.accumulate:.0f} | {shares} "
            f"| {r.bits:.4f} | {r.error:.3e} | {r.launches} | {r.synchronisations} |"
        )
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="*", default=[], help="compressors whose text contains or globs one of these")
    parser.add_argument("--sizes", nargs="*", default=list(SIZES), choices=list(SIZES))
    parser.add_argument("--dtypes", nargs="*", default=list(DTYPES), choices=list(DTYPES))
    parser.add_argument("--inputs", nargs="*", default=["normal"], choices=["normal", "rows"])
    parser.add_argument("--repeats", type=int, default=11)
    parser.add_argument("--json", default="")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("torch sees no CUDA device", file=sys.stderr)
        return 2
    timer, rows, failed = Timer(options.repeats), [], []
    backends = kernels.backends(torch.device("cuda"))
    machine = f"{torch.cuda.get_device_name()}, torch {torch.__version__}, kernels: {', '.join(backends) or 'plain torch'}"
    print(machine)
    for text in TEXTS:
        if options.only and not any(p in text or fnmatch.fnmatch(text, p) for p in options.only):
            continue
        try:
            check(text)
            for size in options.sizes:
                for dtype, kind in itertools.product(options.dtypes, options.inputs):
                    rows.append(measure(text, size, DTYPES[dtype], timer, kind))
                    print(show(rows[-1:]).splitlines()[-1], flush=True)
        except Exception as error:
            failed.append(text)
            print(f"{text}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
    print(show(rows))
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump({"machine": machine, "rows": [dataclasses.asdict(r) for r in rows]}, file, indent=1)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

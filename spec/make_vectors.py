"""Write ``spec/vectors``: frames that every decoder must read, and frames that every decoder must refuse.

    python -m spec.make_vectors          (or: make vectors)

Frames are made by the package, or byte by byte where an encoder would never write them. Before anything is written, the package and
``spec.decoder`` must agree on every frame. Inputs are multiples of 2^-14 drawn from Philox, so that sums of them are exact in any order and
the files are the same on every machine.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
import shutil
import struct
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

import tersegrad
from spec import decoder
from tersegrad import kernels, recipes
from tersegrad.codecs import rans, varint
from tersegrad.core import frame
from tersegrad.core.errors import CorruptMessage
from tersegrad.core.protocol import Context, Message, Piece, Spec, Stats, has_fixed_size, needs_second_moment

FOLDER = Path(__file__).parent / "vectors"


class Accept(NamedTuple):
    """A frame, and what it decodes to."""

    name: str
    data: bytes
    pieces: tuple[Piece, ...] | None = None


class Reject(NamedTuple):
    """A frame that must be refused, and why."""

    name: str
    data: bytes
    reason: str
    pieces: tuple[Piece, ...] | None = None


# ---- inputs -----------------------------------------------------------------------------------------------------------------


def numbers(d: int, key: int) -> torch.Tensor:
    """About normal: sums of four 16-bit draws, in units of 2^-14; standard deviation about 2.3."""
    return torch.tensor(_sums(d, key), dtype=torch.float32) * 2.0**-14


@functools.cache
def _sums(d: int, key: int) -> list[int]:
    draws: list[int] = []
    for block in range(-(-d // 2)):
        words = decoder.philox(key, (block, 254 << 24, 0, 0))
        halves = [half for word in words for half in (word & 0xFFFF, word >> 16)]
        draws += [sum(halves[:4]) - 131070, sum(halves[4:]) - 131070]
    return draws[:d]


def sparse(d: int, key: int, one_in: int) -> torch.Tensor:
    """Zero but for about one coordinate in ``one_in``."""
    x = torch.zeros(d)
    at = 0
    for block in range(4 * d // one_in):
        w0, w1, _, _ = decoder.philox(key, (block, 254 << 24, 1, 0))
        at += 1 + w0 % (2 * one_in)
        if at >= d:
            break
        x[at] = (w1 % 64 - 32) / 8
    return x


def outlier(d: int) -> torch.Tensor:
    x = (numbers(d, 5) * 0.75).round()
    if d:
        x[d // 3] = 50.0
    return x


KINDS: dict[str, Callable[[int], torch.Tensor]] = {
    "normal": lambda d: numbers(d, 1),
    "zero": lambda d: torch.zeros(d),
    "nonfinite": lambda d: torch.where(torch.arange(d) == d // 2, math.nan, numbers(d, 2)),
    "huge": lambda d: (numbers(d, 3) * 2.0**125).clamp(-3e38, 3e38),
    "denormal": lambda d: (numbers(d, 4) * 2.0**-60) * 2.0**-78,
    "sparse": lambda d: sparse(d, 6, 25),
    "outlier": outlier,
    "half": lambda d: numbers(d, 7).to(torch.float16),
    "bfloat": lambda d: numbers(d, 8).to(torch.bfloat16),
}

# ---- accepted frames --------------------------------------------------------------------------------------------------------

EVERY = (("normal", 0), ("normal", 1), ("normal", 65), ("zero", 65), ("nonfinite", 65), ("huge", 65), ("denormal", 9))
LARGER = (("normal", 65), ("normal", 700))
SMALL = (("normal", 65),)

# The vectors of the first compressors, in the order that numbers their contexts. A class that was registered later needs no line here:
# `registered` finds its examples.
PLAN: tuple[tuple[str, tuple[tuple[str, int], ...]], ...] = (
    ("identity", (*EVERY, ("normal", 700), ("half", 65), ("bfloat", 65))),
    ("bf16", (*EVERY, ("normal", 700), ("half", 65))),
    ("fp16", (*EVERY, ("normal", 700))),
    ("fp8", (*EVERY, ("normal", 700))),
    ("fp8(block=16)", SMALL),
    ("int8", (*EVERY, ("normal", 700))),
    ("int8(block=8)", SMALL),
    ("int4", (*EVERY, ("normal", 700))),
    ("int4(block=128)", SMALL),
    ("sign", (*EVERY, ("normal", 700))),
    ("ternary", (*EVERY, ("normal", 700))),
    ("ternary(bucket=64)", LARGER),
    ("natural", (*EVERY, ("normal", 700))),
    ("natural(coder=rans)", (*EVERY, ("normal", 700), ("sparse", 700))),
    ("natural_dithering", (*EVERY, ("normal", 700))),
    ("natural_dithering(levels=64, bucket=64)", SMALL),
    ("natural_dithering(levels=4, coder=rans)", (*EVERY, ("normal", 700), ("sparse", 2000))),
    ("natural_dithering(levels=3, bucket=128, coder=rans)", (("sparse", 2000),)),
    ("qsgd", (*EVERY, ("normal", 700))),
    ("qsgd(bits=2, bucket=64)", SMALL),
    ("qsgd(bits=8, norm=max)", LARGER),
    ("qsgd(bits=5, levels=9)", SMALL),
    ("qsgd(bits=3, coder=elias)", (*EVERY, ("normal", 700), ("sparse", 700))),
    ("qsgd(levels=4, coder=rans)", (*EVERY, ("normal", 700), ("sparse", 2000))),
    ("qsgd(bits=8, bucket=64, norm=max, coder=rans)", (("normal", 700), ("sparse", 2000))),
    ("qsgd(levels=127, norm=max, coder=elias)", (("sparse", 700),)),
    ("top_k(fraction=0.1)", (*EVERY, ("normal", 700), ("sparse", 700), ("half", 65))),
    ("top_k(k=5)", LARGER),
    ("top_k(fraction=0.6)", LARGER),
    ("top_k(fraction=1.0)", SMALL),
    ("top_k(fraction=0.1, values=bf16)", (("normal", 65), ("huge", 65))),
    ("top_k(fraction=0.05, exact=false)", LARGER),
    ("random_k(fraction=0.1)", (*EVERY, ("normal", 700))),
    ("random_k(k=3)", SMALL),
    ("random_k(fraction=0.07, unbiased=false)", (("normal", 100),)),
    ("random_k(fraction=0.3, unbiased=false, values=bf16)", SMALL),
    ("threshold(tau=2.5)", (*EVERY, ("normal", 700))),
    ("threshold(tau=0)", (("normal", 65), ("sparse", 700))),
    ("threshold(tau=2.5, values=sign)", (*EVERY, ("normal", 700))),
    ("sparse_dithering(nu=0.1)", (*EVERY, ("normal", 700), ("sparse", 700), ("outlier", 700))),
    ("sparse_dithering(nu=0.5, coder=paper)", LARGER),
    ("sparse_dithering(nu=0.11, coder=rans)", (("normal", 65), ("outlier", 700), ("zero", 65), ("normal", 3))),
    ("sparse_dithering(nu=1e-12)", (("normal", 3), ("normal", 65))),
    ("sparse_dithering(nu=0.2, coder=rans, scale=global)", (("normal", 700),)),
    ("random_sparse_dithering(omega=0.25)", (*EVERY, ("normal", 700))),
    ("random_sparse_dithering(omega=0.1, coder=rans)", (("outlier", 700),)),
    ("subtractive_dithering(omega=0.25)", (*EVERY, ("normal", 700), ("sparse", 700))),
    ("subtractive_dithering(omega=0.001)", LARGER),
    ("subtractive_dithering(omega=1e-12)", (("normal", 9), ("outlier", 65))),
    ("subtractive_dithering(omega=0.1, coder=rans)", (("normal", 65), ("normal", 3000), ("zero", 65))),
    ("subtractive_dithering(omega=0.01, coder=rans, scale=global)", (("outlier", 2500),)),
    (
        "spherical(alpha=0.5)",
        (("normal", 0), ("normal", 1), ("normal", 9), ("zero", 9), ("nonfinite", 9), ("huge", 9), ("denormal", 9)),
    ),
    ("spherical(alpha=0.7, unbiased=true)", (("normal", 12),)),
    ("spherical(alpha=0.5, block=8)", (*EVERY, ("normal", 700), ("sparse", 700))),
    ("spherical(alpha=0.6, block=5, unbiased=true)", (("normal", 65), ("normal", 2), ("zero", 65), ("nonfinite", 65))),
    ("spherical(alpha=0.05, block=3)", SMALL),
    ("error_feedback(spherical(alpha=0.6, block=4, unbiased=true))", SMALL),
    ("error_feedback(subtractive_dithering(omega=2))", SMALL),
    ("error_feedback(top_k(fraction=0.1))", (("normal", 0), *LARGER, ("nonfinite", 65), ("half", 65))),
    ("error_feedback(qsgd, residual=bfloat16)", LARGER),
    ("error_feedback(qsgd(norm=max))", SMALL),
    ("error_feedback(ternary(bucket=64))", SMALL),
    ("error_feedback(natural(coder=rans))", SMALL),
    ("error_feedback(natural_dithering(levels=3))", SMALL),
    ("error_feedback(random_k(fraction=0.3))", SMALL),
    ("error_feedback(random_sparse_dithering(omega=2))", SMALL),
    ("error_feedback(rotated(qsgd(bits=3, norm=max), block=64))", SMALL),
    ("error_feedback(metered(sign), force=true)", SMALL),
    ("error_feedback(threshold(tau=0.5, values=sign), force=true)", SMALL),
    ("rotated(int4)", (*EVERY, ("normal", 700))),
    ("rotated(identity, block=1)", SMALL),
    ("rotated(top_k(fraction=0.2), block=16)", SMALL),
    ("rotated(sparse_dithering(nu=0.1), block=128)", (("normal", 300),)),
    ("by_tensor(int8, small=identity, below=70)", (("normal", 0), ("normal", 65), ("normal", 700), ("bfloat", 65))),
    ("metered(qsgd(coder=rans))", (*EVERY,)),
)

# Their values are a level stream.
LOOSE_VALUES = ("vgc(alpha=1.5)", "vgc(alpha=1.25)")
# Longer vectors take too many draws.
SHORT_ONLY = ("spherical(alpha=0.5)", "spherical(alpha=0.7, unbiased=true)")

PIECES = (
    Piece((6, 10), 0, 60, "layer.weight"),
    Piece((10,), 0, 10, "layer.bias"),
    Piece((0,), 0, 0, "empty"),
    Piece((100,), 30, 77, "shard[0]"),
    Piece((3, 1), 0, 3, "Norm.weight"),
)

BY_TENSOR = (
    'by_tensor(top_k(fraction=0.25), small=bf16, below=20, rules={"*.bias": identity})',
    'by_tensor(error_feedback(qsgd), rules={"*.weight": rotated(sign, block=64), "shard[[]?]": random_k(k=5)})',
    'error_feedback(by_tensor(ternary, rules={"[!a-k]*": natural, "shard*": identity}))',
    "by_tensor(sparse_dithering(bits=4), small=none)",
)


# Written after the first release of the vectors: they come last, so that the contexts of the earlier ones stay as they were.
VARIANCE: tuple[tuple[str, tuple[tuple[str, int], ...]], ...] = (
    ("vgc(alpha=1.5)", (*EVERY, ("normal", 700), ("sparse", 2000), ("outlier", 700), ("half", 65))),
    ("vgc(alpha=0.2, wire=paper)", (*EVERY, ("normal", 700))),
    ("vgc(alpha=1, values=sign)", (*EVERY, ("normal", 700))),
    ("vgc(alpha=1, values=bf16)", (*EVERY, ("normal", 700))),
    (
        "vgc(alpha=1, zeta=0.9, values=qsgd(bits=3, bucket=64), residual=keep)",
        (("normal", 65), ("zero", 65), ("nonfinite", 65)),
    ),
    ("vgc(alpha=1, values=rotated(int8))", SMALL),
    ("hybrid(alpha=2, tau=0.5)", (*EVERY, ("normal", 700))),
    ("hybrid(alpha=2, tau=0.5, wire=paper)", (*EVERY, ("normal", 700))),
)

VARIANCE_PIECES = (
    "vgc(alpha=1.25)",
    "vgc(alpha=1.25, wire=paper)",
    "vgc(alpha=1.25, values=sign)",
    "by_tensor(vgc(alpha=1.5), small=bf16, below=20)",
)


# Formats that cut tensors into tiles.
TILED = (
    "chunk_top_k(chunk=16, k=3)",
    "chunk_top_k(chunk=16, k=2, values=bins)",
    "chunk_top_k(chunk=64, k=5, values=sign, vector=5)",
    "dct(chunk_top_k(chunk=16, k=3, vector=4), block=4)",
    "error_feedback(dct(qsgd), residual=int8, decay=0.9)",
)


def registered() -> tuple[tuple[str, tuple[tuple[str, int], ...]], ...]:
    """Examples and corners of registered classes that the lists above do not name: what was added after them.

    Messages with ``rdo`` are like others; a few of them come later.
    """
    listed = {text.partition("(")[0] for text, _ in (*PLAN, *VARIANCE)}
    new = [name for name in (*recipes.COMPRESSORS, *recipes.WRAPPERS) if name not in listed]
    texts = [text for name in new for text in (*recipes.examples(name), *recipes.corners(name)) if "rdo" not in text]
    return tuple((text, (*EVERY, ("normal", 700))) for text in texts)


def context_of(name: str) -> Context:
    """A context that depends on nothing but a vector's name."""
    return context(zlib.crc32(name.encode()))


def context(number: int) -> Context:
    w = decoder.philox(2021, (number, 254 << 24, 2, 0))
    return Context(w[0] << 32 | w[1], w[2], w[3] >> 16, w[3] & 0xFFFF)


def framed(text: str, message: bytes, d: int, ctx: Context, dtype: torch.dtype = torch.float32) -> bytes:
    """A frame around bytes that no encoder may have written."""
    wire_id = tersegrad.parse(text).wire_id
    return frame.pack(Message.frombytes(message), wire_id=wire_id, text=text, spec=Spec.flat(d, dtype), context=ctx)


def encoded(text: str, x: torch.Tensor, ctx: Context, pieces: tuple[Piece, ...] | None = None) -> bytes:
    compressor = tersegrad.parse(text)
    spec = Spec.flat(x.numel(), x.dtype) if pieces is None else Spec(pieces, x.dtype)
    stats = second_moment(x) if needs_second_moment(compressor) else None
    message, _ = compressor.encode(x, spec, compressor.init(spec, "cpu"), ctx, stats=stats)
    return framed(str(compressor), message.tobytes(), x.numel(), ctx, x.dtype)


def second_moment(x: torch.Tensor) -> Stats:
    """Two coordinates of three are beyond doubt."""
    doubt = torch.where(torch.arange(x.numel()) % 3 == 2, 4.0, 0.125)
    return Stats((x.float().square() * doubt).clamp(max=torch.finfo(torch.float32).max))


def label(text: str) -> str:
    """A text form as a file name."""
    return "".join(c if c.isalnum() or c in "._-" else "-" for c in text.replace('"', "")).strip("-").replace("--", "-")


def accepted() -> Iterator[Accept]:
    number = 0
    for plan, by_tensor in ((PLAN, BY_TENSOR), (VARIANCE, VARIANCE_PIECES)):
        for text, inputs in plan:
            for kind, d in inputs:
                number += 1
                yield Accept(f"{label(text)}.{kind}{d}", encoded(text, KINDS[kind](d), context(number)))
        for text in by_tensor:
            number += 1
            x = numbers(sum(p.numel for p in PIECES), 9)
            yield Accept(f"{label(text)[:60]}.pieces", encoded(text, x, context(number), PIECES), PIECES)
    for text, inputs in registered():
        for kind, d in inputs:
            name = f"{label(text)}.{kind}{d}"
            yield Accept(name, encoded(text, KINDS[kind](d), context_of(name)))
    for text in TILED:
        name, x = f"{label(text)}.tiles", numbers(sum(p.numel for p in PIECES), 20)
        yield Accept(name, encoded(text, x, context_of(name), PIECES), PIECES)
    for text in ("sparse_loco", "demo", "distro(k=2)", "streaming_diloco", "fewest_bits(alpha=0.1)"):
        c, ctx = tersegrad.parse(text), context_of(text)
        message, _ = c.encode(numbers(65, 22), Spec.flat(65), c.init(Spec.flat(65), "cpu"), ctx)
        yield Accept(f"{label(text)}.named", framed(text, message.tobytes(), 65, ctx))
    for kind, d in (("normal", 65), ("sparse", 700), ("outlier", 700)):
        text, name = "sparse_dithering(nu=0.5, rdo=true)", f"sparse_dithering.rdo-{kind}{d}"
        yield Accept(name, encoded(text, KINDS[kind](d), context_of(name)))
    for text, d in (("sign", 5000), ("sign(block=64)", 700), ("sign(block=none)", 5000)):
        name = f"{label(text)}.blocks{d}"
        yield Accept(name, encoded(text, numbers(d, 24), context_of(name)))
    several = numbers(50_000, 21)  # streams of 2048 places and more
    yield Accept("chunk_top_k.three-streams", encoded("chunk_top_k(chunk=256, k=30, values=bins)", several, context(910)))
    paired = torch.zeros(32, 4096)  # the last pair makes a state of more than 2^63
    paired.scatter_(1, torch.tensor([(97 * j, 4095 - 13 * j) for j in range(31)] + [(0, 325)]), 1.0)
    yield Accept("chunk_top_k.large-state", encoded("chunk_top_k(k=2, values=sign)", paired.reshape(-1), context(911)))
    big = 400_000
    yield Accept(
        "qsgd.two-chunks", encoded("qsgd(bits=2, bucket=400000, norm=max, coder=rans)", sparse(big, 10, 900), context(900))
    )
    yield Accept(
        "sparse_dithering.two-segments", encoded("sparse_dithering(nu=0.5, coder=rans)", sparse(big, 11, 900), context(901))
    )
    uneven = sparse(big, 17, 900)
    uneven[: 1 << 16] *= 2.0**-20
    yield Accept("sparse_dithering.scales-far-apart", encoded("sparse_dithering(nu=0.5, coder=rans)", uneven, context(905)))
    half = torch.cat([torch.zeros(1 << 18), sparse(big - (1 << 18), 13, 900)])
    empty = encoded("subtractive_dithering(omega=300, coder=rans)", half, context(903))
    yield Accept("subtractive_dithering.first-segment-zero", empty)
    far = torch.cat([numbers(64, 14), numbers(8, 15) * 2.0**-50, torch.zeros(8), numbers(8, 16) * 2.0**70])
    yield Accept("spherical.norms-far-apart", encoded("spherical(alpha=0.5, block=8)", far, context(904)))
    many = numbers(30_000, 18)
    yield Accept("vgc.many-values", encoded("vgc(alpha=0.2)", many, context(906)))
    long = numbers(45_001, 19)  # three chunks of 2^14 symbols, or one
    yield Accept("rans.three-chunks", encoded("sparse_dithering(nu=0.5, chunk=14)", long, context(907)))
    yield Accept("rans.one-chunk", encoded("sparse_dithering(nu=0.5, chunk=18)", long, context(907)))
    yield Accept("rans.chunks-and-contexts", encoded("subtractive_dithering(omega=1, chunk=14)", long, context(908)))
    yield Accept("rans.chunks-of-bits", encoded("qsgd(levels=1, bucket=8192, coder=rans, chunk=15)", long, context(909)))
    yield from trellises()
    yield from scale_classes()
    yield from index_sets()
    yield from by_hand()


def trellises() -> Iterator[Accept]:
    """Runs, chunks, segments and escapes of trellis codes."""
    long = numbers(45_001, 19)
    far = torch.cat([numbers(700, 20), outlier(700), numbers(700, 21) * 2.0**-6])
    empty = torch.cat([torch.zeros(1 << 18), sparse(400_000 - (1 << 18), 13, 900)])
    plan = {
        "runs": ("trellis(nu=0.3, chunk=14)", long),
        "long-runs": ("trellis(nu=0.3, chunk=18, states=16)", long),
        "escapes": ("trellis(nu=0.5)", far),
        "wide": ("trellis(nu=0.001)", far),
        "first-segment-zero": ("trellis(nu=0.9, states=4)", empty),
    }
    dithered = {
        "runs": ("dithered_trellis(omega=0.3, chunk=14)", long),
        "long-runs": ("dithered_trellis(omega=0.3, chunk=18, states=16)", long),
        "escapes": ("dithered_trellis(omega=0.5)", far),
        "wide": ("dithered_trellis(omega=0.001)", far),
        "feedback": ("error_feedback(dithered_trellis(omega=2))", numbers(65, 22)),
    }
    # As columns of one coordinate, which have no classes.
    for group, cases in (("trellis", plan), ("dithered_trellis", dithered)):
        for name, (text, x) in cases.items():
            column = (Piece((x.numel(), 1), 0, x.numel()),)
            yield Accept(f"{group}.{name}", encoded(text, x, context_of(f"{group}.{name}"), column))


# A convolution, a vector, and a part of a matrix that begins and ends within rows.
CLASS_PIECES = (Piece((24, 12, 3, 3), 0, 2592, "conv"), Piece((130,), 0, 130, "bias"), Piece((90, 70), 33, 6277, "part"))


def uneven(d: int, pieces: tuple[Piece, ...]) -> torch.Tensor:
    """Normal numbers times powers of two by row and by column; a fifth of the rows are zero."""
    factors = []
    for piece in pieces:
        columns, group = max(1, math.prod(piece.shape[1:])), math.prod(piece.shape[2:])
        for i in range(piece.numel):
            row, column = divmod(piece.start + i, columns)
            factors.append(0.0 if row % 5 == 3 else 2.0 ** (row * 7 % 6 - column // group * 5 % 4))
    return numbers(d, 20) * torch.tensor(factors)


def agreeing(d: int, pieces: tuple[Piece, ...]) -> torch.Tensor:
    """Numbers whose signs are mostly those of their row times those of their column; in the first piece those of their row."""
    signs = []
    for k, piece in enumerate(pieces):
        columns = max(1, math.prod(piece.shape[1:]))
        for i in range(piece.numel):
            row, column = divmod(piece.start + i, columns)
            minus = row * 5 % 7 < 3, k > 0 and column * 3 % 5 < 2, (row * 11 + column * 7) % 10 == 0
            signs.append(-1.0 if sum(minus) % 2 else 1.0)
    return numbers(d, 20).abs() * torch.tensor(signs)


def scale_classes() -> Iterator[Accept]:
    d = sum(p.numel for p in CLASS_PIECES)
    for text in (
        "sparse_dithering(nu=0.02)",
        "random_sparse_dithering(omega=0.05)",
        "sparse_dithering(nu=0.0005)",
        "sparse_dithering(nu=0.3, rdo=true)",
    ):
        name = f"{label(text)}.classes"
        yield Accept(name, encoded(text, uneven(d, CLASS_PIECES), context_of(name), CLASS_PIECES), CLASS_PIECES)
    for name, text in (
        ("trellis.classes", "trellis(nu=0.05)"),
        ("trellis.classes-4", "trellis(nu=0.001, states=4)"),
        ("trellis.classes-still", "trellis(nu=0.6, states=32, chunk=14)"),
        ("trellis.classes-rdo", "trellis(nu=0.4, rdo=true)"),
        ("dithered_trellis.classes", "dithered_trellis(omega=0.02)"),
        ("dithered_trellis.classes-few", "dithered_trellis(omega=0.5, states=16)"),
        ("subtractive_dithering.classes", "subtractive_dithering(omega=0.25)"),
        ("subtractive_dithering.classes-fine", "subtractive_dithering(omega=0.02, coder=rans, scale=global)"),
    ):
        yield Accept(name, encoded(text, uneven(d, CLASS_PIECES), context_of(name), CLASS_PIECES), CLASS_PIECES)
    # Signs that rows and columns agree with, but for one in ten.
    for text in ("aligned(sparse_dithering(nu=0.02))", "aligned(int4)", "error_feedback(aligned(natural(coder=rans)))"):
        name = f"{label(text)}.signs"
        yield Accept(name, encoded(text, agreeing(d, CLASS_PIECES), context_of(name), CLASS_PIECES), CLASS_PIECES)
    text, name = "fewest_bits(alpha=0.1)", "fewest_bits.signs"
    yield Accept(name, encoded(text, agreeing(d, CLASS_PIECES), context_of(name), CLASS_PIECES), CLASS_PIECES)
    blocks = numbers(6000, 21) * torch.where(torch.arange(6000) // 300 % 3 == 0, 16.0, 0.25)
    for text in ("qsgd(levels=20, bucket=16384, norm=max, coder=rans)", "natural(coder=rans)", "natural_dithering(coder=rans)"):
        name = f"{label(text)}.classes"
        yield Accept(name, encoded(text, uneven(d, CLASS_PIECES), context_of(name), CLASS_PIECES), CLASS_PIECES)
        name = f"{label(text)}.block-classes"
        yield Accept(name, encoded(text, blocks, context_of(name)))
    yield Accept("sparse_dithering.block-classes", encoded("sparse_dithering(nu=0.001)", blocks, context_of("block-classes")))
    name = "subtractive_dithering.block-classes"
    yield Accept(name, encoded("subtractive_dithering(omega=1)", blocks, context_of(name)))
    # Octaves of the dither in three chunks; and in the second of two segments, where the first is zero.
    matrix = (Piece((150, 300), 0, 45_000, "weight"),)
    name = "subtractive_dithering.classes-and-octaves"
    yield Accept(
        name, encoded("subtractive_dithering(omega=6, chunk=14)", uneven(45_000, matrix), context_of(name), matrix), matrix
    )
    later = (Piece((1 << 18,), 0, 1 << 18, "zeros"), Piece((440, 300), 0, 132_000, "weight"))
    x = torch.cat([torch.zeros(1 << 18), uneven(132_000, later[1:])])
    name = "subtractive_dithering.classes-after-zeros"
    yield Accept(name, encoded("subtractive_dithering(omega=90)", x, context_of(name), later), later)


def threshold_message(count: int, d: int, index_set: bytes) -> bytes:
    """A threshold message, all signs positive."""
    return bytes([0]) + varint.write(count) + index_set + bytes(-(-count // 8))


def index_forms(d: int, k: int) -> dict[str, bytes]:
    """One set of k integers of [0, d) in every form."""
    run = kernels.reference
    x = numbers(d, 12).abs()
    where = x.topk(k).indices.sort().values.to(torch.int32)
    out = torch.zeros(4 * d, dtype=torch.uint8)

    def written(encode: Callable[[torch.Tensor], int | torch.Tensor]) -> bytes:
        return bytes(out[: int(encode(out))].tolist())

    classes = run.gap_classes(where)
    alphabet = int(classes.max()) + 1
    divisor = max(1, (d * 45426 // k + 11141) >> 16)
    bitmap = run.bitmap_encode(where, d)
    forms = {
        "golomb": bytes([250]) + written(lambda o: run.golomb_encode(where, divisor, o)),
        "rice": bytes([251, 2]) + written(lambda o: run.golomb_encode(where, 4, o)),
        "bitmap": bytes([252]) + bytes(bitmap.tolist()),
        "gaps": bytes([253, alphabet])
        + bytes(rans.encode(classes, alphabet).tolist())
        + written(lambda o: run.gap_rests_encode(where, o)),
        "coded-bitmap": bytes([254]) + bytes(rans.encode(bitmap, 256).tolist()),
    }
    if k <= 256:
        forms["short"] = written(lambda o: run.digits_encode(where, d, o))
    return forms


SIGNS = "threshold(tau=1.5, values=sign)"
# Words 8 and 0 of two spherical blocks, with the Rice parameters 2 and 0.
SPHERE_WORDS = b"\2\x04\0\0\1"


def index_sets() -> Iterator[Accept]:
    for d, k in ((2400, 300), (700, 256), (65, 9)):
        for form, data in index_forms(d, k).items():
            yield Accept(f"index-set.{form}.{k}-of-{d}", framed(SIGNS, threshold_message(k, d, data), d, context(910)))
            name = f"index-set.{form}.{d - k}-of-{d}"
            yield Accept(name, framed(SIGNS, threshold_message(d - k, d, data), d, context(911)))
    yield Accept("index-set.all-of-65", framed(SIGNS, threshold_message(65, 65, b"\0"), 65, context(912)))
    far = (1 << 21) + 12345  # one index whose position takes more than 16 bits
    where = torch.tensor([far - 7], dtype=torch.int32)
    out = torch.zeros(64, dtype=torch.uint8)
    data = bytes(out[: kernels.reference.digits_encode(where, far, out)].tolist())
    yield Accept("index-set.one-far-away", framed(SIGNS, threshold_message(1, far, data), far, context(913)))


def by_hand() -> Iterator[Accept]:
    """What decoders must take although no encoder of today writes it."""
    ctx = context(920)
    yield Accept("int4.level-minus-8", framed("int4", struct.pack("<H", 0x3F80) + b"\x88", 2, ctx))
    yield Accept("int4.padding-ignored", framed("int4", struct.pack("<H", 0x3F80) + b"\xf1", 1, ctx))
    yield Accept("int8.infinite-step", framed("int8(block=8)", struct.pack("<2f", 1.0, math.inf) + bytes(9), 9, ctx))
    yield Accept("sign.padding-ignored", framed("sign", struct.pack("<f", 0.5) + b"\xff", 3, ctx))
    yield Accept("sign.infinite", framed("sign", struct.pack("<f", math.inf) + b"\x02", 3, ctx))
    yield Accept("fp8.every-byte", framed("fp8(block=256)", b"\x7f" + bytes(range(256)), 256, ctx))
    yield Accept("fp8.every-scale", framed("fp8(block=16)", bytes(range(256)) + b"\x39" * 4096, 4096, ctx))
    yield Accept(
        "fp16.every-exponent",
        framed("fp16", struct.pack("<f", 2.0**100) + struct.pack("<64H", *range(0, 65536, 1024)), 64, ctx),
    )
    yield Accept("bf16.every-exponent", framed("bf16", struct.pack("<512H", *range(0, 65536, 128)), 512, ctx))
    yield Accept("natural.every-byte", framed("natural", b"\xaa" * 32 + bytes(range(256)), 256, ctx))
    levels = "natural_dithering(levels=2)"
    yield Accept("natural_dithering.every-code", framed(levels, struct.pack("<f", 3.0) + b"\x88\xc6\xfa", 8, ctx))
    block = bytes([0]) + struct.pack("<f", 2.0)  # mode, and one step; a rANS block follows
    trio = "qsgd(levels=1, coder=rans)"  # three symbols
    yield Accept("rans.empty-table", framed(trio, block + b"\x10" + bits("0 00100"), 9, ctx))
    yield Accept("rans.one-symbol", framed(trio, block + b"\x12" + bits("0 011 1"), 9, ctx))
    yield Accept("rans.raw", framed(trio, block + raw_levels((0, 1, 2, 1, 0)), 5, ctx))
    states = block + from_state((100, 600, 100), (1, 2, 0, 1, 1, 0, 2, 1, 1))
    yield Accept("rans.symbols-in-the-state", framed(trio, states, 9, ctx))
    infinite = bytes([0, 1]) + short_set(2, 9) + struct.pack("<f", math.inf)
    yield Accept("top_k.infinite-value", framed("top_k(k=1)", infinite, 9, ctx))
    yield Accept("sparse_dithering.negative-scale", framed(SD, segments(segment(-0.5, 1, raw_levels((1, 0, 2)))), 3, ctx))
    clamped = segments(segment(3e38, 1, raw_levels((2, 1, 0)), bits("001 1") + bits("00")))
    yield Accept("sparse_dithering.clamped", framed(SD, clamped, 3, ctx))
    yield Accept("sparse_dithering.bytes-after-levels", framed(SD, struct.pack("<f", 1.5) + bits("0 11") + b"\xff", 3, ctx))
    yield Accept("sparse_dithering.short-levels", framed(SD, struct.pack("<f", 1.5) + bits("0 00 11111"), 3, ctx))
    yield Accept("sparse_dithering.short-signs", framed(SD, struct.pack("<f", 1.5) + bits("0 00 10 10 0"), 3, ctx))
    yield Accept("sparse_dithering.no-stream", framed(SD, struct.pack("<f", 1.5), 5, ctx))
    yield Accept("sparse_dithering.no-coordinates", framed(SD, struct.pack("<f", 1.5) + b"\0", 0, ctx))
    yield Accept("threshold.largest-tau", framed("threshold(tau=3e38, values=sign)", b"\0\3\0\2", 3, ctx))
    yield Accept("fp16.negative-scale", framed("fp16", struct.pack("<f3H", -2.0, 0x3C00, 0xBC00, 0x7C00), 3, ctx))
    sphere = "spherical(alpha=0.5, block=2)"  # two words for three coordinates
    norms = b"\0" + struct.pack("<h", 1) + b"\0\1"
    yield Accept("spherical.rans-norms", framed(sphere, norms + raw_bits((1, 1)) + SPHERE_WORDS, 3, ctx))
    yield Accept("spherical.zero-blocks", framed(sphere, b"\0" + struct.pack("<h", 1) + b"\0\0", 3, ctx))
    far = (
        b"\0"
        + struct.pack("<h", 130)
        + b"\0\xff\1"
        + bytes([255, 2])
        + bits("01")
        + bits("0")
        + b"\2"
        + bits("1")
        + bits("00")
        + b"\0"
        + bits("1")
    )
    yield Accept("spherical.escaped-norm", framed(sphere, far, 3, ctx))
    yield Accept("spherical.bit-31-ignored", framed("spherical(alpha=0.5)", struct.pack("<I", 0x80000000), 3, ctx))
    stored = struct.pack("<I", 0x7F800000) + struct.pack("<3f", 1.0, -2.0, math.inf)
    yield Accept("spherical.stored", framed("spherical(alpha=0.5)", stored, 3, ctx))
    yield Accept(
        "subtractive_dithering.stored", framed(SUBTRACTIVE, struct.pack("<I3f", 0xFF800000, 1.0, -2.0, math.nan), 3, ctx)
    )
    int32 = segments(struct.pack("<fB3i", 0.5, 0, 7, -(2**31), 2**31 - 1))
    yield Accept("subtractive_dithering.int32-levels", framed(SUBTRACTIVE, int32, 3, ctx))
    classes = segments(struct.pack("<fBBB", 0.5, 1, 4, 2) + raw_levels((2, 1, 0)) + bits("001 1") + bits("00"))
    yield Accept("subtractive_dithering.escapes", framed(SUBTRACTIVE, classes, 3, ctx))
    yield Accept("text.strom", framed("strom(0.5)", b"\0\3\0\2", 3, ctx))
    yield Accept("text.ef_sign", framed("ef_sign", struct.pack("<f", 1.5) + b"\2", 3, ctx))
    yield Accept("text.mem_sgd", framed("mem_sgd(fraction=1)", b"\1", 3, ctx))
    yield Accept("text.spelled-out", framed(" fp8 ( block = +32 , ) ", b"\x7f\x38", 1, ctx))
    yield Accept("text.rules-as-a-list", framed("by_tensor(bf16, rules=[['?*', fp8]])", b"\2\x80\x3f", 1, ctx))


# ---- refused frames ---------------------------------------------------------------------------------------------------------

SD = "sparse_dithering(nu=0.1)"
SUBTRACTIVE = "subtractive_dithering(omega=0.25)"


def bits(text: str) -> bytes:
    """Bits in stream order, as bytes: spaces are for the reader, and the end is padded with zeros."""
    digits = text.replace(" ", "")
    digits += "0" * (-len(digits) % 8)
    return bytes(int(digits[i : i + 8][::-1], 2) for i in range(0, len(digits), 8))


def short_set(index: int, d: int) -> bytes:
    out = torch.zeros(64, dtype=torch.uint8)
    return bytes(out[: kernels.reference.digits_encode(torch.tensor([index], dtype=torch.int32), d, out)].tolist())


def raw_levels(symbols: tuple[int, ...]) -> bytes:
    """A raw rANS block of symbols 0, 1, 2."""
    return b"\1" + bits("".join(("00", "10", "01", "11")[s] for s in symbols))


def raw_bits(symbols: tuple[int, ...]) -> bytes:
    """A raw rANS block of symbols 0 and 1."""
    return b"\1" + bits("".join(map(str, symbols)))


def from_state(counts: tuple[int, ...], symbols: tuple[int, ...], unused: int = 0) -> bytes:
    """A rANS block of one lane and no words: the first symbol is coded, the others lie in the first state with ``unused`` above."""
    table = kernels.reference.rans_write_tables(torch.tensor([counts]))
    f = kernels.reference.rans_read_tables(torch.tensor(list(table), dtype=torch.uint8), len(counts), 1)[0][0].tolist()
    width = (len(counts) - 1).bit_length()
    assert len(symbols) == 1 + 16 // width
    first = 65536 + sum(s << j * width for j, s in enumerate((*symbols[1:], unused)))
    s = symbols[0]
    state = (first // f[s] << 12) + first % f[s] + sum(f[:s])
    return b"\x10" + table + struct.pack("<II", 0, state)


def segment(scale: float, window: int, block: bytes, escapes: bytes = b"") -> bytes:
    return struct.pack("<BB", 2, window) + varint.write(len(escapes)) + struct.pack("<f", scale) + block + escapes


def segments(data: bytes) -> bytes:
    return struct.pack("<I", 0x80000000) + data


def general() -> Iterator[Reject]:
    """For every configuration: a message that is cut, empty or followed by a byte, and modes that do not exist."""
    loose = ("sparse_dithering", "random_sparse_dithering", "subtractive_dithering")  # level streams have no end of their own
    forms = [(text, None) for text, _ in PLAN] + [(text, PIECES) for text in BY_TENSOR]
    forms += [(text, None) for text, _ in VARIANCE] + [(text, PIECES) for text in VARIANCE_PIECES]
    for number, (text, pieces) in enumerate(forms):
        d = (12 if text in SHORT_ONLY else 65) if pieces is None else sum(p.numel for p in pieces)
        ctx = context(1000 + number)
        whole = encoded(text, numbers(d, 1), ctx, pieces)
        opened = frame.unpack(whole)
        message, dtype = opened.payload, opened.dtype
        name = label(text) if pieces is None else label(text)[:60]
        if not any(word in text for word in loose) and text not in LOOSE_VALUES:
            yield Reject(f"{name}.cut", framed(text, message[:-1], d, ctx, dtype), "the last byte is missing", pieces)
            yield Reject(f"{name}.longer", framed(text, message + b"\0", d, ctx, dtype), "a byte follows the message", pieces)
        yield Reject(f"{name}.empty", framed(text, b"", d, ctx, dtype), "there is no message", pieces)
        if text.startswith(("top_k", "threshold")) or (("rans" in text or "elias" in text) and text[0] in "nq"):
            classed = "coder=rans" in text
            for mode in (5, 255) if text.startswith(("top_k", "thr")) else (3, 6) if classed else (3, 5):
                bad = bytes([mode]) + message[1:]
                yield Reject(f"{name}.mode-{mode}", framed(text, bad, d, ctx), f"there is no mode {mode}")
            for mode in (1, 2):
                bad = bytes([mode, 0])
                yield Reject(f"{name}.mode-{mode}-longer", framed(text, bad, d, ctx), f"bytes follow mode {mode}")


def bad_classed() -> Iterator[Reject]:
    """Mode 5 around values that are no levels."""
    step, natural, qsgd = struct.pack("<f", 1.0), "natural(coder=rans)", "qsgd(levels=4, coder=rans)"

    def values(*numbers: float) -> bytes:
        return segments(b"\1" + struct.pack(f"<{len(numbers)}f", *numbers))

    cases = {
        "qsgd.classed-half": (qsgd, step + values(1, 0.5, 0), "a level of 0.5"),
        "qsgd.classed-large": (qsgd, step + values(1, -5, 0), "a level of -5 of 4"),
        "qsgd.classed-nan": (qsgd, step + values(1, math.nan, 0), "a level that is not a number"),
        "qsgd.classed-cut": (qsgd, step + values(1, 2, 0)[:-1], "the last byte is missing"),
        "qsgd.classed-elias": ("qsgd(bits=3, coder=elias)", step + values(1, 2, 0), "elias has no mode 5"),
        "natural_dithering.classed-9": ("natural_dithering(coder=rans)", step + values(1, 9, 0), "a level of 9 of 8"),
        "natural.classed-0": (natural, b"\0\0" + values(0, 0, 0), "the largest exponent is 0"),
        "natural.classed-255": (natural, b"\xff\0" + values(0, 0, 0), "the largest exponent is 255"),
        "natural.classed-minus": (natural, b"\x7f\0" + values(0, -1, 0), "an exponent above the largest"),
        "natural.classed-below": (natural, b"\5\0" + values(0, 6, 0), "an exponent below 1"),
        "natural.classed-cut": (natural, b"\5\0", "nothing follows the signs"),
    }
    for name, (text, rest, reason) in cases.items():
        yield Reject(name, framed(text, b"\5" + rest, 3, context_of(name)), reason)


def bad_subtractive_classes() -> Iterator[Reject]:
    """Scale classes of subtractive dithering."""
    # Base 16, so that all three are of class 8; one table, which is there.
    told, block = struct.pack("<HB", 1 << 8, 16), raw_levels((1, 2, 0))
    cases = {
        "classes-no-window": (segments(struct.pack("<fBBB", 1.0, 128, 1, 0) + told + block), "classes without a window"),
        "classes-no-octave": (segments(struct.pack("<fBBB", 1.0, 129, 0, 0) + told + block), "no octave of the dither"),
        "classes-nine-octaves": (segments(struct.pack("<fBBB", 1.0, 129, 9, 0) + told + block), "nine octaves of the dither"),
        "classes-cut": (segments(struct.pack("<fBBB", 1.0, 129, 1, 0) + told[:2]), "a region has no mode"),
        "classes-escapes": (segments(struct.pack("<fBBB", 1.0, 129, 1, 9) + told + block), "escapes beyond the message"),
        "classes-longer": (segments(struct.pack("<fBBB", 1.0, 129, 1, 0) + told + block + b"\0"), "a byte follows the symbols"),
        "classes-mode-4": (segments(struct.pack("<fBBBHB", 1.0, 129, 1, 0, 1 << 8, 128 | 16) + block), "a mode of 4"),
        "classes-silent-rows": (segments(struct.pack("<fBBBHB", 1.0, 129, 1, 0, 1, 32) + block), "rows of a silent tensor"),
        "classes-no-table": (segments(struct.pack("<fBBBHB", 1.0, 129, 1, 0, 1, 16) + block), "a class without a table"),
        "classes-of-nothing": (segments(struct.pack("<fBBBH", 0.0, 129, 1, 0, 1)), "classes without coordinates"),
    }
    for case, (message, reason) in cases.items():
        name = f"subtractive_dithering.{case}"
        yield Reject(name, framed(SUBTRACTIVE, message, 3, context_of(name)), reason)


def bad_aligned() -> Iterator[Reject]:
    """Signs that no encoder writes, of a matrix of 4 rows and 5 columns."""
    pieces, values = (Piece((4, 5), 0, 20, "weight"),), bytes(40)
    cases = {
        "first-byte": (b"\2" + values, "the first byte is 2"),
        "kind-3": (b"\1" + bits("11 0000 00000 00000") + values, "there is no kind 3"),
        "padding": (b"\1" + b"\x41" + values, "the signs do not end in zeros"),
        "cut": (b"\1" + b"\2", "the signs are cut short"),
        "inner-cut": (b"\1" + b"\1" + values[1:], "the inner message is cut short"),
    }
    for name, (message, reason) in cases.items():
        frame_of = framed("aligned(bf16)", message, 20, context_of(f"aligned.{name}"))
        yield Reject(f"aligned.{name}", frame_of, reason, pieces)


def bad_shortest() -> Iterator[Reject]:
    """Messages of a choice that there is not."""
    text, values = "shortest(of=[bf16, int8])", bytes(40)
    cases = {
        "number": (b"\2" + values, "there are two configurations"),
        "inner-cut": (b"\0" + values[1:], "the message is cut short"),
    }
    for name, (message, reason) in cases.items():
        yield Reject(f"shortest.{name}", framed(text, message, 20, context_of(f"shortest.{name}")), reason)


def general_new() -> Iterator[Reject]:
    """The same for registered classes that the lists do not name."""
    for text, _ in registered():
        ctx, name = context_of(text), label(text)
        message = frame.unpack(encoded(text, numbers(65, 1), ctx)).payload
        yield Reject(f"{name}.empty", framed(text, b"", 65, ctx), "there is no message")
        if has_fixed_size(tersegrad.parse(text)):
            yield Reject(f"{name}.cut", framed(text, message[:-1], 65, ctx), "the last byte is missing")
            yield Reject(f"{name}.longer", framed(text, message + b"\0", 65, ctx), "a byte follows the message")


def headers() -> Iterator[Reject]:
    """Frames whose header or text form is wrong; the checksum is right unless that is what is wrong."""
    good = encoded("bf16", numbers(3, 1), context(2000))

    def patched(at: int, new: bytes) -> bytes:
        body = good[:at] + new + good[at + len(new) : -4]
        return body + struct.pack("<I", zlib.crc32(body))

    def texted(text: bytes, wire_id: int, message: bytes = b"", d: int = 0) -> bytes:
        body = struct.pack("<4sBBHQIHHQQB", b"TGRD", 1, 0, wire_id, 0, 0, 0, 0, d, len(message), len(text)) + text + message
        return body + struct.pack("<I", zlib.crc32(body))

    yield Reject("frame.empty", b"", "no bytes at all")
    yield Reject("frame.44-bytes", good[:44], "a frame has at least 45 bytes")
    yield Reject("frame.magic", patched(0, b"TGRE"), "another magic")
    yield Reject("frame.version-0", patched(4, b"\0"), "another version")
    yield Reject("frame.version-2", patched(4, b"\2"), "another version")
    yield Reject("frame.dtype", patched(5, b"\3"), "there is no dtype 3")
    yield Reject("frame.wire-id", patched(6, b"\3"), "the wire id is not that of the text form")
    yield Reject("frame.wire-id-unknown", patched(6, b"\xff\xff"), "the wire id is not that of the text form")
    yield Reject("frame.length-longer", patched(32, struct.pack("<Q", 7)), "the header announces a longer message")
    yield Reject(
        "frame.length-huge", patched(32, struct.pack("<Q", 2**64 - 1)), "the header announces a message of 2^64 - 1 bytes"
    )
    yield Reject("frame.text-longer", patched(40, b"\5"), "the header announces a longer text form")
    yield Reject("frame.coordinates", patched(24, struct.pack("<Q", 2**60)), "2^60 coordinates")
    yield Reject("frame.coordinates-more", patched(24, struct.pack("<Q", 4)), "one coordinate more than the message has")
    yield Reject("frame.checksum", good[:-1] + bytes([good[-1] ^ 1]), "a wrong checksum")
    yield Reject("frame.damaged", good[:50] + bytes([good[50] ^ 4]) + good[51:], "a flipped bit")
    yield Reject("frame.longer", good + b"\0", "a byte follows the frame")
    texts: dict[str, tuple[bytes, int]] = {
        "empty": (b"", 1),
        "not-ascii": (b"bf1\xb6", 2),
        "unknown-name": (b"bf17", 2),
        "number": (b"16", 2),
        "constant": (b"true", 1),
        "list": (b"[bf16]", 2),
        "unclosed": (b"fp8(block=16", 4),
        "two": (b"bf16 bf16", 2),
        "unknown-parameter": (b"fp8(blocks=16)", 4),
        "twice": (b"fp8(block=16, block=16)", 4),
        "positional-after-named": (b"top_k(k=3, 0.5)", 12),
        "wrong-type": (b"fp8(block=16.0)", 4),
        "not-a-power-of-two": (b"fp8(block=48)", 4),
        "out-of-range": (b"qsgd(bits=9)", 11),
        "levels-do-not-pack": (b"qsgd(levels=8)", 11),
        "both-fraction-and-k": (b"top_k(fraction=0.1, k=3)", 12),
        "missing": (b"threshold", 14),
        "biased-bf16": (b"random_k(k=1, values=bf16)", 13),
        "sign-of-zero": (b"threshold(tau=0, values=sign)", 14),
        "too-large-a-number": (b"int8(block=9223372036854775808)", 5),
        "infinite": (b"random_sparse_dithering(omega=inf)", 17),
        "too-many-draws": (b"spherical(alpha=0.1, block=64)", 19),
        "finer-than-norms": (b"spherical(alpha=1e-6, block=2)", 19),
        "wraps-nothing": (b"metered", 67),
        "wraps-a-string": (b'metered("bf16")', 67),
        "nested-17-deep": (b"metered(" * 17 + b"bf16" + b")" * 17, 67),
        "bad-map": (b"by_tensor(bf16, rules={a: bf16})", 66),
        "unclosed-string": (b'by_tensor(bf16, rules={"a: bf16})', 66),
    }
    for name, (text, wire_id) in texts.items():
        yield Reject(f"text.{name}", texted(text, wire_id), "the text form is no configuration")


def particular() -> Iterator[Reject]:
    """What single formats refuse."""
    number = itertools.count(3000)

    def make(name: str, text: str, message: bytes, d: int, reason: str) -> Reject:
        return Reject(name, framed(text, message, d, context(next(number))), reason)

    one = struct.pack("<f", 1.0)
    yield make("ternary.byte-243", "ternary", one + b"\xf3", 5, "a byte of trits above 242")
    yield make("ternary.padding", "ternary", one + b"\x09", 2, "a last byte of trits that is not padded with zeros")
    natural = "natural(coder=rans)"
    for name, pair in (("least-0", b"\0\5"), ("crossed", b"\6\5"), ("largest-255", b"\5\xff")):
        yield make(f"natural.{name}", natural, b"\0" + pair + b"\0" + raw_levels((0, 1, 2)), 3, "the range of exponents")
    elias = "qsgd(bits=3, coder=elias)"
    qsgd = {
        "count": (varint.write(4) + bits("1 1 1 1 1 1 1 1") + b"\0", "more non-zero levels than coordinates"),
        "coordinate": (varint.write(1) + bits("00100 1") + b"\0", "coordinate 3 of 3"),
        "level": (varint.write(1) + bits("1 00100") + b"\0", "level 4 of 3"),
        "gamma-too-long": (varint.write(1) + bits("0" * 63 + "1") + bytes(9), "a gamma code with 63 zeros"),
        "gamma-padding": (varint.write(1) + bits("1 1 1") + b"\0", "padding after the gamma codes"),
        "sign-padding": (varint.write(1) + bits("1 1") + b"\2", "padding after the signs"),
        "varint": (b"\x81\0" + bits("1 1") + b"\0", "a varint that is longer than necessary"),
        "varint-cut": (b"\x81", "the message ends inside a varint"),
        "varint-long": (b"\xff" * 10 + b"\1", "a varint of eleven bytes"),
    }
    for name, (rest, reason) in qsgd.items():
        yield make(f"qsgd-elias.{name}", elias, b"\0" + one + rest, 3, reason)
    yield from bad_rans(make)
    yield from bad_index_sets(make)
    top = "top_k(k=2)"
    value = struct.pack("<f", 1.0)
    yield make("top_k.count-0", top, bytes([0, 0]) + b"\0", 9, "a count of 0")
    yield make("top_k.count-3", top, bytes([0, 3]) + b"\0" + 3 * value, 9, "a count above k")
    yield make("top_k.varint", top, bytes([0, 0x81, 0]) + short_set(2, 9) + value, 9, "a varint that is longer than necessary")
    yield make("top_k.raw-short", top, b"\3" + 8 * value, 9, "a raw vector of 8 coordinates instead of 9")
    yield make("threshold.count-0", SIGNS, bytes([0, 0, 0]), 9, "a count of 0")
    yield make("threshold.count-10", SIGNS, bytes([0, 10, 0, 0, 0]), 9, "more coordinates than there are")
    yield make("threshold.raw-signs", SIGNS, b"\3" + 9 * value, 9, "values=sign has no raw mode")
    yield make("threshold.sign-padding", SIGNS, bytes([0, 1]) + short_set(2, 9) + b"\2", 9, "padding after the signs")
    yield from bad_dithering(make)
    yield from bad_shared(make)
    yield make("rotated.last-byte", "rotated(sign)", struct.pack("<f", 1.0) + b"\0\2", 3, "the last byte is 2")
    tensor = "by_tensor(bf16)"
    yield make("by_tensor.too-long", tensor, varint.write(7) + bytes(6), 3, "a length beyond the end of the message")
    yield make("by_tensor.huge", tensor, varint.write(2**64 - 1), 3, "a length of 2^64 - 1")
    yield make("by_tensor.bytes-after", tensor, varint.write(6) + bytes(7), 3, "a byte follows the last group")
    yield make("by_tensor.empty-buffer", tensor, b"\0", 0, "a buffer without coordinates has an empty message")
    rice = threshold_message(2, 9, bytes([251, 39]) + bits(("1" + "0" * 39) * 2))
    yield make(
        "by_tensor.above-longest",
        f"by_tensor({SIGNS})",
        varint.write(len(rice)) + rice,
        9,
        "longer than any message of the part",
    )
    budget = struct.pack("<f", 1.0) + bits("0 11") + bytes(9)
    text = "by_tensor(sparse_dithering(bits=8))"
    yield make("by_tensor.above-budget", text, varint.write(len(budget)) + budget, 3, "longer than the part's budget")
    yield from bad_variance(make)
    # Further ones come last, so that the contexts of the earlier ones stay as they were.
    blocks, norms = "spherical(alpha=0.5, block=2)", b"\0" + struct.pack("<h", 1) + b"\0\1" + raw_bits((1, 1))
    yield make("spherical.words-without-code", blocks, norms + SPHERE_WORDS[:4], 3, "the code of the last word is missing")
    yield make("spherical.rice-parameter", blocks, norms + b"\x39" + SPHERE_WORDS[1:], 3, "a Rice parameter of 57")
    fine = (0x3F800000 | 57 << 31 | 1 << 37).to_bytes(12, "little")
    yield make("spherical-vector.rice-parameter", "spherical(alpha=0.5)", fine, 3, "a Rice parameter of 57")
    yield from bad_trellis(make)
    yield from bad_trellis_classes(make)


Make = Callable[[str, str, bytes, int, str], Reject]


def bad_rans(make: Make) -> Iterator[Reject]:
    head = b"\0" + struct.pack("<f", 1.0)
    text = "qsgd(levels=1, coder=rans)"  # three symbols
    tables = {
        "form": (b"\2" + bytes(8), "a block is coded or raw"),
        "form-0": (b"\0" + bits("0 011 1"), "a block is coded or raw"),
        "chunk-13": (b"\x0d" + bits("0 011 1"), "chunks of 2^13 symbols"),
        "chunk-19": (b"\x13" + bits("0 011 1"), "chunks of 2^19 symbols"),
        "flags": (b"\x30" + bits("0 011 1"), "a flag that is not known"),
        "no-form": (b"", "the block is missing"),
        "raw-symbol": (b"\1" + bits("11 00 00"), "a raw symbol of 3 among three"),
        "raw-padding": (b"\1" + bits("00 00 00 1"), "padding after raw symbols"),
        "raw-cut": (b"\1", "raw symbols are missing"),
        "run": (b"\x10" + bits("0 00110"), "a run of 4 absent symbols among three"),
        "second-run": (b"\x10" + bits("0 1 00100"), "a run of 4 present symbols among three"),
        "rice-parameter": (b"\x10" + bits("1 0 011 0000000 0 000000 0 000000"), "a Rice parameter of 6"),
        "first-cost": (b"\x10" + bits("1 0 000 1000011 0 0"), "a cost of 97"),
        "negative-cost": (b"\x10" + bits("1 0 000 0000000 10 0"), "a cost of -1"),
        "large-cost": (b"\x10" + bits("1 0 000 0000011 110 0"), "a cost of 97"),
        "endless-rice": (b"\x10" + bits("1 0 000 0000000 " + "1" * 400), "a Rice code that does not end"),
        "table-padding": (b"\x10" + bits("0 011 1 1"), "padding after the tables"),
        "table-cut": (b"\x10", "the table is missing"),
    }
    for name, (block, reason) in tables.items():
        yield make(f"rans.{name}", text, head + block, 3, reason)
    state = from_state((100, 600, 100), (1, 2, 0, 1, 3, 0, 2, 1, 1))
    yield make("rans.symbol-in-the-state", text, head + state, 9, "a symbol of 3 among three in the state")
    state = from_state((1, 1, 9, 1, 1), (2, 2, 1, 2, 3, 2), unused=1)
    yield make(
        "rans.unused-bit-of-the-state", "qsgd(levels=2, coder=rans)", head + state, 6, "a bit above the symbols in the state"
    )
    big = frame.unpack(encoded("qsgd(levels=4, coder=rans)", KINDS["sparse"](2000), context(2999))).payload
    steps = 1 + 4 * 4
    at = steps + 1 + table_length(big[steps + 1 :], 9)
    words = struct.unpack_from("<I", big, at)[0]

    def changed(where: int, new: bytes) -> bytes:
        return big[:where] + new + big[where + len(new) :]

    cases = {
        "more-words-than-symbols": (changed(at, struct.pack("<I", 2001)), "a chunk of 2000 symbols with 2001 words"),
        "words-beyond": (changed(at, struct.pack("<I", words + 1)), "words beyond the message"),
        "word-missing": (changed(at, struct.pack("<I", words - 1))[:-2], "the last word is missing"),
        "word-too-many": (changed(at, struct.pack("<I", words + 1)) + b"\0\0", "a word too many"),
        "small-state": (changed(at + 4, struct.pack("<I", 65535)), "a state below 65536"),
        "wrong-state": (changed(at + 4, bytes([big[at + 4] ^ 1])), "lanes that do not return to their first state"),
        "states-cut": (big[: at + 10], "states are missing"),
    }
    for name, (message, reason) in cases.items():
        yield make(f"rans.{name}", "qsgd(levels=4, coder=rans)", message, 2000, reason)


def table_length(data: bytes, alphabet: int) -> int:
    stream = decoder.Bits(data)
    decoder.rans_table(stream, alphabet)
    return stream.finish()


def bad_index_sets(make: Make) -> Iterator[Reject]:
    forms = index_forms(65, 9)
    cases: dict[str, tuple[int, int, bytes, str]] = {
        "form-255": (9, 65, b"\xff" + bytes(20), "form 255"),
        "empty-set-golomb": (65, 65, b"\xfa", "an empty set has the short form"),
        "short-above-256": (300, 2400, bytes(400), "300 integers in the short form"),
        "short-cut": (9, 65, forms["short"][:2], "the code ends early"),
        "short-choice": (4, 9, b"\xf9\xff\xff\xff\xff\xff", "a choice that does not exist"),
        "golomb-outside": (2, 9, b"\xfa" + bits("00001 1") + bytes(4), "an index outside the vector"),
        "golomb-endless": (2, 9, b"\xfa" + bytes(4), "a quotient that does not end"),
        "golomb-padding": (9, 65, forms["golomb"][:-1] + bytes([forms["golomb"][-1] | 128]), "padding"),
        "golomb-unary-padding": (2, 9, b"\xfa" + bits("11 000001") + bits("00"), "padding after the quotients"),
        "golomb-rests-padding": (2, 9, b"\xfa" + bits("11") + bits("00 000001"), "padding after the remainders"),
        "golomb-last-padding": (2, 9, b"\xfa" + bits("11") + bits("11") + bits("00 000001"), "padding after the last bits"),
        "golomb-rests-cut": (2, 9, b"\xfa" + bits("11"), "the remainders are missing"),
        "golomb-last-cut": (2, 9, b"\xfa" + bits("11") + bits("11"), "the last bits are missing"),
        "golomb-last-outside": (2, 9, b"\xfa" + bits("001 01") + bits("11") + bits("11"), "a last index of 9"),
        "rice-40": (9, 65, b"\xfb\x28" + bytes(90), "a Rice parameter of 40"),
        "rice-missing": (9, 65, b"\xfb", "the Rice parameter is missing"),
        "bitmap-ones": (9, 65, b"\xfc" + b"\xff" + bytes(8), "8 ones instead of 9"),
        "bitmap-padding": (9, 65, b"\xfc" + b"\xff" + bytes(7) + b"\2", "padding"),
        "bitmap-cut": (9, 65, b"\xfc" + b"\xff", "the bitmap is cut"),
        "classes-0": (9, 65, b"\xfd\0" + bytes(20), "an alphabet of 0"),
        "classes-113": (9, 65, b"\xfd\x71" + bytes(20), "an alphabet of 113"),
        "classes-outside": (2, 65, b"\xfd\x0f\1" + bits("0111 0111") + bits("1" * 12), "an index outside the vector"),
        "rests-padding": (2, 65, b"\xfd\4\1" + bits("11 00") + bits("0 1"), "padding after the open bits"),
        "rests-cut": (9, 65, forms["gaps"][:-1], "open bits are missing"),
    }
    for name, (count, d, data, reason) in cases.items():
        message = threshold_message(count, d, data) if "cut" not in name and "missing" not in name else bytes([0, count]) + data
        yield make(f"index-set.{name}", SIGNS, message, d, reason)


def bad_dithering(make: Make) -> Iterator[Reject]:
    scale = struct.pack("<f", 1.0)
    words = {
        "cut": (b"\0\0\0", "fewer than four bytes"),
        "zero-longer": (bytes(5), "bytes follow a zero message"),
        "nonfinite-longer": (struct.pack("<I", 0x7FC00000) + b"\0", "bytes follow a non-finite message"),
        "negative-scale": (struct.pack("<f", -1.0) + bits("0 11"), "a negative scale"),
        "infinite-scale": (struct.pack("<f", math.inf) + bits("0 11"), "an infinite scale"),
        "another-nan": (struct.pack("<I", 0x7FC00001) + bits("0 11"), "a NaN that is not 0x7fc00000"),
        "level-too-large": (scale + bits("1" * 128), "a level of more than 31 bits"),
        "no-segment": (segments(b""), "the segment is missing"),
        "kind-3": (segments(b"\3"), "there is no segment of kind 3"),
        "zero-segment-longer": (segments(b"\0\0"), "bytes follow a zero segment"),
        "raw-segment-cut": (segments(b"\1" + bytes(11)), "a raw segment that is cut"),
        "segment-scale": (segments(segment(math.inf, 1, raw_levels((1, 0, 2)))), "an infinite scale"),
        "window-0": (segments(struct.pack("<BBBf", 2, 0, 0, 1.0)), "a window of 0"),
        "window-128": (segments(struct.pack("<BBBf", 2, 128, 0, 1.0) + b"\0" * 4), "a window of 128"),
        "escapes-beyond": (segments(struct.pack("<BBBf", 2, 1, 9, 1.0) + raw_levels((1, 0, 2))), "escapes beyond the message"),
        "escapes-missing": (segments(segment(1.0, 1, raw_levels((2, 2, 2)), b"\1")), "two escapes are missing"),
        "escapes-longer": (segments(segment(1.0, 1, raw_levels((1, 1, 2)), b"\1\0")), "a byte follows the escapes"),
        "escapes-padding": (segments(segment(1.0, 1, raw_levels((1, 1, 2)), b"\3")), "padding after the escapes"),
        "escape-too-large": (
            segments(segment(1.0, 1, raw_levels((1, 1, 2)), bits("0" * 31 + "1") + bits("1" + "0" * 30))),
            "a level above 2^31",
        ),
        "escape-endless": (
            segments(segment(1.0, 1, raw_levels((1, 1, 2)), bits("0" * 63 + "1") + bytes(8))),
            "an escape of 63 zeros",
        ),
        "escapes-low-padding": (
            segments(segment(1.0, 1, raw_levels((1, 1, 2)), bits("01") + bits("0 1"))),
            "padding after the low bits",
        ),
        "escapes-low-cut": (segments(segment(1.0, 1, raw_levels((1, 1, 2)), bits("01"))), "low bits of an escape are missing"),
        "length-longer": (
            segments(struct.pack("<BB2sf", 2, 1, b"\x80\0", 1.0) + raw_levels((1, 1, 1))),
            "a varint longer than necessary",
        ),
        "symbols-longer": (segments(segment(1.0, 1, raw_levels((1, 1, 1)) + b"\0")), "a byte follows the symbols"),
    }
    for name, (message, reason) in words.items():
        yield make(f"sparse_dithering.{name}", SD, message, 3, reason)
    yield make("sparse_dithering.too-many-zeros", SD, scale + bits("0 101"), 4, "5 zeros among 4 levels")
    table = struct.pack("<2I", 1, 2) + b"\0\0"
    yield make("sparse_dithering.table", SD, segments(table), 400_000, "segments that do not add up to the message")
    yield make("sparse_dithering.table-cut", SD, segments(b"\1\0\0\0"), 400_000, "a table of segments that is cut")
    yield make("random_sparse_dithering.kind-3", "random_sparse_dithering(omega=1)", segments(b"\3"), 3, "no segment of kind 3")


def bad_trellis(make: Make) -> Iterator[Reject]:
    """Trellis codes."""
    one, block = struct.pack("<f", 1.0), raw_levels((1, 2, 3))
    ends = struct.pack("<BBBBB", 0, 2, 2, 15, 1) + one + block
    plain = {
        "mode-3": (b"\3", "there is no mode 3"),
        "zero-longer": (b"\1\0", "a byte follows a zero message"),
        "kind-3": (b"\0\3", "the header of kind 3 is cut"),
        "kind-0-longer": (b"\0\0\0", "a byte follows a segment of zeros"),
        "values-cut": (b"\0\1" + 2 * one, "a coordinate is missing"),
        "header-cut": (b"\0\2\2", "the header is cut"),
        "odd-window": (struct.pack("<BBBBB", 0, 2, 3, 15, 0) + one + block, "an odd window"),
        "window-66": (struct.pack("<BBBBB", 0, 2, 66, 15, 0) + one + block, "a window of 66"),
        "run-13": (struct.pack("<BBBBB", 0, 2, 2, 13, 0) + one + block, "a run of 2^13"),
        "scale": (struct.pack("<BBBBBf", 0, 2, 2, 15, 0, -1.0) + block, "a negative scale"),
        "scale-nan": (struct.pack("<BBBBBf", 0, 2, 2, 15, 0, math.nan) + block, "a scale that is NaN"),
        "symbols-longer": (struct.pack("<BBBBB", 0, 2, 2, 15, 0) + one + block + b"\0", "a byte follows the symbols"),
        "escapes-missing": (ends + b"\1", "two escapes are missing"),
        "escapes-beyond": (struct.pack("<BBBBB", 0, 2, 2, 15, 9) + one + block, "escapes beyond the message"),
        "chunk-below-run": (struct.pack("<BBBBB", 0, 2, 2, 15, 0) + one + b"\x0e" + bytes(30), "runs longer than chunks"),
        "padded-length": (struct.pack("<BBBBBB", 0, 2, 2, 15, 128, 0) + one + block, "a length with a byte too many"),
    }
    for name, (message, reason) in plain.items():
        yield make(f"trellis.{name}", "trellis(nu=0.1)", message, 3, reason)
    classes = struct.pack("<BBBBBB", 0, 2, 2, 15, 4, 0) + one + block
    yield make("dithered_trellis.class-bits-4", "dithered_trellis(omega=1)", classes, 3, "four class bits")
    large = struct.pack("<BBBBBB", 0, 2, 2, 15, 0, 5) + one + block + bits("0" * 16 + "111") + bytes(2)
    yield make("dithered_trellis.index-too-large", "dithered_trellis(omega=1)", large, 3, "an index beyond the reach")
    yield make(
        "trellis.table", "trellis(nu=0.1)", b"\0" + struct.pack("<2I", 1, 2) + b"\0\0", 400_000, "segments that do not add up"
    )
    yield make("trellis.table-cut", "trellis(nu=0.1)", b"\0\1\0\0", 400_000, "a table of segments that is cut")


def bad_trellis_classes(make: Make) -> Iterator[Reject]:
    """Scale classes of trellis codes."""
    one, block = struct.pack("<f", 1.0), raw_levels((1, 2, 3))
    classed = struct.pack("<BBBBB", 0, 3, 2, 15, 0) + 2 * one
    mode_0, moving = struct.pack("<HB", 1 << 8, 16), struct.pack("<H", 1 << 8)
    bad = {
        "kind-4": (b"\0\4", "no segment of kind 4"),
        "classes-cut": (classed + moving + mode_0[:2], "a region has no mode"),
        "classes-scale": (struct.pack("<BBBBBff", 0, 3, 2, 15, 0, 1.0, -1.0) + moving + mode_0 + block, "a negative scale"),
        "classes-no-table": (classed + moving + struct.pack("<HB", 1, 16) + block, "a class without a table"),
        "classes-moving": (classed + struct.pack("<H", 1 << 8 | 1 << 9) + mode_0 + block, "a class without a table moves"),
        "classes-mode-4": (classed + moving + struct.pack("<HB", 1 << 8, 128 | 16) + block, "a mode of 4"),
    }
    for name, (message, reason) in bad.items():
        yield make(f"trellis.{name}", "trellis(nu=0.1)", message, 3, reason)
    classes = struct.pack("<BBBBBB", 0, 3, 2, 15, 0, 0) + one + struct.pack("<HB", 1, 16) + block
    yield make("dithered_trellis.classes-no-table", "dithered_trellis(omega=1)", classes, 3, "a class without a table")


def bad_shared(make: Make) -> Iterator[Reject]:
    """Subtractive dithering and spherical compression."""
    one = struct.pack("<f", 1.0)
    subtractive = {
        "zero-longer": (bytes(5), "a byte follows a zero message"),
        "stored-cut": (struct.pack("<I2f", 0xFF800000, 1.0, 2.0), "a coordinate is missing"),
        "negative-step": (struct.pack("<f", -1.0) + b"\1", "a negative step"),
        "denormal-step": (struct.pack("<I", 1) + b"\1", "a subnormal step"),
        "no-levels": (one, "the levels are missing"),
        "too-long": (one + b"\1" + bytes(18), "longer than any message"),
        "level-too-large": (one + bits("0" + "1" * 127), "a level of more than 31 bits"),
        "steps-cut": (segments(b""), "the step is missing"),
        "segment-step": (segments(struct.pack("<fB3i", -1.0, 0, 1, 2, 3)), "a negative step"),
        "segment-step-nan": (segments(struct.pack("<fB3i", math.nan, 0, 1, 2, 3)), "a step that is NaN"),
        "no-window": (segments(one), "the window is missing"),
        "int32-cut": (segments(struct.pack("<fB2i", 1.0, 0, 1, 2)), "a level is missing"),
        "window-128": (segments(struct.pack("<fBBB", 1.0, 128, 0, 0) + raw_levels((1, 1, 1))), "a window of 128"),
        "class-bits-5": (segments(struct.pack("<fBBB", 1.0, 1, 5, 0) + raw_levels((1, 1, 1))), "five class bits"),
        "escapes-beyond": (segments(struct.pack("<fBBB", 1.0, 1, 0, 9) + raw_levels((1, 1, 1))), "escapes beyond the message"),
        "escapes-missing": (
            segments(struct.pack("<fBBB", 1.0, 1, 0, 1) + raw_levels((2, 2, 2)) + b"\1"),
            "two escapes are missing",
        ),
        "symbols-longer": (
            segments(struct.pack("<fBBB", 1.0, 1, 0, 0) + raw_levels((1, 1, 1)) + b"\0"),
            "a byte follows the symbols",
        ),
    }
    for name, (message, reason) in subtractive.items():
        yield make(f"subtractive_dithering.{name}", SUBTRACTIVE, message, 3, reason)
    yield make("subtractive_dithering.empty-short", SUBTRACTIVE, one + b"\1", 0, "a short message without coordinates")
    vector = {
        "cut": (b"\0\0\0", "fewer than four bytes"),
        "zero-longer": (bytes(5), "a byte follows a zero message"),
        "denormal-norm": (struct.pack("<I", 0x80000001), "a subnormal norm"),
        "nan-norm": (struct.pack("<I", 0xFFC00001), "a NaN that is not 0x7fc00000"),
        "stored-cut": (struct.pack("<I2f", 0x7F800000, 1.0, 2.0), "a coordinate is missing"),
        "no-one": (struct.pack("<I", 0x3F800000) + bytes(2), "the code does not end"),
        "too-far": (struct.pack("<I", 0x3F800000) + bytes(16) + b"\x80", "a quotient of 130"),
        "longer": ((0x3F800000 | 1 << 37).to_bytes(7, "little"), "bytes follow the code"),
    }
    for name, (message, reason) in vector.items():
        yield make(f"spherical-vector.{name}", "spherical(alpha=0.5)", message, 3, reason)
    huge = (0x3F800000 | 42 << 31 | 1 << 37 | (1 << 41) << 38).to_bytes(10, "little")
    yield make("spherical-vector.out-of-reach", "spherical(alpha=0.5)", huge, 3, "a word of number 2^41")
    yield make(
        "spherical-vector.no-coordinates",
        "spherical(alpha=0.5)",
        struct.pack("<I", 0xBF800000),
        0,
        "a norm without coordinates",
    )
    text, top = "spherical(alpha=0.5, block=2)", b"\0" + struct.pack("<h", 1)
    tail = SPHERE_WORDS
    blocks = {
        "mode-4": (b"\4" + bytes(12), "there is no mode 4"),
        "stored-cut": (b"\3" + bytes(11), "a coordinate is missing"),
        "norms-form": (top + b"\2\1" + raw_bits((1, 1)) + tail, "there is no form 2 of the norms"),
        "norms-cut": (top + b"\1\1\5\1", "the norms are cut"),
        "norm-above": (top + b"\1\0" + b"\1" + bits("0 00 0 0 1"), "a negative distance from the largest norm"),
        "norm-too-large": (b"\0" + struct.pack("<h", 32767) + b"\0\1" + raw_bits((1, 1)) + tail, "a norm above 2^140"),
        "norm-too-small": (b"\0" + struct.pack("<h", -32768) + b"\0\1" + raw_bits((1, 1)) + tail, "a norm below 2^-127"),
        "words-cut": (top + b"\0\1" + raw_bits((1, 1)) + tail[:3], "the last word is missing"),
        "words-longer": (top + b"\0\1" + raw_bits((1, 1)) + tail + b"\0", "a byte follows the words"),
        "words-padding": (top + b"\0\1" + raw_bits((1, 1)) + tail[:4] + b"\x81", "padding after the words"),
        "out-of-reach": (
            top
            + b"\0\1"
            + raw_bits((1, 0))
            + b"\2"
            + bits("0" * 32 + "1")
            + bits("00")
            + bits("0" * 41 + "1")
            + bits("0" * 41),
            "a word of number 2^43",
        ),
    }
    for name, (message, reason) in blocks.items():
        yield make(f"spherical.{name}", text, message, 3, reason)
    yield make("spherical.no-coordinates", text, top + b"\0\0", 0, "norms without coordinates")


def levels(*values: int) -> bytes:
    """An adaptive level stream."""
    return bytes(kernels.reference.levels_encode(torch.tensor(values, dtype=torch.int32), True).tolist())


def bad_variance(make: Make) -> Iterator[Reject]:
    """Variance-based compression."""
    out = torch.zeros(64, dtype=torch.uint8)
    size = kernels.reference.digits_encode(torch.tensor([2, 5], dtype=torch.int32), 9, out)
    two = bytes([2]) + bytes(out[:size].tolist())
    vgc = {
        "mode-3": (b"\3" + bytes(36), "there is no mode 3"),
        "count-0": (bytes([0, 0, 0]), "a count of 0"),
        "count-10": (bytes([0, 10, 0]) + levels(1, *[1] * 10), "more coordinates than there are"),
        "level-0": (b"\0" + two + levels(1, 1, 0), "a code of level 0"),
        "level-9": (b"\0" + two + levels(1, 1, -9), "a code of level 9"),
        "step-0": (b"\0" + two + levels(0, 1, 1), "a step of level 0"),
        "exponent-128": (b"\0" + two + levels(139, 1, 1), "an exponent of 128"),
        "exponent-minus-127": (b"\0" + two + levels(-117, 1, 1), "an exponent of -127"),
        "denormal": (b"\0" + two + levels(-116, 1, 2), "a value of 2^-127"),
        "packed-cut": (b"\4" + two + b"\0", "the codes are missing"),
        "packed-longer": (b"\4" + two + b"\0\x12\0", "a byte follows the codes"),
        "packed-exponent": (b"\4" + two + b"\x80\x12", "an exponent of -128"),
        "no-exponent": (b"\4" + two, "the exponent is missing"),
    }
    for name, (message, reason) in vgc.items():
        yield make(f"vgc.{name}", "vgc(alpha=1.5)", message, 9, reason)
    head, e = b"VGC1" + struct.pack("<I", 2), b"\xf6\0\0\0"
    words = {
        "empty": (b"", "an empty message"),
        "mode-1": (b"\1", "the paper's form has no mode 1"),
        "magic": (b"VGC2" + struct.pack("<I", 2) + e + struct.pack("<2I", 1, 2), "another magic"),
        "count": (head + e + struct.pack("<3I", 1, 2, 3), "three words instead of two"),
        "order": (head + e + struct.pack("<2I", 2, 1), "indices that decrease"),
        "twice": (head + e + struct.pack("<2I", 2, 2), "an index that comes twice"),
        "beyond": (head + e + struct.pack("<2I", 2, 9), "coordinate 9 of 9"),
        "padding": (head + b"\xf6\0\1\0" + struct.pack("<2I", 1, 2), "padding after the exponents"),
        "no-exponent": (head + b"\x80\0\0\0" + struct.pack("<2I", 1, 2), "words of a tensor that sends nothing"),
        "no-words": (b"VGC1" + bytes(4) + e, "an exponent without words"),
        "exponent": (head + b"\x81\0\0\0" + struct.pack("<2I", 1, 2), "an exponent of -127"),
        "denormal": (head + b"\x82\0\0\0" + struct.pack("<2I", 1, 2 | 1 << 28), "a value of 2^-127"),
    }
    for name, (message, reason) in words.items():
        yield make(f"vgc-paper.{name}", "vgc(alpha=1.5, wire=paper)", message, 9, reason)
    yield make("vgc-bf16.cut", "vgc(alpha=1, values=bf16)", b"\0" + two + bytes(3), 9, "half a value is missing")
    yield make("vgc-sign.cut", "vgc(alpha=1, values=sign)", b"\0" + two + bytes(2), 9, "the signs are missing")
    yield make("vgc-sign.padding", "vgc(alpha=1, values=sign)", b"\0" + two + b"\x80\x3f\4", 9, "padding after the signs")
    yield make("vgc-sign.packed", "vgc(alpha=1, values=sign)", b"\4" + two + b"\x80\x3f\1", 9, "only exp4 has mode 4")
    yield make("vgc-inner.cut", "vgc(alpha=1, values=int8)", b"\0" + two + bytes(5), 9, "a level is missing")
    hybrid = "hybrid(alpha=2, tau=0.5)"
    yield make("hybrid.count-0", hybrid, bytes([0, 0, 0]), 9, "a count of 0")
    yield make("hybrid.mode-4", hybrid, b"\4" + two + b"\1", 9, "there is no mode 4")
    yield make("hybrid.padding", hybrid, b"\0" + two + b"\4", 9, "padding after the signs")
    text = "hybrid(alpha=2, tau=0.5, wire=paper)"
    yield make("hybrid-paper.magic", text, b"VGC1" + bytes(4), 9, "the magic of vgc")
    yield make("hybrid-paper.beyond", text, b"VGH1" + struct.pack("<2I", 1, 9), 9, "coordinate 9 of 9")


def refused() -> Iterator[Reject]:
    yield from general()
    yield from general_new()
    yield from bad_classed()
    yield from bad_subtractive_classes()
    yield from bad_aligned()
    yield from bad_shortest()
    yield from headers()
    yield from particular()


# ---- files ------------------------------------------------------------------------------------------------------------------


def from_package(data: bytes, pieces: tuple[Piece, ...] | None) -> bytes:
    """What the package decodes, as float32 bytes with one kind of NaN."""
    opened = frame.unpack(data, max_numel=1 << 26)
    values = tersegrad.from_frame(data, spec=None if pieces is None else Spec(pieces, opened.dtype))
    values = torch.where(values.isnan(), math.nan, values)
    return bytes(values.contiguous().view(torch.uint8).numpy().tobytes())


def from_spec(data: bytes, pieces: tuple[Piece, ...] | None) -> bytes:
    """What the independent decoder decodes."""
    listed = None if pieces is None else [decoder.Piece(p.name, p.shape, p.start, p.stop) for p in pieces]
    return decoder.float32_bytes(decoder.decode_frame(data, listed))


def listed_pieces(pieces: tuple[Piece, ...]) -> list[dict[str, Any]]:
    return [{"name": p.name, "shape": list(p.shape), "start": p.start, "stop": p.stop} for p in pieces]


def accept_entry(vector: Accept, check: bool) -> dict[str, Any]:
    opened = frame.unpack(vector.data)
    decoded = from_package(vector.data, vector.pieces)
    if check and from_spec(vector.data, vector.pieces) != decoded:
        raise AssertionError(f"the package and the specification decode {vector.name} differently")
    entry: dict[str, Any] = {
        "file": f"accept/{vector.name}.frame",
        "text": opened.text,
        "wire_id": opened.wire_id,
        "numel": opened.numel,
        "dtype": str(opened.dtype).removeprefix("torch."),
        "decoded_crc32": f"{zlib.crc32(decoded):08x}",
    }
    return entry if vector.pieces is None else {**entry, "pieces": listed_pieces(vector.pieces)}


def reject_entry(vector: Reject, check: bool) -> dict[str, Any]:
    for decode, refusal in ((from_package, CorruptMessage), (from_spec, ValueError)) if check else ():
        try:
            decode(vector.data, vector.pieces)
        except refusal:
            continue
        raise AssertionError(f"{decode.__name__} accepts {vector.name}: {vector.reason}")
    entry: dict[str, Any] = {"file": f"reject/{vector.name}.frame", "reason": vector.reason}
    return entry if vector.pieces is None else {**entry, "pieces": listed_pieces(vector.pieces)}


def files(check: bool = True) -> dict[str, bytes]:
    """Every file of ``spec/vectors`` by its path there; ``check``: the package and the specification must agree on each."""
    made: dict[str, bytes] = {}
    index: dict[str, list[dict[str, Any]]] = {"accept": [], "reject": []}
    for accept in accepted():
        index["accept"].append(accept_entry(accept, check))
        made[index["accept"][-1]["file"]] = accept.data
    for reject in refused():
        index["reject"].append(reject_entry(reject, check))
        made[index["reject"][-1]["file"]] = reject.data
    if len(made) != sum(map(len, index.values())):
        raise AssertionError("two vectors have one name")
    for kind, entries in index.items():
        lines = ",\n".join(json.dumps(entry, separators=(",", ":")) for entry in entries)
        made[f"{kind}.json"] = f"[\n{lines}\n]\n".encode()
    return made


def main() -> None:
    made = files()
    shutil.rmtree(FOLDER, ignore_errors=True)
    for path, data in made.items():
        target = FOLDER / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)
    print(f"{len(made)} files, {sum(map(len, made.values())):,} bytes in {FOLDER}")


if __name__ == "__main__":
    main()

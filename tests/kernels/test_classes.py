"""Scale classes: all instruction sets and the reference choose and write the same, read the same, and refuse what is damaged."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from tersegrad.core import state
from tersegrad.core.errors import CorruptMessage
from tersegrad.core.protocol import Context, Piece, Spec
from tersegrad.kernels import native, reference
from tersegrad.kernels.reference import classes
from tests.kernels.test_dither import RANS, gaussian, settings, tensor
from tests.laws.inputs import uneven

CODED, CLASSED = 2, 3
SHAPES = ((48, 16, 3, 3), (24,), (3,), (60, 65), (), (70, 33), (1, 200))


def encode(
    x: Tensor, nu: float, layout: Tensor | None, backend: object, ctx: Context | None = None, step: float = 0.0
) -> bytes:
    out = torch.empty(reference.dither_max_bytes(x.numel()), dtype=torch.uint8)
    nbytes, _, _ = backend.dither_encode(x, nu, step, RANS, 16, ctx, out, None, None, layout)  # type: ignore[attr-defined]
    return bytes(out[: int(nbytes)].tolist())


def agree(x: Tensor, nu: float, layout: Tensor | None, ctx: Context | None = None, step: float = 0.0) -> bytes:
    wanted = encode(x, nu, layout, reference, ctx, step)
    values = reference.dither_decode(tensor(wanted), torch.empty(x.numel()), None, layout)
    for isa, threads in settings():
        with native.using(isa=isa, threads=threads):
            assert encode(x, nu, layout, native, ctx, step) == wanted, (isa, threads)
            out = native.dither_decode(tensor(wanted), torch.empty(x.numel()), None, layout)
            assert torch.equal(out, values), (isa, threads)
            left, buffer = torch.empty_like(x), torch.empty(reference.dither_max_bytes(x.numel()), dtype=torch.uint8)
            native.dither_encode(x, nu, step, RANS, 16, ctx, buffer, left, None, layout)
            assert torch.equal(left, x - values), (isa, threads)
    return wanted


@pytest.mark.parametrize("nu", [0.3, 0.01, 1e-5])
def test_rows_and_columns(nu: float) -> None:
    x, spec = uneven(SHAPES)
    data = agree(x, nu, spec.layout)
    assert data[4] == CLASSED
    assert len(data) < 0.97 * len(encode(x, nu, None, native))
    agree(x, nu, spec.layout, Context(seed=3))
    agree(x, 0.0, spec.layout, step=0.01)


@pytest.mark.parametrize("cut", [(0, 4000), (100, 9000), (6900, 10_000), (5, 13_000)])
def test_parts_keep_the_rows_of_their_tensors(cut: tuple[int, int]) -> None:
    x, spec = uneven(SHAPES)
    part = state.slice_spec(spec, *cut)
    assert agree(x[cut[0] : cut[1]].contiguous(), 0.003, part.layout)[4] == CLASSED


def test_several_segments_sample_their_counts() -> None:
    x, spec = uneven(((700, 300), (512, 64, 3, 3), (40,)), spread=1.5)
    data = agree(x, 0.1, spec.layout)
    assert data[12] == CLASSED
    assert len(data) < 0.8 * len(encode(x, 0.1, None, native))


def test_blocks_serve_vectors_without_shape() -> None:
    x = gaussian(1 << 17) * torch.exp2(2 * gaussian(1 << 9, 1)).repeat_interleave(1 << 8)
    spec = Spec.flat(x.numel())
    data = agree(x, 0.1, spec.layout)
    assert data[4] == CLASSED
    assert len(data) < 0.9 * len(encode(x, 0.1, None, native))
    # Who decodes without a layout takes the vector for one row, as this one is.
    assert torch.equal(
        native.dither_decode(tensor(data), torch.empty(x.numel()), None),
        native.dither_decode(tensor(data), torch.empty(x.numel()), None, spec.layout),
    )


@pytest.mark.parametrize("n", [511, 512, 5000, 70_000])
def test_even_data_have_no_classes(n: int) -> None:
    for seed, nu in enumerate((0.5, 0.1, 1e-3)):
        x = gaussian(n, seed)
        for spec in (Spec.flat(n), Spec((Piece((n // 50, 50), 0, n // 50 * 50), Piece((n % 50,), 0, n % 50)))):
            data = encode(x, nu, spec.layout, native)
            assert data[4] == CODED
            assert data == encode(x, nu, None, native)
    assert data == encode(x, nu, spec.layout, reference)


@pytest.mark.parametrize("spread", [0.0, 0.3, 0.5, 1.0])
@pytest.mark.parametrize("scale", [0.5, 3.0, 40.0])
def test_a_look_at_the_levels_tells_whether_there_will_be_classes(spread: float, scale: float) -> None:
    begin = 1 << 18
    for shapes in (SHAPES, ((30, 20),), ((begin,), (300, 300))):
        x, spec = uneven(shapes, spread=spread)
        levels = (x * scale).round()
        small = levels.clamp(-127, 127).to(torch.int8)
        wanted = encode(levels, 0.0, spec.layout, native, step=1.0)
        segments = (x.numel() + (1 << 17)) >> 18
        starts = [4]
        if segments > 1:
            sizes = torch.frombuffer(bytearray(wanted[4 : 4 + 4 * segments]), dtype=torch.int32).tolist()
            starts = [4 + 4 * segments + sum(sizes[:k]) for k in range(segments)]
        kinds = [wanted[at] == CLASSED for at in starts]
        for isa, threads in settings():
            with native.using(isa=isa, threads=threads):
                assert native.may_have_classes(small, spec.layout, 0, x.numel()) == any(kinds), (isa, threads)
                for k in range(segments):
                    part = small[k * begin : (k + 1) * begin if k + 1 < segments else None].contiguous()
                    assert native.may_have_classes(part, spec.layout, k * begin, x.numel()) == kinds[k], (isa, threads)
        assert reference.may_have_classes(small, spec.layout, 0, x.numel())


def test_segments_with_little_to_code_have_one_chunk() -> None:
    x, spec = uneven(((600, 256),), spread=3.0)
    messages = []
    for backend, chunk in ((native, 0), (reference, 0), (native, 16)):
        out = torch.empty(reference.dither_max_bytes(x.numel()), dtype=torch.uint8)
        nbytes, _, _ = backend.dither_encode(x, 0.3, 0.0, RANS, chunk, None, out, None, None, spec.layout)
        messages.append(bytes(out[: int(nbytes)].tolist()))
    assert messages[0] == messages[1]
    assert messages[0][4] == CLASSED
    assert len(messages[0]) < len(messages[2]) - 150


def test_silent_rows_cost_next_to_nothing() -> None:
    x, spec = torch.zeros(1000, 256), Spec.of(torch.empty(1000, 256))
    x[::10] = gaussian(25_600).view(100, 256)
    few = agree(x.flatten(), 0.0, spec.layout, step=0.3)
    alone = encode(x[::10].flatten().contiguous(), 0.0, None, native, step=0.3)
    # A decision for each row takes half a bit, and further chunks their states.
    assert len(few) < len(alone) + 1000 / 16 + 4 * 260


def test_a_layout_must_belong_to_the_vector() -> None:
    x = gaussian(1000)
    for numbers in ([999, 10, 1, 0], [1000, 10, 3, 0], [1000, 10, 1, 10], [1000, 0, 1, 0], [-1, 1, 1, 0, 1001, 1, 1, 0]):
        layout = torch.tensor(numbers)
        for backend in (native, reference):
            with pytest.raises(ValueError, match="layout"):
                encode(x, 0.1, layout, backend)
            with pytest.raises(ValueError, match="layout"):
                backend.dither_decode(tensor(b"\0\0\0\x80\0"), x.clone(), None, layout)


def test_damaged_classes_are_refused_or_decode_alike() -> None:
    x, spec = uneven(((90, 40), (12,), (16, 5, 3, 3), (100,)))
    data, rng, refused = encode(x, 0.02, spec.layout, native), random.Random(0), 0
    assert data[4] == CLASSED
    # Kind, window, escapes and one scale come first; the classes begin at byte 11 and take some 60 bytes.
    for trial in range(120):
        bad = bytearray(data)
        if trial % 4 == 0:
            del bad[rng.randrange(4, len(bad)) :]
        for _ in range(rng.randrange(1, 3)):
            place = rng.randrange(4, min(len(bad), 80)) if len(bad) > 5 else 4
            if place < len(bad):
                bad[place] ^= 1 << rng.randrange(8)
        results: list[Tensor | None] = []
        for backend in (native, reference):
            try:
                results.append(backend.dither_decode(tensor(bytes(bad)), torch.empty(x.numel()), None, spec.layout))
            except CorruptMessage:
                results.append(None)
        assert (results[0] is None) == (results[1] is None), bad[:80].hex()
        if results[0] is not None and results[1] is not None:
            assert torch.equal(results[0], results[1])
        refused += results[0] is None
    assert refused > 60


def told(symbols: Tensor, window: int, layout: Tensor, parts: Tensor, backend: object) -> tuple[bytes, Tensor]:
    contexts = torch.zeros_like(symbols)
    found = backend.classes_choose(symbols, window, layout, parts, contexts)  # type: ignore[attr-defined]
    return (b"", torch.zeros_like(symbols)) if found is None else (bytes(found.tolist()), contexts)


@pytest.mark.parametrize("scale", [0.1, 0.5, 3.0])
def test_classes_of_symbols_that_are_coded_elsewhere(scale: float) -> None:
    x, spec = uneven((*SHAPES, (600, 500)))
    window = 7
    symbols = (scale * x).round().clamp(-window, window).add(window).to(torch.uint8)
    middle = 4567  # left out between two parts, in the middle of a tensor
    for ranges in ((0, x.numel()), (0, middle, middle + 100, x.numel()), (middle, middle + 400)):
        parts = torch.tensor(ranges)
        here = torch.cat([symbols[a:b] for a, b in parts.view(-1, 2).tolist()])
        wanted, contexts = told(here, window, spec.layout, parts, reference)
        assert bool(wanted) == (here.numel() > 512)
        for isa, threads in settings():
            with native.using(isa=isa, threads=threads):
                data, same = told(here, window, spec.layout, parts, native)
                assert data == wanted, (isa, threads)
                assert torch.equal(same, contexts), (isa, threads)
                if data:
                    found = torch.empty_like(here)
                    tables, used = native.classes_read(tensor(data + b"rest"), spec.layout, parts, found)
                    assert (tables, used) == (int(contexts.max()) + 1, len(data))
                    assert torch.equal(found, contexts)
        if wanted:
            found = torch.empty_like(here)
            assert reference.classes_read(tensor(wanted), spec.layout, parts, found) == (int(contexts.max()) + 1, len(wanted))
            assert torch.equal(found, contexts)


def test_damaged_classes_alone_are_refused_or_read_alike() -> None:
    x, spec = uneven(((90, 40), (12,), (16, 5, 3, 3), (100,)))
    symbols, parts = x.round().clamp(-3, 3).add(3).to(torch.uint8), torch.tensor((0, 2000, 2000, x.numel()))
    data, rng, refused = told(symbols, 3, spec.layout, parts, native)[0], random.Random(1), 0
    for trial in range(200):
        bad = bytearray(data)
        bad[rng.randrange(len(bad))] ^= 1 << rng.randrange(8)
        if trial % 4 == 0:
            del bad[rng.randrange(len(bad)) :]
        results: list[tuple[int, int, Tensor] | None] = []
        for backend in (native, reference):
            found = torch.empty_like(symbols)
            try:
                results.append((*backend.classes_read(tensor(bytes(bad)), spec.layout, parts, found), found))
            except CorruptMessage:
                results.append(None)
        one, other = results
        assert (one is None) == (other is None), bad.hex()
        if one is not None and other is not None:
            assert one[:2] == other[:2]
            assert torch.equal(one[2], other[2])
        refused += one is None
    assert 40 < refused < 200


def test_parts_must_belong_to_the_vector() -> None:
    symbols, layout = torch.zeros(1000, dtype=torch.uint8), Spec.flat(1000).layout
    for ranges in ((0, 999), (0, 1001), (-1, 999), (500, 1000, 0, 500), (0, 1000, 1000), (0, 600, 500, 900)):
        with pytest.raises(ValueError, match="part"):
            native.classes_choose(symbols, 1, layout, torch.tensor(ranges), symbols.clone())
        with pytest.raises(ValueError, match="part"):
            native.classes_read(tensor(bytes(20)), layout, torch.tensor(ranges), symbols.clone())
    long = torch.zeros(1 << 19, dtype=torch.uint8)
    with pytest.raises(ValueError, match="part"):
        native.classes_choose(long, 1, Spec.flat(1 << 19).layout, torch.tensor((0, 1 << 19)), long.clone())
    with pytest.raises(ValueError, match="window"):
        native.classes_choose(symbols + 3, 1, layout, torch.tensor((0, 1000)), symbols.clone())


def test_what_no_encoder_writes_is_refused() -> None:
    region = classes.Region(10, 20, 1, 0)
    for field in (0x80 | 1, 0x20, 2 << 5 | 16):
        with pytest.raises(CorruptMessage):
            classes.read_classes(tensor(bytes([255, 255, field]) + bytes(8)), [region])
    # A class without a table, and the end of the message.
    for data in (b"\0\0\x10", b"\xff"):
        with pytest.raises(CorruptMessage):
            classes.read_classes(tensor(data), [region])

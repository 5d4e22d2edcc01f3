"""Scale classes by the CUDA kernels, emulated on the CPU: the same bytes, the same values and the same refusals as the reference."""

from __future__ import annotations

import json
import pathlib
import struct
import zlib
from typing import Any

import pytest
import torch
from torch import Tensor

from spec import make_vectors
from tersegrad import kernels
from tersegrad.core import state
from tersegrad.core.errors import CorruptMessage
from tersegrad.core.protocol import Context, Piece, Spec
from tersegrad.kernels import cuda, native, reference
from tersegrad.kernels.cuda import classes, dither
from tersegrad.kernels.reference.classes import BLOCK, Region, Scales, cut
from tersegrad.kernels.reference.rans import _pack_raw, encode_counted
from tersegrad.kernels.reference.rans_tables import rans_histogram
from tests.kernels.agree import same
from tests.kernels.emulator import compiler, emulated
from tests.kernels.test_classes import SHAPES
from tests.laws.inputs import uneven

pytestmark = pytest.mark.skipif(compiler() is None, reason="needs a C++ compiler")

VECTORS = pathlib.Path(__file__).parents[2] / "spec" / "vectors"
CODED, CLASSED = 2, 3


def encoded(x: Tensor, nu: float, layout: Tensor | None, chunk: int = 0, ctx: Context | None = None, step: float = 0) -> Tensor:
    """The message, the same from both: with its length, norm, error and what it leaves out."""
    results = []
    for backend in (native if native.available() else reference, dither):
        data, left = torch.zeros(reference.dither_max_bytes(x.numel()), dtype=torch.uint8), torch.zeros_like(x)
        length, norm, error = backend.dither_encode(x, nu, step, 1, chunk, ctx, data, left, torch.zeros_like(x), layout)
        results.append((length, data[: int(length)], norm, error, left))
    for expected, found in zip(*results, strict=True):
        assert same(expected, found)
    return results[0][1]


# Where regions lie


def test_regions_are_those_of_the_reference() -> None:
    longer = classes.LONGEST_ROW + 10
    layouts = [
        [[700_000, 700_000, 1, 0]],
        [[1000, 10, 1, 3], [0, 5, 1, 0], [7, 7, 1, 0], [698_993, 300, 3, 299]],
        [[500_000, 5 * longer, 5, 5 * longer - 300_000], [200_000, 1, 1, 0]],
        [[700_000, longer, 1, 5]],
    ]
    for layout in layouts:
        found = classes.regions_of(torch.tensor(layout), sum(n for n, *_ in layout), torch.device("cpu"))
        table, firsts = found.table[: found.number * classes.PLACES], found.table[found.number * classes.PLACES :]
        rows = table.view(-1, classes.PLACES).tolist()
        assert found.where == (table.data_ptr(), firsts.data_ptr())
        assert firsts[-1] == len(rows) == found.number
        room = 0
        for s, (begin, end) in enumerate(((0, 1 << 18), (1 << 18, 2 << 18), (2 << 18, 700_000))):
            expected = cut(layout, begin, end)
            mine = rows[firsts[s] : firsts[s + 1]]
            assert len(mine) == len(expected)
            for (start, count, columns, group, phase, number, at), region in zip(mine, expected, strict=True):
                here = Region(count, columns, group, phase)
                assert start == begin
                assert (count, number, at) == (region.count, region.rows, room)
                assert torch.equal(here.row_of(torch.device("cpu")), region.row_of(torch.device("cpu")))
                assert (count >= columns) == (region.count >= region.columns)
                if count >= columns:
                    assert here == region
                lines = [sum(region.scales(mode)) for mode in range(4) if mode != 2 or count >= columns]
                begin += count
                room += max(*lines, -(-count // BLOCK))
        assert room == found.room


def test_a_layout_must_belong_to_the_vector() -> None:
    x = torch.randn(2000)
    for numbers in ([1999, 10, 1, 0], [2000, 10, 3, 0], [2000, 10, 1, 10], [2000, 0, 1, 0], [-1, 1, 1, 0, 2001, 1, 1, 0]):
        with emulated(), pytest.raises(ValueError, match="layout"):
            encoded(x, 0.1, torch.tensor(numbers))


# Encoding


@pytest.mark.parametrize("nu", [0.3, 0.01, 1e-5])
def test_rows_and_columns(nu: float) -> None:
    x, spec = uneven(SHAPES)
    with emulated():
        assert encoded(x, nu, spec.layout)[4] == CLASSED


def test_rounding_at_random_and_steps_that_are_given() -> None:
    x, spec = uneven(((160, 60), (130,)), spread=3.0)
    with emulated():
        assert encoded(x, 0.001, spec.layout, 14, Context(seed=2**63 + 5, step=7, buffer=2, sender=1))[4] == CLASSED
        assert encoded(x, 0, spec.layout, step=0.01)[4] == CLASSED


@pytest.mark.parametrize("part", [(0, 4000), (100, 9000), (6900, 10_000)])
def test_parts_keep_the_rows_of_their_tensors(part: tuple[int, int]) -> None:
    x, spec = uneven(SHAPES)
    with emulated():
        assert encoded(x[slice(*part)].contiguous(), 0.003, state.slice_spec(spec, *part).layout)[4] == CLASSED


def test_blocks_serve_vectors_without_shape() -> None:
    g = torch.Generator().manual_seed(1)
    even = torch.randn(6000, generator=g)
    x = even * torch.exp2(2 * torch.randn(50, generator=g)).repeat_interleave(120)
    with emulated():
        assert encoded(x, 0.1, Spec.flat(6000).layout)[4] == CLASSED
        for layout in (Spec.flat(6000).layout, Spec.of(torch.empty(60, 100)).layout, None):
            assert encoded(even, 0.1, layout)[4] == CODED


def test_silent_rows_and_grids() -> None:
    g = torch.Generator().manual_seed(2)
    silent = torch.zeros(100, 64)
    silent[::10] = torch.randn(10, 64, generator=g)
    grid = torch.randn(64, 90, generator=g) * torch.exp2(3 * torch.randn(64, 1, generator=g))
    grid *= torch.exp2(3 * torch.randn(90, generator=g))
    with emulated():
        assert encoded(silent.flatten(), 0, Spec.of(silent).layout, step=0.3)[4] == CLASSED
        data = encoded(grid.flatten(), 0.001, Spec.of(grid).layout)
        # Kind, window, no escapes, one scale and the mask come before the mode of the region.
        assert data[4] == CLASSED
        assert data[13] >> 5 == 2


def test_many_small_pieces() -> None:
    x, spec = uneven(((10, 32), (12, 16, 2), (5, 512), *((n,) for n in (64, 3, 65, 200) * 12), (2, 300), (40, 1), (500, 2)))
    with emulated():
        encoded(x, 0.01, spec.layout)


def test_zeros_and_numbers_that_are_not_finite() -> None:
    x, spec = uneven(((30, 50),))
    x[77] = torch.inf
    with emulated():
        assert encoded(torch.zeros(1500), 0.1, spec.layout)[4] == 0
        for backend in (native if native.available() else reference, dither):
            data = torch.zeros(reference.dither_max_bytes(1500), dtype=torch.uint8)
            length, norm, _ = backend.dither_encode(x, 0.1, 0, 1, 0, None, data, None, None, spec.layout)
            assert int(length) == 4
            assert float(norm) == torch.inf
            assert data[:4].tolist() == [0, 0, 192, 127]


def test_very_many_escapes_keep_the_classes() -> None:
    x, spec = uneven(((150, 100),))
    with emulated():
        assert encoded(x, 1e-9, spec.layout)[4] == CLASSED


def test_several_segments_sample_their_counts() -> None:
    """The border between segments lies within a row of a convolution; what is little to code has one chunk."""
    x, spec = uneven(((500, 300), (300, 64, 3, 3), (82_000,)), spread=1.5)
    x[-82_000:] = 0
    with emulated():
        data = encoded(x, 0.3, spec.layout)
    assert data[12] == CLASSED


def test_short_vectors_stay_on_the_cpu() -> None:
    x, spec = uneven(((20, 40),))
    with emulated():
        encoded(x, 0.01, spec.layout)


# Decoding


def decoded(backend: Any, data: Tensor, numel: int, layout: Tensor | None, weight: float | None = None) -> Tensor | None:
    """The values, or nothing where the message is refused."""
    out = torch.linspace(-1, 1, numel)
    try:
        backend.dither_decode(data, out, weight, layout)
    except CorruptMessage:
        return None
    return out


def agree(data: Tensor, numel: int, layout: Tensor | None) -> bool:
    """Whether the message is accepted, by both, with the same values."""
    expected, found = (decoded(ops, data, numel, layout) for ops in (native if native.available() else reference, dither))
    assert (expected is None) == (found is None)
    assert expected is None or found is None or same(expected, found)
    return found is not None


def message(x: Tensor, nu: float, layout: Tensor, **options: Any) -> Tensor:
    out = torch.zeros(reference.dither_max_bytes(x.numel()), dtype=torch.uint8)
    ops = native if native.available() else reference
    return out[: int(ops.dither_encode(x, nu, 0.0, 1, 14, None, out, None, None, layout, **options)[0])].clone()


def test_added_values_are_weighted() -> None:
    x, spec = uneven(((160, 60), (130,)), spread=3.0)
    data = message(x, 0.001, spec.layout)
    with emulated():
        pair = [decoded(ops, data, x.numel(), spec.layout, 0.3) for ops in (reference, dither)]
    assert pair[0] is not None
    assert pair[1] is not None
    assert same(pair[0], pair[1])


def built(
    symbols: Tensor, fields: list[tuple[int, int]], octaves: Tensor, regions: list[Region], raw: bool = False, more: int = 0
) -> Tensor:
    """A message of one segment with window 3 that says this of its classes, which an encoder need not choose; ``more`` tables."""
    columns = torch.cat(
        [
            torch.tensor([k]).repeat(size)
            for region, (mode, _) in zip(regions, fields, strict=True)
            for k, size in enumerate(region.scales(mode))
        ]
    )
    scales = Scales(fields, octaves.to(torch.uint8), columns.to(torch.uint8))
    classed = scales.classes(regions).long()
    used = torch.bincount(classed, minlength=16) > 0
    used[:more] = True
    contexts = (used.cumsum(0) - 1)[classed].to(torch.uint8)
    number = int(used.sum())
    body = torch.zeros(2 * symbols.numel() + 100, dtype=torch.uint8)
    counts = rans_histogram(symbols, 7, contexts, number, False)
    length = encode_counted(symbols, 7, contexts, number, counts, 14, body)
    if raw:
        packed = _pack_raw(symbols, 3)
        length = 1 + packed.numel()
        body[0] = 1
        body[1:length] = packed
    mask = sum(1 << c for c in range(16) if used[c])
    head = struct.pack("<IBBBfH", 0x80000000, 3, 3, 0, 0.5, mask)
    return torch.cat([torch.tensor(list(head + scales.tobytes()), dtype=torch.uint8), body[:length]])


def test_unusual_descriptions_are_read() -> None:
    g = torch.Generator().manual_seed(5)
    regions = [Region(1200, 60, 3, 0), Region(37, 5, 1, 2), Region(500, 500, 1, 0), Region(1, 1, 1, 0)]
    layout = torch.tensor([number for r in regions for number in (r.count, r.columns, r.group, r.phase)])
    n = sum(r.count for r in regions)
    symbols = torch.randint(1, 6, (n,), generator=g).to(torch.uint8)
    modes = [(2, 17), (1, 20), (3, 3), (0, 31)]
    sizes = sum(sum(r.scales(mode)) for r, (mode, _) in zip(regions, modes, strict=True))
    none = torch.zeros(0)
    ones = [(0, 16), (0, 20), (0, 0), (0, 3)]
    cases = [
        # Octaves that are worth coding, that are not, and that are all the same.
        (symbols, modes, torch.randint(7, 9, (sizes,), generator=g)),
        (symbols, modes, torch.randint(0, 16, (sizes,), generator=g)),
        (symbols, modes, torch.full((sizes,), 9)),
        (symbols, ones, none),
        # Tables that leave no choice: one symbol for each class.
        (torch.tensor([1, 4, 3, 5]).repeat_interleave(torch.tensor([r.count for r in regions])).to(torch.uint8), ones, none),
    ]
    with emulated():
        for own, fields, octaves in cases:
            data = built(own, fields, octaves, regions)
            assert agree(data, n, layout)
            assert agree(built(own, fields, octaves, regions, more=16), n, layout)
            assert not agree(torch.cat([data, data[:1]]), n, layout)
            # Too few classes, or one too many.
            for mask in (0, 0xFFFF):
                bad = data.clone()
                bad[11], bad[12] = mask & 255, mask >> 8
                agree(bad, n, layout)
        raw = built(symbols, modes, cases[0][2], regions, raw=True)
        assert agree(raw, n, layout)
        assert not agree(raw[:-1], n, layout)


def test_silent_rows_need_a_table() -> None:
    regions = [Region(1280, 64, 1, 0)]
    octaves = torch.full((84,), 8)
    octaves[3] = 0
    symbols = torch.randint(1, 6, (1280,), generator=torch.Generator().manual_seed(6)).to(torch.uint8)
    layout = torch.tensor([1280, 64, 1, 0])
    data = built(symbols, [(2, 16)], octaves, regions)
    assert data[11] == 1
    with emulated():
        assert agree(data, 1280, layout)
        data[11] = 2
        assert not agree(data, 1280, layout)


def test_fields_that_no_encoder_writes_are_refused() -> None:
    x, spec = uneven(((160, 60), (130,)), spread=3.0)
    data = message(x, 0.001, spec.layout)
    assert data[4] == CLASSED
    with emulated():
        for place, field in ((13, 0x80 | 1), (13, 0x20), (13, 0x40), (14, 2 << 5 | 16), (14, 5 << 5)):
            bad = data.clone()
            bad[place] = field
            assert not agree(bad, x.numel(), spec.layout)


def test_damaged_classes_are_refused_or_decode_alike() -> None:
    x, spec = uneven(((90, 40), (12,), (16, 5, 3, 3), (100,)))
    data, generator, refused = message(x, 0.02, spec.layout), torch.Generator().manual_seed(0), 0
    assert data[4] == CLASSED

    def drawn(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=generator))

    with emulated():
        for trial in range(40):
            bad = data.clone()
            if trial % 4 == 0:
                bad = bad[: drawn(5, bad.numel())]
            # The classes and tables begin at byte 11 and take some hundred bytes.
            for _ in range(drawn(1, 3)):
                bad[drawn(4, min(bad.numel(), 150 if trial % 3 else 10_000))] ^= 1 << drawn(0, 8)
            refused += not agree(bad, x.numel(), spec.layout)
    assert 20 < refused < 40


@pytest.mark.parametrize("kind", ["accept", "reject"])
def test_committed_vectors(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All messages of Sparse Dithering, the short ones by the kernels too."""
    monkeypatch.setitem(vars(kernels)["_chosen"], "cpu", kernels.overlay(native, cuda))
    monkeypatch.setattr(dither, "SHORT", 0)
    found = 0
    with emulated():
        for entry in json.loads((VECTORS / f"{kind}.json").read_text()):
            if "sparse_dithering" not in entry["file"]:
                continue
            found += 1
            listed = entry.get("pieces")
            parts = listed and tuple(Piece(tuple(p["shape"]), p["start"], p["stop"], p["name"]) for p in listed)
            data = (VECTORS / entry["file"]).read_bytes()
            if kind == "reject":
                with pytest.raises(CorruptMessage):
                    make_vectors.from_package(data, parts)
            else:
                assert f"{zlib.crc32(make_vectors.from_package(data, parts)):08x}" == entry["decoded_crc32"], entry
    assert found > 30

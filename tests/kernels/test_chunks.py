"""Chunks: both backends choose, code and scatter the same, and damaged codes are refused."""

from __future__ import annotations

import contextlib
import itertools
import math

import pytest
import torch

from tersegrad.codecs import chunk_sets, tiles
from tersegrad.codecs.tiles import Region
from tersegrad.core.errors import CorruptMessage
from tersegrad.core.protocol import Piece, Spec
from tersegrad.kernels import native, reference

SPEC = Spec((Piece((128, 192), 0, 24576), Piece((77,), 0, 77), Piece((3, 100, 50), 0, 15000), Piece((100, 100), 50, 5000)))
LAYOUTS = [
    tiles.regions(SPEC, 64, 64),
    tiles.regions(SPEC, 64, 1),
    tiles.regions(SPEC, 32, 256),
    tiles.regions(SPEC, 8, 3, 16),
    tiles.regions(Spec.flat(70_000), 256, 200),
    tiles.regions(Spec.flat(5), 2, 4),
]


def vectors(numel: int) -> dict[str, torch.Tensor]:
    x = torch.randn(numel, generator=torch.Generator().manual_seed(numel))
    return {
        "normal": x,
        "ties": x.round(),
        "zeros": torch.where(torch.arange(numel) % 97 == 0, x, 0.0),
        "scales": x * 2.0 ** (x * 9),
    }


def chosen(backend: object, x: torch.Tensor, regions: tuple[Region, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    count = sum(r.places for r in regions)
    places, values = torch.empty(count, dtype=torch.int32), torch.empty(count)
    assert bool(backend.chunk_choose(x, tiles.table(regions), places, values))  # type: ignore[attr-defined]
    return places, values


def coded(backend: object, places: torch.Tensor, regions: tuple[Region, ...], numel: int) -> torch.Tensor:
    out = torch.empty(chunk_sets.max_nbytes(regions), dtype=torch.uint8)
    return out[: int(backend.chunk_encode(places, tiles.table(regions), numel, out))]  # type: ignore[attr-defined]


@pytest.mark.parametrize("regions", LAYOUTS, ids=range(len(LAYOUTS)))
def test_backends_agree(regions: tuple[Region, ...]) -> None:
    numel, table = sum(r.numel for r in regions), tiles.table(regions)
    for x in vectors(numel).values():
        places, values = chosen(reference, x, regions)
        data = coded(reference, places, regions, numel)
        back = torch.empty_like(places)
        reference.chunk_decode(data, table, numel, back)
        assert torch.equal(back, places)
        dense, added = torch.full((numel,), 7.0), x.clone()
        reference.chunk_scatter(places, values, table, dense)
        reference.chunk_scatter(places, values, table, added, -0.3)
        for isa in native.supported_isas():
            with native.using(isa=isa, threads=1 + (isa == "portable")):
                mine, theirs = chosen(native, x, regions), torch.full((numel,), 7.0)
                assert torch.equal(mine[0], places)
                assert torch.equal(mine[1], values)
                assert torch.equal(coded(native, places, regions, numel), data)
                back.zero_()
                native.chunk_decode(data, table, numel, back)
                assert torch.equal(back, places)
                native.chunk_scatter(places, values, table, theirs)
                assert torch.equal(theirs, dense)
                theirs = x.clone()
                native.chunk_scatter(places, values, table, theirs, -0.3)
                assert torch.equal(theirs, added)


@pytest.mark.parametrize("backend", [reference, native], ids=["reference", "native"])
def test_states_above_all_bounds_are_read(backend: object) -> None:
    """The number of pairs does not divide 2^31, and with these last pairs a state lies between 2^63 and its next multiple."""
    numel = 32 * 4096
    regions, j = tiles.regions(Spec.flat(numel), 64, 2), torch.arange(32)
    for high in range(301, 349, 4):
        pairs = torch.stack((97 * j, 4095 - 13 * j), 1).int()
        pairs[-1] = torch.tensor((0, high))
        places = pairs.reshape(-1)
        back = torch.empty_like(places)
        backend.chunk_decode(coded(native, places, regions, numel), tiles.table(regions), numel, back)  # type: ignore[attr-defined]
        assert torch.equal(back, places)


def test_the_first_and_the_last_pair_with_each_higher_place_are_read() -> None:
    """Where the root of a pair's rank is closest to a whole number."""
    high = torch.arange(1, 4096, dtype=torch.int32)
    places = torch.stack((torch.zeros_like(high), high, high - 1, high), 1).reshape(-1)
    numel = 2 * 4096 * high.numel()
    regions = tiles.regions(Spec.flat(numel), 64, 2)
    back = torch.empty_like(places)
    native.chunk_decode(coded(native, places, regions, numel), tiles.table(regions), numel, back)
    assert torch.equal(back, places)


@pytest.mark.parametrize("keep", [2, 3, 4, 32])
def test_many_random_sets_are_read(keep: int) -> None:
    """Some two hundred streams, of tiles and of a prime number of rows: what is rare in one of them occurs."""
    g = torch.Generator().manual_seed(keep)
    chunks = 200 * chunk_sets.STREAM // keep
    regions = (Region(0, 64, 64 * chunks, 64, 64, keep), Region(4096 * chunks, 8009, 64, 1, 64, keep))
    numel, found = sum(r.numel for r in regions), []
    for r in regions:
        # Numbers without repetition: gaps of random size, in order.
        gaps = torch.rand(r.count, r.keep + 1, generator=g, dtype=torch.float64).log_().neg_()
        shares = gaps.cumsum(1)[:, :-1] / gaps.sum(1, keepdim=True)
        found.append(((r.size - r.keep) * shares).int() + torch.arange(r.keep, dtype=torch.int32))
    places = torch.cat([f.reshape(-1) for f in found])
    back = torch.empty_like(places)
    native.chunk_decode(coded(native, places, regions, numel), tiles.table(regions), numel, back)
    assert torch.equal(back, places)


@pytest.mark.parametrize("regions", LAYOUTS, ids=range(len(LAYOUTS)))
@pytest.mark.parametrize("decay", [1.0, float(torch.tensor(0.95)), 0.0])
def test_sums_with_what_is_carried(regions: tuple[Region, ...], decay: float) -> None:
    """The bits of a product and a sum, one after the other, and what would be chosen of them."""
    numel, table = sum(r.numel for r in regions), tiles.table(regions)
    x, carry = vectors(numel)["normal"], vectors(numel)["scales"].clamp(-1e30, 1e30)
    expected = decay * carry + x
    places, values = chosen(reference, expected, regions)
    backends = [(reference, None), *((native, isa) for isa in native.supported_isas())]
    for backend, isa in backends:
        found, out = (torch.empty_like(places), torch.empty_like(values)), torch.empty_like(x)
        with native.using(isa=isa) if isa else contextlib.nullcontext():
            assert bool(backend.chunk_carry(x, carry, decay, out, table, *found))
        assert torch.equal(out.view(torch.int32), expected.view(torch.int32))
        assert torch.equal(found[0], places)
        assert torch.equal(found[1], values)
        assert not bool(backend.chunk_carry(x, carry + math.inf, 1.0, out, table, *found))


def test_long_sums_go_around_the_caches() -> None:
    """Sums above 16 MiB are stored otherwise: tiles, runs, and a part that begins between two cache lines."""
    regions = (Region(0, 64, 128, 64, 64, keep=20), Region(8192, 1, 7, 1, 7, keep=3), Region(8199, 1088, 4096, 64, 64, keep=20))
    numel, table = sum(r.numel for r in regions), tiles.table(regions)
    x, carry = vectors(numel)["normal"], torch.randn(numel, generator=torch.Generator().manual_seed(3))
    # Some tiles hold far larger numbers than the ones above them.
    x[8199 + 640 * 4096 : 8199 + 704 * 4096] *= 9
    expected = 0.5 * carry + x
    places, values = chosen(native, expected, regions)
    for shift in (0, 9):
        # Behind the odd part all tiles begin between two lines, unless the memory itself is shifted against it.
        memory = torch.empty(numel + 16)
        out, found = memory[shift : shift + numel], (torch.empty_like(places), torch.empty_like(values))
        assert bool(native.chunk_carry(x, carry, 0.5, out, table, *found))
        assert torch.equal(out, expected)
        assert torch.equal(found[0], places)
        assert torch.equal(found[1], values)


@pytest.mark.parametrize("backend", [reference, native], ids=["reference", "native"])
def test_the_largest_are_chosen_with_ties_to_the_lowest_place(backend: object) -> None:
    regions = (Region(0, 4, 4, 2, 2, keep=2),)
    x = torch.tensor([1.0, 1, 0, 0, -1, 0, 0, -0.0, 5, 0, 2, 3, 0, -4, 3, 1])
    places, values = chosen(backend, x, regions)
    assert places.tolist() == [0, 1, 0, 1, 0, 3, 1, 2]
    assert values.tolist() == [1, 1, 0, 0, 5, -4, 3, 3]


@pytest.mark.parametrize("backend", [reference, native], ids=["reference", "native"])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("at", [0, 4095, 4096, 5000])
def test_what_is_not_finite_is_found(backend: object, bad: float, at: int) -> None:
    regions = tiles.regions(Spec.flat(5001), 64, 3)
    x = torch.randn(5001)
    x[at] = bad
    places, values = torch.empty(6, dtype=torch.int32), torch.empty(6)
    assert not bool(backend.chunk_choose(x, tiles.table(regions), places, values))  # type: ignore[attr-defined]


def test_every_set_of_a_small_chunk_has_a_code_of_its_own() -> None:
    seen = set()
    for k in range(1, 7):
        regions = (Region(0, 1, 7, 1, 7, keep=k),)
        for places in itertools.combinations(range(7), k):
            wanted = torch.tensor(places, dtype=torch.int32)
            data = coded(reference, wanted, regions, 7)
            back = torch.empty_like(wanted)
            reference.chunk_decode(data, tiles.table(regions), 7, back)
            assert torch.equal(back, wanted)
            seen.add((k, bytes(data.tolist())))
    assert len(seen) == 2**7 - 2


def test_every_set_takes_about_as_many_bits_and_never_more_than_the_limit() -> None:
    """What is clustered is as long as what is spread: the chances of the halves multiply to 1 / C(n, k) for every set."""
    regions, count = (Region(0, 64, 4096, 64, 64, keep=64),), 64
    spread = torch.arange(64, dtype=torch.int32).mul(64).repeat(count)
    ideal = count * math.log2(math.comb(4096, 64))
    for places in (spread, spread // 64, 4032 + spread // 64, spread // 64 * 2, spread // 64 + (spread // 2048) * 4032):
        n = coded(native, places, regions, 64 * 4096).numel()
        assert 8 * n < ideal + 40 * count * 64 / 2048 + 0.01 * 64 * count
        assert n <= chunk_sets.max_nbytes(regions)


@pytest.mark.parametrize("backend", [reference, native], ids=["reference", "native"])
def test_damaged_codes_are_refused_or_decode_to_valid_places(backend: object) -> None:
    regions = tiles.regions(Spec.flat(9000), 32, 37)
    numel, table = 9000, tiles.table(regions)
    places, _ = chosen(reference, torch.randn(numel), regions)
    data, draw = coded(reference, places, regions, numel), torch.Generator().manual_seed(1)
    back, refused = torch.empty_like(places), 0
    for trial in range(60):
        damaged = data[: int(torch.randint(data.numel(), (), generator=draw))] if trial % 3 == 0 else data.clone()
        if trial % 3:
            at = int(torch.randint(data.numel(), (), generator=draw))
            damaged[at] = damaged[at] ^ int(torch.randint(1, 256, (), generator=draw))
        try:
            backend.chunk_decode(damaged, table, numel, back)  # type: ignore[attr-defined]
        except CorruptMessage:
            refused += 1
        else:
            rows = back[: 8 * 37].reshape(8, 37)
            assert bool((rows.diff(dim=1) > 0).all())
            assert 0 <= int(rows.min()) <= int(rows.max()) < 1024
    # What is cut is refused. What is changed is the code of another set: every set takes the same bits, none are left over.
    assert refused >= 20
    with pytest.raises(CorruptMessage):
        backend.chunk_decode(torch.cat((data, data[:1])), table, numel, back)  # type: ignore[attr-defined]


@pytest.mark.parametrize("backend", [reference, native], ids=["reference", "native"])
def test_places_out_of_order_are_a_mistake_of_the_caller(backend: object) -> None:
    regions = (Region(0, 1, 8, 1, 8, keep=2),)
    for places in ([3, 3], [5, 1], [-1, 2], [0, 8]):
        with pytest.raises(ValueError, match="increase"):
            coded(backend, torch.tensor(places, dtype=torch.int32), regions, 8)


def test_the_compiled_module_refuses_regions_that_do_not_fit() -> None:
    x, places, values = torch.randn(64), torch.empty(4, dtype=torch.int32), torch.empty(4)
    for row in (
        [0, 8, 8, 3, 8, 1],
        [0, 8, 8, 8, 8, 0],
        [1, 8, 8, 8, 8, 4],
        [0, 8, 4, 8, 4, 4],
        [0, 8, 8, 8, 8, 3],
        [0, 8, 8, -8, 8, 4],
    ):
        with pytest.raises(ValueError):
            native.chunk_choose(x, torch.tensor(row), places, values)


@pytest.mark.parametrize("bins", [2, 4, 16])
def test_backends_fill_the_same_bins(bins: int) -> None:
    x = torch.randn(3001, generator=torch.Generator().manual_seed(bins)).pow(3)
    x[:7] = torch.tensor([3e38, -3e38, 0, -0.0, 1e-40, 5, 5])
    counts = torch.tensor([7, 1, 1000, 1993])
    results = []
    for backend in (reference, native):
        chosen_bins, stands = torch.empty(3001, dtype=torch.uint8), torch.empty(4 * bins)
        filled = torch.empty(4 * bins, dtype=torch.int64)
        backend.chunk_bins(x, counts, bins, chosen_bins, stands, filled)
        assert int(filled.sum()) == 3001
        assert bool(torch.isfinite(stands).all())
        results.append((chosen_bins, stands, filled))
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


def test_backends_transform_alike() -> None:
    regions = tiles.regions(SPEC, 16, vector=16, run=16)
    for x in vectors(SPEC.numel).values():
        ours, theirs = torch.empty_like(x), torch.empty_like(x)
        reference.cosine_forward(x, tiles.table(regions), ours)
        for isa in native.supported_isas():
            with native.using(isa=isa):
                native.cosine_forward(x, tiles.table(regions), theirs)
                assert torch.equal(ours, theirs)
                back, again = torch.empty_like(x), torch.empty_like(x)
                native.cosine_inverse(ours, tiles.table(regions), back)
        reference.cosine_inverse(ours, tiles.table(regions), again)
        assert torch.equal(back, again)
        assert float((back - x).norm()) <= 1e-6 * float(x.norm())

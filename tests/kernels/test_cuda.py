"""The CUDA sources without a GPU: NVRTC compiles them, and an emulation on the CPU compares their bytes with the reference."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

import tersegrad
from tersegrad import Context, Message, Spec, Stats, kernels
from tersegrad.codecs import varint
from tersegrad.core.errors import CorruptMessage
from tersegrad.core.protocol import needs_second_moment
from tersegrad.kernels import cuda, native, reference
from tersegrad.kernels.cuda import dither, index, loader, nvrtc, rans, scratch, select, vectors
from tests.kernels.agree import same
from tests.kernels.emulator import compiler, emulated

needs_nvrtc = pytest.mark.skipif(nvrtc.why_missing() is not None, reason=str(nvrtc.why_missing()))
needs_compiler = pytest.mark.skipif(compiler() is None, reason="needs a C++ compiler")


@needs_nvrtc
@pytest.mark.parametrize("name", loader.names())
def test_sources_compile_for_a_gpu(name: str) -> None:
    assert nvrtc.compile_source(loader.source(name), name, "sm_90")[:4] == b"\x7fELF"


@needs_nvrtc
def test_compiler_errors_are_told() -> None:
    with pytest.raises(
        nvrtc.CompileError, match=r"broken.cu does not compile for sm_90(.|\n)*identifier \"nothing\" is undefined"
    ):
        nvrtc.compile_source("__global__ void f(int* x) { *x = nothing; }", "broken.cu", "sm_90")


def test_compiled_kernels_are_kept_and_checked(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    def compile_source(source: str, name: str, architecture: str) -> bytes:
        made.append(architecture)
        return b"cubin for " + architecture.encode()

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(nvrtc, "compile_source", compile_source)
    monkeypatch.setattr(nvrtc, "version", lambda: (13, 0))
    for _ in range(2):
        assert loader.cubin("rans.cu", "sm_90") == b"cubin for sm_90"
    assert loader.cubin("rans.cu", "sm_80") == b"cubin for sm_80"
    assert made == ["sm_90", "sm_80"]
    (kept,) = tmp_path.glob("tersegrad/cuda/*sm_90*")
    for damaged in (kept.read_bytes()[:-1], b"", kept.read_bytes()[:40] + b"?" + kept.read_bytes()[41:]):
        kept.write_bytes(damaged)
        assert loader.cubin("rans.cu", "sm_90") == b"cubin for sm_90"
    assert made.count("sm_90") == 4
    monkeypatch.setattr(nvrtc, "version", lambda: (13, 1))
    loader.cubin("rans.cu", "sm_90")
    assert made.count("sm_90") == 5
    # A folder that cannot be written to costs the cache, not the kernels.
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert loader.cubin("rans.cu", "sm_90") == b"cubin for sm_90"


def test_missing_parts_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(loader, "_driver", lambda: "CUDA's driver is not there (no file)")
    assert "driver" in str(loader.why_missing())
    monkeypatch.setattr(loader, "_driver", lambda: object())
    monkeypatch.setattr(nvrtc, "_library", lambda: "NVRTC is not installed (no file)")
    assert "NVRTC" in str(loader.why_missing())


# rANS


def _symbols(n: int, alphabet: int, kind: str) -> Tensor:
    generator = torch.Generator().manual_seed(n)
    if kind == "normal":
        drawn = torch.randn(n, generator=generator) * alphabet / 8 + alphabet / 2
        return drawn.clamp(0, alphabet - 1).to(torch.uint8)
    if kind == "uniform":
        return torch.randint(0, alphabet, (n,), generator=generator).to(torch.uint8)
    return torch.full((n,), alphabet - 1, dtype=torch.uint8)


def _rans_cases() -> Iterator[tuple[Tensor, int, Tensor | None, int, bool]]:
    sizes = ((0, 5, 1), (1, 2, 1), (700, 7, 1), (20000, 31, 1), (5000, 16, 3), (700, 30, 200), (3000, 256, 1))
    for n, alphabet, tables in (*sizes, (70000, 3, 1), (90, 1, 1)):
        for kind in ("normal", "uniform", "constant") if n < 70000 else ("normal",):
            contexts = None
            if tables > 1:
                drawn = torch.randint(0, min(tables, 256), (n if tables > 3 else -(-n // 64),))
                contexts = drawn.to(torch.uint8)
            yield _symbols(n, alphabet, kind), alphabet, contexts, tables, n == 70000


@needs_compiler
def test_rans_writes_the_same_bytes() -> None:
    ops = native if native.available() else reference
    with emulated():
        for symbols, alphabet, contexts, tables, sample in _rans_cases():
            room = 1 + symbols.numel()
            # One byte behind an aligned address.
            expected, found = torch.zeros(room, dtype=torch.uint8), torch.zeros(room + 1, dtype=torch.uint8)[1:]
            arguments = (alphabet, contexts, tables, sample, 14)
            length = int(ops.rans_encode(symbols, *arguments, expected))
            apart = torch.cat((symbols[:1], symbols))[1:]
            assert int(rans.rans_encode(apart if symbols.numel() else symbols, *arguments, found)) == length
            assert torch.equal(found, expected)
            decoded = torch.full_like(symbols, 77)
            assert int(rans.rans_decode(found, alphabet, contexts, tables, decoded)) == length
            assert torch.equal(decoded, symbols)


@needs_compiler
def test_rans_rejects_what_the_reference_rejects() -> None:
    symbols = _symbols(600, 9, "normal")
    message = torch.zeros(600, dtype=torch.uint8)
    message = message[: int(reference.rans_encode(symbols, 9, None, 1, False, 14, message))]
    generator = torch.Generator().manual_seed(1)
    refused = 0
    with emulated():
        for trial in range(40):
            bad = message.clone()
            if trial < 12:
                bad = bad[: int(torch.randint(0, bad.numel(), (), generator=generator))]
            else:
                at = int(torch.randint(0, 20 if trial < 30 else bad.numel(), (), generator=generator))
                bad[at] ^= 1 << trial % 8
            results: list[object] = []
            for ops in (native if native.available() else reference, rans):
                out = torch.zeros(600, dtype=torch.uint8)
                try:
                    results.append((int(ops.rans_decode(bad, 9, None, 1, out)), out.tolist()))
                except CorruptMessage:
                    results.append("corrupt")
            assert results[0] == results[1], trial
            refused += results[0] == "corrupt"
        with pytest.raises(ValueError, match="outside the alphabet"):
            rans.rans_encode(symbols, 4, None, 1, False, 14, torch.zeros(2000, dtype=torch.uint8))
    assert refused > 20


# Index sets and selection


@needs_compiler
@pytest.mark.parametrize(("dtype", "summed"), [(torch.int32, 2048), (torch.int64, 2048), (torch.int32, 0)])
def test_golomb_codes_are_the_same_bytes(dtype: torch.dtype, summed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "SUMMED", summed)
    generator = torch.Generator().manual_seed(3)
    with emulated():
        for numel, count in ((1, 1), (1000, 0), (40, 40), (70000, 700), (20000, 9000)):
            places = torch.randperm(numel, generator=generator)[:count].sort().values.to(dtype)
            for divisor in (1, 2, 7, 64, 100):
                most = 3 + (count + numel // divisor + count * divisor.bit_length() + 7) // 8
                expected, found = torch.zeros(most, dtype=torch.uint8), torch.zeros(most + 1, dtype=torch.uint8)[1:]
                length = int(reference.golomb_encode(places, divisor, expected))
                assert int(index.golomb_encode(places, divisor, found)) == length
                assert torch.equal(found, expected)
                back = torch.full_like(places, -5)
                assert int(index.golomb_decode(found[:length], numel, divisor, back)) == length
                assert torch.equal(back, places)
        with pytest.raises(ValueError, match="out has 3"):
            index.golomb_encode(places, 2, torch.zeros(3, dtype=torch.uint8))
        with pytest.raises(ValueError, match="increase"):
            index.golomb_encode(places.flip(0), 2, torch.zeros(30000, dtype=torch.uint8))


@needs_compiler
def test_golomb_rejects_what_the_reference_rejects() -> None:
    generator = torch.Generator().manual_seed(3)
    places = torch.randperm(3000, generator=generator)[:97].sort().values.int()
    message = torch.zeros(400, dtype=torch.uint8)
    message = message[: int(reference.golomb_encode(places, 22, message))]
    refused = 0
    with emulated():
        for trial in range(120):
            bad = message.clone()
            if trial < 30:
                bad = bad[: int(torch.randint(0, bad.numel(), (), generator=generator))]
            else:
                bad[int(torch.randint(0, bad.numel(), (), generator=generator))] ^= 1 << trial % 8
            results: list[object] = []
            for ops in (reference, index):
                out = torch.zeros(97, dtype=torch.int32)
                try:
                    results.append((int(ops.golomb_decode(bad, 3000, 22, out)), out.tolist()))
                except CorruptMessage:
                    results.append("corrupt")
            assert results[0] == results[1], trial
            refused += results[0] == "corrupt"
    assert refused > 40


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("narrow", [False, True])
def test_sparse_messages_are_those_of_the_reference(dtype: torch.dtype, narrow: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(3)
    # Blocks that fill several pieces of the vector.
    monkeypatch.setattr(index, "LAYING", 1 + narrow if dtype == torch.int64 else index.LAYING)
    numel, room = 20_000, 2100
    for count, kind in ((1, ""), (128, "bad"), (2099, ""), (2100, "small"), (0, ""), (2101, "")):
        indices = torch.randperm(numel, generator=generator)[:room].sort().values.to(dtype)
        values = torch.randn(room, generator=generator) * 1e37
        values[0] = torch.inf if kind == "bad" else 3.4e38
        out = torch.zeros((2 if narrow else 4) * room + 3000 * (kind != "small"), dtype=torch.uint8)
        given, results = (indices, values, torch.tensor(count), numel, narrow), []
        with emulated():
            for ops in (reference, index):
                held = torch.zeros(out.numel() + 1, dtype=torch.uint8)[1:]
                facts = ops.sparse_encode(*given, held).tolist()
                results.append((facts[0] != 0, facts[3]) if facts[0] else (facts, held[: facts[1]].tolist()))
        assert results[0] == results[1], (count, kind)
        assert (results[0][0] is True) == (count in (0, 2101) or kind == "small")
        if results[0][0] is True:
            continue
        message, front = held[: facts[1]], bytes(held[: 2 + len(varint.write(count))].tolist())
        divisor, trials = reference.random_divisor(count, numel), 4 if dtype == torch.int32 else 1
        refused = _decoded_alike("sparse_decode", message, (front, count, numel, divisor, narrow), trials, generator)
        assert refused or dtype == torch.int64


def _decoded_alike(
    name: str, message: Tensor, given: tuple[bytes, int, int, int, bool], trials: int, generator: torch.Generator
) -> int:
    """A message, then damaged ones, decoded by the reference and by the kernels; how many were refused. ``given`` follows the data."""
    _, count, numel, _, narrow = given
    refused = 0
    with emulated():
        for trial in range(trials):
            data = message.clone()
            if trial:
                at = int(torch.randint(0, data.numel() - (2 if narrow else 4) * count, (), generator=generator))
                data = data[:-1] if trial == 1 else data
                data[at] ^= 1 << trial % 8
            for weight in (None, 0.3):
                outs = [torch.ones(numel), torch.ones(numel)]
                verdicts = [
                    bool(getattr(ops, name)(data, *given, place, weight)) for ops, place in zip((reference, index), outs)
                ]
                assert verdicts[0] == verdicts[1], (count, trial)
                assert trial or verdicts[0]
                assert same(*outs) if verdicts[0] else weight is None or same(outs[1], torch.ones(numel))
                refused += not verdicts[0]
    return refused


@needs_compiler
@pytest.mark.parametrize(("dtype", "narrow"), [(torch.int32, True), (torch.int64, False)])
def test_sparse_messages_with_classes_of_gaps_are_those_of_the_reference(
    dtype: torch.dtype, narrow: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Sums of blocks are added up by others, or become places first.
    monkeypatch.setattr(loader, "SUMMED", 0 if narrow else 2048)
    generator = torch.Generator().manual_seed(4)
    numel, refused = 300_000, 0
    for count, kind in ((1, ""), (5000, ""), (2100, "small"), (2100, "few bits"), (40, "together")):
        indices = (torch.rand(2 * count, generator=generator) ** 4 * numel).long().unique()[:count].to(dtype)
        indices = torch.arange(40, dtype=dtype) if kind == "together" else indices
        count = indices.numel()
        values = torch.randn(count, generator=generator) * 1e37
        values[0] = 3.4e38
        classes = reference.gap_classes(indices)
        alphabet, open_bits = 1 + int(classes.max()), int(((classes.long() + 1) // 2 - 1).clamp(min=0).sum())
        front = bytes((0, *varint.write(count), 253, alphabet))
        room = 100 if kind == "small" else (2 if narrow else 4) * count + 10_000
        results: list[tuple[list[int], list[int]]] = []
        with emulated():
            for ops in (reference, index):
                held = torch.zeros(room + 1, dtype=torch.uint8)[1:]
                facts = ops.sparse_encode_gaps(indices, values, front, alphabet, open_bits, narrow, held).tolist()
                results.append(([], []) if facts[0] else (facts, held[: facts[1]].tolist()))
            assert results[0] == results[1], (count, kind)
            assert (not results[0][0]) == (kind == "small")
            if kind == "few bits":
                facts = index.sparse_encode_gaps(indices, values, front, alphabet, open_bits // 2, narrow, held).tolist()
                assert facts[0]
            if not results[0][0]:
                continue
        message = torch.tensor(results[0][1], dtype=torch.uint8)
        refused += _decoded_alike("sparse_decode_gaps", message, (front, count, numel, alphabet, narrow), 6, generator)
    assert refused > 20


@needs_compiler
@pytest.mark.parametrize("narrow", [False, True])
def test_gaps_are_coded_with_the_alphabet_that_was_counted(narrow: bool) -> None:
    generator = torch.Generator().manual_seed(4)
    numel, written = 300_000, 0
    for kind in ("", "steep", "few", "no room", "few bits", "together", "one", "bad"):
        drawn = torch.rand(2000, generator=generator) ** (9 if kind == "steep" else 4)
        indices = (drawn * numel).long().unique()[:900].int()
        indices = torch.arange(40, dtype=torch.int32) if kind == "together" else indices[-1:] if kind == "one" else indices
        count, values = torch.tensor(indices.numel() - (kind == "few")), torch.randn(indices.numel(), generator=generator)
        values[0] = torch.inf if kind == "bad" else values[0]
        classes = reference.gap_classes(indices)
        bits = int(((classes.long() + 1) // 2 - 1).clamp(min=0).sum()) // (2 if kind == "few bits" else 1) or 8
        room = 100 if kind == "no room" else 10_000
        results = []
        with emulated():
            for ops in (reference, index):
                held = torch.zeros(room, dtype=torch.uint8)
                facts = ops.sparse_encode(indices, values, count, numel, narrow, held, bits).tolist()
                # Where nothing is written its length means nothing; what was counted does.
                results.append((facts[0] != 0, facts[2:], [] if facts[0] else [facts[1], *held.tolist()]))
        assert results[0] == results[1], kind
        assert results[0][0] == (kind in ("no room", "few bits", "together"))
        written += not results[0][0]
    assert written == 5


def _vectors() -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(5)
    yield torch.randn(9000, generator=generator)
    # Ties, zeros, and everything in a few tiles.
    yield torch.randint(-2, 3, (9000,), generator=generator).float()
    dense = torch.zeros(9000)
    dense[4096:5000] = torch.randn(904, generator=generator)
    dense[7], dense[8] = torch.inf, -torch.nan
    yield dense
    yield torch.zeros(70)
    yield torch.randn(1, generator=generator)
    yield torch.zeros(0)


@needs_compiler
def test_selection_agrees_with_the_reference() -> None:
    with emulated():
        for x in _vectors():
            for k in (1, 90, 3000, x.numel() + 5):
                for a, b in zip(reference.select_top_k(x, k), select.select_top_k(x, k), strict=True):
                    assert same(a, b), (x.numel(), k)
            sampled = reference.select_sample_key(x, 90)
            for k in (0, 1, 90, 3000, x.numel() + 5):
                assert same(select.select_sample_key(x, k), reference.select_sample_key(x, k)), (x.numel(), k)
            keys: tuple[tuple[Tensor | int, int], ...] = ((0, 10), (0x3F800000, 10**6), (0x40000000, 0), (0x7F800001, 9))
            for key, limit in (*keys, (sampled, 100)):
                for a, b in zip(reference.select_compact(x, key, limit), select.select_compact(x, key, limit), strict=True):
                    assert same(a, b), (x.numel(), key, limit)


@needs_compiler
@pytest.mark.parametrize("kind", ["normal", "sorted", "few", "ties", "large at the sampled places"])
def test_the_largest_of_a_long_vector_are_found_among_candidates(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sample may mislead: then the whole vector is gone through."""
    n = 16 * select.SAMPLE + 77
    x = torch.randn(n, generator=torch.Generator().manual_seed(1))
    if kind == "sorted":
        x = x.sort().values
    elif kind == "few":
        x[torch.arange(n) % 1000 > 0] = 0
    elif kind == "ties":
        x = (4 * x).round()
    elif kind == "large at the sampled places":
        x[:: n // select.SAMPLE] += 100
    with emulated():
        # Few blocks have long spans, and sums of many become places first.
        for blocks, summed in ((select.DIVIDING, loader.SUMMED), (1, 0)) if kind == "ties" else ((8, loader.SUMMED),):
            monkeypatch.setattr(select, "DIVIDING", blocks)
            monkeypatch.setattr(select, "LAYING", blocks)
            monkeypatch.setattr(loader, "SUMMED", summed)
            for a, b in zip(reference.select_top_k(x, 400), select.select_top_k(x, 400), strict=True):
                assert same(a, b)


@needs_compiler
def test_few_blocks_lay_out_many_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of which some have no coordinate, some a few, some more than there are slots."""
    n = 300 * select.TILE + 5
    x = (
        torch.randn(n, generator=torch.Generator().manual_seed(1))
        * torch.arange(n).div(select.TILE, rounding_mode="floor")
        / 150
    )
    monkeypatch.setattr(select, "LAYING", 1)
    key = torch.tensor(3.0).view(torch.int32)
    with emulated():
        for a, b in zip(reference.select_compact(x, key, n), select.select_compact(x, key, n), strict=True):
            assert same(a, b)


@needs_compiler
@pytest.mark.parametrize("n", [0, 1, 9000, 16 * select.SAMPLE + 77])
def test_a_sum_loses_its_largest(n: int) -> None:
    generator, results = torch.Generator().manual_seed(1), []
    x, y = torch.randn(n, generator=generator), torch.randn(n, generator=generator).round()
    with emulated():
        for ops in (reference, select):
            rest = torch.full((n,), torch.nan)
            results.append((*ops.select_top_k_of_sum(x, y, rest, 400), rest))
    assert all(same(a, b) for a, b in zip(*results, strict=True))


@needs_compiler
def test_classes_of_gaps_are_those_of_the_reference() -> None:
    indices = torch.randint(0, 10**6, (3000,), generator=torch.Generator().manual_seed(1)).unique()
    with emulated():
        for wide in (indices.int(), indices.long() * (1 << 20), indices[:0]):
            assert torch.equal(index.gap_classes(wide), reference.gap_classes(wide))
            assert torch.equal(index.gap_histogram(wide, 1 << 40), reference.gap_histogram(wide, 1 << 40))
            found, expected = torch.zeros(20_000, dtype=torch.uint8), torch.zeros(20_000, dtype=torch.uint8)
            length = int(reference.gap_rests_encode(wide, expected))
            assert int(index.gap_rests_encode(wide, found)) == length
            assert torch.equal(found, expected)
            numel = 1 << 31 if wide.dtype == torch.int32 else 1 << 40
            decoded, used = index.gap_rests_decode(found[:length], reference.gap_classes(wide), numel)
            assert int(used) == length
            assert torch.equal(decoded.long(), wide.long())


@needs_compiler
def test_damaged_rests_of_gaps_are_refused() -> None:
    indices = torch.tensor([5, 900, 901, 4000, 70_000], dtype=torch.int32)
    classes, data = reference.gap_classes(indices), torch.zeros(9, dtype=torch.uint8)
    length = int(reference.gap_rests_encode(indices, data))
    cases = [(data[:length], classes, 70_001), (data[:length], classes, 70_000), (data[: length - 1], classes, 70_001)]
    cases += [(data[:length] | 0x80, classes, 70_001), (data[:length], classes + 112, 70_001), (data[:0], classes, 70_001)]
    with emulated():
        for bytes_, given, numel in cases:
            results = []
            for ops in (reference, index):
                try:
                    results.append(ops.gap_rests_decode(bytes_, given, numel)[0].tolist())
                except CorruptMessage:
                    results.append(None)
            assert results[0] == results[1], (len(bytes_), numel)


@needs_compiler
def test_values_are_put_back() -> None:
    indices, values = torch.tensor([0, 3, 9], dtype=torch.int32), torch.tensor([1.5, -2.0, 0.1])
    with emulated():
        for wide in (indices, indices.long()):
            out, expected = torch.ones(10), torch.ones(10)
            select.sparse_scatter_add(wide, values, 0.3, out)
            reference.sparse_scatter_add(wide, values, 0.3, expected)
            assert same(out, expected)
            select.sparse_scatter(wide, values, out)
            reference.sparse_scatter(wide, values, expected)
            assert same(out, expected)
        for bad in ([0, 0, 1], [3, 2, 4], [-1, 2, 3], [1, 2, 10]):
            with pytest.raises(ValueError, match="increase strictly"):
                select.sparse_scatter(torch.tensor(bad), values, torch.ones(10))


@needs_compiler
def test_vectors_are_settled() -> None:
    x = torch.tensor([1.0, -3e38, 0.0, torch.nan, 1e-40]).repeat(77)
    yes, no, by = torch.tensor(True), torch.tensor(False), torch.tensor(2.0**32)
    with emulated():
        for good, factor in ((yes, None), (no, None), (yes, by), (no, by), (yes, torch.tensor(1.0))):
            expected = reference.settle(x.clone(), good, factor)
            assert same(vectors.settle(x.clone(), good, factor), expected)
            assert same(vectors.settle(x.clone().view(-1, 5).T, good, factor).T.reshape(-1), expected)
        for dtype in (torch.float32, torch.bfloat16, torch.int64):
            now, before = torch.arange(300).to(dtype), torch.ones(300, dtype=dtype)
            for good in (yes, no):
                assert torch.equal(vectors.revert(now.clone(), good, before), reference.revert(now.clone(), good, before))
        for n in (0, 1, 9, 5000):
            assert bool(vectors.all_finite(torch.ones(n)))
            for bad in (torch.nan, -torch.inf):
                for at in range(0, n, 1234):
                    y = torch.ones(n)
                    y[at] = bad
                    assert not bool(vectors.all_finite(y))


@needs_compiler
def test_permutations_are_those_of_the_reference() -> None:
    keys = [0xFFFFFFFF, 7, 0x12345678, 0x80000000, 3, 99]
    with emulated():
        for n, k, rotation in ((1, 1, 0), (2, 1, 1), (1000, 300, 999), (4097, 4097, 5)):
            x, values = torch.randn(n), torch.randn(k)
            assert torch.equal(vectors.permuted_gather(x, keys, rotation, k), reference.permuted_gather(x, keys, rotation, k))
            for name, weight in (("permuted_scatter", ()), ("permuted_scatter_add", (0.3,))):
                found, expected = x.clone(), x.clone()
                getattr(vectors, name)(values, keys, rotation, *weight, found)
                getattr(reference, name)(values, keys, rotation, *weight, expected)
                assert torch.equal(found, expected), name


@needs_compiler
def test_variance_steps_agree_with_the_reference() -> None:
    generator = torch.Generator().manual_seed(6)
    with emulated():
        for n, alpha, limit in ((0, 1.0, 9), (5, 1.0, 9), (9000, 0.3, 9000), (9000, 4.0, 50)):
            r, x = torch.randn(n, generator=generator), torch.randn(n, generator=generator)
            v, s = torch.rand(n, generator=generator), torch.rand(n, generator=generator)
            for poison in (False, True):
                if poison and n:
                    x[n // 2] = torch.inf
                steps = (r, v, x, s, alpha)
                pairs = (
                    (reference.variance_select(*steps, 0.999, limit), select.variance_select(*steps, 0.999, limit)),
                    (reference.hybrid_select(*steps, 0.7, 0.9, limit), select.hybrid_select(*steps, 0.7, 0.9, limit)),
                )
                for expected, found in pairs:
                    for a, b in zip(expected, found, strict=True):
                        assert same(a, b), (n, alpha, poison)


# Sparse Dithering


def _dithered(x: Tensor, nu: float, step: float, ctx: Context | None, chunk: int = 14) -> Tensor:
    out = torch.zeros(reference.dither_max_bytes(x.numel()), dtype=torch.uint8)
    ops = native if native.available() else reference
    return out[: int(ops.dither_encode(x, nu, step, 1, chunk, ctx, out)[0])].clone()


def _heavy(n: int) -> Tensor:
    x = torch.randn(n, generator=torch.Generator().manual_seed(n))
    x[::700] *= 40
    return x


@needs_compiler
def test_dithered_messages_decode_to_the_same_values() -> None:
    ops = native if native.available() else reference
    large = torch.exp(30 * torch.randn(1100, generator=torch.Generator().manual_seed(1)))
    short, several = _heavy(3000), torch.zeros(400_000)
    several[390_000:] = short.repeat(4)[:10_000]
    messages = [
        _dithered(short, 0.1, 0, None),
        _dithered(short, 0.0005, 0, None),
        _dithered(short, 0.3, 0, Context(seed=3)),
        _dithered(large, 0.1, 0, None),
        _dithered(torch.ones(2000), 0.1, 0, None),
        _dithered(torch.zeros(2000), 0.1, 0, None),
        _dithered(several, 0, 0.7, None),
    ]
    sizes = (3000, 3000, 3000, 1100, 2000, 2000, 400_000)
    with emulated():
        for data, n in zip(messages, sizes, strict=True):
            for weight in (None, 0.3):
                expected = torch.linspace(-1, 1, n)
                found = expected.clone()
                ops.dither_decode(data, expected, weight)
                dither.dither_decode(data, found, weight)
                assert same(expected, found), (n, weight)


@needs_compiler
def test_blocks_decode_one_chunk_after_another_where_there_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.zeros(400_000)
    x[::100] = _heavy(4000)
    data, found = _dithered(x, 0.1, 0, None), torch.empty_like(x)
    # A segment has sixteen chunks.
    monkeypatch.setattr(scratch, "BLOCKS", 8)
    with emulated():
        dither.dither_decode(data, found, None)
    reference.dither_decode(data, x, None)
    assert same(x, found)


@needs_compiler
def test_segments_with_very_many_escapes_are_left_to_the_reference() -> None:
    x = torch.randn(12_000, generator=torch.Generator().manual_seed(2))
    data = _dithered(x, 1e-6, 0, None)
    found = torch.zeros(reference.dither_max_bytes(x.numel()), dtype=torch.uint8)
    with emulated():
        length, _, _ = dither.dither_encode(x, 1e-6, 0, 1, 14, None, found)
        assert torch.equal(found[: int(length)], data)
        for weight in (None, 0.3):
            expected, out = torch.ones(12_000), torch.ones(12_000)
            reference.dither_decode(data, expected, weight)
            dither.dither_decode(data, out, weight)
            assert same(expected, out)


@needs_compiler
def test_dithered_messages_are_the_same_bytes() -> None:
    """Length, norm, error and what is left out too, to the last bit."""
    ops = native if native.available() else reference
    drawn = Context(seed=2**63 + 5, step=7, buffer=2, sender=1)
    short = _heavy(3000)
    wild = torch.exp(15 * torch.randn(1100, generator=torch.Generator().manual_seed(1)))
    infinite = short.clone()
    infinite[77] = torch.inf
    several = torch.zeros(400_000)
    several[380_000:] = _heavy(20_000)
    cases: list[tuple[Tensor, float, float, Context | None]] = [
        (short, 0.1, 0, None),
        (short, 0.0005, 0, None),
        (short, 0, 0.003, None),
        (short, 0.3, 0, drawn),
        (short[:1200], 0.0001, 0, drawn),
        (wild, 0.1, 0, None),
        (wild, 0, 0.7, None),
        (infinite, 0.1, 0, None),
        (torch.zeros(2000), 0.1, 0, None),
        (several, 0.1, 0, None),
    ]
    with emulated():
        for x, nu, step, ctx in cases:
            results = []
            for backend in (ops, dither):
                data = torch.zeros(reference.dither_max_bytes(x.numel()), dtype=torch.uint8)
                left, carry = torch.zeros_like(x), x.roll(1) * 0.25
                length, norm, error = backend.dither_encode(x, nu, step, 1, 16, ctx, data, left, carry)
                finite = bool(norm < torch.inf)
                results.append((data[: int(length)], length, norm, error, left if finite else norm))
            for expected, found in zip(*results, strict=True):
                assert same(expected, found), (x.numel(), nu, step, ctx)


@needs_compiler
@pytest.mark.parametrize("ctx", [None, Context(seed=3)])
def test_levels_are_the_same_however_much_of_a_block_is_kept(ctx: Context | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of blocks with levels that are too large for quick sums, and of those that come one after another, too."""
    ops = native if native.available() else reference
    several = _heavy(140_000)
    several[:65_536] *= torch.linspace(0, 50, 65_536) ** 2
    with emulated():
        for x, rooms in (
            (_heavy(10_000), (48, 110, 227)),
            (_heavy(10_000).mul_(torch.linspace(0, 50, 10_000) ** 2), (48, 227)),
            (several, (110,)),
        ):
            data = torch.zeros(reference.dither_max_bytes(x.numel()), dtype=torch.uint8)
            length, *expected = ops.dither_encode(x, 0.1, 0, 1, 16, ctx, data)
            for shared in rooms:
                monkeypatch.setattr(loader, "room_of", lambda index, most=shared << 10: loader.Room(1, most))
                out = torch.zeros_like(data)
                found = dither.dither_encode(x, 0.1, 0, 1, 16, ctx, out)
                assert [length, *expected] == [float(value) for value in found]
                assert torch.equal(out, data)


def test_levels_that_are_chosen_by_their_bits_are_the_host_s() -> None:
    """Whatever the device, the CPU's kernels choose them, over a copy."""
    ops = native if native.available() else reference
    x, layout, found = _heavy(4096), torch.tensor([4096, 64, 1, 0]), []
    for backend in (ops, dither):
        data, left = torch.zeros(reference.dither_max_bytes(4096), dtype=torch.uint8), torch.zeros(4096)
        length, norm, error = backend.dither_encode(x, 0.3, 0, 1, 0, None, data, left, x.roll(1), layout, True)
        found.append((data[: int(length)], length, norm, error, left))
    assert all(same(*pair) for pair in zip(*found, strict=True))
    assert found[0][0].numel() < ops.dither_encode(x, 0.3, 0, 1, 0, None, data, left, x.roll(1), layout)[0]


@needs_compiler
def test_rows_of_very_different_sizes_have_classes() -> None:
    """Rows of very different sizes: the encoder chooses classes where it may, and the decoder reads them."""
    x = (torch.randn(64, 64, generator=torch.Generator().manual_seed(4)) * torch.logspace(-3, 1, 64)[:, None]).reshape(-1)
    layout = torch.tensor([4096, 64, 1, 0])
    ops = native if native.available() else reference
    plain = _dithered(x, 0.1, 0, None, 16)
    with emulated():
        results = []
        for backend in (ops, dither):
            data, left = torch.zeros(reference.dither_max_bytes(4096), dtype=torch.uint8), torch.zeros(4096)
            length, norm, error = backend.dither_encode(x, 0.1, 0, 1, 0, None, data, left, x.roll(1), layout)
            results.append((data[: int(length)].clone(), length, norm, error, left))
            length = backend.dither_encode(x, 0.1, 0, 1, 0, None, data)[0]
            assert torch.equal(data[: int(length)], plain)
        for expected, found in zip(*results, strict=True):
            assert same(expected, found)
        data = results[0][0]
        assert data[4] == 3
        for weight in (None, 0.3):
            wanted, out = torch.ones(4096), torch.ones(4096)
            ops.dither_decode(data, wanted, weight, layout)
            dither.dither_decode(data, out, weight, layout)
            assert same(wanted, out)
        sampled = torch.zeros(2, 2, dtype=torch.float64)
        ops.dither_sample(x, 0.1, 1, sampled[0], x.roll(1))
        dither.dither_sample(x, 0.1, 1, sampled[1], x.roll(1))
        assert same(sampled[0], sampled[1])


@needs_compiler
def test_samples_err_as_much_as_the_reference_says() -> None:
    x = _heavy(200_001)
    carry = x.roll(5) * 0.1
    broken = x.clone()
    broken[150_000] = torch.nan
    with emulated():
        for given, stride, carried in (
            (x, 1, None),
            (x, 3, carry),
            (x, 16, carry),
            (x, 17, None),
            (x, 40, carry),
            (broken, 2, None),
        ):
            for step in (0.3, 1e-30):
                sums = torch.zeros(2, 2, dtype=torch.float64)
                reference.dither_sample(given, step, stride, sums[0], carried)
                dither.dither_sample(given, step, stride, sums[1], carried)
                assert same(sums[0], sums[1]), (stride, step)


@needs_compiler
def test_a_refused_message_adds_nothing() -> None:
    bad = _dithered(_heavy(3000), 0.0005, 0, None)
    bad[-1] ^= 255
    out = torch.linspace(-1, 1, 3000)
    with emulated(), pytest.raises(CorruptMessage):
        dither.dither_decode(bad, out, 0.3)
    assert torch.equal(out, torch.linspace(-1, 1, 3000))


@needs_compiler
def test_dithering_rejects_what_the_reference_rejects() -> None:
    data = _dithered(_heavy(1100), 0.1, 0, None)
    generator = torch.Generator().manual_seed(3)
    refused = 0
    with emulated():
        for trial in range(60):
            bad = data.clone()
            if trial < 15:
                bad = bad[: int(torch.randint(0, bad.numel(), (), generator=generator))]
            else:
                # Header and table, the whole, and the escapes at the end.
                low, high = ((0, 30), (0, bad.numel()), (bad.numel() - 5, bad.numel()))[trial % 3]
                bad[int(torch.randint(low, high, (), generator=generator))] ^= 1 << trial % 8
            results: list[object] = []
            for ops in (native if native.available() else reference, dither):
                out = torch.zeros(1100)
                try:
                    ops.dither_decode(bad, out, None)
                    results.append(out.view(torch.int32).tolist())
                except CorruptMessage:
                    results.append("corrupt")
            assert results[0] == results[1], trial
            refused += results[0] == "corrupt"
    assert refused > 30


# Whole messages


@needs_compiler
@pytest.mark.parametrize(
    "text",
    [
        "top_k(fraction=0.02)",
        "top_k(fraction=0.9)",
        "threshold(tau=1)",
        "vgc(alpha=2)",
        "hybrid(alpha=1, tau=0.5)",
        "qsgd(coder=rans)",
        "natural(coder=rans)",
        "sparse_dithering(nu=0.1)",
    ],
)
def test_messages_on_emulated_kernels(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _same_messages(text, torch.randn(20000, generator=torch.Generator().manual_seed(8)), monkeypatch)


@needs_compiler
def test_alphabets_that_only_the_device_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(70_000, generator=torch.Generator().manual_seed(8))
    bad = x.clone()
    bad[5] = torch.nan
    wide = (x * 60).exp2() * x.sign()
    for given in (x, wide[:3000], x[:1500] * 0, bad[:1500], torch.ones(1500), torch.eye(1, 1500)[0], x[:1500].sign() * 3e38):
        _same_messages("natural(coder=rans)", given, monkeypatch)


def _same_messages(text: str, x: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    spec, ctx, compressor = Spec.flat(x.numel()), Context(seed=4), tersegrad.parse(text)

    def message() -> tuple[Tensor, Tensor]:
        stats = Stats(x.square() * 0.3 + 0.1) if needs_second_moment(compressor) else None
        made = compressor.encode(x, spec, compressor.init(spec, "cpu"), ctx, stats=stats)[0]
        data = made.data[: int(made.nbytes)].clone()
        return data, compressor.decode(Message(data, data.numel()), spec, ctx)

    expected = message()
    with emulated(), monkeypatch.context() as patch:
        patch.setitem(vars(kernels)["_chosen"], "cpu", kernels.overlay(native, cuda))
        found = message()
    assert torch.equal(expected[0], found[0])
    assert same(expected[1], found[1])

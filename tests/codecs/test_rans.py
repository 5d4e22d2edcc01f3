"""rANS: round trips, identical bytes everywhere, overhead, and hostile input."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tersegrad import kernels
from tersegrad.codecs import rans
from tersegrad.core.errors import CorruptMessage
from tersegrad.kernels import native, reference

CHUNK = 1 << 16


def gaussian(count: int, alphabet: int, width: float = 0.125, seed: int = 0) -> Tensor:
    """Rounded Gaussian symbols; ``width`` is the standard deviation as a part of the alphabet."""
    x = torch.randn(count, generator=torch.Generator().manual_seed(seed)) * (width * alphabet)
    return (torch.round(x) + alphabet // 2).clamp(0, alphabet - 1).to(torch.uint8)


def uniform(count: int, alphabet: int, seed: int = 0) -> Tensor:
    return torch.randint(0, alphabet, (count,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def entropy(symbols: Tensor) -> float:
    p = torch.bincount(symbols.int()).double() / symbols.numel()
    return float(-(p * p.clamp_min(1e-300).log2()).sum())


def roundtrip(
    symbols: Tensor, alphabet: int, contexts: Tensor | None = None, num_contexts: int = 1, chunk: rans.Chunk = "auto"
) -> Tensor:
    data = rans.encode(symbols, alphabet, contexts, num_contexts, chunk=chunk)
    assert data.numel() <= rans.max_nbytes(symbols.numel(), alphabet, num_contexts)
    decoded, used = rans.decode(data, symbols.numel(), alphabet, contexts, num_contexts)
    assert used == data.numel()
    assert torch.equal(decoded, symbols)
    return data


def everywhere(
    symbols: Tensor,
    alphabet: int,
    contexts: Tensor | None = None,
    num_contexts: int = 1,
    chunk: rans.Chunk = "auto",
    *,
    torch_too: bool = True,
) -> Tensor:
    """Round trip on every backend, instruction set and thread count; all must write the same bytes."""
    results = []
    if torch_too:
        with kernels.force("reference"):
            results.append(roundtrip(symbols, alphabet, contexts, num_contexts, chunk))
    for isa in native.supported_isas():
        for threads in (1, 2, 3, 4) if symbols.numel() > CHUNK else (1,):
            with native.using(isa=isa, threads=threads):
                results.append(roundtrip(symbols, alphabet, contexts, num_contexts, chunk))
    for other in results[1:]:
        assert torch.equal(other, results[0])
    return results[0]


@pytest.mark.parametrize("alphabet", [1, 2, 3, 4, 15, 16, 17, 32, 33, 64, 65, 128, 255, 256])
@pytest.mark.parametrize("count", [0, 1, 2, 63, 64, 65, 301])
def test_same_bytes_everywhere(alphabet: int, count: int) -> None:
    for symbols in (gaussian(count, alphabet), uniform(count, alphabet), gaussian(count, alphabet, 0.01)):
        everywhere(symbols, alphabet)


@pytest.mark.parametrize("count", [CHUNK - 1, CHUNK, CHUNK + 1, CHUNK + CHUNK // 2 - 1, CHUNK + CHUNK // 2, 3 * CHUNK + 12345])
def test_several_chunks(count: int) -> None:
    for alphabet in (3, 16, 64, 200):
        everywhere(gaussian(count, alphabet), alphabet, torch_too=alphabet == 16 and count == CHUNK + CHUNK // 2)


@pytest.mark.parametrize("chunk", [14, 15, 17, 18])
def test_chunk_lengths(chunk: int) -> None:
    """The message says how long its chunks are, and every length codes the same symbols."""
    size = 1 << chunk
    for count in (size - 1, size + size // 2 - 1, size + size // 2, 2 * size + 77):
        data = everywhere(gaussian(count, 17), 17, chunk=chunk, torch_too=chunk == 14)
        assert int(data[0]) == chunk
    short = everywhere(gaussian(5000, 17), 17, chunk=chunk)
    assert torch.equal(short[1:], everywhere(gaussian(5000, 17), 17)[1:])


@pytest.mark.parametrize("count", [400, 511, 512, 1023, 1024, 2047, 2048, 8191, 8192, 16_383, 16_384, 16_385])
def test_few_lanes(count: int) -> None:
    """Small blocks have fewer lanes, and come within a table, a header and four bytes per lane of the entropy."""
    for alphabet in (2, 17, 200):
        symbols = gaussian(count, alphabet)
        data = everywhere(symbols, alphabet)
        lanes = 64 if count >= 1 << 14 else 1 << max(0, count.bit_length() - 10)
        tables = len(reference.rans_write_tables(reference.rans_histogram(symbols, alphabet, None, 1, False)))
        assert 8 * data.numel() <= 1.01 * entropy(symbols) * count + 8 * (5 + tables + 4 * lanes)


@pytest.mark.parametrize("alphabet", [2, 3, 16, 32, 64, 200])
@pytest.mark.parametrize("num_contexts", [1, 2, 5, 17])
def test_contexts(alphabet: int, num_contexts: int) -> None:
    for count in (1, 64, 65, 2101):
        symbols = gaussian(count, alphabet)
        for size in (count, -(-count // 64)):
            contexts = uniform(size, num_contexts, seed=size)
            everywhere(symbols, alphabet, contexts, num_contexts)
            everywhere(torch.full((count,), alphabet - 1, dtype=torch.uint8), alphabet, contexts, num_contexts)


def test_contexts_over_chunks() -> None:
    count = 2 * CHUNK + 100_001
    for alphabet, num_contexts in ((8, 2), (16, 9)):
        for size in (count, -(-count // 64)):
            contexts = uniform(size, num_contexts)
            wide = contexts if size == count else contexts.repeat_interleave(64)[:count]
            symbols = (gaussian(count, alphabet // 2) + wide % 2 * (alphabet // 2)).to(torch.uint8)
            data = everywhere(symbols, alphabet, contexts, num_contexts, torch_too=False)
            if num_contexts == 2:  # the contexts tell half of the alphabet away
                assert 8 * data.numel() / count < entropy(symbols) - 0.9


def test_a_table_of_one_symbol_is_free() -> None:
    """Where the context decides the symbol, only the tables are sent; where it decides half of them, they cost nothing."""
    contexts = uniform(20_000, 3)
    assert everywhere(contexts, 3, contexts, 3).numel() < 16
    assert everywhere(torch.full((100_000,), 7, dtype=torch.uint8), 16).numel() < 8
    symbols = torch.where(contexts == 0, uniform(20_000, 4), 2)
    data = everywhere(symbols, 4, contexts, 3)
    assert data.numel() < int((contexts == 0).sum()) * 2 // 8 + 256 + 20
    steps = uniform(-(-20_000 // 64), 2)
    everywhere(torch.where(steps.repeat_interleave(64)[:20_000] == 0, uniform(20_000, 4), 2), 4, steps, 2)


def test_rare_symbols_survive_sampling() -> None:
    """Symbols outside the counted blocks are still present."""
    symbols = torch.zeros(1 << 16, dtype=torch.uint8)
    symbols[4096 * 3 + 17] = 9
    symbols[-1] = 3
    symbols[::5] = 1
    everywhere(symbols, 10)
    wide = symbols.repeat(17)
    wide[70_001] = 255
    everywhere(wide, 256, torch_too=False)


def test_histograms_agree() -> None:
    for alphabet, count in ((3, 200_001), (16, 70_000), (64, CHUNK + 99), (256, 5000)):
        symbols = gaussian(count, alphabet)
        contexts = uniform(count, 2)
        for sample in (False, True):
            for ctx, tables in ((None, 1), (contexts, 2), (contexts[: -(-count // 64)], 2)):
                expected = reference.rans_histogram(symbols, alphabet, ctx, tables, sample)
                if not sample:
                    assert int(expected.sum()) == count
                for isa in native.supported_isas():
                    with native.using(isa=isa, threads=3):
                        assert torch.equal(native.rans_histogram(symbols, alphabet, ctx, tables, sample), expected)


@given(st.lists(st.one_of(st.just(0), st.integers(0, 1 << 30), st.integers(0, 5)), min_size=1, max_size=256), st.integers(1, 3))
@settings(max_examples=80, deadline=None)
def test_tables_agree(counts: list[int], num_contexts: int) -> None:
    alphabet = max(1, len(counts) // num_contexts)
    tensor = torch.tensor((counts * 3)[: alphabet * num_contexts]).view(num_contexts, alphabet)
    data = reference.rans_write_tables(tensor)
    assert native.rans_write_tables(tensor) == data
    assert len(data) <= num_contexts * (2 * alphabet + 2)
    raw = torch.frombuffer(bytearray(data + b"x"), dtype=torch.uint8)
    expected, used = reference.rans_read_tables(raw, alphabet, num_contexts)
    found, native_used = native.rans_read_tables(raw, alphabet, num_contexts)
    assert used == native_used == len(data)
    assert torch.equal(expected, found)
    assert (found.sum(1) == 4096).all()
    used_rows = tensor.sum(1) > 0
    assert torch.equal((found > 0)[used_rows], (tensor > 0)[used_rows])


@given(st.binary(max_size=60), st.integers(1, 256), st.integers(1, 4))
@settings(max_examples=200, deadline=None)
def test_both_readers_reject_the_same_tables(data: bytes, alphabet: int, num_contexts: int) -> None:
    raw = torch.frombuffer(bytearray(data or b"\0"), dtype=torch.uint8)
    results: list[object] = []
    for backend in (reference, native):
        try:
            frequencies, used = backend.rans_read_tables(raw, alphabet, num_contexts)
            results.append((frequencies.tolist(), used))
        except CorruptMessage:
            results.append(None)
    assert results[0] == results[1]


@pytest.mark.parametrize(("alphabet", "most"), [(3, 4), (16, 16), (64, 40)])
def test_overhead(alphabet: int, most: int) -> None:
    """Within 0.02 bit of the entropy at 1 Mi symbols, 0.0075 with long chunks, all counted; the tables are small."""
    symbols = gaussian(1 << 20, alphabet)
    with kernels.force("native" if native.available() else "reference"):
        usual, longest = roundtrip(symbols, alphabet), roundtrip(symbols, alphabet, chunk=18)
    assert 8 * usual.numel() / symbols.numel() < entropy(symbols) + 0.02
    assert 8 * longest.numel() / symbols.numel() < entropy(symbols) + 0.0075
    counts = reference.rans_histogram(symbols, alphabet, None, 1, True)
    tables = reference.rans_write_tables(counts)
    assert len(tables) <= most
    frequencies, _ = reference.rans_read_tables(torch.frombuffer(bytearray(tables), dtype=torch.uint8), alphabet, 1)
    p = torch.bincount(symbols.int(), minlength=alphabet).double() / symbols.numel()
    used = p > 0
    cost = float(-(p[used] * (frequencies[0][used].double() / 4096).log2()).sum())
    assert cost < entropy(symbols) + 0.0025


def test_incompressible_input_is_stored_raw() -> None:
    for alphabet, bits in ((2, 1), (16, 4), (200, 8)):
        for count in (1, 9, 100, 5000):
            data = everywhere(uniform(count, alphabet), alphabet)
            assert data.numel() <= 1 + -(-count * bits // 8)
    assert everywhere(uniform(5000, 16), 16)[0] == 1


def backends() -> list[str]:
    return ["reference", "native"] if native.available() else ["reference"]


@pytest.mark.parametrize("backend", ["reference", "native"])
def test_every_truncation_is_rejected(backend: str) -> None:
    if backend not in backends():
        pytest.fail("the native kernels are not built")
    for symbols, alphabet in ((gaussian(3000, 16), 16), (gaussian(40, 5), 5), (torch.full((500,), 3, dtype=torch.uint8), 8)):
        data = rans.encode(symbols, alphabet)
        lengths = range(data.numel()) if backend == "native" else range(0, data.numel(), 1 + data.numel() // 40)
        with kernels.force("native" if backend == "native" else "reference"):
            for length in lengths:
                with pytest.raises(CorruptMessage):
                    rans.decode(data[:length], symbols.numel(), alphabet)


def test_mutations_are_rejected_or_harmless() -> None:
    rng = random.Random(3)
    for alphabet, count, num_contexts in ((3, 5000, 1), (16, 700, 2), (64, 70_000, 1), (256, 3000, 1), (4, 20, 1)):
        symbols, contexts = gaussian(count, alphabet), uniform(count, num_contexts)
        data = rans.encode(symbols, alphabet, contexts, num_contexts)
        for round in range(150):
            mutated = data.clone()
            for _ in range(rng.randint(1, 3)):
                mutated[rng.randrange(min(data.numel(), 30) if round % 2 else data.numel())] = rng.randrange(256)
            verdicts: list[object] = []
            for isa in native.supported_isas():
                with native.using(isa=isa):
                    try:
                        decoded, used = rans.decode(mutated, count, alphabet, contexts, num_contexts)
                        assert decoded.numel() == count
                        assert used <= mutated.numel()
                        assert int(decoded.max()) < alphabet
                        verdicts.append((decoded.sum().item(), used))
                    except CorruptMessage:
                        verdicts.append(None)
            assert len({str(v) for v in verdicts}) == 1
            if round < 2:
                with kernels.force("reference"):
                    try:
                        decoded, used = rans.decode(mutated, count, alphabet, contexts, num_contexts)
                        assert verdicts[0] == (decoded.sum().item(), used)
                    except CorruptMessage:
                        assert verdicts[0] is None


def test_messages_can_be_followed_by_others() -> None:
    a, b = gaussian(700, 8), gaussian(5000, 8, seed=1)
    joined = torch.cat([rans.encode(a, 8), rans.encode(b, 8)])
    first, used = rans.decode(joined, 700, 8)
    second, rest = rans.decode(joined[used:], 5000, 8)
    assert torch.equal(first, a)
    assert torch.equal(second, b)
    assert used + rest == joined.numel()


def test_given_outputs_are_used() -> None:
    symbols = gaussian(5000, 8)
    room = torch.empty(rans.max_nbytes(5000, 8) + 5, dtype=torch.uint8)
    data = rans.encode(symbols, 8, out=room)
    assert data.data_ptr() == room.data_ptr()
    target = torch.empty(6001, dtype=torch.uint8)[1:]  # unaligned
    decoded, _ = rans.decode(data, 5000, 8, out=target)
    assert decoded.data_ptr() == target.data_ptr()
    assert torch.equal(decoded, symbols)


@pytest.mark.parametrize("backend", ["reference", "native"])
def test_bad_arguments(backend: str) -> None:
    if backend not in backends():
        pytest.fail("the native kernels are not built")
    with kernels.force("native" if backend == "native" else "reference"):
        symbols = gaussian(300, 8)
        with pytest.raises(ValueError, match="alphabet"):
            rans.encode(symbols, 4)
        with pytest.raises(ValueError, match="alphabets"):
            rans.encode(symbols, 257)
        with pytest.raises(ValueError, match="uint8"):
            rans.encode(symbols.int(), 8)
        with pytest.raises(ValueError, match="contexts"):
            rans.encode(symbols, 8, symbols[:300], 3)
        with pytest.raises(ValueError, match="chunk"):
            rans.encode(symbols, 8, chunk=13)
        with pytest.raises(ValueError, match="chunks"):
            kernels.get(symbols.device).rans_encode(symbols, 8, None, 1, False, 19, torch.empty(400, dtype=torch.uint8))
        with pytest.raises(ValueError, match="one context per symbol"):
            rans.encode(symbols, 8, symbols[:17], 8)
        with pytest.raises(ValueError, match="may need"):
            rans.encode(symbols, 8, out=torch.empty(10, dtype=torch.uint8))
        with pytest.raises(ValueError, match="to be decoded"):
            rans.decode(symbols, 50, 8, out=torch.empty(10, dtype=torch.uint8))


def test_the_published_example() -> None:
    """The example of the specification, byte by byte."""
    symbols = torch.tensor([0, 1, 2, 1, 1, 1, 1, 1] * 100, dtype=torch.uint8)
    data = everywhere(symbols, 3)
    assert data[:5].tolist() == [16, *bytes.fromhex(TABLE)]
    assert data.numel() == 117  # one lane
    counts = torch.tensor([[100, 600, 100]])
    assert reference.rans_write_tables(counts).hex() == TABLE
    frequencies, _ = reference.rans_read_tables(torch.frombuffer(bytearray.fromhex(TABLE), dtype=torch.uint8), 3, 1)
    assert frequencies.tolist() == [FREQUENCIES]


TABLE = "11b39c02"
FREQUENCIES = [501, 3094, 501]

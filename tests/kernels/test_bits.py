"""Every instruction set and thread count writes and reads the bytes of the reference."""

import functools
from collections.abc import Iterator

import pytest
import torch

from tersegrad import kernels
from tersegrad.codecs import bitpack
from tersegrad.core.errors import CorruptMessage
from tersegrad.kernels import native, reference

SIZES = (0, 1, 7, 8, 9, 31, 63, 64, 65, 127, 128, 129, 255, 1021)


@pytest.fixture(params=native.supported_isas() or ("none",))
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    with native.using(isa=request.param):
        yield request.param


def heavy(count: int, seed: int = 0) -> torch.Tensor:
    """Mostly short codes, with a few huge values."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.exp(torch.randn(count, generator=generator, dtype=torch.float64) * 2).long()
    huge = torch.rand(count, generator=generator) < 0.01
    return torch.where(huge, torch.randint(1 << 30, 1 << 62, (count,), generator=generator), values)


def both_pack(codes: torch.Tensor, width: int) -> None:
    """Pack and unpack with both backends, at an unaligned address."""
    size = bitpack.nbytes(codes.numel(), width)
    expected = torch.empty(size, dtype=torch.uint8)
    reference.pack_bits(codes, width, expected)
    got = torch.full((size + 9,), 0xA5, dtype=torch.uint8)
    native.pack_bits(codes, width, got[1 : size + 1])
    assert torch.equal(got[1 : size + 1], expected)
    assert set(got[:1].tolist() + got[size + 1 :].tolist()) == {0xA5}  # nothing outside was written
    wanted = torch.empty_like(codes)
    reference.unpack_bits(expected, width, wanted)
    back = torch.full((codes.numel() + 9,), 77, dtype=codes.dtype)
    native.unpack_bits(got[1 : size + 1], width, back[1 : codes.numel() + 1])
    assert torch.equal(back[1 : codes.numel() + 1], wanted)
    assert set(back[:1].tolist() + back[codes.numel() + 1 :].tolist()) == {77}


@pytest.mark.parametrize("width", range(1, 17))
def test_packing(isa: str, width: int) -> None:
    for count in SIZES:
        generator = torch.Generator().manual_seed(count)
        if width <= 8:
            codes = torch.randint(0, 256, (count,), generator=generator).to(torch.uint8)  # high bits are to be ignored
        else:
            codes = torch.randint(-(1 << 31), 1 << 31, (count,), generator=generator).int()
        both_pack(codes, width)


@pytest.mark.parametrize("width", [1, 3, 4, 8, 9, 13])
def test_packing_on_several_threads(isa: str, width: int) -> None:
    count = (1 << 22) + 77
    codes = torch.randint(0, 1 << width, (count,), generator=torch.Generator().manual_seed(0)).to(bitpack.dtype(width))
    packed = []
    for threads in (1, 2, 3):
        with native.using(threads=threads):
            packed.append(bitpack.pack(codes, width))
            assert torch.equal(bitpack.unpack(packed[-1], width, count), codes)
    assert torch.equal(packed[0], packed[1])
    assert torch.equal(packed[0], packed[2])


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_trits(isa: str, threads: int) -> None:
    with native.using(threads=threads):
        for count in (*SIZES, (1 << 21) + 3):
            values = torch.randint(0, 3, (count,), generator=torch.Generator().manual_seed(count)).to(torch.uint8)
            expected = torch.empty((count + 4) // 5, dtype=torch.uint8)
            got = torch.full((expected.numel() + 9,), 0xA5, dtype=torch.uint8)
            reference.pack_trits(values, expected)
            native.pack_trits(values, got[1 : expected.numel() + 1])
            assert torch.equal(got[1 : expected.numel() + 1], expected)
            assert set(got[:1].tolist() + got[expected.numel() + 1 :].tolist()) == {0xA5}
            back = torch.full((count + 9,), 77, dtype=torch.uint8)
            native.unpack_trits(expected, back[1 : count + 1], True)
            assert torch.equal(back[1 : count + 1], values)
            assert set(back[:1].tolist() + back[count + 1 :].tolist()) == {77}
    anything = torch.arange(256).to(torch.uint8)
    wanted, lenient = torch.empty(1280, dtype=torch.uint8), torch.empty(1280, dtype=torch.uint8)
    reference.unpack_trits(anything, wanted, False)
    native.unpack_trits(anything, lenient, False)
    assert torch.equal(wanted, lenient)


@pytest.mark.parametrize("code", range(3))
def test_elias(isa: str, code: int) -> None:
    for count in (*SIZES, 50_000):
        values = heavy(count, seed=count) + 1
        assert native.elias_bits(values, code) == reference.elias_bits(values, code)
        data = native.elias_encode(values, code)
        assert torch.equal(data, reference.elias_encode(values, code))
        for backend in (native, reference):
            out = torch.empty_like(values)
            assert backend.elias_decode(data, code, out) == data.numel()
            assert torch.equal(out, values)


@functools.cache
def rice_wanted(count: int, k: int) -> tuple[torch.Tensor, int, int]:
    """What the reference writes, which it reads back, its bits, and the best parameter."""
    values, room = heavy(count, seed=count), torch.empty(30 * count + 4, dtype=torch.uint8)
    size, out = int(reference.rice_encode(values, k, room)), torch.empty_like(values)
    assert int(reference.rice_decode(room, k, out)) == size
    assert torch.equal(out, values)
    return room[:size], int(reference.rice_bits(values, k)), int(reference.rice_best(values))


@pytest.mark.parametrize("k", [0, 1, 4, 11, 24, 25, 40, 56])
def test_rice(isa: str, k: int) -> None:
    for count in (*SIZES, 20_000):
        values = heavy(count, seed=count)
        data, bits, best = rice_wanted(count, k)
        assert native.rice_bits(values, k) == bits
        room = torch.empty(30 * count + 4, dtype=torch.uint8)
        size = int(native.rice_encode(values, k, room))
        assert torch.equal(room[:size], data)
        out = torch.empty_like(values)
        assert int(native.rice_decode(room, k, out)) == size
        assert torch.equal(out, values)
        assert native.rice_best(values) == best


def test_planar_gamma(isa: str) -> None:
    for count in (*SIZES, 20_000):
        values = heavy(count, seed=count) + 1
        room = torch.empty(2, 16 * count + 2, dtype=torch.uint8)
        size = int(native.planar_gamma_encode(values, room[0]))
        assert int(reference.planar_gamma_encode(values, room[1])) == size
        assert torch.equal(room[0, :size], room[1, :size])
        for backend in (native, reference):
            out = torch.empty_like(values)
            assert int(backend.planar_gamma_decode(room[0], out)) == size
            assert torch.equal(out, values)


def test_planar_codes_refuse_what_does_not_fit() -> None:
    values, small = torch.tensor([5, 1 << 40]), torch.empty(3, dtype=torch.uint8)
    for backend in (native, reference):
        with pytest.raises(ValueError, match="out"):
            backend.planar_gamma_encode(values, small)
        with pytest.raises(ValueError, match="out"):
            backend.rice_encode(values, 3, small)
        with pytest.raises(ValueError, match="at least 1"):
            backend.planar_gamma_encode(torch.tensor([1, 0]), small)
    with pytest.raises(TypeError):  # a copy would be written instead
        native.planar_gamma_encode(values, torch.empty(64, dtype=torch.int16))


def test_best_parameter(isa: str) -> None:
    for scale in (0, 1, 3, 50, 10_000, 1 << 40):
        values = (torch.rand(999, generator=torch.Generator().manual_seed(scale)).log().neg() * scale).long()
        assert native.rice_best(values) == reference.rice_best(values)


def test_backends_agree_on_bad_bytes(isa: str) -> None:
    """The same streams are accepted, with the same values and sizes, and the same refused."""
    generator = torch.Generator().manual_seed(5)
    accepted = 0
    for trial in range(150):
        sparse = torch.rand(40, 8, generator=generator) < (0.1, 0.3, 0.5, 0.9)[trial % 4]
        data = (sparse.int() << torch.arange(8)).sum(1).to(torch.uint8)
        count = (1, 2, 6, 20)[trial // 4 % 4]
        results: list[list[tuple[int, list[int]] | None]] = []
        for backend in (native, reference):
            answers: list[tuple[int, list[int]] | None] = []
            for call in range(7):
                out = torch.empty(count, dtype=torch.int64)
                try:
                    if call < 3:
                        used = backend.elias_decode(data, call, out)
                    elif call < 6:
                        used = int(backend.rice_decode(data, 7 * call - 21, out))
                    else:
                        used = int(backend.planar_gamma_decode(data, out))
                except CorruptMessage:
                    answers.append(None)
                else:
                    answers.append((used, out.tolist()))
            results.append(answers)
        assert results[0] == results[1]
        accepted += sum(a is not None for a in results[0])
    assert 100 < accepted < 900


def test_forced_reference() -> None:
    codes = torch.arange(100).to(torch.uint8)
    data = bitpack.pack(codes, 7)
    with kernels.force("reference"):
        assert torch.equal(bitpack.pack(codes, 7), data)
        assert torch.equal(bitpack.unpack(data, 7, 100), codes)

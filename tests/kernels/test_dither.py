"""Sparse Dithering: every instruction set, thread count and the reference write the same bytes and read the same values."""

from __future__ import annotations

import math
import random
import struct
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from tersegrad.core.errors import CorruptMessage
from tersegrad.core.protocol import Context
from tersegrad.kernels import native, reference

AUTO, RANS, PAPER = 0, 1, 2
SEGMENT, BLOCK = 1 << 18, 1 << 16


def gaussian(n: int, seed: int = 0) -> Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(seed))


def heavy(n: int) -> Tensor:
    """Student-t with 1.5 degrees of freedom: many escapes, few of them huge."""
    g = torch.Generator().manual_seed(1)
    return gaussian(n) / torch.rand(n, generator=g).clamp_min(1e-6).pow(1 / 1.5)


def settings() -> Iterator[tuple[str, int]]:
    isas = native.supported_isas()
    yield from ((isa, 1) for isa in isas)
    yield isas[-1], 3


def encode(
    x: Tensor, nu: float, step: float, coder: int, ctx: Context | None, *, chunk: int = 16, backend: object = native
) -> tuple[bytes, float, float]:
    out = torch.empty(reference.dither_max_bytes(x.numel()), dtype=torch.uint8)
    nbytes, norm, error = backend.dither_encode(x, nu, step, coder, chunk, ctx, out)  # type: ignore[attr-defined]
    return out[: int(nbytes)].numpy().tobytes(), float(norm), float(error)


def tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


def agree(x: Tensor, nu: float, step: float, coder: int, ctx: Context | None = None, chunk: int = 16) -> tuple[bytes, Tensor]:
    """Encode and decode with everything there is; all must agree."""
    wanted, norm, error = encode(x, nu, step, coder, ctx, chunk=chunk, backend=reference)
    values = reference.dither_decode(tensor(wanted), torch.empty(x.numel()), None)
    added = reference.dither_decode(tensor(wanted), torch.ones(x.numel()), -0.75)
    for isa, threads in settings():
        with native.using(isa=isa, threads=threads):
            got, got_norm, got_error = encode(x, nu, step, coder, ctx, chunk=chunk)
            assert got == wanted, (isa, threads, x.numel())
            if math.isfinite(norm):
                assert (got_norm, got_error) == (norm, error), (isa, threads)
            if math.isfinite(norm):
                rest = native.dither_decode(tensor(got), x.clone(), -1.0)
                left, buffer = (
                    torch.full((x.numel(),), 7.0),
                    torch.empty(reference.dither_max_bytes(x.numel()), dtype=torch.uint8),
                )
                nbytes, _, _ = native.dither_encode(x, nu, step, coder, chunk, ctx, buffer, left)
                assert buffer[:nbytes].numpy().tobytes() == wanted
                assert torch.equal(left.view(torch.int32), rest.view(torch.int32)), (isa, threads)
                half, left = x * 0.5, torch.full((x.numel(),), 7.0)
                if x.numel() and torch.equal(half + half, x):
                    nbytes, _, _ = native.dither_encode(half, nu, step, coder, chunk, ctx, buffer, left, half.clone())
                    assert buffer[:nbytes].numpy().tobytes() == wanted
                    assert torch.equal(left.view(torch.int32), rest.view(torch.int32)), (isa, threads)
            out = native.dither_decode(tensor(got), torch.full((x.numel(),), 7.0), None)
            assert torch.equal(out.view(torch.int32), values.view(torch.int32)), (isa, threads)
            total = native.dither_decode(tensor(got), torch.ones(x.numel()), -0.75)
            assert torch.equal(total.view(torch.int32), added.view(torch.int32)), (isa, threads)
    return wanted, values


@pytest.mark.parametrize("n", [0, 1, 2, 63, 64, 65, 1000, 4097])
@pytest.mark.parametrize("coder", [AUTO, RANS, PAPER])
def test_small_sizes(n: int, coder: int) -> None:
    agree(gaussian(n, n), 0.1, 0.0, coder)
    agree(gaussian(n, n), 0.0, 0.3, coder)
    agree(gaussian(n, n), 0.2, 0.0, coder, Context(seed=5, step=3, buffer=2, sender=1))


@pytest.mark.parametrize("n", [BLOCK + 1, SEGMENT + 77, 2 * SEGMENT + SEGMENT // 2 - 1])
def test_several_blocks_and_segments(n: int) -> None:
    x = gaussian(n)
    data, values = agree(x, 0.1, 0.0, AUTO)
    assert struct.unpack_from("<I", data)[0] == 0x80000000
    assert float((values - x).square().sum()) <= 0.1 * float(x.square().sum())


@pytest.mark.parametrize("chunk", [14, 15, 17, 18])
def test_chunk_lengths(chunk: int) -> None:
    """Chunks may be shorter or longer than the blocks that share a scale, and a segment may hold an odd number of them."""
    scales = torch.tensor([1.0, 8.0, 0.1, 3.0, 0.5, 2.0]).repeat_interleave(BLOCK)
    for x in (gaussian(BLOCK + 5), scales[: 5 * BLOCK + 77] * heavy(5 * BLOCK + 77)):
        agree(x, 0.1, 0.0, RANS, chunk=chunk)
    with pytest.raises(ValueError, match="chunks"):
        encode(gaussian(10), 0.1, 0.0, RANS, None, chunk=13)


@pytest.mark.parametrize("nu", [1.0, 0.1, 0.003, 1e-4])
def test_escapes_and_wide_windows(nu: float) -> None:
    n = BLOCK + 12345
    agree(heavy(n), nu, 0.0, RANS)
    agree(gaussian(n), nu, 0.0, RANS, Context(seed=1))
    agree(gaussian(n), 0.0, math.sqrt(nu), RANS)


def test_segments_with_unlike_tables_and_numbers_of_chunks() -> None:
    """Two chunks are decoded at once, and the wider table's way of looking symbols up is taken for both."""
    x = torch.zeros(400_000)
    x[::100] = gaussian(4000, 4000)
    x[::70_000] *= 40
    agree(x, 0.1, 0.0, RANS)
    agree(x.flip(0), 0.1, 0.0, RANS)


def test_zero_blocks_zero_segments_and_raw() -> None:
    x = gaussian(2 * SEGMENT)
    x[:SEGMENT] = 0  # a segment of zeros
    x[SEGMENT + BLOCK : SEGMENT + 2 * BLOCK] = 0  # a block of zeros
    x[-1] = 1e30  # levels far beyond int8
    agree(x, 0.1, 0.0, RANS)
    agree(x, 0.1, 0.0, RANS, Context(seed=3))
    data, values = agree(x[: SEGMENT // 2 + 3] + 1, 0.0, 1e-12, RANS)  # levels too large for a code
    assert len(data) == 5 + 4 * (SEGMENT // 2 + 3)
    assert torch.equal(values, x[: SEGMENT // 2 + 3] + 1)


def test_extreme_magnitudes_and_non_finite() -> None:
    x = gaussian(5000)
    for factor in (1e-44, 1e-38, 1e38):
        agree(x.clamp(-3, 3) * factor, 0.1, 0.0, RANS)
        agree(x.clamp(-3, 3) * factor, 0.1, 0.0, AUTO)
    for bad in (math.nan, math.inf, -math.inf):
        y = x.clone()
        y[4321] = bad
        for coder in (AUTO, RANS, PAPER):
            data, values = agree(y, 0.1, 0.0, coder)
            assert data == struct.pack("<I", 0x7FC00000)
            assert bool(values.isnan().all())


def test_unaligned_pointers() -> None:
    n = SEGMENT + 1001
    base = torch.zeros(n + 3)
    for offset in (1, 2, 3):
        x = base[offset : offset + n]
        x.copy_(heavy(n))
        wanted = encode(x.clone(), 0.05, 0.0, RANS, None)[0]
        values = native.dither_decode(tensor(wanted), torch.empty(n), None)
        shifted = torch.empty(len(wanted) + offset, dtype=torch.uint8)[offset:]
        shifted.copy_(tensor(wanted))
        for isa in native.supported_isas():
            with native.using(isa=isa):
                assert encode(x, 0.05, 0.0, RANS, None)[0] == wanted
                assert torch.equal(native.dither_decode(shifted, torch.empty(n + 3)[offset : offset + n], None), values)


def test_large_outputs_are_written_around_the_caches_alike() -> None:
    n = (4 << 20) + SEGMENT + 9
    x = heavy(n)
    data = tensor(encode(x, 0.1, 0.0, RANS, None)[0])
    results = []
    for isa, threads in settings():
        with native.using(isa=isa, threads=threads):
            results.append(native.dither_decode(data, torch.full((n,), math.nan), None))
    assert all(torch.equal(r, results[0]) for r in results)


def test_sampled_moments_agree() -> None:
    for n in (1, 5000, 100_000):
        for stride in (1, 3):
            wanted, found = torch.empty(2, dtype=torch.float64), torch.empty(2, dtype=torch.float64)
            reference.dither_sample(heavy(n), 0.4, stride, wanted)
            for isa in native.supported_isas():
                with native.using(isa=isa):
                    native.dither_sample(heavy(n), 0.4, stride, found)
                    assert torch.equal(found, wanted)


@pytest.mark.parametrize("coder", [AUTO, RANS])
def test_mutations_and_truncations_are_safe_and_backends_agree(coder: int) -> None:
    rng = random.Random(coder)
    # The reference decodes short messages one symbol after the other.
    n = 200
    x = heavy(n)
    data = encode(x, 0.02, 0.0, coder, None)[0]
    tries = [data[:size] for size in {*range(40), *(rng.randrange(len(data)) for _ in range(20))}]
    for _ in range(80):
        mutated = bytearray(data)
        mutated[rng.randrange(min(len(data), rng.choice((12, len(data)))))] ^= 1 << rng.randrange(8)
        tries.append(bytes(mutated))
    for item in tries:
        results = []
        for backend in (reference, native):
            try:
                results.append(backend.dither_decode(tensor(item), torch.zeros(n), None))
            except CorruptMessage:
                results.append(None)
        assert (results[0] is None) == (results[1] is None)
        if results[0] is not None and results[1] is not None:
            assert torch.equal(results[0].view(torch.int32), results[1].view(torch.int32))


def test_a_vector_of_ten_takes_eight_bytes() -> None:
    total = sum(len(encode(gaussian(10, seed), 0.1, 0.0, AUTO, None)[0]) for seed in range(500))
    assert total / 500 <= 8.2

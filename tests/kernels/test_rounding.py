"""Philox, norms and block quantisers: the reference against first principles, the native backend against the reference."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from tersegrad.core import philox
from tersegrad.core.protocol import Context
from tersegrad.kernels import native, reference
from tersegrad.kernels.reference import rounding
from tersegrad.kernels.schema_blocks import RoundingRule

CTX = Context(seed=0x123456789ABCDEF0, step=7, buffer=3, sender=9)
SIZES = (0, 1, 7, 8, 9, 63, 64, 65, 511, 512, 513, 5000)
FORMATS: tuple[tuple[RoundingRule, int, int, bool], ...] = (
    ("l2", 1, 2, False),
    ("max", 3, 3, False),
    ("l2", 7, 4, False),
    ("max", 5, 4, False),
    ("l2", 15, 5, False),
    ("max", 31, 6, False),
    ("l2", 63, 7, False),
    ("max", 127, 8, False),
    ("nearest", 127, 8, False),
    ("nearest", 7, 4, True),
)


@contextmanager
def variant(isa: str, threads: int) -> Iterator[None]:
    with native.using(isa=isa, threads=threads):
        yield


def variants() -> list[tuple[str, int]]:
    return [(isa, threads) for isa in native.supported_isas() for threads in (1, 3)]


def wild(n: int, seed: int = 0) -> Tensor:
    """Values of many magnitudes."""
    g = torch.Generator().manual_seed(seed)
    return torch.randn(n, generator=g) * torch.exp(3 * torch.randn(n, generator=g))


def run(
    backend: object, x: Tensor, rule: RoundingRule, block: int, levels: int, width: int, bfloat16: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    kernels = reference if backend is reference else native
    n = x.numel()
    steps = torch.full((-(-n // block) * (2 if bfloat16 else 4),), 99, dtype=torch.uint8)
    codes = torch.full(((n * width + 7) // 8,), 99, dtype=torch.uint8)
    kernels.quantise_blocks(x, CTX, steps, codes, rule=rule, block=block, levels=levels, width=width, bfloat16=bfloat16)
    out = torch.full((n,), 5.0)
    kernels.dequantise_blocks(steps, codes, out, block=block, width=width, bfloat16=bfloat16)
    added = torch.linspace(-1, 1, n)
    kernels.dequantise_blocks(steps, codes, added, block=block, width=width, bfloat16=bfloat16, weight=0.3)
    return steps, codes, out, added


def test_philox_known_answers() -> None:
    # Random123's kat_vectors for philox4x32-10.
    zero = torch.zeros(1, dtype=torch.int64)
    ones = torch.full((1,), 0xFFFFFFFF)
    assert rounding.philox_blocks(0, zero, zero, 0, 0).tolist() == [[0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]]
    key = 0xFFFFFFFFFFFFFFFF
    words = rounding.philox_blocks(key, ones, ones, 0xFFFFFFFF, 0xFFFFFFFF).tolist()
    assert words == [[0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]]
    c0, c1 = torch.full((1,), 0x243F6A88), torch.full((1,), 0x85A308D3)
    words = rounding.philox_blocks(0x299F31D0A4093822, c0, c1, 0x13198A2E, 0x03707344).tolist()
    assert words == [[0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1]]


@pytest.mark.parametrize(("start", "count"), [(0, 0), (0, 1), (5, 100), (64, 500), ((1 << 35) - 100, 300), ((1 << 40) + 3, 70)])
def test_draws_follow_the_counter_layout(start: int, count: int) -> None:
    purpose = int(philox.Purpose.TEST)
    salt = CTX.buffer << 16 | CTX.sender
    expected = []
    for i in range(start, start + count):
        words = philox.block(CTX.seed, (i >> 3 & philox.MASK, purpose << 24 | i >> 35, CTX.step, salt))
        expected.append(words[i % 8 // 2] >> 16 * (i % 2) & 0xFFFF)
    assert reference.random_u16(CTX, purpose, start, count).tolist() == expected
    for isa in native.supported_isas():
        with variant(isa, 1):
            assert native.random_u16(CTX, purpose, start, count).tolist() == expected


def test_draws_in_segments_and_threads_agree() -> None:
    count = (1 << 20) + 1003
    whole = reference.random_u16(CTX, 0, 3, count)
    assert torch.equal(whole[-20:], reference.random_u16(CTX, 0, 3 + count - 20, 20))
    for isa, threads in variants():
        with variant(isa, threads):
            assert torch.equal(native.random_u16(CTX, 0, 3, count), whole)


@pytest.mark.parametrize("n", [*SIZES, 4096, 4097, 300_000])
def test_norms(n: int) -> None:
    x = wild(n)
    exact = math.fsum((x.double() ** 2).tolist())
    assert float(reference.sum_squares(x)) == pytest.approx(exact, rel=1e-12)
    assert float(reference.sum_abs(x)) == pytest.approx(math.fsum(x.double().abs().tolist()), rel=1e-12)
    assert float(reference.abs_max(x)) == (float(x.abs().max()) if n else 0.0)
    for isa, threads in variants():
        with variant(isa, threads):
            assert torch.equal(native.sum_squares(x), reference.sum_squares(x))
            assert torch.equal(native.sum_abs(x), reference.sum_abs(x))
            assert torch.equal(native.abs_max(x), reference.abs_max(x))


@pytest.mark.parametrize("block", [1, 8, 30, 32, 512, 5000, 9000, 70_000])
def test_block_norms(block: int) -> None:
    x = wild(150_001 if block > 5000 else 20_003)
    sums = reference.block_sum_squares(x, block), reference.block_sum_abs(x, block), reference.block_abs_max(x, block)
    assert float(sums[0].sum()) == pytest.approx(float((x.double() ** 2).sum()), rel=1e-12)
    assert float(sums[2].max()) == float(x.abs().max())
    for isa, threads in variants():
        with variant(isa, threads):
            assert torch.equal(native.block_sum_squares(x, block), sums[0])
            assert torch.equal(native.block_sum_abs(x, block), sums[1])
            assert torch.equal(native.block_abs_max(x, block), sums[2])


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_abs_max_is_a_finite_check(bad: float) -> None:
    for at in (0, 17, 99):
        x = wild(100)
        x[at] = bad
        assert not math.isfinite(float(reference.abs_max(x)))
        for isa in native.supported_isas():
            with variant(isa, 1):
                assert not math.isfinite(float(native.abs_max(x)))


@pytest.mark.parametrize("form", FORMATS, ids=str)
@pytest.mark.parametrize("block", [8, 24, 32, 512, 1000, 4096, 8192])
def test_every_instruction_set_writes_the_reference_bytes(form: tuple[RoundingRule, int, int, bool], block: int) -> None:
    rule, levels, width, bfloat16 = form
    for n in SIZES:
        x = wild(n, n)
        expected = run(reference, x, rule, block, levels, width, bfloat16)
        for isa in native.supported_isas():
            with variant(isa, 1):
                for a, b in zip(expected, run(native, x, rule, block, levels, width, bfloat16)):
                    assert torch.equal(a, b), (n, isa)


@pytest.mark.parametrize("form", FORMATS, ids=str)
@pytest.mark.parametrize("block", [512, 1 << 20])
def test_threads_long_blocks_and_unaligned_memory(form: tuple[RoundingRule, int, int, bool], block: int) -> None:
    rule, levels, width, bfloat16 = form
    x = wild(400_009)[1:]  # four bytes past an aligned address
    expected = run(reference, x, rule, block, levels, width, bfloat16)
    for isa, threads in variants():
        with variant(isa, threads):
            for a, b in zip(expected, run(native, x, rule, block, levels, width, bfloat16)):
                assert torch.equal(a, b), (isa, threads)


def test_streaming_stores_write_the_same_values() -> None:
    n = (4 << 20) + 5
    x = wild(1 << 12).repeat(n // 4096 + 1)[:n].contiguous()
    steps, codes = torch.empty(-(-n // 512) * 4, dtype=torch.uint8), torch.empty((n + 1) // 2, dtype=torch.uint8)
    native.quantise_blocks(x, CTX, steps, codes, rule="l2", block=512, levels=7, width=4)
    expected = reference.dequantise_blocks(steps, codes, torch.empty(n), block=512, width=4)
    for isa, threads in variants():
        for out in (torch.empty(n), torch.empty(n + 1)[1:]):
            with variant(isa, threads):
                assert torch.equal(native.dequantise_blocks(steps, codes, out, block=512, width=4), expected)


@pytest.mark.parametrize("rule", ["l2", "max", "nearest"])
@pytest.mark.parametrize("scale", [1e-45, 1e-40, 1.2e-38, 1e-36, 3e-33, 1e-30, 1.0, 1e30, 1e37, 3.4e38])
def test_extreme_magnitudes(rule: RoundingRule, scale: float) -> None:
    x = (torch.linspace(-1, 1, 1024) * scale).to(torch.float32)
    x[0] = scale
    for levels, width in ((7, 4), (127, 8), (1, 2)):
        expected = run(reference, x, rule, 512, levels, width, False)
        assert bool(expected[2].isfinite().all())
        step = expected[0].view(torch.float32).repeat_interleave(512)
        assert bool(((expected[2] - x).double().abs() <= step.double() * (1 + 1e-6)).all())
        for isa in native.supported_isas():
            with variant(isa, 1):
                for a, b in zip(expected, run(native, x, rule, 512, levels, width, False)):
                    assert torch.equal(a, b), isa


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_one_bad_coordinate_makes_the_whole_decode_nan(bad: float) -> None:
    for rule, levels, width, bfloat16 in FORMATS:
        x = wild(1500)
        x[700] = bad
        expected = run(reference, x, rule, 64, levels, width, bfloat16)
        assert bool(expected[2].isnan().all())
        assert bool(expected[3].isnan().all())
        for isa in native.supported_isas():
            with variant(isa, 1):
                got = run(native, x, rule, 64, levels, width, bfloat16)
                assert torch.equal(got[0], expected[0])
                assert torch.equal(got[1], expected[1])
                assert bool(got[2].isnan().all())
                assert bool(got[3].isnan().all())


def test_steps_of_zero_blocks_are_zero() -> None:
    steps, _, out, _ = run(reference, torch.zeros(100), "l2", 32, 7, 4, False)
    assert not bool(steps.any())
    assert not bool(out.any())


def test_accumulation_is_decode_then_add() -> None:
    x = wild(1000)
    for rule, levels, width, bfloat16 in FORMATS:
        _, _, out, added = run(reference, x, rule, 64, levels, width, bfloat16)
        assert torch.equal(added, torch.linspace(-1, 1, 1000) + out * torch.tensor(0.3))


def test_bad_arguments_raise() -> None:
    x, steps, codes = torch.zeros(64), torch.zeros(8, dtype=torch.uint8), torch.zeros(32, dtype=torch.uint8)
    with pytest.raises(ValueError):
        native.quantise_blocks(x, CTX, steps, codes, rule="l2", block=30, levels=7, width=4)
    with pytest.raises(ValueError):
        native.quantise_blocks(x, CTX, steps, codes, rule="l2", block=32, levels=8, width=4)
    with pytest.raises(ValueError):
        native.quantise_blocks(x, CTX, steps[:4], codes, rule="l2", block=32, levels=7, width=4)
    with pytest.raises(ValueError):
        native.dequantise_blocks(steps, codes[:31], x, block=32, width=4)
    with pytest.raises(ValueError):
        native.dequantise_blocks(steps, codes, x, block=32, width=9)


@pytest.mark.parametrize("weight", [1.0, 0.3])
@pytest.mark.parametrize("bad", [False, True])
def test_sums_of_messages_are_those_of_one_after_another(bad: bool, weight: float) -> None:
    n, head = 1003, 2 * -(-1003 // 32)
    options: Any = {"block": 32, "width": 4, "bfloat16": True}
    messages, expected = [], torch.empty(n)
    for k in range(3):
        x = wild(n, k)
        x[5] = math.inf if bad and k == 1 else 1.0
        steps, codes, out, _ = run(reference, x, "nearest", 32, 7, 4, True)
        messages.append(torch.cat((steps, codes)))
        if k == 0:
            expected = out * weight
        else:
            reference.dequantise_blocks(steps, codes, expected, **options, weight=weight)
    assert all(m.numel() == head + -(-n // 2) for m in messages)
    found = reference.dequantise_messages(messages, torch.full((n,), 5.0), **options, weight=weight)
    assert torch.equal(found.nan_to_num(9.0), expected.nan_to_num(9.0))
    assert bool(found.isnan().all()) == bad

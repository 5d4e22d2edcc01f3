"""The compiled module against its own Python callers: whatever the arguments are, an exception at worst."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from tersegrad.core.protocol import Context
from tersegrad.kernels import native, reference
from tersegrad.kernels.native.module import module

HUGE = [1 << 62, (1 << 62) + 1, (1 << 63) - 1, 1 << 63, (1 << 64) - 1]
UNSORTED = np.array([7, 3, 3, 100, 5], dtype=np.int32)
DRAWS = (1, 2, 3, 4)


def octets(n: int) -> np.ndarray:
    return np.zeros(n, dtype=np.uint8)


@pytest.mark.parametrize("isa", native.supported_isas())
def test_every_function_with_hostile_arguments(isa: str) -> None:
    program = Path(__file__).with_name("hostile.py")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(program), module.__file__, "--isa", isa],
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
@pytest.mark.parametrize("numel", HUGE)
def test_vectors_longer_than_an_index_reaches(numel: int, dtype: type) -> None:
    places: np.ndarray = np.zeros(5, dtype=dtype)
    data = octets(100)
    if numel == 1 << 62 and dtype is np.int64:
        numel += 1
    calls: tuple[Callable[[], object], ...] = (
        lambda: module.digits_decode(data, numel, places),
        lambda: module.golomb_decode(data, numel, 5, places),
        lambda: module.bitmap_decode(data, numel, places),
        lambda: module.gap_rests_decode(data, octets(5), numel, places),
        lambda: module.permuted_indices([1, 2, 3, 4, 5, 6], 0, numel, places),
        lambda: module.digits_encode(np.arange(5, dtype=dtype), numel, data),
        lambda: module.gap_histogram(np.arange(5, dtype=dtype), numel, np.zeros(128, dtype=np.int64)),
    )
    for call in calls:
        with pytest.raises(ValueError, match=r"too long|permutation"):
            call()


def test_index_sets_must_increase() -> None:
    calls: tuple[Callable[[], object], ...] = (
        lambda: module.golomb_size(UNSORTED, 3),
        lambda: module.golomb_encode(UNSORTED, 3, octets(100)),
        lambda: module.gap_classes(UNSORTED, octets(5)),
        lambda: module.gap_rests_encode(UNSORTED, octets(100)),
        lambda: module.gap_histogram(UNSORTED, 1000, np.zeros(128, dtype=np.int64)),
        lambda: module.digits_encode(UNSORTED, 1000, octets(100)),
        lambda: module.bitmap_encode(UNSORTED, 1000, octets(125)),
        lambda: module.golomb_size(np.array([-1, 3], dtype=np.int64), 3),
    )
    for call in calls:
        with pytest.raises(ValueError, match="increase"):
            call()


def test_a_stride_beyond_the_vector_samples_its_first_block() -> None:
    x, nothing = np.ones(10_000, dtype=np.float32), np.zeros(0, dtype=np.float32)
    expected = module.dither_sample(x[:4096].copy(), 0.3, 1, nothing)
    for stride in [3, 1 << 50, *HUGE]:
        assert module.dither_sample(x, 0.3, stride, nothing) == expected
    with pytest.raises(ValueError, match="stride"):
        module.dither_sample(x, 0.3, 0, nothing)


def test_rows_that_no_counter_holds() -> None:
    none = np.zeros(0, dtype=np.int32)
    with pytest.raises(ValueError, match="too large"):
        module.random_rows(DRAWS, np.arange(4, dtype=np.int64), 1 << 62, none)
    with pytest.raises(ValueError, match="below 2"):
        module.random_rows(DRAWS, np.array([1 << 57], dtype=np.int64), 8, np.zeros(8, dtype=np.int32))
    with pytest.raises(ValueError, match="from 0"):
        module.random_rows(DRAWS, np.array([-1], dtype=np.int64), 8, np.zeros(8, dtype=np.int32))


def test_books_without_coordinates() -> None:
    nothing, one = np.zeros(0, dtype=np.float32), np.ones(1, dtype=np.float32)
    with pytest.raises(ValueError, match="at least one"):
        module.sphere_first(nothing, 1 << 62, nothing, 0, one, np.zeros(1, dtype=np.int64), np.zeros(1, dtype=np.int64))


def test_unary_levels_are_bounded() -> None:
    with pytest.raises(ValueError, match="adaptive"):
        native.levels_encode(torch.full((1000,), (1 << 31) - 1, dtype=torch.int32), False)
    levels = torch.tensor([0, 70_000, -3, 0, 65], dtype=torch.int32)
    for adaptive in (False, True):
        data = native.levels_encode(levels, adaptive)
        assert torch.equal(data, reference.levels_encode(levels, adaptive))
        assert torch.equal(native.levels_decode(data, 5), levels)


@pytest.mark.parametrize("num_contexts", [1, 2, 4, 5, 128, 256])
@pytest.mark.parametrize("sample", [False, True])
def test_many_tables_and_no_contexts(num_contexts: int, sample: bool) -> None:
    """Without contexts every symbol belongs to table 0, as the reference says."""
    symbols = torch.randint(0, 17, (100_000,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    for isa in native.supported_isas():
        with native.using(isa=isa):
            counts = native.rans_histogram(symbols, 17, None, num_contexts, False)
            assert torch.equal(counts, reference.rans_histogram(symbols, 17, None, num_contexts, False))
            out = torch.empty(1 + 100_000, dtype=torch.uint8)
            nbytes = int(native.rans_encode(symbols, 17, None, num_contexts, sample, 16, out))
            again = torch.empty_like(symbols)
            assert int(native.rans_decode(out[:nbytes], 17, None, num_contexts, again)) == nbytes
            assert torch.equal(again, symbols)
    expected = torch.empty_like(out)
    assert int(reference.rans_encode(symbols, 17, None, num_contexts, sample, 16, expected)) == nbytes
    assert torch.equal(out[:nbytes], expected[:nbytes])


@pytest.mark.parametrize("bad", ["float64", "strided", "frozen", "short"])
def test_results_are_never_written_into_a_copy(bad: str) -> None:
    """A converted output would be filled and thrown away: it is refused instead."""
    x, indices = np.ones(64, dtype=np.float32), np.arange(4, dtype=np.int32)

    def output(n: int, dtype: type = np.float32) -> np.ndarray:
        if bad == "float64":
            return np.zeros(n, dtype=np.float64)
        if bad == "strided":
            return np.zeros(2 * n, dtype=dtype)[::2]
        out: np.ndarray = np.zeros(n if bad == "frozen" else n - 1, dtype=dtype)
        out.flags.writeable = bad != "frozen"
        return out

    calls: tuple[Callable[[], object], ...] = (
        lambda: module.sparse_scatter(np.array([0, 63], dtype=np.int32), x[:2], output(64)),
        lambda: module.bf16_encode(x, output(128, np.uint8)),
        lambda: module.bf16_decode(octets(128), output(64), False, 1.0),
        lambda: module.quantise(x, 64, 7, 4, 1, False, 1, 2, 3, 4, 5, octets(4), output(32, np.uint8)),
        lambda: module.rotate(x, output(64), 64, 1, 2, 3, 4),
        lambda: module.permuted_scatter(x, [1, 2, 3, 4, 5, 6], 0, output(64)),
        lambda: module.variance_select(x, x, x, x, 1.0, 1.0, 0.0, output(64), np.zeros(64, dtype=np.float32)),
        lambda: module.bitmap_encode(indices, 64, output(8, np.uint8)),
        lambda: module.subtractive_quantise(x, 0.5, DRAWS, 0, output(64, np.int32)),
    )
    for call in calls:
        with pytest.raises((TypeError, ValueError)):
            call()


def test_outputs_on_top_of_inputs() -> None:
    x = np.ones(128, dtype=np.float32)
    calls: tuple[Callable[[], object], ...] = (
        lambda: module.variance_select(x[:64], x[64:], x[:64], x[:64], 1.0, 1.0, 0.0, x[32:96], np.zeros(64, dtype=np.float32)),
        lambda: module.rotate(x[:64], x[32:96], 64, 1, 2, 3, 4),
        lambda: module.permuted_gather(x, [1, 2, 3, 4, 5, 6], 0, x[:64]),
        lambda: module.dither_encode(
            x, 0.1, 0.0, 0, 16, (False, 0, 0, 0, 0), octets(2000), x, np.zeros(0, np.float32), np.zeros(0, np.int64), False
        ),
    )
    for call in calls:
        with pytest.raises(ValueError, match="overlaps"):
            call()
    # Rotations work in place.
    expected = np.empty_like(x)
    module.rotate(x, expected, 64, 1, 2, 3, 4)
    module.rotate(x, x, 64, 1, 2, 3, 4)
    assert (x == expected).all()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 0.0, -1.0, 1e-45])
def test_steps_that_are_none(value: float) -> None:
    x, nothing, nowhere = np.ones(64, dtype=np.float32), np.zeros(0, dtype=np.float32), np.zeros(0, dtype=np.int64)
    with pytest.raises(ValueError, match="step"):
        module.dither_sample(x, value, 1, nothing)
    with pytest.raises(ValueError, match="step"):
        module.dither_encode(x, 0.0, value, 0, 16, (False, 0, 0, 0, 0), octets(1000), nothing, nothing, nowhere, False)
    with pytest.raises(ValueError, match="step"):
        module.subtractive_quantise(x, value, DRAWS, 0, np.zeros(64, dtype=np.int32))


def test_nu_must_be_a_number() -> None:
    x, nothing, nowhere = np.ones(64, dtype=np.float32), np.zeros(0, dtype=np.float32), np.zeros(0, dtype=np.int64)
    for nu in (float("nan"), float("inf")):
        with pytest.raises(ValueError, match="nu"):
            module.dither_encode(x, nu, 0.0, 0, 16, (False, 0, 0, 0, 0), octets(1000), nothing, nothing, nowhere, False)
    with pytest.raises(ValueError, match="coordinates"):
        module.dither_max_bytes(1 << 63)


def test_draws_that_no_counter_holds() -> None:
    out = np.zeros(64, dtype=np.int32)
    for start in [(1 << 59) - 63, *HUGE]:
        with pytest.raises(ValueError, match="below 2"):
            module.random_u16(1, 2, 3, 4, 5, start, out)
    # The last ones that a counter holds are those of the reference.
    ctx = Context(seed=1, step=3)
    last = (1 << 59) - 64
    assert torch.equal(native.random_u16(ctx, 2, last, 64), reference.random_u16(ctx, 2, last, 64))


def test_variance_returns_all_that_it_found() -> None:
    """Everything is sent, far more than a few percent: the kernel runs once, and nothing is lost."""
    n = 200_000
    x = torch.randn(n, generator=torch.Generator().manual_seed(0))
    zero = torch.zeros(n)
    for threads in (1, 3):
        with native.using(threads=threads):
            next_r, next_v, indices, values, _, finite = native.variance_select(zero, zero, x, zero, 1.0, 0.9, n)
            assert finite
            assert indices.dtype == torch.int32
            assert torch.equal(values, x[indices.long()])
            assert torch.equal(indices, x.nonzero().view(-1).int())
            assert not next_r.any()
            assert not next_v.any()

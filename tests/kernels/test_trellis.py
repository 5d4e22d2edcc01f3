"""Trellis codes: the published vectors, optimal paths, and the same bytes and values from every instruction set and the reference."""

from __future__ import annotations

import itertools
import math
import random
import zlib
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor

from tersegrad.core import state
from tersegrad.core.errors import CorruptMessage
from tersegrad.core.protocol import Context
from tersegrad.kernels import native, reference
from tersegrad.kernels.reference import trellis, trellis_code
from tests.kernels.test_classes import SHAPES
from tests.laws.inputs import uneven

CTX = Context(seed=7, step=3, buffer=1, sender=2)
X = (-1.55, -0.36, -2.37, 1.04, -1.21, -0.17, 0.64, 0.14, -0.86, 1.14, -0.13, -0.52, -0.86, -1.41, 1.02, -0.86)
BEST = {
    4: ([-2, -1, -5, 2, -2, -1, 1, 1, -1, 2, 0, 0, -2, -3, 2, -2], 4561),
    8: ([-4, 0, -6, 2, -3, 0, 2, 1, -2, 2, 0, -1, -1, -2, 2, -2], 6033),
    16: ([-2, -2, -5, 2, -3, 0, 1, 1, -2, 2, 0, -2, -2, -3, 2, -2], 5457),
    32: ([-4, -2, -4, 2, -3, 0, 2, 0, -2, 2, 0, -1, -1, -3, 2, -2], 5073),
}


def gaussian(n: int, seed: int = 0) -> Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(seed))


def heavy(n: int) -> Tensor:
    """Student-t with 1.5 degrees of freedom: many escapes, few of them huge."""
    g = torch.Generator().manual_seed(1)
    return gaussian(n) / torch.rand(n, generator=g).clamp_min(1e-6).pow(1 / 1.5)


def integers(x: Tensor, step: float, states: int) -> Tensor:
    chosen = trellis._quantise(x, 0, step, states, 15, None, [], False)
    assert chosen is not None
    return chosen.n


def admissible(n: list[int], states: int) -> bool:
    s = 0
    for value in n:
        if value % 2 != s % 2:
            return False
        s = trellis_code.next_state(states, s, value >> 1 & 1)
    return True


@pytest.mark.parametrize("states", BEST)
def test_published_paths(states: int) -> None:
    wanted, cost = BEST[states]
    n = integers(torch.tensor(X), 0.5, states).tolist()
    assert n == wanted
    assert admissible(n, states)
    assert sum((round(64 * x) - 32 * k) ** 2 for x, k in zip(X, n, strict=True)) == cost


@pytest.mark.parametrize("states", BEST)
def test_no_admissible_path_is_nearer(states: int) -> None:
    y = [round(64 * x) for x in X[:9]]
    best = math.inf
    for choice in itertools.product((0, 1), repeat=len(y)):
        s, cost = 0, 0
        for value, z1 in zip(y, choice, strict=True):
            label = 2 * z1 + s % 2
            cost += ((value - 32 * label + 64) % 128 - 64) ** 2
            s = trellis_code.next_state(states, s, z1)
        best = min(best, cost)
    n = integers(torch.tensor(X[:9]), 0.5, states).tolist()
    assert sum((v - 32 * k) ** 2 for v, k in zip(y, n, strict=True)) == best


def test_the_start_is_in_state_zero_however_costly() -> None:
    n = integers(torch.full((32,), 92 / 32), 1.0, 32).tolist()
    assert admissible(n, 32)


@pytest.mark.parametrize(
    ("step", "states", "crc"),
    [(1.2, 8, 0x066FADA1), (0.2, 8, 0x3213A520), (0.62, 4, 0x9BB9AC0A), (0.62, 16, 0x3AF2DFBA), (0.62, 32, 0x246E53F4)],
)
def test_checksums_of_long_paths(step: float, states: int, crc: int) -> None:
    x = torch.from_numpy(np.random.default_rng(0).standard_normal(1 << 18).astype(np.float32))
    exact = float(np.float32(step))
    out = torch.empty(reference.trellis_max_bytes(x.numel()), dtype=torch.uint8)
    nbytes, _, _ = native.trellis_encode(x, exact, states, 18, None, out)
    values = native.trellis_decode(out[: int(nbytes)], states, None, torch.empty_like(x), None)
    # The scale stands behind mode, kind, window, run and an empty tail.
    scale = float(torch.tensor(out[5:9].tolist(), dtype=torch.uint8).view(torch.float32))
    n = torch.round(values / scale).to(torch.int16)
    assert zlib.crc32(n.numpy().tobytes()) == crc


def settings() -> Iterator[tuple[str, int]]:
    isas = native.supported_isas()
    yield from ((isa, 1) for isa in isas)
    yield isas[-1], 3


def agree(
    x: Tensor,
    step: float,
    states: int = 8,
    chunk: int = 16,
    ctx: Context | None = None,
    layout: Tensor | None = None,
    rdo: bool = False,
) -> bytes:
    """Encode and decode with everything there is; all must agree."""
    step = float(torch.tensor(step, dtype=torch.float32))
    out = torch.empty(reference.trellis_max_bytes(x.numel()), dtype=torch.uint8)
    nbytes, norm, error = reference.trellis_encode(x, step, states, chunk, ctx, out, layout, None, rdo)
    wanted = out[: int(nbytes)].clone()
    values = reference.trellis_decode(wanted, states, ctx, torch.empty_like(x), None, layout)
    if ctx is None and math.isfinite(float(norm)):
        exact = float((x.double() - values.double()).square().sum())
        assert float(error) == pytest.approx(exact, rel=1e-6, abs=1e-9 * float(norm))
    for isa, threads in settings():
        with native.using(isa=isa, threads=threads):
            got, got_norm, got_error = native.trellis_encode(x, step, states, chunk, ctx, out, layout, None, rdo)
            assert torch.equal(out[: int(got)], wanted), (isa, threads)
            assert float(got_error) == float(error)
            assert float(got_norm) == float(norm)
            read = native.trellis_decode(wanted, states, ctx, torch.empty_like(x), None, layout)
            assert torch.equal(read.view(torch.int32), values.view(torch.int32)) or bool((read.isnan() & values.isnan()).all())
            if bool(values.isfinite().all()):
                added = native.trellis_decode(wanted, states, ctx, torch.ones_like(x), -0.75, layout)
                assert torch.equal(added, torch.ones_like(x) + torch.tensor(-0.75) * values)
    return bytes(wanted.tolist())


@pytest.mark.parametrize(
    ("numel", "step", "chunk"),
    [
        pytest.param((4 << 20) + 1234, 1.0, 16, id="around the caches"),
        pytest.param((3 << 16) + 77, 0.62, 16, id="a chunk alone"),
        pytest.param(1 << 17, 0.3, 16, id="more than 32 symbols"),
        pytest.param(1 << 17, 40.0, 16, id="nearly all zero"),
        pytest.param(1 << 17, 1e37, 14, id="values that overflow"),
        pytest.param(1 << 17, 2e-31, 14, id="the smallest scale with a normal 2^-24th"),
        pytest.param(1 << 17, 1e-36, 14, id="a scale without one"),
    ],
)
def test_instruction_sets_read_alike(numel: int, step: float, chunk: int) -> None:
    """Chunks in pairs and alone, tables in registers and beyond them; one buffer begins at a cache line and one does not."""
    x = gaussian(numel, 5) * (1.0 if 1e-30 < step < 1e30 else step)
    step = float(torch.tensor(step))
    out = torch.empty(reference.trellis_max_bytes(numel), dtype=torch.uint8)
    nbytes, _, _ = native.trellis_encode(x, step, 8, chunk, None, out)
    found = []
    for isa in native.supported_isas():
        for first in (0, 1):
            with native.using(isa=isa):
                target = torch.full((numel + 1,), 7.0)[first : first + numel]
                found.append(native.trellis_decode(out[: int(nbytes)], 8, None, target, None))
    assert all(torch.equal(found[0], other) for other in found[1:])
    assert float((found[0].double() - x.double()).square().sum()) <= numel * float(step) ** 2


@pytest.mark.parametrize("ctx", [None, CTX])
@pytest.mark.parametrize("states", [4, 8, 16, 32])
def test_backends_agree(states: int, ctx: Context | None) -> None:
    for n in (1, 2, 64, 300):
        agree(gaussian(n, n), 0.62, states, ctx=ctx)
    agree(gaussian(33_001), 0.4, states, 14, ctx)


@pytest.mark.parametrize("ctx", [None, CTX])
def test_backends_agree_on_lengths_around_lanes_and_runs(ctx: Context | None) -> None:
    for n in (0, 63, 65, 1024, 16_383, 16_384, 32_769):
        agree(gaussian(n, 5), 1.1, ctx=ctx)


@pytest.mark.parametrize("ctx", [None, CTX])
def test_backends_agree_on_awkward_vectors(ctx: Context | None) -> None:
    x = heavy(600)
    for step in (0.05, 0.5, 5.0):
        agree(x, step, ctx=ctx)
    for step in (0.02, 1e-3, 1e-9):
        agree(gaussian(300), step, ctx=ctx)
    agree(gaussian(300) * 1e-30, 1e-37, ctx=ctx)
    agree(torch.full((1030,), 0.3), 0.1, ctx=ctx)
    agree(gaussian(70) * 1e-3, 1.0, ctx=ctx)
    assert agree(torch.zeros(100), 1.0, ctx=ctx) == b"\1"
    for bad in (math.nan, math.inf):
        x = gaussian(100)
        x[40] = bad
        assert agree(x, 1.0, ctx=ctx) == b"\2"


def test_two_segments_agree() -> None:
    """One of them is zero."""
    x = gaussian((1 << 18) + (1 << 17))
    x[: 1 << 18] = 0
    agree(x, 3.0, chunk=14)


CODED, CLASSED = 2, 3


def test_runs_with_and_without_large_numbers_and_classes_agree() -> None:
    """An encoder expects runs and segments to be like those before them, and has to notice where they are not."""
    segment, run, columns = 1 << 18, 1 << 15, 512
    x = gaussian(2 * segment + run + 777)
    x[2 * run + 5], x[3 * run + 7] = 40.0, -2000.0  # more than 28 steps, and more than 16 bits hold
    rows = x[segment : 2 * segment].view(-1, columns)
    rows *= torch.exp2(2 * gaussian(rows.shape[0], 1))[:, None]
    layout = torch.tensor([x.numel(), columns, 1, 0])
    data = agree(x, 0.9, chunk=0, layout=layout)
    # Behind the mode and the lengths of two segments.
    second = 9 + int.from_bytes(data[1:5], "little")
    assert (data[9], data[second]) == (CODED, CLASSED)
    x[3 * run + 7], x[5 * run + 9] = 0.0, math.nan
    assert agree(x, 0.9, chunk=0, layout=layout) == b"\2"


@pytest.mark.parametrize("ctx", [None, CTX])
@pytest.mark.parametrize(("states", "step"), [(4, 0.5), (8, 2.0), (16, 8.0), (32, 20.0)])
def test_classes_agree(states: int, step: float, ctx: Context | None) -> None:
    x, spec = uneven(SHAPES)
    data = agree(x, step, states, 0, ctx, spec.layout)
    assert data[1] == CLASSED
    assert len(data) < len(agree(x, step, states, 0, ctx))


@pytest.mark.parametrize("ctx", [None, CTX])
@pytest.mark.parametrize("cut", [(100, 9000), (5, 13_000)])
def test_classes_of_parts_agree(cut: tuple[int, int], ctx: Context | None) -> None:
    x, spec = uneven(SHAPES)
    layout = state.slice_spec(spec, *cut).layout
    for step in (0.3, 20.0):
        assert agree(x[cut[0] : cut[1]].contiguous(), step, chunk=14, ctx=ctx, layout=layout)[1] == CLASSED


@pytest.mark.parametrize("ctx", [None, CTX])
def test_classes_with_escapes_and_far_numbers_agree(ctx: Context | None) -> None:
    x, spec = uneven(SHAPES)
    x[::501] *= 300
    assert agree(x, 0.5, ctx=ctx, layout=spec.layout)[1] == CLASSED
    x[77] = 1e20
    agree(x, 0.5, ctx=ctx, layout=spec.layout)
    x[77] = math.nan
    assert agree(x, 0.5, ctx=ctx, layout=spec.layout) == b"\2"
    assert agree(torch.zeros_like(x), 0.5, ctx=ctx, layout=spec.layout) == b"\1"


@pytest.mark.parametrize("ctx", [None, CTX])
def test_several_segments_with_classes_agree(ctx: Context | None) -> None:
    x, spec = uneven(((700, 300), (512, 40, 3, 3), (40,)), spread=1.5)
    # Behind the mode and the lengths of two segments.
    assert agree(x, 2.0, chunk=0, ctx=ctx, layout=spec.layout)[9] == CLASSED


@pytest.mark.parametrize("ctx", [None, CTX])
def test_even_numbers_have_no_classes_and_the_bytes_that_they_had(ctx: Context | None) -> None:
    x = gaussian(40_000)
    layout = torch.tensor([40_000, 200, 1, 0])
    data = agree(x, 0.6, chunk=0, ctx=ctx, layout=layout)
    assert data[1] == CODED
    assert data == agree(x, 0.6, chunk=16, ctx=ctx)


def test_still_coordinates_leave_the_states_alone() -> None:
    """With all coordinates of every other step still, the rest is coded as if they were not there."""
    x = gaussian(64 * 40)
    grid = trellis_code.Grid(x.numel(), 64, 1 << 15)
    y = torch.round(32 * x).long()
    still = torch.arange(x.numel()) // 64 % 2 == 1
    labels = trellis_code.nearest_labels(y, grid, 8, still)
    alone = trellis_code.nearest_labels(y[~still], trellis_code.Grid(x.numel() // 2, 64, 1 << 15), 8)
    assert torch.equal(labels[~still], alone)


def spoilt(good: bytes, chance: random.Random) -> Tensor:
    """A message with a few wrong bytes near its start, and sometimes without its end."""
    data = bytearray(good)
    for _ in range(chance.randint(1, 3)):
        data[chance.randrange(min(len(data), 200))] = chance.randrange(256)
    if chance.random() < 0.3:
        del data[chance.randrange(1, len(data)) :]
    return torch.tensor(list(data), dtype=torch.uint8)


@pytest.mark.parametrize("ctx", [None, CTX])
def test_corrupt_bytes_are_refused_alike(ctx: Context | None) -> None:
    chance = random.Random(5)
    rows, spec = uneven(((48, 16, 3, 3),))
    for x, step, layout in ((gaussian(100), 0.6, None), (heavy(100), 0.3, None), (rows, 1.0, spec.layout)):
        good = agree(x, step, ctx=ctx, layout=layout)
        assert layout is None or good[1] == CLASSED
        for _ in range(40 if layout is None else 12):
            message = spoilt(good, chance)
            results = []
            for backend in (reference, native):
                try:
                    results.append(backend.trellis_decode(message, 8, ctx, torch.empty_like(x), None, layout))
                except CorruptMessage:
                    results.append(None)
            first, second = results
            assert (first is None) == (second is None)
            if first is not None and second is not None:
                assert torch.equal(first.view(torch.int32), second.view(torch.int32))


@pytest.mark.parametrize("ctx", [None, CTX])
def test_corrupt_bytes_leave_what_they_would_be_added_to(ctx: Context | None) -> None:
    chance = random.Random(6)
    for x, step in ((heavy(700), 0.3), (gaussian(20_000), 0.6), (heavy(20_000), 0.3)):
        out = torch.empty(reference.trellis_max_bytes(x.numel()), dtype=torch.uint8)
        nbytes, _, _ = native.trellis_encode(x, float(np.float32(step)), 8, 14, ctx, out)
        good = bytes(out[: int(nbytes)].tolist())
        for _ in range(60):
            message, kept = spoilt(good, chance), torch.ones_like(x)
            try:
                native.trellis_decode(message, 8, ctx, kept, 2.0)
            except CorruptMessage:
                assert bool((kept == 1).all())

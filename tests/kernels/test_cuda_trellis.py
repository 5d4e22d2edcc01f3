"""Trellis codes by the CUDA kernels, emulated on the CPU: the same bytes, the same values and the same refusals as the CPU's kernels."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch
from torch import Tensor

from tersegrad import kernels
from tersegrad.core import state
from tersegrad.core.errors import CorruptMessage
from tersegrad.core.protocol import Context, Spec
from tersegrad.kernels import cuda, native, reference
from tersegrad.kernels.cuda import replay, trellis
from tersegrad.recipes import parse
from tests.kernels.agree import same
from tests.kernels.emulator import compiler, emulated, replaying
from tests.kernels.test_trellis import gaussian, heavy, spoilt
from tests.laws.inputs import uneven
from tests.laws.zoo import adversarial

pytestmark = pytest.mark.skipif(compiler() is None, reason="needs a C++ compiler")

CTX = Context(seed=2**63 + 5, step=7, buffer=2, sender=1)
OPS = native if native.available() else reference
CODED, CLASSED = 2, 3
# All 64 lanes are in use from here on.
FIRST = 1 << 14


@pytest.fixture
def hosted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was left to the CPU's kernels."""
    left: list[str] = []

    def watched(name: str) -> None:
        real = getattr(trellis, name)

        def call(*arguments: Any) -> Any:
            left.append(name)
            return real(*arguments)

        monkeypatch.setattr(trellis, name, call)

    watched("_encode_on_host")
    watched("_decode_on_host")
    return left


def agreed(
    x: Tensor, step: float, states: int = 8, chunk: int = 0, ctx: Context | None = None, layout: Tensor | None = None
) -> Tensor:
    """The message, the same from both, with its norm and error; both read the same from it."""
    step = float(torch.tensor(step, dtype=torch.float32))
    # One byte behind an aligned address.
    room = reference.trellis_max_bytes(x.numel())
    expected, found = torch.zeros(room, dtype=torch.uint8), torch.zeros(room + 1, dtype=torch.uint8)[1:]
    # What is left out, without dither; every second place of a longer vector is a place too.
    left = None if ctx else torch.zeros(x.numel())
    rest = None if ctx else torch.zeros(2 * x.numel())[:: 1 + x.numel() % 2][: x.numel()]
    wanted = OPS.trellis_encode(x, step, states, chunk, ctx, expected, layout, left)
    with emulated():
        got = trellis.trellis_encode(x, step, states, chunk, ctx, found, layout, rest)
    assert left is None or rest is None or not bool(wanted[1].isfinite()) or same(left, rest)
    length = int(wanted[0])
    for a, b in zip(wanted, got, strict=True):
        assert same(a, b)
    assert torch.equal(expected[:length], found[:length])
    for weight in (None, -0.75):
        values, read = torch.linspace(-1, 1, x.numel()), torch.linspace(-1, 1, x.numel())
        OPS.trellis_decode(expected[:length], states, ctx, values, weight, layout)
        with emulated():
            trellis.trellis_decode(found[:length], states, ctx, read, weight, layout)
        assert same(values, read) or bool((values.isnan() & read.isnan()).all())
    return expected[:length]


@pytest.mark.parametrize("ctx", [None, CTX])
@pytest.mark.parametrize("states", [4, 8, 16, 32])
def test_states_and_lengths(states: int, ctx: Context | None, hosted: list[str]) -> None:
    """Whole and partial runs, chunks and groups of steps."""
    for n, chunk in ((FIRST, 0), (2 * FIRST + 100, 0), (33_001, 14)):
        agreed(gaussian(n, n), 0.6, states, chunk, ctx)
    assert not hosted


@pytest.mark.parametrize("ctx", [None, CTX])
def test_several_segments(ctx: Context | None, hosted: list[str]) -> None:
    """One of them is zero, and tables are made from a sample."""
    x = gaussian((1 << 18) + (1 << 17))
    x[1 << 18 :] = 0
    agreed(x, 0.5, ctx=ctx)
    assert not hosted


@pytest.mark.parametrize("ctx", [None, CTX])
def test_short_vectors_are_the_hosts(ctx: Context | None, hosted: list[str]) -> None:
    for n in (0, 1, 2, 3, 7, 4095, 4097, FIRST - 1):
        agreed(gaussian(n, n), 0.6, ctx=ctx)
    assert set(hosted) == {"_encode_on_host", "_decode_on_host"}


@pytest.mark.parametrize("ctx", [None, CTX])
def test_the_zoo(ctx: Context | None) -> None:
    for name, x in adversarial(FIRST + 33).items():
        norm = float(x.double().square().mean())
        assert agreed(x, max(0.4 * math.sqrt(norm), 1e-36), ctx=ctx).numel() > 0, name


@pytest.mark.parametrize("ctx", [None, CTX])
def test_ties_and_single_symbols(ctx: Context | None, hosted: list[str]) -> None:
    steps = torch.randint(-8, 9, (FIRST + 5,), generator=torch.Generator().manual_seed(1))
    for x in (steps / 2, steps / 4, torch.ones(FIRST), torch.full((FIRST + 9,), 92 / 32)):
        agreed(x, 1.0, ctx=ctx)
    agreed(gaussian(FIRST) * 1e-3, 1.0, ctx=ctx)
    assert not [name for name in hosted if name == "_encode_on_host"]


@pytest.mark.parametrize("ctx", [None, CTX])
def test_escapes_raw_symbols_and_numbers_that_are_too_large(ctx: Context | None, hosted: list[str]) -> None:
    agreed(heavy(20_000), 0.5, ctx=ctx)
    agreed(heavy(33_000), 0.5, chunk=14, ctx=ctx)
    agreed(heavy(20_000), 0.05, ctx=ctx)
    uniform = 2 * torch.rand(20_000, generator=torch.Generator().manual_seed(1)) - 1
    assert agreed(1.2 * uniform, 0.01, ctx=ctx)[1] == CODED
    # A few far ones among raw symbols.
    far = 2.4 * uniform
    far[::701] *= 30
    agreed(far, 0.02, ctx=ctx)
    for x, step in ((gaussian(FIRST), 1e-9), (gaussian(FIRST) * 1e-30, 1e-37)):
        agreed(x, step, ctx=ctx)
    assert not hosted
    # More of them than the kernels list.
    agreed(gaussian(20_000), 1e-3, ctx=ctx)
    assert hosted


@pytest.mark.parametrize("ctx", [None, CTX])
def test_modes_without_segments(ctx: Context | None, hosted: list[str]) -> None:
    x = torch.zeros(FIRST)
    assert agreed(x, 1.0, ctx=ctx).tolist() == [1]
    for bad in (math.nan, -math.inf):
        x = gaussian(FIRST)
        x[40] = bad
        assert agreed(x, 1.0, ctx=ctx).tolist() == [2]
    assert not hosted


@pytest.mark.parametrize("ctx", [None, CTX])
def test_scale_classes(ctx: Context | None, hosted: list[str]) -> None:
    """Still and moving ones, coarse and fine steps; where none pay nothing is said of them."""
    assert agreed(gaussian(40_000), 0.6, ctx=ctx, layout=torch.tensor([40_000, 200, 1, 0]))[1] == CODED
    x, spec = uneven(((700, 40), (130,)), spread=2.0)
    # Dither hides small numbers: where nearly all are small, classes do not pay.
    for step, states in ((1.0, 8), (0.5, 32), (2.0, 4), (20.0, 16)):
        assert agreed(x, step, states, ctx=ctx, layout=spec.layout)[1] == (CODED if ctx and step == 20 else CLASSED)
    assert not hosted


def two_kinds() -> tuple[Tensor, Tensor | None]:
    """Numbers of two segments, the second of which has classes, and their layout."""
    x, spec = uneven(((700, 300), (512, 40, 3, 3), (40,)), spread=1.5)
    part, layout = x[7:-33].contiguous(), state.slice_spec(spec, 7, spec.numel - 33).layout
    part[: 1 << 18] = gaussian(1 << 18)
    return part, layout


@pytest.mark.parametrize("ctx", [None, CTX])
def test_scale_classes_of_parts_and_segments(ctx: Context | None, hosted: list[str]) -> None:
    """The first has none, the second has some; the tensors begin and end within a row, and chunks and runs are short."""
    part, layout = two_kinds()
    data = agreed(part, 2.0, chunk=14, ctx=ctx, layout=layout)
    # Behind the mode and the lengths of two segments.
    first = int.from_bytes(bytes(data[1:5].tolist()), "little")
    assert (int(data[9]), int(data[9 + first])) == (CODED, CLASSED)
    assert not hosted


@pytest.mark.parametrize("ctx", [None, CTX])
def test_segments_of_both_kinds_by_replays(ctx: Context | None) -> None:
    """What is measured, described, searched and coded beside one another runs in another order then."""
    x, layout = two_kinds()
    expected, found = (torch.zeros(reference.trellis_max_bytes(x.numel()), dtype=torch.uint8) for _ in range(2))
    wanted = OPS.trellis_encode(x, 2.0, 8, 14, ctx, expected, layout)
    with replaying():
        for _ in range(3):
            found.zero_()
            got = [float(number) for number in trellis.trellis_encode(x, 2.0, 8, 14, ctx, found, layout)]
            assert got == [float(number) for number in wanted]
            assert torch.equal(expected, found)
        assert None not in replay._known.values()


@pytest.mark.parametrize("ctx", [None, CTX])
def test_scale_classes_with_escapes_zeros_and_far_numbers(ctx: Context | None, hosted: list[str]) -> None:
    x, spec = uneven(((700, 40), (130,)), spread=2.0)
    x[::501] *= 300 if ctx is None else 10
    for step in (0.5, 5.0):
        assert agreed(x, step, ctx=ctx, layout=spec.layout)[1] == CLASSED
    assert not hosted
    x[77] = 1e20
    agreed(x, 0.5, ctx=ctx, layout=spec.layout)
    x[77] = math.nan
    assert agreed(x, 0.5, ctx=ctx, layout=spec.layout).tolist() == [2]
    assert agreed(torch.zeros_like(x), 0.5, ctx=ctx, layout=spec.layout).tolist() == [1]
    # Hardly anything is left of them.
    agreed(torch.where(x.abs() < 1000, x, 0), 3000.0, ctx=ctx, layout=spec.layout)


@pytest.mark.parametrize("states", [4, 8, 16, 32])
def test_errors_of_samples(states: int) -> None:
    for x in (gaussian(33_001), heavy(33_001), torch.zeros(FIRST), gaussian(FIRST) * 1e-3, gaussian(300)):
        with emulated():
            found = trellis.trellis_error(x, 0.5, states)
        for a, b in zip(OPS.trellis_error(x, 0.5, states), found, strict=True):
            assert same(a, b)
    x, spec = uneven(((700, 40), (130,)), spread=2.0)
    with emulated():
        found = trellis.trellis_error(x, 2.0, states, spec.layout)
    for a, b in zip(OPS.trellis_error(x, 2.0, states, spec.layout), found, strict=True):
        assert same(a, b)


@pytest.mark.parametrize("ctx", [None, CTX])
def test_corrupt_bytes_are_refused_alike(ctx: Context | None) -> None:
    """And leave what they would be added to."""
    chance = random.Random(5)
    refused = 0
    rows, spec = uneven(((420, 40), (130,)), spread=2.0)
    for x, step, layout in ((gaussian(FIRST + 5), 0.6, None), (heavy(FIRST + 100), 0.3, None), (rows, 2.0, spec.layout)):
        good = bytes(agreed(x, step, ctx=ctx, layout=layout).tolist())
        for k in range(8):
            message = spoilt(good, chance)
            if k % 2:
                # Words of a chunk.
                message = torch.tensor(list(good), dtype=torch.uint8)
                message[chance.randrange(len(good))] ^= 1 << chance.randrange(8)
            results = []
            for backend in (OPS, trellis):
                kept = torch.ones_like(x)
                try:
                    with emulated():
                        results.append(backend.trellis_decode(message, 8, ctx, kept, 2.0, layout))
                except CorruptMessage:
                    assert bool((kept == 1).all())
                    results.append(None)
            first, second = results
            assert (first is None) == (second is None)
            refused += first is None
            assert first is None or second is None or same(first, second)
    assert refused > 6


@pytest.mark.parametrize(
    "text",
    [
        "trellis(nu=0.1)",
        "trellis(alpha=0.1)",
        "trellis(bits=2)",
        "dithered_trellis(omega=0.1)",
        "error_feedback(trellis(nu=0.2))",
    ],
)
def test_compressors_write_the_same_messages(text: str, monkeypatch: pytest.MonkeyPatch, hosted: list[str]) -> None:
    c, x = parse(text), gaussian(150_000)
    spec, results = Spec.flat(x.numel()), []
    for faster in (False, True):
        if faster:
            monkeypatch.setitem(
                kernels._chosen, "cpu", kernels.overlay(native, cuda) if native.available() else kernels.overlay(cuda)
            )
        with emulated():
            message, _ = c.encode(x, spec, c.init(spec, torch.device("cpu")), CTX)
            data = message.payload.clone()
            results.append((data, c.decode(message, spec, CTX)))
    for a, b in zip(*results, strict=True):
        assert same(a, b)
    assert not hosted

"""Random points on the sphere: CUDA kernels in the emulation find and restore the words of the CPU, alone and in whole messages."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from tersegrad import Context, Message, Spec, kernels, theory
from tersegrad.codecs import sphere as codec
from tersegrad.core.errors import CorruptMessage
from tersegrad.kernels import cuda, native, reference
from tersegrad.kernels.cuda import sphere
from tersegrad.kernels.reference.sphere import powers
from tersegrad.recipes import parse
from tests.device import Device
from tests.kernels.agree import same
from tests.kernels.emulator import compiler, emulated, replaying
from tests.laws.test_waiting import counted

pytestmark = pytest.mark.skipif(compiler() is None, reason="needs a C++ compiler")

CTX = Context(seed=0x123456789ABC, step=5, buffer=2, sender=3)
OPS: Any = native if native.available() else reference
TABLE = codec.table(torch.device("cpu"))


def _vector(kind: str, numel: int, seed: int = 7) -> Tensor:
    x = torch.randn(numel, generator=torch.Generator().manual_seed(seed))
    if kind == "bad":
        x[numel // 2] = torch.nan
    if kind == "some":
        x[numel // 3 :] = 0
        x[-1] = 1e-42
    return {
        "nothing": x * 0,
        "alike": torch.ones(numel),
        "wide": x * 2.0 ** (x * 20),
        "huge": x.sign() * 3.4e38,
        "small": x * 1e-38,
    }.get(kind, x)


class There:
    """The CUDA kernels for the simulated device."""

    __name__ = "there"
    OPERATIONS = sphere.__all__

    def __init__(self, device: Device) -> None:
        for name in self.OPERATIONS:
            setattr(self, name, self._operation(device, name))

    def _operation(self, device: Device, name: str) -> Callable[..., Any]:
        real = getattr(cuda, name)

        def there(*arguments: Any) -> Any:
            found = real(*(device.memory(a) if isinstance(a, Tensor) and not a.is_cpu else a for a in arguments))
            return (
                tuple(device.to(t) for t in found) if isinstance(found, tuple) else None if found is None else device.to(found)
            )

        return there


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    """A device on which the CUDA kernels run in the emulation; a book of words serves for few rows too, and is short."""
    monkeypatch.setattr(sphere, "SHARED", 20)
    monkeypatch.setattr(sphere, "BOOK", 1 << 10)
    monkeypatch.setattr(sphere, "WARPS", 40)
    codec._table.cache_clear()
    with emulated(), Device() as made:
        monkeypatch.setitem(kernels._chosen, made.device.type, kernels.overlay(There(made)))
        yield made
    codec._table.cache_clear()


CASES = (
    ("spherical(alpha=0.5, block=4)", 1003),
    ("spherical(alpha=0.4, block=8)", 163),
    ("spherical(alpha=0.6, block=5, unbiased=true)", 131),
    ("spherical(alpha=0.95, block=70)", 1000),
    ("spherical(alpha=0.0009, block=1)", 50),
    ("spherical(alpha=0.5)", 9),
    ("spherical(alpha=0.7, unbiased=true)", 12),
    ("spherical(alpha=0.99)", 300),
)


@pytest.mark.parametrize("kind", ["plain", "alike", "nothing", "some", "wide", "huge", "small", "bad"])
@pytest.mark.parametrize(("text", "numel"), CASES)
def test_messages_are_those_of_the_cpu(text: str, numel: int, kind: str, device: Device) -> None:
    """In one read of what was found, and at most one of a message that arrived."""
    c, x, spec = parse(text), _vector(kind, numel), Spec.flat(numel)
    codec.table(device.device)
    here = counted(c, x, spec, None)
    device.waits.clear()
    there = counted(c, x, spec, device)
    assert there.data == here.data
    assert same(there.decoded, here.decoded)
    assert there.added is not None
    assert here.added is not None
    assert same(there.added, here.added)
    # One more for what is sent as it is.
    stored = len(here.data) >= 4 * numel
    assert (there.encode, there.decode, there.decode_add) == (1 + stored, 1, 1)


@pytest.mark.parametrize("unbiased", [False, True])
@pytest.mark.parametrize("g", [1, 2, 8, 64])
def test_norms_are_those_of_the_reference(g: int, unbiased: bool) -> None:
    norms = 2.0 ** (40 * torch.randn(600, dtype=torch.float64, generator=torch.Generator().manual_seed(g)))
    edges = torch.tensor([0.0, 2.0**-126, 2.0**-127, math.inf, math.nan, 1.0, 3.4e38, 2.0**0.5, 1e-46], dtype=torch.float64)
    square = torch.cat((norms, edges, powers(2 * g))).square()
    ctx = CTX if unbiased else None
    with emulated():
        found, expected = sphere.sphere_norms(square, g, ctx), reference.sphere_norms(square, g, ctx)
    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[1], expected[1])


@pytest.mark.parametrize(
    ("rows", "d", "alpha", "start"), [(40, 4, 0.5, 0), (3, 8, 0.3, 16), (1, 12, 0.6, None), (25, 3, 5e-4, 7), (9, 100, 0.97, 5)]
)
def test_the_first_word_wins_for_any_team(
    rows: int, d: int, alpha: float, start: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, chance = _vector("plain", rows * d).view(rows, d), theory.cap_probability(alpha, d)
    square = x.double().square().sum(1)
    square[rows // 2 :: 9] = torch.tensor([0.0, math.inf, math.nan][rows % 3])
    given = (CTX, x, square.sqrt() * math.sqrt(1 - alpha), square, alpha, chance, d, start, TABLE)
    expected = OPS.sphere_search(*given)
    assert bool((expected >= 0).any()) or rows == 1
    for warps, shared in ((1, 1), (rows * 3, 100), (rows * 8, 1)):
        monkeypatch.setattr(sphere, "WARPS", warps)
        monkeypatch.setattr(sphere, "SHARED", shared)
        with emulated():
            assert torch.equal(sphere.sphere_search(*given), expected), (warps, shared)


def test_a_search_gives_up_where_the_cpu_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a chance that is not the true one."""
    x = _vector("plain", 160).view(20, 8)
    square = x.double().square().sum(1)
    given = (CTX, x, square.sqrt() * math.sqrt(0.7), square, 0.3, 0.2, 8, 0, TABLE)
    expected = OPS.sphere_search(*given)
    assert 0 < int((expected < 0).sum()) < 20
    with emulated():
        for shared in (1, 100):
            monkeypatch.setattr(sphere, "SHARED", shared)
            assert torch.equal(sphere.sphere_search(*given), expected)


@pytest.mark.parametrize(("rows", "d", "width"), [(70, 4, 4), (3, 8, 8), (2, 1000, 1000), (1, 5, 24), (11, 17, 17)])
def test_points_are_those_of_the_reference(rows: int, d: int, width: int) -> None:
    generator = torch.Generator().manual_seed(rows)
    index = torch.randint(-1, 1 << 40, (rows,), generator=generator)
    index[rows // 2] = -1 if rows > 1 else 5
    scale = 2.0 ** (60 * torch.randn(rows, dtype=torch.float64, generator=generator))
    scale[0] = 1e39
    with emulated():
        for start in (None, 0, 13):
            for weight in (None, -0.3):
                outs = [torch.ones(rows, d), torch.ones(rows, d)]
                for ops, out in zip((reference, sphere), outs):
                    ops.sphere_points(CTX, index, scale, width, start, TABLE, out, weight)
                assert same(*outs), (start, weight)


def test_damaged_messages_are_refused_as_on_the_cpu(device: Device) -> None:
    generator, refused = torch.Generator().manual_seed(3), 0
    for text, numel in CASES[:1] + CASES[5:6]:
        c: Any = parse(text)
        message = c.encode(_vector("plain", numel), Spec.flat(numel), None, CTX)[0].payload
        for trial in range(30):
            data = (
                message[: int(torch.randint(1, message.numel(), (), generator=generator))]
                if trial % 3 == 0
                else message.clone()
            )
            data[int(torch.randint(0, data.numel(), (), generator=generator))] ^= 1 << trial % 8
            results: list[Any] = []
            places: tuple[Callable[[Tensor], Tensor], ...] = (torch.clone, device.to)
            for place in places:
                try:
                    decoded = c.decode(Message(place(data), data.numel()), Spec.flat(numel), CTX, place(torch.ones(numel)))
                    results.append(device.back(decoded))
                except CorruptMessage:
                    results.append(None)
            assert (results[0] is None) == (results[1] is None), trial
            assert results[0] is None or same(*results), trial
            refused += results[0] is None
    assert refused > 20


def test_replays_find_what_launches_find() -> None:
    chance = theory.cap_probability(0.5, 4)
    with replaying():
        for turn in range(5):
            ctx = Context(seed=turn, step=turn, sender=turn % 2)
            x = _vector("plain", 400, turn).view(100, 4)
            square = x.double().square().sum(1)
            norms = [ops.sphere_norms(square, 4, ctx) for ops in (reference, sphere)]
            assert torch.equal(norms[0][0], norms[1][0])
            scale = norms[1][1] * math.sqrt(0.5)
            given = (ctx, x, scale, square, 0.5, chance, 4, 0, TABLE)
            found = sphere.sphere_search(*given)
            assert torch.equal(found, OPS.sphere_search(*given))
            outs = [torch.ones(100, 4), torch.ones(100, 4)]
            for ops, out in zip((reference, sphere), outs):
                ops.sphere_points(ctx, found, scale, 4, 0, TABLE, out, 0.5 + turn)
            assert same(*outs)

"""Chunks: CUDA kernels in the emulation choose what the CPU chooses, and write its messages, alone and whole ones of every form."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from tersegrad import Context, Message, Spec, kernels
from tersegrad.codecs import chunk_sets, tiles
from tersegrad.codecs.tiles import Region
from tersegrad.core.errors import CorruptMessage
from tersegrad.core.protocol import Piece
from tersegrad.kernels import cuda, native, reference
from tersegrad.kernels.cuda import chunks
from tersegrad.kernels.cuda import tiles as chosen
from tersegrad.recipes import parse
from tests.device import Device
from tests.kernels.agree import same
from tests.kernels.emulator import compiler, emulated, replaying
from tests.laws.test_waiting import counted

pytestmark = pytest.mark.skipif(compiler() is None, reason="needs a C++ compiler")

CTX = Context(seed=1234, step=5, buffer=2, sender=3)
OPS: Any = native if native.available() else reference
# A matrix, a vector that is sent whole, a convolution, a part of a matrix.
SPEC = Spec((Piece((64, 96), 0, 6144), Piece((7,), 0, 7), Piece((3, 20, 50), 0, 3000), Piece((100, 100), 50, 1234)))
FORMS = ("float32", "bf16", "sign", "bins")


def _vector(kind: str, numel: int) -> Tensor:
    x = torch.randn(numel, generator=torch.Generator().manual_seed(numel))
    if kind == "bad":
        x[numel // 2] = torch.inf
    return {
        "ties": x.round(),
        "nothing": x * 0,
        "little": torch.where(torch.arange(numel) == 3, x, 0.0),
        "scales": x * 2.0 ** (x * 9),
        "huge": x.sign() * 3.4e38,
        "together": torch.where(torch.arange(numel) % 512 < 20, x + 9 * x.sign(), x * 1e-3),
        "denormal": x * 1e-40,
    }.get(kind, x)


class There:
    """The CUDA kernels for the simulated device."""

    __name__ = "there"
    OPERATIONS = (*chunks.__all__, *chosen.__all__)

    def __init__(self, device: Device) -> None:
        for name in self.OPERATIONS:
            setattr(self, name, self._operation(device, name))

    def _operation(self, device: Device, name: str) -> Callable[..., Any]:
        real = getattr(cuda, name)

        def there(*arguments: Any) -> Any:
            found = real(*(device.memory(a) if isinstance(a, Tensor) and not a.is_cpu else a for a in arguments))
            return None if found is None else device.to(found)

        return there


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    """A device on which the CUDA kernels run in the emulation."""
    with emulated(), Device() as made:
        monkeypatch.setitem(kernels._chosen, made.device.type, kernels.overlay(There(made)))
        yield made


@pytest.mark.parametrize(("height", "width", "across", "keep"), [
    (64, 64, 1, 64), (64, 64, 1, 200), (1, 1024, 2, 256), (2, 2, 5, 1), (33, 31, 2, 40), (5, 1, 3, 2), (1, 1, 7, 1), (256, 256, 1, 256),
    (1, 5000, 1, 3), (64, 29, 2, 64), (32, 32, 2, 33),
])  # fmt: skip
def test_the_largest_are_those_of_the_reference(height: int, width: int, across: int, keep: int) -> None:
    """Chunks of all sizes, for a warp and for blocks; with more ties than there is room for, and with fewer numbers than are kept."""
    rows = 2 if height * width < 10_000 else 1
    numel = 3 + rows * across * height * width
    table = torch.tensor((3, rows * height, across * width, height, width, keep))
    count = rows * across * keep
    generator = torch.Generator().manual_seed(numel)
    x = torch.randn(numel, generator=generator)
    few = torch.rand(numel, generator=generator) < 0.4 * keep / height / width
    cases = {"plain": x, "ties": x.round(), "sparse": torch.where(few, x, 0.0), "not a number": x.clone()}
    cases["not a number"][-1] = torch.nan
    if height * width < 10_000:
        cases |= {"equal": x.sign(), "nothing": x * 0, "denormal": x * 1e-42, "infinite": x / 0.0}
    for kind, y in cases.items():
        results = []
        for ops in (reference, chosen):
            places, values, total = torch.zeros(count, dtype=torch.int32), torch.zeros(count), torch.zeros(numel)
            out = x.clone()
            with emulated():
                finite = ops.chunk_choose(y, table, places, values)
                found = [finite]
                if finite:
                    found += [places.clone(), values.clone()]
                    ops.chunk_scatter(places, values, table, out, 0.7)
                    assert ops.chunk_carry(y, x, 0.95, total, table, places, values)
                    ops.chunk_scatter(places, values, table, y_out := torch.ones(numel))
                    found += [places, values, total[3:], out, y_out[3:]]
            results.append(found)
        assert all(map(same, *results)), kind
        assert len(results[0]) == (1 if kind in ("infinite", "not a number") else 8)


@pytest.mark.parametrize(
    ("form", "kind"),
    [
        *((form, kind) for form in FORMS for kind in ("plain", "ties", "bad")),
        *(
            (form, kind)
            for form in ("bf16", "bins")
            for kind in ("nothing", "little", "scales", "huge", "together", "denormal")
        ),
    ],
)
def test_messages_are_those_of_the_cpu(form: str, kind: str, device: Device) -> None:
    """Nobody waits for what is written, and once to learn that what is read is a message."""
    for settings in ("chunk=1024, k=20", "chunk=64, k=16, vector=3", "k=64, bins=16"):
        if kind not in ("plain", "ties") and "1024" not in settings:
            continue
        c, x = parse(f"chunk_top_k({settings}, values={form})"), _vector(kind, SPEC.numel)
        here, there = counted(c, x, SPEC, None), counted(c, x, SPEC, device)
        assert there.data == here.data, settings
        assert same(there.decoded, here.decoded)
        assert there.added is not None
        assert here.added is not None
        assert same(there.added, here.added)
        assert (there.encode, there.decode, there.decode_add) == (0, 1, 1)


@pytest.mark.parametrize("form", FORMS)
def test_error_feedback_takes_out_what_was_sent(form: str, device: Device) -> None:
    c = parse(f"error_feedback(chunk_top_k(chunk=256, k=20, values={form}), force=true, decay=0.95)")
    states = [c.init(SPEC, "cpu"), c.init(SPEC, device.device)]
    device.waits.clear()
    for kind in ("plain", "bad", "nothing", "scales"):
        x = _vector(kind, SPEC.numel)
        sent = []
        places: tuple[Callable[[Tensor], Tensor], ...] = (torch.clone, device.to)
        for at, place in enumerate(places):
            message, states[at] = c.encode(place(x), SPEC, states[at], CTX)
            assert device.count == 0
            sent.append(device.back(message.data)[: int(device.back(torch.as_tensor(message.nbytes)))])
        assert torch.equal(*sent), kind
        assert same(states[0].residual, device.back(states[1].residual)), kind


def _sets(regions: tuple[Region, ...], generator: torch.Generator) -> Tensor:
    """Random sets, and some whose members are neighbours."""
    rows = []
    for r in regions:
        for chunk in range(r.count):
            first = int(torch.randint(0, r.size - r.keep + 1, (), generator=generator))
            near = torch.arange(first, first + r.keep)
            rows.append(near if chunk % 5 == 1 else torch.randperm(r.size, generator=generator)[: r.keep].sort().values)
    return torch.cat(rows).int()


LAYOUTS = [
    (Region(0, 64, 128, 64, 64, keep=256), Region(8192, 1, 9, 1, 9, keep=9), Region(8201, 1, 65536, 1, 65536, keep=200)),
    (Region(0, 1, 40_000, 1, 20_000, keep=2), Region(40_000, 16, 512, 16, 16, keep=255), Region(48_192, 1, 63, 1, 63, keep=62)),
    (Region(0, 4, 2400, 2, 2, keep=1), Region(9600, 1, 9000, 1, 3, keep=2), Region(18_600, 2, 3, 2, 3, keep=6)),
    (Region(0, 1, 6, 1, 6, keep=6),),
    (Region(0, 1, 77, 1, 77, keep=3), Region(77, 1, 77, 1, 77, keep=77), Region(154, 77, 64, 7, 8, keep=30)),
]


@pytest.mark.parametrize("form", ["sign", "bins"])
@pytest.mark.parametrize("regions", LAYOUTS, ids=range(len(LAYOUTS)))
def test_sets_are_those_of_the_cpu(regions: tuple[Region, ...], form: Any) -> None:
    """Sets of all kinds: large chunks and small ones, few and many of them, several streams, chunks that are sent whole between others."""
    generator = torch.Generator().manual_seed(11)
    numel, table, places = sum(r.numel for r in regions), tiles.table(regions), _sets(regions, generator)
    counts, values = torch.tensor([places.numel()]), torch.randn(places.numel(), generator=generator)
    room = 1 + 5 * places.numel() + chunk_sets.max_nbytes(regions)
    expected, found = torch.zeros(room, dtype=torch.uint8), torch.zeros(room, dtype=torch.uint8)

    def write(ops: Any, out: Tensor) -> int:
        return int(ops.chunk_message_encode(places, values, torch.tensor(True), table, counts, form, 2, out))

    length = write(reference, expected)
    outs = [torch.full((numel,), 7.0) for _ in range(2)]
    with emulated():
        assert write(chunks, found) == length
        assert torch.equal(found, expected)
        for ops, out in zip((reference, chunks), outs):
            assert bool(ops.chunk_message_decode(found[:length], table, counts, form, 2, out))
    assert torch.equal(*outs)
    wanted = torch.empty(chunk_sets.max_nbytes(regions), dtype=torch.uint8)
    size = int(OPS.chunk_encode(places, table, numel, wanted))
    assert torch.equal(found[length - size : length], wanted[:size])


@pytest.mark.parametrize("form", FORMS)
def test_damaged_messages_are_refused_as_on_the_cpu(form: str, device: Device) -> None:
    generator, spec = torch.Generator().manual_seed(9), Spec.flat(3000)
    c: Any = parse(f"chunk_top_k(chunk=256, k=30, values={form})")
    message = c.encode(_vector("plain", 3000), spec, None, CTX)[0].payload
    refused = 0
    for trial in range(24):
        bad = message.clone()
        if trial % 4 == 0:
            bad = bad[: int(torch.randint(1, bad.numel(), (), generator=generator))]
        elif trial % 4 == 1:
            bad = torch.cat((bad, bad[: 1 + trial % 5]))
        else:
            # At its beginning, and anywhere.
            at = int(torch.randint(0, 12 if trial % 4 == 2 else bad.numel(), (), generator=generator))
            bad[at] ^= 1 << int(torch.randint(0, 8, (), generator=generator))
        # One byte behind an aligned address.
        data = torch.cat((bad[:1], bad))[1:]
        for weight in (None, 0.3):
            results: list[Any] = []
            for place in (torch.clone, device.to):
                sent, out = Message(place(data), data.numel()), place(torch.ones(3000))
                try:
                    decoded = c.decode(sent, spec, CTX, out) if weight is None else c.decode_add(sent, spec, CTX, out, weight)
                    results.append(device.back(decoded))
                except CorruptMessage:
                    # Nothing was added.
                    assert weight is None or same(device.back(out), torch.ones(3000))
                    results.append(None)
            assert (results[0] is None) == (results[1] is None), trial
            assert results[0] is None or same(*results), trial
            refused += results[0] is None
    assert refused > 20


@pytest.mark.parametrize("form", FORMS)
def test_the_reference_writes_what_the_codecs_write(form: str) -> None:
    c: Any = parse(f"chunk_top_k(chunk=256, k=20, values={form})")
    for kind in ("plain", "nothing", "bad", "huge"):
        x, regions = _vector(kind, SPEC.numel), c.regions(SPEC)
        table, counts = tiles.table(regions), torch.tensor(c._counts(SPEC))
        message = c.encode(x, SPEC, None, CTX)[0].payload
        places, values = c._room(SPEC, x.device)
        finite, out = OPS.chunk_choose(x, table, places, values), torch.zeros(c.max_nbytes(SPEC), dtype=torch.uint8)
        length = reference.chunk_message_encode(places, values, finite, table, counts, c.values, c.bins, out)
        assert torch.equal(out[: int(length)], message)
        for weight in (None, 0.5):
            outs = [torch.ones(SPEC.numel), torch.ones(SPEC.numel)]
            assert bool(reference.chunk_message_decode(message, table, counts, c.values, c.bins, outs[0], weight))
            sent = Message(message, message.numel())
            _ = c.decode(sent, SPEC, CTX, outs[1]) if weight is None else c.decode_add(sent, SPEC, CTX, outs[1], weight)
            assert same(*outs)


def test_replays_write_what_launches_write() -> None:
    c: Any = parse("chunk_top_k(chunk=256, k=20, values=bins)")
    table, counts = tiles.table(c.regions(SPEC)), torch.tensor(c._counts(SPEC))
    with replaying():
        for turn, kind in enumerate(("plain", "ties", "scales", "bad", "plain", "together")):
            x = _vector(kind, SPEC.numel) * (turn + 1)
            places, values = c._room(SPEC, x.device)
            total, carry = torch.empty_like(x), torch.full_like(x, -0.0)
            finite = chosen.chunk_carry(x, carry, 0.95, total, table, places, values)
            assert same(total, x)
            out, kept = torch.zeros(c.max_nbytes(SPEC), dtype=torch.uint8), torch.empty_like(values)
            length = int(chunks.chunk_message_encode(places, values, finite, table, counts, "bins", 4, out, kept))
            message = c.encode(x, SPEC, None, CTX)[0].payload
            assert torch.equal(out[:length], message), turn
            if finite:
                dense = torch.ones(SPEC.numel)
                chosen.chunk_scatter(places, kept, table, dense)
                assert same(dense, c.decode(Message(message, length), SPEC, CTX))
            outs = [torch.ones(SPEC.numel), c.decode(Message(message, length), SPEC, CTX)]
            assert bool(chunks.chunk_message_decode(message.clone(), table, counts, "bins", 4, outs[0], None))
            assert same(*outs)


@pytest.mark.parametrize(
    ("text", "waits"),
    [
        ("sparse_loco", (0, 1, 1)),
        ("demo", (2, 1, 1)),
        ("distro", (2, 1, 1)),
        ("metered(chunk_top_k(k=9))", (3, 1, 1)),
        ("by_tensor(default=chunk_top_k(k=9))", (1, 2, 2)),
        ("error_feedback(chunk_top_k(k=9), residual=bfloat16)", (2, 1, 1)),
    ],
)
def test_what_is_made_of_them_waits_seldom(text: str, waits: tuple[int, int, int], device: Device) -> None:
    """A length that the device knows is waited for once, whoever asks."""
    c, x = parse(text), _vector("plain", SPEC.numel)
    here, there = counted(c, x, SPEC, None), counted(c, x, SPEC, device)
    assert there.data == here.data
    assert same(there.decoded, here.decoded)
    assert (there.encode, there.decode, there.decode_add) == waits

"""Values of sparse messages as the bytes behind an index set: CUDA kernels in the emulation, alone and in whole messages."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from tersegrad import Context, Message, Spec, Stats, kernels
from tersegrad.codecs import sparse, varint
from tersegrad.core.errors import CorruptMessage
from tersegrad.core.protocol import Accumulator, Piece, needs_second_moment
from tersegrad.kernels import cuda, reference
from tersegrad.kernels.cuda import index, replay, values
from tersegrad.recipes import parse
from tests.device import Device
from tests.kernels.agree import same
from tests.kernels.emulator import compiler, emulated, replaying
from tests.laws.test_waiting import counted

pytestmark = pytest.mark.skipif(compiler() is None, reason="needs a C++ compiler")

CTX = Context(seed=1234, step=5, buffer=2, sender=3)


def _layout(numel: int, kind: str) -> Tensor:
    """Tensors of a vector: one, a few, or many small ones behind a large one."""
    sizes = {"one": [numel], "few": [numel // 3, 1, numel - numel // 3 - 1], "many": [numel - 300, *[3] * 100]}[kind]
    return torch.tensor([[n, max(n, 1), 1, 0] for n in sizes if n], dtype=torch.int64).reshape(-1)


def _drawn(kind: str, room: int, generator: torch.Generator) -> Tensor:
    x = torch.randn(room, generator=generator)
    return {
        "normal": x,
        "wide": (x * 12).exp2() * x.sign(),
        "denormal": x * 1e-39,
        "some denormal": torch.where(x > 0, x * 1e-38, x * 1e-37),
        "ones": x.sign() + (x == 0),
        "uniform": torch.exp2(-torch.randint(0, 8, (room,), generator=generator).float()) * x.sign(),
        "bad": torch.where(torch.arange(room) == room // 2, torch.nan, x),
        "huge": x.sign() * 3e38,
    }[kind]


KINDS = ("normal", "wide", "denormal", "some denormal", "ones", "uniform", "bad", "huge")


def _indices(room: int, numel: int, generator: torch.Generator) -> Tensor:
    return torch.randperm(numel, generator=generator)[:room].sort().values


@pytest.mark.parametrize("kind", KINDS)
def test_powers_are_those_of_the_reference(kind: str) -> None:
    generator = torch.Generator().manual_seed(7)
    with emulated():
        for room, numel, pieces in (
            (1, 1, "one"), (2, 9, "few"), (9, 400, "many"), (300, 400, "many"), (2048, 9000, "few"), (5001, 70_000, "many"),
        ):  # fmt: skip
            layout, drawn = _layout(numel, pieces), _drawn(kind, room, generator)
            indices = _indices(room, numel, generator).to(torch.int64 if room == 2048 else torch.int32)
            for count in {0, 1, room - 1, room, room + 5}:
                given = (indices, drawn, torch.tensor(count), layout)
                expected, found = reference.exp4_encode(*given), values.exp4_encode(*given)
                sent, nbytes, mode, _ = expected[3].tolist()
                assert int(found[3][2]) == mode
                if mode == 2:
                    assert kind == "bad"
                    continue
                assert found[3].tolist()[:2] == [sent, nbytes], (room, count)
                assert torch.equal(found[0][:sent], expected[0])
                assert same(found[1][: min(count, room)], expected[1])
                assert torch.equal(found[2][:nbytes], expected[2])


def test_signs_are_those_of_the_reference() -> None:
    generator = torch.Generator().manual_seed(7)
    with emulated():
        for room in (1, 2, 8, 9, 4099):
            for kind in ("normal", "bad"):
                drawn = _drawn(kind, room, generator)
                for count in (0, 1, room - 1, room, room + 5):
                    expected, told = reference.signs_encode(drawn, torch.tensor(count))
                    found, known = values.signs_encode(drawn, torch.tensor(count))
                    assert torch.equal(known[:3], told[:3]), (room, count)
                    assert torch.equal(found[: int(told[1])], expected)


@pytest.mark.parametrize("kind", ["normal", "wide", "denormal", "huge", "bad"])
def test_means_are_those_of_the_reference(kind: str) -> None:
    generator = torch.Generator().manual_seed(7)
    with emulated():
        for room, numel, pieces in (
            (1, 1, "one"),
            (2, 9, "few"),
            (300, 400, "many"),
            (14_000, 30_000, "few"),
            (9001, 9001, "one"),
        ):
            layout, drawn = _layout(numel, pieces), _drawn(kind, room, generator)
            indices = _indices(room, numel, generator).to(torch.int64 if room == 300 else torch.int32)
            for count in {0, 1, room - 1, room, room + 5}:
                given = (indices, drawn, torch.tensor(count), layout)
                expected, found = reference.mean_signs_encode(*given), values.mean_signs_encode(*given)
                assert torch.equal(found[1], expected[1]), (room, count)
                if int(found[1][2]) == 0:
                    assert torch.equal(found[0][: int(found[1][1])], expected[0])
                    assert same(found[2][: min(count, room)], expected[2])


def _damaged(message: Tensor, generator: torch.Generator, trials: int) -> Iterator[Tensor]:
    """A message, and damaged ones: cut short, with more behind them, or with a bit that is another."""
    yield message
    for trial in range(trials):
        bad = message.clone()
        if trial % 8 == 0:
            bad = bad[: int(torch.randint(1, bad.numel(), (), generator=generator))]
        elif trial % 8 == 1:
            bad = torch.cat((bad, bad[: 1 + trial % 3]))
        else:
            # At its beginning, anywhere, at its end.
            low, high = ((0, 12), (0, bad.numel()), (bad.numel() - 3, bad.numel()))[trial % 3]
            bad[int(torch.randint(low, high, (), generator=generator))] ^= 1 << int(
                torch.randint(0, 8, (), generator=generator)
            )
        # One byte behind an aligned address.
        yield torch.cat((bad[:1], bad))[1:]


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    """A device on which the CUDA kernels run in the emulation, for short messages too."""
    monkeypatch.setattr(sparse, "MANY", 1100)
    monkeypatch.setattr(sparse, "_GAPS", {})
    with emulated(), Device() as made:
        monkeypatch.setitem(kernels._chosen, made.device.type, kernels.overlay(There(made)))
        yield made


class There:
    """The CUDA kernels for the simulated device."""

    __name__ = "there"
    TELLING = ("golomb_encode", "golomb_decode", "rans_encode", "rans_decode")
    OPERATIONS = (*index.__all__, *values.__all__, "rans_encode", "rans_decode", "all_finite", "sparse_scatter", "sparse_scatter_add",
                  "select_compact", "variance_select", "hybrid_select")  # fmt: skip

    def __init__(self, device: Device) -> None:
        for name in self.OPERATIONS:
            setattr(self, name, self._operation(device, name))

    def _operation(self, device: Device, name: str) -> Callable[..., Any]:
        real = getattr(cuda, name)

        def there(*arguments: Any) -> Any:
            found = real(*(device.memory(a) if isinstance(a, Tensor) and not a.is_cpu else a for a in arguments))
            if name in self.TELLING or found is None:
                return found
            return tuple(device.to(t) for t in found) if isinstance(found, tuple) else device.to(found)

        return there


def _spec(numel: int, kind: str) -> Spec:
    return Spec(tuple(Piece((n,), 0, n) for n in _layout(numel, kind).view(-1, 4)[:, 0].tolist()))


CODED = (
    "vgc(alpha=8)",
    "vgc(alpha=8, residual=keep)",
    "vgc(alpha=8, values=sign, residual=keep)",
    "vgc(alpha=8, values=bf16)",
    "vgc(alpha=8, values=bf16, residual=keep)",
    "hybrid(alpha=8, tau=0.5)",
    "threshold(tau=2.45, values=sign)",
)
NUMEL = 120_000


def _vector(kind: str, numel: int = NUMEL) -> Tensor:
    """A vector of which about a fortieth is sent."""
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(numel, generator=generator)
    if kind == "clustered":
        x *= torch.linspace(0, 1.2, numel) ** 4
    elif kind == "wide":
        x = torch.where(x.abs() > 2.4, (x * 5).exp2() * x.sign(), x)
    elif kind == "nothing":
        x *= 0
    elif kind == "little":
        x[500:] = 0
    elif kind == "much":
        x *= 8
    elif kind == "bad":
        x[77] = torch.inf
    return x


@pytest.mark.parametrize(
    ("kind", "pieces"),
    [
        *((kind, "many") for kind in ("plain", "clustered", "wide", "nothing", "little", "much", "bad")),
        ("plain", "one"),
        ("wide", "few"),
    ],
)
@pytest.mark.parametrize("text", CODED)
def test_messages_are_those_of_the_cpu(
    text: str, kind: str, pieces: str, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what they decode to, and what is left; in one read of a message, where its set has the usual form."""
    c, spec, x = parse(text), _spec(NUMEL, pieces), _vector(kind)
    # What is sent follows from the gradient alone.
    monkeypatch.setattr(
        "tests.laws.test_waiting.given",
        lambda c, x: {"stats": Stats(torch.full_like(x, 0.75))} if needs_second_moment(c) else {},
    )
    here = counted(c, x, spec, None)
    if kind in ("plain", "clustered"):
        # Nothing is written on the CPU.
        monkeypatch.setattr(sparse, "write", None)
    there = counted(c, x, spec, device)
    assert there.data == here.data
    assert same(there.decoded, here.decoded)
    assert there.added is not None
    assert here.added is not None
    assert same(there.added, here.added)
    if here.state is not None:
        assert same(device.back(there.state.r), here.state.r)
        assert same(device.back(there.state.v), here.state.v)
    if kind == "plain":
        assert (there.encode, there.decode, there.decode_add) == (1, 2, 2)
    if kind == "clustered":
        # Entropy-coded gaps take one more at first, which the next message is spared.
        assert here.data[3] == 253
        assert (there.encode, there.decode, there.decode_add) == (2, 2, 2)
        again = counted(c, x, spec, device)
        assert (again.encode, again.data) == (1, here.data)


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        *(("vgc(alpha=8)", kind) for kind in ("plain", "clustered", "packed")),
        ("vgc(alpha=8, values=sign)", "plain"),
        ("hybrid(alpha=8, tau=0.5)", "packed"),
    ],
)
def test_damaged_messages_are_refused_as_on_the_cpu(text: str, kind: str, device: Device) -> None:
    generator = torch.Generator().manual_seed(9)
    c, spec, x = parse(text), _spec(NUMEL, "many"), _vector(kind)
    assert isinstance(c, Accumulator)
    if kind == "packed":
        # Codes that no entropy coder makes shorter.
        octaves = -torch.randint(0, 8, (NUMEL,), generator=generator).float()
        x = torch.where(torch.rand(NUMEL, generator=generator) < 0.015, 512 * octaves.exp2() * x.sign(), 0)
    message = c.encode(x, spec, c.init(spec, "cpu"), CTX, stats=Stats(torch.full_like(x, 0.75)))[0].payload
    assert int(message[0]) == (4 if kind == "packed" and text == "vgc(alpha=8)" else 0)
    refused = 0
    for trial, data in enumerate(_damaged(message, generator, 24)):
        for weight in (None, 0.3):
            results: list[Any] = []
            for at in (torch.clone, device.to):
                sent, out = Message(at(data), data.numel()), at(torch.ones(NUMEL))
                try:
                    decoded = c.decode(sent, spec, CTX, out) if weight is None else c.decode_add(sent, spec, CTX, out, weight)
                    results.append(device.back(decoded))
                except CorruptMessage:
                    # Nothing was added.
                    assert weight is None or same(device.back(out), torch.ones(NUMEL))
                    results.append(None)
            assert (results[0] is None) == (results[1] is None), trial
            assert results[0] is None or same(*results), trial
            refused += results[0] is None
    assert refused > 20


def test_replays_write_what_launches_write() -> None:
    generator = torch.Generator().manual_seed(7)
    layout, numel, room = _layout(9000, "many"), 9000, 3000
    with replaying():
        for turn in range(5):
            indices, drawn = _indices(room, numel, generator).int(), _drawn(KINDS[turn % 3], room, generator)
            count = torch.tensor(room - 7 * turn)
            expected, found = (
                reference.exp4_encode(indices, drawn, count, layout),
                values.exp4_encode(indices, drawn, count, layout),
            )
            sent, nbytes, mode, _ = expected[3].tolist()
            assert found[3].tolist()[:3] == [sent, nbytes, mode]
            assert torch.equal(found[2][:nbytes], expected[2])
            outs = [torch.zeros(6000, dtype=torch.uint8) for _ in range(2)]
            facts = [
                ops.sparse_encode(given[0], given[2], given[3], numel, False, out)
                for ops, given, out in ((reference, expected, outs[0]), (index, found, outs[1]))
            ]
            assert torch.equal(facts[0], facts[1]) or sent == 0
            assert torch.equal(outs[0], outs[1])
            signs = values.signs_encode(drawn, count)
            assert torch.equal(signs[0][: -(-int(count) // 8)], reference.signs_encode(drawn, count)[0])


@pytest.mark.parametrize("kind", ["exact", "powers", "signs", "means"])
def test_one_replay_serves_messages_with_any_number_of_coordinates(kind: str) -> None:
    generator = torch.Generator().manual_seed(7)
    layout, numel, room = _layout(9000, "many"), 9000, 2040
    with replaying():
        for turn in range(5):
            indices, drawn = _indices(room, numel, generator).int(), _drawn("normal", room, generator)
            given, count = (indices, drawn), torch.tensor(room - 13 * turn)
            if kind == "powers":
                indices, _, data, count = reference.exp4_encode(indices, drawn, count, layout)
                given = (indices, data)
            elif kind != "exact":
                found = reference.signs_encode(drawn, count)
                found = found if kind == "signs" else reference.mean_signs_encode(indices, drawn, count, layout)[:2]
                given, count = (indices, found[0]), found[1]
            room_there = torch.zeros(20_000, dtype=torch.uint8)
            facts = reference.sparse_encode(*given, count, numel, False, room_there).tolist()
            message, number = room_there[: facts[1]].clone(), facts[3]
            assert not facts[0]
            front, outs = bytes(message[: 2 + len(varint.write(number))].tolist()), []
            for ops in (reference, cuda):
                out = torch.full((numel,), 7.0)
                if kind == "exact":
                    divisor = reference.random_divisor(number, numel)
                    fine = ops.sparse_decode(message, front, number, numel, divisor, False, out, None)
                elif kind == "powers":
                    packed = message[0] == 4
                    fine = ops.exp4_decode(message, front, number, numel, 0, layout, bool(packed), out, None)
                elif kind == "signs":
                    fine = ops.signs_decode(message, front, number, numel, 0, 0.5, out, None)
                else:
                    fine = ops.mean_signs_decode(message, front, number, numel, 0, layout, out, None)
                assert bool(fine), turn
                outs.append(out)
            assert same(*outs), turn
        decoders: list[Any] = [index._sparse_decode, values._exp4_decode, values._signs_decode]
        bodies = {decoder.__wrapped__ for decoder in decoders}
        assert [len(found or ()) for key, found in replay._known.items() if key[2] in bodies] == [1]

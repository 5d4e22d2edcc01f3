"""Launches that are replayed: the bytes of launches that are not, whatever changes between calls."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import tersegrad
from tersegrad import Context, Message, Spec, kernels
from tersegrad.core.errors import CorruptMessage
from tersegrad.kernels import cuda, reference
from tersegrad.kernels.cuda import graphs, loader, replay, scratch
from tersegrad.kernels.cuda.loader import Varying, launch
from tests.kernels import emulator
from tests.kernels.emulator import compiler, replaying

pytestmark = pytest.mark.skipif(compiler() is None, reason="needs a C++ compiler")


class Ran:
    """How often graphs ran and were changed, and how many launches came one by one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.graphs = self.updates = self.launches = 0
        # The emulation runs one kernel at a time.
        turn = threading.RLock()
        run, update, plain = emulator.Emulated.run, emulator.Emulated.update, loader.launcher

        def counted_run(graph: emulator.Emulated, stream: int) -> None:
            with turn:
                self.graphs += 1
                run(graph, stream)

        def counted_update(graph: emulator.Emulated, number: int) -> None:
            self.updates += 1
            update(graph, number)

        def counted(*arguments: Any) -> None:
            with turn:
                self.launches += 1
                plain(*arguments)

        monkeypatch.setattr(emulator.Emulated, "run", counted_run)
        monkeypatch.setattr(emulator.Emulated, "update", counted_update)
        monkeypatch.setattr(loader, "launcher", counted)

    def since(self) -> tuple[int, int, int]:
        found = self.graphs, self.updates, self.launches
        self.graphs = self.updates = self.launches = 0
        return found


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> Iterator[Ran]:
    with replaying():
        yield Ran(monkeypatch)


def vector(numel: int, seed: int, spread: float = 0.0) -> Tensor:
    x = torch.randn(numel, generator=torch.Generator().manual_seed(seed))
    return x * torch.linspace(-spread, spread, numel).exp() if spread else x


@replay.operation
def scanned(x: Tensor, more: int = 0) -> Tensor:
    """Sums before each number, by a kernel that reads and writes in place, from a copy between kernels."""
    n = x.numel()
    out = torch.empty(n + 1, dtype=torch.int64, device=x.device)
    launch("memory.cu", "zero", 1, 256, out, 8 * n + 8)
    launch("vectors.cu", "revert", 1, 256, out, 8 * n, torch.zeros(1, dtype=torch.uint8), x)
    loader.scan("index.cu", out, 1, n + 1)
    return out


def test_the_third_call_is_one_graph_with_what_the_memory_holds_by_then(ran: Ran) -> None:
    x = torch.arange(5)
    for call in range(5):
        x += call
        found = scanned(x).tolist()
        assert found == [0, *x.cumsum(0).tolist()]
        assert ran.since() == ((0, 0, 3) if call < 2 else (1, 0, 0))
        del found


def test_other_addresses_are_put_into_the_graph(ran: Ran) -> None:
    kept = [torch.arange(5) + k for k in range(6)]
    for call, x in enumerate(kept):
        assert scanned(x).tolist() == [0, *x.cumsum(0).tolist()]
        # One of its kernels reads x.
        assert ran.since() == ((0, 0, 3) if call < 2 else (1, 1, 0))


def test_other_shapes_and_scalars_are_other_keys(ran: Ran) -> None:
    for x, more in ((torch.arange(5), 0), (torch.arange(6), 0), (torch.arange(5), 1), (torch.arange(5), 2)):
        scanned(x, more)
        assert ran.since() == (0, 0, 3)


def test_what_somebody_holds_is_not_written_to(ran: Ran) -> None:
    x = torch.arange(5)
    holds: tuple[Callable[[Tensor], Tensor], ...] = (lambda t: t, lambda t: t[2:], lambda t: t.view(2, 3))
    for hold in holds:
        replay.clear()
        x.fill_(1)
        for _ in range(2):
            scanned(x)
        held = hold(scanned(x))
        before = held.clone()
        assert ran.since()[0] == 1
        x += 3
        # A second copy is made, then used.
        for expected in ((0, 0, 3), (1, 0, 0)):
            assert scanned(x).tolist()[-1] == 20
            assert ran.since() == expected
            assert torch.equal(held, before)
        del held
        scanned(x)
        assert ran.since() == (1, 0, 0)


def test_there_are_not_more_copies_than_allowed(ran: Ran, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "COPIES", 2)
    x = torch.arange(5)
    held = [scanned(x) for _ in range(6)]
    # The first as usual, two copies, and nothing that could be replayed.
    assert ran.since() == (0, 0, 18)
    assert len({t.data_ptr() for t in held}) == 6
    del held
    for _ in range(3):
        scanned(x)
    assert ran.since() == (3, 0, 0)


@replay.operation
def filled(out: Tensor, value: Varying) -> None:
    launch("memory.cu", "set_number", 1, 32, out, value)


@replay.operation
def branched(out: Tensor) -> None:
    """Two numbers are put side by side, then copied by one launch; and the first is put again beside another copy."""
    memory, (place,) = scratch.empty(out.device, 16)
    nothing = torch.zeros(1, dtype=torch.uint8)
    with loader.aside():
        launch("memory.cu", "zero", 1, 32, place, 8)
        launch("memory.cu", "set_number", 1, 32, place, 3)
        with loader.aside():
            pass
    launch("memory.cu", "set_number", 1, 32, place + 8, 4)
    loader.join()
    launch("vectors.cu", "revert", 1, 256, out, 16, nothing, memory)
    with loader.aside():
        launch("memory.cu", "set_number", 1, 32, place, 5)
    launch("memory.cu", "set_number", 1, 32, out[2:], 6)
    del memory


def test_launches_that_need_nothing_of_one_another_are_branches(ran: Ran, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[list[graphs.Launched]] = []

    def kept(device: int, launches: list[graphs.Launched]) -> replay.Graph:
        made.append(launches)
        return emulator.Emulated(device, launches)

    monkeypatch.setattr(replay, "maker", kept)
    for call in range(4):
        out = torch.zeros(3, dtype=torch.int64)
        branched(out)
        assert out.tolist() == [3, 4, 6]
        assert ran.since()[2] == (6 if call < 2 else 0)
    (launches,) = made
    assert [launched.after for launched in launches] == [(), (0,), (), (2, 1), (3,), (3,)]


def test_the_emulation_runs_branches_in_another_order(ran: Ran) -> None:
    """So that launches which do need one another are found out."""

    @replay.operation
    def wrong(out: Tensor) -> None:
        with loader.aside():
            launch("memory.cu", "set_number", 1, 32, out, 1)
        launch("memory.cu", "set_number", 1, 32, out, 2)

    found = []
    for _ in range(3):
        out = torch.zeros(1, dtype=torch.int64)
        wrong(out)
        found.append(int(out))
    assert found == [2, 2, 1]


def test_varying_numbers_are_no_part_of_the_key(ran: Ran) -> None:
    out = torch.zeros(1, dtype=torch.int64)
    for call, value in enumerate((3, 4, 5, 5, -6)):
        filled(out, Varying(value))
        assert int(out) == value
        assert ran.since() == [(0, 0, 1), (0, 0, 1), (1, 1, 0), (1, 0, 0), (1, 1, 0)][call]


def test_nothing_can_be_computed_from_a_varying_number() -> None:
    number: Any = Varying(3)
    for wrong in (lambda: number + 1, lambda: -number, lambda: number // 2, lambda: range(number), lambda: number < 4):
        with pytest.raises(TypeError):
            wrong()


def test_arguments_that_share_memory_are_not_replayed(ran: Ran) -> None:
    @replay.operation
    def both(x: Tensor, y: Tensor) -> None:
        launch("memory.cu", "set_number", 1, 32, y, 1)

    x = torch.zeros(4, dtype=torch.int64)
    for _ in range(4):
        both(x[:2], x[1:3])
        assert ran.since() == (0, 0, 1)
    # Nor are those that are not contiguous.
    for _ in range(4):
        scanned(torch.arange(10)[::2])
        assert ran.since()[0] == 0


def test_varying_numbers_of_unknown_origin_are_not_replayed(ran: Ran) -> None:
    @replay.operation
    def counts(x: Tensor) -> None:
        launch("memory.cu", "set_number", 1, 32, x, Varying(int(x) + 1))

    x = torch.zeros(1, dtype=torch.int64)
    for call in range(4):
        counts(x)
        assert int(x) == call + 1
        assert ran.since() == (0, 0, 1)


def test_a_graph_that_cannot_be_made_is_not_tried_again(ran: Ran, monkeypatch: pytest.MonkeyPatch) -> None:
    tries = []

    def refused(device: int, launches: list[graphs.Launched]) -> replay.Graph:
        tries.append(len(launches))
        raise loader.DriverError("no graphs here")

    monkeypatch.setattr(replay, "maker", refused)
    x = torch.arange(5)
    for call in range(5):
        x += call
        assert scanned(x).tolist() == [0, *x.cumsum(0).tolist()]
        assert ran.since() == (0, 0, 3)
    assert tries == [3]


def test_an_exception_leaves_no_recording_behind(ran: Ran) -> None:
    calls = []

    @replay.operation
    def fails(x: Tensor) -> Tensor:
        calls.append(1)
        launch("memory.cu", "set_number", 1, 32, x, len(calls))
        if len(calls) == 2:
            raise ValueError("the second")
        return x.clone()

    x = torch.zeros(1, dtype=torch.int64)
    fails(x)
    with pytest.raises(ValueError, match="the second"):
        fails(x)
    assert loader.thread.recorder is None
    # That key is left alone from then on; others are not.
    for expected in (3, 4):
        assert fails(x).tolist() == [expected]
    ran.since()
    for _ in range(3):
        filled(x, Varying(7))
    assert ran.since() == (1, 0, 2)


def test_the_least_used_sequences_are_given_up(ran: Ran, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "KEPT", 2)
    vectors = [torch.arange(n) for n in (3, 4, 5)]
    for x in vectors:
        for _ in range(3):
            assert scanned(x).tolist() == [0, *x.cumsum(0).tolist()]
    ran.since()
    scanned(vectors[1])
    scanned(vectors[2])
    assert ran.since() == (2, 0, 0)
    scanned(vectors[0])
    assert ran.since() == (0, 0, 3)
    monkeypatch.setattr(replay, "SEEN", 3)
    for n in range(10, 20):
        scanned(torch.arange(n))
    assert len(replay._known) == 3


def test_operations_of_a_stream_share_memory_between_kernels(ran: Ran) -> None:
    @replay.operation
    def uses(x: Tensor, words: int) -> None:
        memory, (first, second) = scratch.empty(x.device, 8 * words, 8 * words)
        launch("memory.cu", "zero", 1, 32, first, 8 * words)
        launch("memory.cu", "set_number", 1, 32, second, 4)
        assert second - first >= 8 * words or second < first
        del memory

    x = torch.zeros(1)
    assert replay.nbytes() == 0
    for words in (1000, 5, 1 << 18, 2000):
        for _ in range(3):
            uses(x, words)
    assert replay.nbytes() == 8 * ((1 << 17) + 2 * (1 << 18))
    replay.clear()
    assert replay.nbytes() == 0


def test_operations_that_need_much_memory_are_not_replayed(ran: Ran, monkeypatch: pytest.MonkeyPatch) -> None:
    @replay.operation
    def uses(x: Tensor, words: int) -> None:
        for _ in range(3):
            memory, (place,) = scratch.empty(x.device, 8 * words)
            launch("memory.cu", "set_number", 1, 32, place, 1)
        del memory

    monkeypatch.setattr(replay, "MOST", 1000)
    for words, replays in ((300, True), (400, False)):
        for _ in range(4):
            uses(torch.zeros(1), words)
        assert ran.since() == ((2, 0, 6) if replays else (0, 0, 12))
    assert replay.nbytes() == 8 * replay.LEAST


def test_threads_take_turns(ran: Ran) -> None:
    """Every one gets its own result, though they share what is replayed."""
    wrong = []

    def work(seed: int) -> None:
        for k in range(30):
            x = torch.arange(7) * (seed + k)
            if scanned(x).tolist() != [0, *x.cumsum(0).tolist()]:
                wrong.append(seed)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@replay.operation
def carried(value: Varying, out: Tensor) -> None:
    """A number that waits in the memory between kernels."""
    memory, (place,) = scratch.empty(out.device, 8)
    launch("memory.cu", "set_number", 1, 32, place, value)
    launch("vectors.cu", "revert", 1, 256, out, 8, torch.zeros(1, dtype=torch.uint8), memory)


def test_memory_between_kernels_is_not_lent_twice_at_a_time(ran: Ran, monkeypatch: pytest.MonkeyPatch) -> None:
    """While one thread's launches come one by one, another's graph does not run in between."""
    mine, others = torch.zeros(1, dtype=torch.int64), torch.zeros(2, dtype=torch.int64)
    for _ in range(3):
        carried(Varying(5), others)
    carried(Varying(7), mine)
    other = threading.Thread(target=carried, args=(Varying(9), others))
    plain = loader.launcher

    def interrupted(name: str, kernel: str, *rest: Any) -> None:
        plain(name, kernel, *rest)
        if kernel == "set_number" and not other.ident:
            other.start()
            # Longer than it takes, unless it waits for this thread.
            other.join(0.5)

    monkeypatch.setattr(loader, "launcher", interrupted)
    carried(Varying(7), mine)
    other.join()
    assert (int(mine), int(others[0])) == (7, 9)


def test_what_could_not_be_changed_is_not_run(ran: Ran, monkeypatch: pytest.MonkeyPatch) -> None:
    out = torch.zeros(1, dtype=torch.int64)
    for value in (3, 4, 5):
        filled(out, Varying(value))

    def refused(graph: emulator.Emulated, number: int) -> None:
        raise loader.DriverError("not now")

    with monkeypatch.context() as broken:
        broken.setattr(emulator.Emulated, "update", refused)
        with pytest.raises(loader.DriverError, match="not now"):
            filled(out, Varying(6))
    for _ in range(3):
        filled(out, Varying(6))
        assert int(out) == 6


# Operations


def repeated(compressor: str, vectors: list[Tensor], *, carry: bool = False) -> Iterator[tuple[Any, ...]]:
    """Messages of vectors at one place, all coded with what is replayed: the vector, its context, message, bytes, and the state."""
    c = tersegrad.parse(compressor)
    spec = Spec.flat(vectors[0].numel())
    place, room = torch.empty(spec.numel), torch.empty(c.max_nbytes(spec), dtype=torch.uint8)
    state = c.init(spec, place.device)
    for step, x in enumerate(vectors):
        ctx = Context(seed=5 + step % 2, step=step, buffer=1, sender=step % 3)
        place.copy_(x)
        message, state = c.encode(place, spec, state, ctx, out=room)
        yield c, spec, ctx, Message(message.payload.clone(), int(message.nbytes)), state


COMPRESSORS = (
    "sparse_dithering(nu=0.1)",
    "sparse_dithering(alpha=0.1)",
    "sparse_dithering(nu=0.1, scale=global)",
    "random_sparse_dithering(omega=1)",
    "error_feedback(sparse_dithering(nu=0.1))",
    "error_feedback(sparse_dithering(alpha=0.1))",
    "trellis(nu=0.1)",
    "trellis(alpha=0.1, states=4)",
    "error_feedback(trellis(nu=0.1))",
    "dithered_trellis(omega=0.1)",
    "qsgd(bits=4, coder=rans)",
    "natural(coder=rans)",
)


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Lets the CUDA operations serve CPU tensors from when it is called on."""
    made = kernels.overlay(cuda)

    def switch() -> None:
        monkeypatch.setitem(kernels._chosen, "cpu", made)

    return switch


@pytest.mark.parametrize("text", COMPRESSORS)
def test_messages_of_many_steps_are_those_without_replays(text: str, ran: Ran, as_on_a_gpu: Callable[[], None]) -> None:
    numel = 20_000
    vectors = [vector(numel, seed) * 10.0**seed for seed in range(5)]
    expected = [(m.tobytes(), s) for *_, m, s in repeated(text, vectors)]
    decoded = [c.decode(m, spec, ctx) for c, spec, ctx, m, _ in repeated(text, vectors)]
    as_on_a_gpu()
    out = torch.empty(numel)
    for step, (c, spec, ctx, message, state) in enumerate(repeated(text, vectors)):
        assert message.tobytes() == expected[step][0]
        if state is not None:
            assert torch.equal(state.residual, expected[step][1].residual)
        assert torch.equal(c.decode(message, spec, ctx, out), decoded[step])
        for weight in (1.0, 0.25 * step):
            added = c.decode_add(message, spec, ctx, torch.ones(numel), weight)
            assert torch.equal(added, torch.ones(numel) + decoded[step] * weight)
    assert ran.since()[0] >= 6
    assert None not in replay._known.values()


def test_selections_and_sparse_messages_are_those_without_replays(ran: Ran) -> None:
    """Sets of changing forms and lengths at one place, written and read."""
    numel, k = 30_000, 700
    x, room, out = torch.empty(numel), torch.empty(8 * k, dtype=torch.uint8), torch.empty(numel)
    for step in range(6):
        x.copy_(vector(numel, step, spread=step / 2))
        for found, expected in (
            (cuda.select_top_k(x, k), reference.select_top_k(x, k)),
            (cuda.select_compact(x, 0x40000000, 9000), reference.select_compact(x, 0x40000000, 9000)),
            (cuda.select_compact(x, cuda.select_sample_key(x, k), 3 * k), None),
        ):
            key = reference.select_sample_key(x, k)
            number = int(found[2])
            for a, b in zip(found, expected or reference.select_compact(x, key, 3 * k)):
                assert torch.equal(a[:number], b[:number]) if a.dim() else int(a) == int(b)
            del found, a
        indices, values, count = cuda.select_top_k(x, k)
        for bits in (0, 20_000):
            facts = cuda.sparse_encode(indices, values, count, numel, False, room, bits).tolist()
            there = torch.empty_like(room)
            assert facts == reference.sparse_encode(indices, values, count, numel, False, there, bits).tolist()
            message = room[: facts[1]].clone()
            assert torch.equal(message, there[: facts[1]])
            front = bytes(message[: 5 if bits else 4].tolist())
            name = "sparse_decode_gaps" if bits else "sparse_decode"
            given = (front, k, numel, front[-1] if bits else reference.random_divisor(k, numel), False)
            for weight in (None, 1.0 + step):
                for damage in range(2):
                    message[10] ^= damage
                    places = out.fill_(1.0), torch.ones(numel)
                    verdicts = [
                        bool(getattr(ops, name)(message, *given, p, weight)) for ops, p in zip((cuda, reference), places)
                    ]
                    assert verdicts[0] == verdicts[1]
                    assert torch.equal(*places) if verdicts[0] else weight is None or torch.equal(places[0], torch.ones(numel))
                message[10] ^= 1
        del indices, values, count
    assert ran.since()[0] > 60


def test_corrupt_messages_are_refused_by_replays(ran: Ran) -> None:
    numel = 20_000
    message = torch.empty(reference.dither_max_bytes(numel), dtype=torch.uint8)
    message = message[: int(reference.dither_encode(vector(numel, 1), 0.1, 0.0, 0, 0, None, message)[0])]
    expected, out = torch.empty(numel), torch.empty(numel)
    reference.dither_decode(message, expected, None)
    for _ in range(3):
        assert torch.equal(cuda.dither_decode(message, out, None), expected)
        for bad in (message[:-1], torch.cat((message, message[:1]))):
            with pytest.raises(CorruptMessage):
                cuda.dither_decode(bad, out, None)
    assert ran.since()[0] >= 7

"""Vectors whose pieces lie in several places: the same messages, states and means as of one flat vector."""

import gc
import weakref
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

import tersegrad
from tersegrad.core.protocol import Context, Piece, Spec
from tersegrad.engine import Engine, Settings, Staging, make_groups, threads
from tersegrad.engine.engine import Route
from tersegrad.exchange import TwoShotExchange, virtual
from tersegrad.exchange.stretches import Stretches

SIZES = (700, 1, 64, 1500, 35)


def _pieces(rank: int) -> list[Tensor]:
    """Pieces in memory in another order than in the vector, some of them neighbours."""
    memory = torch.randn(sum(SIZES) + 5, generator=torch.Generator().manual_seed(rank))
    return [memory[:700], memory[700:701], memory[701:765], memory[805:2305], memory[768:803]]


def _run(xs: Sequence[Tensor | Stretches], text: str, spec: Spec) -> list[tuple[object, object]]:
    exchange = TwoShotExchange(tersegrad.parse(text))
    states = virtual.init(exchange, spec, len(xs))
    steps = [
        exchange.steps(x, state, spec, Context(seed=3), rank, len(xs))
        for rank, (x, state) in enumerate(zip(xs, states, strict=True))
    ]
    values: list[Tensor | None] = [None] * len(xs)
    while True:
        requests, results = [], []
        for generator, value in zip(steps, values, strict=True):
            try:
                requests.append(next(generator) if value is None else generator.send(value))
            except StopIteration as stop:
                results.append(stop.value)
        if results:
            return results
        values = list(virtual.deliver(requests, [0] * len(xs), [0] * len(xs)))


@pytest.mark.parametrize("text", ["error_feedback(sparse_dithering(alpha=0.1))", "qsgd(bits=4)", "top_k(fraction=0.1)"])
@pytest.mark.parametrize("ranks", [1, 2, 3, 40])
def test_the_mean_lies_in_the_pieces(text: str, ranks: int) -> None:
    spec = Spec(tuple(Piece((n,), 0, n, f"p{k}") for k, n in enumerate(SIZES)))
    pieces = [_pieces(rank) for rank in range(ranks)]
    wanted = _run([torch.cat(own) for own in pieces], text, spec)
    seen: list[int] = []
    given = [Stretches(own, lambda values: seen.append(values.numel())) for own in pieces]
    found = _run(given, text, spec)
    for rank, own in enumerate(pieces):
        mean = wanted[rank][0]
        assert isinstance(mean, Tensor)
        assert torch.equal(torch.cat(own), mean)
        assert found[rank][0] is given[rank]
    assert sum(seen) == ranks * sum(SIZES)


def test_neighbours_are_not_copied() -> None:
    pieces = _pieces(0)
    vector = Stretches(pieces, lambda _: None)
    assert vector.read(10, 765).data_ptr() == pieces[0].data_ptr() + 40
    assert vector.place(765, 2265).data_ptr() == pieces[3].data_ptr()
    # From one stretch into the next.
    assert torch.equal(vector.read(760, 770), torch.cat([pieces[2][-5:], pieces[3][:5]]))
    assert vector.read(7, 7).numel() == 0


def test_storages_that_happen_to_be_neighbours_stay_apart() -> None:
    memory = torch.arange(8.0).numpy()
    halves = [torch.from_numpy(memory[:4].copy()), torch.from_numpy(memory[4:].copy())]
    vector = Stretches(halves, lambda _: None)
    assert torch.equal(vector.read(0, 8), torch.arange(8.0))


def test_old_states_go_without_the_garbage_collector() -> None:
    def work(member: object) -> bool:
        parameters = {"weight": torch.zeros(3000), "bias": torch.zeros(2000)}
        groups = make_groups(parameters, None, 1024)
        settings = Settings.make("error_feedback(top_k(fraction=0.1))", None)
        engine, staging = Engine("ddp", [Route(g, member) for g in groups], settings), Staging(groups, parameters)  # type: ignore[arg-type]

        def once() -> None:
            step = engine.begin(take=staging.get)
            staging.clear()
            gradients = [torch.randn(p.numel()) for p in parameters.values()]
            for number in staging.put(list(parameters.values()), gradients):
                vector = staging.vector(number, step)
                assert isinstance(vector, Stretches)
                step.submit(number, vector)
            step.deliver()
            step.close()

        once()
        old = weakref.ref(engine.lanes[0].state.first[0].states[0][1].residual)
        once()
        return old() is None

    gc.disable()
    try:
        assert threads.run(2, work, 2) == [True, True]
    finally:
        gc.enable()


def test_empty_pieces_have_no_place() -> None:
    x = torch.arange(8.0)
    for tensors in (
        [x[8:], x[2:5]],
        [x[:3], x[5:5], x[3:8]],
        [x[:0], x[:0]],
        [torch.empty(0, 3), x[4:6], x[1:1], x[:2], torch.empty(0)],
    ):
        vector, expected = Stretches(tensors, lambda _: None), torch.cat([t.flatten() for t in tensors])
        n = expected.numel()
        assert torch.equal(vector.read(0, n), expected)
        assert torch.equal(vector.read(n, n), expected[:0])
        vector.place(0, n).copy_(expected)
        vector.write(0, vector.read(0, n))
        assert torch.equal(torch.cat([t.flatten() for t in tensors]), expected)

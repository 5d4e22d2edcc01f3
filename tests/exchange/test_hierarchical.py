"""Dense inside a node, compressed between nodes."""

from __future__ import annotations

import pytest
import torch

import tersegrad
from tersegrad.core import trust
from tersegrad.core.errors import BadConfiguration
from tersegrad.core.protocol import Context, Spec, Stats
from tersegrad.exchange import AllGatherExchange, HierarchicalExchange, TwoShotExchange, scheme, virtual
from tersegrad.exchange.hierarchical import Nodes
from tersegrad.exchange.schemes import per_node
from tests.device import Device
from tests.exchange.test_exchange import vector

TEXT = "error_feedback(sparse_dithering(alpha=0.1))"


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("ranks_per_node", [1, 2, 3, 8])
@pytest.mark.parametrize("between", [AllGatherExchange, TwoShotExchange])
def test_any_world_size_and_length(size: int, ranks_per_node: int, between: type) -> None:
    for d in (0, 65, 1000):
        spec, xs = Spec.flat(d), [vector(d, r, 0) for r in range(size)]
        exact = HierarchicalExchange(between(tersegrad.parse("identity")), ranks_per_node)
        outcome = virtual.run(exact, xs, virtual.init(exact, spec, size), spec, Context())
        torch.testing.assert_close(outcome.mean, torch.stack(xs).mean(0))
        lossy = HierarchicalExchange(between(tersegrad.parse(TEXT)), ranks_per_node)
        states = virtual.init(lossy, spec, size)
        for step in range(2):
            states = list(virtual.run(lossy, xs, states, spec, Context(step=step)).states)  # raises if ranks differ


def test_nodes_cover_every_lane_once() -> None:
    for size in range(1, 20):
        for n in range(1, 9):
            nodes = Nodes(size, n)
            assert sum(len(nodes.members(k)) for k in range(nodes.count)) == size
            for k in range(nodes.count):
                owned = [lane for r in nodes.members(k) for lane in nodes.owned(r)]
                assert owned == list(range(nodes.lanes))
                assert all(nodes.owned(r) for r in nodes.members(k))


def test_one_node_is_exact_and_sends_nothing_between() -> None:
    spec, xs = Spec.flat(1000), [vector(1000, r, 0) for r in range(4)]
    exchange = scheme("hierarchical(ranks_per_node=4)").make(tersegrad.parse("sign"))
    outcome = virtual.run(exchange, xs, virtual.init(exchange, spec, 4), spec, Context())
    torch.testing.assert_close(outcome.mean, torch.stack(xs).mean(0))
    assert outcome.sent == outcome.intra_node


def test_a_node_sends_a_share_of_what_its_ranks_would() -> None:
    d, n, count = 1 << 16, 4, 3
    spec, xs = Spec.flat(d), [vector(d, r, 0) for r in range(n * count)]
    alone, _ = tersegrad.parse("sparse_dithering(alpha=0.1)").encode(xs[0], Spec.of(xs[0]), None, Context())
    exchange = scheme(f"hierarchical(ranks_per_node={n})").make(tersegrad.parse("sparse_dithering(alpha=0.1)"))
    outcome = virtual.run(exchange, xs, virtual.init(exchange, spec, n * count), spec, Context())
    for sent, inside in zip(outcome.sent, outcome.intra_node):
        assert inside == pytest.approx(2 * (n - 1) / n * 4 * d, rel=0.01)
        assert sent - inside == pytest.approx(2 * (count - 1) / count / n * int(alone.nbytes), rel=0.1)


def test_error_is_that_of_the_exchange_between_the_means_of_nodes() -> None:
    d, n, count, alpha = 4096, 3, 4, 0.1
    spec, xs = Spec.flat(d), [vector(d, r, 1) for r in range(n * count)]
    between = TwoShotExchange(tersegrad.parse(f"sparse_dithering(alpha={alpha})"))
    exchange = HierarchicalExchange(between, n)
    outcome = virtual.run(exchange, xs, virtual.init(exchange, spec, n * count), spec, Context())
    means = torch.stack(xs).double().view(count, n, d).mean(1)
    power = float(means.square().sum()) / count
    error = float((outcome.mean.double() - means.mean(0)).square().sum())
    assert 0 < error <= between.guarantee(spec, count).value * power * (1 + 1e-5)
    assert power <= float(torch.stack(xs).double().square().sum()) / (n * count)


def test_statistics_of_a_node_are_those_of_its_mean() -> None:
    seen: list[torch.Tensor] = []

    class Watching(AllGatherExchange):
        def steps(self, x, state, spec, ctx, rank, size, stats=None, into=None):  # type: ignore[no-untyped-def]
            assert stats is not None
            seen.append(stats.second_moment.clone())
            return super().steps(x, state, spec, ctx, rank, size, stats)

    spec, xs = Spec.flat(130), [vector(130, r, 0) for r in range(4)]
    stats = [Stats(x.square() + r) for r, x in enumerate(xs)]
    exchange = HierarchicalExchange(Watching(tersegrad.parse("identity")), 2)
    virtual.run(exchange, xs, virtual.init(exchange, spec, 4), spec, Context(), stats)
    moments = [s.second_moment for s in stats]
    assert len(seen) == 4
    assert all(m is not None for m in moments)
    torch.testing.assert_close(torch.cat(seen[:2]), (moments[0] + moments[1]) / 4)  # type: ignore[operator]
    torch.testing.assert_close(torch.cat(seen[2:]), (moments[2] + moments[3]) / 4)  # type: ignore[operator]


def test_exchanges_have_text_forms() -> None:
    for text in (
        "all_gather",
        "two_shot",
        "hierarchical",
        "hierarchical(ranks_per_node=8, between=all_gather)",
        "power_sgd(rank=2)",
    ):
        assert str(scheme(text)) == text
        assert scheme(str(scheme(text))) == scheme(text)
    assert str(scheme("power_sgd(rank=4)")) == "power_sgd"
    for text, message in (
        ("ring", "there is no exchange called 'ring'"),
        ("twoshot", "did you mean 'two_shot'"),
        ("hierarchical(ranks_per_node=0)", "at least 1"),
        ("hierarchical(between=power_sgd)", "two_shot"),
        ("power_sgd(rank=0)", "at least 1"),
        ("power_sgd(tau=1)", "no parameter"),
        ("qsgd", "qsgd is a compressor; the exchanges are"),
        ("3", "the name of an exchange"),
    ):
        with pytest.raises(BadConfiguration, match=message):
            scheme(text)
    with pytest.raises(BadConfiguration, match="how many ranks"):
        scheme("hierarchical").make(tersegrad.parse("sign"))


def test_hosts_give_the_size_of_nodes() -> None:
    assert per_node([b"a"] * 3) == 3
    assert per_node([b"a", b"b"]) == 1
    for uneven in ([b"a", b"b", b"b"], [b"a", b"b", b"a"], [b"a", b"a", b"b", b"c", b"c"]):
        with pytest.raises(BadConfiguration, match="ranks_per_node"):
            per_node(uneven)


@pytest.mark.parametrize("between", [AllGatherExchange, TwoShotExchange])
def test_what_nodes_spread_is_not_believed(between: type) -> None:
    """The mean between nodes is sent on at once: a device's word on its messages must be known by then."""

    class Doubted(type(tersegrad.parse("bf16"))):  # type: ignore[misc]
        def decode(self, message, spec, ctx, out=None):  # type: ignore[no-untyped-def]
            decoded = super().decode(message, spec, ctx, out)
            believed = trust.numbers(device.to(torch.tensor([1]))) == [0]
            return decoded.fill_(7.0) if believed else decoded

    spec, xs = Spec.flat(130), [vector(130, r, 0) for r in range(2)]
    plain, doubted = (HierarchicalExchange(between(c), 1) for c in (tersegrad.parse("bf16"), Doubted()))
    expected = virtual.run(plain, xs, virtual.init(plain, spec, 2), spec, Context()).mean
    doubts: list[trust.Doubt] = []
    with Device() as device:
        with trust.postponing(doubts):
            found = virtual.run(doubted, xs, virtual.init(doubted, spec, 2), spec, Context()).mean
        trust.settle(doubts)
    assert torch.equal(found, expected)

"""Exchanges on real process groups equal the virtual ones bit for bit, and ranks agree."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import Tensor

import tersegrad
from tersegrad.core.errors import BadConfiguration, CorruptMessage
from tersegrad.core.protocol import Context, Guarantee, Message, Spec
from tersegrad.exchange import (
    AllGather,
    AllGatherExchange,
    AllToAll,
    Exchange,
    ProcessGroup,
    TwoShotExchange,
    scheme,
    start,
    virtual,
)
from tersegrad.exchange.all_gather import gather_messages
from tersegrad.exchange.steps import SHORT, broke_off
from tests.exchange.pool import Pool, pool
from tests.laws.test_guarantees import Noisy, slack
from tests.laws.zoo import adversarial

KINDS = ("all_gather", "two_shot", "hierarchical(ranks_per_node=2)", "hierarchical(ranks_per_node=2, between=all_gather)")
TEXTS = (
    "identity",
    "bf16",
    "qsgd(norm=max)",
    "sparse_dithering(alpha=0.1)",
    "error_feedback(top_k(fraction=0.05))",
    "error_feedback(random_k(fraction=0.1))",
    "error_feedback(rotated(int4))",
    "by_tensor(error_feedback(sign), small=bf16, below=10)",
    "random_sparse_dithering(omega=0.5)",
)
SIZES = (0, 1, 65, 3001)


def vector(d: int, rank: int, step: int) -> Tensor:
    return torch.randn(d, generator=torch.Generator().manual_seed(1000 * step + rank)) * (1 + rank)


def make(kind: str, text: str) -> Exchange[Any]:
    return scheme(kind).make(tersegrad.parse(text))


def real_steps(kind: str, text: str, d: int, steps: int) -> list[tuple[bytes, int]]:
    group = ProcessGroup()
    exchange, spec = make(kind, text), Spec.flat(d)
    state = exchange.init(spec, "cpu", group.rank, group.size)
    results = []
    for step in range(steps):
        pending = start(exchange, vector(d, group.rank, step), state, spec, Context(seed=5, step=step), group)
        mean, state = pending.wait()
        results.append((mean.numpy().tobytes(), pending.sent))
    return results


def interleaved(d: int) -> bytes:
    """Three exchanges under way at once, advanced in one order on all ranks."""
    group, spec = ProcessGroup(), Spec.flat(d)
    exchange = make("two_shot", "sparse_dithering(alpha=0.1)")
    pendings = [
        start(
            exchange,
            vector(d, group.rank, k),
            exchange.init(spec, "cpu", group.rank, group.size),
            spec,
            Context(buffer=k),
            group,
        )
        for k in range(3)
    ]
    while not all(p.done for p in pendings):
        for p in pendings:
            p.advance()
    return b"".join(p.wait()[0].numpy().tobytes() for p in pendings)


class ByHost(ProcessGroup):
    """What a group of gloo does with a GPU's tensors, on the CPU."""

    def by_host(self, device: torch.device) -> bool:
        return True


def all_at_once(kind: type[ProcessGroup], lengths: list[int]) -> list[bytes]:
    """What gathers of bytes of a rank's own and exchanges with all others bring, all under way before the first is waited for."""
    group = kind()
    started = []
    for k, n in enumerate(lengths):
        mine = torch.full((n,), 10 * k + group.rank, dtype=torch.uint8)
        started.append(group.launch(AllGather(mine)))
        share = (n,) * group.size
        started.append(group.launch(AllToAll(mine.repeat(group.size), share, share)))
    for work, _ in started:
        work.wait()
    return [out.numpy().tobytes() for _, out in started]


@pytest.mark.parametrize(("size", "kind"), [(2, ProcessGroup), (3, ProcessGroup), (2, ByHost), (3, ByHost)])
def test_long_and_short_messages_that_are_under_way_together_arrive_at_their_places(
    size: int, kind: type[ProcessGroup]
) -> None:
    lengths = [100_000, 8, SHORT, SHORT + 1, 1, 300_000]
    expected = [b"".join(bytes([10 * k + r]) * n for r in range(size)) for k, n in enumerate(lengths) for _ in range(2)]
    with pool(size) as ranks:
        assert ranks.run(all_at_once, kind, lengths) == [expected] * size


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("text", TEXTS)
def test_process_groups_equal_virtual_ranks_bit_for_bit(workers: Pool, kind: str, text: str) -> None:
    exchange, steps, size = make(kind, text), 2, workers.size
    for d in SIZES:
        spec = Spec.flat(d)
        real = workers.run(real_steps, kind, text, d, steps)
        states = virtual.init(exchange, spec, size)
        for step in range(steps):
            outcome = virtual.run(exchange, [vector(d, r, step) for r in range(size)], states, spec, Context(seed=5, step=step))
            states = list(outcome.states)
            for rank in range(size):
                assert real[rank][step] == (outcome.mean.numpy().tobytes(), outcome.sent[rank])


def test_several_exchanges_under_way_at_once(workers: Pool) -> None:
    results = workers.run(interleaved, 5000)
    assert len(set(results)) == 1
    exchange, spec = make("two_shot", "sparse_dithering(alpha=0.1)"), Spec.flat(5000)
    expected = b""
    for k in range(3):
        xs = [vector(5000, r, k) for r in range(workers.size)]
        expected += (
            virtual.run(exchange, xs, virtual.init(exchange, spec, workers.size), spec, Context(buffer=k))
            .mean.numpy()
            .tobytes()
        )
    assert results[0] == expected


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
def test_identity_gives_the_mean_in_rank_order(kind: str, size: int) -> None:
    for d in (0, 1, 63, 64, 65, 1000):
        exchange, spec = make(kind, "identity"), Spec.flat(d)
        xs = [vector(d, r, 0) for r in range(size)]
        outcome = virtual.run(exchange, xs, virtual.init(exchange, spec, size), spec, Context())
        total = torch.zeros(d)
        for x in xs:
            total += x
        if kind in ("all_gather", "two_shot"):
            assert torch.equal(outcome.mean, total * (1.0 / size))
        else:  # sums of sums
            torch.testing.assert_close(outcome.mean, total / size)


def test_traffic_follows_the_formulas() -> None:
    d = 1 << 16
    spec, text = Spec.flat(d), "sparse_dithering(alpha=0.1)"
    alone, _ = tersegrad.parse(text).encode(vector(d, 0, 0), Spec.of(vector(d, 0, 0)), None, Context())
    for size in (2, 4, 8):
        for kind, messages in (("all_gather", size - 1), ("two_shot", 2 * (size - 1) / size)):
            exchange = make(kind, text)
            xs = [vector(d, r, 0) for r in range(size)]
            sent = virtual.run(exchange, xs, virtual.init(exchange, spec, size), spec, Context()).sent
            for n in sent:
                assert abs(n / (messages * int(alone.nbytes)) - 1) < 0.1


SURE = ("sparse_dithering(alpha=0.1)", "top_k(fraction=0.2)", "int4(block=64)", "sign", "error_feedback(top_k(fraction=0.3))")
UNBIASED = ("random_sparse_dithering(omega=0.5)", "qsgd(bits=3, bucket=64)", "random_k(fraction=0.25)", "natural")


def relative_error(exchange: Exchange[Any], xs: list[Tensor], seed: int) -> float:
    """The squared error of the mean against (1/p) sum ||x_i||^2."""
    spec = Spec.flat(xs[0].numel())
    outcome = virtual.run(exchange, xs, virtual.init(exchange, spec, len(xs)), spec, Context(seed=seed))
    exact = torch.stack(xs).double().mean(0)
    power = sum(float(x.double().square().sum()) for x in xs) / len(xs)
    return float((outcome.mean.double() - exact).square().sum()) / power


@pytest.mark.parametrize("text", SURE)
def test_two_shot_keeps_its_sure_guarantee(text: str) -> None:
    exchange = TwoShotExchange(tersegrad.parse(text), tersegrad.parse(text))
    for size in (2, 3, 5):
        promise = exchange.guarantee(Spec.flat(2048), size)
        assert (promise.kind, promise.sure) == ("contractive", True)
        families = [adversarial(2048)[name] for name in ("gaussian", "one_big", "geometric", "student_t", "constant")]
        for case in range(3):
            xs = [families[(case + r) % len(families)] * (1 + r) for r in range(size)]
            assert relative_error(exchange, xs, case) <= promise.value * (1 + 1e-5)


@pytest.mark.parametrize("text", UNBIASED)
def test_two_shot_keeps_its_guarantee_on_average_and_stays_unbiased(text: str) -> None:
    exchange, size, runs = TwoShotExchange(tersegrad.parse(text)), 3, 60
    xs = [vector(512, r, 7) for r in range(size)]
    promise = exchange.guarantee(Spec.flat(512), size)
    assert promise.kind == "unbiased"
    assert sum(relative_error(exchange, xs, seed) for seed in range(runs)) / runs <= promise.value
    check_bias(exchange)


def check_bias(exchange: TwoShotExchange, runs: int = 300) -> None:
    """The mean has no bias: not along the exact one, and not in any of 64 values that are sent many times."""
    size, copies = 3, 33  # parts end at multiples of 64, and all have the same number of coordinates
    pattern = torch.linspace(-2, 2, 64).where(torch.arange(64) % 5 > 0, torch.tensor(0.25))
    xs = [(1 + rank / 4) * pattern.repeat(copies) for rank in range(size)]
    spec, exact = Spec.flat(64 * copies), torch.stack(xs).double().mean(0)
    along, total, spread = [], torch.zeros(64, dtype=torch.float64), 0.0
    for seed in range(runs):
        found = virtual.run(exchange, xs, virtual.init(exchange, spec, size), spec, Context(seed=seed))
        error = found.mean.double() - exact
        along.append(float(error @ exact) / float(exact.square().sum()))
        by_value = error.view(copies, 64)
        total += by_value.sum(0)
        spread = max(spread, float(by_value.max() - by_value.min()))
    samples, draws = torch.tensor(along, dtype=torch.float64), copies * runs
    assert abs(float(samples.mean())) <= slack(samples) + 2.0**-15, "biased along the mean"
    # Hoeffding over all 64 values at once, at 1e-6, plus the 2^-16 of a step that 16-bit draws allow in each round.
    bound = spread * (math.sqrt(math.log(2 * 64 / 1e-6) / (2 * draws)) + 2.0**-15)
    assert float((total / draws).abs().max()) <= bound, "biased in a value"


@pytest.mark.parametrize("omega", [0.05, 0.5])
@pytest.mark.parametrize("factor", [0.9, 1.1])
def test_the_check_sees_a_bias_of_a_tenth_in_one_round(omega: float, factor: float) -> None:
    fair, odd = Noisy(omega, omega), Noisy(omega, omega, factor)
    check_bias(TwoShotExchange(fair, fair))
    for first, second in ((odd, fair), (fair, odd)):
        with pytest.raises(AssertionError, match="biased along the mean"):
            check_bias(TwoShotExchange(first, second))


def test_two_shot_promises() -> None:
    spec = Spec.flat(4096)
    identity, half = tersegrad.parse("identity"), tersegrad.parse("sparse_dithering(alpha=0.25)")
    assert TwoShotExchange(identity).guarantee(spec, 4) == Guarantee("contractive", 0.0, True)
    assert TwoShotExchange(half).guarantee(spec, 4).value == pytest.approx((0.5 + 0.5 * 1.5) ** 2)
    assert TwoShotExchange(half, identity).guarantee(spec, 4).value == pytest.approx(0.25)
    assert TwoShotExchange(tersegrad.parse("threshold(tau=1.0)")).guarantee(spec, 4).kind == "none"
    assert TwoShotExchange(half).guarantee(Spec.flat(0), 4).value == 0.0


@pytest.mark.parametrize(("text", "kind", "rounds"), [
    ("qsgd", "all_gather", 1), ("error_feedback(sign)", "two_shot", 2), ("top_k(fraction=0.1)", "all_gather", 2),
    ("sparse_dithering(nu=0.1)", "two_shot", 4),
])  # fmt: skip
def test_messages_of_fixed_size_need_no_round_for_their_lengths(text: str, kind: str, rounds: int) -> None:
    inner, spec, requests = make(kind, text), Spec.flat(1000), []

    class Counted:
        def __getattr__(self, name: str) -> Any:
            return getattr(inner, name)

        def steps(self, *args: Any) -> Any:
            steps, answer = inner.steps(*args), None
            while True:
                try:
                    request = next(steps) if answer is None else steps.send(answer)
                except StopIteration as end:
                    return end.value
                requests.append(request)
                answer = yield request

    xs = [vector(1000, r, 0) for r in range(2)]
    virtual.run(Counted(), xs, virtual.init(inner, spec, 2), spec, Context())
    assert len(requests) == 2 * rounds


@pytest.mark.parametrize("kind", ["all_gather", "two_shot"])
def test_one_rank_exchanges_nothing(kind: str) -> None:
    exchange, spec = make(kind, "sparse_dithering(nu=0.1)"), Spec.flat(1000)
    with pytest.raises(StopIteration):
        next(exchange.steps(vector(1000, 0, 0), exchange.init(spec, "cpu", 0, 1), spec, Context(), 0, 1))


def test_a_false_declaration_of_fixed_size_is_an_error() -> None:
    class Liar(tersegrad.TopK):
        fixed_size = True

    liar, spec = TwoShotExchange(Liar(k=2)), Spec.flat(500)
    with pytest.raises(BadConfiguration, match="fixed_size"):
        virtual.run(liar, [vector(500, r, 0) for r in range(2)], virtual.init(liar, spec, 2), spec, Context())
    message, _ = tersegrad.parse("identity").encode(torch.ones(4), Spec.of(torch.ones(4)), None, Context())
    with pytest.raises(BadConfiguration, match="fixed_size"):
        next(gather_messages(message, [15, 15], True, 0, 2))


def test_non_finite_on_one_rank_is_nan_on_all() -> None:
    for kind in KINDS:
        exchange, spec = make(kind, "error_feedback(sparse_dithering(nu=0.1))"), Spec.flat(500)
        xs = [vector(500, r, 0) for r in range(3)]
        xs[1][7] = math.inf
        outcome = virtual.run(exchange, xs, virtual.init(exchange, spec, 3), spec, Context())
        assert bool(torch.isnan(outcome.mean).any())


def test_steps_that_differ_are_an_error_not_a_hang() -> None:
    spec = Spec.flat(100)

    class Odd(AllGatherExchange):
        def steps(self, x: Tensor, state: Any, spec: Spec, ctx: Context, rank: int, size: int, *rest: Any) -> Any:
            other = TwoShotExchange(self.compressor)
            return (
                super().steps(x, state, spec, ctx, rank, size)
                if rank
                else other.steps(x, other.init(spec, "cpu", 0, size), spec, ctx, 0, size)
            )

    exchange = Odd(tersegrad.parse("identity"))
    with pytest.raises(RuntimeError):
        virtual.run(exchange, [torch.ones(100)] * 2, virtual.init(exchange, spec, 2), spec, Context())


@dataclasses.dataclass(frozen=True)
class Spoilt:
    """An exchange in which rank 1 announces another length of its last message in its all-gather number ``which``."""

    inner: Exchange[Any]
    which: int
    length: int

    def init(self, *arguments: Any) -> Any:
        return self.inner.init(*arguments)

    def steps(self, x: Tensor, state: Any, spec: Spec, ctx: Context, rank: int, size: int, stats: Any = None) -> Any:
        inner: Any = self.inner
        steps, answer, seen = inner.steps(x, state, spec, ctx, rank, size, stats), None, 0
        while True:
            try:
                request = steps.send(answer)
            except StopIteration as end:
                return end.value
            if isinstance(request, AllGather):
                if rank == 1 and seen == self.which:
                    lengths = request.data.clone().view(torch.int64)
                    lengths[-1] = self.length
                    request = AllGather(lengths.view(torch.uint8))
                seen += 1
            answer = yield request


@pytest.mark.parametrize("length", [-2, -(1 << 63), 1 << 20, (1 << 63) - 1])
@pytest.mark.parametrize(("kind", "which"), [("all_gather", 0), ("two_shot", 0), ("two_shot", 1)])
def test_a_length_that_cannot_be_is_refused_by_all_ranks(kind: str, which: int, length: int) -> None:
    spec, xs = Spec.flat(300), [vector(300, r, 0) for r in range(3)]
    spoilt: Any = Spoilt(scheme(kind).make(tersegrad.parse("top_k(fraction=0.1)")), which, length)
    states = virtual.init(spoilt, spec, 3)
    running = [spoilt.steps(x, state, spec, Context(), rank, 3) for rank, (x, state) in enumerate(zip(xs, states))]
    answers: list[Any] = [None] * 3
    refused: list[str] = []
    while not refused:
        requests = []
        for generator, answer in zip(running, answers):
            try:
                requests.append(generator.send(answer))
            except CorruptMessage as error:
                refused.append(str(error))
        answers = answers if refused else virtual.deliver(requests, [0] * 3, [0] * 3)
    assert len(refused) == 3
    # In two_shot's first round rank 1 sees that its own length came back as another one.
    assert sum(f"rank 1 announces {length} bytes" in text for text in refused) >= 2


def test_a_second_compressor_serves_the_means() -> None:
    """With exact means only the first round errs, and the text form says so."""
    spec, d, size = Spec.flat(5000), 5000, 3
    xs = [vector(d, r, 0) for r in range(size)]
    exact = torch.stack([x.double() for x in xs]).mean(0)
    errors = {}
    for text in ("two_shot", "two_shot(second=identity)"):
        assert scheme(str(scheme(text))) == scheme(text)
        exchange = scheme(text).make(tersegrad.parse("error_feedback(sparse_dithering(alpha=0.3))"))
        outcome = virtual.run(exchange, xs, virtual.init(exchange, spec, size), spec, Context())
        errors[text] = float((outcome.mean.double() - exact).square().sum())
        kept = [part.state for part in exchange.parts(outcome.states[0], spec, 0, size) if part.round == "second"]
        # Errors are fed back once: a residual of means would delay what those of gradients have delayed already.
        assert kept == [None]
    assert errors["two_shot(second=identity)"] < 0.8 * errors["two_shot"]
    twice = "error_feedback(top_k(fraction=0.01))"
    feeding = scheme(f"two_shot(second={twice})").make(tersegrad.parse(twice))
    assert feeding.init(spec, "cpu", 0, size).second is not None
    for bad in ("two_shot(second=vgc(alpha=1.5))", "two_shot(second=all_gather)", "bf16"):
        with pytest.raises(BadConfiguration):
            scheme(bad)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("qsgd(bits=4)", "qsgd(bits=4)"),
        ("error_feedback(sparse_dithering(alpha=0.25))", "random_sparse_dithering(omega=0.67)"),
        ("error_feedback(top_k(fraction=0.01))", "random_sparse_dithering(omega=1)"),
        ("strom(tau=0.1)", "random_sparse_dithering(omega=1)"),
        ("error_feedback(rotated(sign))", "error_feedback(rotated(sign))"),
        (
            'by_tensor(error_feedback(top_k(fraction=0.01)), small=bf16, below=64, rules={"a*": strom(tau=1)})',
            'by_tensor(random_sparse_dithering(omega=1), small=bf16, below=64, rules={"a*": random_sparse_dithering(omega=1)})',
        ),
    ],
)
def test_means_are_compressed_as_gradients_are_but_without_a_residual(first: str, second: str) -> None:
    for text in ("two_shot", "hierarchical(ranks_per_node=2)"):
        assert scheme(text).again(tersegrad.parse(first)) == tersegrad.parse(second)
    assert scheme("two_shot(second=bf16)").again(tersegrad.parse(first)) == tersegrad.parse("bf16")
    assert scheme("all_gather").again(tersegrad.parse(first)) is None
    exchange = scheme("two_shot").make(tersegrad.parse(first))
    assert isinstance(exchange, TwoShotExchange)
    assert exchange._second == tersegrad.parse(second)


@pytest.mark.parametrize("size", [2, 3, 5])
def test_a_message_is_copied_once_per_byte_that_leaves_and_not_at_all_for_one_other_rank(size: int) -> None:
    message = Message(torch.arange(50, dtype=torch.uint8), 40)
    steps = gather_messages(message, [50] * size, False, 0, size)
    assert isinstance(next(steps), AllGather)
    sizes = torch.full((size,), 40, dtype=torch.int64).view(torch.uint8)
    request = steps.send(sizes)
    assert isinstance(request, AllToAll)
    assert request.data.tolist() == list(range(40)) * (size - 1)
    assert (request.data.data_ptr() == message.data.data_ptr()) == (size == 2)
    arrived = torch.zeros(40 * (size - 1), dtype=torch.uint8)
    with pytest.raises(StopIteration) as end:
        steps.send(arrived)
    received = end.value.value[1]
    assert received[0].data.data_ptr() == message.data.data_ptr()
    assert [m.data.data_ptr() - arrived.data_ptr() for m in received[1:]] == [40 * r for r in range(size - 1)]


def test_an_error_of_the_users_is_not_taken_for_a_lost_rank() -> None:
    def wait() -> None:
        raise RuntimeError("the data loader's workers have left")

    with pytest.raises(RuntimeError) as caught:
        wait()
    assert not broke_off(caught.value)

"""Local steps of the variance-based experiment, against naive loops; and what might help where delay hurts."""

from __future__ import annotations

import concurrent.futures
import copy
import dataclasses
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from experiments.variance_based import batched, codes, data, local, methods, remedies, train, wire
from experiments.variance_based.factors import CodedPowerSGD
from experiments.variance_based.layout import Layout
from experiments.variance_based.local import Local
from experiments.variance_based.resnet import resnet
from torch import Tensor

import tersegrad
from tersegrad import Context
from tersegrad.exchange import scheme, virtual

WORKERS, BATCH = 4, 3
SMALL: dict[str, Any] = {
    **methods.RESNET,
    "workers": WORKERS,
    "batch": BATCH,
    "depths": (1, 1, 1, 1),
    "width": 4,
    "shifts": 0,
    "encode_every": 1,
}


@pytest.fixture(scope="module")
def images() -> data.Images:
    return data.made(WORKERS * BATCH * 2, side=64)


def trainer_of(method: batched.Method, images: data.Images, **changes: Any) -> train.Trainer:
    base = methods.Job("none", "momentum", lr=0.05).config(1, 0.05, **SMALL)
    found = train.Trainer(dataclasses.replace(base, method=method, **changes), images, "cpu")
    found.shuffle(0)
    return found


@torch.no_grad()
def advance(trainer: train.Trainer, steps: int, every: int = 0) -> None:
    for step in range(steps):
        trainer.step()
        if every and (step + 1) % every == 0:
            assert trainer.outer is not None
            trainer.outer.end_round(trainer.params, step)


def test_an_exact_exchange_after_every_step_is_training_in_one_batch(images: data.Images) -> None:
    """The mean of the workers' momenta is the momentum of the mean."""
    plain = trainer_of(batched.Dense(workers=WORKERS), images)
    alone = trainer_of(Local("local_sgd(every=1)", "identity"), images)
    start = plain.params.clone()
    assert torch.equal(alone.params, start.expand(WORKERS, -1))
    for step in range(4):
        advance(plain, 1)
        advance(alone, 1, every=1)
        moved = float((plain.params - start).norm())
        apart = max(float((own - plain.params).norm()) for own in alone.params)
        # Rounding; later it may move an activation across the kink of a relu, whose gradient jumps.
        assert apart < (1e-4 if step < 2 else 1e-2) * moved
        assert float(alone.total_loss) == pytest.approx(float(plain.total_loss), rel=1e-5)
    assert alone.accuracy() == plain.accuracy()
    x = plain.batch(torch.arange(8), plain.images.x)
    assert torch.allclose(alone.engine.forward(x), plain.engine.forward(x), atol=1e-3)


def flat(model: torch.nn.Module) -> Tensor:
    """A model's parameters in the order of the experiment: convolutions channels-last."""
    stored = [p.detach().permute(0, 2, 3, 1) if p.ndim == 4 else p.detach() for p in model.parameters()]
    return torch.cat([p.reshape(-1) for p in stored])


@pytest.mark.parametrize("optimiser", ["momentum", "adam"])
def test_local_steps_are_those_of_copies_that_train_alone(optimiser: train.Optimiser, images: data.Images) -> None:
    every, rounds, decay = 3, 2, 1e-4
    lr = 0.002 if optimiser == "adam" else 0.02
    alone = trainer_of(Local(f"local_sgd(every={every})", "identity"), images, optimiser=optimiser)
    alone.lr.fill_(lr)
    torch.manual_seed(0)
    model = resnet(10, (1, 1, 1, 1), 4, stem=3)
    copies = [copy.deepcopy(model).train() for _ in range(WORKERS)]
    made: Any = torch.optim.Adam if optimiser == "adam" else torch.optim.SGD
    more = {} if optimiser == "adam" else {"momentum": 0.9}
    optimisers = [made(c.parameters(), lr=lr, weight_decay=decay, **more) for c in copies]
    order, at = alone.order.clone(), 0
    advance(alone, every * rounds, every)
    for step in range(every * rounds):
        indices = order[torch.arange(at, at + WORKERS * BATCH)]
        at = (at + WORKERS * BATCH) % len(order)
        for c, o, mine in zip(copies, optimisers, indices.split(BATCH)):
            o.zero_grad()
            F.cross_entropy(c(alone.batch(mine, alone.images.x)), alone.images.y[mine]).backward()
            o.step()
        if (step + 1) % every == 0:
            with torch.no_grad():
                for same in zip(*(c.parameters() for c in copies)):
                    mean = torch.stack([p.detach() for p in same]).mean(0)
                    for p in same:
                        p.copy_(mean)
    start, wanted = (flat(m) for m in (model, copies[0]))
    for own in alone.params:
        assert float((alone.engine.layout.packed(own) - wanted).norm()) < 1e-4 * float((wanted - start).norm())
    assert alone.outer is not None
    assert alone.outer.count == rounds


def test_outer_steps_are_nesterovs() -> None:
    layout = Layout.of({"a": (7, 5)})
    anchor = torch.zeros(layout.padded)
    outer = local.Outer(Local("diloco(every=2)", "identity"), layout, anchor, 2, 0)
    wanted = torch.zeros(35, requires_grad=True)
    optimiser = torch.optim.SGD([wanted], lr=0.7, momentum=0.9, nesterov=True)
    generator = torch.Generator().manual_seed(0)
    params = anchor.expand(2, -1).clone()
    for number in range(3):
        learned = torch.randn(2, 35, generator=generator)
        params[:, :35] -= learned
        wanted.grad = learned.mean(0)
        optimiser.step()
        outer.end_round(params, 2 * number + 1)
        for own in (outer.anchor, *params):
            assert torch.allclose(own[:35], wanted.detach(), atol=1e-5)
            assert not own[35:].any()


@pytest.mark.parametrize("text", ["identity", "dithered_trellis(omega=1)", "random_sparse_dithering(omega=4)"])
def test_the_short_way_gives_the_mean_and_the_bytes_of_the_exchange(text: str) -> None:
    spec = Layout.of({"a": (70, 300), "b": (33,)}).spec
    generator = torch.Generator().manual_seed(0)
    xs = [torch.randn(spec.numel, generator=generator) for _ in range(4)]
    exchange = scheme("two_shot").make(tersegrad.parse(text))
    ranks, ctx, sent = virtual.init(exchange, spec, 4), Context(seed=3, step=5), [1, 1, 1, 1]
    mean = codes.mean_of(exchange, xs, ranks, spec, ctx, sent)
    wanted = virtual.run(exchange, xs, ranks, spec, ctx)
    assert torch.equal(mean, wanted.mean)
    assert sent == [1 + n for n in wanted.sent]


def test_a_run_with_local_steps_counts_every_byte(images: data.Images) -> None:
    config = methods.Job("local_14", "momentum", lr=0.05).config(4, 0.05, **SMALL)
    config = dataclasses.replace(config, method=Local("local_sgd(every=3)"))
    result, sampler = train.train(config, images, "cpu", lambda text: None)
    assert result["rounds"]["rounds"] == 3  # eight steps: the last round has two
    sent, number = result["rounds"]["sent"], result["parameters"]
    dense = 8 * 2 * (WORKERS - 1) / WORKERS * 4 * number
    assert sampler.result()["compact"]["ratio"] == pytest.approx(dense / (sum(sent) / WORKERS), abs=0.01)
    assert 20 < dense / (sum(sent) / WORKERS) < 400
    assert result["ratio_words"] is None
    assert result["method"]["how"] == "local_sgd(every=3)"
    exact = dataclasses.replace(config, method=Local("local_sgd(every=3)", "identity"))
    result, sampler = train.train(exact, images, "cpu", lambda text: None)
    assert sampler.result()["compact"]["ratio"] == pytest.approx(8 / 3, abs=0.01)


def test_errors_that_are_drawn_stand_for_messages(images: data.Images) -> None:
    """Two of three rounds without messages: near the run that writes all, and bytes counted for all."""
    config = methods.Job("local_14", "momentum", lr=0.05).config(6, 0.05, **SMALL)
    found = []
    for written in (1, 3):
        method = Local("local_sgd(every=2)", "subtractive_dithering(omega=0.01)", written=written)
        result, sampler = train.train(dataclasses.replace(config, method=method), images, "cpu", lambda text: None)
        assert result["rounds"]["rounds"] == 6
        assert result["rounds"]["written"] == 6 / written
        found.append((result["curve"]["loss"], sampler.result()["compact"]["ratio"]))
    assert found[0][0] == pytest.approx(found[1][0], rel=0.05)
    assert found[0][1] == pytest.approx(found[1][1], rel=0.05)


def test_local_steps_of_one_send_what_each_step_does(images: data.Images) -> None:
    """Coded factors of what was learned in rounds of one plain step, against factors of gradients; the errors are small."""
    method = CodedPowerSGD(1, "subtractive_dithering(omega=1e-9)")
    plain = {"weight_decay": 0.0, "momentum": 0.0, "optimiser": "momentum"}
    alone = trainer_of(Local("local_sgd(every=1)", low_rank=method), images, **plain)
    each = trainer_of(method, images, **plain)
    start = each.params.clone()
    advance(alone, 3, every=1)
    advance(each, 3)
    assert alone.outer is not None
    assert float((alone.outer.anchor - each.params).norm()) < 0.02 * float((each.params - start).norm())


def test_a_run_counts_the_factors_of_its_rounds(images: data.Images) -> None:
    config = methods.Job("local_14", "momentum", lr=0.05).config(4, 0.05, **SMALL)
    method = CodedPowerSGD(1, "subtractive_dithering(omega=0.2)")
    ratios = []
    for every in (1, 2):
        local_method = Local(f"local_sgd(every={every})", low_rank=method)
        result, sampler = train.train(dataclasses.replace(config, method=local_method), images, "cpu", lambda text: None)
        assert result["rounds"]["rounds"] == 8 / every
        ratios.append(sampler.result()["compact"]["ratio"])
    assert ratios[1] == pytest.approx(2 * ratios[0], rel=0.1)


def test_a_compressor_with_a_state_is_refused(images: data.Images) -> None:
    with pytest.raises(ValueError, match="keeps a state"):
        trainer_of(Local("local_sgd(every=3)", "error_feedback(top_k(fraction=0.1))"), images)


def test_rounds_end_where_they_should() -> None:
    assert Local("local_sgd(every=3)").ends(8, [0.1] * 4, 2) == {2, 5, 7}
    rates = [1.0, 0.5, 0.25, 0.01]
    found = sorted(Local("local_sgd(every=2)", growing=1).ends(48, rates, 12))
    assert found == [1, 3, 5, 7, 9, 11, 15, 19, 23, 31, 43, 47]  # the last rounds are an epoch, and what is left of it
    config = methods.Job("local_7_growing", "momentum", lr=0.1).config(30, 0.1, **methods.RESNET)
    assert isinstance(config.method, Local)
    still = dataclasses.replace(config, lr_warmup=0.0)
    count = len(config.method.ends(30 * 98, [still.rate(e) for e in range(30)], 98))
    assert 0.9 < count / len(methods.METHODS["local_14"].ends(30 * 98, [0.1] * 30, 98)) < 1.1  # type: ignore[attr-defined]


LAYOUT = Layout.of({"a": (3, 50, 7), "b": (5,), "c": (40, 40)})


def given(workers: int, seed: int) -> tuple[batched.Buffers, torch.Generator]:
    zeros = torch.zeros(workers, LAYOUT.padded)
    counted = torch.zeros(1, dtype=torch.int64)
    return batched.Buffers(
        LAYOUT, zeros.clone(), zeros.clone(), torch.zeros(LAYOUT.padded), counted
    ), torch.Generator().manual_seed(seed)


def draw(shared: batched.Buffers, generator: torch.Generator) -> None:
    samples = 0.02 * (0.3 + torch.randn(shared.gradient.shape[0], 4, LAYOUT.numel, generator=generator))
    assert shared.squares is not None
    LAYOUT.unpack(samples.sum(1), shared.gradient)
    LAYOUT.unpack(samples.square().sum(1), shared.squares)


def test_corrected_momentum_sends_what_momentum_would_have_made_of_it() -> None:
    shared, generator = given(2, 1)
    method, plain = remedies.CorrectedVGC(alpha=1.5, momentum=0.5), batched.VGC(alpha=1.5)
    state, other = method.init(shared, 0), plain.init(shared, 0)
    u, q = torch.zeros_like(shared.gradient), torch.zeros_like(shared.gradient)
    seen = 0
    for _ in range(6):
        draw(shared, generator)
        method.step(shared, state)
        mean, words = shared.mean.clone(), int(shared.words)
        plain.step(shared, other)
        chosen = other["sent"] != 0
        u = 0.5 * u + shared.gradient
        q = q + u
        assert torch.allclose(state["sent"], torch.where(chosen, q, torch.zeros(())), atol=1e-6)
        assert torch.equal(state["sent"] != 0, chosen)
        u[chosen], q[chosen] = 0.0, 0.0
        assert torch.allclose(state["u"], u, atol=1e-6)
        # What is decoded is within half an octave of what was sent, or below the four-bit range.
        total = state["sent"].mean(0)
        assert float((mean - total).abs().sum()) < 0.5 * float(state["sent"].abs().mean(0).sum())
        assert 0 < words <= int(chosen.sum())
        seen += words
    assert seen > 100
    config = methods.Job("vgc_2_corrected", "momentum", lr=0.1).config(30, 0.1, **methods.RESNET)
    assert config.momentum == 0.0
    assert config.weight_decay == pytest.approx(10 * methods.RESNET["weight_decay"])


def test_its_messages_are_encoded_from_what_was_sent(images: data.Images) -> None:
    config = methods.Job("vgc_2_corrected", "momentum", lr=0.05).config(2, 0.05, **SMALL)
    result, sampler = train.train(config, images, "cpu", lambda text: None)
    concurrent.futures.wait(sampler.futures)
    wire.close()
    found = sampler.result()
    sent = [sample["sent"] for sample in found["samples"]]
    assert len(sent) == 4
    # A worker in turn is encoded in every step; over all workers as many are sent on average.
    assert sum(sent) / 4 == pytest.approx(result["parameters"] / result["ratio_words"], rel=0.3)
    assert found["compact"]["ratio"] > found["paper"]["ratio"] > 1


def test_the_hybrid_without_its_queue_leaves_less_than_tau() -> None:
    shared, generator = given(2, 2)
    method = remedies.WholeHybrid(tau=0.01, alpha=1.0)
    state, plain = method.init(shared, 0), batched.Hybrid(tau=0.01, alpha=1.0)
    other = plain.init(shared, 0)
    received, waiting = torch.zeros(LAYOUT.padded), torch.zeros(LAYOUT.padded)
    whole: Tensor = torch.zeros_like(shared.gradient)
    for _ in range(6):
        draw(shared, generator)
        whole += shared.gradient
        plain.step(shared, other)
        waiting += shared.mean
        method.step(shared, state)
        received += shared.mean
    assert torch.allclose(received + state["r"].mean(0), whole.mean(0), atol=1e-6)
    assert float(received.abs().sum()) > 1.5 * float(waiting.abs().sum())
    sent = state["v"] == 0
    assert bool(sent.any())
    assert float(state["r"][sent].abs().max()) <= 0.01 * (1 + 1e-4)

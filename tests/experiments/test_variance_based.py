"""The experiment's one-pass network and batched methods, against a loop over samples and the package's compressors."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import itertools
import json
import math
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import torch.nn.functional as F
from experiments.variance_based import batched, data, methods, network, report, run, train, wire
from experiments.variance_based.layout import Layout
from experiments.variance_based.network import Conv, Flatten, Linear, Network, NormRelu, Pass, PoolDrop, Relu
from torch import Tensor

from tersegrad import theory
from tersegrad.core import state as states
from tersegrad.exchange import virtual
from tersegrad.exchange.all_gather import AllGatherExchange


def tiny(norm: bool) -> Network:
    middle: list[Any] = [NormRelu("norm0", 4)] if norm else [Relu()]
    layers = [Conv("conv0", 3, 4, bias=not norm), *middle, PoolDrop(), Conv("conv1", 4, 6, bias=True), Relu(), Flatten()]
    return Network([*layers, Linear("fc0", 6 * 4, 5), Linear("fc1", 5, 3, last=True)])


def make_pass(net: Network, workers: int, mode: network.Mode) -> tuple[Pass, Tensor]:
    layout = net.layout
    flat = torch.zeros(layout.padded)
    net.init(flat, 0)
    flat += 0.05 * torch.randn(layout.padded, generator=torch.Generator().manual_seed(5))
    rows = 1 if mode == "mean" else workers
    squares = layout.views(torch.zeros(rows, layout.padded)) if mode == "moments" else {}
    views = layout.views(flat)
    gradients = layout.views(torch.zeros(rows, layout.padded))
    return Pass(views, views, gradients, squares, net.buffers("cpu"), workers, mode), flat


def shares(net: Network, run: Pass, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
    """Every sample's share of its worker's gradient: autograd through a network in which each sample has weights of its own."""
    count, workers = x.shape[0], run.workers
    own = {k: v.expand(count, *v.shape).clone().requires_grad_() for k, v in run.params.items()}
    for layer in net.layers:
        match layer:
            case Conv():
                w = own[f"{layer.name}.weight"].permute(0, 1, 4, 2, 3)
                b = own.get(f"{layer.name}.bias")
                x = torch.cat([F.conv2d(x[i : i + 1], w[i], None if b is None else b[i], padding=1) for i in range(count)])
            case NormRelu():
                parts = []
                for chunk in x.chunk(workers):
                    mean, var = chunk.mean((0, 2, 3), keepdim=True), chunk.var((0, 2, 3), unbiased=False, keepdim=True)
                    parts.append((chunk - mean) / torch.sqrt(var + layer.eps))
                xhat = torch.cat(parts)
                x = torch.relu(
                    xhat * own[f"{layer.name}.weight"][:, :, None, None] + own[f"{layer.name}.bias"][:, :, None, None]
                )
            case Relu():
                x = torch.relu(x)
            case PoolDrop():
                x = F.max_pool2d(x, 2)
            case Flatten():
                x = x.permute(0, 2, 3, 1).flatten(1)
            case Linear():
                x = torch.einsum("bi,boi->bo", x, own[f"{layer.name}.weight"]) + own[f"{layer.name}.bias"]
                x = x if layer.last else torch.relu(x)
    (F.cross_entropy(x, labels, reduction="sum") * workers / count).backward()
    return {k: v.grad for k, v in own.items() if v.grad is not None}


@pytest.mark.parametrize("norm", [True, False])
def test_gradients_and_squares_are_those_of_a_loop_over_samples(norm: bool) -> None:
    workers, count = 2, 10
    net = tiny(norm)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(count, 3, 4, 4, generator=generator).contiguous(memory_format=torch.channels_last)
    labels = torch.randint(0, 3, (count,), generator=generator)
    given, _ = make_pass(net, workers, "moments")
    expected = shares(net, given, x, labels)
    for mode in ("moments", "workers", "mean"):
        given, _ = make_pass(net, workers, mode)
        with torch.no_grad():
            net.step(given, x, labels)
        for name, share in expected.items():
            parts = share.view(workers, count // workers, *share.shape[1:])
            wanted = parts.sum((0, 1))[None] if mode == "mean" else parts.sum(1)
            scale = wanted.abs().max()
            assert torch.allclose(given.gradients[name], wanted, atol=2e-6 * float(scale), rtol=1e-5), (mode, name)
            if mode == "moments":
                squares = parts.square().sum(1)
                assert torch.allclose(given.squares[name], squares, atol=2e-6 * float(squares.max()), rtol=1e-5), name


def test_dropout_lets_the_same_elements_through_backwards() -> None:
    layer = Linear("fc", 8, 64, drop=0.5)
    net = Network([layer])
    given, _ = make_pass(net, 1, "workers")
    x = torch.randn(4, 8)
    with torch.no_grad():
        y = layer.forward(given, x)
        layer.backward(given, torch.ones_like(y), True)
    assert 0.1 < float((y != 0).float().mean()) < 0.45  # relu and dropout each keep about half
    expected = (y != 0).float() * 2.0
    assert torch.allclose(given.gradients["fc.bias"][0], expected.sum(0))


def test_the_networks_have_the_sizes_they_say() -> None:
    assert network.vgg().layout.numel == 7_582_154
    assert network.small().layout.numel == 13_706


def test_initialisation_is_lecuns_or_that_of_torch() -> None:
    net = network.small()
    views = {}
    for rule in ("lecun", "torch"):
        flat = torch.zeros(net.layout.padded)
        net.init(flat, 1, rule)
        views[rule] = net.layout.views(flat)
    fan = 9 * 16
    weight, bias = "conv1.weight", "conv1.bias"
    assert float(views["lecun"][weight].std()) == pytest.approx(fan**-0.5, rel=0.05)
    assert not bool(views["lecun"][bias].any())
    torch.manual_seed(0)
    given = torch.nn.Conv2d(16, 32, 3)
    for name, wanted in ((weight, given.weight), (bias, given.bias)):
        assert wanted is not None
        found = views["torch"][name]
        assert float(found.abs().max()) == pytest.approx(float(wanted.detach().abs().max()), rel=0.15)
        assert float(found.abs().max()) <= fan**-0.5
        assert float(found.std()) == pytest.approx((3 * fan) ** -0.5, rel=0.3)


LAYOUT = Layout.of({"a": (3, 50, 7), "b": (5,), "c": (40, 40), "d": (1,)})


def buffers(workers: int, seed: int = 0) -> batched.Buffers:
    zeros = torch.zeros(workers, LAYOUT.padded)
    return batched.Buffers(LAYOUT, zeros.clone(), zeros.clone(), torch.zeros(LAYOUT.padded), torch.zeros(1, dtype=torch.int64))


@pytest.mark.parametrize(
    "method",
    [
        batched.VGC(alpha=1.0),
        batched.VGC(alpha=1.5),
        batched.VGC(alpha=1.5, residual="keep"),
        batched.Strom(tau=0.1),
        batched.Strom(tau=0.01),
        batched.Hybrid(tau=0.05, alpha=2.0),
        batched.Hybrid(tau=0.1, alpha=2.0),  # its square depends on whether tau is rounded first
        batched.TopK(fraction=0.02),
    ],
    ids=str,
)
def test_a_batched_step_decodes_to_what_the_package_decodes(method: batched.Method) -> None:
    """Bit for bit, over several steps, through real bytes in every wire form."""
    import tersegrad

    workers, spec = 8, LAYOUT.spec
    shared = buffers(workers)
    state = method.init(shared, 0)
    exchanges = {form: AllGatherExchange(tersegrad.parse(text)) for form, text in method.forms().items()}
    held = {form: virtual.init(e, spec, workers) for form, e in exchanges.items()}
    generator = torch.Generator().manual_seed(3)
    mean = 0.3 * torch.randn(spec.numel, generator=generator)
    sent = 0
    for step in range(6):
        samples = 0.02 * (mean + torch.randn(workers, 4, spec.numel, generator=generator))
        samples *= torch.logspace(-3, 1, spec.numel)  # far apart, so that some values lie below the four-bit range
        g, s = samples.sum(1), samples.square().sum(1)
        assert shared.squares is not None
        at = 0
        for _, _, a, b in LAYOUT.spans():
            shared.gradient[:, a:b], shared.squares[:, a:b] = g[:, at : at + b - a], s[:, at : at + b - a]
            at += b - a
        method.step(shared, state)
        for form, exchange in exchanges.items():
            stats = [tersegrad.Stats(row) for row in s]
            outcome = virtual.run(exchange, list(g), held[form], spec, tersegrad.Context(seed=1, step=step), stats)
            held[form] = list(outcome.states)
            assert torch.equal(outcome.mean, LAYOUT.packed(shared.mean)), (form, step)
            for worker, after in enumerate(held[form]):
                for name, value in states.state_dict(after).items():
                    role = wire.ROLES.get(name.rpartition(".")[2])
                    if role is not None:
                        assert torch.equal(value, LAYOUT.packed(state[role][worker])), (form, step, name)
        sent += int(shared.words)
    assert sent > 0


def exp4(value: float, largest: float) -> float:
    """The four-bit value next to a number, or 0: written out with powers of two."""
    top = 2.0 ** math.floor(math.log2(largest))
    low = 2.0 ** math.floor(math.log2(abs(value)))
    near = top if abs(value) > top else low if abs(value) < 1.5 * low else 2 * low
    return math.copysign(near, value) if near >= top / 128 else 0.0


class Loop:
    """One worker's compression, component by component."""

    def __init__(self, method: batched.Method, size: int) -> None:
        self.method, self.r, self.v = method, [0.0] * size, [0.0] * size

    def vgc(self, m: batched.VGC, tensor: range) -> dict[int, float]:
        r, v = self.r, self.v
        chosen = [i for i in tensor if r[i] ** 2 > m.alpha * v[i]]
        scope = chosen if m.exponents == "sent" else tensor
        largest = max((abs(r[i]) for i in scope), default=0.0)
        values = {i: exp4(r[i], largest) for i in chosen}
        for i in tensor:
            if i not in values or (m.residual == "small" and not values[i]):
                v[i] *= m.zeta
            else:
                r[i], v[i] = r[i] - values[i] if m.residual == "keep" else 0.0, 0.0
        return values

    def hybrid(self, m: batched.Hybrid, tensor: range) -> dict[int, float]:
        r, v, values = self.r, self.v, {}
        for i in tensor:
            if not (abs(r[i]) > m.tau and r[i] ** 2 > m.alpha * v[i]):
                v[i] *= m.zeta
                continue
            values[i] = math.copysign(m.tau, r[i])
            before, r[i] = abs(r[i]), r[i] - values[i]
            used = before if m.correction == "before" else abs(r[i])
            if m.correction != "none":
                v[i] = max(v[i] - 2 * used * m.tau + m.tau**2, 0.0)
            v[i] *= m.zeta if m.decay else 1.0
        return values

    def step(self, g: Tensor, s: Tensor, tensors: list[range]) -> dict[int, float]:
        self.r = [a + b for a, b in zip(self.r, g.tolist())]
        self.v = [a + b for a, b in zip(self.v, s.tolist())]
        sent: dict[int, float] = {}
        for tensor in tensors:
            sent |= self.vgc(self.method, tensor) if isinstance(self.method, batched.VGC) else {}
            sent |= self.hybrid(self.method, tensor) if isinstance(self.method, batched.Hybrid) else {}
        return {i: value for i, value in sent.items() if value}


@pytest.mark.parametrize(
    "method",
    [
        batched.VGC(alpha=1.5),
        batched.VGC(alpha=1.5, exponents="all"),
        batched.VGC(alpha=1.5, residual="small"),
        batched.VGC(alpha=1.5, exponents="all", residual="small"),
        batched.VGC(alpha=1.5, residual="keep"),
        batched.Hybrid(tau=0.05, alpha=2.0),
        batched.Hybrid(tau=0.05, alpha=2.0, correction="after"),
        batched.Hybrid(tau=0.05, alpha=2.0, correction="none"),
        batched.Hybrid(tau=0.05, alpha=2.0, decay=True),
    ],
    ids=str,
)
def test_every_variant_is_its_loop_over_components(method: batched.VGC | batched.Hybrid) -> None:
    workers, numel = 2, LAYOUT.numel
    shared = buffers(workers)
    state = method.init(shared, 0)
    ends = [0, 1050, 1055, 2655, 2656]
    tensors = [range(a, b) for a, b in itertools.pairwise(ends)]
    loops = [Loop(method, numel) for _ in range(workers)]
    generator = torch.Generator().manual_seed(4)
    mean, count = 0.3 * torch.randn(numel, generator=generator), 0
    for _ in range(8):
        samples = 0.02 * (mean + torch.randn(workers, 4, numel, generator=generator))
        samples *= torch.logspace(-2, 2, 50).repeat(numel)[:numel]
        g, s = samples.sum(1), samples.square().sum(1)
        assert shared.squares is not None
        for (_, _, a, b), tensor in zip(LAYOUT.spans(), tensors):
            shared.gradient[:, a:b], shared.squares[:, a:b] = (t[:, tensor.start : tensor.stop] for t in (g, s))
        method.step(shared, state)
        wanted = torch.zeros(workers, numel)
        for worker, loop in enumerate(loops):
            for i, value in loop.step(g[worker], s[worker], tensors).items():
                wanted[worker, i] = value
        assert torch.allclose(LAYOUT.packed(shared.mean), wanted.mean(0), rtol=1e-6, atol=0)
        assert int(shared.words) == int((wanted != 0).sum())
        count += int(shared.words)
    for name in ("r", "v"):
        held = torch.tensor([getattr(loop, name) for loop in loops])
        assert torch.allclose(LAYOUT.packed(state[name]), held, rtol=1e-4, atol=1e-5)
    assert count > 1000


def test_weight_decay_before_compression_is_a_term_of_every_samples_loss() -> None:
    generator = torch.Generator().manual_seed(0)
    shares = torch.randn(3, 5, 40, generator=generator) / 5  # (workers, samples, n): parts of the mean gradient
    params = torch.randn(40, generator=generator)
    g, s = shares.sum(1), shares.square().sum(1)
    train._decay_first(params, g, s, 0.1, 5)
    with_term = shares + 0.1 * params / 5
    assert torch.allclose(g, with_term.sum(1), atol=1e-6)
    assert torch.allclose(s, with_term.square().sum(1), atol=1e-6)
    job = methods.Job("vgc_1.5_decay")
    assert job.config(2, 1e-3).decay == "before"
    assert methods.Job("vgc_1.5").config(2, 1e-3).decay == "after"


def test_qsgd_readings_differ_in_what_they_count() -> None:
    """Gaussian gradients, non-zeros as known for each reading: 2 bits over 128, 4 bits over 512."""
    shared = dataclasses.replace(buffers(8), squares=None)
    shared.gradient.copy_(torch.randn(8, LAYOUT.padded, generator=torch.Generator().manual_seed(0)))
    torch.manual_seed(1)  # not the stream of the gradients
    for name, wanted in (("qsgd_2bit", 7.1), ("qsgd_4bit", 3.5), ("qsgd_2bit_less", 14.1), ("qsgd_2bit_max", 1.9)):
        method = methods.METHODS[name]
        method.step(shared, method.init(shared, 0))
        assert 8 * LAYOUT.padded / int(shared.words) == pytest.approx(wanted, rel=0.05), name


def test_qsgd_is_unbiased_and_counts_non_zeros() -> None:
    method = batched.QSGD(bits=3, bucket=128)
    shared = buffers(8)
    shared.gradient.copy_(torch.randn(8, LAYOUT.padded, generator=torch.Generator().manual_seed(0)))
    state = method.init(shared, 0)
    torch.manual_seed(0)
    total, repeats = torch.zeros(LAYOUT.padded), 400
    for _ in range(repeats):
        method.step(shared, state)
        total += shared.mean
    wanted = shared.gradient.mean(0)
    spread = shared.gradient.square().mean().sqrt() * (128**0.5 / 4 / 8 / repeats) ** 0.5  # a generous deviation of the mean
    assert float((total / repeats - wanted).abs().max()) < 8 * float(spread)
    assert 0 < int(shared.words) < 8 * LAYOUT.padded


def test_power_sgd_keeps_a_matrix_of_its_rank() -> None:
    method = batched.PowerSGD(rank=2, workers=4)
    shared = dataclasses.replace(buffers(1), squares=None)
    generator = torch.Generator().manual_seed(0)
    view = LAYOUT.views(shared.gradient)["c"][0]
    view.copy_(torch.randn(40, 2, generator=generator) @ torch.randn(2, 40, generator=generator))
    state = method.init(shared, 0)
    for _ in range(2):
        state["r"].zero_()
        method.step(shared, state)
    assert torch.allclose(LAYOUT.views(shared.mean)["c"], view / 4, atol=1e-4)
    assert method.words(LAYOUT) == 2 * (3 + 350) + 5 + 2 * 80 + 1


@pytest.mark.parametrize("scale", ["global", "chunk"])
def test_error_feedback_with_dithering_loses_nothing(scale: Literal["global", "chunk"]) -> None:
    method = batched.SparseDithering(alpha=0.5, scale=scale)
    shared = buffers(8)
    state = method.init(shared, 0)
    given, received = torch.zeros(LAYOUT.padded), torch.zeros(LAYOUT.padded)
    for step in range(5):
        for view in LAYOUT.views(shared.gradient).values():
            view.copy_(torch.randn(view.shape, generator=torch.Generator().manual_seed(step)))
        method.step(shared, state)
        given += shared.gradient.mean(0)
        received += shared.mean
        assert 0 < int(shared.words) < 8 * LAYOUT.numel
    assert torch.allclose(received + state["r"].mean(0), given, atol=1e-5)


@pytest.mark.parametrize("scale", ["global", "chunk"])
def test_dithering_has_the_error_it_is_asked_for(scale: Literal["global", "chunk"]) -> None:
    layout = Layout.of({"small": (70, 1000), "large": (130, 1000)})
    shared = batched.Buffers(
        layout, torch.zeros(2, layout.padded), None, torch.zeros(layout.padded), torch.zeros(1, dtype=torch.int64)
    )
    views = layout.views(shared.gradient)
    for size, view in zip((1.0, 1000.0), views.values()):
        view.copy_(size * torch.randn(view.shape, generator=torch.Generator().manual_seed(3)))
    method = batched.SparseDithering(alpha=0.3, scale=scale)
    state = method.init(shared, 0)
    method.step(shared, state)
    for worker in range(2):
        error = float(state["r"][worker].square().sum() / shared.gradient[worker].square().sum())
        assert 0.15 < error < 0.33  # a grid of steps, judged on a sample
    small = layout.views(shared.mean)["small"]
    assert bool(small.any()) == (scale == "chunk")  # one step for all is far too coarse for it


def test_a_small_run_learns_and_writes_bytes(tmp_path: Path) -> None:
    options = ["--data", "digits", "--device", "cpu", "--out", str(tmp_path), "--epochs", "6", "--encode-every", "20"]
    run.main([*options, "--method", "vgc_1"])
    found = json.loads((tmp_path / "adam_vgc_1_e6_s0.json").read_text())
    assert found["accuracy"] > 60
    assert found["ratio_words"] > 2
    samples = found["encoded"]["samples"]
    assert len(samples) == 3
    for sample in samples:
        assert sample["differing"] == 0
        assert sample["compact"] < sample["paper"]
        ideal = sample["entropy"]
        assert ideal["places_by_tensor"] < ideal["places"]
        assert 8 * sample["compact"] < 1.05 * (ideal["places"] + ideal["values"])
    assert (tmp_path / "adam_vgc_1_e6_s0.json").stat().st_size < 200_000
    results = report.read(tmp_path)
    assert "VGC, alpha = 1 |" in report.table(results)
    assert "120.7" not in report.table(results)  # published for CIFAR-10 only
    assert "120.7" in report.table([{**results[0], "data": "cifar10"}])
    report.main(tmp_path)
    assert {p.name for p in tmp_path.glob("*.png")} == {"curves_digits_6.png", "scatter_digits_6.png"}
    text = (tmp_path / "table.md").read_text()
    assert "differ from the batched step's in 0 of" in text
    assert "### Bits against entropy" in text
    bits = report.Bits.of(results[0])
    assert bits is not None
    # Places are not spread evenly, so a message may be a little shorter than the entropy of evenly spread ones.
    assert -0.1 < bits.above < bits.above_by_tensor < 0.08
    assert f"| {100 * bits.above:+.1f} % |" in text


def made_up(row: str, accuracy: float, ratio: float, seed: int = 0, **config: Any) -> report.Result:
    """A result file's content as far as tables read it."""
    sample = {"sent": 100, "compact": 130, "entropy": {"places": 900.0, "values": 100.0, "places_by_tensor": 880.0}}
    return {
        "row": row,
        "parameters": 100 * ratio,
        "data": "cifar10",
        "config": {"optimiser": "adam", "lr": 1e-3, "epochs": 50, "seed": seed, "workers": 8, "batch": 64, **config},
        "accuracy": accuracy,
        "diverged": False,
        "ratio_words": ratio,
        "curve": {"accuracy": [accuracy], "ratio": [ratio]},
        "seconds": {"epoch": 1.0},
        "encoded": {"every": 200, "samples": [sample] * 3, "paper": {"ratio": ratio}, "compact": {"ratio": 2.5 * ratio}},
        "machine": "a machine",
        "date": "2026-01-01",
    }


def test_tables_keep_settings_apart_and_say_what_was_found() -> None:
    runs = [made_up("none", 87.0 + seed, 1.0, seed) for seed in range(3)]
    runs += [made_up("vgc_1.5", 86.0 + 2 * seed, 450.0, seed) for seed in range(3)]
    runs += [made_up("vgc_1.5_keep", 86.5 + 2 * seed, 400.0, seed) for seed in range(3)]
    runs += [made_up("none", 80.0, 1.0, init="torch"), made_up("vgc_1.5", 79.0, 300.0, init="torch")]
    text = report.table(runs)
    assert text.count("###") == 2
    assert "| VGC, alpha = 1.5 | 88.00 [86.00 90.00] | 88.9 | 88.00 | +0.00 | +0.8 | 450.0 | 453.3 |" in text
    assert "| 1,125.0 | 281.2 | 40 % |" in text  # a message goes to seven others; an all-reduce sends 2 * 7/8 of the gradient
    assert "torch's initialisation" in text
    found = report.checks(runs)
    assert "| VGC 1.5 (Adam) is as accurate as none | 88.00 / 88.00: yes | 79.00 / 80.00: **no** |" in found
    assert "| VGC 1.5: 445 parameters per word | 450.0: yes | 300.0: **no** |" in found
    assert "| VGC: bits within 5 % of the entropy | +4.0 %: yes | +4.0 %: yes |" in found
    assert "| ratios rise with alpha |  |  |" in found
    assert "| rounding errors kept | 88.5 [86.5 90.5] | +0.50 ± 0.00 | 400.0 (0.89) |" in report.variants_table(runs)
    assert [report.Setting.of(r).tag for r in runs[-3:]] == ["", "_torch", "_torch"]


def test_what_leaves_a_worker_counts_all_steps_and_all_receivers() -> None:
    vgc = made_up("vgc_2", 80.0, 400.0, workers=16)
    vgc["parameters"] = 80_000  # 200 values per message, of which the samples have 100
    assert report._leaves(vgc) == pytest.approx(2.5 * 400 / 2 * 2 / 16)
    alone = made_up("local_14", 80.0, 0.0, workers=16)
    alone |= {"ratio_words": None, "encoded": {"every": 200, "samples": [], "compact": {"ratio": 700.0}}}
    assert report._leaves(alone) == 700.0
    text = report.second([made_up("none", 81.0, 1.0), alone])
    assert "| 14 local steps, `dithered_trellis(omega=1)` | 80.00 |" in text


def test_the_block_between_marks_is_replaced() -> None:
    text = f"before\n{report.MARKS[0]}\nold\n{report.MARKS[1]}\nafter\n"
    once = report.fill(text, "new")
    assert "old" not in once
    assert report.fill(once, "new") == once
    assert once.startswith("before")
    assert once.endswith("after\n")
    with pytest.raises(ValueError, match="marks"):
        report.fill("nothing", "new")


def test_momentum_takes_the_rate_of_the_best_uncompressed_run(tmp_path: Path) -> None:
    for lr, accuracy, diverged in ((0.1, 80.0, False), (0.2, 90.0, False), (0.4, 99.0, True)):
        entry = {"accuracy": accuracy, "diverged": diverged, "config": {"lr": lr, "seed": 0}}
        (tmp_path / f"momentum_none_lr{lr:g}_s0.json").write_text(json.dumps(entry))
    assert run.rate_of(methods.Job("vgc_2", "momentum"), tmp_path) == 0.2
    longer = methods.Job("vgc_2", "momentum", init="torch", epochs=100)
    assert run.rate_of(longer, tmp_path) == 0.2  # none of its length yet
    entry = {"accuracy": 70.0, "diverged": False, "config": {"lr": 0.1, "seed": 0}}
    (tmp_path / "momentum_none_lr0.1_torch_e100_s0.json").write_text(json.dumps(entry))
    assert run.rate_of(longer, tmp_path) == 0.1
    assert longer.name == "momentum_vgc_2_torch_e100_s0"
    assert run.rate_of(methods.Job("vgc_2"), tmp_path) == methods.ADAM_LR
    assert run.rate_of(methods.Job("none", "momentum", lr=0.05), tmp_path) == 0.05


def test_a_learning_rate_is_halved_and_warmed_up() -> None:
    config = train.Config(batched.Dense(), optimiser="momentum", lr=0.4, halve_every=5.0, lr_warmup=2.0)
    assert config.rate(1.0) == pytest.approx(0.2)
    assert config.rate(4.9) == pytest.approx(0.4)
    assert config.rate(12.0) == pytest.approx(0.1)


def test_cifar_is_read_in_both_forms_and_refused_otherwise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import pickle

    import numpy as np

    monkeypatch.setattr(data, "RECORDS", {})
    rng = np.random.default_rng(0)
    (tmp_path / "bin").mkdir()
    (tmp_path / "py" / "cifar-10-batches-py").mkdir(parents=True)
    for name in data.BATCHES:
        records = rng.integers(0, 256, (20, 3073), dtype=np.uint8)
        records[:, 0] %= 10
        records.tofile(tmp_path / "bin" / f"{name}.bin")
        content = {b"labels": records[:, 0].tolist(), b"data": records[:, 1:]}
        (tmp_path / "py" / "cifar-10-batches-py" / name).write_bytes(pickle.dumps(content))
    a, b = data.cifar10(tmp_path / "bin"), data.cifar10(tmp_path / "py")
    assert a.x.shape == (100, 32, 32, 3)
    assert torch.equal(a.x, b.x)
    assert torch.equal(a.y_test, b.y_test)
    with pytest.raises(FileNotFoundError, match=r"data_batch_1\.bin"):
        data.cifar10(tmp_path)
    monkeypatch.setattr(data, "RECORDS", {"test_batch": "0" * 64})
    with pytest.raises(ValueError, match="SHA-256"):
        data.cifar10(tmp_path / "bin")


def test_the_entropy_is_that_of_a_message_written_out() -> None:
    spec = LAYOUT.spec
    decoded = torch.zeros(spec.numel)
    decoded[[0, 1, 2, 1049]] = torch.tensor([4.0, -2.0, 2.0, 4.0])
    decoded[1050:1053] = torch.tensor([0.5, 0.5, -0.25])  # relative to 4 and 0.5: 1, -1/2, 1/2, 1 | 1, 1, -1/2
    found = wire.entropy(decoded, spec)
    assert found["places"] == pytest.approx(sum(math.log2((spec.numel - i) / (i + 1)) for i in range(7)), abs=0.06)
    assert found["places_by_tensor"] == pytest.approx(theory.log2_binomial(1050, 4) + theory.log2_binomial(5, 3), abs=0.06)
    assert found["values"] == pytest.approx(4 * math.log2(7 / 4) + 2 * math.log2(7 / 2) + math.log2(7), abs=0.06)
    assert wire.entropy(torch.zeros(spec.numel), spec) == {}
    assert wire.entropy(torch.randn(spec.numel), spec) == {}  # as many values as coordinates: no code of few symbols


def test_states_are_restored_by_role() -> None:
    import tersegrad

    spec = tersegrad.Spec.flat(4)
    compressor = tersegrad.parse("error_feedback(top_k(fraction=0.5))")
    state = wire.restored(compressor.init(spec, "cpu"), {"r": torch.arange(4.0)})
    assert state.residual.tolist() == [0.0, 1.0, 2.0, 3.0]


def test_the_collector_fills_the_same_buffers() -> None:
    """An ordinary model with the package's collector gives the gradients and squares of the hand-written pass."""
    from experiments.variance_based.engine import Collected, OnePass, twin

    net = tiny(norm=True)
    workers, generator = 2, torch.Generator().manual_seed(2)
    x = torch.randn(8, 3, 4, 4, generator=generator).contiguous(memory_format=torch.channels_last)
    labels = torch.randint(0, 3, (8,), generator=generator)
    layout = net.layout
    params = torch.zeros(layout.padded)
    net.init(params, 0)
    found = []
    for engine in (OnePass(net), Collected(twin(net))):
        assert [s for _, s in engine.layout.shapes] == [s for _, s in layout.shapes]
        zeros = torch.zeros(workers, layout.padded)
        shared = batched.Buffers(layout, zeros.clone(), zeros.clone(), params.clone(), torch.zeros(1, dtype=torch.int64))
        engine.bind(params.clone(), shared, workers, "moments")
        with torch.no_grad():
            loss = engine.step(x, labels)
        found.append((float(loss), shared, engine.forward(x), [t.float().sum() for t in engine.changing() if t.dim()]))
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-5)
    assert torch.allclose(found[0][1].gradient, found[1][1].gradient, atol=1e-6)
    squares = [f[1].squares for f in found]
    assert squares[0] is not None
    assert squares[1] is not None
    assert torch.allclose(squares[0], squares[1], atol=1e-8, rtol=1e-4)
    assert torch.allclose(found[0][2], found[1][2], atol=1e-5)  # with the running statistics
    assert torch.allclose(torch.stack(found[0][3]), torch.stack(found[1][3]), atol=1e-5)


def test_resnet_trains_from_a_folder(tmp_path: Path) -> None:
    import numpy as np
    from experiments.variance_based import imagenet
    from PIL import Image

    rng = np.random.default_rng(0)
    for part, count in (("train", 8), ("val", 3)):
        for label, colour in (("a", 60), ("b", 190)):
            place = tmp_path / part / label
            place.mkdir(parents=True)
            for i in range(count):
                pixels = np.clip(rng.normal(colour, 30, (20, 24, 3)), 0, 255).astype(np.uint8)
                Image.fromarray(pixels).save(place / f"{i}.png")
    options = f"--data {tmp_path} --out {tmp_path} --epochs 2 --workers 4 --batch 2 --size 16 --depths 1 1 1 1 --width 4"
    found = imagenet.main([*options.split(), "--loaders", "0", "--device", "cpu", "--encode-every", "2", "--method", "vgc_2"])
    assert [len(values) for values in found["curve"].values()] == [2, 2, 2]
    assert found["ratio_words"] > 1
    assert found["encoded"]["compact"]["bytes"] > 0
    assert (tmp_path / "imagenet_vgc_2_s0.json").is_file()
    with pytest.raises(FileNotFoundError, match="train"):
        imagenet.main(["--data", str(tmp_path / "nothing")])


def test_the_full_network_for_imagenet_has_its_published_size() -> None:
    from experiments.variance_based.resnet import resnet

    with torch.device("meta"):
        assert sum(p.numel() for p in resnet(1000).parameters()) == 25_557_032


def made_of_64(tmp_path: Path, count: int) -> Path:
    import numpy as np

    images = data.made(count, side=64)
    path = tmp_path / "made.npz"
    parts = {"x": images.x, "y": images.y, "x_test": images.x_test[:8], "y_test": images.y_test[:8]}
    np.savez(path, **{name: tensor.numpy() for name, tensor in parts.items()})  # type: ignore[arg-type]
    return path


def test_the_residual_network_trains_on_arrays(tmp_path: Path) -> None:
    images = data.load(str(made_of_64(tmp_path, 16)))
    small = {**methods.RESNET, "workers": 2, "batch": 4, "depths": (1, 1, 1, 1), "width": 4, "encode_every": 1}
    job = methods.Job("vgc_2", "momentum", lr=0.05)
    result, sampler = train.train(job.config(2, 0.05, **small), images, "cpu")
    concurrent.futures.wait(sampler.futures)
    wire.close()
    found = sampler.result()
    # What the package's compressor leaves behind is what the batched step left.
    assert [sample["differing"] for sample in found["samples"]] == [0, 0, 0, 0]
    assert found["compact"]["ratio"] > found["paper"]["ratio"] > 1
    assert result["steps"] == 4


def test_training_images_move_and_flip(tmp_path: Path) -> None:
    images = data.load(str(made_of_64(tmp_path, 16)))
    small = {**methods.RESNET, "workers": 2, "batch": 4, "depths": (1, 1, 1, 1), "width": 4}
    torch.manual_seed(0)
    trainer = train.Trainer(methods.Job("none").config(1, 0.1, **small), images, "cpu")
    indices = torch.arange(8)
    plain, moved = trainer.batch(indices, trainer.images.x), trainer.training_batch(indices)
    assert moved.shape == plain.shape

    def candidates(x: Tensor) -> list[Tensor]:
        """A picture moved by up to eight pixels, its border repeated, both ways round."""
        wide = F.pad(x[None], (8, 8, 8, 8), mode="replicate")[0]
        shifted = [wide[:, dy : dy + 64, dx : dx + 64] for dy in range(17) for dx in range(17)]
        return shifted + [one.flip(2) for one in shifted]

    found = [any(torch.allclose(one, other) for other in candidates(x)) for x, one in zip(plain, moved)]
    assert all(found)
    assert sum(torch.allclose(x, one) for x, one in zip(plain, moved)) < 4
    still = train.Trainer(methods.Job("none").config(1, 0.1, **{**small, "shifts": 0}), images, "cpu")
    assert torch.equal(still.training_batch(indices), plain)


def test_tiny_imagenet_is_read_from_its_folder(tmp_path: Path) -> None:
    import numpy as np
    from PIL import Image

    for number, name in enumerate(("n01", "n02", "n03")):
        place = tmp_path / "train" / name / "images"
        place.mkdir(parents=True)
        for i in range(2):
            Image.fromarray(np.full((64, 64, 3), 40 * number + i, dtype=np.uint8)).save(place / f"{i}.png")
    (tmp_path / "val" / "images").mkdir(parents=True)
    rows = [("a.png", "n02"), ("b.png", "n03"), ("c.png", "n01")]
    for i, (file, _) in enumerate(rows):
        Image.fromarray(np.full((64, 64), 100 + i, dtype=np.uint8)).save(tmp_path / "val" / "images" / file)
    (tmp_path / "val" / "val_annotations.txt").write_text("".join(f"{file}\t{name}\t0\t0\t1\t1\n" for file, name in rows))
    found = data.tiny_imagenet(tmp_path, classes=2)
    assert found["y"].tolist() == [0, 0, 1, 1]
    assert found["x"][:, 0, 0, 0].tolist() == [0, 1, 40, 41]
    assert found["y_test"].tolist() == [1, 0]
    assert found["x_test"][:, 0, 0, 2].tolist() == [100, 102]
    np.savez(tmp_path / "part.npz", x=found["x"])
    with pytest.raises(ValueError, match="lacks x_test, y, y_test"):
        data.load(str(tmp_path / "part.npz"))


def test_a_rate_that_falls_along_a_wave() -> None:
    config = train.Config(batched.Dense(), lr=0.2, epochs=10, cosine=True, lr_warmup=2.0)
    assert config.rate(5) == pytest.approx(0.1)
    assert config.rate(10) == pytest.approx(0.0)
    assert config.rate(1) == pytest.approx(0.5 * 0.2 * (0.5 + 0.5 * math.cos(math.pi / 10)))

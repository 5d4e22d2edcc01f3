"""PowerSGD with coded factors in the variance-based experiment, against the package's exchange and its messages."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from experiments.variance_based import codes, data, methods, train
from experiments.variance_based.batched import Buffers
from experiments.variance_based.factors import CodedPowerSGD, Counted
from experiments.variance_based.layout import Layout
from torch import Tensor

import tersegrad
from tersegrad import Context
from tersegrad.exchange import scheme, virtual

WORKERS = 4
LAYOUT = Layout.of({"conv": (24, 3, 3, 20), "bias": (33,), "small": (2, 2), "wide": (40, 90)})


def buffers_of(layout: Layout) -> Buffers:
    rows = torch.zeros(WORKERS, layout.padded)
    return Buffers(layout, rows, None, torch.zeros(layout.padded), torch.zeros(1, dtype=torch.int64))


def gradients(seed: int) -> Tensor:
    """Those of all workers: a common part of low rank and a part of each worker's own."""
    g = torch.Generator().manual_seed(seed)
    rows = torch.randn(WORKERS, LAYOUT.numel, generator=g) * 0.3
    return rows + torch.randn(LAYOUT.numel, generator=torch.Generator().manual_seed(0))


def test_a_fine_code_gives_what_the_package_gives() -> None:
    method = CodedPowerSGD(2, "subtractive_dithering(omega=1e-9)")
    buffers = buffers_of(LAYOUT)
    state = method.init(buffers, 0)
    exchange, spec = scheme("power_sgd(rank=2)").make(tersegrad.parse("identity")), LAYOUT.spec
    kept: Any = virtual.init(exchange, spec, WORKERS)
    for place in method.places(LAYOUT):  # both start from the same factors
        if place.rows:
            (q,) = (s.q for j, s in kept[0].states if spec.pieces[j].name == place.name)
            state["q"][place.q : place.q + q.numel()] = q.flatten()
    for step in range(4):
        given = gradients(step)
        for row, packed in zip(buffers.gradient, given):
            LAYOUT.unpack(packed, row)
        method.step(buffers, state)
        outcome = virtual.run(exchange, list(given), kept, spec, Context(step=step))
        kept = list(outcome.states)
        torch.testing.assert_close(LAYOUT.packed(buffers.mean), outcome.mean, rtol=2e-3, atol=2e-3)
        for row, ours in zip(LAYOUT.packed(state["r"]), kept):
            at = 0
            residuals = {j: s.residual for j, s in ours.states}
            for j, piece in enumerate(spec.pieces):
                wanted = residuals.get(j, torch.zeros(piece.numel))  # what is no matrix has none there
                torch.testing.assert_close(row[at : at + piece.numel], wanted, rtol=2e-3, atol=2e-3)
                at += piece.numel


def test_the_errors_that_are_added_are_those_of_the_code() -> None:
    """Uniform, so that the mean of n squares lies within 5 standard deviations, 5 sqrt(0.8/n) of itself."""
    numel, omega = 64 * 200 * WORKERS, 0.3
    ends, part_of_unit = codes.parts(numel, WORKERS)
    scales = torch.tensor([1.0, 1e-3, 0.0, 50.0]).repeat_interleave(numel // WORKERS)
    x = torch.randn(2, numel, generator=torch.Generator().manual_seed(1)) * scales
    torch.manual_seed(2)
    error = codes.decoded(x, ends, part_of_unit, omega) - x
    for part, given in zip(error.chunk(WORKERS, 1), x.chunk(WORKERS, 1)):
        square = given.square().sum(1) * omega
        found = part.square().sum(1)
        assert torch.allclose(found, square, rtol=5 * (0.8 / given.shape[1]) ** 0.5, atol=0.0)
        sizes = given.norm(dim=1) * part.norm(dim=1)
        assert ((given * part).sum(1).abs() <= 5 * sizes / given.shape[1] ** 0.5 + 1e-30).all()


@pytest.mark.parametrize("factors", ["subtractive_dithering(omega=0.2)", "dithered_trellis(omega=0.2)"])
def test_messages_err_as_steps_do(factors: str) -> None:
    method = CodedPowerSGD(4, factors)
    buffers = buffers_of(LAYOUT)
    state = method.init(buffers, 0)
    counted = Counted(method, LAYOUT, state, 0, 30)
    assert len(counted.due) == method.SAMPLES
    torch.manual_seed(0)
    for step in range(6):
        for row, packed in zip(buffers.gradient, gradients(step)):
            LAYOUT.unpack(packed, row)
        method.step(buffers, state)
        counted.take(step)
    for name, spec in counted.specs.items():
        messages, steps = (sum(s[name][kind] for s in counted.samples) for kind in ("error", "error of the step"))
        assert 0.8 < messages / steps < 1.25
        bits = 8 * counted.samples[-1][name]["sent"] / (2 * (WORKERS - 1)) / spec.numel
        assert 1 < bits < 8  # parts of 64 coordinates
    assert counted.message_bytes() == pytest.approx(
        sum(s[name]["sent"] for s in counted.samples for name in counted.specs) / 6 / (2 * (WORKERS - 1))
    )


def test_a_run_reports_the_bytes_of_its_messages() -> None:
    images = data.made(WORKERS * 3 * 2, side=64)
    changes = {**methods.RESNET, "workers": WORKERS, "batch": 3, "depths": (1, 1, 1, 1), "width": 4, "shifts": 0}
    config = methods.Job("none", "momentum", lr=0.05).config(2, 0.05, **changes, encode_every=1)
    config = dataclasses.replace(config, method=CodedPowerSGD(1, "subtractive_dithering(omega=0.2)"))
    result, sampler = train.train(config, images, "cpu", lambda text: None)
    assert len(result["factors"]) == 4
    ratio = sampler.result()["compact"]["ratio"]
    assert result["ratio_words"] < ratio < 32 * result["ratio_words"]
    assert not result["diverged"]

"""Gate, clipping and means over senders."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import tersegrad
from tersegrad.core.errors import BadConfiguration
from tersegrad.core.protocol import Context, Piece, Spec, decode_sent, restore
from tersegrad.exchange import scheme, virtual

SPEC = Spec((Piece((8, 16), 0, 128, "a"), Piece((40,), 0, 40, "b")))


def gaussian(seed: int, d: int = SPEC.numel) -> Tensor:
    return torch.randn(d, generator=torch.Generator().manual_seed(seed))


def exchanged(how: str, text: str, xs: list[Tensor], spec: Spec = SPEC) -> tuple[Tensor, Any]:
    exchange = scheme(how).make(tersegrad.parse(text))
    outcome = virtual.run(exchange, xs, virtual.init(exchange, spec, len(xs)), spec, Context(seed=1))
    return outcome.mean, exchange


def test_the_plain_text_form_is_as_before_and_options_are_checked() -> None:
    assert str(scheme("all_gather")) == "all_gather"
    assert str(scheme("all_gather(mean=senders, clip=median, gate=10)")) == "all_gather(mean=senders, clip=median, gate=10)"
    for bad in ("mean=all", "clip=mean", "gate=0.5"):
        with pytest.raises(BadConfiguration, match=bad.split("=")[0]):
            scheme(f"all_gather({bad})")


def test_disjoint_sets_differ_by_the_number_of_workers() -> None:
    xs = []
    for rank in range(4):
        x = torch.zeros(SPEC.numel)
        x[rank::4] = gaussian(rank)[rank::4]
        xs.append(x)
    over_workers, _ = exchanged("all_gather", "identity", xs)
    over_senders, _ = exchanged("all_gather(mean=senders)", "identity", xs)
    torch.testing.assert_close(over_senders, 4 * over_workers)
    torch.testing.assert_close(over_senders, sum(xs[1:], xs[0]))


def test_coordinates_that_several_sent_are_averaged_over_them() -> None:
    a, b, c = torch.zeros(168), torch.zeros(168), torch.zeros(168)
    a[:3] = torch.tensor([1.0, 2, 3])
    b[1:4] = torch.tensor([4.0, 5, 6])
    mean, _ = exchanged("all_gather(mean=senders)", "identity", [a, b, c])
    assert mean[:5].tolist() == [1, 3, 4, 6, 0]


def test_updates_are_clipped_to_the_median_norm_of_each_tensor() -> None:
    xs = [gaussian(rank) * (1 + 9 * (rank == 2)) for rank in range(4)]
    mean, _ = exchanged("all_gather(clip=median)", "identity", xs)
    parts = []
    for a, b in ((0, 128), (128, 168)):
        norms = [float(x[a:b].double().norm()) for x in xs]
        median = sorted(norms)[1]
        parts.append(torch.stack([x[a:b] * min(1.0, median / n) for x, n in zip(xs, norms)]).mean(0))
    torch.testing.assert_close(mean, torch.cat(parts))


@pytest.mark.parametrize("bad", [math.nan, math.inf, 1e20])
def test_the_gate_leaves_out_who_sends_nonsense_and_says_so(bad: float) -> None:
    xs = [gaussian(rank) for rank in range(5)]
    xs[3] = torch.full_like(xs[3], bad)
    mean, exchange = exchanged("all_gather(gate=10)", "chunk_top_k(chunk=16, k=16)", xs)
    torch.testing.assert_close(mean, sum(x for rank, x in enumerate(xs) if rank != 3) / 4)
    assert exchange.left_out.steps == {3: 1}
    plain, _ = exchanged("all_gather", "chunk_top_k(chunk=16, k=16)", xs)
    assert not math.isfinite(bad) or float(plain.abs().max()) > 1e18


def test_where_nobody_is_left_the_update_says_so() -> None:
    mean, exchange = exchanged("all_gather(gate=10)", "bf16", [torch.full((168,), math.nan)] * 3)
    assert bool(mean.isnan().all())
    assert exchange.left_out.steps == {0: 1, 1: 1, 2: 1}


def test_senders_of_a_coefficient_are_counted_before_the_transform_back() -> None:
    spec = Spec((Piece((64, 64), 0, 4096),))
    xs, text = [gaussian(rank, 4096) for rank in range(3)], "error_feedback(dct(chunk_top_k(k=200)), decay=0.9)"
    for whole in (text, f"by_tensor({text}, small=bf16)"):
        mean, _ = exchanged("all_gather(mean=senders)", whole, xs, spec)
        c = tersegrad.parse(text)
        sent = [decode_sent(c, c.encode(x, spec, c.init(spec, "cpu"), Context())[0], spec, Context()) for x in xs]
        number = sum((s != 0).float() for s in sent)
        assert float(number.max()) > 1  # type: ignore[union-attr]
        coefficients = sum(sent) / number.clamp(min=1)  # type: ignore[union-attr]
        torch.testing.assert_close(mean, restore(c, coefficients, spec))

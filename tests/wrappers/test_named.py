"""Named methods send what is published: each update is written here a second time, from its description."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import tersegrad
from tersegrad.core.protocol import Context, Piece, Spec, decode_sent
from tersegrad.exchange import scheme, virtual
from tersegrad.integrations import outer

SHAPES = {"w": (128, 192), "odd": (96, 50), "bias": (192,)}
SPEC = Spec(tuple(Piece(shape, 0, math.prod(shape), name) for name, shape in SHAPES.items()))


def gaussian(seed: int) -> Tensor:
    return torch.randn(SPEC.numel, generator=torch.Generator().manual_seed(seed)) * 0.01


def by_tensor(x: Tensor) -> dict[str, Tensor]:
    return {n: part.view(s) for (n, s), part in zip(SHAPES.items(), x.split([math.prod(s) for s in SHAPES.values()]))}


def largest(n: int) -> int:
    return max(d for d in range(1, 65) if n % d == 0)


def to_tiles(x: Tensor) -> Tensor:
    if x.dim() == 1:
        return x.view(-1, largest(x.numel()))
    h, w = largest(x.shape[0]), largest(x.shape[1])
    return x.view(x.shape[0] // h, h, x.shape[1] // w, w).permute(0, 2, 1, 3).reshape(-1, h, w).flatten(1)


def from_tiles(tiles: Tensor, shape: tuple[int, ...]) -> Tensor:
    if len(shape) == 1:
        return tiles.reshape(shape)
    h, w = largest(shape[0]), largest(shape[1])
    return tiles.view(shape[0] // h, shape[1] // w, h, w).permute(0, 2, 1, 3).reshape(shape)


def sparse_loco(e: Tensor) -> Tensor:
    """One tensor as SparseLoCo sends it, its sums in float64."""
    tiles = to_tiles(e)
    where = tiles.abs().topk(min(64, tiles.shape[1]), dim=1).indices
    v = tiles.gather(1, where)
    s = v.double().mean().float()
    c = v - s
    scale = (6 * (c.double().square().sum() / (v.numel() - 1)).sqrt() / 4).float()
    q = (c / scale + 2).round().clamp(0, 3).long()
    means = torch.stack([c[q == j].double().mean().float() for j in range(4)]).nan_to_num(0.0)
    return from_tiles(torch.zeros_like(tiles).scatter_(1, where, means[q] + s), tuple(e.shape))


def test_sparse_loco_over_several_rounds() -> None:
    c = tersegrad.parse("sparse_loco")
    state, e = c.init(SPEC, "cpu"), {n: torch.zeros(s) for n, s in SHAPES.items()}
    for round_ in range(3):
        g = gaussian(round_)
        message, state = c.encode(g, SPEC, state, Context(step=round_))
        decoded = by_tensor(c.decode(message, SPEC, Context(step=round_)))
        for name, part in by_tensor(g).items():
            e[name] = 0.95 * e[name] + part
            sent = sparse_loco(e[name])
            assert torch.equal(decoded[name], sent)
            e[name] = e[name] - sent


def test_the_outer_update_of_sparse_loco() -> None:
    """Each worker's values are scaled down to the median norm, and every coordinate is the mean over those who sent it."""
    given = outer.published("sparse_loco")
    exchange = scheme(given["exchange"]).make(tersegrad.parse(given["compressor"]))
    xs = [gaussian(10 + rank) * (1 + rank) for rank in range(5)]
    outcome = virtual.run(exchange, xs, virtual.init(exchange, SPEC, 5), SPEC, Context())
    for name, update in by_tensor(outcome.mean).items():
        sent = torch.stack([sparse_loco(by_tensor(x)[name]) for x in xs])
        norms = sent.flatten(1).norm(dim=1)
        factors = (norms.median() / norms).clamp(max=1.0)
        scaled = sent * factors.view(-1, *[1] * (sent.dim() - 1))
        expected = scaled.sum(0) / (sent != 0).sum(0).clamp(min=1)
        torch.testing.assert_close(update, expected, rtol=1e-4, atol=1e-8)


def cosine(n: int) -> Tensor:
    j, i = torch.arange(n, dtype=torch.float64).unsqueeze(1), torch.arange(n, dtype=torch.float64)
    rows = math.sqrt(2 / n) * torch.cos(math.pi * (2 * i + 1) * j / (2 * n))
    rows[0] /= math.sqrt(2)
    return rows


def coefficients(x: Tensor) -> Tensor:
    """The tiles of a tensor, transformed in both dimensions."""
    tiles = to_tiles(x.double())
    if x.dim() == 1:
        return tiles @ cosine(tiles.shape[1]).T
    h, w = largest(x.shape[0]), largest(x.shape[1])
    return (cosine(h) @ tiles.view(-1, h, w) @ cosine(w).T).flatten(1)


def back(tiles: Tensor, shape: tuple[int, ...]) -> Tensor:
    if len(shape) == 1:
        return from_tiles(tiles @ cosine(tiles.shape[1]), shape)
    h, w = largest(shape[0]), largest(shape[1])
    return from_tiles((cosine(h).T @ tiles.view(-1, h, w) @ cosine(w)).flatten(1), shape)


@pytest.mark.parametrize(("name", "decay", "k"), [("demo", 0.999, 32), ("distro", 0.995, 4)])
def test_demo_and_distro_over_several_steps(name: str, decay: float, k: int) -> None:
    """DeMo sends the coefficients; DisTrO their signs, which stand for the mean magnitude of what the tensor sends."""
    c = tersegrad.parse(name)
    state, delta = c.init(SPEC, "cpu"), {n: torch.zeros(s, dtype=torch.float64) for n, s in SHAPES.items()}
    for step in range(3):
        g = gaussian(20 + step)
        message, state = c.encode(g, SPEC, state, Context(step=step))
        decoded, sent = (
            by_tensor(c.decode(message, SPEC, Context(step=step))),
            by_tensor(decode_sent(c, message, SPEC, Context(step=step))),
        )
        for tensor, part in by_tensor(g).items():
            delta[tensor] = decay * delta[tensor] + part
            tiles = coefficients(delta[tensor])
            where = tiles.abs().topk(k, dim=1).indices
            values = tiles.gather(1, where)
            if name == "distro":
                scale = values.abs().mean().bfloat16().double()
                values = values.sign() * scale
            kept = torch.zeros_like(tiles).scatter_(1, where, values)
            assert torch.equal(to_tiles(sent[tensor]) != 0, kept != 0)
            update = back(kept, SHAPES[tensor])
            torch.testing.assert_close(decoded[tensor].double(), update, rtol=0, atol=1e-7)
            delta[tensor] = delta[tensor] - update


def test_streaming_diloco_sends_signs_and_exponents() -> None:
    x = gaussian(30)
    result = tersegrad.roundtrip(tersegrad.parse("streaming_diloco"), x)
    assert 4 <= result.bits_per_coordinate <= 4.13
    for a in range(0, x.numel(), 256):
        block, got = x[a : a + 256], result.decoded[a : a + 256]
        levels = torch.cat((torch.zeros(1), block.abs().max() * 2.0 ** -torch.arange(7)))
        nearest = levels[(block.abs().unsqueeze(1) - levels).abs().argmin(1)] * block.sign()
        torch.testing.assert_close(got, nearest, rtol=1e-6, atol=0)


def test_signs_step_by_the_rate() -> None:
    p = torch.nn.Parameter(torch.zeros(4))
    optimizer = outer.sign_updates(torch.optim.SGD([p], lr=0.1))
    p.grad = torch.tensor([3.0, -0.001, 0.0, math.nan])
    optimizer.step()
    torch.testing.assert_close(p.detach(), torch.tensor([-0.1, 0.1, 0.0, math.nan]), equal_nan=True)

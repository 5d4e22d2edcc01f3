"""What hosts exchange in the benchmarks: normal vectors, or the gradients of a network in training."""

from __future__ import annotations

import functools

import torch
from experiments.real_gradients.networks import Transformer, sequences, text
from torch import Tensor
from torch.nn import functional

from tersegrad.core.protocol import Piece, Spec

# So many normal coordinates, or the network whose gradients are meant.
What = int | str
TRANSFORMER = "transformer"
LAYER = 512  # normal vectors are described as square matrices of that size, for methods that use their structure
STEPS, TIME, BATCH = 60, 48, 8


def describe(what: What) -> Spec:
    """A normal vector as matrices of LAYER columns (at most LAYER rows) and a rest; a network's gradients as its parameters."""
    if isinstance(what, str):
        return _spec(_network(what))
    pieces: list[Piece] = []
    at = 0
    while what - at >= LAYER:
        rows = min(LAYER, (what - at) // LAYER)
        pieces.append(Piece((rows, LAYER), 0, rows * LAYER, f"weight{len(pieces)}"))
        at += rows * LAYER
    if at < what:
        pieces.append(Piece((what - at,), 0, what - at, "rest"))
    return Spec(tuple(pieces))


def vector(numel: int, rank: int, step: int, alike: bool = False) -> Tensor:
    """Gradients of one host: normal, half of their power shared by all hosts, every layer with a scale of its own unless ``alike``."""
    shared = torch.randn(numel, generator=torch.Generator().manual_seed(1_000_003 * step))
    own = torch.randn(numel, generator=torch.Generator().manual_seed(1_000_003 * step + 1 + rank))
    x, at = shared.add_(own), 0
    for number, piece in enumerate(describe(numel).pieces):
        x[at : at + piece.numel] *= 1.0 if alike else 2.0 ** (number % 5 - 2)
        at += piece.numel
    return x


@functools.lru_cache(maxsize=4)
def vectors(what: What, rank: int, alike: bool = False) -> list[Tensor]:
    """Two steps' gradients of one host."""
    if isinstance(what, int):
        return [vector(what, rank, step, alike) for step in range(2)]
    model, symbols = _network(what), text(None)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    # All hosts train alike; then each takes gradients of data of its own.
    draw = sequences(symbols, BATCH, TIME, torch.Generator().manual_seed(0))
    for _ in range(STEPS):
        _gradient(model, *draw())
        optimizer.step()
    own = sequences(symbols, BATCH, TIME, torch.Generator().manual_seed(1 + rank))
    return [_gradient(model, *own()) for _ in range(2)]


def _network(name: str) -> Transformer:
    """A language model on bytes, of about 25 MB."""
    assert name == TRANSFORMER
    torch.manual_seed(0)
    return Transformer(width=408, depth=3, heads=6, time=TIME)


def _spec(model: torch.nn.Module) -> Spec:
    return Spec(tuple(Piece(tuple(p.shape), 0, p.numel(), name) for name, p in model.named_parameters()))


def _gradient(model: torch.nn.Module, x: Tensor, y: Tensor) -> Tensor:
    model.zero_grad()
    functional.cross_entropy(model(x).flatten(0, -2), y.flatten()).backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])

"""PowerSGD whose factors travel in a few bits: the package's ``power_sgd(rank=, factors=)`` for all workers at once.

Every worker's matrix (gradient plus residual) is projected, the factors of all tensors are laid into two flat vectors, and each of them is
averaged by a two-shot exchange of an unbiased code: parts of a worker's vector, one for every worker, then their means. What a message
of factors errs stays in that worker's residual, vectors among the pieces included; errors of the means do not. Every piece is divided by
the root mean square of what came out for it in the step before, which all workers know.

A step adds the codes' errors instead of writing messages (``codes.py``). Messages of some steps, both rounds of all workers, are written
and decoded by the package's exchange (:class:`Counted`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

import tersegrad
from experiments.variance_based import codes
from experiments.variance_based.batched import Buffers, Method, PowerSGD, State
from experiments.variance_based.layout import Layout
from experiments.variance_based.network import Mode
from tersegrad import Context, Spec
from tersegrad.core.protocol import Piece
from tersegrad.exchange import scheme, virtual


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a tensor's factors lie in the two flat vectors; ``rows`` 0: it is no matrix, and travels whole with the second."""

    name: str
    rows: int
    columns: int
    p: int
    q: int


@dataclasses.dataclass(frozen=True)
class CodedPowerSGD(Method):
    """Rank-r factors of every matrix with error feedback, sent by an unbiased code; vectors travel with the second factors."""

    mode: ClassVar[Mode] = "workers"
    SAMPLES: ClassVar[int] = 12

    rank: int = 16
    factors: str = "dithered_trellis(omega=0.2)"

    @property
    def omega(self) -> float:
        """The variance of the code."""
        compressor: Any = tersegrad.parse(self.factors)
        return float(compressor.omega)

    def places(self, layout: Layout) -> list[Place]:
        """The places of all tensors, in order."""
        matrices = {name: (rows, columns) for name, rows, columns in PowerSGD(self.rank)._matrices(layout)}
        found, p, q = [], 0, 0
        for name, shape in layout.shapes:
            rows, columns = matrices.get(name, (0, math.prod(shape)))
            found.append(Place(name, rows, columns, p, q))
            p += self.rank * rows
            q += columns * (self.rank if rows else 1)
        return found

    def specs(self, layout: Layout) -> tuple[Spec, Spec]:
        """What the package calls the two flat vectors."""
        first, second = [], []
        for place in self.places(layout):
            if place.rows:
                first.append((place.rows, self.rank))
            second.append((place.columns, self.rank) if place.rows else (place.columns,))
        return tuple(Spec(tuple(Piece(s, 0, math.prod(s)) for s in shapes)) for shapes in (first, second))  # type: ignore[return-value]

    def init(self, buffers: Buffers, seed: int) -> State:
        workers, device = buffers.gradient.shape[0], buffers.mean.device
        generator = torch.Generator().manual_seed(seed)
        places = self.places(buffers.layout)
        first, second = (codes.whole(spec.numel) for spec in self.specs(buffers.layout))
        q = torch.zeros(second)
        for place in places:
            shape = (place.columns, self.rank) if place.rows else (place.columns,)
            q[place.q : place.q + math.prod(shape)] = (
                torch.randn(shape, generator=generator).flatten() if place.rows else torch.ones(shape)
            )
        state = {"r": torch.zeros_like(buffers.gradient), "q": q.to(device)}
        for name, size in (("p", first), ("own", second)):
            state[name] = torch.zeros(workers, size, device=device)  # what the exchange is given
            state[f"{name}_came"] = torch.zeros(size, device=device)  # and what came out
        for name, numel in zip(("p", "own"), (spec.numel for spec in self.specs(buffers.layout))):
            state[f"{name}_ends"], state[f"{name}_part"] = (t.to(device) for t in codes.parts(numel, workers))
        # Of every coordinate the tensor that it belongs to; those behind the last belong to none.
        state["piece_of_q"], state["piece_of_p"] = (
            torch.repeat_interleave(torch.arange(len(counts) + 1), torch.tensor([*counts, size - sum(counts)])).to(device)
            for counts, size in (
                ([p.columns * (self.rank if p.rows else 1) for p in places], second),
                ([p.rows * self.rank for p in places], first),
            )
        )
        state["ends_of_q"] = torch.tensor([*(p.q for p in places), self.specs(buffers.layout)[1].numel], device=device)
        return state

    def step(self, buffers: Buffers, state: State) -> None:
        layout, rank, workers = buffers.layout, self.rank, buffers.gradient.shape[0]
        places, omegas = self.places(layout), (self.omega, self.omega)
        matrices = [place for place in places if place.rows]
        r, q, p, own = (state[name] for name in ("r", "q", "p", "own"))
        r.add_(buffers.gradient)
        views, means = layout.views(r), layout.views(buffers.mean)
        scale = _sizes(q, state["ends_of_q"])  # of every piece
        bases = _bases([q[m.q : m.q + m.columns * rank].view(m.columns, rank) for m in matrices])
        for m, basis in zip(matrices, bases):
            matrix = views[m.name].view(workers, m.rows, m.columns)
            _part(p, m.p, m.rows, rank).copy_(torch.bmm(matrix, basis.expand(workers, -1, -1)))
        p.div_(F.pad(scale, (0, 1), value=1.0)[state["piece_of_p"]])
        _, came = codes.both_rounds(p, state["p_ends"], state["p_part"], omegas)
        state["p_came"].copy_(came)
        bases = _bases([came[m.p : m.p + m.rows * rank].view(m.rows, rank) for m in matrices])
        basis_of = {m.name: basis for m, basis in zip(matrices, bases)}
        for place in places:
            if place.rows:
                matrix = views[place.name].view(workers, place.rows, place.columns)
                factor = torch.bmm(matrix.mT, basis_of[place.name].expand(workers, -1, -1))
                _part(own, place.q, place.columns, rank).copy_(factor)
            else:
                own[:, place.q : place.q + place.columns].copy_(views[place.name].reshape(workers, -1))
        each = F.pad(scale, (0, 1), value=1.0)[state["piece_of_q"]]
        own.div_(each)
        sent, came = codes.both_rounds(own, state["own_ends"], state["own_part"], omegas, 1.0 / (1.0 + self.omega))
        state["own_came"].copy_(came)
        sent, came = sent * each, came * each
        for place in places:
            if place.rows:
                basis, end = basis_of[place.name], place.q + place.columns * rank
                matrix = views[place.name].view(workers, place.rows, place.columns)
                factor = sent[:, place.q : end].view(workers, place.columns, rank)
                matrix.baddbmm_(basis.expand(workers, -1, -1), factor.mT, alpha=-1.0)
                mean = came[place.q : end].view(place.columns, rank)
                torch.mm(basis, mean.mT, out=means[place.name].view(place.rows, place.columns))
            else:
                end = place.q + place.columns
                views[place.name].view(workers, -1).sub_(sent[:, place.q : end])
                means[place.name].view(-1).copy_(came[place.q : end])
        # A tensor of zeros leaves the factor to go on with.
        nothing = F.pad(_squares(came, state["ends_of_q"]) == 0, (0, 1), value=True)[state["piece_of_q"]]
        q.copy_(torch.where(nothing, q, came))
        buffers.words.fill_((sum(spec.numel for spec in self.specs(layout))) * workers)


def _part(rows: Tensor, start: int, count: int, rank: int) -> Tensor:
    """One tensor's factors of all workers, (workers, count, rank), within (workers, size)."""
    return rows[:, start : start + count * rank].view(rows.shape[0], count, rank)


def _squares(flat: Tensor, ends: Tensor) -> Tensor:
    """Mean squares of consecutive pieces of (..., size); 0 for empty ones."""
    sums = F.pad(flat.double().square().cumsum(-1), (1, 0))[..., ends].diff()
    return (sums / ends.diff().clamp_min(1)).clamp_min(0.0)


def _sizes(flat: Tensor, ends: Tensor) -> Tensor:
    """Root mean squares of consecutive pieces; 1 where all is zero."""
    squares = _squares(flat, ends)
    return torch.where(squares > 0, squares, 1.0).sqrt().float()


def _bases(factors: list[Tensor]) -> Iterator[Tensor]:
    """An orthonormal basis of the columns of each (n, rank) factor, by Cholesky's algorithm in float64 for all of them at once."""
    most, rank = max(len(f) for f in factors), factors[0].shape[1]
    padded = torch.stack([F.pad(f, (0, 0, 0, most - len(f))) for f in factors]).double()
    gram = padded.mT @ padded
    eye = torch.eye(rank, dtype=torch.float64, device=gram.device)
    trace = gram.diagonal(dim1=1, dim2=2).sum(1)[:, None, None]
    work = torch.cat([gram + eye * (1e-12 * trace + 1e-200), eye.expand_as(gram)], 2)
    inverse = []
    for i in range(rank):
        row = work[:, i] * work[:, i, i : i + 1].rsqrt()
        work = work - row[:, :rank, None] * row[:, None, :]
        inverse.append(row[:, rank:])
    bases = (padded @ torch.stack(inverse, 1).mT).float()
    return (basis[: len(f)] for basis, f in zip(bases, factors))


class Counted:
    """Messages of some steps, as the package's exchange writes them: both rounds of all workers."""

    def __init__(self, method: CodedPowerSGD, layout: Layout, state: State, seed: int, steps: int) -> None:
        self.state, self.seed = state, seed
        compressor = tersegrad.parse(method.factors)
        self.exchange = scheme("two_shot").make(compressor, compressor)
        self.specs = dict(zip(("p", "own"), method.specs(layout)))
        self.workers = state["p"].shape[0]
        self.due = {int((i + 0.5) * steps / method.SAMPLES) for i in range(method.SAMPLES)}
        self.weight = {"p": 1.0, "own": 1.0 / (1.0 + method.omega)}
        self.samples: list[dict[str, Any]] = []

    def take(self, step: int) -> None:
        """Exchange the factors of the step that was taken last."""
        sample: dict[str, Any] = {"step": step}
        for number, (name, spec) in enumerate(self.specs.items()):
            xs = [row[: spec.numel].clone() for row in self.state[name]]
            device, sent = xs[0].device, [0] * self.workers
            ranks = virtual.init(self.exchange, spec, self.workers, device)
            mean = codes.mean_of(self.exchange, xs, ranks, spec, Context(self.seed, step, number), sent)
            exact = torch.stack(xs).mean(0)
            came = self.state[f"{name}_came"][: spec.numel] / self.weight[name]
            errors = [float((other - exact).norm() / exact.norm()) ** 2 for other in (mean, came)]
            sample[name] = {"sent": sum(sent), "error": errors[0], "error of the step": errors[1]}
        self.samples.append(sample)

    def message_bytes(self) -> float:
        """Bytes per step and worker, so that their ratio to 4 N is that of what leaves a worker to a float32 all-reduce."""
        total = sum(sample[name]["sent"] for sample in self.samples for name in self.specs)
        return float(total) / len(self.samples) / (2 * (self.workers - 1))

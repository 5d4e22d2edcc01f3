"""PowerSGD: every gradient matrix is replaced by its best rank-r factors, found by one power iteration that continues over the steps.

A tensor of shape (n, a, b, ...) is the matrix M of n rows and m = a b ... columns; M_i is rank i's gradient plus its residual. With Q
(m x r) from the step before,

    P = mean of M_i Q        P^ = an orthonormal basis of P's columns        Q' = mean of M_i^T P^        result = P^ Q'^T,

which is the projection of the mean of the M_i onto the columns of P^. Only P and Q' travel: 4 r (n + m) bytes instead of 4 n m, in two
exact means (:mod:`tersegrad.exchange.exact`). Vectors, and matrices for which r (n + m) >= n m, travel exactly with P.

Error feedback is part of the method: rank i keeps M_i - P^ (M_i^T P^)^T, what its own matrix loses in the projection, so that the
residuals' mean is what the mean lost, and no residual is longer than its matrix.

Promise: contractive with alpha <= 1 only; how much a rank-r projection loses depends on the gradient. Ranks agree bit for bit as
long as they compute matrix products alike (one kind of machine, one number of threads): means travel, products do not.

Citation: Vogels, Karimireddy, Jaggi, "PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization", NeurIPS
2019. Ours differs in three ways: the first Q is uniform Philox noise; a QR decomposition in float64 stands for Gram-Schmidt, so a
gradient of zeros or of lower rank leaves a full basis to go on with; and the residual uses rank i's own factor.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from tersegrad import kernels
from tersegrad.core.philox import Purpose
from tersegrad.core.protocol import Context, Piece, Spec, Stats, flat_float32
from tersegrad.core.state import Parts
from tersegrad.core.text import require
from tersegrad.exchange.exact import exact_mean
from tersegrad.exchange.steps import Part, Steps


@dataclasses.dataclass(frozen=True)
class MatrixState:
    """What is kept of one matrix: the residual, and the factor that the next iteration begins with (the same on every rank)."""

    carries: ClassVar[str] = "residual"

    residual: Tensor  # (n m,) float32
    q: Tensor  # (m, r) float32


@dataclasses.dataclass(frozen=True)
class PowerSGDExchange:
    """Mean over ranks of rank-``rank`` approximations, with error feedback."""

    rank: int = 4

    def __post_init__(self) -> None:
        require(self.rank >= 1, f"power_sgd: rank is at least 1, got {self.rank}")

    def matrix(self, piece: Piece) -> tuple[int, int] | None:
        """Rows and columns of a piece, or None where it is sent exactly."""
        if len(piece.shape) < 2 or piece.numel != math.prod(piece.shape) or not piece.numel:
            return None
        n, m = piece.shape[0], math.prod(piece.shape[1:])
        return (n, m) if self.rank * (n + m) < n * m else None

    def sent_exactly(self, spec: Spec) -> dict[str, str]:
        """The pieces that are sent exactly, each with the reason."""
        reasons = {}
        for piece in spec.pieces:
            if self.matrix(piece) is None:
                whole = piece.numel == math.prod(piece.shape)
                why = "not a matrix" if len(piece.shape) < 2 else f"rank {self.rank} would not be smaller"
                reasons[piece.name] = why if whole else "cut out of a tensor"
        return reasons

    def message_nbytes(self, spec: Spec) -> int:
        """Bytes of P, Q and what is sent exactly: what the two means are taken of."""
        sides = [self.rank * sum(m) if (m := self.matrix(p)) else p.numel for p in spec.pieces]
        return 4 * sum(sides)

    def init(self, spec: Spec, device: torch.device | str, rank: int, size: int) -> Parts:
        found = []
        for j, piece in enumerate(spec.pieces):
            if shape := self.matrix(piece):
                q = _noise(shape[1], self.rank, j, torch.device(device))
                found.append((j, MatrixState(torch.zeros(piece.numel, dtype=torch.float32, device=device), q)))
        return Parts(tuple(range(len(spec.pieces))), tuple(found))

    def steps(
        self,
        x: Tensor,
        state: Parts,
        spec: Spec,
        ctx: Context,
        rank: int,
        size: int,
        stats: Stats | None = None,
        into: Tensor | None = None,
    ) -> Steps[Parts]:
        pieces = flat_float32(x).split([p.numel for p in spec.pieces])
        before: dict[int, MatrixState] = dict(state.states)
        matrices = {}
        for j, kept in before.items():
            n, m = self.matrix(spec.pieces[j]) or (0, 0)
            matrices[j] = (pieces[j] + kept.residual).view(n, m)
        exact = [j for j in range(len(pieces)) if j not in matrices]
        mine = [(matrices[j] @ before[j].q).reshape(-1) for j in matrices]
        means, _ = yield from exact_mean(_joined([*mine, *(pieces[j] for j in exact)], x.device), size)
        parts = means.split([p.numel() for p in mine] + [pieces[j].numel() for j in exact])
        bases = {j: _orthonormal(part.view(-1, self.rank)) for j, part in zip(matrices, parts)}
        own = {j: matrix.T @ bases[j] for j, matrix in matrices.items()}
        factors, _ = yield from exact_mean(_joined([q.reshape(-1) for q in own.values()], x.device), size)
        out = torch.empty(spec.numel, dtype=torch.float32, device=x.device)
        places = out.split([p.numel for p in spec.pieces])
        for j, part in zip(exact, parts[len(mine) :]):
            places[j].copy_(part)
        after = []
        for j, part in zip(matrices, factors.split([q.numel() for q in own.values()])):
            q = part.view(-1, self.rank)
            torch.mm(bases[j], q.T, out=places[j].view(matrices[j].shape))
            residual = matrices[j].sub_(bases[j] @ own[j].T).view(-1)
            after.append((j, MatrixState(residual, q.clone())))
        following, finite = dataclasses.replace(state, states=tuple(after)), torch.isfinite(out).all()
        if out.is_cpu:
            return out, following if finite else state
        # Nothing waits for the device: the states are chosen there.
        following = dataclasses.replace(state, states=tuple((j, _chosen(finite, new, before[j])) for j, new in after))
        return out, following

    def parts(self, state: Parts, spec: Spec, rank: int, size: int) -> list[Part]:
        return [Part("first", 0, spec.numel, size, state)]

    def join(self, parts: Sequence[Any], spec: Spec, rank: int, size: int) -> Parts:
        joined: Parts = parts[0]
        return joined


def _joined(vectors: Sequence[Tensor], device: torch.device) -> Tensor:
    return torch.cat(list(vectors)) if vectors else torch.empty(0, dtype=torch.float32, device=device)


def _noise(rows: int, columns: int, number: int, device: torch.device) -> Tensor:
    """Uniform on (-1, 1), the same on every rank."""
    ctx = Context(seed=number).shared()
    draws = kernels.get(device).random_u16(ctx, Purpose.CODEBOOK, 0, rows * columns, device)
    return ((draws.to(torch.float32) - 32767.5) * 2.0**-15).view(rows, columns)


def _orthonormal(p: Tensor) -> Tensor:
    """An orthonormal basis whose span holds the columns of ``p``; NaN where p is not finite."""
    finite = torch.isfinite(p).all()
    basis: Tensor = torch.linalg.qr(torch.where(finite, p, 0.0).double())[0]
    return torch.where(finite, basis, math.nan).to(torch.float32)


def _chosen(finite: Tensor, new: MatrixState, old: MatrixState) -> MatrixState:
    return MatrixState(torch.where(finite, new.residual, old.residual), torch.where(finite, new.q, old.q))

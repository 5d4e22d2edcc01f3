"""PowerSGD: every gradient matrix is replaced by its best rank-r factors, found by one power iteration that continues over the steps.

A tensor of shape (n, a, b, ...) is the matrix M of n rows and m = a b ... columns; M_i is rank i's gradient plus its residual. With Q
(m x r) from the step before,

    P = mean of M_i Q        P^ = an orthonormal basis of P's columns        Q' = mean of M_i^T P^        result = P^ Q'^T,

which is the projection of the mean of the M_i onto the columns of P^. Only P and Q' travel: 4 r (n + m) bytes instead of 4 n m, in two
exact means (:mod:`tersegrad.exchange.exact`). A vector, and a matrix for which r (n + m) >= n m, is a matrix of one row whose P^ is 1: it
travels exactly with Q'.

Error feedback is part of the method: rank i keeps M_i - P^ (M_i^T P^)^T, what its own matrix loses in the projection, so that the
residuals' mean is what the mean lost, and no residual is longer than its matrix.

With ``factors``, a compressor, both means are taken in two compressed rounds (:mod:`tersegrad.exchange.two_shot`), the factors of all
tensors in one message to each rank. What a rank's own message of Q' errs stays in its residual, that of vectors too; what the second
round errs does not: it is unbiased where the compressor is, else what two-shot has for means. What P errs turns the basis, and leaves no
trace. One step of a quantiser serves tensors of unlike scale: every factor is divided by the root mean square of what came out for its
tensor in the step before, which all ranks know, and Q is made orthonormal before it is multiplied with.

Promise: contractive with alpha <= 1 only; how much a rank-r projection loses depends on the gradient. Ranks agree bit for bit as
long as they compute matrix products alike (one kind of machine, one number of threads): means travel, products do not.

Citation: Vogels, Karimireddy, Jaggi, "PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization", NeurIPS
2019. Ours differs in three ways: the first Q is uniform Philox noise; a QR decomposition in float64 stands for Gram-Schmidt, so a
gradient of zeros or of lower rank leaves a full basis to go on with; and the residual uses rank i's own factor. The paper has no coded
factors.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Generator, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from tersegrad import kernels
from tersegrad.core.philox import Purpose
from tersegrad.core.protocol import Compressor, Context, Piece, Spec, Stats, flat_float32
from tersegrad.core.state import Parts
from tersegrad.core.text import require
from tersegrad.exchange.exact import exact_mean
from tersegrad.exchange.steps import Collective, Part, Steps
from tersegrad.exchange.two_shot import TwoShotExchange
from tersegrad.wrappers import ErrorFeedback


@dataclasses.dataclass(frozen=True)
class MatrixState:
    """What is kept of one matrix: the residual, and the factor that the next iteration begins with (the same on every rank)."""

    carries: ClassVar[str] = "residual"

    residual: Tensor  # (n m,) float32
    q: Tensor  # (m, r) float32


@dataclasses.dataclass(frozen=True)
class PowerSGDExchange:
    """Mean over ranks of rank-``rank`` approximations, with error feedback; ``factors`` says how they travel, exactly if it is None."""

    rank: int = 4
    factors: Compressor[Any] | None = None

    def __post_init__(self) -> None:
        require(self.rank >= 1, f"power_sgd: rank is at least 1, got {self.rank}")
        made = self.factors is None or isinstance(self.factors, Compressor)
        require(made, f"power_sgd: factors is a compressor, as in power_sgd(factors=int8), got {self.factors!r}")
        _ = self._coded  # which refuses what error feedback refuses

    @functools.cached_property
    def _coded(self) -> TwoShotExchange | None:
        """What takes the means of coded factors. Its residuals start from zero in every step: they are what a message erred."""
        if self.factors is None:
            return None
        unbiased = self.factors.guarantee(Spec.flat(4096)).kind == "unbiased"
        return TwoShotExchange(ErrorFeedback(self.factors), self.factors if unbiased else None)

    def matrix(self, piece: Piece) -> tuple[int, int] | None:
        """Rows and columns of a piece, or None where it travels whole."""
        if len(piece.shape) < 2 or piece.numel != math.prod(piece.shape) or not piece.numel:
            return None
        n, m = piece.shape[0], math.prod(piece.shape[1:])
        return (n, m) if self.rank * (n + m) < n * m else None

    def sent_exactly(self, spec: Spec) -> dict[str, str]:
        """The pieces that are sent exactly, each with the reason."""
        reasons = {}
        for piece in spec.pieces:
            if self.matrix(piece) is None and self.factors is None:
                whole = piece.numel == math.prod(piece.shape)
                why = "not a matrix" if len(piece.shape) < 2 else f"rank {self.rank} would not be smaller"
                reasons[piece.name] = why if whole else "cut out of a tensor"
        return reasons

    def message_nbytes(self, spec: Spec) -> int | None:
        """Bytes of P, Q and what is sent exactly: what the two means are taken of. None where they are coded."""
        sides = [self.rank * sum(m) if (m := self.matrix(p)) else p.numel for p in spec.pieces]
        return None if self.factors is not None else 4 * sum(sides)

    def init(self, spec: Spec, device: torch.device | str, rank: int, size: int) -> Parts:
        found = []
        for j, piece in enumerate(spec.pieces):
            shape = self.matrix(piece)
            if shape or (piece.numel and self.factors is not None):
                # What travels whole has no factor to go on with, only a scale.
                q = _noise(shape[1], self.rank, j, torch.device(device)) if shape else torch.ones(piece.numel, 1, device=device)
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
        shapes = {j: shape for j, piece in enumerate(spec.pieces) if (shape := self.matrix(piece))}
        matrices = {
            j: ((vector + before[j].residual) if j in before else vector).view(shapes.get(j, (1, -1)))
            for j, vector in enumerate(pieces)
            if vector.numel()
        }
        coded = self.factors is not None
        scales = {j: _size(before[j].q) for j in matrices} if coded else {}
        mine = {j: matrices[j] @ (_orthonormal(before[j].q) if coded else before[j].q) for j in shapes}
        means, _ = yield from self._mean(mine, scales, ctx.child(1), rank, size, x.device)
        one = torch.ones(1, 1, dtype=torch.float32, device=x.device)
        bases = {j: _orthonormal(means[j]) if j in shapes else one for j in matrices}
        own = {j: matrix.T @ bases[j] for j, matrix in matrices.items()}
        factors, errors = yield from self._mean(own, scales, ctx.child(2), rank, size, x.device)
        out = torch.empty(spec.numel, dtype=torch.float32, device=x.device)
        places = out.split([p.numel for p in spec.pieces])
        after = []
        for j, matrix in matrices.items():
            torch.mm(bases[j], factors[j].T, out=places[j].view(matrix.shape))
            if j in before:
                sent = own[j] - errors[j] if coded else own[j]
                residual = matrix.sub_(bases[j] @ sent.T).view(-1)
                after.append((j, MatrixState(residual, factors[j].clone())))
        following, finite = dataclasses.replace(state, states=tuple(after)), torch.isfinite(out).all()
        if out.is_cpu:
            return out, following if finite else state
        # Nothing waits for the device: the states are chosen there.
        following = dataclasses.replace(state, states=tuple((j, _chosen(finite, new, before[j])) for j, new in after))
        return out, following

    def _mean(
        self, mine: dict[int, Tensor], scales: dict[int, Tensor], ctx: Context, rank: int, size: int, device: torch.device
    ) -> Generator[Collective, Tensor, tuple[dict[int, Tensor], dict[int, Tensor]]]:
        """The means over ranks of factors, and how far this rank's own message of each differs from it (only where coded)."""
        shapes = [tuple(factor.shape) for factor in mine.values()]
        if self._coded is None:
            flat = _joined([factor.reshape(-1) for factor in mine.values()], device)
            mean, _ = yield from exact_mean(flat, size)
            return _apart(mean, shapes, mine), {}
        flat = _joined([(factor / scales[j]).reshape(-1) for j, factor in mine.items()], device)
        spec = Spec(tuple(Piece(shape, 0, math.prod(shape)) for shape in shapes))
        fresh = self._coded.init(spec, device, rank, size)
        mean, after = yield from self._coded.steps(flat, fresh, spec, ctx, rank, size)
        error = _joined([part.residual for part in after.first], device)
        found = [_apart(flat, shapes, mine) for flat in (mean, error)]
        for factors in found:
            for j, factor in factors.items():
                factor.mul_(scales[j])
        return found[0], found[1]

    def parts(self, state: Parts, spec: Spec, rank: int, size: int) -> list[Part]:
        return [Part("first", 0, spec.numel, size, state)]

    def join(self, parts: Sequence[Any], spec: Spec, rank: int, size: int) -> Parts:
        joined: Parts = parts[0]
        return joined


def _joined(vectors: Sequence[Tensor], device: torch.device) -> Tensor:
    return torch.cat(list(vectors)) if vectors else torch.empty(0, dtype=torch.float32, device=device)


def _apart(flat: Tensor, shapes: Sequence[tuple[int, ...]], like: Mapping[int, Tensor]) -> dict[int, Tensor]:
    """A flat vector as the factors that it was joined of."""
    parts = flat.split([math.prod(shape) for shape in shapes])
    return {j: part.view(shape) for j, part, shape in zip(like, parts, shapes)}


def _size(q: Tensor) -> Tensor:
    """The root mean square, 1 where all is zero."""
    square = q.square().mean()
    return torch.where(square > 0, square, 1.0).sqrt()


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

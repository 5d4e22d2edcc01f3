"""Compression of all workers at once: the same arithmetic as the package's compressors, on (workers, padded) tensors.

A method turns the workers' gradients into the mean of what the receivers decode, and counts what is sent. It exists because encoding
eight messages of 7.6 million coordinates in every step would take longer than the training; on every k-th step the package's
compressors encode the very same tensors to bytes (``wire.py``), and a test compares the two bit for bit.

A method's step works in place on preallocated tensors, never waits for the device, and so can be captured in a CUDA graph.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, ClassVar, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from experiments.variance_based.fused import fused
from experiments.variance_based.layout import BLOCK, Layout
from experiments.variance_based.network import Mode
from tersegrad.kernels.reference import variance


@dataclasses.dataclass
class Buffers:
    """What a training step and a method share."""

    layout: Layout
    gradient: Tensor  # (workers or 1, padded) float32
    squares: Tensor | None  # (workers, padded) float32
    mean: Tensor  # (padded,) float32: what the optimiser gets
    words: Tensor  # (1,) int64: parameters sent in this step, all workers together


State = dict[str, Tensor]


@dataclasses.dataclass(frozen=True)
class Method:
    """What is sent, and what is kept back; ``init`` makes the tensors that ``step`` works on."""

    mode: ClassVar[Mode] = "workers"
    resent: ClassVar[bool] = False  # messages are encoded from what the step chose (``sent``), not from gradient and state
    samples: ClassVar[int] = 50  # at most so many messages of a run are encoded to bytes: dense ones take seconds

    def init(self, buffers: Buffers, seed: int) -> State:
        return {}

    def step(self, buffers: Buffers, state: State) -> None:
        raise NotImplementedError

    def forms(self) -> dict[str, str]:
        """Wire form to the package's text form of the same method; empty where none is."""
        return {}

    def fixed_bytes(self, layout: Layout) -> int | None:
        """Bytes of every message where they do not depend on the gradient: float32 numbers as they are."""
        return None


def blocks(flat: Tensor) -> Tensor:
    """(..., padded) as (..., blocks, BLOCK)."""
    return flat.view(*flat.shape[:-1], -1, BLOCK)


@fused
def _mean_of_rows(rows: Tensor, mean: Tensor) -> None:
    """Rows added in rank order, as the exchange does, then one multiplication."""
    total = rows[0]
    for w in range(1, rows.shape[0]):
        total = total + rows[w]
    mean.copy_(total * (1.0 / rows.shape[0]))


@dataclasses.dataclass(frozen=True)
class Dense(Method):
    """No compression: float32 gradients."""

    mode: ClassVar[Mode] = "mean"
    workers: int = 8

    def step(self, buffers: Buffers, state: State) -> None:
        torch.mul(buffers.gradient[0], 1.0 / self.workers, out=buffers.mean)
        buffers.words.fill_(buffers.layout.numel * self.workers)

    def fixed_bytes(self, layout: Layout) -> int | None:
        return 4 * layout.numel


@fused
def _vgc_accumulate(r: Tensor, v: Tensor, g: Tensor, s: Tensor, sent: Tensor, alpha: float, zeta: float, every: bool) -> Tensor:
    """Lines 2 to 8 of the algorithm for (workers, blocks, BLOCK); returns the largest magnitude of every block, sent or ``every``."""
    r_next, v_next, out = variance.variance_update(r, v, g, s, alpha, zeta)
    largest = (torch.maximum(out.abs(), r_next.abs()) if every else out.abs()).amax(-1)
    r.copy_(r_next)
    v.copy_(v_next)
    sent.copy_(out)
    return largest


@fused
def _vgc_spread(v: Tensor, s: Tensor, zeta: float) -> Tensor:
    """What v becomes where nothing is sent."""
    return (v + s) * zeta


@fused
def _vgc_keep(r: Tensor, sent: Tensor, top: Tensor) -> None:
    """Leave in r what the four-bit values lose, small ones as a whole."""
    r.copy_(r + (sent - variance.exp4_round(sent, top)))


@fused
def _vgc_keep_small(r: Tensor, v: Tensor, sent: Tensor, top: Tensor, spread: Tensor) -> None:
    """Treat what is too small for the four-bit values as if it had not been chosen."""
    small = (sent != 0) & (variance.exp4_round(sent, top) == 0)
    r.copy_(torch.where(small, sent, r))
    v.copy_(torch.where(small, spread, v))


@fused
def _vgc_decode(sent: Tensor, top: Tensor, mean: Tensor) -> Tensor:
    """The mean of the four-bit values over workers; returns how many are sent in every block."""
    total = variance.exp4_round(sent[0], top[0])
    count = (total != 0).to(torch.int32)
    for w in range(1, sent.shape[0]):
        value = variance.exp4_round(sent[w], top[w])
        total = total + value
        count = count + (value != 0).to(torch.int32)
    mean.copy_(total * (1.0 / sent.shape[0]))
    return count.sum(-1)


def tensor_tops(largest: Tensor, tensor_of_block: Tensor, tensors: int) -> Tensor:
    """For every block 2^E of its tensor, (workers, blocks, 1), from the blocks' largest magnitudes."""
    index = tensor_of_block.expand_as(largest)
    top = torch.zeros(largest.shape[0], tensors, device=largest.device)
    top.scatter_reduce_(1, index, largest, "amax")
    return variance.exp4_top(top.unsqueeze(-1)).squeeze(-1).gather(1, index).unsqueeze(-1)


@dataclasses.dataclass(frozen=True)
class VGC(Method):
    """Send a component once its square exceeds alpha times its accumulated variance term.

    Where the paper leaves room: ``exponents`` are relative to the largest of what a tensor sends, or of all its components.
    ``residual``: what was chosen is forgotten ("drop"), but what is too small for four bits is not ("small"), or nothing is ("keep").
    """

    mode: ClassVar[Mode] = "moments"
    alpha: float = 1.5
    zeta: float = 0.999
    exponents: Literal["sent", "all"] = "sent"
    residual: Literal["drop", "small", "keep"] = "drop"

    def init(self, buffers: Buffers, seed: int) -> State:
        g = buffers.gradient
        return {
            "r": torch.zeros_like(g),
            "v": torch.zeros_like(g),
            "sent": torch.zeros_like(g),
            "tensor_of_block": buffers.layout.tensor_of_block(g.device),
        }

    def step(self, buffers: Buffers, state: State) -> None:
        assert buffers.squares is not None
        r, v, sent = (blocks(state[name]) for name in ("r", "v", "sent"))
        g, s = blocks(buffers.gradient), blocks(buffers.squares)
        spread = _vgc_spread(v, s, self.zeta) if self.residual == "small" else None
        largest = _vgc_accumulate(r, v, g, s, sent, self.alpha, self.zeta, self.exponents == "all")
        top = tensor_tops(largest, state["tensor_of_block"], len(buffers.layout.shapes))
        if self.residual == "keep":
            _vgc_keep(r, sent, top)
        elif spread is not None:
            _vgc_keep_small(r, v, sent, top, spread)
        buffers.words.copy_(_vgc_decode(sent, top, blocks(buffers.mean)).sum(dtype=torch.int64).view(1))

    def forms(self) -> dict[str, str]:
        if self.exponents == "all" or self.residual == "small":
            return {}
        kept = ", residual=keep" if self.residual == "keep" else ""
        return {wire: f"vgc(alpha={self.alpha:g}, zeta={self.zeta:g}, wire={wire}{kept})" for wire in ("paper", "compact")}


@fused
def _strom(r: Tensor, g: Tensor, mean: Tensor, tau: float) -> Tensor:
    """Error feedback around +-tau for (workers, blocks, BLOCK)."""
    y = r + g
    step = torch.where(y.abs() > tau, torch.copysign(torch.full_like(y, tau), y), 0.0)
    total = step[0]
    for w in range(1, r.shape[0]):
        total = total + step[w]
    mean.copy_(total * (1.0 / r.shape[0]))
    r.copy_(y - step)
    return (step != 0).sum(-1)


@dataclasses.dataclass(frozen=True)
class Strom(Method):
    """Send +-tau where the residual exceeds tau."""

    tau: float = 0.1

    def init(self, buffers: Buffers, seed: int) -> State:
        return {"r": torch.zeros_like(buffers.gradient)}

    def step(self, buffers: Buffers, state: State) -> None:
        count = _strom(blocks(state["r"]), blocks(buffers.gradient), blocks(buffers.mean), self.tau)
        buffers.words.copy_(count.sum(dtype=torch.int64).view(1))

    def forms(self) -> dict[str, str]:
        return {"compact": f"strom(tau={self.tau:g})"}


Correction = Literal["before", "after", "none"]


@fused
def _hybrid(
    r: Tensor, v: Tensor, g: Tensor, s: Tensor, mean: Tensor, alpha: float, tau: float, zeta: float, by: Correction, decay: bool
) -> Tensor:
    """The hybrid for (workers, blocks, BLOCK)."""
    r_next, v_next, step = variance.hybrid_update(r, v, g, s, alpha, tau, zeta)
    if by == "after":
        v_next = torch.where(step != 0, ((v + s) - r_next.abs() * (2 * tau) + tau * tau).clamp_min(0.0), v_next)
    elif by == "none":
        v_next = torch.where(step != 0, v + s, v_next)
    if decay:
        v_next = torch.where(step != 0, v_next * zeta, v_next)
    total = step[0]
    for w in range(1, r.shape[0]):
        total = total + step[w]
    mean.copy_(total * (1.0 / r.shape[0]))
    r.copy_(r_next)
    v.copy_(v_next)
    return (step != 0).sum(-1)


@dataclasses.dataclass(frozen=True)
class Hybrid(Method):
    """Send +-tau where the residual exceeds tau and is unambiguous.

    Where the paper leaves room: v loses 2 |r| tau - tau^2 for what was sent, with r ``before`` or ``after`` the subtraction, or nothing;
    ``decay``: v also fades in a step that sends.
    """

    mode: ClassVar[Mode] = "moments"
    tau: float = 0.1
    alpha: float = 2.0
    zeta: float = 0.999
    correction: Correction = "before"
    decay: bool = False

    def init(self, buffers: Buffers, seed: int) -> State:
        return {"r": torch.zeros_like(buffers.gradient), "v": torch.zeros_like(buffers.gradient)}

    def step(self, buffers: Buffers, state: State) -> None:
        assert buffers.squares is not None
        count = _hybrid(
            blocks(state["r"]),
            blocks(state["v"]),
            blocks(buffers.gradient),
            blocks(buffers.squares),
            blocks(buffers.mean),
            self.alpha,
            float(np.float32(self.tau)),  # as the package: its square is taken of the rounded one
            self.zeta,
            self.correction,
            self.decay,
        )
        buffers.words.copy_(count.sum(dtype=torch.int64).view(1))

    def forms(self) -> dict[str, str]:
        if self.correction != "before" or self.decay:
            return {}
        text = f"hybrid(alpha={self.alpha:g}, tau={self.tau:g}, zeta={self.zeta:g}"
        return {wire: f"{text}, wire={wire})" for wire in ("paper", "compact")}


@fused
def _qsgd(g: Tensor, u: Tensor, mean: Tensor, levels: int, largest: bool) -> Tensor:
    """Stochastic rounding of (workers, buckets, bucket) to multiples of norm / levels; u is uniform on [0, 1)."""
    norm = g.abs().amax(-1, keepdim=True) if largest else (g * g).sum(-1, keepdim=True).sqrt()
    unit = norm * (1.0 / levels)
    scaled = g.abs() * torch.where(norm > 0, levels / norm, 0.0)
    level = torch.floor(scaled + u).clamp_max(float(levels))
    value = torch.copysign(level * unit, g)
    total = value[0]
    for w in range(1, g.shape[0]):
        total = total + value[w]
    mean.copy_(total * (1.0 / g.shape[0]))
    return (level > 0).sum(-1)


@dataclasses.dataclass(frozen=True)
class QSGD(Method):
    """Stochastic rounding to multiples of a bucket's L2 norm (or its largest magnitude) over 2^(bits-1) levels (or others), no residual.

    The draws are torch's, not the package's Philox stream: same distribution, other numbers. Buckets restart at every tensor.
    """

    samples: ClassVar[int] = 4
    bits: int = 4
    bucket: int = 512
    levels: int = 0  # 0: 2^(bits-1)
    norm: Literal["l2", "max"] = "l2"

    @property
    def s(self) -> int:
        return self.levels or 2 ** (self.bits - 1)

    def init(self, buffers: Buffers, seed: int) -> State:
        return {"u": torch.zeros_like(buffers.gradient)}

    def step(self, buffers: Buffers, state: State) -> None:
        state["u"].uniform_()
        shape = (buffers.gradient.shape[0], -1, self.bucket)
        g, u, mean = buffers.gradient.view(shape), state["u"].view(shape), buffers.mean.view(-1, self.bucket)
        count = _qsgd(g, u, mean, self.s, self.norm == "max")
        buffers.words.copy_(count.sum(dtype=torch.int64).view(1))

    def forms(self) -> dict[str, str]:
        text = f"qsgd(bits={self.bits}, bucket={self.bucket}, levels={self.s}, norm={self.norm}"
        return {"paper": f"{text}, coder=elias)", "compact": f"{text}, coder=rans)"}


@dataclasses.dataclass(frozen=True)
class TopK(Method):
    """Error feedback around the k largest coordinates of a worker's whole gradient."""

    fraction: float = 0.001

    def init(self, buffers: Buffers, seed: int) -> State:
        return {"r": torch.zeros_like(buffers.gradient), "sent": torch.zeros_like(buffers.gradient)}

    def step(self, buffers: Buffers, state: State) -> None:
        r, sent = state["r"], state["sent"]
        r.add_(buffers.gradient)
        k = max(1, math.ceil(self.fraction * buffers.layout.numel))
        where = torch.topk(r.abs(), k, dim=1, sorted=False).indices
        sent.zero_()
        sent.scatter_(1, where, r.gather(1, where))
        r.scatter_(1, where, 0.0)
        _mean_of_rows(sent, buffers.mean)
        buffers.words.fill_(k * r.shape[0])

    def forms(self) -> dict[str, str]:
        return {"compact": f"error_feedback(top_k(fraction={self.fraction:g}))"}


@fused
def _dither_sums(r: Tensor, g: Tensor) -> Tensor:
    """Adds g to r; returns the sum of squares of each block."""
    y = r + g
    r.copy_(y)
    return (y * y).sum(-1)


@fused
def _dither_products(r: Tensor, inverse: Tensor) -> tuple[Tensor, Tensor]:
    """<x, k> and ||k||^2 of every block of (workers, blocks, BLOCK), for levels k = round(x / step)."""
    k = torch.round(r * inverse)
    return (r * k).sum(-1), (k * k).sum(-1)


@fused
def _dither_send(r: Tensor, inverse: Tensor, scale: Tensor, mean: Tensor) -> Tensor:
    value = torch.round(r * inverse) * scale
    total = value[0]
    for w in range(1, r.shape[0]):
        total = total + value[w]
    mean.copy_(total * (1.0 / r.shape[0]))
    r.copy_(r - value)
    return (value != 0).sum(-1)


@dataclasses.dataclass(frozen=True)
class SparseDithering(Method):
    """Error feedback around deterministic Sparse Dithering with a target error.

    One step serves a worker's whole gradient (``global``) or 65,536 coordinates (``chunk``): a multiple of their root mean square, the
    same multiple everywhere. It is the largest of a grid of quarter octaves whose error, measured on a sixteenth of the blocks, is at
    most alpha; the package searches closer.
    """

    samples: ClassVar[int] = 3
    alpha: float = 0.95
    scale: Literal["global", "chunk"] = "chunk"

    STRIDE: ClassVar[int] = 16
    STEPS: ClassVar[int] = 32
    CHUNK: ClassVar[int] = 65536 // BLOCK

    def init(self, buffers: Buffers, seed: int) -> State:
        return {"r": torch.zeros_like(buffers.gradient)}

    def _totals(self, sums: Tensor, stride: int = 1) -> Tensor:
        """(workers, chunks) from (workers, blocks), of which every ``stride``-th is there; float64."""
        group = self.CHUNK // stride if self.scale == "chunk" else sums.shape[1]
        padded: Tensor = F.pad(sums.double(), (0, -sums.shape[1] % group)).view(sums.shape[0], -1, group)
        return padded.sum(2)

    def _blocks(self, totals: Tensor, count: int) -> Tensor:
        """(workers, blocks, 1) from (workers, chunks), as float32."""
        group = self.CHUNK if self.scale == "chunk" else count
        return totals.float().repeat_interleave(group, 1)[:, :count, None]

    def step(self, buffers: Buffers, state: State) -> None:
        r = blocks(state["r"])
        count = r.shape[1]
        sums = _dither_sums(r, blocks(buffers.gradient))
        rms = torch.sqrt(self._totals(sums) / (BLOCK * self._totals(torch.ones_like(sums))))
        sample = r[:, :: self.STRIDE].contiguous()
        energy = sample.square().sum((1, 2), dtype=torch.float64).clamp_min(1e-300)
        multiple = torch.ones_like(energy)
        for i in range(self.STEPS):  # ascending, so that the last that fits stays
            inverse = self._blocks(_quotient(1.0, rms * 2.0 ** (0.25 * i)), count)[:, :: self.STRIDE]
            product, square = (self._totals(t, self.STRIDE) for t in _dither_products(sample, inverse))
            error = 1.0 - _quotient(product * product, square).sum(1) / energy  # with the least-squares scale of every chunk
            multiple = torch.where(error <= self.alpha, 2.0 ** (0.25 * i), multiple)
        inverse = self._blocks(_quotient(1.0, rms * multiple[:, None]), count)
        product, square = (self._totals(t) for t in _dither_products(r, inverse))
        sent = _dither_send(r, inverse, self._blocks(_quotient(product, square), count), blocks(buffers.mean))
        buffers.words.copy_(sent.sum(dtype=torch.int64).view(1))

    def forms(self) -> dict[str, str]:
        return {"compact": f"error_feedback(sparse_dithering(alpha={self.alpha:g}, scale={self.scale}))"}


def _quotient(a: Tensor | float, b: Tensor) -> Tensor:
    """The quotient, zero where ``b`` is."""
    return torch.where(b > 0, a / b, 0.0)


@dataclasses.dataclass(frozen=True)
class PowerSGD(Method):
    """Rank-r factors of every matrix with error feedback; vectors are sent as they are.

    Every step of it is linear in the workers' gradients but the orthogonalisation, which acts on a mean: so the mean of the workers'
    residuals is all that matters, and one row is enough.
    """

    mode: ClassVar[Mode] = "mean"
    rank: int = 4
    workers: int = 8

    def _matrices(self, layout: Layout) -> list[tuple[str, int, int]]:
        found = []
        for name, shape in layout.shapes:
            rows, columns = shape[0], math.prod(shape[1:])
            if len(shape) > 1 and self.rank * (rows + columns) < rows * columns:
                found.append((name, rows, columns))
        return found

    def init(self, buffers: Buffers, seed: int) -> State:
        generator = torch.Generator().manual_seed(seed)
        device = buffers.mean.device
        state = {"r": torch.zeros_like(buffers.mean)}
        for name, _, columns in self._matrices(buffers.layout):
            state[f"q.{name}"] = torch.randn(columns, self.rank, generator=generator).to(device)
        return state

    def step(self, buffers: Buffers, state: State) -> None:
        r = state["r"]
        r.add_(buffers.gradient[0], alpha=1.0 / self.workers)
        views, means = buffers.layout.views(r), buffers.layout.views(buffers.mean)
        buffers.mean.copy_(r)
        for name, rows, columns in self._matrices(buffers.layout):
            q = state[f"q.{name}"]
            m = views[name].view(rows, columns)
            p = _orthogonal(m @ q)
            q.copy_(m.t() @ p)
            torch.mm(p, q.t(), out=means[name].view(rows, columns))
        r.sub_(buffers.mean)
        buffers.words.fill_(self.words(buffers.layout) * self.workers)

    def fixed_bytes(self, layout: Layout) -> int | None:
        return 4 * self.words(layout)

    def words(self, layout: Layout) -> int:
        """Numbers that a worker sends in a step."""
        low = {name: self.rank * (rows + columns) for name, rows, columns in self._matrices(layout)}
        return sum(low.get(name, math.prod(shape)) for name, shape in layout.shapes)


def _orthogonal(p: Tensor) -> Tensor:
    """Gram-Schmidt, column by column: the columns are few."""
    columns: list[Tensor] = []
    for i in range(p.shape[1]):
        column = p[:, i]
        for other in columns:
            column = column - other * (other * column).sum()
        columns.append(column / (column.norm() + 1e-12))
    return torch.stack(columns, 1)


def describe(method: Method) -> dict[str, Any]:
    """A method as plain values, for the result file."""
    return {"name": type(method).__name__, **dataclasses.asdict(method)}

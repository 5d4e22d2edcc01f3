"""What might help variance-based compression where delay hurts it, and what tells why the hybrid fails: not of the paper.

A component waits until it is unambiguous, some hundred steps at the published ratios, and then arrives as one large step. Plain momentum
repeats that step ten times over the following steps, when it is older still.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from experiments.variance_based import batched
from experiments.variance_based.batched import Buffers, Method, State, blocks
from experiments.variance_based.fused import fused
from experiments.variance_based.network import Mode
from tersegrad.kernels.reference import variance


@fused
def _corrected(
    r: Tensor, v: Tensor, u: Tensor, q: Tensor, g: Tensor, s: Tensor, sent: Tensor, alpha: float, zeta: float, factor: float
) -> Tensor:
    """Choose by r and v, send what momentum has made of the same gradients; returns the largest magnitude of every block."""
    r_next, v_next, out = variance.variance_update(r, v, g, s, alpha, zeta)
    chosen = out != 0
    moved = u * factor + g
    whole = q + moved
    payload = torch.where(chosen, whole, 0.0)
    r.copy_(r_next)
    v.copy_(v_next)
    u.copy_(torch.where(chosen, 0.0, moved))
    q.copy_(torch.where(chosen, 0.0, whole))
    sent.copy_(payload)
    return payload.abs().amax(-1)


@dataclasses.dataclass(frozen=True)
class CorrectedVGC(Method):
    """Momentum correction and masking (Lin et al. 2018: Deep Gradient Compression) for VGC.

    Momentum is taken by every worker before compression: u = momentum u + g, and what waits is the sum q of u. The test stays VGC's own, on
    the sum of the gradients and of their squares. What is sent is q, and u restarts from 0 there. The receiver steps without momentum.
    """

    mode: ClassVar[Mode] = "moments"
    resent: ClassVar[bool] = True
    alpha: float = 2.0
    zeta: float = 0.999
    momentum: float = 0.9

    def init(self, buffers: Buffers, seed: int) -> State:
        g = buffers.gradient
        state = {name: torch.zeros_like(g) for name in ("r", "v", "u", "q", "sent")}
        return {**state, "tensor_of_block": buffers.layout.tensor_of_block(g.device)}

    def step(self, buffers: Buffers, state: State) -> None:
        assert buffers.squares is not None
        r, v, u, q, sent = (blocks(state[name]) for name in ("r", "v", "u", "q", "sent"))
        g, s = blocks(buffers.gradient), blocks(buffers.squares)
        largest = _corrected(r, v, u, q, g, s, sent, self.alpha, self.zeta, self.momentum)
        top = batched.tensor_tops(largest, state["tensor_of_block"], len(buffers.layout.shapes))
        count = batched._vgc_decode(sent, top, blocks(buffers.mean))
        buffers.words.copy_(count.sum(dtype=torch.int64).view(1))

    def forms(self) -> dict[str, str]:
        return {wire: f"vgc(alpha={self.alpha:g}, zeta={self.zeta:g}, wire={wire})" for wire in ("paper", "compact")}


@fused
def _whole(r: Tensor, v: Tensor, g: Tensor, s: Tensor, mean: Tensor, alpha: float, tau: float, zeta: float) -> Tensor:
    """The hybrid's test for (workers, blocks, BLOCK), but all of what waits is sent, in multiples of tau, and v restarts."""
    total, spread = r + g, v + s
    sent = (total.abs() > tau) & (total * total > spread * alpha)
    step = torch.where(sent, torch.trunc(total / tau) * tau, 0.0)
    received = step[0]
    for w in range(1, r.shape[0]):
        received = received + step[w]
    mean.copy_(received * (1.0 / r.shape[0]))
    r.copy_(total - step)
    v.copy_(torch.where(sent, 0.0, spread * zeta))
    return sent.sum(-1)


@dataclasses.dataclass(frozen=True)
class WholeHybrid(Method):
    """The hybrid without its queue: what passes the test leaves at once, as the largest multiple of tau, not tau per step.

    A probe, not a method: it tells whether the hybrid loses because what is unambiguous leaves too slowly.
    """

    mode: ClassVar[Mode] = "moments"
    tau: float = 0.01
    alpha: float = 2.0
    zeta: float = 0.999

    def init(self, buffers: Buffers, seed: int) -> State:
        return {"r": torch.zeros_like(buffers.gradient), "v": torch.zeros_like(buffers.gradient)}

    def step(self, buffers: Buffers, state: State) -> None:
        assert buffers.squares is not None
        r, v, g, s = (blocks(t) for t in (state["r"], state["v"], buffers.gradient, buffers.squares))
        count = _whole(r, v, g, s, blocks(buffers.mean), self.alpha, float(np.float32(self.tau)), self.zeta)
        buffers.words.copy_(count.sum(dtype=torch.int64).view(1))

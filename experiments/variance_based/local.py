"""Local steps: every worker trains parameters of its own, and what it learned is exchanged every so many steps.

The published methods compress the gradient of every step. The other way to send less is to send less often. A worker takes some steps of
its own optimiser from parameters that all share (the *anchor*). How far it came goes through the package's exchange between virtual
workers, both rounds, as real bytes, in every round of a run; the anchor moves by the mean, and all go on from there
(``integrations/local_sgd.py``).
"""

from __future__ import annotations

import dataclasses
import time
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

import tersegrad
from experiments.variance_based import codes
from experiments.variance_based.batched import Buffers, Method, State
from experiments.variance_based.factors import CodedPowerSGD, Counted
from experiments.variance_based.layout import Layout
from experiments.variance_based.network import Mode
from tersegrad import Context
from tersegrad.exchange import scheme, virtual
from tersegrad.integrations import local_sgd


@dataclasses.dataclass(frozen=True)
class Local(Method):
    """Steps alone, then an exchange of what was learned; the compressor keeps no state.

    ``growing``: rounds grow longer as the learning rate falls, with this power of it; the first are as long as ``how`` says. At 1 workers
    drift apart equally far in every round; 2 is the rule that Gu et al. 2024 recommend (A quadratic synchronization rule for distributed
    deep learning). ``written``: messages are written in every so many rounds; in the others the code's errors are drawn
    (``codes.py``). ``low_rank``: what was learned goes as the factors of that, in place of ``compressor``.
    """

    mode: ClassVar[Mode] = "workers"
    how: str = "local_sgd(every=14)"
    compressor: str = "dithered_trellis(omega=1)"
    exchange: str = "two_shot"
    growing: float = 0.0
    written: int = 1
    low_rank: CodedPowerSGD | None = None

    def step(self, buffers: Buffers, state: State) -> None:
        """Nothing is sent between exchanges."""
        buffers.words.zero_()

    def ends(self, steps: int, rates: list[float], epoch: int) -> set[int]:
        """The steps of a run after which workers exchange, the last among them.

        ``rates`` are the epochs' learning rates, without warm-up; ``epoch`` its steps, than which no growing round is longer.
        """
        every, found, last = local_sgd.method(self.how).every, {steps - 1}, -1
        for step in range(steps):
            grown = every * (max(rates) / max(rates[step // epoch], 1e-6 * max(rates))) ** self.growing
            if step - last >= (min(round(grown), epoch) if self.growing else every):
                found.add(step)
                last = step
        return found


class Outer:
    """The rounds of one run: the anchor, the exchange, and the bytes that it took."""

    def __init__(self, method: Local, layout: Layout, anchor: Tensor, workers: int, seed: int, rounds: int = 0) -> None:
        self.method, self.layout, self.anchor, self.seed = method, layout, anchor, seed
        self.how = local_sgd.method(method.how)
        compressor: Any = tersegrad.parse(method.compressor)
        self.exchange = scheme(method.exchange).make(compressor)
        self.spec = layout.spec
        self.ranks = virtual.init(self.exchange, self.spec, workers, anchor.device)
        if compressor.init(self.spec, anchor.device) is not None:
            raise ValueError(f"{method.compressor} keeps a state, which the exchange of this experiment would drop")
        if method.written > 1 and method.exchange != "two_shot":
            raise ValueError("errors are drawn of a two-shot exchange with one code")
        self.counted: Counted | None = None
        if method.low_rank is not None:
            rows, words = anchor.new_zeros(workers, layout.padded), torch.zeros(1, dtype=torch.int64, device=anchor.device)
            self.buffers = Buffers(layout, rows, None, torch.zeros_like(anchor), words)
            self.state = method.low_rank.init(self.buffers, seed)
            self.counted = Counted(method.low_rank, layout, self.state, seed, rounds)
        self.velocity = torch.zeros_like(anchor)
        self.sent = [0] * workers
        self.count, self.written, self.seconds = 0, 0, 0.0
        self.ends, self.part = (t.to(anchor.device) for t in codes.parts(self.spec.numel, workers))
        # Of both rounds' codes, where errors are drawn.
        self.omegas = (compressor.omega, compressor.omega) if method.written > 1 else (0.0, 0.0)

    def end_round(self, params: Tensor, step: int) -> None:
        """Exchange what the workers' ``params`` (workers, padded) have learned, and let all start from the new anchor."""
        begun = time.perf_counter()
        mean = self._low_rank(params) if self.counted is not None else self._whole(params)
        self.velocity.mul_(self.how.momentum).add_(mean)
        self.anchor.sub_(mean + self.how.momentum * self.velocity, alpha=self.how.rate(step + 1))
        params.copy_(self.anchor.expand_as(params))
        self.count += 1
        self.seconds += time.perf_counter() - begun

    def _whole(self, params: Tensor) -> Tensor:
        """The mean that comes out of the compressor's exchange."""
        xs = [self.layout.packed(self.anchor - own) for own in params]
        if self.count % self.method.written == 0:
            ctx = Context(seed=self.seed, step=self.count)
            flat = codes.mean_of(self.exchange, xs, self.ranks, self.spec, ctx, self.sent)
            self.written += 1
        else:
            numel = self.spec.numel
            rows = torch.stack([F.pad(x, (0, codes.whole(numel) - numel)) for x in xs])
            flat = codes.both_rounds(rows, self.ends, self.part, self.omegas)[1][:numel]
        mean = torch.zeros_like(self.anchor)
        self.layout.unpack(flat, mean)
        return mean

    def _low_rank(self, params: Tensor) -> Tensor:
        """The mean that comes out of coded factors."""
        assert self.counted is not None
        assert self.method.low_rank is not None
        torch.sub(self.anchor, params, out=self.buffers.gradient)
        self.method.low_rank.step(self.buffers, self.state)
        if self.count in self.counted.due:
            self.counted.take(self.count)
            self.written += 1
        return self.buffers.mean

    def message_bytes(self, steps: int) -> float:
        """Bytes per step and worker, so that their ratio to 4 N is that of what leaves a worker to a float32 all-reduce in every step.

        Such an all-reduce sends 2 (p - 1)/p times 4 N bytes per worker.
        """
        if self.counted is not None:
            return self.counted.message_bytes() * self.count / steps
        workers = len(self.sent)
        return sum(self.sent) / (2 * (workers - 1)) * self.count / self.written / steps

    def described(self) -> dict[str, Any]:
        """For the result file."""
        return {"rounds": self.count, "written": self.written, "sent": self.sent, "seconds": round(self.seconds, 1)}

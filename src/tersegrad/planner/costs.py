"""Seconds that a collective takes, from the number of workers, the bytes of a message and the link.

Workers hang on one switch, each by a link that carries beta^-1 bits per second in both directions at once; nothing else is shared. With p
workers and messages of n_i bits (dense: 32 N; compressed: 32 N / c at ratio c):

=====================  ========================================================================  =======================================
ring all-reduce        2 (p-1)/p 32 N beta + 2 (p-1) L                                           dense
ring all-gather        (p-1) (max n_i beta + L)                                                  every round waits for the largest
pipelined all-gather   (sum n_i + (p-1) m) beta + (sum n_i / m + p - 1) L                        blocks of m bits
direct all-gather      max_i max((p-1) n_i, sum of the others') beta/e + L                       messages of ``exchange="all_gather"``
two-shot               2 (p-1)/p n beta/e + 2 L                                                  messages of ``exchange="two_shot"``
=====================  ========================================================================  =======================================

L is the latency of one message; e is the share of the rate that remains where all workers send to all others at once (a ring has one
sender per receiver and loses nothing; gloo's all-to-all reached 0.6 with four workers). The published estimate of variance-based
compression compares the first with the third for large N, small m and L = 0: a speed-up of at least 2 (p-1) c / p^2, above 1 from
c = p^2 / (2 (p-1)), about p/2 (:func:`tersegrad.theory.all_gather_speedup`, :func:`tersegrad.theory.break_even_ratio`). Latency is
ours; it decides at c > 1000.

What a whole exchange takes, with its coding and the lengths that travel first, is in :mod:`tersegrad.planner.trips`; what remains of it
in a training step, beside the backward pass, in :mod:`tersegrad.planner.timeline`.

Citation: Traeff, Ripke, Siebert, Balaji, Thakur, Gropp, "A pipelined algorithm for large, irregular all-gather problems", IJHPCA 2010;
Tsuzuku, Imachi, Akiba, arXiv:1802.06058.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Literal

from tersegrad.core.text import require

ETHERNET = 1514 / 1448  # bytes on the wire for a byte of TCP payload, at 1500 bytes per packet


@dataclasses.dataclass(frozen=True)
class Link:
    """What joins a worker to the others: bits per second each way, seconds until a message arrives, and headers.

    >>> Link(1e9).seconds(1e9 / 8)
    1.0
    """

    bits_per_second: float
    latency: float = 0.0
    framing: float = 1.0  # bytes on the wire for a byte that is sent; :data:`ETHERNET` for TCP
    direct: float = 1.0  # share of the rate that direct exchanges reach, all workers sending to all others at once
    collectives: Literal["ring", "tree"] = "ring"  # how all-reduce and all-gather pass messages on: gloo's rings, NCCL's trees
    gathered: float = 1.0  # share of the rate that all-gathers reach, which send messages whole where an all-reduce cuts them
    toll: float = (
        0.0  # seconds that sending a byte takes from what a worker computes meanwhile: none where a core is spare for it
    )

    def __post_init__(self) -> None:
        require(self.bits_per_second > 0, f"a link carries a positive number of bits per second, got {self.bits_per_second}")
        require(0 <= self.latency < math.inf, f"latency is in seconds and not negative, got {self.latency}")
        require(1 <= self.framing < math.inf, f"framing is at least 1, got {self.framing}")
        require(0 < self.direct <= 1, f"direct exchanges reach a share of the rate in (0, 1], got {self.direct}")
        require(0 < self.gathered <= 1, f"all-gathers reach a share of the rate in (0, 1], got {self.gathered}")
        require(0 <= self.toll < math.inf, f"sending a byte takes seconds from computing and none negative, got {self.toll}")

    @property
    def beta(self) -> float:
        """Seconds per bit."""
        return self.framing / self.bits_per_second

    def seconds(self, nbytes: float) -> float:
        """How long so many bytes occupy the link, latency left out."""
        return 8 * nbytes * self.beta

    def hops(self, workers: int) -> int:
        """Messages that follow one another until what one worker sends has reached all, in a ring or a tree.

        >>> Link(1e9).hops(16), Link(1e9, collectives="tree").hops(16)
        (15, 4)
        """
        return workers - 1 if self.collectives == "ring" else math.ceil(math.log2(workers)) if workers > 1 else 0


def ring_all_reduce(workers: int, nbytes: float, link: Link) -> float:
    """Reduce-scatter and all-gather around a ring, 2 (p-1) rounds of 1/p of the buffer; what torch does with dense gradients.

    >>> round(ring_all_reduce(8, 4 * 7.58e6, Link(1e9)), 2)
    0.42
    """
    check_workers(workers)
    return 2 * (workers - 1) * (link.seconds(nbytes / workers) + link.latency)


def all_gather_naive(nbytes: Sequence[float], link: Link) -> float:
    """Around a ring, every round as long as its largest message; ``nbytes``: one message of each worker."""
    check_workers(len(nbytes))
    return (len(nbytes) - 1) * (link.seconds(max(nbytes)) + link.latency)


def all_gather_pipelined(nbytes: Sequence[float], link: Link, block: float = 0.0) -> float:
    """Around a ring in blocks of ``block`` bytes, so that only the total counts; 0 is the limit of small blocks, latency left out.

    >>> round(1e3 * all_gather_pipelined([4 * 7.58e6 / 383.6] * 8, Link(1e9)), 1)
    5.1
    """
    check_workers(len(nbytes))
    require(block >= 0, f"a block has a positive number of bytes, got {block}")
    rounds = sum(nbytes) / block + len(nbytes) - 1 if block else 0.0
    return link.seconds(sum(nbytes) + (len(nbytes) - 1) * block) + rounds * link.latency


def direct_all_gather(nbytes: Sequence[float], link: Link, rounds: int = 1) -> float:
    """Every worker sends its message to each other one; the busiest direction of the busiest link decides."""
    check_workers(len(nbytes))
    total = sum(nbytes)
    busiest = max(max((len(nbytes) - 1) * n, total - n) for n in nbytes)
    return link.seconds(busiest) / link.direct + rounds * link.latency


def two_shot(workers: int, nbytes: float, link: Link, rounds: int = 2) -> float:
    """1/p of a message to each owner, then the owners' means to all: two direct exchanges of (p-1)/p of a message."""
    check_workers(workers)
    return 2 * (workers - 1) / workers * link.seconds(nbytes) / link.direct + rounds * link.latency


def moments_operations(numel: int, batch: int) -> int:
    """Multiply-adds that the sum of squared per-sample gradients adds to a backward pass which has formed these: 2 N B.

    >>> moments_operations(7_580_000, 64)
    970240000
    """
    require(numel >= 0, f"a model has a number of parameters, got {numel}")
    require(batch >= 1, f"a batch has at least one sample, got {batch}")
    return 2 * numel * batch


def check_workers(workers: int) -> None:
    """Refuse a group without members."""
    require(workers >= 1, f"there is at least one worker, got {workers}")

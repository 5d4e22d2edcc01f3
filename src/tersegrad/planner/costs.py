"""Seconds that an exchange takes, from the number of workers, the bytes of a message and the link.

Workers hang on one switch, each by a link that carries beta^-1 bits per second in both directions at once; nothing else is shared. With p
workers and messages of n_i bits (dense: 32 N; compressed: 32 N / c at ratio c):

=====================  ========================================================================  =======================================
ring all-reduce        2 (p-1)/p 32 N beta + 2 (p-1) L                                           dense
ring all-gather        (p-1) (max n_i beta + L)                                                  every round waits for the largest
pipelined all-gather   (sum n_i + (p-1) m) beta + (sum n_i / m + p - 1) L                        blocks of m bits
direct all-gather      max_i max((p-1) n_i, sum of the others') beta/e + L                       what ``exchange="all_gather"`` does
two-shot               2 (p-1)/p n beta/e + 2 L                                                  what ``exchange="two_shot"`` does
=====================  ========================================================================  =======================================

L is the latency of one message; e is the share of the rate that remains where all workers send to all others at once (a ring has one
sender a receiver and loses nothing; gloo's all-to-all reached 0.6 with four workers). The published estimate of variance-based
compression compares the first with the third for large N, small m and L = 0: a speed-up of at least 2 (p-1) c / p^2, above 1 from
c = p^2 / (2 (p-1)), about p/2 (:func:`tersegrad.theory.all_gather_speedup`, :func:`tersegrad.theory.break_even_ratio`). Latency is
ours; it decides at c > 1000.

Citation: Traeff, Ripke, Siebert, Balaji, Thakur, Gropp, "A pipelined algorithm for large, irregular all-gather problems", IJHPCA 2010;
Tsuzuku, Imachi, Akiba, arXiv:1802.06058.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Literal

from tersegrad.core.text import require

ETHERNET = 1514 / 1448  # bytes on the wire for a byte of TCP payload, at 1500 bytes a packet

ExchangeName = Literal["all_reduce", "two_shot", "all_gather"]


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

    def __post_init__(self) -> None:
        require(self.bits_per_second > 0, f"a link carries a positive number of bits per second, got {self.bits_per_second}")
        require(0 <= self.latency < math.inf, f"latency is in seconds and not negative, got {self.latency}")
        require(1 <= self.framing < math.inf, f"framing is at least 1, got {self.framing}")
        require(0 < self.direct <= 1, f"direct exchanges reach a share of the rate in (0, 1], got {self.direct}")

    @property
    def beta(self) -> float:
        """Seconds a bit."""
        return self.framing / self.bits_per_second

    def seconds(self, nbytes: float) -> float:
        """How long so many bytes occupy the link, latency left out."""
        return 8 * nbytes * self.beta


def ring_all_reduce(workers: int, nbytes: float, link: Link) -> float:
    """Reduce-scatter and all-gather around a ring, 2 (p-1) rounds of 1/p of the buffer; what torch does with dense gradients.

    >>> round(ring_all_reduce(8, 4 * 7.58e6, Link(1e9)), 2)
    0.42
    """
    _check_workers(workers)
    return 2 * (workers - 1) * (link.seconds(nbytes / workers) + link.latency)


def all_gather_naive(nbytes: Sequence[float], link: Link) -> float:
    """Around a ring, every round as long as its largest message; ``nbytes``: one message a worker."""
    _check_workers(len(nbytes))
    return (len(nbytes) - 1) * (link.seconds(max(nbytes)) + link.latency)


def all_gather_pipelined(nbytes: Sequence[float], link: Link, block: float = 0.0) -> float:
    """Around a ring in blocks of ``block`` bytes, so that only the total counts; 0 is the limit of small blocks, latency left out.

    >>> round(1e3 * all_gather_pipelined([4 * 7.58e6 / 383.6] * 8, Link(1e9)), 1)
    5.1
    """
    _check_workers(len(nbytes))
    require(block >= 0, f"a block has a positive number of bytes, got {block}")
    rounds = sum(nbytes) / block + len(nbytes) - 1 if block else 0.0
    return link.seconds(sum(nbytes) + (len(nbytes) - 1) * block) + rounds * link.latency


def direct_all_gather(nbytes: Sequence[float], link: Link, rounds: int = 1) -> float:
    """Every worker sends its message to each other one; the busiest direction of the busiest link decides."""
    _check_workers(len(nbytes))
    total = sum(nbytes)
    busiest = max(max((len(nbytes) - 1) * n, total - n) for n in nbytes)
    return link.seconds(busiest) / link.direct + rounds * link.latency


def two_shot(workers: int, nbytes: float, link: Link, rounds: int = 2) -> float:
    """1/p of a message to each owner, then the owners' means to all: two direct exchanges of (p-1)/p of a message."""
    _check_workers(workers)
    return 2 * (workers - 1) / workers * link.seconds(nbytes) / link.direct + rounds * link.latency


def moments_operations(numel: int, batch: int) -> int:
    """Multiply-adds that the sum of squared per-sample gradients adds to a backward pass which has formed these: 2 N B.

    >>> moments_operations(7_580_000, 64)
    970240000
    """
    require(numel >= 0, f"a model has a number of parameters, got {numel}")
    require(batch >= 1, f"a batch has at least one sample, got {batch}")
    return 2 * numel * batch


@dataclasses.dataclass(frozen=True)
class Coding:
    """Seconds that one worker takes to encode, and to decode, one message for the whole buffer."""

    encode: float = 0.0
    decode: float = 0.0


@dataclasses.dataclass(frozen=True)
class Prediction:
    """Where the time of one exchange goes, and what a worker sends."""

    seconds: float
    wire: float
    coding: float
    sent: float  # bytes that leave a worker, headers left out


def predict(
    exchange: ExchangeName,
    numel: int,
    workers: int,
    link: Link,
    bits: float = 32.0,
    coding: Coding | None = None,
    fixed_size: bool = False,
) -> Prediction:
    """The time of one exchange of ``numel`` coordinates at ``bits`` a coordinate, nothing overlapping.

    ``all_reduce`` is torch's own ring at that width (32 for float32, 16 for bfloat16). Messages that are not of ``fixed_size`` send their
    lengths first, which takes another latency. Coding: all_gather encodes once and decodes p messages; two_shot encodes its p
    parts and a mean of one, and decodes p parts twice.

    >>> link = Link(100e6, framing=ETHERNET)
    >>> for exchange, bits in (("all_reduce", 32.0), ("all_reduce", 16.0), ("two_shot", 1.0), ("all_gather", 0.03)):
    ...     print(exchange, bits, f"{predict(exchange, 6_553_600, 4, link, bits).seconds:.3f} s")
    all_reduce 32.0 3.289 s
    all_reduce 16.0 1.645 s
    two_shot 1.0 0.103 s
    all_gather 0.03 0.006 s
    """
    require(numel >= 0, f"a buffer has a number of coordinates, got {numel}")
    require(0 <= bits < math.inf, f"bits per coordinate must not be negative, got {bits}")
    require(
        exchange in ("all_reduce", "two_shot", "all_gather"),
        f"exchange is all_reduce, two_shot or all_gather, got {exchange!r}",
    )
    _check_workers(workers)
    work, nbytes, lengths = coding or Coding(), numel * bits / 8, 0 if fixed_size else 1
    if exchange == "all_reduce":
        wire, coded = ring_all_reduce(workers, nbytes, link), work.encode + work.decode
        sent = 2 * (workers - 1) / workers * nbytes
    elif exchange == "two_shot":
        wire = two_shot(workers, nbytes, link, rounds=2 + 2 * lengths)
        coded = (1 + 1 / workers) * work.encode + 2 * work.decode
        sent = 2 * (workers - 1) / workers * nbytes
    else:
        wire = direct_all_gather([nbytes] * workers, link, rounds=1 + lengths)
        coded = work.encode + workers * work.decode
        sent = (workers - 1) * nbytes
    if workers == 1:
        wire = 0.0
    return Prediction(wire + coded, wire, coded, sent)


def _check_workers(workers: int) -> None:
    require(workers >= 1, f"there is at least one worker, got {workers}")

"""One exchange as a trip: work of the processor and time on the wire, in the order in which the engine takes them.

A trip is a list of legs. Each leg is work (coding, copying) and then a collective, which occupies the wire for ``busy`` seconds and whose
result is there ``delay`` seconds later; ``last`` is the work after the last collective. Where no core is spare for sending, a collective
takes ``toll`` seconds from whatever the worker computes while it is under way. The legs are those of the exchanges' own code:
compressors without a fixed size send lengths first, by a small all-gather; two_shot encodes its p parts and the mean of one of
them, and decodes p parts twice, the second time by another compressor where gradients have error feedback; all_gather encodes once and
decodes p messages; hierarchical sums exactly inside a machine, exchanges 1/n of the buffer per rank between machines, and hands the
means back.

A machine's link is shared by its ``per_node`` workers. Rings pass each machine once, so a dense all-reduce sends as much per machine as
per worker; exchanges in which every worker sends to all others send ``per_node`` times as much, which hierarchical saves.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Literal

from tersegrad.core.text import require
from tersegrad.planner.costs import Link, check_workers

IN, OUT = 2, 3  # passes over memory of the engine, by the clock
INSIDE = Link(100e9, latency=20e-6)  # inside a machine, unless told otherwise

ExchangeName = Literal["all_reduce", "two_shot", "all_gather", "hierarchical", "reduce_scatter"]
NAMES: tuple[ExchangeName, ...] = ("all_reduce", "two_shot", "all_gather", "hierarchical", "reduce_scatter")


@dataclasses.dataclass(frozen=True)
class Coding:
    """Seconds of one worker's processor: per coordinate, and per message whatever its length.

    ``copy``: to read and write a float32 coordinate once. Around an exchange the engine passes over memory about ``IN`` times on the way in
    (gradients into groups, messages together) and ``OUT`` times on the way out (means, the finite check, back to the gradients).
    """

    encode: float = 0.0
    decode: float = 0.0
    add: float | None = None  # decode and add in one pass; as long as ``decode`` unless told otherwise
    each_encode: float = 0.0
    each_decode: float = 0.0
    copy: float = 0.0

    def encoding(self, numel: float, messages: int = 1) -> float:
        """Seconds to encode so many coordinates in so many messages."""
        return numel * self.encode + messages * self.each_encode

    def decoding(self, numel: float, messages: int = 1) -> float:
        """Seconds to decode messages with so many coordinates in all."""
        return numel * self.decode + messages * self.each_decode

    def adding(self, numel: float, messages: int) -> float:
        """Seconds to add up so many messages of ``numel`` coordinates each."""
        more = self.decode if self.add is None else self.add
        return numel * (self.decode + (messages - 1) * more) + messages * self.each_decode


@dataclasses.dataclass(frozen=True)
class Measured:
    """What one compressor costs on one machine."""

    coding: Coding
    bits: float  # per coordinate, of a message
    error: float  # of a message: ||C(y) - y||^2 / ||y||^2
    fixed_size: bool = False
    means: Measured | None = None  # what compresses the means of a second round, where that is another compressor


@dataclasses.dataclass(frozen=True)
class Leg:
    """Work, then a collective; ``sent``: bytes that leave a machine in it; ``toll``: seconds that it takes from computing meanwhile."""

    work: float
    busy: float = 0.0
    delay: float = 0.0
    sent: float = 0.0
    toll: float = 0.0

    def after(self, seconds: float) -> Leg:
        """The same with more work before it."""
        return dataclasses.replace(self, work=self.work + seconds)


@dataclasses.dataclass(frozen=True)
class Trip:
    """The legs of one exchange, and the work after the last of them."""

    legs: tuple[Leg, ...]
    last: float = 0.0

    @property
    def wire(self) -> float:
        return sum(leg.busy + leg.delay for leg in self.legs)

    @property
    def coding(self) -> float:
        return sum(leg.work for leg in self.legs) + self.last

    @property
    def seconds(self) -> float:
        """Nothing overlapping."""
        return self.wire + self.coding

    @property
    def sent(self) -> float:
        """Bytes that leave a machine, headers left out."""
        return sum(leg.sent for leg in self.legs)


@dataclasses.dataclass(frozen=True)
class Topology:
    """Machines of ``per_node`` workers (the last may have fewer), joined by ``link`` per machine; ``inside``: per worker, within one.

    >>> Topology(16, Link(1e9), per_node=8).nodes
    2
    """

    workers: int
    link: Link
    per_node: int = 1
    inside: Link = INSIDE

    def __post_init__(self) -> None:
        check_workers(self.workers)
        require(self.per_node >= 1, f"a machine has at least one worker, got {self.per_node}")

    @property
    def nodes(self) -> int:
        return math.ceil(self.workers / self.per_node)

    @property
    def lanes(self) -> int:
        """Workers of a full machine."""
        return min(self.per_node, self.workers)

    def gather(self, nbytes: float) -> Leg:
        """Every worker's ``nbytes`` to all, passed on from one to the next."""
        link, p = (self.inside if self.nodes == 1 else self.link), self.workers
        own = (p - 1) * nbytes
        crossing = 0.0 if self.nodes == 1 else own
        return Leg(0.0, link.seconds(own) / link.gathered, link.hops(p) * link.latency, crossing, own * link.toll)

    def to_all(self, nbytes: float) -> Leg:
        """``nbytes`` from every worker to each other one, directly."""
        n, p = self.lanes, self.workers
        local = self.inside.seconds((n - 1) * nbytes) / self.inside.direct
        toll = (n - 1) * nbytes * self.inside.toll
        if self.nodes == 1:
            return Leg(0.0, local, self.inside.latency if p > 1 else 0.0, toll=toll)
        crossing, toll = n * (p - n) * nbytes, toll + (p - n) * nbytes * self.link.toll
        return Leg(0.0, max(local, self.link.seconds(crossing) / self.link.direct), self.link.latency, crossing, toll)

    def reduce(self, nbytes: float) -> Leg:
        """Torch's own all-reduce of a buffer of ``nbytes``."""
        link, p = (self.inside if self.nodes == 1 else self.link), self.workers
        share = 2 * (p - 1) / p * nbytes
        crossing = 0.0 if self.nodes == 1 else share
        return Leg(0.0, link.seconds(share), 2 * link.hops(p) * link.latency, crossing, share * link.toll)


def all_reduce(numel: float, topology: Topology, bits: float, coding: Coding, fixed_size: bool = True) -> Trip:
    """Torch's all-reduce at ``bits`` per coordinate; coding is the cast to fewer bits and back."""
    leg = topology.reduce(numel * bits / 8)
    return Trip((leg.after(coding.encoding(numel)),), coding.decoding(numel))


def all_gather(numel: float, topology: Topology, bits: float, coding: Coding, fixed_size: bool = False) -> Trip:
    """Every worker's message to all."""
    nbytes, p = numel * bits / 8, topology.workers
    work = IN * numel * coding.copy + coding.encoding(numel)
    last = coding.adding(numel, p) + OUT * numel * coding.copy
    if fixed_size:
        return Trip((topology.gather(nbytes).after(work),), last)
    return Trip((topology.gather(8).after(work), topology.to_all(nbytes)), last)


def reduce_scatter(numel: float, topology: Topology, bits: float, coding: Coding, fixed_size: bool = False) -> Trip:
    """Every worker's parts to their owners, which add them up."""
    p = topology.workers
    work = IN * numel * coding.copy + coding.encoding(numel, p)
    parts = topology.to_all(numel * bits / 8 / p)
    last = coding.adding(numel / p, p) + OUT * numel / p * coding.copy
    return Trip((parts.after(work),) if fixed_size else (topology.gather(8 * p).after(work), parts), last)


def two_shot(
    numel: float, topology: Topology, bits: float, coding: Coding, fixed_size: bool = False, means: Measured | None = None
) -> Trip:
    """A reduce-scatter, then the owners' means to all, compressed again: as ``means`` says, or as the gradients are."""
    p, again = topology.workers, means or Measured(coding, bits, 0.0, fixed_size)
    first = reduce_scatter(numel, topology, bits, coding, fixed_size)
    between = coding.adding(numel / p, p) + again.coding.encoding(numel / p)
    part = numel * again.bits / 8 / p
    second = (topology.gather(part),) if again.fixed_size else (topology.gather(8), topology.to_all(part))
    last = again.coding.decoding(numel, p) + OUT * numel * coding.copy
    return Trip((*first.legs, second[0].after(between), *second[1:]), last)


def hierarchical(
    numel: float, topology: Topology, bits: float, coding: Coding, fixed_size: bool = False, means: Measured | None = None
) -> Trip:
    """Exact sums inside a machine, a two_shot of 1/n of the buffer between machines, and the means back."""
    n, nodes, inside = topology.lanes, topology.nodes, topology.inside
    # Inside a machine every worker sends 1/n of its float32 vector to each of the others, before and after.
    local = Leg(0.0, inside.seconds((n - 1) * 4 * numel / n) / inside.direct, inside.latency if n > 1 else 0.0)
    summing = numel * coding.copy  # n vectors of 1/n
    if nodes == 1:
        return Trip((local.after(IN * numel * coding.copy), local.after(summing)), OUT * numel * coding.copy)
    # The n lanes of a machine travel at once and share its link, which is as if one lane had the rate of 1/n of it.
    shared = dataclasses.replace(topology.link, bits_per_second=topology.link.bits_per_second / n)
    lane = two_shot(numel / n, Topology(nodes, shared), bits, dataclasses.replace(coding, copy=0.0), fixed_size, means)
    legs = [dataclasses.replace(leg, sent=n * leg.sent) for leg in lane.legs]
    legs[0] = legs[0].after(summing)
    return Trip((local.after(IN * numel * coding.copy), *legs, local.after(lane.last)), OUT * numel * coding.copy)


TRIPS: dict[str, Callable[..., Trip]] = {
    f.__name__: f for f in (all_reduce, two_shot, all_gather, hierarchical, reduce_scatter)
}


def trip(
    exchange: ExchangeName,
    numel: float,
    topology: Topology,
    bits: float = 32.0,
    coding: Coding | None = None,
    fixed_size: bool = False,
    means: Measured | None = None,
) -> Trip:
    """The trip of one exchange of ``numel`` coordinates at ``bits`` per coordinate.

    ``all_reduce`` is torch's own at that width (32 for float32, 16 for bfloat16). Messages that are not of ``fixed_size`` send their
    lengths first. ``means``: of exchanges with a second round, what its messages cost where they are not like the first round's.
    """
    require(numel >= 0, f"a buffer has a number of coordinates, got {numel}")
    require(0 <= bits < math.inf, f"bits per coordinate must not be negative, got {bits}")
    require(exchange in NAMES, f"exchange is {', '.join(NAMES[:-1])} or {NAMES[-1]}, got {exchange!r}")
    again = {} if means is None or exchange not in ("two_shot", "hierarchical") else {"means": means}
    return TRIPS[exchange](numel, topology, bits, coding or Coding(), fixed_size, **again)


def predict(
    exchange: ExchangeName,
    numel: int,
    workers: int,
    link: Link,
    bits: float = 32.0,
    coding: Coding | None = None,
    fixed_size: bool = False,
    means: Measured | None = None,
) -> Trip:
    """One exchange between workers on machines of their own, nothing overlapping.

    >>> from tersegrad.planner import ETHERNET
    >>> link = Link(100e6, framing=ETHERNET)
    >>> for exchange, bits in (("all_reduce", 32.0), ("all_reduce", 16.0), ("two_shot", 1.0), ("all_gather", 0.03)):
    ...     print(exchange, bits, f"{predict(exchange, 6_553_600, 4, link, bits).seconds:.3f} s")
    all_reduce 32.0 3.289 s
    all_reduce 16.0 1.645 s
    two_shot 1.0 0.103 s
    all_gather 0.03 0.006 s
    """
    return trip(exchange, numel, Topology(workers, link), bits, coding, fixed_size, means)


def break_even(dense: float, sent: float, seconds: float) -> float:
    """Bits per second of the link below which sending ``sent`` bytes after ``seconds`` of work beats sending ``dense`` bytes.

    >>> break_even(3e6, 1e6, 0.016)
    1000000000.0
    """
    return max(0.0, 8 * (dense - sent) / max(seconds, 1e-9))

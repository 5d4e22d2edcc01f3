"""Exchanges by name: ``scheme("two_shot")``, ``scheme("hierarchical(ranks_per_node=8)")``, ``scheme("power_sgd(rank=4)")``.

A scheme is an exchange without its compressor: a configuration with a text form, from which an integration makes an exchange for each
group of parameters.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import socket
import types
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from tersegrad.core.errors import BadConfiguration
from tersegrad.core.protocol import Compressor, needs_second_moment
from tersegrad.core.text import Configuration, require
from tersegrad.exchange.all_gather import AllGatherExchange
from tersegrad.exchange.all_reduce import DTYPES, AllReduceExchange, Precision
from tersegrad.exchange.combine import Rule
from tersegrad.exchange.hierarchical import HierarchicalExchange
from tersegrad.exchange.power_sgd import PowerSGDExchange
from tersegrad.exchange.reduce_scatter import ReduceScatterExchange
from tersegrad.exchange.steps import Exchange, ProcessGroup
from tersegrad.exchange.two_shot import TwoShotExchange, for_means
from tersegrad.recipes import known, parse_form


@dataclasses.dataclass(frozen=True)
class Scheme(Configuration):
    """How messages travel. ``make`` gives the exchange; a compressor is required unless ``compresses`` is true."""

    compresses: ClassVar[bool] = False  # the exchange is a compressor of its own
    shards: ClassVar[bool] = False  # every rank gets the sum of its own part instead of the mean of all
    remembers: ClassVar[bool] = True  # whether an exchange that compresses by itself keeps anything between steps

    @property
    def recompresses(self) -> bool:
        """Whether means are compressed a second time."""
        return False

    def again(self, first: Compressor[Any]) -> Compressor[Any] | None:
        """What means are compressed with where gradients are by ``first``; None: not a second time."""
        return None

    def make(self, first: Compressor[Any], second: Compressor[Any] | None = None) -> Exchange[Any]:
        """The exchange with its compressor, and the one of its second round if that differs."""
        raise NotImplementedError

    def resolve(self, group: ProcessGroup) -> Scheme:
        """The same scheme with what only the process group knows (a collective call)."""
        return self


@dataclasses.dataclass(frozen=True)
class AllGatherScheme(Scheme):
    """Every rank sends its message to all; each combines them, by default to their mean (``exchange/combine.py``)."""

    name: ClassVar[str] = "all_gather"

    mean: Literal["workers", "senders"] = "workers"
    clip: Literal["median"] | None = None
    gate: float | None = None

    def __post_init__(self) -> None:
        require(self.mean in ("workers", "senders"), f"all_gather: mean is over workers or senders, got {self.mean!r}")
        require(self.clip in (None, "median"), f"all_gather: clip is none or median, got {self.clip!r}")
        require(self.gate is None or self.gate >= 1, f"all_gather: gate is none or at least 1 median, got {self.gate}")

    def make(self, first: Compressor[Any], second: Compressor[Any] | None = None) -> Exchange[Any]:
        return AllGatherExchange(first, Rule(self.mean, self.clip, self.gate))


@dataclasses.dataclass(frozen=True)
class TwoShotScheme(Scheme):
    """Reduce-scatter and all-gather, both compressed; the means with ``second``, by default as the gradients are but without feedback."""

    name: ClassVar[str] = "two_shot"

    second: Compressor[Any] | None = None

    def __post_init__(self) -> None:
        made = self.second is None or isinstance(self.second, Compressor)
        require(made, f"two_shot: second is a compressor, as in two_shot(second=bf16), got {self.second!r}")
        require(
            not needs_second_moment(self.second),
            f"two_shot: {self.second} decides by the variance over samples, and means have none",
        )

    @property
    def recompresses(self) -> bool:
        return True

    def again(self, first: Compressor[Any]) -> Compressor[Any] | None:
        found: Compressor[Any] = self.second or for_means(first)
        return found

    def make(self, first: Compressor[Any], second: Compressor[Any] | None = None) -> Exchange[Any]:
        return TwoShotExchange(first, self.second if second is None else second)


@dataclasses.dataclass(frozen=True)
class HierarchicalScheme(Scheme):
    """Exact inside a node, compressed between nodes; without ``ranks_per_node``, ranks with one host name share a node."""

    name: ClassVar[str] = "hierarchical"

    ranks_per_node: int | None = None
    between: Literal["two_shot", "all_gather"] = "two_shot"

    def __post_init__(self) -> None:
        positive = self.ranks_per_node is None or self.ranks_per_node >= 1
        require(positive, f"hierarchical: ranks_per_node is at least 1, got {self.ranks_per_node}")
        require(
            self.between in ("two_shot", "all_gather"), f"hierarchical: between is two_shot or all_gather, got {self.between!r}"
        )

    @property
    def recompresses(self) -> bool:
        return SCHEMES[self.between]().recompresses

    def again(self, first: Compressor[Any]) -> Compressor[Any] | None:
        return SCHEMES[self.between]().again(first)

    def resolve(self, group: ProcessGroup) -> Scheme:
        return self if self.ranks_per_node else dataclasses.replace(self, ranks_per_node=ranks_per_host(group))

    def make(self, first: Compressor[Any], second: Compressor[Any] | None = None) -> Exchange[Any]:
        require(self.ranks_per_node is not None, "how many ranks share a node? hierarchical(ranks_per_node=...)")
        assert self.ranks_per_node is not None
        return HierarchicalExchange(SCHEMES[self.between]().make(first, second), self.ranks_per_node)


@dataclasses.dataclass(frozen=True)
class PowerSGDScheme(Scheme):
    """Rank-``rank`` factors by power iteration, instead of a compressor; ``factors`` compresses them in their turn."""

    name: ClassVar[str] = "power_sgd"
    compresses: ClassVar[bool] = True

    rank: int = 4
    factors: Compressor[Any] | None = None

    def __post_init__(self) -> None:
        PowerSGDExchange(self.rank, self.factors)

    def make(self, first: Compressor[Any] | None = None, second: Compressor[Any] | None = None) -> Exchange[Any]:
        return PowerSGDExchange(self.rank, self.factors)


@dataclasses.dataclass(frozen=True)
class AllReduceScheme(Scheme):
    """Torch's own all-reduce in ``dtype``, without a compressor: what not to compress means."""

    name: ClassVar[str] = "all_reduce"
    compresses: ClassVar[bool] = True
    remembers: ClassVar[bool] = False

    dtype: Precision = "bf16"

    def __post_init__(self) -> None:
        require(self.dtype in DTYPES, f"all_reduce: dtype is one of {', '.join(DTYPES)}, got {self.dtype!r}")

    def make(self, first: Compressor[Any] | None = None, second: Compressor[Any] | None = None) -> Exchange[Any]:
        return AllReduceExchange(self.dtype)


@dataclasses.dataclass(frozen=True)
class ReduceScatterScheme(Scheme):
    """Every rank gets the sum of its own part; sharded training makes it, with where the parts end."""

    name: ClassVar[str] = "reduce_scatter"
    shards: ClassVar[bool] = True

    ends: tuple[int, ...]

    def make(self, first: Compressor[Any], second: Compressor[Any] | None = None) -> Exchange[Any]:
        return ReduceScatterExchange(first, self.ends)


SCHEMES: Mapping[str, type[Scheme]] = types.MappingProxyType(
    {p.name: p for p in (AllGatherScheme, TwoShotScheme, HierarchicalScheme, PowerSGDScheme, AllReduceScheme)}
)


def scheme(text: str | Scheme) -> Scheme:
    """The scheme that a text form describes.

    >>> scheme("power_sgd(rank=2)")
    PowerSGDScheme(rank=2, factors=None)
    >>> scheme("ring")
    Traceback (most recent call last):
    tersegrad.core.errors.BadConfiguration: there is no exchange called 'ring'...
    """
    if isinstance(text, Scheme):
        return text
    made = parse_form(text, {**known(), **SCHEMES}, "exchange")
    if not isinstance(made, Scheme):
        raise BadConfiguration(f"{text} is a compressor; the exchanges are {', '.join(SCHEMES)}")
    return made


def ranks_per_host(group: ProcessGroup) -> int:
    """How many ranks of a group run on each host, from their host names (a collective call)."""
    return per_node(group.gather(hashlib.blake2b(socket.gethostname().encode(), digest_size=16).digest()))


def per_node(hosts: list[bytes]) -> int:
    """The size of nodes, given each rank's host.

    >>> per_node([b"a", b"a", b"b", b"b", b"c"])
    2
    """
    runs = [(host, len(list(ranks))) for host, ranks in itertools.groupby(hosts)]
    first = runs[0][1]
    even = all(count == first for _, count in runs[:-1]) and runs[-1][1] <= first
    if not even or len({host for host, _ in runs}) != len(runs):
        raise BadConfiguration(
            f"the ranks lie on hosts in runs of {[count for _, count in runs]}: hierarchical needs nodes of one size (the last may be "
            "smaller) with consecutive ranks, as torchrun numbers them; or say hierarchical(ranks_per_node=...)"
        )
    return first

"""A lane: one group of parameters, the process group it travels over, its compressor and exchange, and its committed state."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from tersegrad.core import state as states
from tersegrad.core.protocol import Compressor, Context, Spec, has_fixed_size, needs_second_moment
from tersegrad.engine.groups import Group
from tersegrad.engine.meter import Meter, TimedGroup, watch
from tersegrad.engine.settings import Settings
from tersegrad.exchange import Exchange, Part, Scheme, scheme


@dataclasses.dataclass
class Meters:
    """Counters of the coding of an exchange's two rounds."""

    first: Meter = dataclasses.field(default_factory=Meter)
    second: Meter = dataclasses.field(default_factory=Meter)


@dataclasses.dataclass
class Lane:
    """How one group is exchanged. ``scheme`` is resolved: it knows what only the process group knows."""

    group: Group
    link: TimedGroup
    compressor: Compressor[Any]
    scheme: Scheme
    exchange: Exchange[Any]
    state: Any

    @staticmethod
    def make(
        group: Group, link: TimedGroup, compressor: Compressor[Any], how: Scheme, settings: Settings, meters: Meters
    ) -> Lane:
        """A lane with a fresh state."""
        exchange = _of(compressor, how, group, settings, meters)
        return Lane(group, link, compressor, how, exchange, exchange.init(group.spec, group.device, link.rank, link.size))

    def recount(self, settings: Settings, meters: Meters) -> None:
        """Count the coding in other meters from now on."""
        self.exchange = _of(self.compressor, self.scheme, self.group, settings, meters)

    def plain(self, compressor: Compressor[Any], meters: Meters) -> Exchange[Any]:
        """The same route with another, stateless compressor: for dense steps, and to compare with the exact result."""
        return build(compressor, scheme("two_shot") if self.scheme.compresses else self.scheme, meters)

    def fresh(self, exchange: Exchange[Any] | None = None) -> Any:
        """The state before the first step."""
        return (exchange or self.exchange).init(self.group.spec, self.group.device, self.link.rank, self.link.size)

    def context(self, seed: int, step: int) -> Context:
        """The public facts of this group's messages in one step."""
        ctx = Context(seed=seed, step=step % (1 << 32), buffer=self.group.buffer)
        return ctx if self.group.branch is None else ctx.child(self.group.branch)

    def parts(self, state: Any = None) -> list[Part]:
        """The state by coordinates."""
        return self.exchange.parts(self.state if state is None else state, self.group.spec, self.link.rank, self.link.size)

    def join(self, parts: list[Any]) -> Any:
        """A state from the states of its parts."""
        return self.exchange.join(parts, self.group.spec, self.link.rank, self.link.size)

    @property
    def memory(self) -> int:
        """Bytes of the committed state."""
        return sum(states.nbytes(part.state) for part in self.parts())

    @functools.cached_property
    def stateful(self) -> bool:
        """Whether anything is kept between steps, by what all ranks know."""
        if self.scheme.compresses:
            return self.scheme.remembers
        return self.compressor.init(Spec.flat(1), "cpu") is not None

    @functools.cached_property
    def fixed_size(self) -> bool:
        """Whether nothing has to be known of a message before it can be sent."""
        return not self.scheme.remembers if self.scheme.compresses else has_fixed_size(self.compressor)

    @functools.cached_property
    def waits(self) -> bool:
        """Whether the host waits for the device before it can send."""
        return not self.fixed_size or self.link.by_host(self.group.device)

    @functools.cached_property
    def by_variance(self) -> bool:
        """Whether the messages need second moments."""
        return needs_second_moment(self.compressor)

    def sent_exactly(self) -> dict[str, str]:
        """Parameters that the exchange itself sends exactly, each with the reason."""
        tell = getattr(self.exchange, "sent_exactly", None)
        return {} if tell is None else dict(tell(self.group.spec))


def build(first: Compressor[Any], how: Scheme, meters: Meters, second: Compressor[Any] | None = None) -> Exchange[Any]:
    """The exchange of a scheme, its coding counted."""
    return how.make(watch(first, meters.first), watch(second or first, meters.second))


def _of(compressor: Compressor[Any], how: Scheme, group: Group, settings: Settings, meters: Meters) -> Exchange[Any]:
    """The exchange of a group, its small tensors apart."""
    again = how.again(compressor)
    second = None if again is None else settings.effective(again, group.dtype)
    return build(settings.effective(compressor, group.dtype), how, meters, second)

"""A turn: one forward pass, as a collector sees it."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.nn import Parameter

from tersegrad.core import private

if TYPE_CHECKING:
    from tersegrad.moments.collector import Collector


@dataclasses.dataclass(eq=False, slots=True)
class Turn:
    """A forward pass."""

    # How often it has used each parameter, by id (hashing a tensor runs Python code), and whether one of them more than once.
    uses: dict[int, int] = dataclasses.field(default_factory=dict)
    again: bool = False
    # Whether the model's own call goes on, and what that has counted.
    running: bool = False
    counters: dict[int, Tensor] = dataclasses.field(default_factory=dict)

    def alone(self, parameter: Parameter) -> bool:
        """Whether it used the parameter once."""
        return not self.again or self.uses.get(id(parameter), 1) == 1

    def count(self, batches: Tensor) -> None:
        """Add one to a module's counter of batches, by the end of the model's call: one launch serves all modules."""
        if self.running and id(batches) not in self.counters:
            self.counters[id(batches)] = batches
        else:
            batches.add_(1)

    def end(self) -> None:
        """The model's call is over, or has failed."""
        self.running = False
        if self.counters:
            private.of("_foreach_add_")(list(self.counters.values()), 1)
            self.counters.clear()


class Begin:
    """Hook before the model's call. Copies and pickles of the model get one that does nothing."""

    def __init__(self, collector: Collector | None = None) -> None:
        self.collector = collector

    def __call__(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.collector is not None:
            self.collector.begin(args, kwargs)

    def __reduce__(self) -> Any:  # what copy.deepcopy uses, too
        return type(self), ()


class End(Begin):
    """Hook after it."""

    def __call__(self, model: nn.Module, args: tuple[Any, ...], out: Any) -> None:
        if self.collector is not None:
            self.collector.turn.end()

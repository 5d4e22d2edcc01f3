"""A handle that may be asked for things before its parameters are known: they are done when the parameters arrive."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tersegrad.core.errors import BadConfiguration
from tersegrad.engine.engine import Engine
from tersegrad.engine.handle import Handle
from tersegrad.engine.logs import Log, Target


class LateHandle(Handle):
    """Its integration sets ``_engine`` when it has the parameters, and calls :meth:`_catch_up`."""

    _engine: Engine | None = None

    def __init__(self) -> None:
        self._asked: list[Callable[[], Any]] = []

    @property
    def engine(self) -> Engine:  # type: ignore[override]
        if self._engine is None:
            raise BadConfiguration("this handle learns its parameters in the first step, or by bind(model)")
        return self._engine

    def load_state_dicts(self, state_dicts: Sequence[Mapping[str, Any]]) -> None:
        if self._engine is None:
            given = list(state_dicts)
            self._asked.append(lambda: self.load_state_dicts(given))
            return
        super().load_state_dicts(state_dicts)

    def log_to(self, target: Target, *, every: int = 10, layers: bool = False, all_ranks: bool = False) -> Log | None:
        if self._engine is None:
            self._asked.append(lambda: self.log_to(target, every=every, layers=layers, all_ranks=all_ranks))
            return None
        return super().log_to(target, every=every, layers=layers, all_ranks=all_ranks)

    def _catch_up(self) -> None:
        """Do what was asked for before."""
        asked, self._asked = self._asked, []
        for do in asked:
            do()

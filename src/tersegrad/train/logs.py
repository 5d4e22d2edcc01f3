"""A run's log: JSON lines, written as the run goes. ``tersegrad report`` makes a page of it.

The first line of a run has its job (``run``), then follow one line per step (``step``), one now and then on what is exchanged
(``exchanged``, with the numbers of :meth:`tersegrad.engine.Handle.log_to`, by layer), and at the end its result (``result``).
"""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from typing import Any

from tersegrad.core.errors import BadConfiguration
from tersegrad.report import as_json


class Log:
    """Appends to a file; a run that continues goes on below the lines of the one before."""

    def __init__(self, path: Path, **facts: Any) -> None:
        self._begin = time.perf_counter()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("a")
        except OSError as error:
            raise BadConfiguration(f"cannot write the log {path}: {error.strerror}") from None
        self.write(**facts)

    def write(self, **facts: Any) -> None:
        """One line; facts that are None are left out."""
        line: dict[str, Any] = {"seconds": round(time.perf_counter() - self._begin, 3)}
        for name, value in facts.items():
            if value is not None:
                line[name] = str(value) if isinstance(value, float) and not math.isfinite(value) else as_json(value)
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()

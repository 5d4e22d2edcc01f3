"""Runs in a JSON file: what is to be made, what is there."""

from __future__ import annotations

import dataclasses
import datetime
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from experiments.advice.loop import Run
from experiments.advice.settings import Setting
from tersegrad import bench

RESULTS = Path(__file__).parent / "results"


@dataclasses.dataclass(frozen=True)
class Work:
    """One run that is to be made."""

    task: str
    optimizer: str
    setting: Setting
    seed: int
    rate: float
    steps: int


def done(runs: Iterable[Run]) -> set[Work]:
    """What these runs have made."""
    return {Work(r.task, r.optimizer, r.setting, r.seed, r.rate, r.steps) for r in runs}


def read(path: Path) -> list[Run]:
    """The runs of a file."""
    if not path.exists():
        return []
    return [read_run(saved) for saved in json.loads(path.read_text())["results"]]


def read_run(saved: dict[str, Any]) -> Run:
    """A run from its JSON form."""
    return Run(**{**saved, "setting": Setting(**saved["setting"])})


def write(path: Path, runs: Sequence[Run]) -> None:
    """The JSON file, complete or as it was before."""
    path.parent.mkdir(parents=True, exist_ok=True)
    head = {"date": datetime.datetime.now(datetime.UTC).date().isoformat(), "machine": bench.describe()}
    body = ",\n".join(json.dumps(dataclasses.asdict(run)) for run in runs)
    made = path.with_suffix(".part")
    made.write_text(f'{json.dumps(head)[:-1]}, "results": [\n{body}\n]}}\n')
    made.replace(path)

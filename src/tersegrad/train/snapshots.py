"""Checkpoints of a run in a folder that all workers share: ``step-00000120/`` with ``shared.pt`` and one file per rank.

A snapshot counts once ``complete.json`` is there, which is written last: a run that dies while saving continues from the one
before. The two newest are kept.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from tersegrad.core.errors import BadConfiguration
from tersegrad.integrations.processes import Worker

KEEP = 2


def write(
    folder: Path, step: int, facts: Mapping[str, Any], shared: Mapping[str, Any], own: Mapping[str, Any], worker: Worker
) -> None:
    """Save what all ranks share (once) and what is this rank's own (a collective call)."""
    place = folder / f"step-{step:08d}"
    place.mkdir(parents=True, exist_ok=True)
    # A snapshot of the same step is written over: not before all have read it, and it does not count meanwhile.
    worker.barrier()
    if worker.leads:
        (place / "complete.json").unlink(missing_ok=True)
    worker.barrier()
    _save(own, place / f"rank{worker.rank}.pt")
    if worker.leads:
        _save(shared, place / "shared.pt")
    worker.barrier()
    if worker.leads:
        text = json.dumps({"step": step, "size": worker.size, **facts}, indent=2)
        (place / "complete.part").write_text(text)
        os.replace(place / "complete.part", place / "complete.json")
        for old in complete(folder)[:-KEEP]:
            shutil.rmtree(old)


def complete(folder: Path) -> list[Path]:
    """The complete snapshots, oldest first."""
    return sorted(path.parent for path in folder.glob("step-*/complete.json"))


def newest(folder: Path, worker: Worker) -> Path | None:
    """The snapshot that all workers continue from: the newest that the leading worker sees (a collective call)."""
    found = complete(folder)
    chosen = worker.share(str(found[-1]) if found and worker.leads else None)
    if chosen is None:
        return None
    if not (Path(chosen) / "complete.json").exists():
        raise BadConfiguration(f"worker {worker.rank} does not see {chosen}: all machines must share the checkpoint folder")
    return Path(chosen)


def read(place: Path) -> tuple[dict[str, Any], dict[str, Any], list[dict[str, Any]]]:
    """Facts, what all ranks share, and every rank's own, in the order of ranks."""
    facts: dict[str, Any] = json.loads((place / "complete.json").read_text())
    shared: dict[str, Any] = torch.load(place / "shared.pt", map_location="cpu", weights_only=True)
    own = [torch.load(place / f"rank{r}.pt", map_location="cpu", weights_only=True) for r in range(int(facts["size"]))]
    return facts, shared, own


def _save(value: Mapping[str, Any], path: Path) -> None:
    """Under another name first, so that a reader never sees half a file."""
    part = path.with_suffix(".part")
    torch.save(dict(value), part)
    os.replace(part, path)

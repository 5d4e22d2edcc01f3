"""The server's checkpoint: one ``.npz`` file with the model, what the strategy inside keeps, and what was heard of each client.

A file is read and checked as a whole before anything is taken from it.
"""

from __future__ import annotations

import dataclasses
import json
import os
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tersegrad.core.errors import BadConfiguration
from tersegrad.integrations.flower.strategies import Value


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A server between two rounds."""

    model: dict[str, np.ndarray[Any, Any]]
    completed: int  # rounds of training
    step: int  # broadcasts
    epoch: int  # tells this run's broadcasts from another's
    clients: dict[int, tuple[int, int | None]]  # by node: its sender number, and the last step whose update was accepted
    inner: Mapping[tuple[int, str], Value]

    def write(self, path: Path) -> None:
        """Write the file; a reader sees the old one or the new one."""
        arrays = {f"model/{name}": value for name, value in self.model.items()}
        inner = []
        for number, ((level, name), value) in enumerate(self.inner.items()):
            entry: dict[str, Any] = {"level": level, "name": name, "kind": type(value).__name__}
            if isinstance(value, (dict, list)):
                parts = value.items() if isinstance(value, dict) else enumerate(value)
                entry["keys"] = list(value) if isinstance(value, dict) else len(value)
                arrays |= {f"inner/{number}/{key}": part for key, part in parts}
            else:
                entry["value"] = value
            inner.append(entry)
        facts = {
            "completed": self.completed,
            "step": self.step,
            "epoch": self.epoch,
            "clients": [[node, *known] for node, known in self.clients.items()],
            "inner": inner,
        }
        text = np.frombuffer(json.dumps(facts).encode(), dtype=np.uint8)
        path.parent.mkdir(parents=True, exist_ok=True)
        beside = path.with_suffix(f".{os.getpid()}.new.npz")
        # Names of arrays are arguments of savez.
        np.savez(beside, facts=text, **arrays)  # type: ignore[arg-type]
        beside.replace(path)

    @staticmethod
    def read(path: Path) -> Checkpoint:
        """The inverse of :meth:`write`."""
        try:
            with path.open("rb") as file, np.load(file, allow_pickle=False) as saved:
                facts = json.loads(saved["facts"].tobytes())
                model = {name[6:]: saved[name] for name in saved.files if name.startswith("model/")}
                inner: dict[tuple[int, str], Value] = {}
                for number, entry in enumerate(facts["inner"]):
                    value: Value = entry.get("value")
                    if entry["kind"] == "dict":
                        value = {key: saved[f"inner/{number}/{key}"] for key in entry["keys"]}
                    elif entry["kind"] == "list":
                        value = [saved[f"inner/{number}/{at}"] for at in range(entry["keys"])]
                    inner[int(entry["level"]), str(entry["name"])] = value
            clients = {
                int(node): (int(sender), None if heard is None else int(heard)) for node, sender, heard in facts["clients"]
            }
            completed, step, epoch = (int(facts[name]) for name in ("completed", "step", "epoch"))
        except FileNotFoundError:
            raise
        except (KeyError, TypeError, ValueError, AttributeError, OSError, EOFError, zipfile.BadZipFile) as error:
            raise BadConfiguration(f"{path} is not a checkpoint of CompressedStrategy, or it is damaged: {error}") from error
        if min(completed, step, epoch) < 0 or not model or not all(np.isfinite(value).all() for value in model.values()):
            raise BadConfiguration(f"{path} holds no finite model, or negative counts: it is damaged")
        return Checkpoint(model, completed, step, epoch, clients, inner)

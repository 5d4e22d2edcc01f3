"""Numbers of a run as it goes: ``handle.log_to(...)`` writes them to TensorBoard, a file, or anything that can be called.

A line tells of the steps since the line before. Bits, bytes and seconds are those of all of these steps; errors are measured in the step
that ends the line, by decoding this rank's messages once more. Nothing is sent for it, so ranks may log what they like, or nothing.
In steps that no log asks for, nothing is computed and no device is read.
"""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import logging
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from tersegrad.core import host
from tersegrad.core import state as states
from tersegrad.core.errors import BadConfiguration, MissingExtra
from tersegrad.core.text import require
from tersegrad.engine.layers import power_of

if TYPE_CHECKING:
    from tersegrad.engine.engine import Engine
    from tersegrad.engine.layers import Layer

Numbers = dict[str, float]
Target = str | os.PathLike[str] | Callable[[Numbers, int], Any] | Any  # the last: a SummaryWriter

log = logging.getLogger("tersegrad")


class Sink:
    """Where lines go."""

    def write(self, numbers: Numbers, words: Mapping[str, str], step: int) -> None:
        """Take one line."""
        raise NotImplementedError

    def close(self) -> None:
        """No more lines follow."""


@dataclasses.dataclass(frozen=True)
class _Call(Sink):
    """Any function of the numbers and the step: ``wandb.log``, ``mlflow.log_metrics``, a logger's ``log_metrics``."""

    function: Callable[[Numbers, int], Any]

    def write(self, numbers: Numbers, words: Mapping[str, str], step: int) -> None:
        self.function(numbers, step)


@dataclasses.dataclass(frozen=True)
class _Board(Sink):
    """A SummaryWriter."""

    writer: Any
    owned: bool = False

    def write(self, numbers: Numbers, words: Mapping[str, str], step: int) -> None:
        for name, value in numbers.items():
            self.writer.add_scalar(f"tersegrad/{name}", value, step)

    def close(self) -> None:
        if self.owned:
            self.writer.close()
        else:
            self.writer.flush()


class _File(Sink):
    """A file that lines are appended to, opened for each of them: it can be read, and moved, while the run goes on."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self.append("")
        except OSError as error:
            raise BadConfiguration(f"cannot write the log {path}: {error.strerror}") from None

    def append(self, text: str) -> None:
        with self.path.open("a", newline="", encoding="utf-8") as file:
            file.write(text)


class _Lines(_File):
    """JSON lines."""

    def write(self, numbers: Numbers, words: Mapping[str, str], step: int) -> None:
        finite = {name: value if math.isfinite(value) else None for name, value in numbers.items()}
        self.append(json.dumps({"step": step, **words, **finite}, allow_nan=False) + "\n")


class _Table(_File):
    """Comma-separated values; a column that first appears later is left out, for a table's head stands at its top."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        with path.open(newline="", encoding="utf-8") as file:
            self._columns = next(csv.reader(file), [])
        require(not self._columns or self._columns[0] == "step", f"{path} is no log of ours: choose another name")

    def write(self, numbers: Numbers, words: Mapping[str, str], step: int) -> None:
        row, rows = {"step": step, **words, **numbers}, io.StringIO(newline="")
        if not self._columns:
            self._columns = list(row)
            csv.writer(rows).writerow(self._columns)
        csv.writer(rows).writerow([row.get(name, "") for name in self._columns])
        self.append(rows.getvalue())


def sink(target: Target) -> Sink:
    """Where ``target`` wants its lines."""
    if isinstance(target, Sink):
        return target
    if isinstance(target, str | os.PathLike):
        path = Path(target)
        kinds: dict[str, type[_File]] = {".csv": _Table, ".jsonl": _Lines, ".json": _Lines, ".ndjson": _Lines}
        if path.suffix in kinds:
            return kinds[path.suffix](path)
        known = "a log ends in .csv or .jsonl, or is a folder for TensorBoard"
        require(not path.is_file() and path.suffix not in (".txt", ".log", ".tsv"), f"{known}, got {path}")
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise MissingExtra(f"a folder is for TensorBoard, which is not here: pip install tensorboard ({known})") from None
        return _Board(SummaryWriter(str(path)), owned=True)
    if hasattr(target, "add_scalar"):
        return _Board(target)
    require(
        callable(target),
        f"log_to takes a path, a SummaryWriter or a function of (numbers, step), got {type(target).__name__}",
    )
    return _Call(target)


class Log:
    """One target. Made by :meth:`tersegrad.engine.Handle.log_to`."""

    def __init__(self, target: Target, every: int = 10, layers: bool = False) -> None:
        require(every >= 1, f"every is a number of steps, at least 1, got {every}")
        self.every, self.layers, self._sink = every, layers, sink(target)
        self.open = True
        self._before: Numbers = {}
        self._totals: object = None

    def close(self) -> None:
        """Write no more."""
        if self.open:
            self.open = False
            self._sink.close()

    def write(self, engine: Engine, step: int, residuals: Numbers, layers: Mapping[str, Layer]) -> None:
        """One line: counters since the line before, and what the step has measured."""
        now = _counters(engine)
        # Counters that were set to zero meanwhile have counted since then.
        before = self._before if self._totals is engine.totals else {}
        self._before, self._totals = now, engine.totals
        found = _line({name: value - before.get(name, 0.0) for name, value in now.items()})
        if residuals:
            found["residual_norm"] = math.sqrt(sum(residuals.values()))
        if self.layers:
            found |= _by_layer(layers, residuals)
        words = {"compressor": "; ".join(sorted({str(lane.compressor) for lane in engine.lanes})), "exchange": engine.exchange}
        self._sink.write(found, words, step)


class Logs:
    """The logs of one engine."""

    def __init__(self) -> None:
        self._logs: list[Log] = []
        # Logs whose step has ended, but whose seconds are not yet known.
        self._waiting: list[Log] = []
        self._layers: dict[str, Layer] = {}

    def add(self, one: Log) -> None:
        self._logs.append(one)

    def _due(self, number: int) -> list[Log]:
        return [one for one in self._logs if one.open and (number + 1) % one.every == 0]

    def due(self, number: int) -> Literal["", "yes", "layers"]:
        """Whether the step of this number ends a line, and whether of a log that asks for layers."""
        due = self._due(number) if self._logs else ()
        return "layers" if any(one.layers for one in due) else "yes" if due else ""

    def closed(self, number: int, layers: Mapping[str, Layer]) -> None:
        """A step has ended; its lines are written when its seconds are known."""
        if self._logs:
            self._waiting += [one for one in self._due(number) if one not in self._waiting]
            self._layers |= layers

    def write(self, engine: Engine, step: int) -> None:
        """Write the lines that wait; a log that fails is told of and ends, for the other ranks would wait for this one."""
        if not self._waiting:
            return
        due, self._waiting = self._waiting, []
        layers, self._layers = self._layers, {}
        residuals = _residuals(engine)
        for one in due:
            try:
                one.write(engine, step, residuals, layers)
            except Exception as error:
                one.open = False
                log.warning("log_to failed in step %d, and this log ends here: %s: %s", step, type(error).__name__, error)

    def close(self) -> None:
        """End all logs."""
        for one in self._logs:
            one.close()
        self._logs = []


def _counters(engine: Engine) -> Numbers:
    """What only grows."""
    t, first, second = engine.totals, engine.totals.meters.first, engine.totals.meters.second
    return {
        "steps": t.steps,
        "dropped": t.dropped,
        "sent": t.sent,
        "received": t.received,
        "coordinates": t.coordinates,
        "message": first.nbytes,
        "said": first.coordinates,
        "error": first.error,
        "power": first.power,
        "waits": first.waits,
        "out": first.out,
        "encode": first.encode + second.encode,
        "decode": first.decode + second.decode,
        "wire": sum(link.waited for link in engine.links),
        "seconds": t.seconds,
    }


def _line(grown: Numbers) -> Numbers:
    """The numbers of a line from what has grown since the one before."""
    steps = max(1.0, grown["steps"])
    sent = 8 * grown["sent"] / grown["coordinates"] if grown["coordinates"] else 0.0
    bits = 8 * grown["message"] / grown["said"] if grown["said"] else sent
    coding = grown["encode"] + grown["decode"]
    out = {
        "bits_per_coordinate": bits,
        "bits_sent_per_coordinate": sent,
        "bytes/sent": grown["sent"] / steps,
        "bytes/received": grown["received"] / steps,
        "seconds/encode": grown["encode"] / steps,
        "seconds/decode": grown["decode"] / steps,
        "seconds/wire": grown["wire"] / steps,
        "seconds/other": max(0.0, grown["seconds"] - coding - grown["wire"]) / steps,
        "seconds/step": grown["seconds"] / steps,
        "steps/dropped": grown["dropped"],
    }
    if bits:
        out["ratio"] = 32 / bits
    if grown["power"]:
        out["message_error"] = grown["error"] / grown["power"]
    if grown["out"]:
        out["message_age"] = grown["waits"] / grown["out"]
    return out


def _residuals(engine: Engine) -> Numbers:
    """By layer, the squared norm of what this rank carries over to its next messages; one read."""
    names, squares = [], []
    for lane in engine.lanes:
        for part in lane.parts():
            spec = states.slice_spec(lane.group.spec, part.start, part.stop)
            residual = None if part.round == "second" else states.carried(part.state, spec)
            if residual is not None:
                pieces = residual.to(lane.group.device, non_blocking=True).split([piece.numel for piece in spec.pieces])
                names += [piece.name for piece in spec.pieces]
                squares += [power_of(piece) for piece in pieces]
    found: Numbers = {}
    for name, value in zip(names, host.floats(*squares) if squares else ()):
        found[name] = found.get(name, 0.0) + value
    return found


def _by_layer(layers: Mapping[str, Layer], residuals: Numbers) -> Numbers:
    out: Numbers = {}
    for name, one in layers.items():
        if one.coordinates:
            out[f"layer/{name}/bits_per_coordinate"] = one.bits / one.coordinates
        if one.power:
            out[f"layer/{name}/message_error"] = one.error / one.power
    return out | {f"layer/{name}/residual_norm": math.sqrt(value) for name, value in residuals.items()}

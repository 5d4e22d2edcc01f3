"""Plans from measurements on this machine; what coding takes is kept on disk, by machine, version and compressor."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from tersegrad import __version__
from tersegrad.bench.machine import describe
from tersegrad.bench.workloads import Model
from tersegrad.core.errors import BadConfiguration
from tersegrad.core.protocol import needs_second_moment
from tersegrad.planner import Coding, Measured, Plan, Topology, make_plan, measure_coding
from tersegrad.planner.coding import LONG, measure_cast
from tersegrad.planner.plan import LADDER, OTHERS
from tersegrad.recipes import parse

DENSE = {"identity": torch.float32, "bf16": torch.bfloat16}


def cache_file() -> Path:
    """Where measurements are kept between runs."""
    folder = os.environ.get("XDG_CACHE_HOME")
    return (Path(folder) if folder else Path.home() / ".cache") / "tersegrad" / "coding.json"


class Cache:
    """Measurements by machine, version, compressor and length; a file that cannot be read or written is done without."""

    def __init__(self, path: Path | None = None, fresh: bool = False) -> None:
        self.path = path or cache_file()
        self._known: dict[str, dict[str, object]] = {}
        if not fresh:
            with contextlib.suppress(OSError, ValueError, AttributeError):
                self._known = dict(json.loads(self.path.read_text()).items())

    def get(self, key: str) -> Measured | None:
        """What was measured under a key."""
        try:
            return _read(self._known[key])
        except (KeyError, TypeError, ValueError):
            return None

    def put(self, key: str, measured: Measured) -> None:
        """Keep a measurement, and write the file: whole or not at all, so that two runs do not tear it."""
        self._known[key] = dataclasses.asdict(measured)
        with contextlib.suppress(OSError):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            part = self.path.with_suffix(f".{os.getpid()}")
            part.write_text(json.dumps(self._known, indent=1))
            part.replace(self.path)


def _read(saved: dict[str, object]) -> Measured:
    found = dict(saved)
    # What was kept before second rounds were measured lacks the field, and is measured again.
    coding, means = found.pop("coding"), found.pop("means")
    again = _read(means) if isinstance(means, dict) else None
    return Measured(Coding(**coding), means=again, **found)  # type: ignore[arg-type]


def coding_of(text: str, numel: int, device: str, cache: Cache, gradient: Tensor | None = None, workers: int = 4) -> Measured:
    """The coding of one compressor: from the cache, or measured now. On a gradient of the user's it is always measured."""
    compressor = parse(text)
    if gradient is not None and not needs_second_moment(compressor) and text not in DENSE:
        return measure_coding(compressor, gradient[:LONG].to(device), workers=workers)
    length = min(LONG, numel)
    key = " | ".join(
        (
            describe(),
            __version__,
            f"{torch.get_num_threads()} threads",
            _device(device),
            str(length),
            str(workers),
            str(compressor),
        )
    )
    found = cache.get(key)
    if found is None:
        dtype = DENSE.get(text)
        if dtype is not None:
            found = measure_cast(dtype, length, device)
        else:
            found = measure_coding(compressor, numel=length, device=device, workers=workers)
        cache.put(key, found)
    return found


def _device(device: str) -> str:
    return torch.cuda.get_device_name(device) if device.startswith("cuda") else device


def plan(
    found: Model,
    topology: Topology,
    more: Sequence[str] = (),
    device: str = "cpu",
    cache: Cache | None = None,
    progress: Callable[[str], None] = lambda text: None,
) -> Plan:
    """Measure every compressor of the ladder, the usual others and ``more``, and forecast all settings."""
    texts = [*DENSE, *LADDER, *OTHERS, *(str(parse(text)) for text in more)]
    store, measured = cache or Cache(), {}
    for text in dict.fromkeys(texts):
        progress(text)
        measured[text] = coding_of(text, found.workload.numel, device, store, found.gradient, topology.workers)
    by_variance = [text for text in measured if needs_second_moment(parse(text))]
    # What the user names is considered for the verdict, in its place by bits.
    named = [str(parse(text)) for text in more if str(parse(text)) not in DENSE]
    ladder = [*LADDER, *(text for text in named if text not in LADDER)]
    if named:
        ladder.sort(key=lambda text: -measured[text].bits)
    return make_plan(found.workload, topology, measured, ladder, by_variance)


def bandwidth(text: str) -> float:
    """Bits per second as users write them.

    >>> bandwidth("1Gbit"), bandwidth("100 Mbit/s"), bandwidth("2.5gbit"), bandwidth("1e9")
    (1000000000.0, 100000000.0, 2500000000.0, 1000000000.0)
    """
    found = re.fullmatch(r"\s*([0-9.]+(?:e[0-9]+)?)\s*([kmgt]?)(?:bit|bits)?(?:/s|ps)?\s*", text.lower())
    with contextlib.suppress(ValueError):
        if found and float(found[1]) > 0:
            return float(found[1]) * {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}[found[2]]
    raise BadConfiguration(f"a bandwidth is a number of bits per second such as 100Mbit, 1Gbit or 2.5Gbit, got {text!r}")


def duration(text: str) -> float:
    """Seconds as users write them.

    >>> duration("0.2ms"), duration("80 ms"), duration("50us"), duration("1s")
    (0.0002, 0.08, 5e-05, 1.0)
    """
    found = re.fullmatch(r"\s*([0-9.]+)\s*(us|ms|s)\s*", text.lower())
    with contextlib.suppress(ValueError):
        if found:
            return float(found[1]) / {"s": 1.0, "ms": 1e3, "us": 1e6}[found[2]]
    raise BadConfiguration(f"a latency is a number with us, ms or s, such as 0.2ms, got {text!r}")

"""Limited links where the kernel has none: all hosts on the loopback interface, each limited by its own calls for sockets.

A small library (``throttle.c``), compiled at first use and preloaded into every host, lets what a host sends pass a token bucket with
the burst of :func:`benchmarks.network.bucket`. The bytes travel by TCP as ever. What a host receives is not limited: in collectives
where every host receives as much as it sends, that makes no difference.
"""

from __future__ import annotations

import mmap
import shutil
import struct
import subprocess
import tempfile
from pathlib import Path

SOURCE = Path(__file__).with_name("throttle.c")
FILE_BYTES = 4096  # as in the source
HEADERS = 1514 / 1448  # likewise


def compiler() -> str | None:
    """A C compiler, if there is one."""
    return next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)


class NoCompiler(RuntimeError):
    """The library cannot be compiled here."""


class Throttled:
    """``size`` hosts on the loopback interface, with the methods of :class:`benchmarks.network.Network`; a context manager."""

    interface = "lo"

    def __init__(self, size: int) -> None:
        if not 2 <= size <= 200:
            raise ValueError(f"a network has 2 to 200 hosts, got {size}")
        self.size = size
        self.rate: float | None = None

    def __enter__(self) -> Throttled:
        found = compiler()
        if found is None:
            raise NoCompiler("limiting links without the kernel's help needs a C compiler (cc, gcc or clang)")
        self._folder = tempfile.TemporaryDirectory()
        self.library, self.file = (Path(self._folder.name) / name for name in ("throttle.so", "state"))
        command = [found, "-O2", "-shared", "-fPIC", str(SOURCE), "-o", str(self.library), "-ldl"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            self._folder.cleanup()
            raise NoCompiler(f"{SOURCE.name} does not compile: {done.stderr.strip()}")
        self.file.write_bytes(bytes(FILE_BYTES))
        with self.file.open("r+b") as opened:
            self._memory = mmap.mmap(opened.fileno(), FILE_BYTES)
        return self

    def __exit__(self, *_: object) -> None:
        self._memory.close()
        self._folder.cleanup()

    def address(self, host: int) -> str:
        """An address of its own for every host; they all lead to this machine."""
        return f"127.0.0.{host + 1}"

    def inside(self, host: int) -> list[str]:
        """What stands before a command of a host."""
        return ["env", f"LD_PRELOAD={self.library}", f"TERSEGRAD_THROTTLE={self.file}", f"TERSEGRAD_THROTTLE_RANK={host}"]

    def limit(self, rate: float | None) -> None:
        """Limit what every host sends to ``rate`` bits per second, or to nothing."""
        struct.pack_into("<q", self._memory, 0, 0 if rate is None else round(rate / 8))
        self.rate = rate

    def drops(self) -> int:
        """No packet is dropped: senders sleep."""
        return 0

    def sent(self) -> list[int]:
        """Bytes that each host has sent, with the headers that they would have on a wire."""
        return [round(HEADERS * struct.unpack_from("<q", self._memory, 8 + 8 * k)[0]) for k in range(self.size)]

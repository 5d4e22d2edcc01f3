"""A real Flower deployment on loopback: SuperLink and SuperNodes as processes, on free ports, ended by their own handles."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]
APP = ROOT / "examples" / "flower"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class Deployment:
    """One SuperLink; ``node`` starts SuperNodes, ``submit`` an app. Use :func:`deployment`, which ends everything."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.port = folder, free_port()
        self.running: list[subprocess.Popen[bytes]] = []
        scripts = str(Path(sys.executable).parent)
        self.env = os.environ | {
            "FLWR_HOME": str(folder / "home"),
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "PATH": f"{scripts}{os.pathsep}{os.environ.get('PATH', '')}",
            "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
            "OMP_NUM_THREADS": "1",
            "PYTHONWARNINGS": "ignore",
        }
        self.scripts = scripts
        (folder / "home").mkdir(parents=True)
        connection = f'[superlink]\ndefault = "here"\n[superlink.here]\naddress = "127.0.0.1:{self.port}"\ninsecure = true\n'
        (folder / "home" / "config.toml").write_text(connection)

    def start(self, log: str, *command: str) -> subprocess.Popen[bytes]:
        """A process in a group of its own, so that what it starts can be ended with it."""
        with (self.folder / f"{log}.log").open("ab") as output:
            process = subprocess.Popen(
                [f"{self.scripts}/{command[0]}", *command[1:]],
                env=self.env, stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
        self.running.append(process)
        return process

    def superlink(self) -> None:
        self.start(
            "superlink", "flower-superlink", "--insecure", "--host", "127.0.0.1", "--port", str(self.port),
            "--disable-runtime-dependency-installation",
        )  # fmt: skip
        self.wait(self._healthy, 60, "the SuperLink")

    def _healthy(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=2) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def node(self, number: int, nodes: int, via: int | None = None, **config: Any) -> subprocess.Popen[bytes]:
        """A SuperNode that connects to ``via`` (default: straight to the SuperLink)."""
        facts = {"partition-id": number, "num-partitions": nodes, **config}
        text = " ".join(f"{k}={v!r}".replace("'", '"') for k, v in facts.items())
        return self.start(
            f"node{number}", "flower-supernode", "--insecure", "--superlink", f"127.0.0.1:{via or self.port}",
            "--host", "127.0.0.1", "--port", str(free_port()), "--node-config", text,
        )  # fmt: skip

    def submit(self, app: Path = APP, **config: Any) -> subprocess.Popen[bytes]:
        """``flwr run`` that follows the log until the run ends; options as in pyproject.toml, with underscores."""
        pairs = {k.replace("_", "-"): v for k, v in config.items()}
        text = " ".join(f"{k}={v!r}".replace("'", '"') for k, v in pairs.items())
        return self.start("run", "flwr", "run", str(app), "here", "--stream", "--run-config", text)

    def log(self, name: str) -> str:
        path = self.folder / f"{name}.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def wait(self, ready: Any, seconds: float, what: str) -> None:
        end = time.monotonic() + seconds
        while not ready():
            if time.monotonic() > end:
                logs = "\n".join(f"--- {p.name}\n{p.read_text(errors='replace')[-3000:]}" for p in self.folder.glob("*.log"))
                raise TimeoutError(f"{what} took more than {seconds} s\n{logs}")
            time.sleep(0.1)

    def kill(self, process: subprocess.Popen[bytes]) -> None:
        """End a process and all that it started, without a word of warning."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(10)

    def close(self) -> None:
        for process in reversed(self.running):
            self.kill(process)


@contextlib.contextmanager
def deployment(folder: Path) -> Iterator[Deployment]:
    made = Deployment(folder)
    try:
        made.superlink()
        yield made
    finally:
        made.close()

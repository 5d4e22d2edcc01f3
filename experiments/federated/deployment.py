"""A real Flower deployment on loopback: SuperLink and SuperNodes as processes, on free ports, ended by their own handles."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import typer
from rich.console import Console

from experiments.federated.simulate import Method, Setting, simulate
from tersegrad import bench
from tersegrad.report.tables import Column, Table

ROOT = Path(__file__).parents[2]
APP = ROOT / "examples" / "flower"


def free_port() -> int:
    """A port that nobody listens on at the moment."""
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
        """Start the SuperLink and wait until it answers."""
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
        """What a process has written so far."""
        path = self.folder / f"{name}.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def wait(self, ready: Any, seconds: float, what: str) -> None:
        """Until ``ready()``, or raise with all logs."""
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
        """End everything that was started here."""
        for process in reversed(self.running):
            self.kill(process)


@contextlib.contextmanager
def deployment(folder: Path) -> Iterator[Deployment]:
    """A running SuperLink; every process is ended afterwards."""
    made = Deployment(folder)
    try:
        made.superlink()
        yield made
    finally:
        made.close()


class Counter:
    """A TCP relay on loopback that counts the bytes of each direction: what really crosses a SuperNode's link."""

    def __init__(self, port: int) -> None:
        self.up = self.down = 0
        self._target = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(("127.0.0.1", self._target))
                threading.Thread(target=self._connection, args=(client, server), daemon=True).start()

    def _connection(self, client: socket.socket, server: socket.socket) -> None:
        """Both directions of one connection, until both have ended."""
        with client, server:
            up = threading.Thread(target=self._relay, args=(client, server, "up"), daemon=True)
            up.start()
            self._relay(server, client, "down")
            up.join()

    def _relay(self, source: socket.socket, target: socket.socket, direction: str) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                setattr(self, direction, getattr(self, direction) + len(data))  # each direction has one writer a connection
                target.sendall(data)
        with contextlib.suppress(OSError):
            target.shutdown(socket.SHUT_WR)  # pass the end on; the other direction may still be speaking

    def close(self) -> None:
        """Take no further connections."""
        self._listener.close()


def measure(folder: Path, nodes: int, rounds: int, **options: Any) -> dict[str, Any]:
    """One run of the example with a counter in front of every SuperNode."""
    result = folder / "result.json"
    with deployment(folder) as flwr:
        counters = [Counter(flwr.port) for _ in range(nodes)]
        for number, counter in enumerate(counters):
            flwr.node(number, nodes, via=counter.port)
        run = flwr.submit(num_server_rounds=rounds, min_nodes=nodes, local_epochs=1, result=str(result), **options)
        flwr.wait(lambda: run.poll() is not None, 120 * rounds, "the run")
        for counter in counters:
            counter.close()
        if not result.exists():
            raise RuntimeError(flwr.log("run")[-3000:])
        report = json.loads(result.read_text())
        return {
            "tcp_up": sum(c.up for c in counters),
            "tcp_down": sum(c.down for c in counters),
            "messages_up": report["uplink_bytes"],
            "messages_down": report["downlink_bytes"],
            "scores": report["scores"],
        }


UPLINKS = (
    ("plain Flower", None),
    ("Sparse Dithering + feedback", "error_feedback(sparse_dithering(alpha=0.25))"),
    ("subtractive dithering", "subtractive_dithering(omega=8)"),
)


def table(found: Sequence[dict[str, Any]], nodes: int, rounds: int) -> Table:
    """One row a run: bytes per message as the strategy counts them, in the in-process simulation, and as they crossed the sockets."""
    messages, plain = nodes * rounds, found[0]
    rows = []
    for f in found:
        cells = [f["label"], f"{f['score']:.2f}", f"{f['simulated']['score']:.2f}"]
        for way in ("up", "down"):
            counted = f"{f[f'messages_{way}'] / messages:,.0f}" if f["uplink"] else "not counted"
            simulated, crossed = f["simulated"][way] / messages, f[f"tcp_{way}"] / messages
            cells += [counted, f"{simulated:,.0f}", f"{crossed:,.0f}", f"{plain[f'tcp_{way}'] / f[f'tcp_{way}']:.1f}"]
        rows.append(tuple(cells))
    columns = [Column("uplink", number=False), Column("score %"), Column("simulated")]
    for way in ("up", "down"):
        columns += [Column(f"{way}: message"), Column("simulated"), Column("in the sockets"), Column("times smaller")]
    return Table(tuple(columns), tuple(rows), f"digits, {nodes} SuperNodes, {rounds} rounds, bytes per message")


def main(rounds: int = 6, nodes: int = 2, out: Path = Path(__file__).parent / "results") -> None:
    """Plain Flower and compressed, over real connections: ``python -m experiments.federated.deployment``."""
    found: list[dict[str, Any]] = []
    for label, uplink in UPLINKS:
        with tempfile.TemporaryDirectory() as folder:
            real = measure(Path(folder), nodes, rounds, uplink=uplink or "")
        setting = Setting(clients=nodes, fraction=1.0, rounds=rounds, epochs=1, every=rounds)  # the example's, in one process
        last = simulate(Method(label, uplink), setting, 0).last
        simulated = {"up": last.uplink, "down": last.downlink, "score": last.score}
        found.append({"label": label, "uplink": uplink, **real, "score": real["scores"][str(rounds)], "simulated": simulated})
        print(json.dumps(found[-1]), flush=True)
    shown = table(found, nodes, rounds)
    out.mkdir(parents=True, exist_ok=True)
    head = {"date": datetime.datetime.now(datetime.UTC).date().isoformat(), "machine": bench.describe()}
    (out / "deployment.json").write_text(json.dumps({**head, "nodes": nodes, "rounds": rounds, "results": found}) + "\n")
    text = [
        "# A deployment on loopback",
        "SuperLink and SuperNodes as processes, the app of `examples/flower`, a relay in front of every SuperNode that counts what "
        "crosses its connection. *message*: whole Flower messages as the strategy counts them; *simulated*: the same federation in "
        "one process; *in the sockets*: everything on the connection divided by the number of messages, so with HTTP, polling, "
        "heartbeats and (down) the app itself, which every SuperNode fetches once.",
        f"## {shown.title}",
        dataclasses.replace(shown, title="").markdown(),
        f"{head['date']}, {head['machine']}",
    ]
    (out / "deployment.md").write_text("\n\n".join(text) + "\n")
    Console(width=160).print(shown.rich())


if __name__ == "__main__":
    typer.run(main)

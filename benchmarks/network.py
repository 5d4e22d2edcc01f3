"""Real hosts on one machine: network namespaces joined by a switch, each with a rate limit, and one process in each.

Every host is a namespace with one interface; the switch is a bridge in a namespace of its own. Addresses exist only inside, so
nothing outside sees them. A token bucket limits both ends of every cable: what a host sends, and what the switch sends to it. All
is removed when the context ends, also after an error or Ctrl-C; what a killed run left behind is removed by the next one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.util
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import FrameType
from typing import Any

from benchmarks.netlink import Netlink
from benchmarks.throttle import Throttled

PREFIX = "tgrad"  # of every namespace: tgrad-<process id>-<host>
INTERFACE = "eth0"
SUBNET = "10.99.0"
HEADERS = 1514 / 1448  # bytes on the wire for a byte of TCP payload, at the usual 1500 bytes per packet


class NoNetwork(RuntimeError):
    """The machine or the user cannot make namespaces."""


class Iproute2:
    """Namespaces, cables and rate limits through the commands ``ip`` and ``tc``."""

    def add(self, namespace: str) -> None:
        _run("ip", "netns", "add", namespace)

    def remove(self, namespace: str) -> None:
        _run("ip", "netns", "del", namespace, check=False)

    def inside(self, namespace: str) -> list[str]:
        """What stands before a command that runs in a namespace."""
        return ["ip", "netns", "exec", namespace]

    def bridge(self, namespace: str, device: str) -> None:
        self._ip(namespace, f"link add {device} type bridge")
        self._ip(namespace, f"link set {device} up")

    def cable(self, namespace: str, device: str, switch: str, port: str, bridge: str) -> None:
        _run(*f"ip link add {device} netns {namespace} type veth peer name {port} netns {switch}".split())
        self._ip(switch, f"link set {port} master {bridge} up")

    def up(self, namespace: str, device: str, address: str | None = None) -> None:
        if address is not None:
            self._ip(namespace, f"addr add {address} dev {device}")
        self._ip(namespace, f"link set {device} up")

    def sysctl(self, namespace: str, name: str, value: str) -> bool:
        """Whether a setting of the namespace could be made."""
        return _run(*self.inside(namespace), "sysctl", "-q", "-w", f"{name}={value}", check=False).returncode == 0

    def limit(self, namespace: str, device: str, rate: float, burst: int, queue: int) -> None:
        tbf = f"rate {rate:.0f}bit burst {burst} limit {queue}"
        _run(*f"tc -n {namespace} qdisc replace dev {device} root tbf {tbf}".split())

    def unlimit(self, namespace: str, device: str) -> None:
        _run(*f"tc -n {namespace} qdisc del dev {device} root".split())

    def largest(self, namespace: str, device: str, nbytes: int) -> None:
        """Limit the packets that the kernel merges."""
        self._ip(namespace, f"link set {device} gso_max_size {nbytes}")

    def drops(self, namespace: str, device: str) -> int:
        shown = _run(*f"tc -n {namespace} -s -j qdisc show dev {device}".split(), check=False)
        if shown.returncode or not shown.stdout.strip():
            return 0
        return sum(int(q.get("drops", 0)) for q in json.loads(shown.stdout))

    def sent(self, namespace: str, device: str) -> int:
        shown = _run(*f"ip -n {namespace} -s -j link show dev {device}".split())
        return int(json.loads(shown.stdout)[0]["stats64"]["tx"]["bytes"])

    def names(self) -> list[str]:
        """The namespaces of this and other runs."""
        lines = _run("ip", "netns", "list", check=False).stdout.splitlines()
        return [line.split()[0] for line in lines if line.startswith(f"{PREFIX}-")]

    def _ip(self, namespace: str, command: str) -> None:
        _run("ip", "-n", namespace, *command.split())


@functools.cache
def tools() -> Iproute2 | Netlink:
    """The commands of iproute2 where they are, else pyroute2 where it can be imported."""
    commands = all(shutil.which(tool, path=_path()) for tool in ("ip", "tc"))
    return Netlink() if not commands and importlib.util.find_spec("pyroute2") else Iproute2()


def why_not() -> str | None:
    """Why hosts cannot be made here, or None."""
    if sys.platform != "linux":
        return "network namespaces exist on Linux only"
    needed = ("unshare", "nsenter") if isinstance(tools(), Netlink) else ("ip", "tc")
    for tool in needed:
        if shutil.which(tool, path=_path()) is None:
            return f"the command {tool!r} is missing: install {'util-linux' if 'unshare' in needed else 'iproute2 or pyroute2'}"
    if os.geteuid() != 0:
        return "making network namespaces needs root: run the same command with sudo"
    return _try()


def _try() -> str | None:
    """Why a limited cable between two namespaces cannot be made, or None."""
    one, two = (f"{PREFIX}-{os.getpid()}-try{k}" for k in range(2))
    doing = "a network namespace"
    try:
        for name in (one, two):
            tools().add(name)
        doing = "a bridge"
        tools().bridge(two, "br0")
        doing = "a veth pair"
        tools().cable(one, INTERFACE, two, "port0", "br0")
        doing = "a token bucket (tc tbf)"
        tools().limit(one, INTERFACE, 1e9, *bucket(1e9)[:2])
    except Exception as error:
        return f"this machine's kernel cannot make {doing}: {error}"
    finally:
        for name in (one, two):
            tools().remove(name)
    return None


def parse_rate(text: str) -> float | None:
    """Bits a second; None for a link without a limit.

    >>> parse_rate("100mbit"), parse_rate("1gbit"), parse_rate("unlimited")
    (100000000.0, 1000000000.0, None)
    """
    if text == "unlimited":
        return None
    for unit, factor in (("gbit", 1e9), ("mbit", 1e6), ("kbit", 1e3)):
        number = text.removesuffix(unit)
        with contextlib.suppress(ValueError):
            if number != text and float(number) > 0:
                return float(number) * factor
    raise ValueError(f"a rate is a number with kbit, mbit or gbit, or 'unlimited', got {text!r}")


def rate_text(rate: float | None) -> str:
    """A rate for people.

    >>> rate_text(1e8), rate_text(2.5e9), rate_text(None)
    ('100 Mbit/s', '2.5 Gbit/s', 'unlimited')
    """
    if rate is None:
        return "unlimited"
    return f"{rate / 1e9:g} Gbit/s" if rate >= 1e9 else f"{rate / 1e6:g} Mbit/s" if rate >= 1e6 else f"{rate / 1e3:g} kbit/s"


def bucket(rate: float) -> tuple[int, int, int]:
    """Burst, queue limit and largest packet in bytes, for a token bucket of ``rate`` bits per second.

    A burst of two milliseconds: what it lets through at once is nothing beside the transfers that are timed, and a timer that
    fires a millisecond late loses no rate. Packets that the kernel merges must fit into it several times. The queue holds a
    quarter of a second: senders on the same machine are slowed by their own sockets before it overflows.

    >>> bucket(1e8), bucket(1e9)
    ((25000, 3125000, 8333), (250000, 31250000, 65536))
    """
    burst = max(round(rate / 8 * 0.002), 12_000)
    return burst, max(round(rate / 8 * 0.25), 20 * burst), min(65536, max(burst // 3, 3028))


def _path() -> str:
    return os.environ.get("PATH", "") + ":/usr/sbin:/sbin"


def _run(*command: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PATH": _path()}, check=False)
    if check and done.returncode:
        raise NoNetwork(f"{' '.join(command)}: {done.stderr.strip() or done.stdout.strip()}")
    return done


def namespaces() -> list[str]:
    """The namespaces of this and other runs."""
    return tools().names()


def remove_leftovers() -> list[str]:
    """Delete what runs that no longer live have left; returns the names."""
    gone = [name for name in namespaces() if not Path(f"/proc/{name.split('-')[1]}").exists()]
    for name in gone:
        tools().remove(name)
    return gone


class Network:
    """``size`` hosts on a switch; a context manager."""

    interface = INTERFACE

    def __init__(self, size: int) -> None:
        if not 2 <= size <= 200:
            raise ValueError(f"a network has 2 to 200 hosts, got {size}")
        self.size = size
        self.names = [f"{PREFIX}-{os.getpid()}-h{k}" for k in range(size)]
        self.switch = f"{PREFIX}-{os.getpid()}-switch"
        self.rate: float | None = None

    def __enter__(self) -> Network:
        reason = why_not()
        if reason is not None:
            raise NoNetwork(reason)
        remove_leftovers()
        try:
            self._build()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _build(self) -> None:
        for name in (self.switch, *self.names):
            tools().add(name)
        tools().bridge(self.switch, "br0")
        for k, name in enumerate(self.names):
            tools().cable(name, INTERFACE, self.switch, f"port{k}", "br0")
            tools().up(name, "lo")
            tools().up(name, INTERFACE, f"{self.address(k)}/24")
            self._control(name)

    def _control(self, name: str) -> None:
        """TCP as most machines have it, whatever this one's default: congestion control by windows.

        BBR, which sends at the rate that it has measured before, needs a while to find the rate of a link that was idle.
        """
        # Namespaces may choose among what their machine allows.
        any(tools().sysctl(name, "net.ipv4.tcp_congestion_control", control) for control in ("cubic", "reno"))

    def address(self, host: int) -> str:
        """The address of a host, known inside the namespaces only."""
        return f"{SUBNET}.{host + 1}"

    def inside(self, host: int) -> list[str]:
        """What stands before a command of a host."""
        return tools().inside(self.names[host])

    def _ends(self) -> Iterator[tuple[str, str]]:
        for k, name in enumerate(self.names):
            yield name, INTERFACE
            yield self.switch, f"port{k}"

    def limit(self, rate: float | None) -> None:
        """Limit both directions of every host's cable to ``rate`` bits per second, or to nothing."""
        for namespace, device in self._ends():
            largest = 65536
            if rate is not None:
                burst, queue, largest = bucket(rate)
                tools().limit(namespace, device, rate, burst, queue)
            elif self.rate is not None:
                tools().unlimit(namespace, device)
            tools().largest(namespace, device, largest)
        self.rate = rate

    def drops(self) -> int:
        """Packets that the token buckets have dropped since the limit was set."""
        return sum(tools().drops(namespace, device) for namespace, device in self._ends())

    def sent(self) -> list[int]:
        """Bytes that have left each host's interface, headers and all, since it was made."""
        return [tools().sent(name, INTERFACE) for name in self.names]

    def close(self) -> None:
        """Remove everything."""
        for name in (*self.names, self.switch):
            tools().remove(name)


@dataclasses.dataclass
class _Stop:
    """A signal that asks to stop, and whether it has to wait."""

    waits: bool = False
    asked: bool = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.asked = self.waits
        if not self.waits:
            raise KeyboardInterrupt


_stop = _Stop()


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Make SIGTERM and SIGHUP end the block like Ctrl-C does, so that contexts are left."""
    before = {s: signal.signal(s, _stop) for s in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def unbroken() -> Iterator[None]:
    """What :func:`interruptible` lets go to its end first: between a process's start and its being written down nobody would end it."""
    _stop.waits = True
    try:
        yield
    finally:
        _stop.waits = False
        if _stop.asked:
            _stop.asked = False
            raise KeyboardInterrupt


class Hosts:
    """One process on each host of a network, all in one gloo group; a context manager."""

    def __init__(self, network: Network | Throttled, groups: Sequence[int] = (), timeout: float = 600.0) -> None:
        self.network, self.timeout = network, timeout
        self.groups = sorted({*groups, network.size})
        self._connections: list[Connection[Any, Any]] = []
        self._processes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Hosts:
        self._folder = tempfile.TemporaryDirectory()
        root = str(Path(__file__).parents[1])
        paths = [root, str(Path(root) / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {
            **os.environ,
            "GLOO_SOCKET_IFNAME": self.network.interface,
            "OMP_NUM_THREADS": "1",  # the hosts share this machine's cores
            "PYTHONPATH": os.pathsep.join(paths),
            "PATH": _path(),
        }
        try:
            for rank in range(self.network.size):
                ours, theirs = socket.socketpair()
                command = [*self.network.inside(rank), sys.executable, "-m", "benchmarks.host"]
                command += [str(theirs.fileno()), str(rank), str(self.network.size), str(Path(self._folder.name) / "store")]
                command += [",".join(map(str, self.groups))]
                with unbroken():
                    process = subprocess.Popen(
                        command, pass_fds=[theirs.fileno()], env=environment, start_new_session=True, stdin=subprocess.DEVNULL
                    )
                    theirs.close()
                    self._processes.append(process)
                    self._connections.append(Connection(ours.detach()))
            self._collect(range(self.network.size))  # every host says when it is ready
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(self, job: str, *arguments: Any, size: int | None = None) -> list[Any]:
        """Call a function of ``benchmarks.host`` (others by their full name) on the first ``size`` hosts; their results in rank order."""
        ranks = range(size or self.network.size)
        for rank in ranks:
            self._connections[rank].send((job, len(ranks), arguments))
        return self._collect(ranks)

    def _collect(self, ranks: Sequence[int]) -> list[Any]:
        results: dict[int, Any] = {}
        while len(results) < len(ranks):
            missing = [r for r in ranks if r not in results]
            ready = wait([self._connections[r] for r in missing], timeout=self.timeout)
            if not ready:
                raise RuntimeError(f"hosts {missing} did not answer within {self.timeout:g} s")
            for rank in (r for r in missing if self._connections[r] in ready):
                try:
                    good, value = self._connections[rank].recv()
                except (EOFError, ConnectionResetError):
                    raise RuntimeError(f"host {rank} has died (exit code {self._processes[rank].poll()})") from None
                if not good:
                    raise RuntimeError(f"host {rank} failed:\n{value}")
                results[rank] = value
        return [results[r] for r in ranks]

    def close(self) -> None:
        """End the processes."""
        for connection in self._connections:
            with contextlib.suppress(OSError):
                connection.send(None)
        deadline = time.monotonic() + 3
        for process in self._processes:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for connection in self._connections:
            connection.close()
        self._connections, self._processes = [], []
        self._folder.cleanup()

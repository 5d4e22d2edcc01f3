"""Namespaces, cables and rate limits through pyroute2, for machines without the commands of iproute2.

A namespace lives as long as the process that holds it, ``unshare --net cat``, which ends with this process's end of its pipe: nothing
is left behind, however a run ends.
"""

from __future__ import annotations

import contextlib
import subprocess
from typing import Any

ROOT = 0xFFFFFFFF  # the parent of an interface's only queue
HANDLE = 0x10000


class Netlink:
    """What :class:`benchmarks.network.Iproute2` does, without its commands."""

    def __init__(self) -> None:
        self._holders: dict[str, subprocess.Popen[bytes]] = {}
        self._sockets: dict[str, Any] = {}

    def add(self, namespace: str) -> None:
        from pyroute2 import IPRoute

        holder = subprocess.Popen(["unshare", "--net", "cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._holders[namespace] = holder
        assert holder.stdin is not None
        assert holder.stdout is not None
        # An echo says that the namespace is there.
        with contextlib.suppress(BrokenPipeError):
            holder.stdin.write(b"\n")
            holder.stdin.flush()
        if not holder.stdout.read(1):
            raise OSError("unshare --net failed")
        self._sockets[namespace] = IPRoute(netns=self._path(namespace), flags=0)

    def remove(self, namespace: str) -> None:
        if namespace in self._sockets:
            self._sockets.pop(namespace).close()
        if namespace in self._holders:
            holder = self._holders.pop(namespace)
            assert holder.stdin is not None
            assert holder.stdout is not None
            with contextlib.suppress(BrokenPipeError):
                holder.stdin.close()
            holder.wait()
            holder.stdout.close()

    def inside(self, namespace: str) -> list[str]:
        """What stands before a command that runs in a namespace."""
        return ["nsenter", f"--net={self._path(namespace)}"]

    def bridge(self, namespace: str, device: str) -> None:
        self._sockets[namespace].link("add", ifname=device, kind="bridge")
        self._set(namespace, device, state="up")

    def cable(self, namespace: str, device: str, switch: str, port: str, bridge: str) -> None:
        peer = {"ifname": port, "net_ns_pid": self._holders[switch].pid}
        self._sockets[namespace].link("add", ifname=device, kind="veth", peer=peer)
        self._set(switch, port, master=self._index(switch, bridge), state="up")

    def up(self, namespace: str, device: str, address: str | None = None) -> None:
        if address is not None:
            ip, _, length = address.partition("/")
            index = self._index(namespace, device)
            self._sockets[namespace].addr("add", index=index, address=ip, prefixlen=int(length))
        self._set(namespace, device, state="up")

    def sysctl(self, namespace: str, name: str, value: str) -> bool:
        """Whether a setting of the namespace could be made."""
        file = "/proc/sys/" + name.replace(".", "/")
        done = subprocess.run([*self.inside(namespace), "sh", "-c", f"echo {value} > {file}"], capture_output=True, check=False)
        return done.returncode == 0

    def limit(self, namespace: str, device: str, rate: float, burst: int, queue: int) -> None:
        index = self._index(namespace, device)
        self._sockets[namespace].tc("replace", "tbf", index, HANDLE, rate=round(rate / 8), burst=burst, limit=queue)

    def unlimit(self, namespace: str, device: str) -> None:
        self._sockets[namespace].tc("del", index=self._index(namespace, device), parent=ROOT)

    def largest(self, namespace: str, device: str, nbytes: int) -> None:
        self._set(namespace, device, gso_max_size=nbytes)

    def drops(self, namespace: str, device: str) -> int:
        found = self._sockets[namespace].get_qdiscs(self._index(namespace, device))
        queues = [q.get_attr("TCA_STATS2").get_attr("TCA_STATS_QUEUE") for q in found if q.get_attr("TCA_STATS2")]
        return sum(int(q["drops"]) for q in queues)

    def sent(self, namespace: str, device: str) -> int:
        link = next(iter(self._sockets[namespace].get_links(self._index(namespace, device))))
        return int(link.get_attr("IFLA_STATS64")["tx_bytes"])

    def names(self) -> list[str]:
        """The namespaces of this run; those of others cannot be seen, nor can they be left behind."""
        return list(self._holders)

    def _path(self, namespace: str) -> str:
        return f"/proc/{self._holders[namespace].pid}/ns/net"

    def _index(self, namespace: str, device: str) -> int:
        return int(next(iter(self._sockets[namespace].link_lookup(ifname=device))))

    def _set(self, namespace: str, device: str, **settings: Any) -> None:
        self._sockets[namespace].link("set", index=self._index(namespace, device), **settings)

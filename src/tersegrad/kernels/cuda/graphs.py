"""CUDA graphs by the driver: launches that the host starts by one call."""

from __future__ import annotations

import ctypes
import functools
import sys
from typing import Any

from tersegrad.kernels.cuda import loader
from tersegrad.kernels.cuda.loader import Argument, DriverError


class Launched:
    """A launch that was written down, with its parameters in memory of its own; ``after``: the numbers of those that it follows."""

    def __init__(
        self,
        name: str,
        kernel: str,
        blocks: int,
        threads: int,
        arguments: tuple[Argument, ...],
        shared: int,
        after: tuple[int, ...],
    ) -> None:
        self.name, self.kernel, self.blocks, self.threads = name, kernel, blocks, threads
        self.shared, self.after = shared, after
        self.layout = loader.layout_of(arguments)
        self.parameters = ctypes.create_string_buffer(self.layout.packer.size)
        loader.packed(arguments, self.parameters)


class _Node(ctypes.Structure):
    """The driver's description of a kernel in a graph; earlier drivers know all but the last two fields."""

    _fields_ = (
        ("function", ctypes.c_void_p),
        ("blocks", ctypes.c_uint * 3),
        ("threads", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("parameters", ctypes.c_void_p),
        ("extra", ctypes.c_void_p),
        ("kernel", ctypes.c_void_p),
        ("context", ctypes.c_void_p),
    )


class DriverGraph:
    """Launches on one device, each after those that it follows."""

    def __init__(self, device: int, launches: list[Launched]) -> None:
        self._executable, self._device = ctypes.c_void_p(), device
        self._nodes: list[ctypes.c_void_p] = []
        self._described = [self._describe(launched) for launched in launches]
        graph = ctypes.c_void_p()
        loader.call("cuGraphCreate", ctypes.byref(graph), 0)
        try:
            for launched, (node, _) in zip(launches, self._described):
                made, number = ctypes.c_void_p(), len(launched.after)
                before = (ctypes.c_void_p * number)(*(self._nodes[k] for k in launched.after))
                _call(_add(), ctypes.byref(made), graph, before, ctypes.c_size_t(number), ctypes.byref(node))
                self._nodes.append(made)
            loader.call("cuGraphInstantiateWithFlags", ctypes.byref(self._executable), graph, ctypes.c_ulonglong(0))
        except BaseException:
            loader.call("cuGraphDestroy", graph)
            raise
        # Its nodes are the names by which parameters are changed.
        self._graph = graph
        self._run = _launches()

    def _describe(self, launched: Launched) -> tuple[_Node, Any]:
        places = [ctypes.addressof(launched.parameters) + at for at in launched.layout.offsets]
        pointers = (ctypes.c_void_p * len(places))(*places)
        node = _Node(
            loader.function_of(launched.name, launched.kernel, self._device, launched.shared),
            (launched.blocks, 1, 1),
            (launched.threads, 1, 1),
            launched.shared,
            ctypes.addressof(pointers),
        )
        # The driver copies parameters, but reads them again at every change.
        return node, (pointers, launched.parameters)

    def update(self, number: int) -> None:
        _call(_change(), self._executable, self._nodes[number], ctypes.byref(self._described[number][0]))

    def run(self, stream: int) -> None:
        loader.use_device(self._device)
        code = self._run(self._executable, stream)
        if code:
            raise DriverError(f"a graph of {len(self._nodes)} kernels: {loader.told(code)}")

    def __del__(self) -> None:
        if sys.is_finalizing():
            return
        # One that still runs is freed when it has ended.
        for name, handle in (("cuGraphExecDestroy", self._executable), ("cuGraphDestroy", getattr(self, "_graph", None))):
            if handle is not None and handle.value:
                loader.entry(name)(handle)


def _call(function: Any, *arguments: Any) -> None:
    code = function(*arguments)
    if code:
        raise DriverError(f"{function.__name__}: {loader.told(code)}")


# Of these the driver has two versions; the one for all fields comes first.
@functools.cache
def _add() -> Any:
    return loader.entry("cuGraphAddKernelNode_v2", "cuGraphAddKernelNode")


@functools.cache
def _change() -> Any:
    return loader.entry("cuGraphExecKernelNodeSetParams_v2", "cuGraphExecKernelNodeSetParams")


@functools.cache
def _launches() -> Any:
    function = loader.entry("cuGraphLaunch")
    function.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
    return function

"""A device that is not there: CPU memory behind tensors that claim another device, so that waiting for it can be counted.

Inside :class:`Device` tensors on ``device`` behave as CUDA tensors do. Operations that mix them with CPU tensors of one dimension or
more are refused. What would make the host wait for a GPU is counted with the place in this package that asked for it: reading a
number, a shape that depends on data (nonzero, boolean masks, unique), a copy to the CPU, and a copy from the CPU that does not say
``non_blocking``.
"""

from __future__ import annotations

import collections
import traceback
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

aten: Any = torch.ops.aten
# The one kind of device besides the CPU that every build of torch can enter. Outside of a Device its tensors have no memory.
KIND = "meta"
CPU = torch.device("cpu")
SOURCE = str(Path(__file__).parents[1] / "src")

# Operations whose results have a shape, or are a number, that only the device knows.
WAITING = {
    "_local_scalar_dense",
    "is_nonzero",
    "equal",
    "nonzero",
    "masked_select",
    "_unique2",
    "unique_consecutive",
    "unique_dim",
    "bincount",
    "is_pinned",
}


class OnDevice(Tensor):
    """A tensor that claims to be elsewhere."""

    memory: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> OnDevice:
        made: Any = Tensor._make_wrapper_subclass(
            cls,
            inner.shape,
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=torch.device(KIND),
        )
        made.memory = inner
        found: OnDevice = made
        return found

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise RuntimeError(f"{function} on a tensor of the simulated device, outside of it")


class _Literals(TorchFunctionMode):
    """What torch does before any dispatch: numbers of the program become a tensor, and a tensor becomes a list."""

    def __init__(self, device: Device) -> None:
        super().__init__()
        self._device = device

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        made = function in (torch.tensor, torch.as_tensor) and not isinstance(args[0], Tensor)
        if made and kwargs.get("device") is not None and torch.device(kwargs["device"]).type == KIND:
            del kwargs["device"]
            return self._device.literal(function(*args, **kwargs))
        if function is Tensor.tolist and isinstance(args[0], OnDevice):
            self._device.wait("tolist")
            return args[0].memory.tolist()
        return function(*args, **kwargs)


class Device(TorchDispatchMode):
    """The simulated device; ``waits`` counts by operation and place how often the host waited for it."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.device = torch.device(KIND)
        self.waits: collections.Counter[str] = collections.Counter()
        # Memory of the host that copies are still on their way to: nothing may use it before the next wait.
        self._awaited: set[int] = set()

    def __enter__(self) -> Self:
        self._literals = _Literals(self)
        self._literals.__enter__()  # type: ignore[no-untyped-call]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *reason: Any) -> None:
        super().__exit__(*reason)  # type: ignore[no-untyped-call]
        self._literals.__exit__(*reason)  # type: ignore[no-untyped-call]

    @property
    def count(self) -> int:
        return sum(self.waits.values())

    def to(self, tensor: Tensor) -> Tensor:
        """A copy on the device, which is not counted."""
        return OnDevice(tensor.detach().clone())

    def memory(self, tensor: Tensor) -> Tensor:
        """The memory of a tensor on the device, for what runs there."""
        assert isinstance(tensor, OnDevice)
        return tensor.memory

    def back(self, tensor: Tensor) -> Tensor:
        """A copy on the CPU, which is not counted."""
        return tensor.memory.clone() if isinstance(tensor, OnDevice) else tensor

    def literal(self, tensor: Tensor) -> Tensor:
        """Numbers of the program, which wait for the device on their way to it."""
        self.wait("numbers of the program")
        return self.to(tensor)

    def wait(self, what: str) -> None:
        """Count that the host waits."""
        frames = [f for f in traceback.extract_stack() if f.filename.startswith(SOURCE)]
        place = f"{frames[-1].filename.removeprefix(SOURCE)}:{frames[-1].lineno}" if frames else "the test"
        self.waits[f"{what} in {place}"] += 1
        self._awaited.clear()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = function.overloadpacket.__name__
        leaves = [leaf for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, Tensor)]
        mine = [leaf for leaf in leaves if isinstance(leaf, OnDevice)]
        if any(not isinstance(leaf, OnDevice) and leaf.data_ptr() in self._awaited for leaf in leaves):
            raise RuntimeError(f"{function} uses what is still on its way to the CPU")
        asked = kwargs.get("device")
        kind = None if asked is None else torch.device(asked).type
        if not mine and kind != KIND:
            return function(*args, **kwargs)
        by_masks = name in ("index", "index_put_", "index_put", "_index_put_impl_") and any(
            isinstance(leaf, Tensor) and leaf.dtype in (torch.bool, torch.uint8) for leaf in args[1]
        )
        by_counts = name == "repeat_interleave" and function._overloadname == "Tensor" and kwargs.get("output_size") is None
        if mine and (name in WAITING or by_masks or by_counts):
            self.wait(f"{name} with a mask" if by_masks else name)
        copied = self._copied(name, args, kwargs, mine, kind)
        if not copied:
            for leaf in leaves:
                if not isinstance(leaf, OnDevice) and leaf.dim() > 0:
                    raise RuntimeError(
                        f"{function} mixes tensors of the device and of the CPU: {leaf.dtype} {tuple(leaf.shape)}"
                    )
        if kind == KIND:
            kwargs["device"] = CPU
        plain_args, plain_kwargs = tree_map(lambda a: a.memory if isinstance(a, OnDevice) else a, (args, kwargs))
        found = function(*plain_args, **plain_kwargs)
        if copied == "to the CPU":
            return args[0] if name == "copy_" else found
        # What is written in place stays the tensor that it was.
        known = {id(leaf.memory): leaf for leaf in mine}
        return tree_map(lambda r: (known[id(r)] if id(r) in known else OnDevice(r)) if isinstance(r, Tensor) else r, found)

    def _copied(self, name: str, args: Any, kwargs: Any, mine: list[OnDevice], kind: str | None) -> str:
        """Which way an operation copies between the device and the CPU, if it does; counts those that wait."""
        if name == "copy_":
            into, source = isinstance(args[0], OnDevice), isinstance(args[1], OnDevice)
            waits = not (kwargs.get("non_blocking") or (len(args) > 2 and args[2]))
        elif name in ("_to_copy", "to"):
            source = bool(mine)
            into = source if kind is None else kind == KIND
            waits = not kwargs.get("non_blocking")
        else:
            return ""
        if source and not into:
            if waits or name != "copy_":
                self.wait("a copy to the CPU")
            else:
                self._awaited.add(args[0].data_ptr())
            return "to the CPU"
        if into and not source:
            if waits:
                self.wait("a blocking copy from the CPU")
            return "from the CPU"
        return ""

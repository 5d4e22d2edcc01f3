"""Stable groups of parameters: what one message serves, whatever buckets a framework makes.

DDP lays out other buckets in its first step than in all later ones, so a resumed run's buckets differ from those of the run it
continues. Groups depend on the model alone (reverse registration order, about the order in which gradients appear) and are saved
with the state: the same bytes are sent however the gradients arrive.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from tersegrad.core.errors import BadConfiguration
from tersegrad.core.protocol import Piece, Spec


@dataclasses.dataclass(frozen=True)
class Group:
    """Parameters that travel in one message: ``spec.pieces`` names them in the order they lie in the buffer."""

    number: int  # in the engine
    spec: Spec
    dtype: torch.dtype  # of the gradients; the buffer itself is float32
    device: torch.device
    branch: int | None = None  # child of the context, where two groups share a buffer's number
    buffer_number: int | None = None  # the number in contexts, where it is not the engine's

    @property
    def buffer(self) -> int:
        """The group's number in contexts."""
        return self.number if self.buffer_number is None else self.buffer_number

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(p.name for p in self.spec.pieces)


# Of float32 gradient that one message serves, unless told otherwise; a GPU's host needs as long for a small message as for a large one.
GROUP_BYTES, GPU_GROUP_BYTES = 25 << 20, 128 << 20


def make_groups(parameters: Mapping[str, Tensor], group_bytes: int | None = None, small: int = 0) -> list[Group]:
    """Reverse registration order; up to ``group_bytes`` of float32 each (at least one parameter), one dtype and device.

    None: what is usual for the device. In a group the tensors with fewer than ``small`` elements come last: what is compressed then lies
    in one piece.

    >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 2))
    >>> [g.names for g in make_groups(dict(model.named_parameters()), 300)]
    [('1.bias', '1.weight', '0.bias'), ('0.weight',)]
    >>> [g.names for g in make_groups(dict(model.named_parameters()), 1000, small=10)]
    [('1.weight', '0.weight', '1.bias', '0.bias')]
    """
    layout: list[list[str]] = []
    kinds: dict[tuple[torch.dtype, torch.device], list[list[str]]] = {}
    sizes = {name: 4 * parameter.numel() for name, parameter in parameters.items()}
    for name, parameter in reversed(list(parameters.items())):
        groups = kinds.setdefault((parameter.dtype, parameter.device), [])
        limit = (GPU_GROUP_BYTES if parameter.is_cuda else GROUP_BYTES) if group_bytes is None else group_bytes
        if not groups or sum(sizes[n] for n in groups[-1]) + sizes[name] > limit:
            groups.append([])
            layout.append(groups[-1])
        groups[-1].append(name)
    for groups in kinds.values():
        # Groups of the size of a bucket would lose what they have.
        if limit >= 2 * GROUP_BYTES:
            _complete_earlier(groups, sizes)
    for names in layout:
        names.sort(key=lambda name: sizes[name] < 4 * small)  # stable
    return from_layout(parameters, [names for names in layout if names])


def _complete_earlier(groups: list[list[str]], sizes: Mapping[str, int]) -> None:
    """Move into the last group what DDP may hand over together with the last parameter, so that the group before it need not wait.

    DDP closes a bucket by the parameter that reaches 25 MiB: less than that lies before the last one.
    """
    before = sum(sizes[name] for name in groups[-1][:-1])
    while len(groups) > 1 and (before := before + sizes[groups[-2][-1]]) < GROUP_BYTES:
        groups[-1].insert(0, groups[-2].pop())
        if not groups[-2]:
            del groups[-2]


def from_layout(parameters: Mapping[str, Tensor], layout: Sequence[Sequence[str]]) -> list[Group]:
    """Groups with a given layout, as a checkpoint stores it."""
    groups = []
    for number, names in enumerate(layout):
        tensors = [parameters[name] for name in names]
        for name, tensor in zip(names, tensors):
            if not tensor.is_floating_point():
                raise BadConfiguration(f"{name} is {tensor.dtype}; only real floating-point gradients can be exchanged")
        if len({(t.dtype, t.device) for t in tensors}) != 1:
            raise BadConfiguration(f"the parameters {list(names)} of one group differ in dtype or device")
        pieces = tuple(Piece(tuple(t.shape), 0, t.numel(), name) for name, t in zip(names, tensors))
        groups.append(Group(number, Spec(pieces), tensors[0].dtype, tensors[0].device))
    return groups

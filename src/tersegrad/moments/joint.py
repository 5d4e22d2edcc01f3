"""Joint launches: the squares of several modules found at once, where a faster backend can.

On a GPU a small network's step takes as long as its launches take the CPU. A use whose gradient autograd computes by itself is in no
hurry, so it waits with its tensors until as many have come as one launch takes, until the tensors that wait would fill ``HELD`` bytes,
or until the backward pass ends. Activations and output gradients of at most that many modules thus live longer than in a plain step.
In a CUDA graph launches cost nothing, and every use goes by itself: on large batches that is less work for the GPU.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable
from typing import Literal

import torch
from torch import Tensor
from torch.nn import Parameter

from tersegrad import kernels
from tersegrad.core import private

MOST = 8  # modules of one launch
HELD = 256 << 20  # bytes


def joins(x: Tensor) -> bool:
    """Whether uses of tensors like ``x`` wait for a joint launch."""
    return not (x.is_cuda and private.capturing())


# The operation that finds the squares, and what it takes of a module.
Kind = Literal["share_linear_squares", "share_norm_squares"]
Part = tuple[Tensor, ...]
Deliver = Callable[[Parameter, Tensor], None]


@dataclasses.dataclass(eq=False)
class _Group:
    """Uses of one kind, dtype and number of samples, on one stream."""

    kind: Kind
    device: int
    stream: int  # of the backward pass
    uses: list[tuple[tuple[Parameter | None, ...], Part]] = dataclasses.field(default_factory=list)
    held: int = 0


class Joint:
    """What waits for a joint launch; ``deliver(parameter, squares)`` gets what one found."""

    def __init__(self, deliver: Deliver) -> None:
        self._deliver = deliver
        self._waiting: dict[Hashable, _Group] = {}
        self._pass = -1  # the backward pass that has promised to call ``finish``

    def add(self, kind: Kind, parameters: tuple[Parameter | None, ...], part: Part) -> None:
        """A use in the backward pass that runs, and what the operation takes of it: (x, delta, ...) with the samples in front."""
        now = private.backward_pass()
        if now != self._pass:
            private.of("autograd.Variable._execution_engine").queue_callback(self.finish)
            self._pass = now
        x = part[0]
        device = x.get_device()  # -1 is the CPU
        stream = private.current_stream(device) if device >= 0 else 0
        key = (kind, x.dtype, x.shape[0], device, stream)
        group = self._waiting.get(key)
        if group is None:
            group = self._waiting[key] = _Group(kind, device, stream)
        group.uses.append((parameters, part))
        group.held += x.nbytes + part[1].nbytes
        if len(group.uses) == MOST or group.held > HELD:
            self._launch(self._waiting.pop(key))

    def finish(self) -> None:
        """Launch what waits."""
        while self._waiting:
            self._launch(self._waiting.popitem()[1])

    def clear(self) -> None:
        """Forget what waits."""
        self._waiting.clear()

    def _launch(self, group: _Group) -> None:
        device = group.device
        if device < 0 or (device == private.current_device() and group.stream == private.current_stream(device)):
            return self._run(group)
        stream = torch.cuda.ExternalStream(group.stream, device)
        with torch.cuda.stream(stream):  # whose memory it is
            self._run(group)
        torch.cuda.current_stream(device).wait_stream(stream)

    def _run(self, group: _Group) -> None:
        parts = [part for _, part in group.uses]
        with torch.no_grad():
            found = getattr(kernels.get(parts[0][0].device), group.kind)(parts)
        for (parameters, _), squares in zip(group.uses, found, strict=True):
            for parameter, value in zip(parameters, squares, strict=True):
                if parameter is not None and parameter.requires_grad:
                    self._deliver(parameter, value)

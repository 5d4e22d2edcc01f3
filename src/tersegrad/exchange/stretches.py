"""A vector whose pieces lie in several places, read and written one stretch at a time.

A framework keeps gradients in memory of its own. Laid one after another as a whole, they have left the cache before they are coded, and
so have the means before they are copied back. An exchange that works part by part takes each part from where it lies: pieces that
are neighbours in memory are not copied at all, others just before they are coded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from tersegrad.core import buffers


class Stretches:
    """Contiguous float32 tensors as one vector; ``seen`` is told of every stretch that is written.

    >>> x = torch.arange(6.0)
    >>> vector = Stretches([x[4:6], x[0:2], x[2:4]], print)
    >>> vector.read(1, 4)
    tensor([5., 0., 1.])
    >>> vector.read(3, 6).data_ptr() == x[1:].data_ptr()
    True
    """

    def __init__(self, tensors: Sequence[Tensor], seen: Callable[[Tensor], object]) -> None:
        self._seen = seen
        self.device = tensors[0].device
        # Where neighbours in memory begin, and all of them.
        self._runs: list[tuple[int, Tensor]] = []
        # Empty ones lie nowhere.
        tensors = [tensor for tensor in tensors if tensor.numel()] or list(tensors[:1])
        begin, first, length, after = 0, tensors[0], 0, (0, 0)
        for tensor in tensors:
            here, storage = tensor.data_ptr(), tensor.untyped_storage().data_ptr()
            if length and (here, storage) != after:
                self._runs.append((begin, _flat(first, length)))
                begin, first, length = begin + length, tensor, 0
            length += tensor.numel()
            after = here + 4 * tensor.numel(), storage
        self._runs.append((begin, _flat(first, length)))

    def read(self, start: int, stop: int) -> Tensor:
        """The coordinates from ``start`` to ``stop``, not to be written to."""
        parts = list(self._parts(start, stop))
        return parts[0] if len(parts) == 1 else buffers.cat(parts)

    def place(self, start: int, stop: int) -> Tensor:
        """Where the coordinates from ``start`` to ``stop`` may be laid for :meth:`write`."""
        parts = list(self._parts(start, stop))
        return parts[0] if len(parts) == 1 else buffers.empty(stop - start, torch.float32, self.device)

    def write(self, start: int, values: Tensor) -> None:
        """Take in what a :meth:`place` holds now."""
        self._seen(values)
        parts = list(self._parts(start, start + values.numel()))
        if len(parts) > 1:
            buffers.copy_all(values.split([part.numel() for part in parts]), parts)

    def _parts(self, start: int, stop: int) -> Iterator[Tensor]:
        for begin, run in self._runs:
            a, b = max(start - begin, 0), min(stop - begin, run.numel())
            if a < b or (start == stop and begin == 0):
                yield run[a:b]


def _flat(first: Tensor, length: int) -> Tensor:
    return first.as_strided((length,), (1,), first.storage_offset())

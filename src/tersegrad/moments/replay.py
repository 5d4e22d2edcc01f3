"""The fallback for modules without a rule: micro-batches.

The module's own forward is run once more on a few slices of its batch, and the gradient of each slice counts as one share. Let the
gradients of B samples have mean s and variance v. The exact moment, the sum of their squares, is about B (v + s^2); with m slices it is
about B (v + s^2 B/m). So noise counts as it should, and signal B/m times as much. A gradient without any noise passes the criterion
r^2 > alpha * moment only if m > alpha: use more micro-batches than that alpha.

Where the samples cannot be taken apart (dropout or batch statistics inside, an output without a batch axis), one backward call
is one share: square(gradient). Gradient accumulation then makes the micro-batches.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook
from torch.nn import Parameter

from tersegrad.core import private
from tersegrad.moments.shares import Budget, Totals, Use, fold
from tersegrad.moments.site import Site


class Inseparable(Exception):
    """The module's output has no axis that follows the samples."""


@dataclasses.dataclass(frozen=True, eq=False)
class ReplayUse(Use):
    """Everything needed to run a slice of the batch again; nothing is saved with the tap."""

    site: Site
    parameters: tuple[Parameter | None, ...]
    samples: int
    micro_batches: int
    leaves: tuple[Any, ...]  # the arguments
    structure: Any
    axes: tuple[int | None, ...]  # of the samples, by argument
    shapes: tuple[torch.Size, ...]  # of the outputs that need a gradient
    deltas: tuple[Tensor | None, ...]
    autocast: tuple[str, bool, torch.dtype]

    def per_sample(self, saved: Sequence[Tensor], delta: Tensor, low: int, high: int) -> Sequence[Tensor | None]:
        return self._slices([(z, z + 1) for z in range(low, high)])

    def totals(self, saved: Sequence[Tensor], delta: Tensor, budget: Budget, gradient: bool) -> list[Totals | None]:
        part = budget.part(self.samples)
        pieces = min(part, self.micro_batches)
        edges = [w * part + part * k // pieces for w in range(budget.workers) for k in range(pieces)] + [self.samples]
        shares = self._slices(list(itertools.pairwise(edges)))
        return [None if s is None else fold(s, slice(0, budget.workers), budget.workers, gradient) for s in shares]

    def _slices(self, slices: list[tuple[int, int]]) -> list[Tensor | None]:
        found = [self._gradient(low, high) for low, high in slices]
        return [None if g[0] is None else torch.stack(g) for g in zip(*found, strict=True)]

    def _gradient(self, low: int, high: int) -> list[Tensor | None]:
        """The gradient that samples low..high give to each parameter."""
        leaves = [
            leaf if axis is None else leaf.narrow(axis, low, high - low)
            for leaf, axis in zip(self.leaves, self.axes, strict=True)
        ]
        args, kwargs = private.of("utils._pytree").tree_unflatten(leaves, self.structure)
        device, enabled, dtype = self.autocast
        with torch.enable_grad(), self.site.collector.paused(), torch.autocast(device, dtype, enabled=enabled):
            outputs = _outputs(self.site.plain(*args, **kwargs))
        pairs = [
            (out, _narrow(delta, shape, out.shape, low, self.samples))
            for out, shape, delta in zip(outputs, self.shapes, self.deltas, strict=True)
            if delta is not None
        ]
        wanted = self.wanted
        found = torch.autograd.grad([o for o, _ in pairs], wanted, [d for _, d in pairs], allow_unused=True)
        gradients = dict(zip(wanted, found, strict=True))
        return [None if p not in gradients else _or_zeros(gradients[p], p) for p in self.parameters if p is not None]


def _or_zeros(gradient: Tensor | None, parameter: Parameter) -> Tensor:
    return torch.zeros_like(parameter) if gradient is None else gradient


def _narrow(delta: Tensor, whole: torch.Size, part: torch.Size, low: int, samples: int) -> Tensor:
    """The rows of ``delta`` that belong to an output slice: on the one axis whose length followed the samples."""
    if whole == part and samples > 1:
        raise Inseparable
    differing = [k for k, (a, b) in enumerate(zip(whole, part, strict=True)) if a != b]
    if not differing:
        return delta
    if len(differing) > 1 or whole[differing[0]] != samples:
        raise Inseparable
    return delta.narrow(differing[0], low, part[differing[0]])


def _outputs(out: Any) -> list[Tensor]:
    return [t for t in private.of("utils._pytree").tree_leaves(out) if isinstance(t, Tensor) and t.requires_grad]


def replay(site: Site, *args: Any, **kwargs: Any) -> Any:
    """Rule of last resort."""
    collector = site.collector
    why = _coupled(site.module)
    if why is None:
        before = _random_state()
        out = site.plain(*args, **kwargs)
        if any(not torch.equal(a, b) for a, b in zip(before, _random_state(), strict=True)):
            why = "draws random numbers"
    else:
        out = site.plain(*args, **kwargs)
    leaves, structure = private.of("utils._pytree").tree_flatten((args, kwargs))
    axes = _axes(site, leaves)
    samples = next((leaf.shape[a] for leaf, a in zip(leaves, axes, strict=True) if a is not None), None)
    if samples is None and why is None:
        why = "is called without an input that has a sample axis"
    outputs = _outputs(out)
    if why is not None or samples is None:
        collector.whole(site, why or "")
        return out
    if not outputs:
        return out
    kept = tuple(leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in leaves)
    device = outputs[0].device.type
    cast = (device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device))
    shapes = tuple(o.shape for o in outputs)
    count: int = samples
    turn = collector.turn

    def hook(deltas: Sequence[Tensor | None]) -> None:
        use = ReplayUse(
            site, site.parameters, count, collector.micro_batches, kept, structure, axes, shapes, tuple(deltas), cast
        )
        present = [d for d in deltas if d is not None]
        if not present:
            return
        try:
            collector.recorder(site, use, fused=False, turn=turn)((), present[0])
        except Inseparable:
            collector.whole(site, "has an output without a sample axis")

    register_multi_grad_hook(outputs, hook)
    return out


def _axes(site: Site, leaves: Sequence[Any]) -> tuple[int | None, ...]:
    """The sample axis of every argument; recurrent modules say where theirs is, and keep states as (layers, samples, width)."""
    recurrent = isinstance(site.module, nn.RNNBase)
    axis = (0 if site.module.batch_first else 1) if recurrent else site.axis
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    if not tensors or tensors[0].ndim <= axis or (recurrent and tensors[0].ndim == 2):
        return (None,) * len(leaves)
    samples = site.collector.samples or tensors[0].shape[axis]
    found: list[int | None] = []
    for leaf in leaves:
        place = 1 if recurrent and isinstance(leaf, Tensor) and leaf is not tensors[0] else axis
        follows = isinstance(leaf, Tensor) and leaf.ndim > place and leaf.shape[place] == samples
        found.append(place if follows else None)
    return tuple(found)


def _coupled(module: nn.Module) -> str | None:
    """Why slices of a batch would not do what the whole batch does, or None."""
    for part in module.modules():
        if isinstance(part, private.of("nn.modules.batchnorm._BatchNorm")) and (part.training or part.running_mean is None):
            return "normalises with the statistics of its batch"
    return None


def _random_state() -> list[Tensor]:
    states = [torch.get_rng_state()]
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states.append(torch.cuda.get_rng_state())
    return states

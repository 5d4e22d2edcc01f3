"""Two-shot all-reduce: compressed reduce-scatter, then compressed all-gather; traffic does not grow with the number of ranks.

The buffer is cut into p parts. Every rank sends part j to rank j, which decodes and averages the p messages it gets, compresses
the mean, and sends it to all. A rank sends 2 (p-1)/p messages' worth of bytes.

Means are compressed as the gradients are, but errors are not fed back a second time (:func:`for_means`): a residual of means would delay
what the residuals of gradients have delayed already. In place of error feedback the second round is unbiased, and at least about as
fine. Measured (``experiments/advice``), it trains better at about the same bytes.

Error, against (1/p) sum ||x_i||^2 (:meth:`TwoShotExchange.guarantee`). If every message errs by at most alpha (relative, squared),
the mean errs by at most alpha after the first round, by convexity, and the second adds alpha of a vector of squared norm at most
(1 + sqrt(alpha))^2: in the norm, sqrt(alpha) + sqrt(alpha) (1 + sqrt(alpha)). Unbiased compressors stay unbiased, with variance at
most omega + omega (1 + omega); where ranks draw independently the first omega is omega/p. The alpha or omega of another second compressor
stands in the second place.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from tersegrad.compressors import RandomSparseDithering
from tersegrad.core import buffers, trust
from tersegrad.core.promises import worst
from tersegrad.core.protocol import Compressor, Context, Guarantee, Spec, Stats, codes_on_host, has_fixed_size
from tersegrad.core.state import slice_spec
from tersegrad.core.text import Configuration
from tersegrad.exchange.all_gather import gather_messages, refuse
from tersegrad.exchange.reduce_scatter import Unreadable, reduce_scatter
from tersegrad.exchange.steps import Part, Steps
from tersegrad.exchange.stretches import Stretches
from tersegrad.wrappers import ErrorFeedback

UNIT = 64  # parts begin at multiples of this many coordinates
# An ordinary buffer, for which a compressor says what it promises; and the omega where it promises to be exact.
_PROBE, _LEAST = Spec.flat(4096), 1e-6


def borders(numel: int, size: int) -> list[int]:
    """Where the p parts of a buffer begin and end: as equal as multiples of 64 allow."""
    units = -(-numel // UNIT)
    return [min(numel, units * r // size * UNIT) for r in range(size)] + [numel]


def for_means(first: Any) -> Any:
    """What means are compressed with unless told: as the gradients are, with an unbiased compressor in place of error feedback.

    Its omega is 2 alpha / (1 - alpha), at most 1, for error feedback of guarantee alpha. Messages of a fixed size stay what they are, with
    a residual of means: they need no round for their lengths.

    >>> from tersegrad.compressors import TopK, SparseDithering
    >>> print(for_means(ErrorFeedback(TopK(fraction=0.01))), for_means(ErrorFeedback(SparseDithering(alpha=0.1))))
    random_sparse_dithering(omega=1.0) random_sparse_dithering(omega=0.22)
    >>> print(for_means(TopK(fraction=0.01)))
    top_k(fraction=0.01)
    """
    if isinstance(first, ErrorFeedback) and has_fixed_size(first):
        return first
    if isinstance(first, ErrorFeedback):
        promise = first.guarantee(_PROBE)
        alpha = promise.value if promise.kind == "contractive" else 1.0
        return RandomSparseDithering(omega=float(f"{min(1.0, 2 * alpha / max(1 - alpha, alpha)):.2g}") or _LEAST)
    if isinstance(first, tuple):
        return tuple(for_means(part) for part in first)
    if isinstance(first, Configuration):
        parts = {field.name: getattr(first, field.name) for field in dataclasses.fields(first)}
        changed = {name: other for name, part in parts.items() if (other := for_means(part)) != part}
        return dataclasses.replace(first, **changed) if changed else first
    return first


@functools.lru_cache(maxsize=256)
def layout(spec: Spec, size: int) -> tuple[list[int], list[Spec]]:
    """The borders and the specs of the p parts."""
    at = borders(spec.numel, size)
    return at, [slice_spec(spec, a, b) for a, b in itertools.pairwise(at)]


@dataclasses.dataclass(frozen=True)
class TwoShotState:
    """First-round states of all parts, and the second-round state of this rank's own part."""

    first: tuple[Any, ...]
    second: Any


@dataclasses.dataclass(frozen=True)
class TwoShotExchange:
    """Mean over ranks in two compressed rounds. It also takes a vector in :class:`Stretches`, and lays the mean into it."""

    in_stretches: ClassVar[bool] = True

    compressor: Compressor[Any]
    second: Compressor[Any] | None = None  # by default that of for_means

    @functools.cached_property
    def _second(self) -> Compressor[Any]:
        found: Compressor[Any] = self.second or for_means(self.compressor)
        return found

    def init(self, spec: Spec, device: torch.device | str, rank: int, size: int) -> TwoShotState:
        _, parts = layout(spec, size)
        return TwoShotState(tuple(self.compressor.init(p, device) for p in parts), self._second.init(parts[rank], device))

    def steps(
        self,
        x: Tensor | Stretches,
        state: TwoShotState,
        spec: Spec,
        ctx: Context,
        rank: int,
        size: int,
        stats: Stats | None = None,
        into: Tensor | None = None,
    ) -> Steps[TwoShotState]:
        at, parts = layout(spec, size)
        xs: Iterable[Tensor]
        if isinstance(x, Tensor):
            xs = torch.split(x.detach().reshape(-1), [p.numel for p in parts])
        else:
            xs = itertools.starmap(x.read, itertools.pairwise(at))
        moment = None if stats is None or stats.second_moment is None else stats.second_moment.reshape(-1)
        shares = None if moment is None else [Stats(moment[a:b]) for a, b in itertools.pairwise(at)]
        fixed = has_fixed_size(self._second)
        try:
            mean, first = yield from reduce_scatter(self.compressor, xs, state.first, parts, ctx, rank, size, shares)
        except Unreadable:
            # The others wait for the mean: they learn why there is none.
            if not fixed:
                yield from refuse(x.device)
            raise
        mean.mul_(1.0 / size)
        again = ctx.child(size)
        limits = [self._second.max_nbytes(p) for p in parts]
        place = buffers.empty(limits[rank], torch.uint8, x.device)
        own, second = self._second.encode(mean, parts[rank], state.second, again.sent_by(rank), out=place)
        on_host = codes_on_host(self._second, x.device)
        _, all_parts = yield from gather_messages(own, limits, fixed, rank, size, on_host)
        if isinstance(x, Stretches):
            for r, message in enumerate(all_parts):
                where = x.place(at[r], at[r + 1])
                self._second.decode(message, parts[r], again.sent_by(r), where)
                x.write(at[r], where)
            laid: Any = x
            return laid, TwoShotState(first, second)
        out = buffers.float_buffer(into, spec.numel, x.device)

        def body() -> Tensor:
            for r, message in enumerate(all_parts):
                self._second.decode(message, parts[r], again.sent_by(r), out[at[r] : at[r + 1]])
            return out

        return trust.decoded(body), TwoShotState(first, second)

    def guarantee(self, spec: Spec, size: int) -> Guarantee:
        """What holds of the mean over ``size`` ranks, against (1/p) sum ||x_i||^2, with fresh states."""
        at = borders(spec.numel, size)
        parts = [slice_spec(spec, a, b) for a, b in itertools.pairwise(at) if a < b]
        if not parts:
            return Guarantee("contractive", 0.0, sure=True)
        first = worst([self.compressor.guarantee(p) for p in parts])
        second = worst([self._second.guarantee(p) for p in parts])
        if "none" in (first.kind, second.kind):
            return Guarantee("none")
        one, two = first.value, second.value
        if first.kind == second.kind == "unbiased":
            return Guarantee("unbiased", one + two * (1 + one))
        raised = math.sqrt(1 + one) if first.kind == "unbiased" else 1 + math.sqrt(one)  # norm of what the second round sees
        value = (math.sqrt(one) + math.sqrt(two) * raised) ** 2
        return Guarantee("contractive", value, sure=first.sure and second.sure)

    def parts(self, state: TwoShotState, spec: Spec, rank: int, size: int) -> list[Part]:
        at = borders(spec.numel, size)
        first = [Part("first", a, b, size, part) for (a, b), part in zip(itertools.pairwise(at), state.first)]
        return [*first, Part("second", at[rank], at[rank + 1], 1, state.second)]

    def join(self, parts: Sequence[Any], spec: Spec, rank: int, size: int) -> TwoShotState:
        return TwoShotState(tuple(parts[:-1]), parts[-1])

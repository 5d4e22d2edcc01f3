"""The collector: attaches to a model and keeps, for every parameter, the sum over samples of the squared shares of its gradient."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.nn.utils import parametrize

from tersegrad.core import private
from tersegrad.core.errors import BadConfiguration, MissingStatistics
from tersegrad.moments import rules
from tersegrad.moments.joint import Joint, joins
from tersegrad.moments.replay import replay
from tersegrad.moments.shares import Budget, Grouped, Totals, Use, fold
from tersegrad.moments.site import Site
from tersegrad.moments.tap import Record
from tersegrad.moments.turn import Begin, End, Turn

CPU_CHUNK = 8 << 20  # shares that stay near the cache between being made and being squared
CUDA_CHUNK = 1 << 30


@dataclasses.dataclass(frozen=True)
class _Held:
    """A use whose shares must be added to those of other uses of the parameter before they are squared."""

    turn: Turn
    use: Use
    index: int  # of the parameter in the use
    saved: tuple[Tensor, ...]
    delta: Tensor


class Collector:
    """Second moments of a model's gradient over the samples of each batch.

    After ``loss.backward()``, ``second_moment(p)`` is the sum over samples z of c_z^2, float32 and shaped like p, where c_z is the
    share of z in ``p.grad`` (the sum of c_z is ``p.grad``, for mean- and sum-reduced losses alike). Moments add up over backward
    calls until ``take()``.

    With ``workers=k`` the batch is taken for k equal consecutive parts, one a virtual worker: moments have the shape (k, \\*p.shape),
    and ``gradient(p)``, of the same shape, holds each worker's sum of c_z. Both are scaled by the one loss given: under a mean over
    the whole batch, worker j's own mean gradient is k * gradient(p)[j] and its moment k^2 * second_moment(p)[j].

    >>> model = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
    >>> with Collector(model) as collector:
    ...     model(torch.ones(5, 4)).sum().backward()
    >>> bool(torch.allclose(collector.second_moment(model[2].bias), torch.tensor([5.0, 5.0])))
    True
    """

    def __init__(
        self,
        model: nn.Module,
        workers: int = 1,
        *,
        batch_dim: int = 0,
        chunk_bytes: int | None = None,
        micro_batches: int = 8,
    ) -> None:
        private.of("_C._current_graph_task_id")  # a clear line now, if this torch has none
        if workers < 1:
            raise BadConfiguration(f"workers must be at least 1, got {workers}")
        if chunk_bytes is not None and chunk_bytes < 1:
            raise BadConfiguration(f"chunk_bytes must be positive, got {chunk_bytes}")
        self.model = model
        self.workers = workers
        self.batch_dim = batch_dim
        self.chunk_bytes = chunk_bytes
        self._sites: list[Site] = []
        self._moments: dict[Parameter, Tensor] = {}
        self._gradients: dict[Parameter, Tensor] = {}
        self.turn = Turn()  # the forward pass that runs, or ran last
        self._budgets = {
            cuda: Budget(workers, chunk_bytes or default) for cuda, default in ((False, CPU_CHUNK), (True, CUDA_CHUNK))
        }
        self._over = False  # whether a backward pass has run since it began
        self._held: dict[Parameter, list[_Held]] = {}
        self._joint = Joint(lambda parameter, squares: _add(self._moments, parameter, squares))
        self._whole: dict[Parameter, Any] = {}  # parameters whose backward calls are shares, with their hooks
        if micro_batches < 1:
            raise BadConfiguration(f"micro_batches must be at least 1, got {micro_batches}")
        self.micro_batches = micro_batches
        self.samples: int | None = None  # of the batch that the model was called with last, where it was
        self.fallbacks: dict[str, str] = {}
        self._paused = False
        self._attach()
        self._calls = (
            model.register_forward_pre_hook(Begin(self), with_kwargs=True),
            model.register_forward_hook(End(self)),
        )

    def _attach(self) -> None:
        axes = dict.fromkeys(self.model.modules(), self.batch_dim)
        # Children of modules whose rule also covers the children's parameters.
        covered_above: set[nn.Module] = set()
        for module in self.model.modules():
            if isinstance(module, (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)):
                axes.update(dict.fromkeys(module.modules(), 0 if module.self_attn.batch_first else 1))
            if isinstance(module, nn.MultiheadAttention) and rules.find(module) is not None:
                covered_above.update(module.children())
        lost: dict[nn.Module, list[Parameter]] = {}
        by_name = dict(self.model.named_modules())
        for name, module in by_name.items():
            own = list(module.parameters(recurse=False))
            host, at = module, name
            while isinstance(host, _HOLDERS) and at:
                at = at.rpartition(".")[0]
                host = by_name[at]
            rule = rules.find(module)
            if rule is None or isinstance(module, _HOLDERS):
                lost.setdefault(host, []).extend(own)
            elif module not in covered_above:
                ruled = rules.covered(module)
                lost.setdefault(host, []).extend(p for p in own if not any(p is q for q in ruled))
                if ruled:
                    self._watch(Site(self, module, name, rule, ruled, axes[module]))
        for name, module in by_name.items():
            if lost.get(module):
                self._fall_back(module, name, lost[module], axes[module])

    def _watch(self, site: Site) -> None:
        site.attach()
        self._sites.append(site)

    def _fall_back(self, module: nn.Module, name: str, parameters: list[Parameter], axis: int) -> None:
        names = {p: n for n, p in self.model.named_parameters()}
        self.fallbacks.update(
            (names[p], f"{type(module).__name__} has no rule: {self.micro_batches} micro-batches") for p in parameters
        )
        within = Site(self, module, name, replay, parameters, axis)
        before = module.__dict__.get("forward")
        if isinstance(before, Site):  # a ruled module with a parameter that its rule does not cover (attention's bias_k)
            self.whole(within, f"{type(module).__name__}'s rule does not cover it")
        else:
            self._watch(within)
        listed = ", ".join(names[p] for p in parameters)
        warnings.warn(f"no rule for {listed} ({type(module).__name__}): moments by micro-batches", stacklevel=4)

    # ---- what users call ----

    def second_moment(self, parameter: Parameter) -> Tensor:
        """Sum over samples of the squared shares: float32, (\\*shape), or (workers, \\*shape) with more than one worker."""
        self._settle(parameter)
        return self._get(self._moments, parameter)

    def gradient(self, parameter: Parameter) -> Tensor:
        """Each worker's sum of shares, float32 (workers, \\*shape); their sum is the gradient of the loss."""
        if self.workers == 1:
            raise BadConfiguration("one worker's gradient is parameter.grad; ask with workers=2 or more")
        return self._get(self._gradients, parameter)

    def take(self) -> dict[Parameter, Tensor]:
        """All second moments by parameter; the collector starts anew (the gradients by worker are forgotten too)."""
        self._settle()
        taken = self._moments
        self.clear()
        return taken

    def take_workers(self) -> dict[Parameter, tuple[Tensor, Tensor]]:
        """(gradient, second moment) by worker of every parameter; the collector starts anew."""
        self._settle()
        taken = {p: (self.gradient(p), m) for p, m in self._moments.items()}
        self.clear()
        return taken

    def clear(self) -> None:
        """Forget what was collected."""
        self._moments, self._gradients, self._held = {}, {}, {}
        self._joint.clear()

    def remove(self) -> None:
        """Give the model its own forward back. What was collected can still be read."""
        self.turn.end()
        for site in self._sites:
            site.detach()
        self._sites.clear()
        for hook in (*self._whole.values(), *self._calls):
            hook.remove()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Forward passes inside are plain ones."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    def __enter__(self) -> Collector:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    # ---- what sites call ----

    def expects(self, parameters: Sequence[Parameter]) -> bool:
        """Whether a call of the module that owns ``parameters`` is to be recorded; counts the use."""
        if self._paused:
            return False
        # Otherwise a checkpoint recomputes what was counted before.
        if not private.in_backward():
            if self._over:
                self._next()
            turn = self.turn
            uses = turn.uses
            for p in parameters:
                number = id(p)
                if number in uses:
                    uses[number] += 1
                    turn.again = True
                else:
                    uses[number] = 1
        if torch.is_grad_enabled():
            for p in parameters:
                if p.requires_grad:
                    return True
        return False

    def recorder(self, site: Site, use: Use, *, fused: bool, turn: Turn | None = None) -> Record:
        """The function that a tap calls in the backward pass."""
        if self.samples is not None and use.samples != self.samples:
            if use.samples % self.samples == 0 and site.axis == 0:
                use = Grouped(use, use.samples // self.samples)
            else:
                self.whole(site, f"got {use.samples} rows where the model's batch has {self.samples} samples")
        return functools.partial(self._record, use, fused, turn or self.turn)

    def whole(self, site: Site, why: str) -> None:
        """From now on each backward call is one share of the parameters of ``site``."""
        fresh = [p for p in site.parameters if p not in self._whole and p.requires_grad]
        if not fresh:
            return
        where = site.name or type(site.module).__name__
        if self.workers > 1:
            raise BadConfiguration(f"{where} {why}: its gradient cannot be split by worker in one pass")
        names = {p: n for n, p in self.model.named_parameters()}
        for p in fresh:
            self.fallbacks[names[p]] = f"{where} {why}: each backward call is one share"
            self._whole[p] = p.register_hook(lambda g, p=p: self._square(p, g))
        warnings.warn(
            f"moments: {where} {why}: each backward call counts as one share; split the batch over some", stacklevel=2
        )

    def _square(self, parameter: Parameter, gradient: Tensor) -> None:
        _add(self._moments, parameter, gradient.detach().float().square())

    def _record(self, use: Use, fused: bool, turn: Turn, saved: Sequence[Tensor], delta: Tensor) -> Sequence[Tensor | None]:
        self._over = True
        if self.workers == 1 and (not (turn.again or self._whole) or self._alone(use, turn)):
            if fused and (pairs := use.pairs(saved, delta)) is not None:
                return self._shares(use.parameters, pairs)
            if not fused and use.joint is not None and joins(delta) and (part := use.part(saved, delta)) is not None:
                self._joint.add(use.joint, use.parameters, part)
                return ()
        totals = use.totals(saved, delta, self._budgets[delta.is_cuda], fused or self.workers > 1)
        gradients: list[Tensor | None] = []
        for k, (parameter, total) in enumerate(zip(use.parameters, totals, strict=True)):
            if parameter is None or total is None:
                gradients.append(None)
                continue
            if self._whole and parameter in self._whole:
                pass
            elif not turn.alone(parameter):
                kept = tuple(s.detach() for s in saved)  # the graph would be kept with them
                self._held.setdefault(parameter, []).append(_Held(turn, use, k, kept, delta))
            else:
                self._count(parameter, total.squares)
            if self.workers > 1 and total.gradient is not None:
                _add(self._gradients, parameter, total.gradient)
            if fused and total.gradient is not None:
                whole = total.gradient[0] if self.workers == 1 else total.gradient.sum(0)
                gradients.append(whole if whole.dtype == parameter.dtype else whole.to(parameter.dtype))
        return gradients if fused else ()

    def _alone(self, use: Use, turn: Turn) -> bool:
        """Whether the shares of a use can be squared as they are: no other use has some of the same parameters."""
        return all(p is None or (turn.alone(p) and p not in self._whole) for p in use.parameters)

    def _shares(
        self, parameters: Sequence[Parameter | None], pairs: Sequence[tuple[Tensor, Tensor] | None]
    ) -> list[Tensor | None]:
        """Keep the squares; the gradients."""
        gradients: list[Tensor | None] = []
        for parameter, pair in zip(parameters, pairs, strict=True):
            if parameter is None or pair is None:
                gradients.append(None)
                continue
            gradient, squares = pair
            _add(self._moments, parameter, squares)
            gradients.append(gradient if gradient.dtype == parameter.dtype else gradient.to(parameter.dtype))
        return gradients

    def _count(self, parameter: Parameter, squares: Tensor) -> None:
        """Add (workers, \\*shape) squares to the moment."""
        _add(self._moments, parameter, squares if self.workers > 1 else squares[0])

    # ---- passes ----

    def begin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The model is being called: see how many samples its batch has."""
        if self._paused or private.in_backward():
            return
        self._next()
        self.turn.running = True
        tensors = [a for a in (*args, *kwargs.values()) if isinstance(a, Tensor) and a.ndim > self.batch_dim]
        self.samples = tensors[0].shape[self.batch_dim] if tensors else None

    def _next(self) -> None:
        """A new forward pass: other samples, so uses are counted afresh."""
        if self._over:
            self._settle()
        self.turn.end()
        self.turn, self.samples, self._over = Turn(), None, False

    def _settle(self, only: Parameter | None = None) -> None:
        """Square what was held back: the shares of all uses of a parameter in one pass are summed first, in chunks of samples."""
        self._joint.finish()
        for parameter in [p for p in self._held if only is None or p is only]:
            held = self._held.pop(parameter)
            for turn in {h.turn for h in held}:
                self._count(parameter, self._squares(parameter, [h for h in held if h.turn == turn]))

    def _squares(self, parameter: Parameter, uses: list[_Held]) -> Tensor:
        samples = {h.use.samples for h in uses}
        if len(samples) != 1:
            raise BadConfiguration(f"a parameter was used with batches of {sorted(samples)} samples in one pass")
        delta = uses[0].delta
        nbytes = 4 * parameter.numel() + max(h.use.nbytes(h.saved, h.delta) for h in uses)
        found: Totals | None = None
        for low, high, workers in self._budgets[delta.is_cuda].chunks(samples.pop(), nbytes):
            total: Tensor | None = None
            for h in uses:
                shares = h.use.per_sample(h.saved, h.delta, low, high)[h.index]
                if shares is not None:
                    total = shares.float() if total is None else total.add_(shares)
            if total is not None:
                found = fold(total, workers, self.workers, False, found)
        if found is None:
            raise MissingStatistics("no use of the parameter gave shares")
        return found.squares

    def _get(self, table: dict[Parameter, Tensor], parameter: Parameter) -> Tensor:
        found = table.get(parameter)
        if found is None:
            name = next((n for n, p in self.model.named_parameters() if p is parameter), None)
            why = "is no parameter of the model" if name is None else "has taken part in no backward pass since the last take()"
            raise MissingStatistics(f"no second moment: {name or 'this tensor'} {why}")
        return found


_HOLDERS = (
    nn.ParameterList,
    nn.ParameterDict,
    nn.ModuleList,
    nn.ModuleDict,
    parametrize.ParametrizationList,
)  # are never called


def _add(table: dict[Parameter, Tensor], parameter: Parameter, value: Tensor) -> None:
    found = table.setdefault(parameter, value)
    if found is not value:
        found += value

"""Where gradients come from: the hand-written pass of ``network.py``, or any torch model with the package's collector.

Both fill the same flat buffers. The first is what the table is made with; the second is how a user gets the same numbers from an
ordinary model, serves ``imagenet.py``, and is compared with the first by a test and by ``run.py --profile``.
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from experiments.variance_based.batched import Buffers
from experiments.variance_based.layout import Layout
from experiments.variance_based.network import Conv, Flatten, Linear, Mode, Network, NormRelu, Pass, PoolDrop, Relu


class Engine(Protocol):
    """A model whose parameters lie in one flat vector."""

    layout: Layout

    def bind(self, params: Tensor, buffers: Buffers, workers: int, mode: Mode) -> None:
        """Use these tensors from now on."""
        ...

    def step(self, x: Tensor, labels: Tensor) -> Tensor:
        """Fill the gradient (and squares) of all workers; returns the mean loss."""
        ...

    def forward(self, x: Tensor, training: bool = False) -> Tensor:
        """Logits."""
        ...

    def changing(self) -> list[Tensor]:
        """Tensors that a step changes: running statistics."""
        ...


@dataclasses.dataclass
class OnePass:
    """The hand-written pass."""

    net: Network

    def __post_init__(self) -> None:
        self.layout = self.net.layout

    def bind(self, params: Tensor, buffers: Buffers, workers: int, mode: Mode) -> None:
        self.params = params
        self.low = torch.zeros_like(params, dtype=torch.bfloat16) if params.is_cuda else params
        views = self.layout.views
        self.run = Pass(
            weights=views(self.low),
            params=views(params),
            gradients=views(buffers.gradient),
            squares=views(buffers.squares) if buffers.squares is not None else {},
            buffers=self.net.buffers(params.device),
            workers=workers,
            mode=mode,
        )

    def _lower(self) -> None:
        if self.low is not self.params:
            self.low.copy_(self.params)

    def step(self, x: Tensor, labels: Tensor) -> Tensor:
        self._lower()
        return self.net.step(self.run, x, labels)

    def forward(self, x: Tensor, training: bool = False) -> Tensor:
        self._lower()
        return self.net.forward(dataclasses.replace(self.run, training=training), x)

    def changing(self) -> list[Tensor]:
        return list(self.run.buffers.values())


def twin(net: Network, seed: int = 0) -> nn.Sequential:
    """The same network as an ordinary model, for the collector."""
    modules: dict[str, nn.Module] = {}

    def add(name: str, *parts: nn.Module) -> None:
        modules.update({f"{name}{'_' * i}".replace(".", "-"): part for i, part in enumerate(parts)})

    for index, layer in enumerate(net.layers):
        match layer:
            case Conv():
                add(layer.name, nn.Conv2d(layer.inputs, layer.outputs, layer.size, padding=layer.size // 2, bias=layer.bias))
            case NormRelu():
                add(layer.name, nn.BatchNorm2d(layer.channels, eps=layer.eps, momentum=layer.momentum), nn.ReLU())
            case Relu():
                add(f"relu{index}", nn.ReLU())
            case PoolDrop():
                add(f"pool{index}", nn.MaxPool2d(2), nn.Dropout(layer.drop))
            case Flatten():
                add(f"flatten{index}", _ChannelsLastFlatten())
            case Linear():
                tail: list[nn.Module] = [] if layer.last else [nn.ReLU(), nn.Dropout(layer.drop)]
                add(layer.name, nn.Linear(layer.inputs, layer.outputs), *tail)
            case _:
                raise TypeError(f"no module for {type(layer).__name__}")
    return nn.Sequential(OrderedDict(modules))


class _ChannelsLastFlatten(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.permute(0, 2, 3, 1).flatten(1)


def _stored(p: Tensor) -> Tensor:
    """A parameter as it lies in the flat vector: convolutions channels-last."""
    return p.permute(0, 2, 3, 1) if p.ndim == 4 else p


class Collected:
    """An ordinary torch model; per-worker gradients and squares come from :class:`tersegrad.moments.Collector`."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.layout = Layout.of({name: tuple(_stored(p).shape) for name, p in model.named_parameters()})
        self.collector: Any = None

    def initial(self) -> Tensor:
        """The model's own parameters as a flat vector."""
        flat = torch.zeros(self.layout.padded)
        views = self.layout.views(flat)
        for name, p in self.model.named_parameters():
            views[name].copy_(_stored(p.detach()))
        return flat

    def bind(self, params: Tensor, buffers: Buffers, workers: int, mode: Mode) -> None:
        from tersegrad import moments

        self.workers, self.mode = workers, mode
        self.model.to(params.device, memory_format=torch.channels_last)  # type: ignore[call-overload]
        moments.worker_batch_norm(self.model, workers)
        views = self.layout.views(params)
        self.gradients = self.layout.views(buffers.gradient)
        self.squares = self.layout.views(buffers.squares) if buffers.squares is not None else {}
        for name, p in self.model.named_parameters():
            view = views[name]
            p.data = view.permute(0, 3, 1, 2) if view.ndim == 4 else view
        if mode != "mean":
            self.collector = moments.Collector(self.model, workers=workers)

    def _autocast(self, x: Tensor) -> Any:
        return torch.autocast(x.device.type, dtype=torch.bfloat16, enabled=x.is_cuda, cache_enabled=False)

    @torch.enable_grad()
    def step(self, x: Tensor, labels: Tensor) -> Tensor:
        self.model.train()
        for p in self.model.parameters():
            p.grad = None
        with self._autocast(x):
            logits = self.model(x)
        loss = F.cross_entropy(logits.float(), labels, reduction="sum")
        (loss * (self.workers / x.shape[0])).backward()
        with torch.no_grad():
            for name, p in self.model.named_parameters():
                if self.mode == "mean":
                    assert p.grad is not None
                    self.gradients[name][0].copy_(_stored(p.grad))
                    continue
                found = self.collector.gradient(p)
                self.gradients[name].copy_(found.permute(0, 1, 3, 4, 2) if p.ndim == 4 else found)
                if self.squares:
                    found = self.collector.second_moment(p)
                    self.squares[name].copy_(found.permute(0, 1, 3, 4, 2) if p.ndim == 4 else found)
            if self.collector is not None:
                self.collector.clear()
        return loss.detach() / x.shape[0]

    @torch.no_grad()
    def forward(self, x: Tensor, training: bool = False) -> Tensor:
        self.model.train(training)
        with self._autocast(x):
            found: Tensor = self.model(x)
        return found.float()

    def changing(self) -> list[Tensor]:
        return list(self.model.buffers())


class Replicas:
    """An ordinary torch model of which every worker has parameters, and running statistics, of its own.

    The parameters are (workers, padded). Workers' passes are independent, so on CUDA they go to several streams: a batch of one worker
    alone leaves most of a large device idle. Evaluation takes :attr:`anchor`, and the mean of the workers' running statistics.
    """

    STREAMS = 8

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.layout = Layout.of({name: tuple(_stored(p).shape) for name, p in model.named_parameters()})

    def bind(self, params: Tensor, buffers: Buffers, workers: int, mode: Mode) -> None:
        device = params.device
        self.model.to(device, memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.params, self.anchor = params, params[0].clone()
        # Products are in bfloat16 on CUDA: one copy serves all weights, where autocast would copy each.
        self.low = torch.zeros_like(params, dtype=torch.bfloat16) if params.is_cuda else params
        self.weights = [self._leaves(low, own) for low, own in zip(self.low, params)]
        self.gradients = self.layout.views(buffers.gradient)
        self.running = {
            name: b.detach().expand(workers, *b.shape).clone(memory_format=torch.contiguous_format)
            for name, b in self.model.named_buffers()
        }
        self.losses = torch.zeros(workers, device=device)
        self.streams = [torch.cuda.Stream(device) for _ in range(min(workers, self.STREAMS))] if params.is_cuda else []

    def _leaves(self, low: Tensor, own: Tensor) -> dict[str, Tensor]:
        """One worker's parameters, as the model wants them; matrices in the lower precision."""
        lows, owns = self.layout.views(low), self.layout.views(own)
        found = {}
        for name, view in owns.items():
            chosen = lows[name] if view.ndim > 1 else view
            chosen = chosen.permute(0, 3, 1, 2) if chosen.ndim == 4 else chosen
            found[name] = chosen.detach().requires_grad_()
        return found

    def _autocast(self) -> Any:
        kind = self.params.device.type
        return torch.autocast(kind, dtype=torch.bfloat16, enabled=self.params.is_cuda, cache_enabled=False)

    def _lower(self) -> None:
        if self.low is not self.params:
            self.low.copy_(self.params)

    def _worker(self, w: int, x: Tensor, labels: Tensor) -> None:
        weights = self.weights[w]
        with torch.enable_grad():
            with self._autocast():
                running = {name: stacked[w] for name, stacked in self.running.items()}
                logits = torch.func.functional_call(self.model, {**weights, **running}, (x,))
            loss = F.cross_entropy(logits.float(), labels)
            gradients = torch.autograd.grad(loss, list(weights.values()))
        for name, gradient in zip(weights, gradients):
            self.gradients[name][w].copy_(_stored(gradient))
        self.losses[w].copy_(loss.detach())

    @torch.no_grad()
    def step(self, x: Tensor, labels: Tensor) -> Tensor:
        self.model.train()
        self._lower()
        parts = list(zip(x.chunk(len(self.params)), labels.chunk(len(self.params))))
        if not self.streams:
            for w, (own, given) in enumerate(parts):
                self._worker(w, own, given)
            return self.losses.mean()
        here = torch.cuda.current_stream()
        for stream in self.streams:
            stream.wait_stream(here)
        for w, (own, given) in enumerate(parts):
            with torch.cuda.stream(self.streams[w % len(self.streams)]):
                self._worker(w, own, given)
        for stream in self.streams:
            here.wait_stream(stream)
        return self.losses.mean()

    @torch.no_grad()
    def forward(self, x: Tensor, training: bool = False) -> Tensor:
        self.model.train(training)
        running = {
            name: stacked.mean(0) if stacked.is_floating_point() else stacked[0].clone()
            for name, stacked in self.running.items()
        }
        with self._autocast():
            logits: Tensor = torch.func.functional_call(self.model, {**self._leaves(self.anchor, self.anchor), **running}, (x,))
        return logits.float()

    def changing(self) -> list[Tensor]:
        return [*self.running.values(), self.losses]

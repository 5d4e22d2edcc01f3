"""The definition, slowly: shares found by giving the loss one sample's output gradient at a time."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from tersegrad.moments import Collector


def by_sample(model: nn.Module, loss: Callable[[int], Tensor], samples: int) -> dict[Parameter, Tensor]:
    """(samples, *shape) shares where the loss is a sum of independent terms: ``loss(z)`` is sample z's term, on its own."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    shares: dict[Parameter, list[Tensor]] = {p: [] for p in parameters}
    for z in range(samples):
        found = torch.autograd.grad(loss(z), parameters, allow_unused=True)
        for p, g in zip(parameters, found, strict=True):
            shares[p].append(torch.zeros_like(p) if g is None else g)
    return {p: torch.stack(s) for p, s in shares.items()}


def relative_error(found: Tensor, expected: Tensor) -> float:
    """Largest difference over the largest value expected."""
    scale = expected.abs().max().clamp(min=1e-30)
    return float((found.double() - expected.double()).abs().max() / scale)


def check(
    model: nn.Module,
    x: Tensor | Sequence[Tensor],
    *,
    workers: int = 1,
    tolerance: float = 1e-5,
    batch_dim: int = 0,
    chunk_bytes: int | None = None,
) -> None:
    """The collector's moments, worker gradients and ``p.grad`` against the per-sample loop, for samples that do not interact."""
    inputs = [x] if isinstance(x, Tensor) else list(x)
    samples = inputs[0].shape[batch_dim]

    def slices(z: int) -> list[Tensor]:
        return [t.narrow(batch_dim, z, 1) for t in inputs]

    out = model(*inputs)
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(7), dtype=out.dtype)
    shares = by_sample(model, lambda z: (model(*slices(z)) * weight.narrow(batch_dim, z, 1)).sum(), samples)
    with Collector(model, workers, batch_dim=batch_dim, chunk_bytes=chunk_bytes) as collector:
        model.zero_grad()
        (model(*inputs) * weight).sum().backward()
    for name, p in model.named_parameters():
        if not p.requires_grad:
            continue
        parts = shares[p].double().unflatten(0, (workers, -1))
        moment = collector.second_moment(p)
        expected = parts.square().sum(1)
        assert moment.dtype == torch.float32, name
        assert moment.shape == (p.shape if workers == 1 else (workers, *p.shape)), name
        assert relative_error(moment, expected if workers > 1 else expected[0]) < tolerance, name
        assert p.grad is not None, name
        assert relative_error(p.grad, parts.sum((0, 1))) < tolerance, name
        if workers > 1:
            assert relative_error(collector.gradient(p), parts.sum(1)) < tolerance, name
    assert set(collector.take()) == {p for p in model.parameters() if p.requires_grad}


class Copies:
    """A model whose parameters are replaced by one copy per sample: the gradient of the copies *is* the shares.

    Works where samples interact (batch norm in training) and where a parameter is used twice.
    """

    def __init__(self, model: nn.Module, samples: int, workers: int = 1) -> None:
        self.model, self.samples, self.workers = model, samples, workers
        self.copies = {
            p: p.detach().unsqueeze(0).repeat(samples, *[1] * p.ndim).requires_grad_()
            for p in model.parameters()
            if p.requires_grad
        }

    def shares(self, x: Tensor, loss: Callable[[Tensor], Tensor]) -> dict[Parameter, Tensor]:
        modules = [m for m in self.model.modules() if list(m.parameters(recurse=False))]
        for m in modules:
            m.__dict__["forward"] = functools.partial(self._forward, m)
        try:
            loss(self.model(x)).backward()
        finally:
            for m in modules:
                del m.__dict__["forward"]
        return {p: torch.zeros_like(c) if c.grad is None else c.grad for p, c in self.copies.items()}

    def _forward(self, m: nn.Module, x: Tensor) -> Tensor:
        each = [{n: self.copies[p][z] for n, p in m.named_parameters(recurse=False)} for z in range(self.samples)]
        if isinstance(m, nn.modules.batchnorm._BatchNorm):
            parts = x.chunk(self.workers)
            normal = torch.cat([nn.functional.batch_norm(part, None, None, training=True, eps=m.eps) for part in parts])
            rows = [n * e["weight"].view(-1, 1, 1) + e["bias"].view(-1, 1, 1) for n, e in zip(normal, each, strict=True)]
            return torch.stack(rows)
        forward = m.__dict__.pop("forward")
        try:
            return torch.cat([torch.func.functional_call(m, e, (x[z : z + 1],)) for z, e in enumerate(each)])
        finally:
            m.__dict__["forward"] = forward

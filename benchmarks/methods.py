"""A method of distributed training as text: ``compressor + exchange + optimiser``.

The parts are told apart by their names, so any may be left out::

    float32                                              torch's own all-reduce
    bf16                                                 the same with torch's bfloat16 hook
    float32 + power_sgd(rank=4)                          an exchange that needs no compressor
    error_feedback(sparse_dithering(alpha=0.1))          two_shot by default
    error_feedback(top_k(fraction=0.01)) + all_gather + sgd(lr=0.05, momentum=0.9)
    error_feedback(qsgd) + two_shot(group_bytes=4000000, warmup_steps=10)
    auto                                                 compressor and exchange as the handle chooses them

Options of ``ddp.attach`` may stand in the exchange's brackets.
"""

from __future__ import annotations

import ast
import dataclasses
import re
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

import tersegrad
from tersegrad.core.protocol import Compressor
from tersegrad.exchange import Exchange, Scheme, scheme
from tersegrad.exchange.schemes import SCHEMES
from tersegrad.integrations import ddp

DENSE = ("float32", "bf16")  # what torch's all-reduce moves
OPTIMISERS: dict[str, type[torch.optim.Optimizer]] = {
    "sgd": torch.optim.SGD,
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
}
EXCHANGES = ("all_reduce", *SCHEMES)
ATTACH = ("group_bytes", "dense_below", "warmup_steps", "dense")  # what an exchange's brackets may hold besides its own options


@dataclasses.dataclass(frozen=True)
class Call:
    """``name(key=value, ...)``."""

    name: str
    options: tuple[tuple[str, Any], ...] = ()

    @staticmethod
    def parse(text: str) -> Call:
        match = re.fullmatch(r"\s*(\w+)\s*(?:\((.*)\))?\s*", text, re.DOTALL)
        if match is None:
            raise ValueError(f"not of the form name(key=value, ...): {text!r}")
        options = []
        for part in filter(None, (p.strip() for p in (match[2] or "").split(","))):
            key, equals, value = (s.strip() for s in part.partition("="))
            if not equals or not key.isidentifier():
                raise ValueError(f"{part!r} in {text!r} is not of the form key=value")
            try:
                options.append((key, ast.literal_eval(value.replace("true", "True").replace("false", "False"))))
            except (ValueError, SyntaxError):
                options.append((key, value))
        return Call(match[1], tuple(options))

    def __str__(self) -> str:
        return self.name + (f"({', '.join(f'{k}={v}' for k, v in self.options)})" if self.options else "")


@dataclasses.dataclass(frozen=True)
class Method:
    """What is sent, how, and who uses it.

    >>> print(Method.parse("error_feedback(top_k(fraction=0.01)) + sgd(lr=0.1)"))
    error_feedback(top_k(fraction=0.01)) + two_shot + sgd(lr=0.1)
    >>> print(Method.parse("bf16"))
    bf16 + all_reduce
    """

    compressor: str
    exchange: Call
    optimiser: Call | None = None

    @staticmethod
    def parse(text: str) -> Method:
        compressor, exchange, optimiser = "", None, None
        for part in _split(text):
            name = part.partition("(")[0].strip()
            if name in OPTIMISERS:
                optimiser = Call.parse(part)
            elif name in EXCHANGES:
                exchange = Call.parse(part)
            elif compressor:
                raise ValueError(f"{text!r} names two compressors: {compressor!r} and {part!r}")
            else:
                compressor = part
        if exchange is None:
            exchange = Call("all_reduce" if compressor in DENSE else "two_shot")
        if not compressor and exchange.name in ("all_reduce", "power_sgd"):
            compressor = "float32"
        if not compressor:
            raise ValueError(f"{text!r} names no compressor")
        if exchange.name == "all_reduce" and compressor not in DENSE:
            raise ValueError(f"all_reduce adds numbers on the way: it takes float32 or bf16, not {compressor!r}")
        made = Method(compressor, exchange, optimiser)
        if compressor not in ("float32", "auto"):
            tersegrad.parse(compressor)
        if not made.dense and made.scheme.compresses and compressor != "float32":
            raise ValueError(f"{made.scheme} compresses by itself: leave {compressor!r} away")
        return made

    def __str__(self) -> str:
        return " + ".join(str(p) for p in (self.compressor, self.exchange, self.optimiser) if p is not None)

    @property
    def label(self) -> str:
        """A short name for tables and figures."""
        if self.exchange.name == "all_reduce":
            return self.compressor
        if self.exchange.name == "power_sgd":
            return str(self.exchange)
        inner = self.compressor
        if inner.startswith("error_feedback(") and inner.endswith(")"):
            inner = "EF " + inner.removeprefix("error_feedback(").removesuffix(")")
        return inner if self.exchange == Call("two_shot") else f"{inner}, {self.exchange}"

    @property
    def dense(self) -> bool:
        return self.exchange.name == "all_reduce"

    @property
    def scheme(self) -> Scheme:
        """The exchange without its compressor."""
        mine = tuple((key, value) for key, value in self.exchange.options if key not in ATTACH)
        return scheme(str(Call(self.exchange.name, mine)))

    @property
    def options(self) -> dict[str, Any]:
        """What goes to ``ddp.attach``."""
        return {key: value for key, value in self.exchange.options if key in ATTACH}

    def make_exchange(
        self, wrap: Callable[[Compressor[Any]], Compressor[Any]] = lambda compressor: compressor
    ) -> Exchange[Any]:
        """The exchange for one buffer; ``wrap`` may put something around its compressor."""
        return self.scheme.make(wrap(tersegrad.parse("identity" if self.compressor == "float32" else self.compressor)))

    def attach(self, model: DistributedDataParallel, seed: int) -> ddp.Handle | None:
        """Make a DDP model use this method; None where torch does it alone."""
        if self.dense:
            if self.compressor == "bf16":
                hook: Any = default_hooks.bf16_compress_hook if torch.cuda.is_available() else bf16_hook
                model.register_comm_hook(model.process_group, hook)
            return None
        if self.compressor == "auto":
            return ddp.attach(model, "auto", seed=seed, **self.options)
        compressor = None if self.scheme.compresses else "identity" if self.compressor == "float32" else self.compressor
        return ddp.attach(model, compressor, self.scheme, seed=seed, **self.options)

    def make_optimiser(self, model: torch.nn.Module, default: Call) -> torch.optim.Optimizer:
        call = self.optimiser or default
        kind: Any = OPTIMISERS[call.name]
        made: torch.optim.Optimizer = kind(model.parameters(), **dict(call.options))
        return made


def bf16_hook(group: dist.ProcessGroup, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """What torch's own bfloat16 hook does, which DDP refuses without a GPU."""
    half = bucket.buffer().to(torch.bfloat16).div_(group.size())
    work: Any = dist.all_reduce(half, group=group, async_op=True)
    finished: torch.futures.Future[Tensor] = work.get_future().then(lambda done: bucket.buffer().copy_(done.value()[0]))
    return finished


bf16_hook.__annotations__ = {
    "bucket": GradBucket,
    "return": torch.futures.Future[Tensor],
}  # DDP compares types, not their names


def _split(text: str) -> list[str]:
    """The parts between plus signs outside of brackets."""
    parts, depth, start = [], 0, 0
    for at, character in enumerate(text):
        depth += (character in "([{") - (character in ")]}")
        if character == "+" and depth == 0:
            parts.append(text[start:at].strip())
            start = at + 1
    parts.append(text[start:].strip())
    if not all(parts):
        raise ValueError(f"a part of {text!r} is empty")
    return parts


def all_reduce(x: Tensor, kind: str, group: dist.ProcessGroup, size: int) -> Tensor:
    """Torch's all-reduce of ``x`` in place: the mean over ranks, in float32 or through bfloat16 as its hook does."""
    if kind == "float32":
        dist.all_reduce(x, group=group)
        return x.div_(size)
    half = x.to(torch.bfloat16).div_(size)
    dist.all_reduce(half, group=group)
    return x.copy_(half)

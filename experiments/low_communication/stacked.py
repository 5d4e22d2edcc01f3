"""All workers in one stack of tensors, for choosing among many methods: a batched product in place of eight small ones.

The network, the data, AdamW, the exchanges and the bytes are those of the trainer, and on a GPU a step takes about as long as one
worker's there. Sums run in another order than the trainer's, so losses agree to four digits or more, not to the bit. Local steps
only, without overlap and fragments. Vectors (gains of norms) are averaged as they are, and counted as float32.
"""

from __future__ import annotations

import functools
import time

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention

import tersegrad
from experiments.low_communication.methods import Method
from experiments.low_communication.plans import Plan, Point, Run
from tersegrad.exchange import scheme, virtual
from tersegrad.integrations import local_sgd
from tersegrad.train import Text, gpt, models


def forward(weights: dict[str, Tensor], tokens: Tensor, size: int) -> Tensor:
    """Logits (p, positions, vocabulary) of p networks of heads of ``size``, each for its own tokens (p, batch, length)."""
    p, batch, length = tokens.shape

    def linear(x: Tensor, name: str) -> Tensor:
        return torch.bmm(x, weights[f"{name}.weight"].transpose(1, 2).to(x.dtype))

    def normed(x: Tensor, name: str) -> Tensor:
        return nn.functional.rms_norm(x, x.shape[-1:]) * weights[f"{name}.weight"][:, None]

    embedding = weights["embedding.weight"]
    x = embedding[torch.arange(p, device=tokens.device)[:, None], tokens.flatten(1)]
    turns, width = gpt.rotations(length, size, tokens.device), embedding.shape[-1]
    for k in range(sum(name.endswith("attention.qkv.weight") for name in weights)):
        block = f"blocks.{k}"
        joint = linear(normed(x, f"{block}.norm1"), f"{block}.attention.qkv")
        q, key, v = joint.view(p * batch, length, 3, width // size, size).permute(2, 0, 3, 1, 4)
        mixed = scaled_dot_product_attention(gpt.turned(q, turns), gpt.turned(key, turns), v, is_causal=True)
        x = x + linear(mixed.transpose(1, 2).reshape(p, -1, width), f"{block}.attention.out")
        x = x + linear(gelu(linear(normed(x, f"{block}.norm2"), f"{block}.up")), f"{block}.down")
    return linear(normed(x, "norm"), "head")


class Stack:
    """The workers of one run."""

    def __init__(self, method: Method, plan: Plan, seed: int, corpus: Text) -> None:
        config = models.network(plan.model)
        assert isinstance(config, models.GPT)
        self.plan, self.seed, self.size = plan, seed, config.width // config.heads_or_usual
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.text = corpus.cut(config.context).to(self.device)
        torch.manual_seed(seed)
        network = config.build(self.text.shape, self.text.classes).to(self.device)
        self.anchors = {name: p.detach().clone() for name, p in network.named_parameters()}
        self.weights = {n: a.expand(plan.workers, *a.shape).clone().requires_grad_() for n, a in self.anchors.items()}
        self.settings = models.optimizer(plan.optimizer)
        assert isinstance(self.settings, models.AdamW)
        groups = [
            {"params": [w for w in self.weights.values() if w.dim() > 2], "weight_decay": self.settings.weight_decay},
            {"params": [w for w in self.weights.values() if w.dim() == 2], "weight_decay": 0.0},
        ]
        betas = (self.settings.beta1, self.settings.beta2)
        self.optimizer = torch.optim.AdamW(groups, lr=1.0, betas=betas)
        self.how = local_sgd.method(method.local_steps(plan.every) or "")
        self.matrices = [name for name, a in self.anchors.items() if a.dim() > 1]
        pieces = [tersegrad.Piece(tuple(a.shape), 0, a.numel(), n) for n, a in self.anchors.items() if n in self.matrices]
        self.spec = tersegrad.Spec(tuple(pieces))
        self.exchange = scheme(method.exchange).make(tersegrad.parse(method.compressor))
        self.states = virtual.init(self.exchange, self.spec, plan.workers, self.device)
        momentum = self.how.momentum
        self.outer = torch.optim.SGD(list(self.anchors.values()), lr=1.0, momentum=momentum, nesterov=momentum > 0)
        self.sent, self.rounds = 0.0, 0

    def order(self, epoch: int) -> Tensor:
        return torch.randperm(self.text.count, generator=torch.Generator().manual_seed(1_000_003 * self.seed + epoch))

    def logits(self, weights: dict[str, Tensor], tokens: Tensor) -> Tensor:
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.plan.precision == "bf16"):
            return forward(weights, tokens, self.size).float()

    def step(self, number: int, chosen: Tensor) -> None:
        """One inner step of all workers."""
        plan, rate = self.plan, self.settings.rate(number, self.plan.steps)
        inputs, targets = self.text.examples(chosen.to(self.device))
        logits = self.logits(self.weights, inputs.view(plan.workers, plan.batch, -1))
        loss = cross_entropy(logits.flatten(0, 1), targets.flatten()) * plan.workers
        gradients = torch.autograd.grad(loss, list(self.weights.values()))
        norms = torch.stack([g.flatten(1).norm(dim=1) for g in gradients]).norm(dim=0)
        scale = (1.0 / (norms + 1e-6)).clamp(max=1.0)
        for weight, gradient in zip(self.weights.values(), gradients):
            weight.grad = (gradient * scale.view(-1, *[1] * (gradient.dim() - 1))).contiguous()
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()

    @torch.no_grad()
    def meet(self, number: int) -> None:
        """The exchange after a round, and the outer step."""
        progress = {name: anchor - self.weights[name] for name, anchor in self.anchors.items()}
        flat = torch.cat([progress[name].flatten(1) for name in self.matrices], dim=1)
        ctx = tersegrad.Context(seed=self.seed, step=self.rounds)
        found = virtual.run(self.exchange, list(flat), self.states, self.spec, ctx)
        self.states = list(found.states)
        means = dict(zip(self.matrices, found.mean.split([piece.numel for piece in self.spec.pieces])))
        vectors = 0
        for name, anchor in self.anchors.items():
            vectors += 0 if name in means else anchor.numel()
            anchor.grad = means[name].view(anchor.shape).clone() if name in means else progress[name].mean(0)
        self.sent += sum(found.sent) / len(found.sent) + 2 * (1 - 1 / self.plan.workers) * 4 * vectors
        self.outer.param_groups[0]["lr"] = self.how.rate(number)
        self.outer.step()
        self.rounds += 1
        for name, anchor in self.anchors.items():
            self.weights[name].copy_(anchor.expand_as(self.weights[name]))

    @torch.no_grad()
    def evaluate(self) -> float:
        """Loss of the anchors on the text held out."""
        count, found = min(self.plan.held_out, self.text.count_held_out), self.text
        chosen = torch.tensor([k * found.count_held_out // count for k in range(count)], device=self.device)
        weights = {name: anchor[None] for name, anchor in self.anchors.items()}
        total = 0.0
        for part in chosen.split(64):
            inputs, targets = found.held_out(part)
            total += float(cross_entropy(self.logits(weights, inputs[None])[0], targets.flatten(), reduction="sum"))
        return total / (count * found.context)


def execute(method: Method, plan: Plan, seed: int, corpus: Text) -> Run:
    """One method; the fields about coding time are left at zero."""
    begin, stack, points = time.perf_counter(), Stack(method, plan, seed, corpus), []
    per_step = plan.batch * plan.workers
    per_epoch = stack.text.count // per_step
    order = functools.cache(stack.order)
    for number in range(1, plan.steps + 1):
        epoch, at = divmod(number - 1, per_epoch)
        stack.step(number - 1, order(epoch)[at * per_step : (at + 1) * per_step])
        if number % stack.how.every == 0 or number == plan.steps:
            stack.meet(number)
        if number % plan.evaluate_every == 0:
            points.append(Point(number, stack.evaluate(), stack.sent))
    parameters = sum(a.numel() for a in stack.anchors.values())
    copies = plan.workers - 1 if method.gathers else 2 * (plan.workers - 1) / plan.workers
    return Run(
        method=method,
        seed=seed,
        workers=plan.workers,
        parameters=parameters,
        steps=plan.steps,
        tokens=plan.steps * per_step * stack.text.context,
        exchanges=stack.rounds,
        loss=stack.evaluate(),
        sent=stack.sent,
        message_bits=8 * stack.sent / stack.rounds / parameters / copies,
        error=None,
        coding=0.0,
        encode=0.0,
        decode=0.0,
        wall=time.perf_counter() - begin,
        points=tuple(points),
    )

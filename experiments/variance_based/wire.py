"""Real bytes: on every k-th step the package's compressors encode what the batched step just compressed.

One worker's gradient, squares and state before the step go to a process of their own, which encodes the message in every wire form,
decodes it, and compares the state it leaves behind with that of the batched step. Which worker it is changes from sample to sample.
"""

from __future__ import annotations

import concurrent.futures
import multiprocessing
import os
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

import tersegrad
from tersegrad import theory
from tersegrad.core import state as states

if TYPE_CHECKING:
    from experiments.variance_based.train import Trainer

Array = Any  # a numpy vector: what travels between processes
ROLES = {"residual": "r", "r": "r", "v": "v"}  # a state's tensors, by the last part of their name

_pool: list[concurrent.futures.ProcessPoolExecutor] = []


def pool() -> concurrent.futures.ProcessPoolExecutor:
    """Processes that encode while the device trains."""
    if not _pool:
        count = max(1, min(3, (os.cpu_count() or 1) // 5))
        _pool.append(concurrent.futures.ProcessPoolExecutor(count, multiprocessing.get_context("spawn"), _quiet))
    return _pool[0]


def close() -> None:
    """End the processes."""
    while _pool:
        _pool.pop().shutdown(cancel_futures=True)


def _quiet() -> None:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    torch.set_num_threads(2)


def restored(template: Any, held: dict[str, Tensor]) -> Any:
    """A state like ``template`` that holds r and v."""
    entries = dict(states.state_dict(template))
    for name, value in entries.items():
        role = ROLES.get(name.rpartition(".")[2])
        if role is not None and isinstance(value, Tensor):
            entries[name] = held[role]
    return states.load(template, entries)


def entropy(decoded: Tensor, spec: tersegrad.Spec) -> dict[str, float]:
    """Bits of what a message of few distinct values says, by an ideal code that knows the frequencies; empty for other messages.

    ``places``: which of all coordinates are sent, log2 C(N, k); ``places_by_tensor``: the same with each tensor's own k known;
    ``values``: the order-0 entropy of the values, each relative to the largest of its tensor (a sign and an exponent, or a sign).
    """
    symbols, by_tensor, at = [], 0.0, 0
    for piece in spec.pieces:
        part = decoded[at : at + piece.numel]
        at += piece.numel
        sent = part[part != 0]
        by_tensor += theory.log2_binomial(piece.numel, sent.numel())
        if sent.numel():
            symbols.append(sent / sent.abs().max())
    if not symbols:
        return {}
    counts = torch.unique(torch.cat(symbols), return_counts=True)[1].double()
    if counts.numel() > 16:
        return {}
    total = float(counts.sum())
    values = float(-(counts * torch.log2(counts / total)).sum())
    found = {"places": theory.log2_binomial(spec.numel, int(total)), "places_by_tensor": by_tensor, "values": values}
    return {name: round(bits, 1) for name, bits in found.items()}


def encode(
    forms: dict[str, str], spec: tersegrad.Spec, given: dict[str, Array], step: int, worker: int, seed: int
) -> dict[str, Any]:
    """Bytes of one message in every form, its entropy, and how many elements of the next state differ from the batched one's."""
    tensors = {k: torch.from_numpy(v) for k, v in given.items()}
    ctx = tersegrad.Context(seed=seed, step=step, sender=worker)
    found: dict[str, Any] = {"step": step, "worker": worker}
    for wire_form, text in forms.items():
        compressor = tersegrad.parse(text)
        state = restored(compressor.init(spec, "cpu"), tensors)
        squares = tensors.get("s")
        stats = tersegrad.Stats(squares) if squares is not None else None
        message, after = compressor.encode(tensors["x"], spec, state, ctx, stats=stats)
        decoded = compressor.decode(tersegrad.Message.frombytes(message.tobytes()), spec, ctx)
        found[wire_form] = int(message.nbytes)
        found["sent"] = int((decoded != 0).sum())
        found["entropy"] = entropy(decoded, spec)
        entries = states.state_dict(after)
        for name, value in entries.items():
            role = ROLES.get(name.rpartition(".")[2])
            if role is not None and f"{role}_after" in tensors:
                differing = int((value != tensors[f"{role}_after"]).sum())
                found["differing"] = max(found.get("differing", 0), differing)
    return found


class Sampler:
    """Takes a sample of every k-th step of a run."""

    def __init__(self, trainer: Trainer, every: int, steps: int) -> None:
        method = trainer.config.method
        self.forms, self.trainer = method.forms(), trainer
        self.every = max(every, steps // method.samples) if every else 0
        self.number = trainer.buffers.layout.numel
        self.fixed: float | None = method.fixed_bytes(trainer.buffers.layout)
        self.held: dict[str, Tensor] = {}
        self.futures: list[concurrent.futures.Future[dict[str, Any]]] = []
        self.refused = ""

    def due(self, step: int) -> bool:
        usable = bool(self.forms) and not self.refused and self.trainer.config.method.mode != "mean"
        return usable and self.every > 0 and step % self.every == self.every - 1

    def _worker(self, step: int) -> int:
        return (step // self.every) % self.trainer.config.workers

    def _take(self, flat: Tensor, step: int) -> Tensor:
        return self.trainer.buffers.layout.packed(flat[self._worker(step)])

    def before(self, step: int) -> None:
        """Keep the state that the message starts from."""
        roles = () if self.trainer.config.method.resent else ("r", "v")
        self.held = {k: self._take(self.trainer.state[k], step) for k in roles if k in self.trainer.state}

    def after(self, step: int) -> None:
        """Hand the step's tensors over."""
        trainer = self.trainer
        given = dict(self.held, x=self._take(trainer.buffers.gradient, step))
        if trainer.config.method.resent:
            # With nothing waiting and no variance, all of it passes the test.
            chosen = self._take(trainer.state["sent"], step)
            given = {"x": chosen, **{k: torch.zeros_like(chosen) for k in ("r", "v", "s")}}
        elif trainer.buffers.squares is not None:
            given["s"] = self._take(trainer.buffers.squares, step)
        given |= {f"{k}_after": self._take(trainer.state[k], step) for k in self.held}
        arrays: dict[str, Array] = {k: np.ascontiguousarray(v.cpu().numpy()) for k, v in given.items()}
        spec, seed = trainer.buffers.layout.spec, trainer.config.seed
        try:
            self.futures.append(pool().submit(encode, self.forms, spec, arrays, step, self._worker(step), seed))
        except Exception as error:  # training goes on; the result says that bytes are missing
            self.refused = f"{type(error).__name__}: {str(error)[:200]}"
            close()

    def release(self) -> None:
        """Let the run's tensors go; the futures stay."""
        del self.trainer
        self.held = {}

    @property
    def complete(self) -> bool:
        """Whether every message has been encoded."""
        return all(future.done() for future in self.futures)

    def result(self) -> dict[str, Any]:
        """Mean bytes and ratios over the samples that are encoded so far."""
        samples = []
        for future in self.futures:
            if not future.done():
                continue
            try:
                samples.append(future.result())
            except Exception as error:
                self.refused = f"{type(error).__name__}: {str(error)[:200]}"
        result: dict[str, Any] = {"every": self.every, "forms": self.forms, "samples": samples}
        if not self.complete:
            result["pending"] = sum(not future.done() for future in self.futures)
        number = self.number
        if self.fixed is not None:
            result["compact"] = {"bytes": round(self.fixed, 1), "ratio": round(4 * number / self.fixed, 2)}
        for form in self.forms:
            sizes = [s[form] for s in samples if form in s]
            if sizes:
                mean = sum(sizes) / len(sizes)
                result[form] = {"bytes": round(mean, 1), "ratio": round(4 * number / mean, 2)}
        if self.refused:
            result["refused"] = self.refused
        return result

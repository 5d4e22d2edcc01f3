"""One training run: all workers in one pass, one method, one optimiser; the result is a small JSON.

The step keeps everything on the device (batches, counters, learning rate), so that CUDA can replay it as one graph; the host only
reads the counters at the end of an epoch, and the tensors of every k-th step, which are encoded to real bytes.
"""

from __future__ import annotations

import dataclasses
import datetime
import math
import platform
import sys
import time
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor

from experiments.variance_based import batched, fused, network, wire
from experiments.variance_based.batched import Buffers, Method
from experiments.variance_based.data import Images
from experiments.variance_based.engine import Collected, Engine, OnePass, Replicas, twin
from experiments.variance_based.factors import CodedPowerSGD, Counted
from experiments.variance_based.local import Local, Outer
from experiments.variance_based.resnet import resnet

Optimiser = Literal["adam", "momentum"]


@dataclasses.dataclass(frozen=True)
class Config:
    """Everything that a run depends on, next to the images."""

    method: Method
    optimiser: Optimiser = "adam"
    lr: float = 1e-3
    epochs: int = 50
    seed: int = 0
    workers: int = 8
    batch: int = 64  # of one worker
    weight_decay: float = 5e-4
    decay: Literal["after", "before"] = "after"  # decoding; before: as part of every sample's loss
    momentum: float = 0.9
    halve_every: float = 0.0  # epochs; 0: the learning rate stays
    cosine: bool = False  # the learning rate falls to zero along half a wave
    lr_warmup: float = 0.0  # epochs of linear growth of the learning rate
    dense_warmup: int = 0  # epochs without compression at the start
    init: network.Init = "lecun"
    encode_every: int = 200  # steps between those that are encoded to real bytes; 0: none
    graph: bool = True
    engine: Literal["one_pass", "collector"] = "one_pass"
    shifts: int = 0  # pixels by which training images move at most, with a flip of every other one; 0: as they are
    depths: tuple[int, ...] = (3, 4, 6, 3)  # of the residual network, which images of 64 x 64 get
    width: int = 64

    def rate(self, epoch: float) -> float:
        """The learning rate at a time in epochs."""
        rate = self.lr * (0.5 ** math.floor(epoch / self.halve_every) if self.halve_every else 1.0)
        rate *= 0.5 + 0.5 * math.cos(math.pi * epoch / self.epochs) if self.cosine else 1.0
        return rate * min(1.0, (epoch + 1e-9) / self.lr_warmup) if self.lr_warmup else rate


@fused.fused
def _prepare(pictures: Tensor, mean: Tensor, rstd: Tensor, half: bool) -> Tensor:
    """uint8 images to normalised activations."""
    x = (pictures.float() - mean) * rstd
    return x.to(torch.bfloat16) if half else x


@fused.fused
def _decay_first(p: Tensor, g: Tensor, s: Tensor | None, decay: float, batch: int) -> None:
    """Add weight decay to the workers' gradients, and to the sums of squares of the shares of ``batch`` samples."""
    pull = p * decay
    if s is not None:
        s.copy_(s + pull * (2 * g + pull) * (1.0 / batch))
    g.copy_(g + pull)


@fused.fused
def _adam(p: Tensor, g: Tensor, m: Tensor, v: Tensor, lr: Tensor, powers: Tensor, decay: float) -> None:
    """Adam with its default constants; ``powers`` are beta^t; weight decay is added to what was decoded."""
    g = g + p * decay
    first = m + (g - m) * 0.1
    second = v + (g * g - v) * 0.001
    m.copy_(first)
    v.copy_(second)
    bias = (1.0 - powers).float()
    p.copy_(p - lr * (first / bias[0]) / ((second / bias[1]).sqrt() + 1e-8))


@fused.fused
def _momentum(p: Tensor, g: Tensor, m: Tensor, lr: Tensor, decay: float, factor: float) -> None:
    """SGD with momentum; weight decay is added to what was decoded."""
    moved = m * factor + (g + p * decay)
    m.copy_(moved)
    p.copy_(p - lr * moved)


@dataclasses.dataclass(frozen=True)
class DenseRows(Method):
    """What a dense warm-up sends in place of the method."""

    def step(self, buffers: Buffers, state: batched.State) -> None:
        batched._mean_of_rows(buffers.gradient, buffers.mean)
        if buffers.gradient.shape[0] == 1:
            raise ValueError("a dense warm-up needs a method that compresses every worker's gradient")
        buffers.words.fill_(buffers.layout.numel * buffers.gradient.shape[0])


def built(config: Config, images: Images) -> tuple[Engine, Tensor]:
    """What computes the gradients, by the size of the images, and the parameters that it starts from."""
    side = images.x.shape[1]
    if side == 64:
        torch.manual_seed(config.seed)
        model = resnet(int(images.y.max()) + 1, config.depths, config.width, stem=3)
        collected = Collected(model)
        return Replicas(model) if isinstance(config.method, Local) else collected, collected.initial()
    net = network.vgg() if side == 32 else network.small(side)
    engine: Engine = OnePass(net) if config.engine == "one_pass" else Collected(twin(net))
    engine = Replicas(twin(net)) if isinstance(config.method, Local) else engine
    initial = torch.zeros(engine.layout.padded)
    net.init(initial, config.seed, config.init)  # both engines store the parameters alike
    return engine, initial


class Trainer:
    """The tensors of one run, and its step."""

    PHASES = ("forward", "backward", "method", "optimiser")

    def __init__(self, config: Config, images: Images, device: torch.device | str) -> None:
        self.config, self.device = config, torch.device(device)
        self.images = images.to(self.device)
        self.half = self.device.type == "cuda"
        self.engine, initial = built(config, images)
        layout = self.engine.layout
        mode = config.method.mode
        rows = 1 if mode == "mean" else config.workers

        def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=self.device)

        self.buffers = Buffers(
            layout,
            zeros(rows, layout.padded),
            zeros(rows, layout.padded) if mode == "moments" else None,
            zeros(layout.padded),
            zeros(1, dtype=torch.int64),
        )
        alone = isinstance(config.method, Local)
        self.params = initial.to(self.device).expand(config.workers, -1).clone() if alone else initial.to(self.device)
        self.state = config.method.init(self.buffers, config.seed)
        self.engine.bind(self.params, self.buffers, config.workers, mode)
        # What the optimiser is given: every worker's own gradient where they step alone.
        self.given = self.buffers.gradient if alone else self.buffers.mean
        self.moments = [torch.zeros_like(self.params) for _ in range(2 if config.optimiser == "adam" else 1)]
        self.powers = torch.ones(2, dtype=torch.float64, device=self.device)
        self.betas = torch.tensor([0.9, 0.999], dtype=torch.float64, device=self.device)
        self.lr = torch.full((), config.lr, device=self.device)
        self.total_words = zeros(1, dtype=torch.int64)
        self.total_loss = zeros(1, dtype=torch.float64)
        self.size = config.workers * config.batch
        self.steps = -(-len(images.x) // self.size)
        self.outer: Outer | None = None
        if isinstance(config.method, Local) and isinstance(self.engine, Replicas):
            count = len(rounds(config, self.steps))
            self.outer = Outer(config.method, layout, self.engine.anchor, config.workers, config.seed, count)
        self.order = zeros(self.steps * self.size, dtype=torch.int64)
        self.at = zeros(1, dtype=torch.int64)
        self.within = torch.arange(self.size, device=self.device)
        self.mean = torch.tensor(images.mean, device=self.device)
        self.rstd = 1.0 / torch.tensor(images.std, device=self.device)
        self.dense = DenseRows()
        self.graphed = False

    def everything(self) -> list[Tensor]:
        """Every tensor that a step changes."""
        own = [self.params, *self.moments, self.powers, self.total_words, self.total_loss, self.at, self.buffers.gradient]
        return [*own, *self.state.values(), *self.engine.changing()]

    def batch(self, indices: Tensor, x: Tensor) -> Tensor:
        """Images by index as channels-last activations."""
        return _prepare(x.index_select(0, indices), self.mean, self.rstd, self.half).permute(0, 3, 1, 2)

    def training_batch(self, indices: Tensor) -> Tensor:
        """The same of training images, moved and flipped at random where the run says so."""
        if not self.config.shifts:
            return self.batch(indices, self.images.x)
        count, side, most = len(indices), self.images.x.shape[1], self.config.shifts
        moved = torch.randint(-most, most + 1, (2, count, 1), device=self.device)
        rows, columns = (moved + torch.arange(side, device=self.device)).clamp_(0, side - 1)
        flipped = torch.randint(0, 2, (count, 1), device=self.device, dtype=torch.bool)
        columns = torch.where(flipped, columns.flip(1), columns)
        pictures = self.images.x[indices[:, None, None], rows[:, :, None], columns[:, None, :]]
        return _prepare(pictures, self.mean, self.rstd, self.half).permute(0, 3, 1, 2)

    def step(self, method: Method | None = None, until: str = "optimiser") -> None:
        """One step of all workers, up to and with the phase ``until``."""
        config, buffers = self.config, self.buffers
        phase = self.PHASES.index(until)
        indices = self.order.index_select(0, self.at + self.within)
        self.at.add_(self.size).remainder_(self.order.numel())
        x, labels = self.training_batch(indices), self.images.y.index_select(0, indices)
        if phase == 0:
            self.engine.forward(x, training=True)
            return
        self.total_loss.add_(self.engine.step(x, labels))
        if phase == 1:
            return
        after = config.weight_decay
        if config.decay == "before" and config.method.mode != "mean":  # without compression it is all the same
            _decay_first(self.params, buffers.gradient, buffers.squares, config.weight_decay, config.batch)
            after = 0.0
        (method or config.method).step(buffers, self.state)
        self.total_words.add_(buffers.words)
        if phase == 2:
            return
        if config.optimiser == "adam":
            self.powers.mul_(self.betas)
            _adam(self.params, self.given, self.moments[0], self.moments[1], self.lr, self.powers, after)
        else:
            _momentum(self.params, self.given, self.moments[0], self.lr, after, config.momentum)

    def captured(self, step: Callable[[], None]) -> Callable[[], None]:
        """``step`` as a CUDA graph where possible; the tensors are as before, whatever was run on the way."""
        if self.device.type != "cuda":
            return step
        saved = [t.clone() for t in self.everything()]

        def restore() -> None:
            torch.cuda.synchronize()
            for tensor, value in zip(self.everything(), saved):
                tensor.copy_(value)
            torch.cuda.synchronize()

        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):  # compiles, chooses algorithms, fills the allocator
                step()
        torch.cuda.current_stream().wait_stream(side)
        restore()
        if not self.config.graph:
            return step
        try:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                step()
            graph.replay()
            restore()
            self.graphed = True
            return graph.replay
        except Exception as error:
            print(
                f"no CUDA graph, launching kernel by kernel: {type(error).__name__}: {str(error)[:300]}",
                file=sys.stderr,
                flush=True,
            )
            restore()
            return step

    def shuffle(self, epoch: int) -> None:
        """A new order of the training images; the last batch is filled up from its start."""
        generator = torch.Generator().manual_seed(1_000_003 * self.config.seed + epoch)
        order = torch.randperm(len(self.images.x), generator=generator)
        self.order.copy_(order.repeat(-(-self.order.numel() // len(order)))[: self.order.numel()])
        self.at.zero_()

    def accuracy(self) -> float:
        """Per cent of the test images that are classified correctly."""
        count = len(self.images.x_test)
        right = torch.zeros((), dtype=torch.int64, device=self.device)
        for start in range(0, count, self.size):
            # Always whole batches: the same kernels as in training.
            indices = (start + self.within) % count
            guess = self.engine.forward(self.batch(indices, self.images.x_test)).argmax(1)
            hit = (guess == self.images.y_test.index_select(0, indices)) & (start + self.within < count)
            right.add_(hit.sum())
        return 100.0 * int(right) / count


def rounds(config: Config, steps: int) -> set[int]:
    """The steps after which workers that step alone exchange; none for others. ``steps``: of an epoch."""
    if not isinstance(config.method, Local):
        return set()
    still = dataclasses.replace(config, lr_warmup=0.0)
    return config.method.ends(config.epochs * steps, [still.rate(i) for i in range(config.epochs)], steps)


def prepare() -> None:
    """Matrix units for float32 products, and the fastest convolutions."""
    torch.backends.cuda.matmul.allow_tf32 = True
    torch.backends.cudnn.allow_tf32 = True
    torch.backends.cudnn.benchmark = True
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False


def train(
    config: Config, images: Images, device: torch.device | str, say: Callable[[str], None] = print
) -> tuple[dict[str, Any], wire.Sampler]:
    """Train once; the result as plain values, and the sampler, whose messages may still be in the making."""
    begun = time.perf_counter()
    torch.manual_seed(config.seed)
    prepare()
    with torch.no_grad():
        trainer = Trainer(config, images, device)
        step = trainer.captured(trainer.step)
        dense = trainer.captured(lambda: trainer.step(trainer.dense)) if config.dense_warmup else step
        torch.manual_seed(config.seed)
        sampler = wire.Sampler(trainer, config.encode_every, config.epochs * trainer.steps)
        ends = rounds(config, trainer.steps)
        counted: Counted | None = None
        if isinstance(config.method, CodedPowerSGD) and config.encode_every:
            layout = trainer.buffers.layout
            counted = Counted(config.method, layout, trainer.state, config.seed, config.epochs * trainer.steps)
        ready = time.perf_counter() - begun
        curve: dict[str, list[float]] = {"loss": [], "accuracy": [], "ratio": []}  # by epoch
        words = 0
        number = trainer.buffers.layout.numel
        durations: list[float] = []
        for epoch in range(config.epochs):
            start = time.perf_counter()
            trainer.shuffle(epoch)
            trainer.lr.fill_(config.rate(epoch))
            for i in range(trainer.steps):
                done = epoch * trainer.steps + i
                if config.lr_warmup and epoch <= config.lr_warmup:
                    trainer.lr.fill_(config.rate(epoch + i / trainer.steps))
                if epoch < config.dense_warmup:
                    dense()
                elif sampler.due(done):
                    sampler.before(done)
                    step()
                    sampler.after(done)
                else:
                    step()
                if done in ends and trainer.outer is not None:
                    trainer.outer.end_round(trainer.params, done)
                if counted is not None and done in counted.due:
                    counted.take(done)
            now = int(trainer.total_words)  # waits for the device
            durations.append(time.perf_counter() - start)
            loss = float(trainer.total_loss) / trainer.steps
            trainer.total_loss.zero_()
            sent = (now - words) / (trainer.steps * config.workers)
            words = now
            accuracy, ratio = trainer.accuracy(), number / sent if sent else 0.0
            curve["loss"].append(round(loss, 5))
            curve["accuracy"].append(round(accuracy, 3))
            curve["ratio"].append(round(ratio, 2))
            if epoch < 2 or (epoch + 1) % 10 == 0 or epoch + 1 == config.epochs:
                say(f"epoch {epoch + 1}: loss {loss:.4f}, accuracy {accuracy:.2f}, ratio {ratio:.2f}, {durations[-1]:.2f} s")
            if not math.isfinite(loss):
                say(f"epoch {epoch + 1}: the loss is {loss}: stopped")
                break
        steps = len(durations) * trainer.steps
        sent = words / (steps * config.workers)
        if trainer.outer is not None:
            sampler.fixed = trainer.outer.message_bytes(steps)
        if counted is not None and counted.samples:
            sampler.fixed = counted.message_bytes()
    ordered = sorted(durations)
    sampler.release()
    result = {
        "method": batched.describe(config.method),
        "config": {f.name: getattr(config, f.name) for f in dataclasses.fields(config) if f.name != "method"},
        "data": images.name,
        "parameters": number,
        "steps": steps,
        "accuracy": curve["accuracy"][-1],
        "best_accuracy": max(curve["accuracy"]),
        "diverged": not math.isfinite(curve["loss"][-1]),
        "ratio_words": number / sent if sent else None,
        "encoded": sampler.result(),
        **({"rounds": trainer.outer.described()} if trainer.outer is not None else {}),
        **({"factors": counted.samples} if counted is not None else {}),
        "curve": curve,
        "seconds": {
            "ready": round(ready, 2),
            "epoch": round(ordered[len(ordered) // 2], 3),
            "run": round(time.perf_counter() - begun, 2),
        },
        "graph": trainer.graphed,
        "not_compiled": list(fused.failures),
        "machine": machine(device),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }
    return result, sampler


def machine(device: torch.device | str) -> str:
    """One line that says on what a run was made."""
    name = torch.cuda.get_device_name(device) if torch.device(device).type == "cuda" else "CPU"
    return f"{name}, torch {torch.__version__.partition('+')[0]}, Python {platform.python_version()}"

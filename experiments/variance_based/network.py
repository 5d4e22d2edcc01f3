"""The networks, with a hand-written backward pass that gives every worker's gradient and per-sample squares in one pass.

A batch of 8 x 64 samples runs through the network at once; BatchNorm takes its statistics over each worker's 64 samples, so that the
numbers are those of eight separate workers. The backward pass writes straight into a flat buffer (``layout.py``), in one of three modes:

- ``mean``: the sum over workers of their mean gradients, (1, N): what training without compression needs;
- ``workers``: every worker's mean gradient, (workers, N);
- ``moments``: that, and the sum over its samples of the squares of their shares of it.

Shares: the loss is the sum over workers of the mean over a worker's samples, so the gradient at a layer's output already holds the
factor 1/64, and the share of sample z in a weight's gradient is c_z = sum over positions of delta_z x_z. Convolutions form c_z once, as a
batch of matrix products with the unfolded input, and reduce it twice. Linear layers need no c_z: sum c_z^2 = (delta^2)^T x^2. For
BatchNorm delta contains the coupling through the batch statistics, so the shares sum to the true gradient.

Activations are bfloat16 on CUDA (accumulated in float32) and float32 on the CPU, stored channels-last; weights of convolutions are
stored as (out, height, width, in), the order of the unfolded input.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from experiments.variance_based.fused import fused
from experiments.variance_based.layout import Layout
from tersegrad.moments.shares import accelerated

Mode = Literal["mean", "workers", "moments"]
# LeCun normal weights and zero biases, or torch's own: both uniform within 1/sqrt(fan in).
Init = Literal["lecun", "torch"]


@dataclasses.dataclass
class Pass:
    """What one forward and backward pass works with."""

    weights: dict[str, Tensor]  # in the activations' dtype
    params: dict[str, Tensor]  # float32
    gradients: dict[str, Tensor]  # (workers or 1, *shape) float32
    squares: dict[str, Tensor]  # (workers, *shape) float32; empty unless the mode is "moments"
    buffers: dict[str, Tensor]
    workers: int
    mode: Mode
    training: bool = True


def _bmm32(a: Tensor, b: Tensor) -> Tensor:
    """Batched product, accumulated and returned in float32."""
    if a.dtype == torch.float32:
        return torch.bmm(a, b)
    if _wide[0]:
        try:
            return torch.bmm(a, b, out_dtype=torch.float32)
        except (RuntimeError, TypeError, NotImplementedError):
            _wide[0] = False
    return torch.bmm(a, b)


_wide = [True]  # whether this torch has bmm(out_dtype=)
SMALL = 4096  # reductions below this are not worth a compiled kernel of their own


@fused
def _sum_and_squares(shares: Tensor, gradient: Tensor, squares: Tensor) -> None:
    """(workers, samples, n) shares to their sum and sum of squares."""
    wide = shares.float()
    gradient.copy_(wide.sum(1))
    squares.copy_((wide * wide).sum(1))


def put_shares(run: Pass, name: str, shares: Tensor) -> None:
    """Reduce (batch, ...) shares of one parameter into the buffers."""
    n = math.prod(shares.shape[1:])
    if run.mode == "moments":
        grouped = shares.reshape(run.workers, -1, n)
        gradient, squares = run.gradients[name].view(run.workers, n), run.squares[name].view(run.workers, n)
        if n >= SMALL:
            _sum_and_squares(grouped, gradient, squares)
        else:
            wide = grouped.float()
            torch.sum(wide, dim=1, out=gradient)
            torch.sum(wide.square(), dim=1, out=squares)
    else:
        rows = 1 if run.mode == "mean" else run.workers
        torch.sum(shares.reshape(rows, -1, n).float(), dim=1, out=run.gradients[name].view(rows, n))


class Layer:
    """A step of the chain: forward keeps what backward needs; backward turns the output's gradient into the input's."""

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {}

    def forward(self, run: Pass, x: Tensor) -> Tensor:
        raise NotImplementedError

    def backward(self, run: Pass, delta: Tensor, needs_input: bool) -> Tensor | None:
        raise NotImplementedError


def unfold(x: Tensor, size: int, pad: int) -> Tensor:
    """(B, C, H, W) channels-last to (B, positions, size * size * C)."""
    nhwc = F.pad(x.permute(0, 2, 3, 1), (0, 0, pad, pad, pad, pad))
    if size == 1:
        return nhwc.flatten(1, 2)
    nhwc = nhwc.contiguous()
    b, h, w, c = nhwc.shape
    s0, s1, s2, s3 = nhwc.stride()
    windows = nhwc.as_strided((b, h - size + 1, w - size + 1, size, size, c), (s0, s1, s2, s1, s2, s3))
    return windows.reshape(b, (h - size + 1) * (w - size + 1), size * size * c)


@dataclasses.dataclass
class Conv(Layer):
    """3 x 3 convolution with padding 1; the bias, where there is one, is that of an ordinary convolution."""

    name: str
    inputs: int
    outputs: int
    bias: bool = False
    size: int = 3

    def shapes(self) -> dict[str, tuple[int, ...]]:
        found: dict[str, tuple[int, ...]] = {f"{self.name}.weight": (self.outputs, self.size, self.size, self.inputs)}
        return found | ({f"{self.name}.bias": (self.outputs,)} if self.bias else {})

    def _weight(self, run: Pass) -> Tensor:
        return run.weights[f"{self.name}.weight"].permute(0, 3, 1, 2)

    def forward(self, run: Pass, x: Tensor) -> Tensor:
        if run.training:
            self.x = x
        bias = run.weights[f"{self.name}.bias"] if self.bias else None
        return F.conv2d(x, self._weight(run), bias, padding=self.size // 2)

    def backward(self, run: Pass, delta: Tensor, needs_input: bool) -> Tensor | None:
        x, w, pad = self.x, self._weight(run), self.size // 2
        del self.x
        delta = delta.contiguous(memory_format=torch.channels_last)
        mean = run.mode == "mean"
        name = f"{self.name}.weight"
        if needs_input or mean:
            mask = [needs_input, mean, False]
            found = torch.ops.aten.convolution_backward(delta, x, w, None, [1, 1], [pad, pad], [1, 1], False, [0, 0], 1, mask)
            if mean:
                run.gradients[name][0].copy_(found[1].permute(0, 2, 3, 1))
        rows = delta.permute(0, 2, 3, 1).flatten(1, 2)  # (B, positions, out)
        if run.mode == "moments":
            self._moments(run, x, delta)
        elif not mean:
            n = run.workers
            if accelerated(x, delta):  # its squares come for nothing: nothing is unfolded
                product = self._triton(run, x, delta)[:, 0].view(n, self.outputs, -1)
            else:
                columns = unfold(x, self.size, pad)
                product = _bmm32(rows.reshape(n, -1, self.outputs).transpose(1, 2), columns.view(n, -1, columns.shape[-1]))
            run.gradients[name].view(n, self.outputs, -1).copy_(product)
        if self.bias:
            put_shares(run, f"{self.name}.bias", rows.float().sum(1))
        return found[0] if needs_input else None

    def _moments(self, run: Pass, x: Tensor, delta: Tensor) -> None:
        """Sum and squares of the shares: by the package's Triton kernel or by stored products, whichever is faster here."""
        if not x.is_cuda:
            self._stored(run, x, delta)
            return
        key = (x.shape, self.outputs, run.workers)
        if key not in _choices:
            _choices[key] = self._choose(run, x, delta)
        (self._unstored if _choices[key] else self._stored)(run, x, delta)

    def _stored(self, run: Pass, x: Tensor, delta: Tensor) -> None:
        # Shares stay in the activations' precision, which is that of both factors; they are summed in float32.
        rows = delta.permute(0, 2, 3, 1).flatten(1, 2)
        put_shares(run, f"{self.name}.weight", torch.bmm(rows.transpose(1, 2), unfold(x, self.size, self.size // 2)))

    def _triton(self, run: Pass, x: Tensor, delta: Tensor) -> Tensor:
        from tersegrad.kernels.triton import shares

        pad = self.size // 2
        return shares.convolution(x, delta, (self.size,) * 2, (1, 1), (1, 1), (pad, pad), run.workers, False)

    def _unstored(self, run: Pass, x: Tensor, delta: Tensor) -> None:
        found, name = self._triton(run, x, delta), f"{self.name}.weight"
        run.gradients[name].view(run.workers, -1).copy_(found[:, 0])
        run.squares[name].view(run.workers, -1).copy_(found[:, 1])

    def _choose(self, run: Pass, x: Tensor, delta: Tensor) -> bool:
        """Whether the Triton kernel works, agrees and is faster; said aloud."""
        name = f"{self.name}.weight"
        try:
            times, results = [], []
            for way in (self._stored, self._unstored):
                for _ in range(2):
                    way(run, x, delta)
                start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                start.record()
                for _ in range(5):
                    way(run, x, delta)
                end.record()
                end.synchronize()
                times.append(start.elapsed_time(end) / 5)
                results.append((run.gradients[name].clone(), run.squares[name].clone()))
            errors = [float((a - b).norm() / a.norm().clamp_min(1e-30)) for a, b in zip(*results)]
            print(
                f"{self.name} {tuple(x.shape)}: stored shares {times[0]:.2f} ms, Triton {times[1]:.2f} ms, "
                f"relative differences {errors[0]:.1e} and {errors[1]:.1e}",
                flush=True,
            )
            return times[1] < times[0] and max(errors) < 0.02
        except Exception as error:
            print(f"{self.name}: no Triton kernel: {type(error).__name__}: {str(error)[:200]}", flush=True)
            return False


_choices: dict[Any, bool] = {}


@fused
def _statistics(x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and biased variance over axis 1 of (workers, positions, channels), float32."""
    wide = x.float()
    mean = wide.mean(1, keepdim=True)
    return mean, (wide - mean).square().mean(1, keepdim=True)


@fused
def _normalise(x: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """relu(weight (x - mean) rstd + bias) of (workers, positions, channels)."""
    return torch.relu((x.float() - mean) * rstd * weight + bias).to(x.dtype)


@fused
def _norm_sums(x: Tensor, delta: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Per sample the sums of delta and of delta * xhat; inputs are (workers, samples, positions, channels)."""
    xhat = (x.float() - mean) * rstd
    through = torch.where(xhat * weight + bias > 0, delta.float(), 0.0)
    return through.sum(2), (through * xhat).sum(2)


@fused
def _norm_input(
    x: Tensor, delta: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor, bias: Tensor, shift: Tensor, scale: Tensor
) -> Tensor:
    """The gradient of BatchNorm and relu at its input; ``shift`` and ``scale`` are the means of delta and delta * xhat."""
    xhat = (x.float() - mean) * rstd
    through = torch.where(xhat * weight + bias > 0, delta.float(), 0.0)
    return ((through - shift - xhat * scale) * (rstd * weight)).to(x.dtype)


@dataclasses.dataclass
class NormRelu(Layer):
    """BatchNorm with statistics per worker, then relu. Running statistics are the mean over workers."""

    name: str
    channels: int
    momentum: float = 0.1
    eps: float = 1e-5

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {f"{self.name}.weight": (self.channels,), f"{self.name}.bias": (self.channels,)}

    def forward(self, run: Pass, x: Tensor) -> Tensor:
        weight, bias = run.params[f"{self.name}.weight"], run.params[f"{self.name}.bias"]
        nhwc = x.permute(0, 2, 3, 1)
        mean, var = run.buffers[f"{self.name}.mean"], run.buffers[f"{self.name}.var"]
        if not run.training:
            parts = run.workers if len(x) % run.workers == 0 else 1  # the same shapes, and so kernels, as in training
            rows = nhwc.reshape(parts, -1, self.channels)
            mean, rstd = (t.expand(parts, 1, -1).contiguous() for t in (mean, torch.rsqrt(var + self.eps)))
            return _normalise(rows, mean, rstd, weight, bias).view(nhwc.shape).permute(0, 3, 1, 2)
        rows = nhwc.reshape(run.workers, -1, self.channels)
        now, spread = _statistics(rows)
        count = rows.shape[1]
        mean.lerp_(now.mean((0, 1)), self.momentum)
        var.lerp_(spread.mean((0, 1)) * (count / (count - 1)), self.momentum)
        self.kept = (x, now, torch.rsqrt(spread + self.eps))
        return _normalise(rows, now, self.kept[2], weight, bias).view(nhwc.shape).permute(0, 3, 1, 2)

    def backward(self, run: Pass, delta: Tensor, needs_input: bool) -> Tensor | None:
        x, mean, rstd = self.kept
        del self.kept
        weight, bias = run.params[f"{self.name}.weight"], run.params[f"{self.name}.bias"]
        b, c, h, w = x.shape
        shape = (run.workers, b // run.workers, h * w, c)
        rows = x.permute(0, 2, 3, 1).reshape(shape)
        deltas = delta.permute(0, 2, 3, 1).reshape(shape)
        mean, rstd = mean.unsqueeze(2), rstd.unsqueeze(2)
        shift, scale = _norm_sums(rows, deltas, mean, rstd, weight, bias)  # (workers, samples, channels)
        put_shares(run, f"{self.name}.bias", shift.flatten(0, 1))
        put_shares(run, f"{self.name}.weight", scale.flatten(0, 1))
        if not needs_input:
            return None
        count = b // run.workers * h * w
        shift = (shift.sum(1) / count).view(run.workers, 1, 1, c)
        scale = (scale.sum(1) / count).view(run.workers, 1, 1, c)
        found = _norm_input(rows, deltas, mean, rstd, weight, bias, shift, scale)
        return found.view(b, h, w, c).permute(0, 3, 1, 2)


class Relu(Layer):
    """max(x, 0)."""

    def forward(self, run: Pass, x: Tensor) -> Tensor:
        self.y = torch.relu(x)
        return self.y

    def backward(self, run: Pass, delta: Tensor, needs_input: bool) -> Tensor | None:
        y = self.y
        del self.y
        return torch.where(y > 0, delta, 0.0).to(delta.dtype)


def _keep_mask(shape: tuple[int, ...], drop: float, like: Tensor) -> Tensor:
    """Which elements dropout keeps."""
    return torch.empty(shape, dtype=torch.bool, device=like.device).bernoulli_(1.0 - drop)


@fused
def _pool(x: Tensor) -> tuple[Tensor, Tensor]:
    """Maximum and its place over the four taps of (B, H/2, 2, W/2, 2, C)."""
    a, b, c, d = x[:, :, 0, :, 0], x[:, :, 0, :, 1], x[:, :, 1, :, 0], x[:, :, 1, :, 1]
    top, low = torch.maximum(a, b), torch.maximum(c, d)
    first = torch.where(b > a, 1, 0)
    second = torch.where(d > c, 3, 2)
    return torch.maximum(top, low), torch.where(low > top, second, first).to(torch.uint8)


@fused
def _unpool(delta: Tensor, place: Tensor) -> Tensor:
    """The gradient at the four taps, (B, H/2, 2, W/2, 2, C)."""
    zero = torch.zeros((), dtype=delta.dtype, device=delta.device)
    a, b, c, d = (torch.where(place == i, delta, zero) for i in range(4))
    return torch.stack((torch.stack((a, b), 3), torch.stack((c, d), 3)), 2)


@dataclasses.dataclass
class PoolDrop(Layer):
    """Maximum over 2 x 2, then dropout."""

    drop: float = 0.0

    def forward(self, run: Pass, x: Tensor) -> Tensor:
        b, c, h, w = x.shape
        y, place = _pool(x.permute(0, 2, 3, 1).reshape(b, h // 2, 2, w // 2, 2, c))
        if run.training:
            mask = _keep_mask(tuple(y.shape), self.drop, y) if self.drop else None
            self.kept = (place, mask)
            if mask is not None:
                y = y * mask * (1.0 / (1.0 - self.drop))
        return y.permute(0, 3, 1, 2)

    def backward(self, run: Pass, delta: Tensor, needs_input: bool) -> Tensor | None:
        place, mask = self.kept
        del self.kept
        delta = delta.permute(0, 2, 3, 1)
        if mask is not None:
            delta = delta * mask * (1.0 / (1.0 - self.drop))
        b, h, w, c = delta.shape
        return _unpool(delta.contiguous(), place).reshape(b, 2 * h, 2 * w, c).permute(0, 3, 1, 2)


class Flatten(Layer):
    """(B, C, H, W) channels-last to (B, H * W * C)."""

    def forward(self, run: Pass, x: Tensor) -> Tensor:
        self.shape = x.shape
        return x.permute(0, 2, 3, 1).flatten(1)

    def backward(self, run: Pass, delta: Tensor, needs_input: bool) -> Tensor | None:
        b, c, h, w = self.shape
        return delta.view(b, h, w, c).permute(0, 3, 1, 2)


@dataclasses.dataclass
class Linear(Layer):
    """Fully connected; relu and dropout follow unless it is the last."""

    name: str
    inputs: int
    outputs: int
    last: bool = False
    drop: float = 0.0

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {f"{self.name}.weight": (self.outputs, self.inputs), f"{self.name}.bias": (self.outputs,)}

    def forward(self, run: Pass, x: Tensor) -> Tensor:
        y = F.linear(x, run.weights[f"{self.name}.weight"], run.weights[f"{self.name}.bias"])
        mask = None
        if not self.last:
            y = torch.relu(y)
            if self.drop and run.training:
                mask = _keep_mask(tuple(y.shape), self.drop, y)
                y = y * mask * (1.0 / (1.0 - self.drop))
        if run.training:
            self.kept = (x, y, mask)
        return y

    def backward(self, run: Pass, delta: Tensor, needs_input: bool) -> Tensor | None:
        x, y, mask = self.kept
        del self.kept
        if not self.last:
            delta = torch.where(y > 0, delta, 0.0).to(delta.dtype)  # y > 0 only where dropout kept it
            if mask is not None:
                delta = delta * (1.0 / (1.0 - self.drop))
        rows = 1 if run.mode == "mean" else run.workers
        d, i = delta.reshape(rows, -1, self.outputs), x.reshape(rows, -1, self.inputs)
        run.gradients[f"{self.name}.weight"].copy_(_bmm32(d.transpose(1, 2), i))
        put_shares(run, f"{self.name}.bias", delta)
        if run.mode == "moments":
            squares = run.squares[f"{self.name}.weight"]
            torch.bmm(d.float().square().transpose(1, 2), i.float().square(), out=squares)
        return delta @ run.weights[f"{self.name}.weight"] if needs_input else None


@fused
def _loss(logits: Tensor, labels: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Mean cross-entropy, and ``scale`` times the gradient of each sample's."""
    logs = torch.log_softmax(logits.float(), dim=1)
    hot = torch.arange(logits.shape[1], device=labels.device) == labels.unsqueeze(1)
    return -(logs * hot).sum(1).mean(), ((logs.exp() - hot.float()) * scale).to(logits.dtype)


@dataclasses.dataclass
class Network:
    """A chain of layers, and where the parameters lie."""

    layers: list[Any]

    @property
    def layout(self) -> Layout:
        found: dict[str, tuple[int, ...]] = {}
        for layer in self.layers:
            found |= layer.shapes()
        return Layout.of(found)

    def init(self, flat: Tensor, seed: int, rule: Init = "lecun") -> None:
        """Weights and biases by a rule, BatchNorm at one and zero; the same numbers on every device."""
        generator = torch.Generator().manual_seed(seed)
        flat.zero_()
        views = self.layout.views(flat)
        for layer in self.layers:
            shapes = layer.shapes()
            if isinstance(layer, NormRelu):
                views[f"{layer.name}.weight"].fill_(1.0)
                continue
            for name, shape in shapes.items():
                root = math.sqrt(math.prod(shapes[f"{layer.name}.weight"][1:]))
                if rule == "torch":
                    views[name].copy_((2 * torch.rand(shape, generator=generator) - 1) / root)
                elif len(shape) > 1:
                    views[name].copy_(torch.randn(shape, generator=generator) / root)

    def buffers(self, device: torch.device | str) -> dict[str, Tensor]:
        """Running statistics of BatchNorm."""
        found = {}
        for layer in self.layers:
            if isinstance(layer, NormRelu):
                found[f"{layer.name}.mean"] = torch.zeros(layer.channels, device=device)
                found[f"{layer.name}.var"] = torch.ones(layer.channels, device=device)
        return found

    def forward(self, run: Pass, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer.forward(run, x)
        return x

    def backward(self, run: Pass, delta: Tensor) -> None:
        value: Tensor | None = delta
        for index in range(len(self.layers) - 1, -1, -1):
            assert value is not None
            value = self.layers[index].backward(run, value, index > 0)

    def step(self, run: Pass, x: Tensor, labels: Tensor) -> Tensor:
        """One pass over a batch of all workers; returns the mean loss."""
        logits = self.forward(run, x)
        loss, delta = _loss(logits, labels, run.workers / x.shape[0])
        self.backward(run, delta)
        return loss


def vgg(classes: int = 10) -> Network:
    """The VGG-like network for 32 x 32 images, 7.58 million parameters."""
    layers: list[Any] = []
    channels = 3
    for group, (width, depth) in enumerate(((64, 2), (128, 2), (256, 4))):
        for i in range(depth):
            layers += [Conv(f"conv{group}.{i}", channels, width), NormRelu(f"norm{group}.{i}", width)]
            channels = width
        layers.append(PoolDrop(0.25))
    layers += [
        Flatten(),
        Linear("fc0", 4096, 1024, drop=0.5),
        Linear("fc1", 1024, 1024, drop=0.5),
        Linear("fc2", 1024, classes, last=True),
    ]
    return Network(layers)


def small(side: int = 8, classes: int = 10) -> Network:
    """A small network for digits: two convolutions and two linear layers, no BatchNorm; 13,706 parameters at 8 x 8."""
    layers: list[Any] = [
        Conv("conv0", 1, 16, bias=True),
        Relu(),
        PoolDrop(),
        Conv("conv1", 16, 32, bias=True),
        Relu(),
        PoolDrop(),
    ]
    layers += [Flatten(), Linear("fc0", 32 * (side // 4) ** 2, 64), Linear("fc1", 64, classes, last=True)]
    return Network(layers)

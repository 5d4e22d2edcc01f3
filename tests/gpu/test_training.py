"""On a GPU: training over process groups with CUDA tensors. NCCL with one rank, gloo with four ranks that share the GPU."""

from __future__ import annotations

import functools
import hashlib
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, multiprocessing, nn
from torch.nn.parallel import DistributedDataParallel

from tersegrad.engine import threads
from tersegrad.integrations import plain
from tersegrad.integrations.ddp import attach

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

METHODS = (
    "bf16",
    "qsgd(bits=4, norm=max)",
    "error_feedback(sparse_dithering(nu=0.1))",
    "error_feedback(top_k(fraction=0.05))",
    "error_feedback(int8)",
)


class Late(torch.autograd.Function):
    """Passes values on, and keeps the current stream busy for a random while, in both directions."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        torch.cuda._sleep(random.randrange(2_000_000))
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        torch.cuda._sleep(random.randrange(2_000_000))
        return gradients[0].clone()


class Network(nn.Module):
    def __init__(self, late: bool, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(257, 257, dtype=dtype) for _ in range(6)])
        self.late = late

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).relu()
            x = Late.apply(x) if self.late else x  # type: ignore[no-untyped-call]
        return x


def _digest(model: nn.Module) -> str:
    data = b"".join(p.detach().float().cpu().numpy().tobytes() for p in model.parameters())
    return hashlib.sha256(data).hexdigest()


def _trained(method: str, folder: str, late: bool = False, dtype: torch.dtype = torch.float32, stop: int = -1) -> str:
    """Six steps; after ``stop`` of them everything is written to a file and read into a new model and handle."""
    generator = torch.Generator().manual_seed(dist.get_rank())

    def build() -> tuple[Any, Any, Any]:
        model = DistributedDataParallel(Network(late, dtype).cuda(), bucket_cap_mb=1)
        return model, attach(model, method), torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    model, handle, optimiser = build()
    for step in range(6):
        if step == stop:
            path = f"{folder}/{dist.get_rank()}.pt"
            torch.save((model.state_dict(), handle.state_dict(), optimiser.state_dict()), path)
            model, handle, optimiser = build()
            weights, state, momenta = torch.load(path, weights_only=False)
            model.load_state_dict(weights)
            handle.load_state_dict(state)
            optimiser.load_state_dict(momenta)
        optimiser.zero_grad()
        model(torch.randn(16, 257, generator=generator).cuda().to(dtype)).square().mean().backward()
        optimiser.step()
    digests: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(digests, _digest(model))
    assert len(set(digests)) == 1, f"{method}: the replicas differ"
    return str(digests[0])


def work(rank: int, size: int, backend: str, folder: str) -> None:
    """A rank: the same parameters, to the bit, everywhere, with streams that are late at random, and after a resume in mid-run."""
    torch.cuda.set_device(0)
    torch.use_deterministic_algorithms(True)
    random.seed(rank)
    dist.init_process_group(backend, init_method=f"file://{folder}/meeting", rank=rank, world_size=size)
    for method in METHODS:
        plain = _trained(method, folder)
        assert _trained(method, folder, late=True) == plain, f"{method}: another result with late streams"
        assert _trained(method, folder, stop=3) == plain, f"{method}: another result after a resume"
        half = _trained(method, folder, dtype=torch.bfloat16)
        assert _trained(method, folder, dtype=torch.bfloat16, late=True) == half, f"{method}: another result in bfloat16"
    dist.destroy_process_group()


@pytest.mark.parametrize(("backend", "size"), [("nccl", 1), ("gloo", 4)])
def test_ranks_agree_whenever_streams_are_late(backend: str, size: int, tmp_path: Path) -> None:
    multiprocessing.spawn(work, (size, backend, str(tmp_path)), nprocs=size)  # type: ignore[attr-defined, no-untyped-call]


@pytest.mark.parametrize(
    "method", ["dithered_trellis(omega=1)", "error_feedback(sparse_dithering(nu=0.1))", "error_feedback(top_k(fraction=0.05))"]
)
def test_threads_of_one_process_hand_over_whole_messages(method: str) -> None:
    def trained(member: threads.Member, late: bool) -> str:
        model = Network(late, torch.float32).cuda()
        handle = plain.attach(model, method, process_group=member)
        optimiser = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        generator = torch.Generator().manual_seed(member.rank)
        for _ in range(6):
            optimiser.zero_grad()
            model(torch.randn(16, 257, generator=generator).cuda()).square().mean().backward()
            handle.reduce()
            optimiser.step()
        return _digest(model)

    first, second = (set(threads.run(4, functools.partial(trained, late=late))) for late in (False, True))
    assert first == second
    assert len(first) == 1

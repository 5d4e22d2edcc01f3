"""Tensors at the border to the compiled module: what is taken, as it lies in memory, and what is refused; with and without torch's help."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from tersegrad.kernels.native.module import module

X = torch.randn(64, generator=torch.Generator().manual_seed(0))


@pytest.fixture(params=["told by torch", "through numpy"], autouse=True)
def told(request: pytest.FixtureRequest) -> Iterator[bool]:
    there = module.take_tensors(Tensor, request.param == "through numpy")
    if request.param == "told by torch" and not there:
        module.take_tensors(Tensor)
        pytest.skip("this torch does not tell where memory lies")
    yield there
    module.take_tensors(Tensor)


class Named(Tensor):
    """A class of one's own, with ordinary memory."""


TAKEN: dict[str, Callable[[], Tensor]] = {
    "plain": lambda: X.clone(),
    "a part": lambda: X[3:17],
    "one element of many": lambda: X[::7][:1].as_strided((1,), (1,)),
    "empty": lambda: X[:0],
    "requires a gradient": lambda: X.clone().requires_grad_(),
    "a parameter": lambda: torch.nn.Parameter(X.clone()),
    "another class": lambda: X.clone().as_subclass(Named),
}


@pytest.mark.parametrize("name", TAKEN)
def test_tensors_are_read_where_they_lie(name: str) -> None:
    x = TAKEN[name]()
    expected = float(x.detach().abs().max()) if x.numel() else 0.0
    assert module.abs_max(x) == expected


def test_results_are_written_where_a_tensor_lies() -> None:
    out = torch.zeros(3 + 2 * X.numel(), dtype=torch.uint8)
    module.bf16_encode(X, out[3:])
    assert torch.equal(out[3:].clone().view(torch.bfloat16), X.bfloat16())
    assert not out[:3].any()


def fake() -> Tensor:
    with FakeTensorMode():
        return torch.empty(64)


REFUSED: dict[str, Callable[[], object]] = {
    "every second": lambda: X[::2],
    "reversed signs that are put off": lambda: torch._neg_view(X),
    "the imaginary part of a conjugate": lambda: torch.full((1,), 1j).conj().imag.as_strided((1,), (1,)),
    "two dimensions": lambda: X.view(8, 8),
    "no dimension": lambda: X[0],
    "another type": lambda: X.double(),
    "integers": lambda: X.int(),
    "half precision": lambda: X.bfloat16(),
    "no memory": lambda: torch.empty(64, device="meta"),
    "zeros without memory": lambda: torch._efficientzerotensor((64,)),
    "sparse": lambda: X.to_sparse(),
    "fake": fake,
    "nothing": lambda: None,
    "a list": lambda: [1.0, 2.0],
}


@pytest.mark.parametrize("name", REFUSED)
def test_everything_else_is_refused(name: str) -> None:
    with pytest.raises(TypeError, match="incompatible"):
        module.abs_max(REFUSED[name]())


def test_tensors_inside_of_transformations_are_refused() -> None:
    def of_one(x: Tensor) -> Tensor:
        with pytest.raises(TypeError, match="incompatible"):
            module.abs_max(x)
        return x.sum()

    torch.vmap(of_one)(X.view(8, 8))
    torch.func.grad(of_one)(X)


def test_outputs_that_overlap_are_refused() -> None:
    memory = torch.zeros(64 * 6, dtype=torch.uint8)
    x = memory[: 64 * 4].view(torch.float32)
    with pytest.raises(ValueError, match="overlaps"):
        module.bf16_encode(x, memory[64 * 4 - 1 : 64 * 6 - 1])

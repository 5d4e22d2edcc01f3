"""One place chooses backends: the reference, overlaid by what faster ones implement."""

from __future__ import annotations

import importlib
import inspect
import os
import subprocess
import sys
import types
from typing import Any

import pytest
import torch
from torch import Tensor

from tersegrad import kernels
from tersegrad.kernels import cuda, native, reference, triton
from tersegrad.kernels.schema import Kernels

CPU = torch.device("cpu")


def test_a_backend_may_implement_some_operations() -> None:
    def doubled(x: Tensor) -> Tensor:
        return 2 * reference.sum_abs(x)

    backend = types.SimpleNamespace(__name__="doubling", OPERATIONS=("sum_abs",), sum_abs=doubled)
    made = kernels.overlay(backend)
    assert made.sum_abs is doubled
    assert made.sum_squares is reference.sum_squares
    assert made.sources == {"sum_abs": "doubling"}
    with pytest.raises(ValueError, match="'made_up'"):
        kernels.overlay(types.SimpleNamespace(__name__="toys", OPERATIONS=("made_up",)))


def test_the_choice_is_made_once_for_each_kind_of_device() -> None:
    assert kernels.get(CPU) is kernels.get(torch.device("cpu"))
    with kernels.force("reference"):
        assert kernels.get(CPU).sum_abs is reference.sum_abs
        assert not kernels.faster(CPU, "sum_abs")
    assert kernels.get(CPU).sum_abs is native.sum_abs
    assert kernels.faster(CPU, "sum_abs", "rans_encode")
    assert not kernels.faster(CPU, "sum_abs", "exp4_top")
    assert kernels.backends(CPU) == ["native"]
    # A kind of device without a backend gets the reference.
    assert kernels.get(torch.device("meta")).sum_abs is reference.sum_abs


@pytest.mark.parametrize("backend", [native, triton, cuda, "tersegrad.kernels.triton.backend"])
def test_every_implementation_has_the_signature_of_the_reference(backend: Any) -> None:
    if isinstance(backend, str):
        pytest.importorskip("triton", reason="needs Triton")
        backend = importlib.import_module(backend)
    for name in backend.OPERATIONS:
        mine, wanted = (inspect.signature(getattr(where, name)) for where in (backend, reference))
        assert mine == wanted, name


def test_the_reference_implements_the_schema() -> None:
    for name in kernels.operations():
        wanted = inspect.signature(getattr(Kernels, name))
        parameters = list(wanted.parameters.values())[1:]
        assert inspect.signature(getattr(reference, name)) == wanted.replace(parameters=parameters), name


def test_triton_is_not_imported_for_cpu_tensors() -> None:
    program = "import sys, torch, tersegrad; tersegrad.roundtrip('qsgd', torch.ones(9)); assert 'triton' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120, env=dict(os.environ))

"""What is used of torch besides its documented interface: reached here and nowhere else, since any release may move it.

A release without one of these names is told in one line with the releases that were tested, never in an ``AttributeError``;
``tersegrad doctor`` looks for all of them. What FSDP2 keeps to itself is read in ``integrations/fsdp_units.py`` and checked with
:func:`need`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from tersegrad.core.errors import BadConfiguration

TESTED = ("2.9", "2.15")  # the lowest and the newest release of torch that the walk of tests/install was made with

# Private names, as paths from torch, and what relies on them.
PATHS: Mapping[str, str] = {
    "_foreach_add_": "the second moment of batch normalisation",
    "_foreach_copy_": "copying many tensors at once",
    "_batch_norm_impl_index": "the second moment of batch normalisation",
    "_C._current_graph_task_id": "collecting second moments",
    "autograd.Variable._execution_engine": "compressed FSDP2 and second moments on a GPU",
    "distributed.distributed_c10d._world": "leaving a run that failed",
    "nn.functional._verify_batch_size": "the second moment of batch normalisation",
    "nn.functional._in_projection_packed": "the second moment of attention",
    "nn.functional._in_projection": "the second moment of attention",
    "nn.modules.batchnorm._BatchNorm": "the second moment of batch normalisation",
    "utils._pytree": "second moments by running a layer again",
}
# Private attributes of torch's objects, and what relies on them.
ATTRIBUTES: Mapping[str, str] = {
    "_base": "the second moment of attention",
    "_check_input_dim": "the second moment of batch normalisation",
    "_conv_forward": "the second moment of convolutions",
    "_output_padding": "the second moment of transposed convolutions",
    "_reversed_padding_repeated_twice": "the second moment of convolutions",
}


def release(version: str) -> tuple[int, int]:
    """Major and minor number.

    >>> release("2.13.0+cpu")
    (2, 13)
    """
    major, minor = version.split(".")[:2]
    return int(major), int(minor)


def standing() -> str:
    """Where this torch stands to the releases that were tested; empty inside them."""
    low, high = TESTED
    now = release(torch.__version__)
    if now > release(high):
        return f"newer than {high}, the newest release that was tested"
    return f"older than {low}, the lowest release that was tested" if now < release(low) else ""


def unknown(what: str, who: str, otherwise: str = "") -> BadConfiguration:
    """The error where this torch has no ``what``."""
    low, high = TESTED
    tested = low if low == high else f"{low} to {high}"
    return BadConfiguration(
        f"torch {torch.__version__} has no {what}, which {who} relies on; it is tested with torch {tested}: "
        f"pip install 'torch=={high}.*'{otherwise}"
    )


def of(path: str) -> Any:
    """A private name of torch by its path."""
    try:
        return operator.attrgetter(path)(torch)
    except AttributeError:
        raise unknown(f"torch.{path}", PATHS[path]) from None


def in_backward() -> bool:
    """Whether a backward pass runs on this thread. Spelled out, so that torch.compile sees through it."""
    return torch._C._current_graph_task_id() != -1


def backward_pass() -> int:
    """The number of the backward pass that runs on this thread."""
    return torch._C._current_graph_task_id()


def get(thing: Any, name: str) -> Any:
    """A private attribute of an object of torch's."""
    try:
        return getattr(thing, name)
    except AttributeError:
        raise unknown(f"{type(thing).__name__}.{name}", ATTRIBUTES[name]) from None


def need(thing: Any, names: Sequence[str], who: str, otherwise: str = "") -> None:
    """See that an object of torch's has the attributes that are used of it."""
    for name in names:
        if not hasattr(thing, name):
            raise unknown(f"{type(thing).__name__}.{name}", who, otherwise)


def fast(name: str, public: Any) -> Any:
    """A function of torch's C extension that does what a public one does in less time; that one where there is none."""
    return getattr(torch._C, name, public)


# The current device, and the current stream of a device as a number: a tenth of the time of the public ways.
current_device: Callable[[], int] = fast("_cuda_getDevice", torch.cuda.current_device)
current_stream: Callable[[int], int] = fast(
    "_cuda_getCurrentRawStream", lambda index: torch.cuda.current_stream(index).cuda_stream
)
# Whether work on the current stream is written down for a CUDA graph.
capturing: Callable[[], bool] = fast("_cuda_isCurrentStreamCapturing", torch.cuda.is_current_stream_capturing)

_packing = getattr(getattr(torch._C, "_autograd", None), "_top_saved_tensors_default_hooks", None)


def packs() -> bool:
    """Whether what autograd saves now goes through hooks (activation checkpointing, offloading); so it may, where torch cannot say."""
    return _packing is None or _packing(True) is not None


def applied(function: type[torch.autograd.Function]) -> Any:
    """``function.apply`` without what it does for torch.func, which takes a quarter of its time, where nothing of that is active."""
    base, active = getattr(torch._C, "_FunctionBase", None), fast("_are_functorch_transforms_active", None)
    if base is None or active is None or "apply" not in vars(base):
        return function.apply
    direct = vars(base)["apply"].__get__(None, function)

    def apply(*arguments: Any) -> Any:
        return function.apply(*arguments) if active() else direct(*arguments)

    return apply


def missing() -> dict[str, str]:
    """The paths that this torch does not have, and what relies on them."""
    found = {}
    for path, who in PATHS.items():
        try:
            of(path)
        except BadConfiguration:
            found[path] = who
    return found


def unwrapped(model: Any) -> Any:
    """The module inside what ``torch.compile`` returned; any other as it is."""
    return getattr(model, "_orig_mod", model)


def plain_name(name: str) -> str:
    """The name of a module or a parameter without what torch.compile and activation checkpointing put in.

    >>> plain_name("_orig_mod.block._checkpoint_wrapped_module.weight")
    'block.weight'
    """
    return ".".join(part for part in name.split(".") if part not in ("_orig_mod", "_checkpoint_wrapped_module"))


def comm_hooks(model: Any) -> list[tuple[Any, Any]]:
    """The communication hooks of a DDP model with their states; torch itself refuses a second one where they are not to be seen."""
    return list(getattr(model, "_comm_hooks", ()))

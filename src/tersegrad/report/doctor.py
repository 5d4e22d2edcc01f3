"""What this installation runs on and why: versions, backends, instruction set, threads, GPU, and what is missing with the way to get it."""

from __future__ import annotations

import importlib.metadata
import platform
import re
from collections.abc import Mapping

import torch

from tersegrad import __version__, kernels
from tersegrad.core import private
from tersegrad.kernels import cuda, native
from tersegrad.kernels.cuda import nvrtc
from tersegrad.report.tables import Column, Table

# What each extra for users requires, as in pyproject.toml.
EXTRAS: Mapping[str, tuple[str, ...]] = {
    "report": ("matplotlib>=3.8",),
    "experiments": ("scikit-learn>=1.4",),
    "flower": ("flwr>=1.38,<1.43",),
}


def doctor() -> dict[str, str]:
    """Facts by name, in the order in which they are shown."""
    return {
        "tersegrad": __version__,
        "Python": f"{platform.python_version()}, {platform.system()} {platform.machine()}",
        "torch": _torch(),
        "with": ", ".join(f"{name} {_version(name)}" for name in ("numpy", "typer", "rich")),
        "kernels for CPU": _cpu(),
        "threads": f"torch {torch.get_num_threads()}, kernels {native.threads() if native.available() else torch.get_num_threads()}",
        "GPU": _gpu(),
        "kernels for GPU": _backend("cuda") if torch.cuda.is_available() else "-",
        "Triton": _version("triton") or "not installed; it comes with torch's CUDA builds",
        "NVRTC": _nvrtc(),
        **{f"extra {name}": _extra(packages) for name, packages in EXTRAS.items()},
    }


def doctor_table() -> Table:
    """The facts for a terminal."""
    return Table((Column("", number=False), Column("", number=False)), tuple(doctor().items()), "This installation")


def _torch() -> str:
    """Its version, and what is to be known where it is not one of those that were tested."""
    gone = [f"without torch.{path}, which {who} relies on" for path, who in private.missing().items()]
    return "; ".join([torch.__version__, *filter(None, [private.standing()]), *gone])


def _version(package: str) -> str:
    """The installed version, empty where there is none."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _backend(device: str) -> str:
    """The backends that tensors on a device get, and why the compiled ones for GPUs are not among them."""
    found = kernels.backends(torch.device(device))
    if device == "cpu":
        return ", ".join(found) or "plain torch"
    missing = "" if "cuda" in found else f"; without compiled CUDA kernels: {cuda.why_missing()}"
    return ", ".join([*found, "plain torch"]) + missing


def _cpu() -> str:
    if not native.available():
        return f"plain torch, many times slower: {native.why_missing()}; {native.REMEDY}"
    able = native.supported_isas()
    return f"{_backend('cpu')} (compiled C++), {native.isa()}, of {', '.join(able)} that this processor can run"


def _gpu() -> str:
    if torch.version.cuda is None and torch.version.hip is None:
        return "none: this torch is built without CUDA"
    if not torch.cuda.is_available():
        return f"none that torch (built for CUDA {torch.version.cuda}) can use"
    count = torch.cuda.device_count()
    return f"{count} x {torch.cuda.get_device_name(0)}, CUDA {torch.version.cuda}"


def _nvrtc() -> str:
    """The version of NVIDIA's run-time compiler, which the compiled kernels for GPUs need."""
    return nvrtc.why_missing() or ".".join(map(str, nvrtc.version()))


def _extra(requirements: tuple[str, ...]) -> str:
    installed = {text: _version(re.split(r"[<>=]", text)[0]) for text in requirements}
    here = [f"{re.split(r'[<>=]', text)[0]} {version}" for text, version in installed.items() if version]
    missing = [f"'{text}'" for text, version in installed.items() if not version]
    return "; ".join(
        [*([", ".join(here)] if here else []), *([f"missing: pip install {' '.join(missing)}"] if missing else [])]
    )

"""A new user's walk through an installed tersegrad: every command once, one step of every integration, and the versions.

Run by ``make install-check`` with the Python of a fresh environment. Needs nothing of the repository.

    python walk.py native    the compiled kernels must be there
    python walk.py plain     they must not be, and one warning must say so
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

PACKAGES = ("tersegrad", "torch", "numpy", "typer", "click", "rich", "scikit-learn", "matplotlib", "flwr")
COMMANDS = (
    *(
        [*command, "--help"]
        for command in ([], ["demo"], ["train"], ["plan"], ["list"], ["bounds"], ["inspect"], ["doctor"], ["bench"], ["report"])
    ),
    ["bench", "rate", "--help"],
    ["bench", "speed", "--help"],
    ["--version"],
    ["doctor"],
    ["doctor", "--json"],
    ["list"],
    ["bounds", "--alpha", "0.1"],
    ["bounds", "--omega", "1"],
    ["inspect", "gradient.tgrd"],
    ["bench", "rate", "bf16", "top_k(fraction=0.01)", "sparse_dithering(alpha=0.1)", "--size", "16Ki"],
    ["bench", "speed", "bf16", "--size", "16Ki", "--rounds", "3"],
    ["plan", "--model", "resnet50", "--bandwidth", "1Gbit", "--workers", "4"],
    ["train", "--workers", "2", "--epochs", "1", "--model", "mlp(width=64)", "--log", "run.jsonl"],
    ["report", "run.jsonl"],
    ["demo", "--quick", "--workers", "2"],
)
MISTAKES = (["bench", "rate", "qsdg"], ["train", "--data", "/nowhere"], ["bounds"])
WARNING = "tersegrad runs on its plain-torch kernels"


def command(words: list[str], *, code: int = 0, warned: bool = False) -> None:
    """Run one command as a user would; it must end with ``code``, without a traceback, and warn at most once, if at all."""
    start = time.perf_counter()
    script = Path(sys.executable).with_name("tersegrad")
    found = [str(script)] if script.exists() else [sys.executable, "-m", "tersegrad.cli"]
    done = subprocess.run(
        [*found, *words], capture_output=True, text=True, check=False, timeout=1500, env=os.environ | {"COLUMNS": "80"}
    )
    shown = done.stdout + done.stderr
    if done.returncode != code or "Traceback" in shown or shown.count(WARNING) > int(warned):
        sys.exit(f"tersegrad {' '.join(words)} ended with {done.returncode}:\n{shown}")
    print(f"  tersegrad {' '.join(words)}: {time.perf_counter() - start:.1f} s", flush=True)


def frame() -> None:
    """Write gradient.tgrd."""
    import torch

    import tersegrad

    x = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    Path("gradient.tgrd").write_bytes(tersegrad.to_frame("qsgd(bits=4)", x))


def _step(wrap: Callable[[Any], tuple[Any, Any]], after: str = "") -> None:
    """One training step of a small model."""
    import torch

    torch.manual_seed(0)
    model, handle = wrap(torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.nn.functional.cross_entropy(model(torch.randn(32, 64)), torch.randint(10, (32,))).backward()
    optimizer.step()
    if after:
        getattr(handle, after)()
    assert handle.report()["bits_per_coordinate"] > 0


def ddp() -> None:
    """One step of DistributedDataParallel."""
    from torch.nn.parallel import DistributedDataParallel

    from tersegrad.integrations import ddp

    def wrap(model: Any) -> tuple[Any, Any]:
        wrapped = DistributedDataParallel(model)
        return wrapped, ddp.attach(wrapped, "error_feedback(sparse_dithering(alpha=0.1))")

    _step(wrap)


def _fsdp_rank(rank: int, folder: str) -> None:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from tersegrad.integrations import fsdp

    def wrap(model: Any) -> tuple[Any, Any]:
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
        return model, fsdp.attach(model, "qsgd(bits=4)")

    os.environ["LOCAL_RANK"] = str(rank)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    _step(wrap)
    dist.destroy_process_group()


def fsdp() -> None:
    """One step of FSDP2, on two processes: alone it has nothing to reduce."""
    import torch.multiprocessing

    torch.multiprocessing.spawn(_fsdp_rank, (tempfile.mkdtemp(),), nprocs=2)  # type: ignore[attr-defined, no-untyped-call]


def local_sgd() -> None:
    """One round of local SGD."""
    from tersegrad.integrations import local_sgd

    _step(lambda model: (model, local_sgd.attach(model, "qsgd(bits=4)", "two_shot", "local_sgd(every=1)")), after="step")


def flower() -> None:
    """One round of a federation."""
    import logging

    import torch
    from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
    from flwr.clientapp import ClientApp
    from flwr.serverapp.strategy import FedAvg

    from tersegrad.integrations import flower

    logging.getLogger("flwr").setLevel(logging.CRITICAL)
    app = ClientApp(mods=[flower.compress_mod()])

    @app.train()
    def train(message: Any, context: Any) -> Any:
        arrays = {name: 0.9 * value for name, value in message.content["arrays"].to_torch_state_dict().items()}
        content: Any = {"arrays": ArrayRecord(arrays), "metrics": MetricRecord({"num-examples": 100})}
        return Message(RecordDict(content), reply_to=message)

    grid = flower.LocalGrid(app, 2)
    strategy = flower.CompressedStrategy(FedAvg(fraction_evaluate=0.0), seed=1)
    strategy.start(grid, ArrayRecord(torch.nn.Linear(64, 64).state_dict()), num_rounds=1)
    assert strategy.report()["updates"] == 2


def integrations() -> None:
    """One step of each."""
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    for step in (ddp, fsdp, local_sgd, *([flower] if importlib.util.find_spec("flwr") else [])):
        start = time.perf_counter()
        step()
        print(f"  one step of {step.__name__}: {time.perf_counter() - start:.1f} s", flush=True)
    dist.destroy_process_group()


def versions() -> None:
    """The table at the end."""
    print(
        f"\n| {'package':<12} | version    |\n|:-------------|:-----------|\n| {'Python':<12} | {sys.version.split()[0]:<10} |"
    )
    for name in PACKAGES:
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            version = "-"
        print(f"| {name:<12} | {version:<10} |")


def main(kind: str) -> None:
    """The walk."""
    from tersegrad.kernels import native

    if native.available() != (kind == "native"):
        sys.exit(f"this was to be the {kind} installation, but native.available() is {native.available()}")
    os.chdir(tempfile.mkdtemp())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        frame()
        integrations()
    ours = [str(w.message) for w in caught if str(w.message).startswith("tersegrad")]
    assert len(ours) == (kind == "plain"), ours
    for text in ours:
        print(f"  warned once: {text}")
    for words in COMMANDS:
        command(words, warned=kind == "plain")
    for words in MISTAKES:
        command(words, code=2)
    versions()


if __name__ == "__main__":
    main(sys.argv[1])

"""A worker of ``test_frameworks.py``: runs the snippets of docs/ddp.md in Lightning or Accelerate, under torchrun."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

PAGE = Path(__file__).parents[2] / "docs" / "ddp.md"


def snippets(word: str) -> dict[str, Any]:
    """The names that the page's blocks about ``word`` define."""
    space: dict[str, Any] = {}
    for block in re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL):
        if ">>>" not in block and re.search(rf"^(import|from) {word}", block, re.MULTILINE):
            exec(compile(block, str(PAGE), "exec"), space)
    return space


def network() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(16, 128), nn.ReLU(), nn.Linear(128, 4))


def data() -> DataLoader[Any]:
    g = torch.Generator().manual_seed(1)
    images = torch.randn(256, 16, generator=g)
    return DataLoader(TensorDataset(images, images[:, :4].argmax(1)), batch_size=16)


def lightning_module() -> Any:
    import lightning

    class Module(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.network = network()

        def training_step(self, batch: Any, index: int) -> Tensor:
            return nn.functional.cross_entropy(self.network(batch[0]), batch[1])

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.2)

    return Module()


def run_lightning() -> tuple[nn.Module, Any]:
    space, module = snippets("lightning"), lightning_module()
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = space["fit"](module, data(), accelerator="cpu", devices=2, max_epochs=4, **quiet)
    handle = next(c for c in trainer.callbacks if isinstance(c, space["Compress"])).handle
    logged = float(trainer.callback_metrics["bits_per_coordinate"])
    assert abs(logged - handle.report()["bits_per_coordinate"]) < 1e-4
    return module.network, handle


def run_pair() -> tuple[nn.Module, Any]:
    import lightning

    space = snippets("lightning")

    module, strategy = lightning_module(), space["strategy"]

    def register() -> None:  # what Lightning does itself on GPUs only
        strategy.model.register_comm_hook(state=strategy._ddp_comm_state, hook=strategy._ddp_comm_hook)

    strategy._register_ddp_hooks = register
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    lightning.Trainer(strategy=strategy, accelerator="cpu", devices=2, max_epochs=4, **quiet).fit(module, data())
    return module.network, space["state"]


def run_accelerate() -> tuple[nn.Module, Any]:
    model: Any = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    accelerator, model, optimizer, loader, handle = snippets("accelerate")["prepare"](model, optimizer, data(), cpu=True)
    for _ in range(4):
        for images, labels in loader:
            optimizer.zero_grad()
            accelerator.backward(nn.functional.cross_entropy(model(images), labels))
            optimizer.step()
    return accelerator.unwrap_model(model), handle


if __name__ == "__main__":
    torch.set_num_threads(1)
    trained, handle = {"lightning": run_lightning, "pair": run_pair, "accelerate": run_accelerate}[sys.argv[1]]()
    mine = torch.cat([p.detach().reshape(-1) for p in trained.parameters()])
    theirs = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(theirs, mine)
    assert dist.get_world_size() == 2
    assert torch.equal(theirs[0], theirs[1])
    images, labels = data().dataset.tensors  # type: ignore[attr-defined]
    accuracy = float((trained(images).argmax(1) == labels).float().mean())
    report = handle.report()
    assert report["steps"] == 32, report
    assert 0 < report["bits_per_coordinate"] < 12, report
    assert accuracy > 0.6, accuracy
    if dist.get_rank() == 0:
        print(f"{sys.argv[1]}: {report['bits_per_coordinate']:.2f} bits per coordinate, accuracy {accuracy:.3f}")

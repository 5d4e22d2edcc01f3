"""A worker of ``test_frameworks.py``: runs the snippets of docs/frameworks.md with the real packages, under torchrun."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from tests.integrations.test_ddp import same

PAGE = Path(__file__).parents[2] / "docs" / "frameworks.md"
QUIET = {"enable_progress_bar": False, "enable_model_summary": False}


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


def run_lightning(folder: Path) -> tuple[nn.Module, Any]:
    from lightning.pytorch.loggers import CSVLogger

    space, module = snippets("lightning"), lightning_module()
    where = {"accelerator": "cpu", "devices": 2, "default_root_dir": str(folder), **QUIET}
    logger = CSVLogger(str(folder), flush_logs_every_n_steps=1)
    trainer, report = space["fit"](module, data(), max_epochs=3, logger=logger, **where)
    callback = next(c for c in trainer.callbacks if isinstance(c, space["Compress"]))
    assert report == callback.handle.report()
    assert report["steps"] == 24
    assert callback.handle.detached
    if dist.get_rank() == 0:
        assert "tersegrad/bits_per_coordinate" in (Path(logger.log_dir) / "metrics.csv").read_text()
    trainer.save_checkpoint(folder / "three.ckpt")
    # A run of one epoch more, which begins with the residuals of the three before.
    import lightning

    callback = space["Compress"]("error_feedback(sparse_dithering(alpha=0.1))", seed=5, log_every=0)
    trainer = lightning.Trainer(strategy="ddp", callbacks=[callback], max_epochs=4, logger=False, **where)
    again = lightning_module()
    trainer.fit(again, data(), ckpt_path=folder / "three.ckpt")
    assert (callback.handle.step, callback.handle.seed) == (32, 1)
    return again.network, callback.handle


def run_sharded(folder: Path) -> tuple[nn.Module, Any]:
    """FSDP2, as Lightning's ModelParallelStrategy does it."""
    import lightning
    from lightning.pytorch.strategies import ModelParallelStrategy
    from torch.distributed.fsdp import fully_shard

    module = lightning_module()

    def shard() -> None:
        mesh = module.device_mesh["data_parallel"]
        for layer in (module.network[0], module.network[2], module.network):
            fully_shard(layer, mesh=mesh)

    module.configure_model = shard
    callback = snippets("lightning")["Compress"]("error_feedback(sparse_dithering(alpha=0.1))", log_every=0, dense_below=100)
    quiet = {"logger": False, "enable_checkpointing": False, **QUIET}
    strategy = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)
    trainer = lightning.Trainer(strategy=strategy, accelerator="cpu", devices=2, max_epochs=4, callbacks=[callback], **quiet)
    trainer.fit(module, data())
    assert callback.handle.report()["exchange"] == "reduce_scatter"
    whole = network()
    for mine, theirs in zip(whole.parameters(), module.network.parameters()):
        mine.data.copy_(theirs.full_tensor())
    return whole, callback.handle


def run_pair(folder: Path) -> tuple[nn.Module, Any]:
    import lightning

    space = snippets("lightning")
    module, strategy = lightning_module(), space["strategy"]

    def register() -> None:  # what Lightning does itself on GPUs only
        strategy.model.register_comm_hook(state=strategy._ddp_comm_state, hook=strategy._ddp_comm_hook)

    strategy._register_ddp_hooks = register
    quiet = {"logger": False, "enable_checkpointing": False, **QUIET}
    lightning.Trainer(strategy=strategy, accelerator="cpu", devices=2, max_epochs=4, **quiet).fit(module, data())
    return module.network, space["state"]


def run_accelerate(folder: Path) -> tuple[nn.Module, Any]:
    space = snippets("accelerate")
    model: Any = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    options = {"cpu": True, "log_with": [], "project_dir": str(folder)}
    accelerator, model, optimizer, loader, handle = space["prepare"](model, optimizer, data(), **options)
    accelerator.trackers = [Tracker()]

    def epochs(count: int) -> None:
        for _ in range(count):
            for images, labels in loader:
                optimizer.zero_grad()
                accelerator.backward(nn.functional.cross_entropy(model(images), labels))
                optimizer.step()

    epochs(3)
    accelerator.save_state(str(folder / "three"))
    saved = handle.state_dict()
    epochs(1)
    accelerator.load_state(str(folder / "three"))
    assert same(handle.state_dict(), saved)
    handle.reset_report()
    epochs(1)
    assert handle.step == 32
    return accelerator.unwrap_model(model), handle


class Tracker:
    """An Accelerate tracker."""

    name = "test"
    main_process_only = True

    def log(self, values: dict[str, Any], step: int | None, **kwargs: Any) -> None:
        assert all(name.startswith("tersegrad/") for name in values)


class Classifier(nn.Module):
    """What the Hugging Face trainer takes: a module that returns its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.network = network()

    def forward(self, images: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.network(images)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


class Rows(Dataset[dict[str, Tensor]]):
    def __init__(self) -> None:
        self.images, self.labels = data().dataset.tensors  # type: ignore[attr-defined]

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        return {"images": self.images[number], "labels": self.labels[number]}


def run_transformers(folder: Path) -> tuple[nn.Module, Any]:
    space = snippets("transformers")
    options: dict[str, Any] = {"use_cpu": True, "learning_rate": 0.2, "optim": "sgd", "lr_scheduler_type": "constant"}
    options |= {
        "per_device_train_batch_size": 16,
        "logging_steps": 4,
        "save_steps": 24,
        "report_to": "none",
        "disable_tqdm": True,
    }
    trainer, handle = space["train"](Classifier(), Rows(), str(folder), num_train_epochs=3, max_grad_norm=0, **options)
    assert handle.report()["steps"] == 24
    if dist.get_rank() == 0:
        logged = [row for row in trainer.state.log_history if "tersegrad/bits_per_coordinate" in row]
        assert [row["step"] for row in logged] == [4, 8, 12, 16, 20, 24]
        assert all(0 < row["tersegrad/message_error"] < 0.2 for row in logged)
    saved = torch.load(folder / "checkpoint-24" / f"tersegrad-rank{dist.get_rank()}.pt", weights_only=True)
    assert same(saved, handle.state_dict())
    arguments = space["TrainingArguments"](output_dir=str(folder), num_train_epochs=4, max_grad_norm=0, **options)
    model = Classifier()
    trainer = space["Trainer"](model=model, args=arguments, train_dataset=Rows())
    callback = space["compress"](trainer, "error_feedback(sparse_dithering(alpha=0.1))")
    trainer.train(resume_from_checkpoint=True)
    assert callback.handle.step == 32
    return model.network, callback.handle


if __name__ == "__main__":
    torch.set_num_threads(1)
    runs = {"lightning": run_lightning, "sharded": run_sharded, "pair": run_pair}
    runs |= {"accelerate": run_accelerate, "transformers": run_transformers}
    trained, handle = runs[sys.argv[1]](Path(sys.argv[2]))
    mine = torch.cat([p.detach().reshape(-1) for p in trained.parameters()])
    theirs = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(theirs, mine)
    assert dist.get_world_size() == 2
    assert torch.equal(theirs[0], theirs[1])
    images, labels = data().dataset.tensors  # type: ignore[attr-defined]
    accuracy = float((trained(images).argmax(1) == labels).float().mean())
    report = handle.report()
    assert handle.step == 32, report
    assert 0 < report["bits_per_coordinate"] < 12, report
    assert accuracy > 0.6, accuracy
    if dist.get_rank() == 0:
        print(f"{sys.argv[1]}: {report['bits_per_coordinate']:.2f} bits per coordinate, accuracy {accuracy:.3f}")

"""Lightning, Accelerate and Transformers run the documentation's snippets on two real processes, where they are installed.

``make frameworks`` installs them in an environment of their own and runs this file there.
"""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tersegrad.core.errors import BadConfiguration, MissingExtra
from tersegrad.integrations import frameworks, processes
from tests.engine.models import FEEDBACK, Run, start
from tests.exchange.pool import pool
from tests.integrations.test_ddp import same

LOGGERS = Path(__file__).parents[2] / "docs" / "loggers.md"
KINDS = [
    ("lightning", "lightning"),
    ("sharded", "lightning"),
    ("pair", "lightning"),
    ("accelerate", "accelerate"),
    ("transformers", "transformers"),
]


def there(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


@pytest.mark.parametrize(("kind", "package"), KINDS)
def test_documented_snippets_train(kind: str, package: str, tmp_path: Path) -> None:
    if not there(package):
        pytest.skip(f"{package} is not installed: make frameworks")
    assert processes.launch(["-m", "tests.integrations.frameworks", kind, str(tmp_path)], 2) == 0


def test_a_missing_framework_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from tersegrad.integrations import lightning, transformers

    monkeypatch.setattr(lightning, "_Callback", object)
    monkeypatch.setattr(transformers, "_Callback", object)
    with pytest.raises(MissingExtra, match="pip install lightning"):
        lightning.Compress("sign")
    with pytest.raises(MissingExtra, match="pip install transformers"):
        transformers.compress(object(), "sign")


def test_a_model_that_was_not_wrapped_is_refused() -> None:
    with pytest.raises(BadConfiguration, match="has left Linear as it is"):
        frameworks.attach(nn.Linear(2, 2), "sign")


def save_and_load(kind: str, folder: str) -> None:
    run = start(kind)
    run.handle.detach()
    handle = frameworks.attach(run.model, FEEDBACK, dense_below=20)
    first = Run(kind, run.model, handle, run.optimizer)
    first.steps(0, 2)
    saved = frameworks.AllRanks(handle).state_dict()
    assert len(saved["ranks"]) == (dist.get_world_size() if dist.get_rank() == 0 else 0)
    if dist.get_rank() == 0:
        torch.save(saved, f"{folder}/state.pt")
    dist.barrier()
    other = start(kind, seed=9)
    found = torch.load(f"{folder}/state.pt", weights_only=True)
    # The handle of the second model has groups of another size: those of the state are taken.
    other.handle.detach()
    again = frameworks.attach(other.model, FEEDBACK, dense_below=20)
    frameworks.AllRanks(again).load_state_dict(found)
    assert again.step == 2
    assert same(again.state_dict(), handle.state_dict())


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_what_a_framework_wrapped_is_recognised_and_all_residuals_are_saved(kind: str, tmp_path: Path) -> None:
    with pool(2) as ranks:
        ranks.run(save_and_load, kind, str(tmp_path))


@pytest.mark.usefixtures("single")
@pytest.mark.parametrize("package", ["wandb", "mlflow"])
def test_documented_loggers(package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not there(package):
        pytest.skip(f"{package} is not installed: make frameworks")
    monkeypatch.chdir(tmp_path)
    for name, value in {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "MLFLOW_ALLOW_FILE_STORE": "true"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "mlruns").as_uri())
    (block,) = re.findall(rf"^```python\n(import {package}\n.*?)^```", LOGGERS.read_text(), re.MULTILINE | re.DOTALL)
    module: Any = importlib.import_module(package)
    run, opened = start("ddp"), module.init(project="test") if package == "wandb" else module.start_run()
    exec(compile(block, str(LOGGERS), "exec"), {"handle": run.handle})
    run.steps(0, 20)
    if package == "wandb":
        assert opened.summary["bits_per_coordinate"] > 0
        opened.finish()
    else:
        history = module.MlflowClient().get_metric_history(opened.info.run_id, "bits_per_coordinate")
        assert [point.step for point in history] == [10, 20]
        module.end_run()

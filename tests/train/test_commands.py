"""The command: virtual workers, and one line where workers fail."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from tersegrad.cli import app
from tersegrad.integrations import agent, processes


def command(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tersegrad.cli", "train", *words],
        capture_output=True,
        text=True,
        timeout=280,
        env={**os.environ, "OMP_NUM_THREADS": "1", "NO_COLOR": "1"},
    )


def test_workers_that_fail_give_one_line(tmp_path: Path) -> None:
    # --log is ours: torchrun has options of its own that begin like this.
    done = command("--workers", "2", "--batch", "1000", "--log", str(tmp_path / "log.jsonl"))
    assert done.returncode == 2
    assert done.stderr.splitlines() == ["error: 2 workers x 1000 examples are more than the 1500 there are"]
    assert done.stdout == ""


def test_torchrun_leaves_our_options_alone() -> None:
    """--local is also the beginning of two options of torchrun's."""
    words = ["train", "--local", "local_sgd(every=2)", "--workers", "2", "--", "-m"]
    made = processes.torchrun_command(["-m", "tersegrad.cli", *words], 2, restarts=3)
    given = vars(agent)["torchrun"].get_args_parser().parse_args(made[3:])
    assert (given.module, given.training_script, given.training_script_args) == (True, "tersegrad.cli", words)
    assert (given.nproc_per_node, given.max_restarts) == ("2", 3)
    script = (
        vars(agent)["torchrun"].get_args_parser().parse_args(processes.torchrun_command(["train.py", "--local", "x"], 4)[3:])
    )
    assert (script.module, script.training_script, script.training_script_args) == (False, "train.py", ["--local", "x"])


def test_virtual_workers_train_on_text(tmp_path: Path) -> None:
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "one.txt").write_text("to be or not to be\n" * 200)
    words = ["--data", f"text:{tmp_path / 'text'}", "--model", "gpt(layers=1, width=16, context=16)", "--optimizer", "adamw"]
    words += ["--virtual", "3", "--steps", "4", "--batch", "2", "--log", str(tmp_path / "log"), "--json", "-"]
    done = CliRunner().invoke(app, ["train", *words])  # in this process, as virtual workers are
    assert done.exit_code == 0, done.output
    (result,) = json.loads(done.stdout)["results"]
    assert (result["workers"], result["steps"]) == (3, 4)
    # The job, four steps, their four exchanges, and the result.
    lines = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    assert [sum(kind in line for line in lines) for kind in ("run", "step", "exchanged", "result")] == [1, 4, 4, 1]
    assert lines[-1]["result"]["steps"] == 4


@dataclasses.dataclass
class Failure:
    exitcode: int
    timestamp: int
    told: str = ""
    error_file: str = "/tmp/error.json"

    @property
    def error_file_data(self) -> dict[str, Any]:
        return {"message": {"message": self.told}} if self.told else {"message": "<NONE>"}


def test_which_failure_is_told() -> None:
    mistake = Failure(2, 9, "BadConfiguration: the folder holds a run already: continue it\nwith a second line")
    lost = Failure(1, 5, "RuntimeError: connection closed by peer")
    assert agent.summary({0: lost, 1: mistake}) == "the folder holds a run already: continue it"
    said = agent.summary({0: lost, 1: Failure(1, 4, "ValueError: no")})
    assert said == "worker 1 failed: ValueError: no (traceback: /tmp/error.json)"
    assert agent.summary({0: lost, 1: Failure(-9, 4)}) == "worker 1 was ended by SIGKILL"
    assert agent.summary({3: Failure(7, 4)}) == "worker 3 ended with exit code 7"

"""A worker of the restart test: trains under torchrun, and in its first life one rank dies in the middle of an epoch."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import torch

from tersegrad.integrations import processes
from tersegrad.train import Job, Progress, run


def job(folder: Path) -> Job:
    return Job(checkpoint=folder, model="mlp(width=48)", epochs=1, batch=40, seed=3, save_every=4)


if __name__ == "__main__":
    folder, when = Path(sys.argv[1]), int(sys.argv[2])
    torch.set_num_threads(1)

    def die(now: Progress) -> None:
        if now.step == when and processes.restarts() == 0:
            (folder / "died").write_text(f"{now.step}")
            os.kill(os.getpid(), signal.SIGKILL)

    # Long enough for a busy machine to start both ranks: else the first life may end before anyone is killed.
    with processes.join(timeout=240) as worker:
        result = run(job(folder), worker, die)
        if worker.leads:
            (folder / "restarts").write_text(f"{processes.restarts()} {result.steps}")
    processes.leave()

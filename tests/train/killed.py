"""A worker of a language model's run of eight, in which one is killed, or of the six that go on."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import torch

from tersegrad.integrations import processes
from tersegrad.train import Job, Progress, run

KILLED, VICTIM = 14, 5  # after this step, and who


def job(folder: Path, corpus: str, steps: int, resume: bool = False) -> Job:
    return Job(
        data=corpus,
        model="gpt(layers=1, width=32, context=16)",
        optimizer="adamw(lr=0.01, beta2=0.95, warmup=2, decay=none)",
        compressor="sparse_loco(chunk=256, k=32)",
        exchange="all_gather(mean=senders, clip=median)",
        local="sparse_loco(every=3)",
        batch=2,
        steps=steps,
        seed=1,
        clip=1.0,
        held_out=8,
        checkpoint=folder,
        save_every=12,
        evaluate_every=3,
        log=folder / "run.jsonl",
        resume=resume,
    )


if __name__ == "__main__":
    folder, corpus, steps, resume = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4] == "resume"
    torch.set_num_threads(1)

    def kill(now: Progress) -> None:
        if now.step == KILLED and not resume:
            os.kill(int((folder / f"pid{VICTIM}").read_text()), signal.SIGKILL)

    # Long enough for a busy machine to start all of them.
    with processes.join(timeout=240) as worker:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"pid{worker.rank}").write_text(f"{os.getpid()}")
        worker.barrier()
        run(job(folder, corpus, steps, resume), worker, kill)
    processes.leave()

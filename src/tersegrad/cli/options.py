"""Options of the commands: names, bounds and help. Those of ``bench`` first, then those of ``train``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Names = Annotated[
    list[str] | None, typer.Argument(help="Text forms such as 'top_k(fraction=0.01)'; all of them when none is given.")
]
Json = Annotated[Path | None, typer.Option("--json", help="Also write the results as JSON to this file; '-' prints JSON only.")]
Size = Annotated[str, typer.Option("--size", help="Coordinates: a number, or one with Ki, Mi or Gi.")]

Data = Annotated[str, typer.Option(help="'digits', 'text:FOLDER', or a folder of MNIST's idx or CIFAR-10's binary files.")]
Model = Annotated[
    str, typer.Option(help="mlp(width=512, depth=2), cnn(width=32), or gpt(layers=8, width=512, context=512) for text.")
]
Optimizer = Annotated[
    str,
    typer.Option(
        help="sgd(lr=0.1, momentum=0.9, ...), adamw(lr=0.001, warmup=100, decay=cosine|linear|late|none, floor=0.1, ...) or sign_sgd."
    ),
]
Compressor = Annotated[
    str, typer.Option(help="Text form; 'none' for an exchange that compresses by itself; 'auto' measures and chooses.")
]
Exchange = Annotated[
    str,
    typer.Option(help="two_shot, all_gather, hierarchical, power_sgd(rank=4), all_reduce (torch's own, in bf16 say), or auto."),
]
Local = Annotated[
    str | None, typer.Option(help="Exchange only now and then: local_sgd(every=10) or diloco(every=50, fragments=2).")
]
GroupBytes = Annotated[int | None, typer.Option(min=1, help="Of float32 that one message serves: 25 MiB, on a GPU 128.")]
Workers = Annotated[int, typer.Option(min=1, help="Processes on this machine; torchrun's own number if it started us.")]
Virtual = Annotated[
    int, typer.Option(min=0, help="Instead of processes: so many workers in this one, on one device, with the same messages.")
]
Epochs = Annotated[int, typer.Option(min=1, help="Passes over the training data.")]
Steps = Annotated[int, typer.Option(min=0, help="Steps in all, instead of epochs.")]
Batch = Annotated[int, typer.Option(min=1, help="Examples (images, windows of text) of each worker in a step.")]
Accumulate = Annotated[int, typer.Option(min=1, help="Parts of a batch whose gradients are computed one after another.")]
Clip = Annotated[float, typer.Option(min=0, help="The largest norm of a gradient; 0: any.")]
Precision = Annotated[str, typer.Option(help="float32, or bf16 by autocast.")]
Compile = Annotated[bool, typer.Option("--compile", help="torch.compile the model.")]
Vocabulary = Annotated[int, typer.Option(min=256, max=65536, help="Of text: 256 are bytes; more are learned from the data.")]
EvaluateEvery = Annotated[int, typer.Option(min=0, help="Steps between evaluations; 0: every epoch.")]
HeldOut = Annotated[int, typer.Option(min=0, help="Examples of an evaluation; 0: all images, 256 windows of text.")]
Seed = Annotated[int, typer.Option(min=0, help="Of everything random.")]
Checkpoint = Annotated[Path | None, typer.Option(help="Folder for checkpoints, shared by all machines.")]
SaveEvery = Annotated[int, typer.Option(min=0, help="Steps between checkpoints; 0: every epoch.")]
Resume = Annotated[
    bool, typer.Option("--resume", help="Continue from the newest checkpoint; with more epochs or steps, beyond the old end.")
]
Restarts = Annotated[int, typer.Option(min=0, help="How often to start anew after a worker died.")]
CheckEvery = Annotated[int, typer.Option(min=0, help="Steps between comparisons of all replicas' parameters.")]
Log = Annotated[
    Path | None,
    typer.Option(help="Append loss, bytes, error and layers to this file, as JSON lines; tersegrad report shows them."),
]

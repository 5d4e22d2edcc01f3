"""A language model over bytes, parallelised as torchtitan does it, with compressed gradients.

    torchrun --nproc-per-node 2 examples/fsdp/train.py FILE              # sharded over both ranks, reduce-scatter in 4 bits
    torchrun --nproc-per-node 4 examples/fsdp/train.py FILE --nodes 2    # sharded in each node, compressed between nodes
    torchrun --nproc-per-node 2 examples/fsdp/train.py FILE --folder out/fsdp --steps 200    # goes on from its last checkpoint

FILE: any text of some 100 KB. The line that matters is the last one of ``parallelize``.
"""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

from tersegrad.integrations import fsdp

CONTEXT, WIDTH, LAYERS = 64, 128, 2


class Transformer(nn.Module):
    """Causal, over bytes; one row of logits per position."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(256, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, 0.0, batch_first=True, norm_first=True) for _ in range(LAYERS)
        )
        self.head = nn.Linear(WIDTH, 256)

    def forward(self, x: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], device=x.device)
        y = self.tokens(x) + self.places(torch.arange(x.shape[1], device=x.device))
        for layer in self.layers:
            y = layer(y, src_mask=mask, is_causal=True)
        logits: Tensor = self.head(y.flatten(0, 1))
        return logits


def parallelize(model: Transformer, mesh: DeviceMesh, compressor: str) -> fsdp.Handle:
    """Shard block by block, then the rest; the last call compresses."""
    inside = mesh["shard"]
    for layer in model.layers:
        fully_shard(layer, mesh=inside)
    fully_shard(model, mesh=inside)
    between = mesh["replicate"].get_group() if mesh["replicate"].size() > 1 else None
    return fsdp.attach(model, compressor, between=between)


def main() -> None:
    """Train, on every rank."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--compressor", default="qsgd(bits=4, bucket=128, norm=max)")
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--folder", type=Path, help="of checkpoints")
    chosen = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    if device == "cuda":
        torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
    size, rank = dist.get_world_size(), dist.get_rank()
    mesh = init_device_mesh(device, (chosen.nodes, size // chosen.nodes), mesh_dim_names=("replicate", "shard"))

    torch.manual_seed(0)  # the same parameters in every node
    model = Transformer().to(device)
    handle = parallelize(model, mesh, chosen.compressor)
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-3)
    text = torch.tensor(list(chosen.file.read_bytes()))

    def checkpoint() -> dict[str, object]:
        parameters, moments = get_state_dict(model, optimiser)
        return {"model": parameters, "optimiser": moments, "exchange": handle, "step": torch.tensor(step)}

    step = 0
    if chosen.folder is not None and (chosen.folder / ".metadata").exists():
        state = checkpoint()
        dcp.load(state, checkpoint_id=chosen.folder)
        set_state_dict(model, optimiser, model_state_dict=state["model"], optim_state_dict=state["optimiser"])  # type: ignore[arg-type]
        step = int(state["step"])  # type: ignore[call-overload]
    while step < chosen.steps:
        generator = torch.Generator().manual_seed(step * size + rank)
        starts = torch.randint(len(text) - CONTEXT - 1, (16,), generator=generator)
        rows = torch.stack([text[s : s + CONTEXT + 1] for s in starts]).to(device)
        loss = nn.functional.cross_entropy(model(rows[:, :-1]), rows[:, 1:].flatten())
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        step += 1
        if step % 10 == 0:
            mean = loss.detach() / size
            dist.all_reduce(mean)
            if rank == 0:
                bits = handle.report()["bits_per_coordinate"]
                print(f"step {step}: loss {float(mean):.3f}, {bits:.2f} bits per coordinate", flush=True)
    if chosen.folder is not None:
        dcp.save(checkpoint(), checkpoint_id=chosen.folder)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

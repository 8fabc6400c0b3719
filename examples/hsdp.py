"""Trains replicas of a sharded model: if one replica dies, the others continue without a restart.

    python examples/hsdp.py --shard 1
    elastic run --nodes-local 2 --embedded-etcd --nnodes=1:2 --nproc-per-node=2 \\
        examples/hsdp.py --checkpoints /tmp/hsdp

Two nodes of two workers are two replicas of two ranks: FSDP2 shards the model over ``run.mesh``,
inside a replica, and the harness reduces gradients over the replicas. Kill a worker or a node: the
other replica continues in its processes, and the replaced ranks receive their shards, of parameters
and of the optimizer, from the ranks at its position. Rank 0 prints JSON lines.
"""

import argparse
import json
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

import elastic


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.inner, self.outer = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.outer(F.gelu(self.inner(self.norm(x))))


class Net(nn.Module):
    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.embed = nn.Linear(8, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.head = nn.Linear(width, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def waves(samples: int, dtype: torch.dtype) -> TensorDataset:
    """Synthetic regression."""
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(samples, 8, dtype=torch.float64, generator=generator)
    y = (x @ torch.randn(8, 1, dtype=torch.float64, generator=generator)).tanh()
    return TensorDataset(x.to(dtype), y.to(dtype))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--checkpoints", type=Path)
    parser.add_argument("--weights", type=Path, help="where the trained weights are written")
    parser.add_argument("--shard", type=int, default=2, help="ranks of a replica")
    parser.add_argument("--samples", type=int, default=2000)
    parser.add_argument("--global-batch", type=int, default=24)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--every-steps", type=int, default=50)
    parser.add_argument("--memory-every", type=int, help="steps between saves to nodes' memory")
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--precision", choices=("fp32", "fp64"), default="fp32")
    options = parser.parse_args()
    dtype = torch.float64 if options.precision == "fp64" else torch.float32

    torch.manual_seed(0)
    folder = options.checkpoints
    saves = None
    if folder is not None:
        every, memory_every = options.every_steps, options.memory_every
        saves = elastic.Checkpoints(folder=folder, when=every, memory=memory_every)
    run = elastic.join(mesh={"shard": options.shard}, checkpoints=saves)
    model = Net(options.width, options.layers).to(run.device, dtype)
    for block in model.blocks:
        fully_shard(block, mesh=run.mesh["shard"])
    model = run.wrap(fully_shard(model, mesh=run.mesh["shard"]))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)  # after fully_shard
    run.track(optimizer=optimizer)
    data = waves(options.samples, dtype)
    loader = run.loader(
        DataLoader(data, batch_size=options.global_batch, shuffle=True),
        global_batch=options.global_batch,
    )

    def train() -> None:
        for epoch in run.epochs(options.epochs):
            losses = []  # empty if a world has ended after the last step of the epoch
            for x, y in loader:
                loss = F.mse_loss(model(x.to(run.device)), y.to(run.device))
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                losses.append(loss.item())
            seen = run.mean(len(losses), loss=sum(losses) / max(1, len(losses)))
            if run.is_main:
                print(json.dumps({"epoch": epoch, "replicas": run.world.replicas, **seen}))

    run.retry(train)
    complete = StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights = get_model_state_dict(model, options=complete)  # on all ranks of the replica
    if run.is_main and options.weights is not None:
        save_file(weights, options.weights)


if __name__ == "__main__":
    main()

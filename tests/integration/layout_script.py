"""Trains one model in the layout given by the arguments, starting from its newest checkpoint.

Run by ``test_checkpoints_of_replicas.py``: ``fsdp``, ``tp``, ``both`` in replicas, ``ddp``, and
``build`` (FSDP2 over the world). It saves the full weights and moments as ``result``.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.utils.data import DataLoader, TensorDataset

import elastic

WIDTH = 400  # the state is larger than its metadata in a checkpoint
MESHES: dict[str, dict[str, int] | None] = {
    "fsdp": {"shard": 2},
    "tp": {"tp": 2},
    "both": {"shard": 2, "tp": 2},
    "one": {"shard": 1},
    "ddp": None,
    "build": None,
}
PLAN = {"up": ColwiseParallel(), "down": RowwiseParallel()}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, WIDTH), nn.Linear(WIDTH, 6)
        self.head = nn.Linear(6, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x + self.down(torch.tanh(self.up(x))))  # type: ignore[no-any-return]


def network() -> Net:
    torch.manual_seed(5)
    return Net().double()


def data() -> TensorDataset:
    x = torch.randn(24, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return TensorDataset(x, x.sin().sum(1, keepdim=True))


def sharded(kind: str, run: elastic.Run) -> Any:
    model: Any = network()
    if kind in ("tp", "both"):
        parallelize_module(model, run.mesh["tp"], PLAN)
    if kind in ("fsdp", "both", "one"):
        fully_shard(model, mesh=run.mesh["shard"])
    return model


def built(mesh: Any) -> Any:
    model = network()
    fully_shard(model, mesh=mesh)
    return model, optimizer_of(model)


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def full(tensor: Any) -> torch.Tensor:
    whole: torch.Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return whole.detach().clone()


parser = argparse.ArgumentParser()
parser.add_argument("kind", choices=MESHES)
parser.add_argument("--checkpoints", required=True)
parser.add_argument("--epochs", type=int, required=True)
parser.add_argument("--memory", type=Path, help="the folder of a memory host, for all nodes")
options = parser.parse_args()

if options.memory is not None:
    os.environ["ELASTIC_NODE_MEMORY"] = str(options.memory)
memory_every = 2 if options.memory is not None else False
saves = elastic.Checkpoints(folder=options.checkpoints, when=4, memory=memory_every)
run = elastic.join(mesh=MESHES[options.kind], checkpoints=saves)
loader = run.loader(DataLoader(data(), batch_size=6, shuffle=True), global_batch=6)
result: dict[str, torch.Tensor] = {}
if options.kind != "build":
    wrapped = run.wrap(network() if options.kind == "ddp" else sharded(options.kind, run))
    optimizer = optimizer_of(wrapped)
    run.track(optimizer=optimizer)


def train() -> None:
    model, adam = run.build(built) if options.kind == "build" else (wrapped, optimizer)
    result["resumed"] = torch.tensor(run.state.get("epochs", 0))
    for epoch in run.epochs(options.epochs):
        for x, y in loader:
            adam.zero_grad()
            F.mse_loss(model(x), y).backward()  # type: ignore[no-untyped-call]
            # A fused step takes DTensors or plain tensors, not both; the setting is part of a
            # checkpoint, and is restored where the loop resumes.
            adam.param_groups[0]["fused"] = options.kind != "tp"
            adam.step()
        run.state["epochs"] = epoch + 1
    for name, parameter in model.named_parameters():
        short = name.removeprefix("module.")
        result[short] = full(parameter)
        for key in ("exp_avg", "exp_avg_sq"):
            result[f"{short} {key}"] = full(adam.state[parameter][key])


run.retry(train)

"""Tensor parallelism in the style of pytorch/examples: a toy MLP over all ranks, torch alone.

The same batch on every rank, and checkpoints by torch.distributed.checkpoint.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


class ToyModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net1, self.relu, self.net2 = nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net2(self.relu(self.net1(x)))  # type: ignore[no-any-return]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--checkpoint-dir", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--save-every", type=int, default=5)
    parser.add_argument("--step-s", type=float, default=0.0)
    args = parser.parse_args()

    size = int(os.environ["WORLD_SIZE"])
    mesh = init_device_mesh("cpu", (size,))
    torch.manual_seed(0)
    plan = {"net1": ColwiseParallel(), "net2": RowwiseParallel()}
    model = parallelize_module(ToyModel(), mesh, plan)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

    first = 0
    complete = [path.parent for path in args.checkpoint_dir.glob("step-*/.metadata")]
    if complete:
        newest = max(complete, key=lambda path: int(path.name.removeprefix("step-")))
        weights, state = get_state_dict(model, optimizer)
        saved: dict[str, Any] = {"model": weights, "optimizer": state, "step": 0}
        dcp.load(saved, checkpoint_id=newest)  # type: ignore[attr-defined]
        set_state_dict(
            model, optimizer, model_state_dict=weights, optim_state_dict=saved["optimizer"]
        )
        first = saved["step"]
    if mesh.get_rank() == 0:
        print(f"start at step {first} over {size} ranks", flush=True)

    for step in range(first + 1, args.steps + 1):
        torch.manual_seed(step)
        model(torch.rand(20, 10)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(args.step_s)
        if step % args.save_every == 0:
            weights, state = get_state_dict(model, optimizer)
            saved = {"model": weights, "optimizer": state, "step": step}
            folder = args.checkpoint_dir / f"step-{step}"
            dcp.save(saved, checkpoint_id=folder)  # type: ignore[attr-defined]
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

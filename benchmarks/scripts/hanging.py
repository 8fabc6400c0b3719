"""Steps of about 20 ms and a barrier each, in a job that hangs at the place that a file names.

A file ``hang-KIND`` in the folder, with the name of a node in it, is the order; the node's worker
takes it by deleting it.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import elastic


def take(folder: Path, kind: str, node: str) -> bool:
    """Whether this worker is ordered to do that now; once."""
    order = folder / f"hang-{kind}"
    if not order.exists() or order.read_text() != node:
        return False
    order.unlink()
    return True


class Looping(nn.Module):
    """A layer whose forward pass does not end when it is ordered so."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if take(self.folder, "loop", os.environ.get("ELASTIC_NODE_NAME", "")):
            while True:
                pass
        return x


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--step-s", type=float, default=0.015)
    options = parser.parse_args()
    torch.manual_seed(0)
    run = elastic.join()
    layers = nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 512)
    model = run.wrap(nn.Sequential(*layers, Looping(options.folder)))
    optimizer = torch.optim.AdamW(model.parameters())
    run.track(optimizer=optimizer)
    x = torch.randn(6144, 512, generator=torch.Generator().manual_seed(1))
    loader = run.loader(DataLoader(TensorDataset(x, x.roll(1, 1)), batch_size=48, shuffle=True))

    def train() -> None:
        node = run.world.node
        for _ in run.epochs(10_000):
            for inputs, targets in loader:
                optimizer.zero_grad()
                F.mse_loss(model(inputs), targets).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                if not take(options.folder, "skip", node):
                    dist.barrier()
                time.sleep(options.step_s)

    run.retry(train)


if __name__ == "__main__":
    main()

"""A job with ranks that are slow where they are told to be.

A file ``slow-data`` or ``slow-compute`` in the folder names the node whose worker is slow for as
long as the file is there: in its data set, or in its forward pass. All the while rank 0 does what
is no reason to call it slow: it evaluates after every other step, with a loader of its own.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import nn
from torch.utils.data import DataLoader, Dataset

import elastic
from elastic.testing.pacing import pause_after_step

COMPUTE_S = 0.04  # of every rank, in each step: more than a busy machine adds by chance
SLOW_S = 0.3  # of the slow one
EVALUATION_S = 0.3


class Orders:
    """Whether this process is to be slow; nobody is once the test is over."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.node = os.environ.get("ELASTIC_NODE_NAME", "")
        self.hurry = folder / "hurry"

    def is_slow(self, where: str) -> bool:
        if self.hurry.exists():
            return False
        try:
            return (self.folder / f"slow-{where}").read_text() == self.node
        except OSError:
            return False


class Waves(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Synthetic regression."""

    def __init__(self, n: int, seconds: float, orders: Orders) -> None:
        generator = torch.Generator().manual_seed(7)
        self.x = torch.randn(n, 8, dtype=torch.float64, generator=generator)
        self.y = (self.x @ torch.randn(8, 1, dtype=torch.float64, generator=generator)).tanh()
        self.seconds = seconds  # of a sample, where it is slow
        self.orders = orders

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        if self.orders.is_slow("data"):
            time.sleep(self.seconds)
        return self.x[index], self.y[index]


class Held(Dataset[int]):
    """What rank 0 evaluates on: slow to read."""

    def __init__(self, orders: Orders) -> None:
        self.orders = orders

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> int:
        time.sleep(0.0 if self.orders.hurry.exists() else EVALUATION_S / len(self))
        return index


class Working(nn.Module):
    """A layer that takes its time."""

    def __init__(self, orders: Orders) -> None:
        super().__init__()
        self.orders = orders

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.orders.hurry.exists():
            time.sleep(SLOW_S if self.orders.is_slow("compute") else COMPUTE_S)
        return x


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--samples", type=int, required=True)
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--epochs", type=int, required=True)
    parser.add_argument("--step-s", type=float, required=True)
    parser.add_argument("--save-every", type=int, required=True)
    options = parser.parse_args()
    orders = Orders(options.folder)

    torch.manual_seed(0)
    run = elastic.join(
        checkpoints=elastic.Checkpoints(
            folder=os.environ["ELASTIC_CHECKPOINTS"], when=options.save_every
        )
    )
    layers = nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)
    module = nn.Sequential(*layers, Working(orders)).double()
    model = run.wrap(module)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    run.track(optimizer=optimizer)
    loader = run.loader(
        DataLoader(
            Waves(options.samples, SLOW_S / 8, orders), batch_size=options.batch, shuffle=True
        ),
        global_batch=options.batch,
    )

    def train() -> None:
        for epoch in run.epochs(options.epochs):
            for step in run.steps(loader):
                (x, y), *_ = step
                optimizer.zero_grad()
                F.mse_loss(model(x), y).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                if run.is_main and step.number % 2:
                    list(DataLoader(Held(orders)))
                pause_after_step(orders.hurry, options.step_s, epoch / options.epochs)

    run.retry(train)
    if run.is_main:
        save_file(dict(module.state_dict()), options.folder / "final.safetensors")


if __name__ == "__main__":
    main()

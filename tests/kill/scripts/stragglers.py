"""A job with ranks that are slow on order.

A file ``slow-data`` or ``slow-compute`` in the folder names the node whose worker is slow while the
file exists: in its dataset, or in its forward pass. Rank 0 does legitimate extra work that must not
count as slow: it evaluates after every other step, with its own loader.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from regression_job import JobArguments, Waves, join, network, save_weights
from torch import nn
from torch.utils.data import DataLoader, Dataset

COMPUTE_S = 0.04  # of every rank, in each step: more than the noise of a busy machine
SLOW_S = 0.3  # of the slow one
EVALUATION_S = 0.3


class Orders:
    """Whether this process is ordered to be slow; none is once the test is over."""

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

    def be_slow_in_data(self) -> None:
        """Delay each sample; a rank reads eight per step."""
        if self.is_slow("data"):
            time.sleep(SLOW_S / 8)


class Held(Dataset[int]):
    """The evaluation data of rank 0: slow to read."""

    def __init__(self, orders: Orders) -> None:
        self.orders = orders

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> int:
        time.sleep(0.0 if self.orders.hurry.exists() else EVALUATION_S / len(self))
        return index


class Working(nn.Module):
    """A slow layer."""

    def __init__(self, orders: Orders) -> None:
        super().__init__()
        self.orders = orders

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.orders.hurry.exists():
            time.sleep(SLOW_S if self.orders.is_slow("compute") else COMPUTE_S)
        return x


def main() -> None:
    job = JobArguments.read()
    orders = Orders(job.folder)

    run = join(job)
    module = network(last=Working(orders))
    model = run.wrap(module)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    run.track(optimizer=optimizer)
    data = Waves(job.samples, orders.be_slow_in_data)
    loader = run.loader(
        DataLoader(data, batch_size=job.batch, shuffle=True), global_batch=job.batch
    )

    def train() -> None:
        for epoch in run.epochs(job.epochs):
            for step in run.steps(loader):
                (x, y), *_ = step
                optimizer.zero_grad()
                F.mse_loss(model(x), y).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                if run.is_main and step.number % 2:
                    list(DataLoader(Held(orders)))
                job.pause_after_step(epoch)

    run.retry(train)
    save_weights(run, module, job.folder)


if __name__ == "__main__":
    main()

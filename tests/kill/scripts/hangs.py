"""A job that hangs on order, in every way that a script can.

A file ``hang-KIND`` in the folder, which contains the name of a node and a number of seconds, is an
order; the node's worker (or its data worker) takes it by deleting the file. ``done-KIND`` confirms
it.
"""

from __future__ import annotations

import ctypes
import gc
import os
import pdb
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from kit import nccl_semantics
from regression_job import JobArguments, Waves, join, network, save_weights
from torch import nn
from torch.utils.data import DataLoader

FOR_EVER_S = 1e6
AHEAD = 20  # batches: a rank trains on for a second while its data worker hangs


class Orders:
    """The orders of this process."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.node = os.environ.get("ELASTIC_NODE_NAME", "")
        self.takes_s = 0.0  # the last order taken

    def take(self, kind: str) -> bool:
        """Whether it is ordered to do that now; true once per order."""
        order = self.folder / f"hang-{kind}"
        try:
            node, takes_s = order.read_text().split()
            if node not in (self.node, "any"):
                return False
            order.unlink()
        except OSError:
            return False  # there is no order, or another worker has taken it
        self.takes_s = float(takes_s)
        (self.folder / f"done-{kind}").write_text(f"{os.getpid()} {time.time()}")
        return True

    def is_given(self, name: str) -> bool:
        """Whether there is a file of that name."""
        return (self.folder / name).exists()

    def take_away(self, name: str) -> None:
        """Remove a file that is an order to all ranks."""
        (self.folder / name).unlink(missing_ok=True)

    def hang_in_a_data_worker(self) -> None:
        """Hang before reading a sample."""
        if self.take("loader"):
            time.sleep(FOR_EVER_S)


class Slow:
    """Garbage that is slow to collect."""

    def __init__(self, takes_s: float) -> None:
        self.itself = self
        self.takes_s = takes_s

    def __del__(self) -> None:
        time.sleep(self.takes_s)


def wait_for_nobody(orders: Orders, device: torch.device) -> None:
    """Wait for a message without a sender, as all other ranks do in the same step."""
    orders.take_away("lost-message")
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    torch.distributed.recv(torch.zeros(1, device=device), src=(rank + 1) % size)


class Hanging(nn.Module):
    """A layer that hangs in its forward pass on order."""

    def __init__(self, orders: Orders) -> None:
        super().__init__()
        self.orders = orders

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hang(self.orders)
        return x


def hang(orders: Orders) -> None:
    """Hang in the ordered way."""
    if orders.take("loop"):
        while True:
            pass
    if orders.take("sleep"):
        time.sleep(FOR_EVER_S)
    if orders.take("locked"):  # in C, with the interpreter lock
        while True:
            ctypes.PyDLL(None).sleep(600)
    if orders.take("garbage"):
        gc.disable()  # otherwise a young collection may find it first
        Slow(orders.takes_s)
        gc.collect()
        gc.enable()
    if orders.take("breakpoint"):
        with (orders.folder / "answers").open() as answers:
            pdb.Pdb(stdin=answers, stdout=sys.stdout, nosigint=True).set_trace()
            orders.take("nothing")  # the prompt opens here


def main() -> None:
    job = JobArguments.read()
    if os.environ.get("TRAINING_BACKEND") == nccl_semantics.NAME:
        nccl_semantics.use_by_default()
    orders = Orders(job.folder)

    run = join(job)
    module = network(last=Hanging(orders)).to(run.device)
    model = run.wrap(module)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    run.track(optimizer=optimizer)
    data = Waves(job.samples, orders.hang_in_a_data_worker)
    loader = run.loader(
        DataLoader(data, batch_size=job.batch, shuffle=True, num_workers=1, prefetch_factor=AHEAD),
        global_batch=job.batch,
    )

    is_lost = False

    def train() -> None:
        nonlocal is_lost
        for epoch in run.epochs(job.epochs):
            for step in run.steps(loader):
                (x, y), *_ = step
                x, y = x.to(run.device), y.to(run.device)
                optimizer.zero_grad()
                if orders.take("before-forward"):
                    time.sleep(orders.takes_s)
                if is_lost:
                    is_lost = False  # not when the step is repeated
                    wait_for_nobody(orders, run.device)
                loss = F.mse_loss(model(x), y)
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                if orders.take("evaluation"):
                    time.sleep(orders.takes_s)
                if orders.take("checkpoint"):
                    time.sleep(orders.takes_s)
                # After the mean, and only then, all ranks know what one rank has seen.
                seen = {"loss": loss.item(), "lost": float(orders.is_given("lost-message"))}
                if orders.take("order"):
                    torch.distributed.barrier()
                    run.mean(1.0, **seen)
                else:
                    is_lost = run.mean(1.0, **seen)["lost"] > 0
                    if not orders.take("skip"):
                        torch.distributed.barrier()
                job.pause_after_step(epoch)

    run.retry(train)
    save_weights(run, module, job.folder)


if __name__ == "__main__":
    main()

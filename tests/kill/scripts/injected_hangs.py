"""A job that hangs on order: any action at any place of a training step.

The file ``inject`` in the folder is the order: node, action and place, one word each. The process
that reaches that place takes it by deleting the file, and writes its pid and the time to
``injected``.
"""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from regression_job import JobArguments, Waves, join, network, save_weights
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

FOR_EVER_S = 1e6


class Injections:
    """The orders of this process and its data workers."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.node = os.environ.get("ELASTIC_NODE_NAME", "")

    def take(self, action: str, place: str) -> bool:
        """Whether it is ordered to do exactly that; true once per order."""
        return self._taken(place, action) is not None

    def at(self, place: str) -> None:
        """The process is at ``place``: hang if it is ordered to hang there."""
        action = self._taken(place)
        if action is not None:
            ACTIONS[action](self.folder)

    def is_due(self, place: str) -> bool:
        """Whether this node is to hang there."""
        return self._order()[::2] == (self.node, place)

    def _order(self) -> tuple[str, ...]:
        try:
            return tuple((self.folder / "inject").read_text().split())
        except OSError:
            return ()

    def _taken(self, place: str, action: str | None = None) -> str | None:
        order = self._order()
        if order[::2] != (self.node, place) or (action is not None and order[1] != action):
            return None
        try:
            (self.folder / "inject").unlink()
        except OSError:
            return None  # another process of this node has taken it
        staged = self.folder / "injected.new"
        staged.write_text(f"{os.getpid()} {time.time()}")
        staged.rename(self.folder / "injected")
        return order[1]


def stop(folder: Path) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def loop(folder: Path) -> None:
    while True:
        pass


def sleep(folder: Path) -> None:
    time.sleep(FOR_EVER_S)


def locked(folder: Path) -> None:
    """Block in C while holding the interpreter lock."""
    while True:
        ctypes.PyDLL(None).sleep(600)


def deadlock(folder: Path) -> None:
    lock = threading.Lock()
    with lock, lock:
        pass


def fifo(folder: Path) -> None:
    """A read that never returns, as from a lost file system."""
    path = folder / f"fifo-{os.getpid()}"
    os.mkfifo(path)
    os.read(os.open(path, os.O_RDWR), 1)


ACTIONS: Mapping[str, Callable[[Path], None]] = {
    "stop": stop,
    "loop": loop,
    "sleep": sleep,
    "locked": locked,
    "deadlock": deadlock,
    "fifo": fifo,
}


class Labels(Dataset[torch.Tensor]):
    """Read by the training process."""

    def __init__(self, injections: Injections) -> None:
        self.injections = injections

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> torch.Tensor:
        self.injections.at("data")
        return torch.zeros(1)


class Hanging(nn.Module):
    """A layer that hangs in its forward or backward pass, or in evaluation."""

    def __init__(self, injections: Injections) -> None:
        super().__init__()
        self.injections = injections

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.injections.at("forward" if self.training else "evaluation")
        if x.requires_grad:
            x.register_hook(self._in_backward)  # type: ignore[no-untyped-call]
        return x

    def _in_backward(self, gradient: torch.Tensor) -> None:
        self.injections.at("backward")


class HangingSGD(torch.optim.SGD):
    """Hangs in its update."""

    injections: Injections

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        self.injections.at("optimizer")
        super().step(closure)


class Meter:
    """An object of the script with a ``state_dict``, which is called between two steps."""

    def __init__(self, injections: Injections) -> None:
        self.injections = injections

    def state_dict(self) -> dict[str, int]:
        self.injections.at("state")
        return {"nothing": 0}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.injections.at("restore")


def main() -> None:
    job = JobArguments.read()
    injections = Injections(job.folder)

    run = join(job)
    module = network(within=Hanging(injections))
    model = run.wrap(module)
    optimizer = HangingSGD(model.parameters(), lr=0.05, momentum=0.9)
    optimizer.injections = injections
    run.track(optimizer=optimizer, meter=Meter(injections))
    data = Waves(job.samples, partial(injections.at, "loader"))
    loader = run.loader(
        DataLoader(data, batch_size=job.batch, shuffle=True, num_workers=1), global_batch=job.batch
    )
    labels = DataLoader(Labels(injections))
    held_out = DataLoader(TensorDataset(data.x), batch_size=64)

    def evaluate() -> None:
        model.eval()
        with torch.no_grad():
            for (x,) in held_out:
                model(x)
        model.train()  # type: ignore[no-untyped-call]

    def train() -> None:
        for epoch in run.epochs(job.epochs):
            for x, y in loader:
                optimizer.zero_grad()
                injections.at("before-forward")
                next(iter(labels))
                loss = F.mse_loss(model(x), y)
                loss.backward()  # type: ignore[no-untyped-call]
                injections.at("before-update")
                optimizer.step()
                if injections.is_due("evaluation"):
                    evaluate()
                injections.at("after-update")
                if injections.take("order", "collectives"):
                    torch.distributed.barrier()
                    run.mean(1.0, loss=loss.item())
                else:
                    run.mean(1.0, loss=loss.item())
                    if not injections.take("skip", "collectives"):
                        torch.distributed.barrier()
                job.pause_after_step(epoch)

    run.retry(train)
    save_weights(run, module, job.folder)


if __name__ == "__main__":
    main()

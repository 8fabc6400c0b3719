"""A training loop with data workers, an evaluation and a callback, which fails there on order.

A file ``fail-PLACE`` with the name of a node is an order: that node's worker takes it (by deleting
the file). Its process then exists until the file ``may-end`` does, as with loggers that flush.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
import time
from pathlib import Path

import torch
from job_arguments import job_parser
from torch import nn
from torch.utils.data import DataLoader, Dataset

import elastic
from elastic.testing.pacing import pause_after_step

NODE = os.environ.get("ELASTIC_NODE_NAME", "")
CUDA_ERROR = (
    "CUDA error: an illegal memory access was encountered\n"
    "CUDA kernel errors might be asynchronously reported at some other API call"
)


def is_told(folder: Path, place: str) -> bool:
    order = folder / f"fail-{place}"
    try:
        if order.read_text() != NODE:
            return False
        order.unlink()
    except FileNotFoundError:
        return False
    return True


def end_slowly(may_end: Path) -> None:
    while not may_end.exists():
        time.sleep(0.05)


class Rows(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    def __init__(self, samples: int, folder: Path) -> None:
        self.x, self.folder = torch.randn(samples, 4, dtype=torch.float64), folder

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        if is_told(self.folder, "data-worker"):
            os.kill(os.getpid(), signal.SIGKILL)
        return self.x[index], self.x[index].sin()


def main() -> None:
    options = job_parser().parse_args()
    atexit.register(end_slowly, options.folder / "may-end")  # not in data workers
    torch.manual_seed(0)
    run = elastic.join(
        checkpoints=elastic.Checkpoints(
            folder=os.environ["ELASTIC_CHECKPOINTS"], when=options.save_every
        )
    )
    model = run.wrap(nn.Linear(4, 4).double())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    run.track(optimizer=optimizer)
    data = Rows(options.samples, options.folder)
    loader = run.loader(DataLoader(data, batch_size=options.batch, num_workers=1), global_batch=24)

    def after_step(_: elastic.Step) -> None:
        if is_told(options.folder, "callback"):
            raise KeyError("failed in the callback")

    def evaluate() -> None:
        if is_told(options.folder, "evaluation"):
            raise ZeroDivisionError("failed in the evaluation")
        run.mean(1, error=float(nn.functional.mse_loss(model(data.x), data.x.sin())))

    def train() -> None:
        for epoch in run.epochs(options.epochs):
            for x, y in loader:
                optimizer.zero_grad()
                loss = nn.functional.mse_loss(model(x), y)
                if is_told(options.folder, "cuda"):
                    raise RuntimeError(CUDA_ERROR)
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                if is_told(options.folder, "exit"):
                    sys.exit(3)
                if is_told(options.folder, "silent-exit"):
                    os._exit(0)
                pause_after_step(options.folder / "hurry", options.step_s, epoch / options.epochs)
            evaluate()

    run.after_step(after_step)
    run.retry(train)


if __name__ == "__main__":
    main()

"""A training script whose disk, process and code fail on order.

It trains the workload of session.py to the same weights. A file in the folder is an order:
``disk-hang``, ``disk-full``, ``disk-readonly`` and ``late-notice`` apply while they exist, on the
node named in them or on all; ``die-writing`` and ``raise`` apply once.
"""

from __future__ import annotations

import errno
import os
import signal
import time
from dataclasses import replace
from pathlib import Path

import torch
from job_arguments import job_parser
from safetensors.torch import save_file
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import elastic
from checkpoints import EverySeconds, EverySteps, LocalStorage, OnPreemption
from checkpoints.testing import FaultyStorage
from elastic.testing.pacing import pause_after_step
from elastic.train.order import ControlFlags, StepFlags

_REFUSALS = {"disk-full": errno.ENOSPC, "disk-readonly": errno.EROFS}


class Orders:
    """The orders of this process."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.node = os.environ.get("ELASTIC_NODE_NAME", "")

    def is_active(self, name: str) -> bool:
        try:
            return (self.folder / name).read_text() in ("", self.node)
        except OSError:
            return False

    def take(self, name: str) -> bool:
        """Whether the order is for this process; if so, the file is removed."""
        if not self.is_active(name):
            return False
        try:
            (self.folder / name).unlink()
        except FileNotFoundError:
            return False
        return True

    def before(self, label: str) -> None:
        """Called before every call of the storage."""
        if not label.startswith("write ") or "safetensors" not in label:
            return
        while self.is_active("disk-hang"):
            time.sleep(0.02)
        for name, number in _REFUSALS.items():
            if self.is_active(name):
                raise OSError(number, os.strerror(number))
        if self.take("die-writing"):
            os.kill(os.getpid(), signal.SIGKILL)


def delay_notices(orders: Orders) -> None:
    """On the order ``late-notice``: notices that a node leaves come after this step's flags."""
    send = ControlFlags.send

    def send_without_notice(self: ControlFlags, flags: StepFlags) -> None:
        send(self, replace(flags, leaving=flags.leaving and not orders.is_active("late-notice")))

    ControlFlags.send = send_without_notice  # type: ignore[method-assign]


def main() -> None:
    parser = job_parser()
    parser.add_argument("--seconds", type=float, default=0.0, help="save by the clock instead")
    options = parser.parse_args()
    orders, hurry = Orders(options.folder), options.folder / "hurry"
    delay_notices(orders)

    torch.manual_seed(0)
    disk = FaultyStorage(LocalStorage(os.environ["ELASTIC_CHECKPOINTS"]), before=orders.before)
    when = EverySteps(options.save_every) | OnPreemption()
    if options.seconds:
        when = EverySeconds(options.seconds) | OnPreemption()
    run = elastic.join(checkpoints=disk, when=when, keep=1000)  # all of them
    module = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)).double()
    model = run.wrap(module)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    run.track(optimizer=optimizer)
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(options.samples, 8, dtype=torch.float64, generator=generator)
    y = (x @ torch.randn(8, 1, dtype=torch.float64, generator=generator)).tanh()
    loader = run.loader(
        DataLoader(TensorDataset(x, y), batch_size=options.batch, shuffle=True),
        global_batch=options.batch,
    )

    def train() -> None:
        for epoch in run.epochs(options.epochs):
            for inputs, targets in loader:
                loss = nn.functional.mse_loss(model(inputs), targets)
                if orders.take("raise"):
                    raise ValueError("told to raise")
                optimizer.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                pause_after_step(hurry, options.step_s, epoch / options.epochs)

    run.retry(train)
    if run.is_main:
        weights = {k: v.detach().clone() for k, v in module.state_dict().items()}
        save_file(weights, options.folder / "final.safetensors")


if __name__ == "__main__":
    main()

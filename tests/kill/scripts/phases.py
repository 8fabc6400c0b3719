"""A GAN with two optimizers, schedulers, an average and evaluation, which dies at ordered points.

A file ``die-POINT`` in the folder, with JSON ``{"node", "step"}`` (null: any), is an order; the
first worker that reaches the point takes it (by deleting the file) and kills itself.
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from job_arguments import job_parser
from kit import nccl_semantics
from safetensors.torch import save_file
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import elastic
from elastic.groups.group import ProcessGroup
from elastic.testing.pacing import pause_after_step
from elastic.train import transfer


class Orders:
    """The orders of this worker to die."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.node = os.environ.get("ELASTIC_NODE_NAME", "")
        self.step = -1
        self.crash_at = int(os.environ.get("CRASH_AFTER_STEPS", "0"))  # of this process's own
        self.steps = 0

    def next_step(self, number: int) -> None:
        """Crash repeatedly, if this node is configured to."""
        self.step, self.steps = number, self.steps + 1
        if self.steps == self.crash_at:
            raise ValueError("crashes every time")

    def obey(self, point: str) -> None:
        """Die if ordered to."""
        order = self.folder / f"die-{point}"
        try:
            told = json.loads(order.read_text())
        except (OSError, ValueError):
            return
        if told["node"] not in (None, self.node) or told["step"] not in (None, self.step):
            return
        try:
            order.unlink()
        except FileNotFoundError:
            return  # another worker has taken it
        if point in ("hang-in-abort", "hang-in-build"):  # its own process group, from now on
            setattr(nccl_semantics.control, point.replace("-", "_"), True)
            return
        if point == "raise":
            atexit.register(end_slowly, self.folder)
            raise ValueError("told to raise")
        if point == "give-up":  # as for a broken connection without a death
            raise torch.distributed.DistNetworkError("told to give up")
        os.kill(os.getpid(), signal.SIGKILL)


def end_slowly(folder: Path) -> None:
    """As exit handlers of loggers do: the process exists until the test has seen what it wants."""
    while not (folder / "may-end").exists():
        time.sleep(0.05)


def arrange(orders: Orders) -> None:
    """Install the points inside the library."""
    finish_chunk, check = transfer.ChunkedTransfer.finish_chunk, transfer.check_hashes
    build = ProcessGroup.build

    def is_joining() -> bool:
        """Not a survivor, which receives the state, too, if it is a step behind."""
        return orders.steps == 0

    def moving(self: Any, sent: Any) -> None:  # once a chunk is in transit
        if self._flat and (self._is_source or is_joining()):
            orders.obey("sending" if self._is_source else "receiving")
        finish_chunk(self, sent)

    def checking(digests: Any, route: transfer.TransferRoute, group: Any) -> None:
        if group.rank in route.sources:
            orders.obey("sent")
        elif group.rank in route.receivers and is_joining():
            orders.obey("received")
        check(digests, route, group)

    def building(*args: Any, **kwargs: Any) -> None:
        orders.obey("before-build")
        build(*args, **kwargs)
        orders.obey("after-build")

    transfer.ChunkedTransfer.finish_chunk = moving  # type: ignore[method-assign]
    transfer.check_hashes = checking
    ProcessGroup.build = building  # type: ignore[method-assign]


def main() -> None:
    options = job_parser().parse_args()
    if os.environ.get("TRAINING_BACKEND") == nccl_semantics.NAME:
        nccl_semantics.use_by_default()
    orders = Orders(options.folder)
    arrange(orders)

    torch.manual_seed(0)
    run = elastic.join(
        checkpoints=elastic.Checkpoints(
            folder=os.environ["ELASTIC_CHECKPOINTS"], when=options.save_every
        )
    )
    hurry, swallow = options.folder / "hurry", options.folder / "swallow"
    generator_net = (
        nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 4)).double().to(run.device)
    )
    critic_net = (
        nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1)).double().to(run.device)
    )
    g, d = run.wrap(generator_net), run.wrap(critic_net)
    opt_g = torch.optim.Adam(g.parameters(), lr=1e-3)
    opt_d = torch.optim.SGD(d.parameters(), lr=1e-2, momentum=0.5)
    per_step = torch.optim.lr_scheduler.ExponentialLR(opt_g, 0.9995)
    per_epoch = torch.optim.lr_scheduler.StepLR(opt_d, 2, 0.9)
    run.track(opt_g=opt_g, opt_d=opt_d, per_step=per_step, per_epoch=per_epoch)
    average = {k: v.detach().clone() for k, v in generator_net.state_dict().items()}
    run.track(average=Average(average))

    def update_average(step: Any) -> None:
        for name, value in generator_net.state_dict().items():
            average[name].lerp_(value, 0.05)

    run.after_step(update_average)
    rows = torch.randn(
        options.samples, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(3)
    )
    rows = rows.to(run.device)
    data = TensorDataset(rows, rows.sin())
    loader = run.loader(DataLoader(data, batch_size=options.batch, shuffle=True), global_batch=24)
    held_out = DataLoader(TensorDataset(rows[:50], rows[:50].sin()), batch_size=7)

    def dying(grad: torch.Tensor) -> torch.Tensor:
        orders.obey("backward")
        return grad

    def evaluate() -> None:
        g.eval()
        total, count = 0.0, 0
        with torch.no_grad():
            for x, y in run.shard(held_out):
                orders.obey("evaluation")
                total += float(F.mse_loss(g(x), y, reduction="sum"))
                count += len(x)
        g.train()  # type: ignore[no-untyped-call]
        found = run.mean(count, error=total / max(count, 1))["error"]
        run.state["errors"] = [*run.state.get("errors", []), found]

    def update(step: Any, x: torch.Tensor, real: torch.Tensor) -> None:
        opt_d.zero_grad()
        orders.obey("forward")
        orders.obey("raise")
        orders.obey("give-up")
        orders.obey("hang-in-abort")
        orders.obey("hang-in-build")
        fake = g(x).detach()
        loss = F.softplus(-d(real)).mean() + 0.1 * fake.square().mean()
        loss.register_hook(dying)
        step.backward(loss)
        opt_d.step()
        orders.obey("between")
        opt_g.zero_grad()
        made = g(x)
        step.backward(F.mse_loss(made, real) + 0.01 * F.softplus(-critic_net(made)).mean())
        opt_g.step()
        orders.obey("after-optimizer")
        per_step.step()
        orders.obey("after-scheduler")

    def train() -> None:
        for epoch in run.epochs(options.epochs):
            for step in run.steps(loader):
                orders.next_step(step.number)
                for x, real in step:
                    try:
                        update(step, x, real)
                    except Exception:
                        if not swallow.exists():
                            raise
                pause_after_step(hurry, options.step_s, epoch / options.epochs)
            evaluate()
            per_epoch.step()

    run.retry(train)
    if run.is_main:
        final = {f"g.{k}": v.detach().clone() for k, v in generator_net.state_dict().items()}
        final |= {f"d.{k}": v.detach().clone() for k, v in critic_net.state_dict().items()}
        final |= {f"average.{k}": v for k, v in average.items()}
        rates = [float(o.param_groups[0]["lr"]) for o in (opt_g, opt_d)]
        final["rates"] = torch.tensor(rates, dtype=torch.float64)
        final["errors"] = torch.tensor(run.state["errors"], dtype=torch.float64)
        save_file(final, options.folder / "final.safetensors")


class Average:
    """An exponential average of the weights, with a ``state_dict``."""

    def __init__(self, values: dict[str, torch.Tensor]) -> None:
        self.values = values

    def state_dict(self) -> dict[str, torch.Tensor]:
        return dict(self.values)

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        for name, value in state.items():
            self.values[name].copy_(value)


if __name__ == "__main__":
    main()

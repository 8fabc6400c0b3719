"""Wrappers around optimizers and schedulers are tracked as they are, with their whole state."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from kit.run_kit import dataset, network, process, undo_step
from torch.optim import Adam, Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

from elastic.train.copies import copied


class Delegating(Optimizer):
    """As an AcceleratedOptimizer: an Optimizer without the attributes of one."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self.steps = 0

    state = property(lambda self: self.optimizer.state)
    param_groups = property(lambda self: self.optimizer.param_groups)
    defaults = property(lambda self: self.optimizer.defaults)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.optimizer.step()
        self.steps += 1

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state_dict)


class Counting(Delegating):
    """With state of its own."""

    def state_dict(self) -> dict[str, Any]:
        return {"inner": self.optimizer.state_dict(), "steps": self.steps}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state_dict["inner"])
        self.steps = state_dict["steps"]


class Schedule:
    """A scheduler of its own class, which exposes its optimizer, and has a history."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self.rates: list[float] = []

    def step(self) -> None:
        self.rates.append(0.01 / (len(self.rates) + 1))
        for group in self.optimizer.param_groups:
            group["lr"] = self.rates[-1]

    def state_dict(self) -> dict[str, Any]:
        return {"rates": self.rates}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.rates = state["rates"]


class WrappedSchedule:
    """As an AcceleratedScheduler."""

    def __init__(self, optimizer: Delegating) -> None:
        self.optimizers = [optimizer]
        self.scheduler = LambdaLR(optimizer.optimizer, lambda n: 1 / (n + 1))

    def step(self) -> None:
        self.scheduler.step()

    def state_dict(self) -> dict[str, Any]:
        return self.scheduler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.scheduler.load_state_dict(state)


@pytest.mark.parametrize("wrap", [Delegating, Counting])
@pytest.mark.parametrize("schedule", [Schedule, WrappedSchedule])
@pytest.mark.parametrize("hidden", [8, 400])
def test_an_interrupted_step_is_undone_in_all_of_them(
    tmp_path: Path,
    wrap: Callable[[Optimizer], Delegating],
    schedule: Callable[[Delegating], Any],
    hidden: int,
) -> None:
    with process(tmp_path, every_steps=100) as run:
        model = run.wrap(network(hidden))
        optimizer = wrap(Adam(model.parameters(), lr=0.01))
        scheduler = schedule(optimizer)
        run.track(optimizer=optimizer, scheduler=scheduler)
        loader = run.loader(DataLoader(dataset(), batch_size=10), global_batch=10)
        before: Any = None
        for _ in run.epochs(1):
            for i, (x, y) in enumerate(loader, start=loader.index):
                if i == 3:
                    before = copied([optimizer.state_dict(), scheduler.state_dict()])
                optimizer.zero_grad()
                F.mse_loss(model(x), y).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                scheduler.step()
                if i == 3:
                    undo_step(run)
                    break
        after = [optimizer.state_dict(), scheduler.state_dict()]
        torch.testing.assert_close(after, before, rtol=0, atol=0)

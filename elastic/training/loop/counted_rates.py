"""Refuses learning rates that depend on a count which begins anew when a pass resumes.

``enumerate(loader)`` counts from 0 even if the pass begins in the middle of an epoch, after a death
or from a checkpoint. Counts that are printed do no harm. A learning rate computed from one, as in
``adjust_learning_rate(optimizer, epoch + i / iters)`` or ``scheduler.step(epoch + i / iters)``,
would be that of another step, without an error. So it is refused in the first steps of a job.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingWarmRestarts

from elastic.errors import TrainingError

_IN_A_ROW = 3  # steps in which the script changes a rate: one may be a reaction to the loss


class CountedRates:
    """Watches the learning rates during one pass whose batches are counted from a constant.

    ``tracked`` and ``user``: the job's tracked objects and ``run.state``, which may have a count of
    their own.
    """

    def __init__(self, tracked: Mapping[str, object], user: Mapping[str, object]) -> None:
        self._optimizers = [t for t in tracked.values() if isinstance(t, torch.optim.Optimizer)]
        self._restarts = [t for t in tracked.values() if isinstance(t, CosineAnnealingWarmRestarts)]
        without_a_count = (torch.optim.Optimizer, nn.Module, torch.amp.GradScaler)
        self._has_counter = any(not isinstance(t, without_a_count) for t in tracked.values())
        self._user = user
        self._before: list[float] = []
        self._changes = 0

    def step_began(self) -> None:
        """Before the script's code of a step."""
        if not self._has_counter:
            self._before = self._rates()

    def step_ended(self, number: int) -> None:
        """After the script's code of step ``number``: raise TrainingError if the rates follow the
        count."""
        # Not before the first step: the script may begin its count there.
        if any(isinstance(value, int) for value in self._user.values()):
            return
        if any(float(scheduler.T_cur) % 1 for scheduler in self._restarts):
            raise _refusal(number, "scheduler.step(epoch + i / len(loader)) gets")
        if self._has_counter:
            return
        self._changes = self._changes + 1 if self._rates() != self._before else 0
        if self._changes >= _IN_A_ROW:
            raise _refusal(number, "the learning rate changes in every step, and follows")

    def _rates(self) -> list[float]:
        groups = [group for optimizer in self._optimizers for group in optimizer.param_groups]
        return [group["lr"] for group in groups if isinstance(group.get("lr"), float)]


def _refusal(number: int, what: str) -> TrainingError:
    return TrainingError(
        f"step {number}: {what} a count from enumerate(loader), which begins at 0 again if the "
        "loop resumes in the middle of an epoch",
        hint="for i, batch in enumerate(loader, start=loader.index):",
    )

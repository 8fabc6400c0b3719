"""Restores the training mode of modules when the training function is called again.

A fault may interrupt an evaluation between ``model.eval()`` and ``model.train()``. The function is
called again, and scripts rarely begin with ``model.train()``: this rank would continue in eval
mode, where a wrapped module runs without collectives, while a joining process trains. So each call
begins with the modes of the first one, as it does in a joining process.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from elastic.training.state.job_state import JobState


class TrainingModes:
    """The modes of wrapped and tracked modules before the training function. One per process."""

    def __init__(self, job: JobState) -> None:
        self._job = job
        self._recorded: list[tuple[nn.Module, bool]] = []

    def begin_attempt(self, *, is_again: bool) -> None:
        """Called before each call of the function."""
        if not is_again:
            self._recorded = [(m, m.training) for m in self._modules()]
            return
        for module, is_training in self._recorded:
            module.training = is_training  # not train(), which classes override

    def _modules(self) -> Iterable[nn.Module]:
        job = self._job
        objects = (*job.modules.values(), *job.all_modules.values(), *job.tracked.values())
        return (m for one in objects if isinstance(one, nn.Module) for m in one.modules())

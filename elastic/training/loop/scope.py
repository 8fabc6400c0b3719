"""The part of the API that the script is currently in."""

from __future__ import annotations

from dataclasses import dataclass, field

from elastic.training.loop.generators import EarlierGenerators


class CallEnded(BaseException):
    """Ends a call of the training function that has returned on another rank: no step is left.

    Not an Exception, which the script may catch.
    """


@dataclass
class Scope:
    """The script's scope. One per process."""

    in_retry: bool = False  # within run.retry, run.attempts, or after run.begin
    owns_epochs: bool = False  # run.epochs counts epochs; otherwise each pass over a loader is one
    epochs: int | None = None  # the count of run.epochs
    total_steps: int | None = None  # of the job, from run.plan_steps
    resumed_at: int = 0  # the step within its epoch at which the last pass began
    passes: int = 0  # in this attempt, over loaders without ``run.epochs``
    epoch_steps: dict[int, int] = field(default_factory=dict)  # of each loader, by its id
    generators: EarlierGenerators = field(default_factory=EarlierGenerators)

    def plan(self, loader_id: int, steps: int) -> int:
        """Record this loader's steps per epoch. Returns the job's total number of steps."""
        self.epoch_steps[loader_id] = steps
        if self.total_steps is not None:
            return self.total_steps
        return (self.epochs or 0) * sum(self.epoch_steps.values())

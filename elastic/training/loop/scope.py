"""The part of the API that the script is inside of."""

from __future__ import annotations

from dataclasses import dataclass, field

from elastic.training.loop.generators import EarlierGenerators


@dataclass
class Scope:
    """One per process."""

    in_retry: bool = False  # within run.retry, run.attempts, or after run.begin
    owns_epochs: bool = False  # run.epochs counts them, otherwise each pass of a loader is one
    epochs: int | None = None  # that run.epochs counts to
    total_steps: int | None = None  # of the job, as run.plan_steps has said
    resumed_at: int = 0  # the step within its epoch at which the last pass has begun
    passes: int = 0  # of this attempt, over loaders without ``run.epochs``
    epoch_steps: dict[int, int] = field(default_factory=dict)  # of each loader, by its id
    generators: EarlierGenerators = field(default_factory=EarlierGenerators)

    def plan(self, loader_id: int, steps: int) -> int:
        """Each epoch has ``steps`` of this loader; how many steps the job is to make in all."""
        self.epoch_steps[loader_id] = steps
        if self.total_steps is not None:
            return self.total_steps
        return (self.epochs or 0) * sum(self.epoch_steps.values())

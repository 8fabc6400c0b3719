"""What a rank trains, and how far it is: shared by the loops, recovery and the process's end."""

from __future__ import annotations

from dataclasses import dataclass

from elastic.training.current_step import CurrentStep
from elastic.training.recovery.progress import RankProgress
from elastic.training.state.job_state import JobState
from elastic.training.state.optimizers import OptimizerGuard
from elastic.training.state.registry import Registry


@dataclass(frozen=True, slots=True)
class TrainingState:
    """One per process."""

    registry: Registry  # what the script has registered
    current: CurrentStep  # the step that has begun
    progress: RankProgress  # the commit that the weights belong to

    @property
    def job(self) -> JobState:
        """The state of the job."""
        return self.registry.job

    @property
    def guard(self) -> OptimizerGuard:
        """What watches the registered optimizers."""
        return self.registry.guard

"""A rank's training state, which the loops, recovery and the end of the process share."""

from __future__ import annotations

from dataclasses import dataclass

from elastic.training.current_step import CurrentStep
from elastic.training.recovery.progress import RankProgress
from elastic.training.state.job_state import JobState
from elastic.training.state.optimizers import OptimizerWatch
from elastic.training.state.registry import Registry


@dataclass(frozen=True, slots=True)
class TrainingState:
    """The training state. One per process."""

    registry: Registry  # objects registered by the script
    current: CurrentStep  # the step that has begun
    progress: RankProgress  # the commit to which the weights belong

    @property
    def job(self) -> JobState:
        """The state of the job."""
        return self.registry.job

    @property
    def optimizer_watch(self) -> OptimizerWatch:
        """The watch on registered optimizers."""
        return self.registry.optimizer_watch

"""The facts about a rank's steps: their durations, by part."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Annotated

from msgspec import Meta

# Checked when a record or a message is read.
_Seconds = Annotated[float, Meta(ge=0)]
_Count = Annotated[int, Meta(ge=0)]
_Positive = Annotated[int, Meta(ge=1)]


class StepPart(IntEnum):
    """The part of a step on which time was spent."""

    DATA = 0  # waiting for a batch
    COMPUTE = 1  # forward and backward pass, the optimizer's update
    COLLECTIVE = 2  # waiting for other ranks
    CHECKPOINT = 3
    SCRIPT = 4  # the script's own code, evaluation

    @property
    def label(self) -> str:
        """For events and sentences."""
        return _LABELS[self]


_LABELS = {
    StepPart.DATA: "data wait",
    StepPart.COMPUTE: "compute",
    StepPart.COLLECTIVE: "collective",
    StepPart.CHECKPOINT: "checkpoint",
    StepPart.SCRIPT: "script",
}


@dataclass(frozen=True, kw_only=True)
class StepDurations:
    """The steps of one rank in one window: means per step, without the slowest tenth of them."""

    generation: _Count
    window: _Count  # grows with every window of the process
    steps: _Positive  # over which the means are taken
    samples: _Count  # of this rank in those steps; 0: not known, or it had none
    data_s: _Seconds
    compute_s: _Seconds
    collective_s: _Seconds
    checkpoint_s: _Seconds
    script_s: _Seconds

    @property
    def own_s(self) -> float:
        """The time of a step that this rank needs before the others can continue.

        Excludes the wait for others, and parts that are legitimately long on one rank: checkpoints,
        and the script's own code, which evaluates and logs on rank 0.
        """
        return self.data_s + self.compute_s

    @property
    def step_s(self) -> float:
        """The duration of a step."""
        return self.own_s + self.collective_s + self.checkpoint_s + self.script_s


@dataclass(frozen=True, kw_only=True)
class RankStepTimes:
    """The step times of one worker of a node."""

    local_rank: _Count
    times: StepDurations

"""The boundary between two steps: all earlier steps are committed, so the job can save or leave."""

from __future__ import annotations

import torch

from elastic.training.checkpointing.manager import CheckpointManager
from elastic.training.halt import Halt
from elastic.training.lifecycle import Lifecycle
from elastic.training.recovery.selection import Strategies
from elastic.training.recovery.training_state import TrainingState
from elastic.worker.worlds import Worlds


class StepBoundary:
    """Actions between two steps. One per process. ``worlds``: the link to the agent, if any."""

    def __init__(
        self,
        *,
        state: TrainingState,
        lifecycle: Lifecycle,
        strategies: Strategies,
        checkpoints: CheckpointManager,
        halt: Halt,
        worlds: Worlds | None,
    ) -> None:
        self._state = state
        self._lifecycle = lifecycle
        self._strategies = strategies
        self._checkpoints = checkpoints
        self._halt = halt
        self._worlds = worlds

    @property
    def saves(self) -> bool:
        """Whether the job saves checkpoints, from which a restarted job resumes."""
        return self._checkpoints.is_on

    def cross(self) -> None:
        """Before the next step: save if a save is due. Does not return if the process ends here.

        The ranks of a replica need no vote here unless they exchange control flags by a collective
        of the world, which an abort may end on only some of them. Flags that came with the
        gradients, and the decision to leave before the next step, were agreed at the end of the
        backward pass, so all ranks decide equally. Nothing else here waits for a peer.
        """
        if self._worlds is not None:
            self._worlds.wait_until_permitted()
        if not self._checkpoints.is_open:
            return
        self._halt.at_boundary()
        self._state.current.last_left = None
        replica = self._lifecycle.replica
        received = self._checkpoints.at_boundary(self._state.job, replica.whole)
        self._strategies.active.at_boundary(received)
        is_requested = self._worlds is not None and self._worlds.is_asked_to_leave
        is_leaving = self._halt.is_preempted or is_requested
        self._checkpoints.announce(self._state.job, is_leaving=is_leaving)

    def finish(self) -> None:
        """At the end of training: save this step, unless it is already saved."""
        self._checkpoints.save(self._state.job)

    def begin_step(self, number: int, digest: torch.Tensor | None) -> None:
        """Begin step ``number``; its control flags have the number, and a ``digest`` of weights."""
        self._checkpoints.flags.begin_step(number, self._lifecycle.world.size, digest)

    def check_flags(self, number: int) -> None:
        """Raise an error if this step's gradients were not those of one step of all ranks."""
        self._checkpoints.flags.require_one_step(number)

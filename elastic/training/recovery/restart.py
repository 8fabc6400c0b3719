"""Recovery by a restart: the process ends, and restores a checkpoint when it is restarted."""

from __future__ import annotations

import dataclasses

from elastic.process_group import ProcessGroup
from elastic.telemetry.log import get_logger
from elastic.training.checkpointing.manager import CheckpointManager, Peers, leaving_s
from elastic.training.gradients.control_flags import StepFlags
from elastic.training.halt import Halt
from elastic.training.lifecycle import Lifecycle
from elastic.training.recovery.training_state import TrainingState
from elastic.training.step import Step
from elastic.worker.sigterm import EXIT_CODE
from elastic.worker.worlds import Worlds
from elastic.world.world import World


class Restart:
    """The strategy for scripts without ``run.retry``, and for launchers without in-process mode.

    ``worlds``: the link to an agent in in-process mode, or None.
    """

    waits_for_registration = False
    settles_left_loops = True
    is_state_held_elsewhere = False

    def __init__(
        self,
        state: TrainingState,
        lifecycle: Lifecycle,
        group: ProcessGroup,
        checkpoints: CheckpointManager,
        halt: Halt,
        worlds: Worlds | None,
    ) -> None:
        self._job = state.job
        self._progress = state.progress
        self._lifecycle = lifecycle
        self._group = group
        self._checkpoints = checkpoints
        self._halt = halt
        self._worlds = worlds
        self._has_warned_of_foreign_group = False

    def warn_of_foreign_group(self) -> None:
        """Warn once that the script created a process group before run.retry."""
        if not self._has_warned_of_foreign_group:
            self._has_warned_of_foreign_group = True
            get_logger().warning(
                "torch.distributed.init_process_group() was called before run.retry(): in-process "
                "recovery is off, and every change of the world restarts all workers from the last "
                "checkpoint. Remove the call (and destroy_process_group): run.retry or the first "
                "loop creates the process group, and elastic.join(backend=…) sets its backend."
            )

    # -- worlds -------------------------------------------------------------------------------

    def enter_world(self) -> None:
        """Form the process group that the environment describes."""
        world = self._group.form()
        self._lifecycle.formed(world)
        if self._worlds is not None:
            self._worlds.formed(world.generation)
            if not self._has_warned_of_foreign_group:
                _warn_without_retry(world)

    def restore(self) -> None:
        """Load the newest checkpoint, or begin with rank 0's initial state."""
        world = self._lifecycle.world
        generation = self._checkpoints.restore(world, self._job)
        self._lifecycle.begin(dataclasses.replace(world, generation=generation))
        if self._job.progress.step:
            self._progress.enter_world()

    def is_fault(self, error: BaseException) -> bool:
        """Always False: the process cannot recover from any exception."""
        return False

    def recover(self, error: BaseException) -> None:
        """Raise the error, which ends the process."""
        raise error

    def training_returned(self) -> None:
        """Do nothing: other ranks do not depend on this one."""

    def end_attempt(self) -> None:
        """Do nothing: other ranks no longer depend on this one."""

    # -- steps --------------------------------------------------------------------------------

    @property
    def can_roll_back(self) -> bool:
        """True with checkpoints: after an error of the script the last commit is saved."""
        return self._checkpoints.is_on

    def before_step(self, step: Step) -> None:
        """Do nothing: torchrun ends this process when the world changes."""

    def committed(self) -> None:
        """Do nothing: no world is planned."""

    def at_boundary(self, received: StepFlags | None) -> None:
        """Exit if this process was asked to leave and will not be restarted.

        All ranks receive the request at the same boundary: all save, and the leaving ones exit.
        """
        is_received = received is not None and received.leaving
        if is_received and not self._halt.is_preempted:
            self._checkpoints.save(self._job)
        if self._halt.is_preempted and (is_received or self._checkpoints.world_size == 1):
            with self._halt.own_save():
                self._checkpoints.flush(self._job, leaving_s())
                self._checkpoints.release()
                self._halt.has_left = True
            raise SystemExit(EXIT_CODE)

    # -- the end of the process ---------------------------------------------------------------

    def must_save_after_error(self, *, is_of_the_world: bool) -> bool:
        """Always True: all processes end now."""
        return True

    def flush_after_error(self) -> None:
        """Let one of the remaining ranks write the complete state."""
        self._checkpoints.flush(self._job, leaving_s(), Peers.ARE_GONE)

    def release_peers(self) -> None:
        """Do nothing: torchrun ends the peers."""

    def roll_back(self, *, is_stopped: bool) -> bool:
        """See :meth:`RankProgress.roll_back <elastic.training.recovery.progress.RankProgress>`."""
        return self._progress.roll_back()


def _warn_without_retry(world: World) -> None:
    """Warn that ``world`` is entered without run.retry, although the agent is in in-process
    mode."""
    if world.rank == 0 and world.generation == 1:
        get_logger().warning(
            "training begins without run.retry(): a change of the world restarts all workers, "
            "which resume from the last checkpoint with the same global batch and data order (for "
            "loaders created by run.loader). With run.retry(train), workers keep their processes "
            "and their state"
        )

"""The interface of the two recovery strategies.

:class:`~elastic.training.recovery.restart.Restart`: the process ends, the launcher restarts it, and
it restores the newest checkpoint.
:class:`~elastic.training.recovery.in_process.InProcess`: the process continues, and joins the next
world with its state. A process begins with the first strategy, and changes to the second at its
first ``run.retry``, if its agent is in in-process mode.
"""

from __future__ import annotations

from typing import Protocol

from elastic.training.gradients.control_flags import StepFlags
from elastic.training.step import Step


class RecoveryStrategy(Protocol):
    """How a process enters worlds, and how it preserves its state when one breaks."""

    # -- worlds -------------------------------------------------------------------------------

    @property
    def waits_for_registration(self) -> bool:
        """Whether a world is entered only once model or data are registered."""

    def enter_world(self) -> None:
        """Enter the first world."""

    def restore(self) -> None:
        """Restore the job's state in an entered world, once its objects are complete."""

    def is_fault(self, error: BaseException) -> bool:
        """Whether ``error`` means that the world has ended, so that :meth:`recover` can help."""

    def recover(self, error: BaseException) -> None:
        """Enter the next world, after a fault or a planned change."""

    def training_returned(self) -> None:
        """Called when the training function has returned, before its last step is committed."""

    def end_attempt(self) -> None:
        """Called when the last step is committed."""

    # -- steps --------------------------------------------------------------------------------

    @property
    def can_roll_back(self) -> bool:
        """Whether the state of the last commit may be needed: by peers, or for a checkpoint."""

    @property
    def settles_left_loops(self) -> bool:
        """Whether a loop that was left is settled at once: the script can continue only after a
        `break` or `return`."""

    def before_step(self, step: Step) -> None:
        """Raise WorldChanged if another world must be entered before ``step``."""

    def committed(self) -> None:
        """Called after each committed step."""

    def at_boundary(self, received: StepFlags | None) -> None:
        """Called between two steps, with the control flags of all ranks. Does not return if the
        process ends here."""

    # -- the end of the process ---------------------------------------------------------------

    def must_save_after_error(self, *, is_of_the_world: bool) -> bool:
        """Whether the state would be lost with this process, which ends with an error."""

    def flush_after_error(self) -> None:
        """Save the state of this process, one of several, which ends with an error."""

    def release_peers(self) -> None:
        """Let peers detect immediately that this process ends."""

    @property
    def is_state_held_elsewhere(self) -> bool:
        """Whether other nodes continue with the state when this process is restarted."""

    def roll_back(self, *, is_stopped: bool) -> bool:
        """Roll back to the last commit. Returns False if the weights may contain later updates.

        Called by another thread while the main thread is stopped in a step (``is_stopped``), or
        waits for a world.
        """

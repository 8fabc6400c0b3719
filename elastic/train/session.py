"""``Session``: what the parts of training share in one process, from joining the job to its end.

:func:`elastic.train.run.assemble` creates it, and then the parts that act on it: the step loop, its
commits, the attempts of ``run.retry``, recovery, and the end of the process.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from elastic.groups.group import ProcessGroup
from elastic.telemetry.journal import EventSink
from elastic.telemetry.ledger import Ledger
from elastic.train.checkpointing import CheckpointManager
from elastic.train.current import CurrentStep, Halt, Listeners
from elastic.train.hooks import Hooks
from elastic.train.lifecycle import Lifecycle
from elastic.train.optimizers import OptimizerWatch, Registry
from elastic.train.order import StepFlags
from elastic.train.progress import RankProgress, StepTimer
from elastic.train.state import JobState
from elastic.train.step import Step
from elastic.worker.worlds import Worlds

Callback = Callable[[Step], object]


class RecoveryStrategy(Protocol):
    """How a process enters worlds, and how it preserves its state when one breaks.

    With :class:`~elastic.train.recovery.Restart` the process ends, the launcher restarts it, and it
    restores the newest checkpoint. With :class:`~elastic.train.recovery.InProcess` it continues,
    and joins the next world with its state. A process begins with the first one, and changes to the
    second at its first ``run.retry``, if its agent is in in-process mode.
    """

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

    def function_returned(self, *, can_undo: bool) -> bool:
        """Called when the training function has returned in a step that is not committed yet.
        Returns whether it has returned on all ranks, of which only a rank that can undo the step is
        sure."""

    def training_returned(self) -> None:
        """Called when the training function has returned, before its last step is committed."""

    def end_attempt(self) -> None:
        """Called when the last step is committed."""

    @property
    def can_recover(self) -> bool:
        """Whether this process continues after a fault."""

    # -- steps --------------------------------------------------------------------------------

    @property
    def can_roll_back(self) -> bool:
        """Whether the state of the last commit may be needed: by peers, or for a checkpoint."""

    def before_step(self, step: Step) -> None:
        """Raise WorldChanged if another world must be entered before ``step``."""

    def at_boundary(self, received: StepFlags | None) -> None:
        """Called between two steps, with the control flags of all ranks. Does not return if the
        process ends here."""

    # -- the end of the process ---------------------------------------------------------------

    def must_save_after_error(self, *, is_of_the_world: bool) -> bool:
        """Whether the state would be lost with this process, which ends with an error."""

    def flush_after_error(self) -> None:
        """Save the state of this process, one of several, which ends with an error."""

    @property
    def is_state_held_elsewhere(self) -> bool:
        """Whether other nodes continue with the state when this process is restarted."""

    def leave_end(self, *, is_alone: bool = False) -> None:
        """At the clean end of the process, return to the last boundary: what the script has changed
        since is complete on all ranks only if they agreed on it. ``is_alone``: others have failed
        since, and the job is about to be restarted, so an earlier boundary is better than none."""

    def roll_back(self, *, is_stopped: bool) -> bool:
        """Roll back to the last commit. Returns False if the weights may contain later updates.

        Called by another thread while the main thread is stopped in a step (``is_stopped``), or
        waits for a world.
        """


@dataclass
class Scope:
    """The part of the API that the script is in. One per process."""

    in_retry: bool = False  # within run.retry, run.attempts, or after run.begin
    is_last_call: bool = True  # of run.retry: its end saves the state
    has_left_retry: bool = False  # by an error: the other ranks continue in it
    owns_epochs: bool = False  # run.epochs counts epochs; otherwise each pass over a loader is one
    epochs: int | None = None  # the count of run.epochs
    total_steps: int | None = None  # of the job, from run.plan_steps
    resumed_at: int = 0  # the step within its epoch at which the last pass began
    passes: int = 0  # in this attempt, over loaders without ``run.epochs``
    begun: set[int] = field(default_factory=set)  # the ids of these loaders
    epoch_steps: dict[int, int] = field(default_factory=dict)  # of each loader, by its id

    def plan(self, loader_id: int, steps: int) -> int:
        """Record this loader's steps per epoch. Returns the job's total number of steps."""
        self.epoch_steps[loader_id] = steps
        if self.total_steps is not None:
            return self.total_steps
        return (self.epochs or 0) * sum(self.epoch_steps.values())


class StepCallbacks:
    """The callbacks of ``run.after_step``, in order of registration."""

    def __init__(self) -> None:
        self._callbacks: list[Callback] = []
        self._before_attempts = 0

    def __len__(self) -> int:
        return len(self._callbacks)

    def add(self, callback: Callback) -> None:
        """Call ``callback`` after each step from now on."""
        self._callbacks.append(callback)

    def last(self, count: int) -> list[Callback]:
        """The last ``count`` callbacks; all if there are fewer."""
        return self._callbacks[max(0, len(self._callbacks) - count) :]

    def begin_attempt(self, *, is_again: bool) -> None:
        """Forget the callbacks that the function of ``run.retry`` registered in its previous call:
        it registers them again."""
        if is_again:
            del self._callbacks[self._before_attempts :]
        self._before_attempts = len(self._callbacks)


@dataclass(kw_only=True, slots=True)
class Session:
    """What the parts of training share. One per process.

    Everything but the strategy stays the same object: ``run.retry`` chooses in-process recovery if
    the agent offers it (:func:`elastic.train.recovery.choose_strategy`).
    """

    # What is trained, and how far.
    registry: Registry  # the objects that the script has registered
    current: CurrentStep  # the step that has begun
    progress: RankProgress  # the commit to which the weights belong
    timer: StepTimer  # how long steps take
    scope: Scope
    callbacks: StepCallbacks
    listeners: Listeners  # to worlds
    # With whom.
    group: ProcessGroup
    lifecycle: Lifecycle
    worlds: Worlds | None  # the link to the agent
    strategy: RecoveryStrategy = field(init=False)
    # What remains of it.
    checkpoints: CheckpointManager
    halt: Halt
    ledger: Ledger  # the samples of each step
    journal: EventSink  # events
    hooks: Hooks  # what follows steps and worlds

    @property
    def job(self) -> JobState:
        """The state of the job."""
        return self.registry.job

    @property
    def optimizer_watch(self) -> OptimizerWatch:
        """The watch on registered optimizers."""
        return self.registry.optimizer_watch

    def committed(self) -> None:
        """Measure the step's time, and report a slow step immediately: the switch step of a planned
        world is computed from the last report, which would otherwise be one step old."""
        self.timer.committed(self.job.progress.step)
        if self.timer.is_slow and self.worlds is not None:
            self.worlds.report_position()

    def in_training(self, is_in_training: bool) -> None:
        """The script's training begins, or has ended: the agent judges this process's end by it."""
        if self.worlds is not None:
            self.worlds.in_training(is_in_training)

    def position(self) -> dict[str, int | None]:
        """This rank's position, for the lines of its journal."""
        step = self.job.progress.step
        if not self.lifecycle.has_world:
            return {"step": step}
        world = self.lifecycle.world
        return {"rank": world.rank, "generation": world.generation, "step": step}

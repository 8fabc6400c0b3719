"""The interface between training and checkpoints, one per process.

:meth:`CheckpointManager.restore` gives all ranks of a new world the same state,
:meth:`~CheckpointManager.at_boundary` runs between two steps, and
:meth:`~CheckpointManager.flush` commits the state before the process ends. Without a policy
nothing is saved, and ``restore`` shares rank 0's initial state.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from enum import Enum

from checkpoints import Lineage, Root
from elastic.clock import SYSTEM_CLOCK, Clock
from elastic.errors import TrainingError
from elastic.telemetry.journal import EventSink
from elastic.training.checkpointing.last_save import LastSave
from elastic.training.checkpointing.options import (
    Checkpoints,
    KeepGiven,
    WhenGiven,
    checkpoints_from,
)
from elastic.training.checkpointing.restore import restore
from elastic.training.checkpointing.saver import Saver
from elastic.training.gradients.control_flags import ControlFlags, StepFlags, ask
from elastic.training.state.job_state import JobState
from elastic.tuning import timeouts
from elastic.tuning.worker_intervals import MEMORY_WAIT_S
from elastic.world.world import World

__all__ = ["CheckpointManager", "Peers", "leaving_s"]


def leaving_s() -> float:
    """The time, in seconds, for a last save in a process that ends with an exception or on request.

    It is derived from the pod's grace period; on SIGTERM it is the rest of that period.

    Raises:
        ConfigError: the pod's grace period is not a number of seconds.
    """
    return timeouts.of_environment(os.environ).checkpoint_budget_s


class Peers(Enum):
    """The state of the other ranks while this process flushes its last state."""

    SAVE_AS_WELL = "every rank of the world flushes the same step"
    ARE_GONE = "some parts will be missing: one of the remaining ranks writes the complete state"
    CONTINUE = "all ranks hold the state: this rank writes its part"


class CheckpointManager:
    """One per process."""

    def __init__(
        self, policy: Checkpoints | None, journal: EventSink, *, clock: Clock = SYSTEM_CLOCK
    ) -> None:
        leaving_s()  # refuse an invalid grace period now, not at the end
        self._journal = journal
        self._clock = clock
        self._is_superseded: Callable[[], bool] = lambda: False
        self._is_permitted: Callable[[], bool] = lambda: True
        self._flags = ControlFlags()
        self._sent = StepFlags()
        self._has_stepped = False  # in this world, since the last boundary
        self._saver = Saver(policy, journal, clock=clock)

    # -- configuration ------------------------------------------------------------------------

    @property
    def is_on(self) -> bool:
        """Whether a checkpoint folder is configured."""
        return self._saver.is_on

    @property
    def is_open(self) -> bool:
        """Whether saves are accepted: not without a folder, nor after :meth:`close`."""
        return self._saver.due is not None

    @property
    def committed_step(self) -> int:
        """The step of the newest checkpoint that is known to be on disk."""
        return self._saver.committed_step

    @property
    def flags(self) -> ControlFlags:
        """The control flags to piggyback on each step's gradients."""
        return self._flags

    def fence(self, *, is_superseded: Callable[[], bool], is_permitted: Callable[[], bool]) -> None:
        """Commit nothing once a newer world is known, or without the agent's permission.

        Both are called on the engine's thread.
        """
        self._is_superseded, self._is_permitted = is_superseded, is_permitted
        self._saver.is_superseded, self._saver.is_permitted = is_superseded, is_permitted

    def amend(
        self,
        given: Checkpoints | Root | None,
        when: WhenGiven = None,
        keep: KeepGiven = None,
        *,
        is_restored: bool,
    ) -> None:
        """Change how the job saves.

        Raises TrainingError for a folder that is set too late, and ConfigError for contradictory
        options.
        """
        policy = self._saver.policy
        if policy is not None:
            self._saver.amend(policy.amended(given, when, keep))
            return
        if given is not None and is_restored:
            folder = given.folder if isinstance(given, Checkpoints) else given
            raise TrainingError(
                f"checkpoints={folder} is set after the state was restored",
                hint="use elastic.join(checkpoints=…): run.retry and run.epochs restore the state",
            )
        policy = checkpoints_from(given, when=when, keep=keep)
        self._saver = Saver(policy, self._journal, clock=self._clock)
        self.fence(is_superseded=self._is_superseded, is_permitted=self._is_permitted)

    # -- worlds -------------------------------------------------------------------------------

    def restore(self, world: World, job: JobState, *, may_begin: bool = True) -> int:
        """Give all ranks the same state. Returns the generation with which the job continues.

        It is the world's, or a later one if the checkpoint folder already contains it. Without a
        checkpoint, all ranks get rank 0's initial state if ``may_begin``; otherwise
        CheckpointRequired is raised.
        """
        return restore(world, job, self._saver, self._journal, may_begin=may_begin)

    @property
    def origin(self) -> tuple[Lineage, int, int]:
        """Lineage, generation and last committed step: the base of the next world's saves."""
        return self._saver.origin

    def inherit(self, lineage: Lineage, generation: int, saved_step: int) -> None:
        """Save as ``generation`` from now on; its state comes from a live peer."""
        self._saver.inherit(lineage, generation, saved_step)

    def begin_world(self, world: World, job: JobState) -> None:
        """Save for ``world`` from now on: the state is restored and the same on all ranks."""
        self._send(StepFlags())
        self._has_stepped = False
        self._saver.enter(world, job)

    def end_world(self, *, broken: bool) -> None:
        """End the current world. If it is broken, a dead peer may never write its shares."""
        self._saver.leave(broken=broken)

    # -- steps --------------------------------------------------------------------------------

    def step_ended(self) -> None:
        """Called after a step's control flags were exchanged with its gradients."""
        self._has_stepped = True

    def at_boundary(
        self, job: JobState, together: Callable[[], AbstractContextManager[None]] = nullcontext
    ) -> StepFlags | None:
        """Between two steps: report finished saves, and begin one if it is due on all ranks.

        Returns the control flags of all ranks, or None if no step ended since the last boundary.
        ``together``: creates the context for a collective of the world.
        """
        if not self.is_open:
            return None
        received = None
        if self._has_stepped:
            received = self._flags.received()
            if received is None and self._saver.needs_agreement:
                with together():
                    received = ask(self._sent)
        self._has_stepped = False
        interval = self._saver.memory_interval
        if interval is not None and interval.needs_agreement:
            with together():
                interval.agree(job.progress.step)
        self._saver.at_boundary(job, received)
        return received

    def announce(self, job: JobState, *, is_leaving: bool) -> None:
        """Choose the control flags that this rank sends with a step's gradients."""
        if self.is_open:
            self._send(self._saver.flags(job.progress.step, leaving=is_leaving))

    def before_leaving(self, job: JobState) -> None:
        """At the boundary at which nodes leave: save if the policy saves on the notice, and the
        notice was too late for the control flags of the world's last step.

        Without a vote. If a rank learns of the change later still, its share is missing, and the
        checkpoint is never committed.
        """
        self._saver.before_leaving(job)

    def save(self, job: JobState) -> None:
        """Begin to save this step regardless of the policy, unless it is already saved."""
        self._saver.save(job)

    def keep_shards_in_memory(self) -> None:
        """Save to the nodes' memory, because no rank holds the complete state, unless the policy
        disables that."""
        self._saver.keep_shards_in_memory()

    @property
    def first_memory_step(self) -> int | None:
        """The job's first save to the nodes' memory is at this step; None: disabled."""
        interval = self._saver.memory_interval
        return interval.first_steps if interval is not None else None

    @property
    def is_resumed(self) -> bool:
        """Whether the current state comes from a checkpoint, even one of step 0."""
        return self._saver.is_resumed

    def save_between_worlds(self, job: JobState, *, is_last: bool, nodes_leave: bool) -> None:
        """Save this step, at which all ranks leave the current world and none keeps its state.

        The next world restores from the nodes' memory. If nodes leave, a save to disk begins as
        well: others may leave before the next world has restored the state. ``is_last``: no world
        follows, so this returns once the save is on disk.
        """
        if not self.is_open:
            return
        is_in_memory = self._saver.save_between_worlds(job, MEMORY_WAIT_S)
        if is_last or not is_in_memory:
            self.flush(job, leaving_s())
        elif nodes_leave:
            self._saver.save(job)

    def poll(self) -> None:
        """Report finished saves and detect hung ones."""
        self._saver.poll()

    def stop(self) -> None:
        """Accept no further saves, because the state must not be restored."""
        self._saver.due = None

    # -- the end ------------------------------------------------------------------------------

    def flush(self, job: JobState, deadline_s: float, peers: Peers = Peers.SAVE_AS_WELL) -> bool:
        """Commit the job's current step within ``deadline_s`` seconds.

        Returns whether it is known to be committed; for ``Peers.CONTINUE``, whether this
        rank's share is written.
        """
        if not self.is_open:
            return False
        last = LastSave(self._saver, job, deadline_s)
        if peers is Peers.CONTINUE:
            return last.share()
        if peers is Peers.ARE_GONE:
            return last.alone()
        return last.together()

    @property
    def world_size(self) -> int:
        """The number of writers in the current or last world."""
        return self._saver.writers.world_size

    def wait(self, budget_s: float) -> bool:
        """Wait until no save is in flight; False after ``budget_s``."""
        return self._saver.wait(budget_s)

    def finish_writing(self, budget_s: float) -> None:
        """Wait until this rank's share of every save is written: other ranks may still commit."""
        self._saver.finish_writing(budget_s)

    def release(self) -> None:
        """Release the folder for another job: this one has ended."""
        self._saver.release()

    def close(self, budget_s: float) -> None:
        """Wait at most ``budget_s`` for this rank's shares, then accept no further saves."""
        self._saver.close(budget_s)

    def _send(self, flags: StepFlags) -> None:
        self._sent = flags
        self._flags.send(flags)

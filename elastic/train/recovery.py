"""Enters worlds: in the same process, or with new workers."""

from __future__ import annotations

import dataclasses
import logging
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from elastic.errors import (
    SYSTEM_CLOCK,
    ElasticError,
    GroupBuildFailed,
    ReplicaLost,
    TrainingError,
    WorldChanged,
    WorldLost,
)
from elastic.groups.collectives import all_sum
from elastic.groups.faults import causes, is_world_fault, may_stem_from_aborted_output, world_fault
from elastic.groups.world import ReplicaMesh, World
from elastic.link.link import Assignment, Leave
from elastic.telemetry.events import Recovered
from elastic.telemetry.log import get_logger
from elastic.train.checkpointing import Peers, leaving_s
from elastic.train.early_leave import EarlyLeave
from elastic.train.order import StepFlags
from elastic.train.rebuilding import AGAIN
from elastic.train.session import Session
from elastic.train.step import Step
from elastic.train.transfer import Reconfiguration
from elastic.tuning.intervals import (
    LEAVE_SLICE_S,
    SHARE_S,
)
from elastic.wire.messages import WorldState
from elastic.worker.sigterm import EXIT_CODE
from elastic.worker.worlds import Worlds, world_of, write_environment

# A group is built in milliseconds once all ranks have arrived; the rest is a margin for busy
# machines.
BUILD_TIMEOUT_S = 30.0

# ----------------------------------------------------------------------------
# In-process recovery: the worker leaves an ended world and keeps its state for the next one.

_LAPS = ("leave_s", "wait_s", "build_s", "agree_s", "paused_s")


class InProcess:
    """The strategy within ``run.retry`` if an agent announces worlds over its link."""

    waits_for_registration = True
    can_roll_back = True
    can_recover = True

    def __init__(
        self,
        session: Session,
        worlds: Worlds,
        early_leave: EarlyLeave,
    ) -> None:
        self._replica = session.lifecycle.replica
        self._job = session.job
        self._current = session.current
        self._scope = session.scope
        self._progress = session.progress
        self._worlds = worlds
        self._group = session.group
        self._lifecycle = session.lifecycle
        self._checkpoints = session.checkpoints
        self._timer = session.timer
        self._hooks = session.hooks
        self._journal = session.journal
        self._early_leave = early_leave
        self._reconfiguration = Reconfiguration(
            session.job,
            session.progress,
            session.checkpoints,
            session.journal,
            session.group.device,
        )
        self._laps: dict[str, float] = {}
        self._recovering_since_s: float | None = None
        self._committed_step: int | None = None  # the job's, when the current world was proposed
        self._answers_for: int | None = None  # the step to which the replica's last answers apply
        self._replica.question = self._will_leave

    # -- steps --------------------------------------------------------------------------------

    def before_step(self, step: Step) -> None:
        """Raise WorldChanged if the next world must be entered before this step.

        Checked after the step has begun: from then on the link's thread treats a switch at this
        step as too late, so either this check or that thread detects the switch
        (docs/explanation/protocol.md, section 6). Within an accumulation of gradients, a rank
        leaves only an ended world. The ranks of a replica agreed on it at the end of the last
        backward pass, if there was one.
        """
        if self._leaves(step):
            self._current.drop()
            raise WorldChanged(
                f"the world changes before step {step.number}",
                hint="do not catch it: run.retry continues in the next world",
            )

    def _leaves(self, step: Step) -> bool:
        is_within = self._current.accumulation.since is not None
        answers = self._replica.take_answers()
        if answers is not None and self._answers_for == step.number:
            is_due, is_over = answers
            return is_over if is_within else is_due
        worlds = self._worlds
        leaves = worlds.is_superseded() if is_within else worlds.is_due(step.number)
        return self._replica.any(leaves)

    def _will_leave(self) -> tuple[bool, bool]:
        """Whether the next step begins in another world, and whether it does so even within an
        accumulation. Called at the end of a backward pass.

        If a world is announced later, the link's thread treats the next step as begun, and the step
        is repeated.
        """
        step = self._current.step
        if step is None:  # a backward pass outside of a step
            self._answers_for = None
            return False, False
        following = self._answers_for = self._current.announced_for = step.number + 1
        return self._worlds.is_due(following), self._worlds.is_superseded()

    def at_boundary(self, received: StepFlags | None) -> None:
        """Do nothing: the agent announces a world without the leaving node."""

    # -- worlds -------------------------------------------------------------------------------

    def is_fault(self, error: BaseException) -> bool:
        """Whether a collective failed, or a planned change interrupted the script."""
        if isinstance(error, ReplicaLost):
            return False  # this rank's shards are useless without the rest of its replica
        if is_world_fault(error) or _is_switch(error):
            return True
        # An error caused by an aborted collective's invalid output is not the script's fault.
        return self._group.may_be_garbage and may_stem_from_aborted_output(error)

    def recover(self, error: BaseException) -> None:
        """Leave the ended world, enter the next one, and restore the state of a commit."""
        self._early_leave.raise_error()  # that is why it has ended
        began_s = SYSTEM_CLOCK.monotonic()
        self._replica.check_in()
        is_planned = isinstance(error, WorldChanged)
        is_together = is_planned and not self._is_over_for_some
        self._hooks.leave_world("change" if is_planned else "fault")
        self._lifecycle.begin_change()
        if not is_planned:
            self._report(error)
        self._laps.clear()
        with self._lap("leave_s"):
            if self._job.built is not None:
                self._leave_shards(error, is_complete=is_together)
            elif is_together and self._worlds.nodes_leaving > 0:
                self._checkpoints.before_leaving(self._job)
            self._progress.interrupt()
            # A peer's death may become known between two steps, before anything fails on this rank.
            self._checkpoints.end_world(broken=not is_together)
            self._lifecycle.end(broken=not is_planned)
        # While the traceback exists, the attempt's frames hold activations, and a GPU may have
        # no memory for both them and a received state. Free them, and data workers that a frame
        # holds, while other ranks enter the next world.
        _clear_frames(error)
        self._recovering_since_s = began_s
        self.enter_world()
        if self._lifecycle.is_restored:
            self._recovered()

    @property
    def _is_over_for_some(self) -> bool:
        """Whether the current world has ended without a boundary at which all ranks leave it. (At
        the end of a job, leaving nodes do not interrupt a peer's step.)"""
        return self._worlds.is_superseded() and self._worlds.nodes > 0

    def _leave_shards(self, error: BaseException, *, is_complete: bool) -> None:
        """Release the objects built for the current world; the next world loads the saved state.

        ``is_complete``: all ranks leave at this step, and save it.
        """
        if is_complete:
            # Without a vote, because a rank that learns late of the change is in another
            # collective. Ranks that know of the job's end and ranks that know of leaving nodes all
            # write.
            self._checkpoints.save_between_worlds(
                self._job,
                is_last=self._worlds.nodes == 0,
                nodes_leave=self._worlds.nodes_leaving > 0,
            )
        else:
            self._group.abort()  # before the buffers of its collectives are freed
        self._progress.lose_state(is_saved=is_complete)
        _clear_frames(error)
        self._job.retire_built()

    def _recovered(self) -> None:
        began_s, self._recovering_since_s = self._recovering_since_s, None
        if began_s is None:
            return
        self._timer.restart()
        took_s = SYSTEM_CLOCK.monotonic() - began_s
        laps = {name: round(self._laps.get(name, 0.0), 4) for name in _LAPS}
        self._journal.emit(
            Recovered(
                generation=self._lifecycle.world.generation,
                step=self._job.progress.step,
                duration_s=round(took_s, 4),
                wrap_s=round(took_s - sum(self._laps.values()), 4),
                **laps,
            ),
            level=logging.INFO if self._lifecycle.world.rank == 0 else logging.DEBUG,
        )

    def _report(self, error: BaseException) -> None:
        self._worlds.report_failure(error)
        lifecycle = self._lifecycle
        self._journal.emit(
            world_fault(
                error,
                generation=lifecycle.world.generation if lifecycle.has_world else 0,
                step=self._job.progress.step,
            ),
            level=logging.DEBUG,
        )

    @contextmanager
    def _lap(self, name: str) -> Iterator[None]:
        began_s = SYSTEM_CLOCK.monotonic()
        try:
            yield
        finally:
            took_s = SYSTEM_CLOCK.monotonic() - began_s
            self._laps[name] = self._laps.get(name, 0.0) + took_s

    def enter_world(self) -> None:
        """Enter the next world or, if that fails, the one after it."""
        self._reconfiguration.prepare()
        while True:
            with self._lap("wait_s"):
                assignment = self._next()
            if isinstance(assignment, Leave):
                self._leave_job(assignment)
            if 0 < assignment.shrinks_from <= self._worlds.max_ranks() < assignment.size:
                continue  # the leader replaces it by one whose ranks can split the batches
            try:
                self._form(assignment)
            except Exception as error:
                if not self.is_fault(error):
                    raise
                self._worlds.report_failure(error)
                self._lifecycle.end(broken=True)
                continue
            if assignment.state is not WorldState.PAUSED:
                if self._lifecycle.is_restored:
                    self._worlds.entered(self._job.progress.step)
                return
            self._worlds.entered(self._job.progress.step)
            # Fewer nodes than the job's minimum: do not train, but save the state.
            if self._lifecycle.is_restored:
                self._lifecycle.pause()
            self._progress.replay_units()
            with self._lap("paused_s"):
                self._checkpoints.save(self._job)
                self._worlds.wait_for_newer(meanwhile=self._checkpoints.poll)
            self._lifecycle.end(broken=False)

    def _next(self) -> Assignment | Leave:
        """Wait for the next world, the same on all ranks of the replica; otherwise the building of
        groups would deadlock."""
        newer = self._worlds.next()
        while True:
            generations = self._replica.all_numbers(newer.generation)
            if len(set(generations)) == 1:
                return newer
            if newer.generation < max(generations):
                newer = self._worlds.next()

    def _form(self, assignment: Assignment) -> None:
        with self._replica.whole():
            world = self._enter(assignment)
        if self._job.is_rebuilt:
            self._lifecycle.formed(world)  # the state is restored once the objects are built
            return
        self._lifecycle.begin(world)
        self._progress.enter_world()

    def _enter(self, assignment: Assignment) -> World:
        with self._lap("build_s"):
            self._build(assignment)
        write_environment(assignment)
        self._committed_step = assignment.committed_step
        with self._lap("agree_s"):
            if self._job.is_rebuilt:  # sharded over the whole world
                return self._reconfiguration.agree_to_build(world_of(assignment, ReplicaMesh()))
            world = world_of(assignment, self._replica.mesh)
            return self._reconfiguration.enter(world, assignment.committed_step)

    def _build(self, assignment: Assignment) -> None:
        """Build the world's group.

        The others begin a planned world at its switch step: with long steps, or an evaluation in
        between, later than a build may take. A joining rank waits for them without a limit. If it
        is the one that cannot reach rank 0, those that wait for it report that, and the next world
        excludes it.
        """
        is_joining = not self._lifecycle.is_restored
        superseded = self._worlds.is_superseded
        while True:
            try:
                self._group.build(assignment, superseded=superseded, timeout_s=BUILD_TIMEOUT_S)
                return
            except GroupBuildFailed as error:
                is_early = is_joining and assignment.switch_at_step is not None
                if not (is_early and error.missing == (0,)):
                    raise

    def restore(self) -> None:
        """Load the state of the objects built in the current world."""
        with self._lap("agree_s"):
            world = self._reconfiguration.restore(self._lifecycle.world, self._committed_step)
        self._lifecycle.begin(world)
        self._progress.enter_world()
        self._worlds.entered(self._job.progress.step)
        self._recovered()

    def _leave_job(self, leave: Leave) -> NoReturn:
        """Wait for the agent to end this process: the job continues without this node, or ends."""
        if self._checkpoints.is_open:
            if self._lifecycle.is_restored and leave.nodes == 0:
                self._checkpoints.flush(self._job, leaving_s())
                self._checkpoints.release()
            else:
                self._checkpoints.finish_writing(leaving_s())
        self._worlds.left(self._job.progress.step)
        while True:
            SYSTEM_CLOCK.sleep(LEAVE_SLICE_S)

    def function_returned(self, *, can_undo: bool) -> bool:
        """The function has returned in a step, which ends with it. Returns whether it has on all
        ranks.

        If a rank fails before, the code after its loop is incomplete, and the step is repeated with
        that code. If this rank cannot undo the step, it does not wait: nothing that can fail may
        come before its commit.
        """
        if not self._ends_with_others:
            return True
        if not can_undo:
            self._early_leave.announce_end()
            return False
        if self._early_leave.end():
            return True
        if self._worlds.is_superseded():
            raise WorldChanged(
                "the world has ended before the training function has returned on all ranks",
                hint="do not catch it: run.retry continues in the next world",
            )
        if not self._worlds.has_newer:
            self._join_collective()  # raises the fault because of which nobody waits any more
        return False

    def training_returned(self) -> None:
        """Wait until the function has returned on all ranks.

        If a rank fails before, the last step is repeated, unless it was committed already.
        """
        if self._ends_with_others:
            self._early_leave.end()
            self._join_collective()

    def end_attempt(self) -> None:
        """Wait until all ranks are done, so that a rank that fails in the last step still has peers
        with its state."""
        if self._ends_with_others:
            self._join_collective()

    @property
    def _ends_with_others(self) -> bool:
        lifecycle = self._lifecycle
        is_with_others = lifecycle.has_world and lifecycle.world.size > 1
        return is_with_others and not self._progress.is_catching_up

    def _join_collective(self) -> None:
        with self._replica.whole():
            all_sum([1.0])

    # -- the end of the process ---------------------------------------------------------------

    def must_save_after_error(self, *, is_of_the_world: bool) -> bool:
        """Whether the error is the script's; after a fault of the world, peers have the state,
        unless all have trained outside of run.retry, where none recovers."""
        return not is_of_the_world or not self._peers_continue

    def flush_after_error(self) -> None:
        """Write only this rank's share, because peers wait for the end of this process. Outside of
        run.retry they end, too: one of the remaining ranks writes the complete state."""
        if self._peers_continue:
            self._checkpoints.flush(self._job, SHARE_S, Peers.CONTINUE)
        else:
            self._checkpoints.flush(self._job, leaving_s(), Peers.ARE_GONE)

    @property
    def _peers_continue(self) -> bool:
        return self._scope.in_retry or self._scope.has_left_retry

    @property
    def is_state_held_elsewhere(self) -> bool:
        """Whether the newest world has other nodes."""
        return self._worlds.nodes > 1

    def leave_end(self, *, is_alone: bool = False) -> None:
        """Do nothing: all ranks agreed on the state at the end of run.retry."""

    def roll_back(self, *, is_stopped: bool) -> bool:
        """Whether the state is that of the last boundary.

        Called while the main thread waits for a world, or is stopped (``is_stopped``).
        """
        if is_stopped:
            self._progress.interrupt(may_go_back=False)  # peers, or a checkpoint, have later steps
        return self._progress.tag is not None


def _is_switch(error: BaseException) -> bool:
    """Whether the exception, or its cause, is a planned change of the world."""
    if isinstance(error, ElasticError) and not isinstance(error, WorldChanged | WorldLost):
        return False  # raised while a change was handled
    return any(isinstance(failure, WorldChanged) for failure in causes(error))


def _clear_frames(error: BaseException) -> None:
    """Clear the locals of the interrupted attempt: activations, iterators, data workers."""
    chain: list[BaseException] = []
    left: list[BaseException | None] = [error]
    while left:  # exceptions hidden by `raise … from None` hold frames, too
        failure = left.pop()
        if failure is None or any(failure is known for known in chain):
            continue
        chain.append(failure)
        left += [failure.__cause__, failure.__context__]
        traceback.clear_frames(failure.__traceback__)
        failure.__traceback__ = None


# ----------------------------------------------------------------------------
# Recovery by a restart: the process ends, and restores a checkpoint when it is restarted.


class Restart:
    """The strategy for scripts without ``run.retry``, and for launchers without in-process mode."""

    waits_for_registration = False
    is_state_held_elsewhere = False
    can_recover = False

    def __init__(self, session: Session) -> None:
        self._job = session.job
        self._progress = session.progress
        self._lifecycle = session.lifecycle
        self._group = session.group
        self._checkpoints = session.checkpoints
        self._halt = session.halt
        self._worlds = session.worlds
        self._has_warned_of_foreign_group = False

    def warn_of_foreign_group(self) -> None:
        """Warn once that the script created a process group before elastic.join()."""
        if not self._has_warned_of_foreign_group:
            self._has_warned_of_foreign_group = True
            get_logger().warning(
                "torch.distributed.init_process_group() was called before elastic.join(): "
                "in-process recovery is off, and every change of the world restarts all workers "
                "from the last checkpoint. Remove the call (and destroy_process_group), or call "
                "elastic.join() first: run.retry or the first loop creates the process group, and "
                "elastic.join(backend=…) sets its backend."
            )

    # -- worlds -------------------------------------------------------------------------------

    def enter_world(self) -> None:
        """Form the process group that the environment describes."""
        world = self._group.form()
        self._lifecycle.formed(world)
        if self._worlds is not None:
            self._worlds.formed(world.generation)
            if self._worlds.in_process and not self._has_warned_of_foreign_group:
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

    def function_returned(self, *, can_undo: bool) -> bool:
        """Always True: a checkpoint of the last step is complete once all ranks have returned."""
        return True

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

    def at_boundary(self, received: StepFlags | None) -> None:
        """Exit if this process was asked to leave and will not be restarted.

        All ranks receive the request at the same boundary: all save, and the leaving ones exit.
        """
        is_received = received is not None and received.leaving
        if is_received and not self._halt.is_preempted:
            self._checkpoints.save(self._job)
        if self._halt.is_preempted and (is_received or self._checkpoints.writers.world_size == 1):
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

    def leave_end(self, *, is_alone: bool = False) -> None:
        """A restarted script runs the code after its loop again, if a rank has failed in it or the
        script is started once more: a checkpoint must not contain its effects. It does where
        weights that this code has changed are not copied."""
        if self.can_roll_back and self._progress.rollback.can_restore:
            self._progress.roll_back()
        elif self.can_roll_back and is_alone and not self._progress.go_back():
            get_logger().warning(
                "a rank failed in the code after the last loop, and no copy of the weights from "
                "before that code is kept: its changes of the job's state are saved, and the "
                'restarted script makes them again. elastic.join(step_copies="always") keeps one'
            )

    def roll_back(self, *, is_stopped: bool) -> bool:
        """See :meth:`RankProgress.roll_back <elastic.train.progress.RankProgress>`."""
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


# ----------------------------------------------------------------------------
# Enters a process's first world, and restores the job's state there.


class Bootstrap:
    """Enters worlds and restores state. One per process. ``in_process``: None without an
    agent that announces worlds to workers that keep their processes."""

    def __init__(self, session: Session, in_process: InProcess | None) -> None:
        self._session = session
        self._in_process = in_process
        self._job = session.job
        self._progress = session.progress
        self._lifecycle = session.lifecycle
        self._inherited: dict[str, Any] | None = None  # state for objects registered again
        # Whether the script has entered a world since the training function was called: also where
        # this process was in it before, and a joining one enters it now.
        self.has_entered = False

    def enter_world(self) -> World:
        """Enter a world, unless this process is in one."""
        self.has_entered = True
        if not self._lifecycle.has_world:
            self._session.strategy.enter_world()
        return self._lifecycle.world

    def begin_retry(self) -> None:
        """Recover in process from now on, if possible. Called by run.retry, before the state is
        restored."""
        if self._in_process is None:
            return
        if not self._session.group.is_foreign:
            self._session.strategy = self._in_process
        elif isinstance(self._session.strategy, Restart):
            self._session.strategy.warn_of_foreign_group()

    def rank_and_size(self) -> tuple[int, int]:
        """This rank's index among the ranks that split the data, and their number. Enters the first
        world."""
        world = self.enter_world()
        return world.data_rank, world.data_size

    def enter_loop(self) -> None:
        """Enter a world and restore the state, unless that is done.

        Raises ConfigError, before any change, if an object was sharded after its registration.
        """
        if self._lifecycle.is_restored:
            self.has_entered = True
            return
        self._job.check_unsharded()
        if self._inherited is not None:
            self.has_entered = True
            self._inherit(self._inherited)
            return
        if self._job.is_rebuilt and self._job.built is None:
            raise TrainingError(
                "run.build() was not called in this world: the model and the optimizer belong to "
                "an ended world",
                hint=AGAIN,
            )
        self.enter_world()
        if not self._lifecycle.is_restored:
            self._session.strategy.restore()

    def inherit_later(self, tree: dict[str, Any]) -> None:
        """Set the state for the objects that the script registers before the next loop."""
        self._inherited = tree

    def _inherit(self, tree: dict[str, Any]) -> None:
        self._job.check(tree, "the state that this job has trained")
        self._job.apply(tree)
        self._inherited = None
        self._lifecycle.registered_again()
        self._progress.enter_world()

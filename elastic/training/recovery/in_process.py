"""In-process recovery: the worker leaves an ended world and keeps its state for the next one."""

from __future__ import annotations

import dataclasses
import logging
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

from elastic.clock import SYSTEM_CLOCK
from elastic.errors import ElasticError, ReplicaLost, WorldChanged, WorldLost
from elastic.events import Recovered
from elastic.link.protocol import WorldMessage
from elastic.messages.world import WorldState
from elastic.process_group import ProcessGroup, all_sum
from elastic.training.checkpointing.manager import CheckpointManager, Peers, leaving_s
from elastic.training.gradients.control_flags import StepFlags
from elastic.training.lifecycle import Lifecycle
from elastic.training.misuse.early_leave import EarlyLeave
from elastic.training.observers.step_observers import Recorders
from elastic.training.recovery.reconfiguration import Reconfiguration
from elastic.training.recovery.step_timer import StepTimer
from elastic.training.recovery.training_state import TrainingState
from elastic.training.step import Step
from elastic.tuning.worker_intervals import BUILD_TIMEOUT_S, LEAVE_SLICE_S, SHARE_S
from elastic.worker.received_world import group_spec, world_of, write_environment
from elastic.worker.worlds import Worlds
from elastic.world.failure import world_fault
from elastic.world.faults import causes, is_world_fault, may_stem_from_aborted_output
from elastic.world.world import World

_LAPS = ("leave_s", "wait_s", "build_s", "agree_s", "paused_s")


class InProcess:
    """The strategy within ``run.retry`` if an agent announces worlds over its link."""

    waits_for_registration = True
    settles_left_loops = False
    can_roll_back = True

    def __init__(
        self,
        state: TrainingState,
        worlds: Worlds,
        group: ProcessGroup,
        lifecycle: Lifecycle,
        checkpoints: CheckpointManager,
        timer: StepTimer,
        recorders: Recorders,
        early_leave: EarlyLeave,
    ) -> None:
        self._replica = lifecycle.replica
        self._job = state.job
        self._current = state.current
        self._progress = state.progress
        self._worlds = worlds
        self._group = group
        self._lifecycle = lifecycle
        self._checkpoints = checkpoints
        self._timer = timer
        self._observers = recorders.observers
        self._journal = recorders.journal
        self._early_leave = early_leave
        self._reconfiguration = Reconfiguration(
            state.job, state.progress, checkpoints, recorders.journal, group.device
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

    def committed(self) -> None:
        """Measure the step's time, and report a slow step immediately: the switch step of a planned
        world is computed from the last report, which would otherwise be one step old."""
        self._timer.committed(self._job.progress.step)
        if self._timer.is_slow:
            self._worlds.report_position()

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
        self._observers.end_world("change" if is_planned else "fault")
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
        self._progress.lose_state()
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
                message = self._next()
            if message.assignment is None:
                self._leave_job(message)
            try:
                self._form(message)
            except Exception as error:
                if not self.is_fault(error):
                    raise
                self._worlds.report_failure(error)
                self._lifecycle.end(broken=True)
                continue
            if message.world.state is not WorldState.PAUSED:
                if self._lifecycle.is_restored:
                    self._worlds.entered(self._job.progress.step)
                return
            self._worlds.entered(self._job.progress.step)
            # Fewer nodes than the job's minimum: do not train, but save the state.
            if self._lifecycle.is_restored:
                self._lifecycle.pause()
            with self._lap("paused_s"):
                self._checkpoints.save(self._job)
                self._worlds.wait_for_newer(meanwhile=self._checkpoints.poll)
            self._lifecycle.end(broken=False)

    def _next(self) -> WorldMessage:
        """Wait for the next world, the same on all ranks of the replica; otherwise the building of
        groups would deadlock."""
        message = self._worlds.next()
        while True:
            generations = self._replica.all_numbers(message.world.generation)
            if len(set(generations)) == 1:
                return message
            if message.world.generation < max(generations):
                message = self._worlds.next()

    def _form(self, message: WorldMessage) -> None:
        with self._replica.whole():
            world = self._enter(message)
        if self._job.is_rebuilt:
            self._lifecycle.formed(world)  # the state is restored once the objects are built
            return
        self._lifecycle.begin(world)
        self._progress.enter_world()

    def _enter(self, message: WorldMessage) -> World:
        worlds = self._worlds
        spec = group_spec(message)
        with self._lap("build_s"):
            self._group.build(spec, superseded=worlds.is_superseded, timeout_s=BUILD_TIMEOUT_S)
        write_environment(message)
        self._committed_step = message.world.committed_step
        with self._lap("agree_s"):
            if self._job.is_rebuilt:
                return self._reconfiguration.meet(world_of(message))
            world = dataclasses.replace(world_of(message), mesh=self._replica.mesh)
            return self._reconfiguration.enter(world, message.world.committed_step)

    def restore(self) -> None:
        """Load the state of the objects built in the current world."""
        with self._lap("agree_s"):
            world = self._reconfiguration.restore(self._lifecycle.world, self._committed_step)
        self._lifecycle.begin(world)
        self._progress.enter_world()
        self._worlds.entered(self._job.progress.step)
        self._recovered()

    def _leave_job(self, message: WorldMessage) -> None:
        """Wait for the agent to end this process: the job continues without this node, or ends."""
        if self._checkpoints.is_open:
            if self._lifecycle.is_restored and message.nodes == 0:
                self._checkpoints.flush(self._job, leaving_s())
                self._checkpoints.release()
            else:
                self._checkpoints.finish_writing(leaving_s())
        self._worlds.left(self._job.progress.step)
        while True:
            SYSTEM_CLOCK.sleep(LEAVE_SLICE_S)

    def training_returned(self) -> None:
        """Wait until the function has returned on all ranks.

        If a rank fails before, the last step is repeated, unless it was committed already.
        """
        self._progress.function_returned()
        if self._ends_with_others:
            self._early_leave.end()
            self._meet_all()

    def end_attempt(self) -> None:
        """Wait until all ranks are done, so that a rank that fails in the last step still has peers
        with its state."""
        if self._ends_with_others:
            self._meet_all()
        self._progress.retries += 1

    @property
    def _ends_with_others(self) -> bool:
        lifecycle = self._lifecycle
        is_with_others = lifecycle.has_world and lifecycle.world.size > 1
        return is_with_others and not self._progress.is_catching_up

    def _meet_all(self) -> None:
        with self._replica.whole():
            all_sum([1.0])

    # -- the end of the process ---------------------------------------------------------------

    def must_save_after_error(self, *, is_of_the_world: bool) -> bool:
        """Whether the error is the script's; after a fault of the world, peers have the state."""
        return not is_of_the_world

    def flush_after_error(self) -> None:
        """Write only this rank's share, because peers wait for the end of this process."""
        self._checkpoints.flush(self._job, SHARE_S, Peers.CONTINUE)

    def release_peers(self) -> None:
        """Close connections, so that peers need not wait for the end of this process."""
        self._group.abort()

    @property
    def is_state_held_elsewhere(self) -> bool:
        """Whether the newest world has other nodes."""
        return self._worlds.nodes > 1

    def roll_back(self, *, is_stopped: bool) -> bool:
        """Whether the state is that of the last boundary.

        Called while the main thread waits for a world, or is stopped (``is_stopped``).
        """
        if is_stopped:
            self._progress.interrupt()
        return self._progress.tag is not None


def _is_switch(error: BaseException) -> bool:
    """Whether the exception, or its cause, is a planned change of the world."""
    if isinstance(error, ElasticError) and not isinstance(error, WorldChanged | WorldLost):
        return False  # raised while a change was handled
    return any(isinstance(failure, WorldChanged) for failure in causes(error))


def _clear_frames(error: BaseException) -> None:
    """Clear the locals of the interrupted attempt: activations, iterators, data workers."""
    found: list[BaseException] = []
    left: list[BaseException | None] = [error]
    while left:  # exceptions hidden by `raise … from None` hold frames, too
        failure = left.pop()
        if failure is None or any(failure is known for known in found):
            continue
        found.append(failure)
        left += [failure.__cause__, failure.__context__]
        traceback.clear_frames(failure.__traceback__)
        failure.__traceback__ = None

"""Recovery in process: the worker leaves a world that is over and keeps its state for the next."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager

from elastic.clock import SYSTEM_CLOCK
from elastic.errors import ElasticError, WorldChanged, WorldLost
from elastic.events import Recovered, WorldFault
from elastic.link.protocol import WorldMessage
from elastic.messages.world import WorldState
from elastic.process_group import ProcessGroup, all_sum
from elastic.telemetry.journal import EventSink
from elastic.training.checkpointing.manager import CheckpointManager, Peers, leaving_s
from elastic.training.current_step import CurrentStep
from elastic.training.gradients.control_flags import StepFlags
from elastic.training.lifecycle import Lifecycle
from elastic.training.recovery.progress import RankProgress
from elastic.training.recovery.reconfiguration import Reconfiguration
from elastic.training.recovery.step_timer import StepTimer
from elastic.training.state.job_state import JobState
from elastic.training.step import Step
from elastic.training.step_account import StepAccount
from elastic.tuning.worker_intervals import BUILD_TIMEOUT_S, LEAVE_SLICE_S, SHARE_S
from elastic.worker.worlds import Worlds, group_spec, world_of, write_environment
from elastic.world.faults import causes, is_world_fault, may_come_of_garbage

_LAPS = ("leave_s", "wait_s", "build_s", "agree_s", "paused_s")


class InProcess:
    """The strategy within ``run.retry``, with an agent that announces worlds over its link."""

    waits_for_registration = True
    settles_left_loops = False
    has_snapshot_between_steps = True
    can_roll_back = True

    def __init__(
        self,
        job: JobState,
        current: CurrentStep,
        worlds: Worlds,
        group: ProcessGroup,
        lifecycle: Lifecycle,
        checkpoints: CheckpointManager,
        progress: RankProgress,
        timer: StepTimer,
        account: StepAccount,
        journal: EventSink,
    ) -> None:
        self._job = job
        self._current = current
        self._worlds = worlds
        self._group = group
        self._lifecycle = lifecycle
        self._checkpoints = checkpoints
        self._progress = progress
        self._reconfiguration = Reconfiguration(job, progress, checkpoints, journal, group.device)
        self._timer = timer
        self._account = account
        self._journal = journal
        self._laps: dict[str, float] = {}

    # -- steps --------------------------------------------------------------------------------

    def before_step(self, step: Step) -> None:
        """Raise WorldChanged if the next world is to be entered before this step.

        Asked after the step has begun: from now on the link's thread knows that it is too late
        for this rank to switch at it, and one of the two notices (PROTOCOL section 6). Within an
        accumulation of gradients only a world that is over is left.
        """
        worlds = self._worlds
        is_within = self._current.accumulation.since is not None
        if worlds.is_superseded() if is_within else worlds.is_due(step.number):
            self._current.drop()
            raise WorldChanged(
                f"the world changes before step {step.number}",
                hint="let it pass: run.retry goes on in the next world",
            )

    def committed(self) -> None:
        """Measure the time of a step."""
        self._timer.committed()

    def at_boundary(self, received: StepFlags | None) -> None:
        """Nothing: the agent announces a world without a node that is to leave."""

    # -- worlds -------------------------------------------------------------------------------

    def is_fault(self, error: BaseException) -> bool:
        """Whether a collective has failed, or a planned change has interrupted the script."""
        if is_world_fault(error) or _is_switch(error):
            return True
        # Whatever the script makes of results that an abort has left is not its mistake.
        return self._group.may_be_garbage and may_come_of_garbage(error)

    def recover(self, error: BaseException) -> None:
        """Leave the world that is over, enter the next one, and restore the state of a commit."""
        began_s = SYSTEM_CLOCK.monotonic()
        is_planned = isinstance(error, WorldChanged)
        self._account.end_world("change" if is_planned else "fault")
        self._lifecycle.begin_change()
        if not is_planned:
            self._report(error)
        self._laps.clear()
        with self._lap("leave_s"):
            self._progress.interrupt()
            # A peer's death may be known between two steps, before anything has failed here.
            self._checkpoints.end_world(broken=not is_planned or self._worlds.is_superseded())
            self._lifecycle.end(broken=not is_planned)
        # The frames of the attempt hold activations, for as long as the traceback is known: a GPU
        # may have no room for them and for a state that is received. While others come to the next
        # world there is time for it, also to end data workers that a frame holds.
        _clear_frames(error)
        self.enter_world()
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
            )
        )

    def _report(self, error: BaseException) -> None:
        self._worlds.report_failure(error)
        lifecycle = self._lifecycle
        self._journal.emit(
            WorldFault(
                generation=lifecycle.world.generation if lifecycle.has_world else 0,
                step=self._job.progress.step,
                error=f"{type(error).__name__}: {error}",
            )
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
        """Wait for the next world, and for as long as worlds fail, the one after it."""
        while True:
            with self._lap("wait_s"):
                message = self._worlds.next()
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
            self._worlds.entered(self._job.progress.step)
            if message.world.state is not WorldState.PAUSED:
                return
            # Fewer nodes than the job's minimum: nothing is trained, nothing may get lost.
            self._lifecycle.pause()
            with self._lap("paused_s"):
                self._checkpoints.save(self._job)
                self._worlds.wait_for_newer(meanwhile=self._checkpoints.poll)
            self._lifecycle.end(broken=False)

    def _form(self, message: WorldMessage) -> None:
        worlds = self._worlds
        spec = group_spec(message)
        with self._lap("build_s"):
            self._group.build(spec, superseded=worlds.is_superseded, timeout_s=BUILD_TIMEOUT_S)
        write_environment(message)
        with self._lap("agree_s"):
            world = self._reconfiguration.enter(world_of(message), message.world.committed_step)
        self._lifecycle.begin(world)
        if self._progress.has_committed or self._job.progress.step:
            self._progress.expect_weights()

    def _leave_job(self, message: WorldMessage) -> None:
        """The job continues without this node, or ends here: wait for the agent to end it."""
        if self._lifecycle.is_restored and self._checkpoints.is_open:
            if message.nodes == 0:
                self._checkpoints.flush(self._job, leaving_s())
                self._checkpoints.release()
            else:
                self._checkpoints.finish_writing(leaving_s())
        self._worlds.left(self._job.progress.step)
        while True:
            SYSTEM_CLOCK.sleep(LEAVE_SLICE_S)

    def end_attempt(self) -> None:
        """No rank is done before all are: one that fails in the last step still finds peers that
        hold its state."""
        lifecycle = self._lifecycle
        is_with_others = lifecycle.has_world and lifecycle.world.size > 1
        if is_with_others and not self._progress.is_catching_up:
            all_sum([1.0])
        self._progress.retries += 1

    # -- the end of the process ---------------------------------------------------------------

    def must_save_after_error(self, *, is_of_the_world: bool) -> bool:
        """After errors of the script; after a fault of the world the peers hold the state."""
        return not is_of_the_world

    def flush_after_error(self) -> None:
        """This rank's share: the peers wait for the end of this process."""
        self._checkpoints.flush(self._job, SHARE_S, Peers.CONTINUE)

    def release_peers(self) -> None:
        """They need not wait for this process to be gone."""
        self._group.abort()

    @property
    def is_state_held_elsewhere(self) -> bool:
        """Whether other nodes are in the newest world."""
        return self._worlds.nodes > 1

    def roll_back(self, *, is_stopped: bool) -> bool:
        """While the main thread waits for a world, the state is that of the last commit, unless
        it was interrupted in the middle of an update."""
        if is_stopped:
            self._progress.interrupt()
        tag = self._progress.tag
        return tag is not None and not tag.stepped


def _is_switch(error: BaseException) -> bool:
    """Whether the exception, or its cause, is a planned change of the world."""
    if isinstance(error, ElasticError) and not isinstance(error, WorldChanged | WorldLost):
        return False  # raised while a change was being handled
    return any(isinstance(failure, WorldChanged) for failure in causes(error))


def _clear_frames(error: BaseException) -> None:
    """Forget the locals of the interrupted attempt: activations, iterators, data workers."""
    found: list[BaseException] = []
    left: list[BaseException | None] = [error]
    while left:  # also what `raise … from None` does not show holds its frames
        failure = left.pop()
        if failure is None or any(failure is known for known in found):
            continue
        found.append(failure)
        left += [failure.__cause__, failure.__context__]
        traceback.clear_frames(failure.__traceback__)
        failure.__traceback__ = None

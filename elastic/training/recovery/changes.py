"""How a session changes worlds: when it must, and what becomes of the step in hand."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from elastic.clock import SYSTEM_CLOCK
from elastic.errors import ElasticError, WorldChanged, WorldLost
from elastic.events import Recovered, WorldFault
from elastic.link.protocol import Heartbeat, WorldMessage
from elastic.messages.world import WorldState
from elastic.training.recovery.reconfiguration import Recovery
from elastic.training.step import Step
from elastic.worker.worlds import Worlds, group_spec, world_of, write_environment
from elastic.world.faults import causes

if TYPE_CHECKING:
    from elastic.training.session import Session

BUILD_TIMEOUT_S = 30.0  # a group is built in milliseconds once everybody is there
_LAPS = ("leave_s", "wait_s", "build_s", "agree_s")
_SMOOTHING = 0.1  # of the step time
_LEAVE_SLICE_S = 0.2


class Changes:
    """Owned by the session; used in in-process mode only."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._recovery: Recovery | None = None
        self._step_time_s = 0.0
        self._last_commit_s: float | None = None
        self.is_recovering = False
        self._laps: dict[str, float] = {}

    @property
    def _worlds(self) -> Worlds:
        assert self._session.worlds is not None
        return self._session.worlds

    @property
    def recovery(self) -> Recovery:
        """Made late: the objects of the job are registered first."""
        if self._recovery is None:
            session = self._session
            self._recovery = Recovery(
                session.job, session.saver, session.journal, session.group.device, session.guard
            )
        return self._recovery

    def beat(self) -> Heartbeat:
        """Where this worker stands; read by the link's thread."""
        session = self._session
        return Heartbeat(
            generation=self._worlds.entering,
            step=session.job.progress.step,
            phase="step" if session.step is not None else "other",
            step_time_s=self._step_time_s,
        )

    def current_step(self) -> int | None:
        """The number of the step that has begun, the first one of an accumulation; read by the
        link's thread."""
        session = self._session
        if (first := session.commits.accumulated_since) is not None:
            return first
        step = session.step
        return step.number if step is not None else None

    # -- steps --------------------------------------------------------------------------------

    def raise_if_due(self, step: Step) -> None:
        """Raise WorldChanged if the next world is to be entered before this step.

        Asked after the step has begun: from now on the link's thread knows that it is too late
        for this rank to switch at it, and one of the two notices (PROTOCOL section 6). Within an
        accumulation of gradients only a world that is over is left.
        """
        worlds = self._worlds
        is_within = self._session.commits.accumulated_since is not None
        if worlds.is_superseded() if is_within else worlds.is_due(step.number):
            self._session.drop_step()
            raise WorldChanged(
                f"the world changes before step {step.number}",
                hint="let it pass: run.retry goes on in the next world",
            )

    def committed(self) -> None:
        """After a step: how long it took."""
        now_s = SYSTEM_CLOCK.monotonic()
        if self._last_commit_s is not None:
            took_s = now_s - self._last_commit_s
            before_s = self._step_time_s or took_s
            self._step_time_s = before_s + _SMOOTHING * (took_s - before_s)
        self._last_commit_s = now_s

    # -- worlds -------------------------------------------------------------------------------

    def recover(self, error: BaseException) -> None:
        """Leave the world that is over, enter the next one, put everything right."""
        began_s = SYSTEM_CLOCK.monotonic()
        session, is_planned = self._session, isinstance(error, WorldChanged)
        self.is_recovering = True
        if not is_planned:
            text = f"{type(error).__name__}: {error}"
            self._worlds.report_failure(error)
            session.journal.emit(
                WorldFault(
                    generation=session.world.generation if session.has_world else 0,
                    step=session.job.progress.step,
                    error=text,
                )
            )
        self._laps.clear()
        with self._lap("leave_s"):
            self.interrupt()
            # A peer's death may be heard of between two steps, before anything has failed here.
            session.saver.leave(broken=not is_planned or self._worlds.is_superseded())
            session.end_world(broken=not is_planned)
        # The frames of the attempt hold activations, for as long as the traceback is known: a GPU
        # may have no room for them and for a state that is received. While others come to the next
        # world there is time for it, also to end data workers that a frame holds.
        _clear_frames(error)
        self.enter_next()
        self.is_recovering = False
        self._last_commit_s = None
        took_s = SYSTEM_CLOCK.monotonic() - began_s
        laps = {name: round(self._laps.get(name, 0.0), 4) for name in _LAPS}
        session.journal.emit(
            Recovered(
                generation=session.world.generation,
                step=session.job.progress.step,
                duration_s=round(took_s, 4),
                wrap_s=round(took_s - sum(self._laps.values()), 4),
                **laps,
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

    def interrupt(self) -> None:
        """What the current step has changed is put back; says in ``recovery.tag`` where the
        weights stand."""
        session = self._session
        step, guard = session.step, session.guard
        self.recovery.interrupted(
            number=step.number if step is not None else None,
            stepped=tuple(step.stepped) if step is not None else (),
            is_torn=guard.is_torn or session.commits.has_partial_updates,
        )
        guard.reset()
        session.drop_steps()
        for optimizer in guard.tracked.values():
            optimizer.zero_grad(set_to_none=True)
        for module in session.job.modules.values():
            module.module.zero_grad(set_to_none=True)
            module.reduction.forget_gradients()
            module.reduction.begin(1.0)

    def enter_next(self) -> None:
        """Wait for the next world, and for as long as worlds fail, the one after it."""
        session = self._session
        while True:
            with self._lap("wait_s"):
                message = self._worlds.next()
            if message.assignment is None:
                self._leave_job(message)
            try:
                self._form(message)
            except Exception as error:
                if not session.is_fault(error):
                    raise
                self._worlds.report_failure(error)
                session.end_world(broken=True)
                continue
            self._worlds.entered(session.job.progress.step)
            if message.world.state is not WorldState.PAUSED:
                return
            # Fewer nodes than the job's minimum: nothing is trained, nothing may get lost.
            session.saver.save(session.job)
            self._worlds.wait_for_newer(meanwhile=session.saver.poll)
            session.end_world(broken=False)

    def _form(self, message: WorldMessage) -> None:
        session, worlds = self._session, self._worlds
        spec = group_spec(message)
        with self._lap("build_s"):
            session.group.build(spec, superseded=worlds.is_superseded, timeout_s=BUILD_TIMEOUT_S)
        write_environment(message)
        with self._lap("agree_s"):
            world = self.recovery.enter(world_of(message), message.world.committed_step)
        session.begin_world(world)
        if session.commits.has_committed or session.job.progress.step:
            self.recovery.expect_weights()

    def _leave_job(self, message: WorldMessage) -> None:
        """The job goes on without this node, or ends here: wait for the agent to end it."""
        session = self._session
        if session.is_restored:
            session.between.leave(everybody=message.nodes == 0)
        self._worlds.left(session.job.progress.step)
        while True:
            SYSTEM_CLOCK.sleep(_LEAVE_SLICE_S)


def is_switch(error: BaseException) -> bool:
    """Whether the exception, or what it came from, is this module's own."""
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

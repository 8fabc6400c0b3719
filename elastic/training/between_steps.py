"""What a session does between two steps, and when it ends, so that no work is lost.

Between two steps every rank's state is that of a step, the same on all of them: it is where
checkpoints are begun, where ranks hear what others have said, and where a process that was told
to go goes.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from checkpoints import Root
from elastic.errors import TrainingError
from elastic.events import CheckpointSkipped
from elastic.training.checkpointing.due import StepFlags
from elastic.training.checkpointing.halt import Halt
from elastic.training.checkpointing.last_save import END_S, LastSave
from elastic.training.checkpointing.options import KeepGiven, WhenGiven, checkpoints_from
from elastic.training.checkpointing.saver import Saver
from elastic.training.gradients.control_flags import ControlFlags, ask
from elastic.tuning import timeouts
from elastic.worker.sigterm import EXIT_CODE

if TYPE_CHECKING:
    from elastic.training.session import Session
    from elastic.training.step import Step

# A process that ends with an exception waits so long for its last checkpoint; one that is told to
# go has the rest of its grace period.
LEAVING_S = timeouts.of_environment(os.environ).checkpoint_budget_s
# In-process, peers that go on wait for this process's end before they can.
SHARE_S = 3.0


class BetweenSteps:
    """Owned by the session."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self.flags = ControlFlags()
        self._said = StepFlags()
        self.has_stepped = False  # in this world, since the last boundary
        self.is_preempted = False  # this process was told to go, and does so at a boundary
        self.has_gone = False
        self.halt = Halt()
        self.left_with: Step | None = None  # the step that the script's last loop was left in

    def save_by(
        self, checkpoint_dir: Root | None, when: WhenGiven = None, keep: KeepGiven = None
    ) -> None:
        """Change how the job saves. Raises TrainingError where it is too late for a folder."""
        session = self._session
        policy = session.saver.policy
        if policy is not None:
            session.saver.amend(policy.amended(checkpoint_dir, when, keep))
            return
        if checkpoint_dir is not None and session.is_restored:
            raise TrainingError(
                f"checkpoint_dir={checkpoint_dir} comes after the state was to be restored from it",
                hint="elastic.join(checkpoint_dir=…): run.retry and run.epochs restore the state",
            )
        policy = checkpoints_from(None, checkpoint_dir=checkpoint_dir, when=when, keep=keep)
        session.set_saver(Saver(policy, session.journal))

    @property
    def is_told_to_leave(self) -> bool:
        """Whether this process is to go: its node leaves the job, or it got SIGTERM itself."""
        worlds = self._session.worlds
        return self.is_preempted or (worlds is not None and worlds.is_told_to_leave)

    def enter_world(self) -> None:
        """State is restored, and the same on all ranks."""
        session = self._session
        self._said, self.has_stepped = StepFlags(), False
        self.flags.say(self._said)
        session.saver.enter(session.world, session.job)

    def pass_boundary(self) -> None:
        """Everything before the next step is complete: save if it is time, or go."""
        session, saver = self._session, self._session.saver
        if saver.due is None:
            return
        self.halt.at_boundary()
        self.left_with = None
        heard = None
        if self.has_stepped:
            heard = self.flags.heard()
            if heard is None and saver.due.needs_agreement:
                heard = ask(self._said)
        self.has_stepped = False
        saver.at_boundary(session.job, heard)
        if not session.is_in_process:
            self._go_if_preempted(heard)
        self._said = saver.flags(session.job.progress.step, leaving=self.is_told_to_leave)
        self.flags.say(self._said)

    def _go_if_preempted(self, heard: StepFlags | None) -> None:
        """Some process was told to go, and nobody will start it again. All ranks hear of it at
        the same boundary: they save, and those that were told go."""
        session, saver = self._session, self._session.saver
        is_heard = heard is not None and heard.leaving
        if is_heard and not self.is_preempted:
            saver.save(session.job)
        if self.is_preempted and (is_heard or saver.world_size == 1):
            LastSave(saver, session.job, LEAVING_S).together()
            saver.release()
            self.has_gone = True
            raise SystemExit(EXIT_CODE)

    # -- the end ------------------------------------------------------------------------------

    def leave(self, *, everybody: bool) -> None:
        """This process leaves at a boundary, as told: with all others, or they go on."""
        saver = self._session.saver
        if saver.due is None:
            return
        if everybody:
            LastSave(saver, self._session.job, LEAVING_S).together()
            saver.release()
        else:
            saver.finish_writing(LEAVING_S)

    def end_well(self) -> None:
        """Training is complete: its last state is on disk before the process ends."""
        session = self._session
        if session.is_restored and session.ledger.is_on:
            session.ledger.end(
                generation=session.world.generation,
                step=session.job.progress.step,
                rank=session.world.rank,
                sha256=session.job.weights_sha256(),
            )
        if session.is_restored and session.step is None and session.saver.due is not None:
            LastSave(session.saver, session.job, END_S).together()
        session.saver.release()
        session.saver.close(0.0)

    def end_with(self, error: str) -> None:
        """The process ends with an exception of the script: save what can be saved."""
        session, saver = self._session, self._session.saver
        if error and session.is_restored and saver.due is not None:
            with self.halt.own_save():
                self._save_after(error)
        saver.close(SHARE_S)

    def _save_after(self, error: str) -> None:
        session, saver = self._session, self._session.saver
        if not self.put_back():
            step = session.job.progress.step
            reason = f"the script failed in the middle of an update: {error}"
            session.journal.emit(CheckpointSkipped(name=f"step {step}", reason=reason))
        elif saver.world_size == 1:
            LastSave(saver, session.job, LEAVING_S).together()
        elif session.is_in_process:
            LastSave(saver, session.job, SHARE_S).part()
        else:
            LastSave(saver, session.job, LEAVING_S).alone()

    def put_back(self) -> bool:
        """Make the state that of the last commit; False if there may be more in the weights.

        A loop that was left with `break` looks the same as one that an exception has ended, and
        its step counts if an optimizer stepped. If that was an exception, what follows an update
        in the script (a scheduler) was not done.
        """
        session = self._session
        step, left_with = session.step, self.left_with
        if left_with is not None and left_with.optimizer_stepped:
            return False
        is_torn = session.guard.is_torn or session.commits.has_partial_updates
        done = session.recovery.rollback.put_back(is_torn=is_torn)
        if done.is_torn or (done.has_updates and step is not None and step.optimizer_stepped):
            return False
        session.drop_steps()
        return True

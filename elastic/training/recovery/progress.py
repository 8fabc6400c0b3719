"""Tracks the boundary between two steps to which a rank's state belongs, and returns to it.

A boundary belongs to a place in the script: the pass over a loader in which the next step begins,
or which has just ended. After a recovery, the training function is called from its beginning, and
what it changes before that place has happened before the boundary, too: initial weights, the
``scheduler.step()`` at the beginning of an epoch, a counter. So the boundary is restored again
where the function reaches the place, and such changes take effect once.
"""

from __future__ import annotations

import dataclasses

from elastic.errors import TrainingError
from elastic.telemetry.log import get_logger
from elastic.training.current_step import CurrentStep
from elastic.training.recovery.agreement import Agreement, RankState, Tag
from elastic.training.recovery.redone_rates import RedoneRates, rates_of
from elastic.training.state.job_state import JobState
from elastic.training.state.optimizers import OptimizerWatch
from elastic.training.state.rollback import Rollback, StepCopies
from elastic.training.step import Progress


class RankProgress:
    """The step of this rank's weights, and the rollback to the last commit. One per process."""

    def __init__(self, job: JobState, watch: OptimizerWatch, current: CurrentStep) -> None:
        self._job = job
        self._optimizer_watch = watch
        self._current = current
        self.step_copies = StepCopies.AUTO
        self.has_committed = False  # a step was committed in this process
        self._rollback: Rollback | None = None
        self._replaced: Rollback | None = None  # of the objects that the script has replaced
        self._is_fresh = False  # the script has not run since the last snapshot
        self._is_torn = False  # the weights are neither the initial ones nor of a step
        self.retries = 0  # calls of run.retry that this rank has completed
        self.retries_of_others = 0  # the maximum over this world's ranks at its beginning
        self._returned = 0  # calls whose function has returned here or, by agreement, elsewhere
        self.tag: Tag | None = None  # of this rank's weights
        self.begun = False  # a step was begun
        self._place = ""  # of the boundary with which this world began
        self.is_before_place = False  # the function runs towards the boundary's place
        self._is_step_missing = False  # some rank had begun the step after the boundary
        self._rates = RedoneRates()
        watch.on_update = self._rates.stepping

    @property
    def rollback(self) -> Rollback:
        """The rollback, created at its first use, once the job's objects are registered."""
        if self._rollback is None:
            self._rollback = self._optimizer_watch.rollback = Rollback(
                self._job, self._optimizer_watch.tracked, self.step_copies
            )
            if (replaced := self._replaced) is not None:
                self._rollback.adopt(replaced.needs_copies, replaced.snapshot)
                self._replaced = None
        return self._rollback

    @property
    def is_catching_up(self) -> bool:
        """Whether other ranks have completed this rank's current call of run.retry: there is
        nothing to train in it, and no peer to save or synchronize with."""
        return self.retries < self.retries_of_others

    @property
    def has_returned(self) -> bool:
        """Whether this rank's current call of run.retry has nothing left to train: its function
        has returned, here or on another rank, and all steps are committed.

        Another call of the function would train another step if it compares its count of steps
        after each step only, or would never end.
        """
        return self.retries < max(self.retries_of_others, self._returned)

    def function_returned(self) -> None:
        """Record that the training function has returned on this rank. Its last step may not be
        committed yet."""
        self._returned = max(self._returned, self.retries + 1)

    # -- while training -----------------------------------------------------------------------

    def reach(self, place: str) -> bool:
        """The script has reached ``place``. If the state was restored at this place, undo what the
        script has changed since, and return True."""
        if not self.is_before_place or self._place != place:
            return False
        self.is_before_place = self._is_step_missing = False
        given = rates_of(self._optimizer_watch.tracked)
        if not self.rollback.restore():
            raise TrainingError(
                f"weights were changed after they were restored for step {self._job.progress.step},"
                " and there is no copy of them: run.retry calls its function again in each new "
                "world",
                hint="initialize weights, or load pretrained weights, before run.retry(train), not "
                "in train",
            )
        restored = rates_of(self._optimizer_watch.tracked)
        if given != restored:
            get_logger().info(
                "lr=%s, which was set before the loop, is replaced by that of step %d, lr=%s: the "
                "loop resumes there. To change rates of a resumed job, set them in run.on_world",
                *(list(given.values()), self._job.progress.step, list(restored.values())),
            )
        return True

    def begin_pass(self, place: str) -> None:
        """The script begins a pass over a loader, or a step of its own loop."""
        progress = self._job.progress
        if not self.reach(place):
            self.script_has_run()
            if self._rollback is not None:
                self._rollback.script_has_run()
            progress.passes += 1
        progress.place = place

    def before_step(self, *, can_undo: bool) -> None:
        """Take the boundary before a step, outside of an accumulation; only note the weights if the
        step cannot be undone."""
        if not can_undo:
            self.rollback.note_weights()
        elif not self._is_fresh:
            self._take()

    def enter_world(self) -> None:
        """Begin a world at the boundary to which the state of all ranks belongs."""
        self._place = self._job.progress.place
        self.is_before_place = bool(self._place)
        # Only this copy can undo what the script changes before it reaches the boundary's place.
        self.rollback.take(with_copies=not self._job.is_rebuilt)
        self._is_fresh = True

    def end_function(self) -> None:
        """Called when the function has returned.

        Raises TrainingError if it has not repeated the step that a fault interrupted.
        """
        if not self.is_before_place:
            return
        if self._is_step_missing and not self.has_returned:
            raise TrainingError(
                f"step {self._job.progress.step} was interrupted, and the function that run.retry "
                "calls again has returned without it: its condition counts the step before the "
                "step's batch is requested, so the job would train one step less",
                hint="count a step at its end, not at its beginning: batch = next(batches); …; "
                'optimizer.step(); run.state["step"] += 1',
            )
        # Nothing was left to train. The code after the loop is repeated, but not initial weights.
        self.is_before_place = False
        if self.rollback.weights_have_changed:
            self.rollback.restore()

    def register_again(self) -> None:
        """Prepare for new objects that replace the job's objects of the same kind."""
        self._replaced = self._rollback
        self._rollback = self._optimizer_watch.rollback = None
        self._is_fresh = False

    def lose_state(self) -> None:
        """Drop this rank's state, because a part of a state is useless in another world."""
        self.tag = None
        self._rollback = self._optimizer_watch.rollback = None
        self._is_fresh = self.begun = False

    def script_has_run(self) -> None:
        """Record that the script has run, and may have changed any object."""
        self._is_fresh = False

    def committed(self, step: tuple[int, int, int], callbacks: int = 0) -> None:
        """Commit ``step`` (number, epoch, index), which ``callbacks`` callbacks follow."""
        self.rollback.committed()
        self.begun = False
        self._job.progress.last = step
        self.called_back(callbacks)

    def called_back(self, left: int) -> None:
        """Record that ``left`` callbacks of the last committed step remain."""
        progress = self._job.progress
        progress.callbacks_left = left  # saved with the state, which lacks their changes
        self._take()

    def attempt_ended(self) -> None:
        """The training function has returned: a fault after it does not repeat its end."""
        self._job.progress.place = ""
        self.is_before_place = False
        self._take()

    def _take(self) -> None:
        self.rollback.take()
        self._is_fresh = True
        if self.tag is not None:
            self.tag = tag_of(self.tag.generation, self._job.progress)

    # -- after a fault ------------------------------------------------------------------------

    @property
    def can_restore(self) -> bool:
        """Whether this rank can return to the last boundary by itself."""
        return self.rollback.can_restore

    def interrupt(self) -> None:
        """Undo the changes of the current step, and set :attr:`tag` to the boundary to which the
        state then belongs."""
        step, watch = self._current.step, self._optimizer_watch
        rates = rates_of(watch.tracked)
        for optimizer in watch.tracked.values():
            optimizer.zero_grad(set_to_none=True)
        for module in self._job.modules.values():
            module.module.zero_grad(set_to_none=True)
        if self.tag is not None:
            self._is_fresh = False
            self.begun = step is not None
            if self.rollback.restore():
                progress = self._job.progress
                self.tag = tag_of(self.tag.generation, progress)
            else:
                self.tag, self._is_torn = None, True
        if step is not None:
            self._rates.interrupted(step.number, step.stepped, rates, rates_of(watch.tracked))
        watch.reset()
        self._current.drop_uncommitted()
        for module in self._job.modules.values():
            module.reduction.forget_gradients()
            module.reduction.begin(1.0)

    def roll_back(self) -> bool:
        """Return to the last boundary. Returns False if that is impossible, or if the current step
        may be complete.

        A loop left by `break` looks like one left by an exception, and its step counts if an
        optimizer stepped. But after an exception, the script's code after the update (a scheduler
        step) has not run.
        """
        last_left = self._current.last_left
        if last_left is not None and last_left.optimizer_stepped:
            return False
        if not self.rollback.restore():
            return False
        self._current.drop_uncommitted()
        return True

    # -- in a new world -----------------------------------------------------------------------

    def rank_state(self, nonce: str) -> RankState:
        """This rank's contribution to the agreement of the world ``nonce``."""
        returned = self.retries if self.begun else self._returned
        return RankState(nonce, self.tag, self.begun, self._is_torn, self.retries, returned)

    def agreed_on_calls(self, agreement: Agreement) -> None:
        """Record how many calls of run.retry other ranks have completed or left, and whether a
        step was interrupted."""
        self.retries_of_others, self._returned = agreement.retries, agreement.returned
        self._is_step_missing = agreement.begun

    def can_spare_weights(self, other: Tag) -> bool:
        """Whether no rank can need this rank's weights while it receives the state ``other``: they
        belong to no step, and the job is past its initial state."""
        return self.tag is None and other.step > 0

    def begin_taking_over(self) -> None:
        """Mark the weights as torn before a peer's weights are received in place or applied: that
        may fail half way."""
        self.tag, self._is_torn = None, True

    def took_over(self, tag: Tag) -> None:
        """Record that a peer's weights are completely applied."""
        self.tag, self._is_torn = tag, False

    def agreed(self, tag: Tag, *, generation: int) -> None:
        """Record that all ranks of the world have the state of ``tag``."""
        self.tag = dataclasses.replace(tag, generation=generation)
        self._is_fresh, self._is_torn = False, False


def tag_of(generation: int, progress: Progress) -> Tag:
    """The position of a rank whose state is that of a boundary with this progress."""
    return Tag(generation, progress.step, progress.passes, progress.callbacks_left)

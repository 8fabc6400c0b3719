"""Tracks the step to which a rank's weights belong, and undoes an interrupted step."""

from __future__ import annotations

import dataclasses

from elastic.errors import TrainingError
from elastic.training.current_step import CurrentStep
from elastic.training.recovery.agreement import Agreement, RankState, Tag
from elastic.training.recovery.redone_rates import RedoneRates, rates_of
from elastic.training.state.job_state import JobState
from elastic.training.state.optimizers import OptimizerWatch
from elastic.training.state.rollback import Rollback


class RankProgress:
    """The step of this rank's weights, and the rollback to the last commit. One per process."""

    def __init__(self, job: JobState, watch: OptimizerWatch, current: CurrentStep) -> None:
        self._job = job
        self._optimizer_watch = watch
        self._current = current
        self.has_committed = False  # a step was committed in this process
        self._rollback: Rollback | None = None
        self._replaced: Rollback | None = None  # of the objects that the script has replaced
        self._is_fresh = False  # the script has not run since the last snapshot
        self._is_entering = False  # no step has begun in the current world
        self._is_torn = False  # the weights are neither the initial ones nor of a step
        self.retries = 0  # calls of run.retry that this rank has completed
        self.retries_of_others = 0  # the maximum over this world's ranks at its beginning
        self._returned = 0  # calls whose function has returned here or, by agreement, elsewhere
        self.tag: Tag | None = None  # of this rank's weights
        self.begun = False  # a step was begun
        self._masked: tuple[str, ...] = ()  # optimizers to mask in a repeated step
        self._masked_at = 0  # that step's number
        self._rates = RedoneRates()
        watch.on_update = self._rates.stepping

    @property
    def rollback(self) -> Rollback:
        """The rollback, created at its first use, once the job's objects are registered."""
        if self._rollback is None:
            self._rollback = self._optimizer_watch.rollback = Rollback(
                self._job, self._optimizer_watch.tracked
            )
            if (replaced := self._replaced) is not None:
                self._rollback.adopt(replaced.habits, replaced.snapshot)
                self._rollback.final_buffers = replaced.final_buffers
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

    def before_step(self, number: int) -> None:
        """Take a snapshot before a step, outside of an accumulation.

        Raises TrainingError if the script has overwritten the world's initial state.
        """
        if self._is_fresh:
            return
        if self._is_entering and number > 0 and self.rollback.weights_have_changed:
            raise TrainingError(
                f"weights were changed after they were restored for step {number}: "
                "run.retry calls its function again in each new world",
                hint="initialize weights, or load pretrained weights, before run.retry(train), not "
                "in train",
            )
        self.rollback.script_has_run()
        self._take()

    def expect_weights(self) -> None:
        """Begin a world with the current weights, which only training may change."""
        self._is_entering = True
        self.rollback.expect_weights()

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

    @property
    def is_ahead(self) -> bool:
        """Whether the weights contain updates of a step that is not committed, and is repeated."""
        return self.tag is not None and bool(self.tag.stepped)

    def masked(self, number: int) -> tuple[str, ...]:
        """The optimizers whose update in step ``number`` is already in the weights."""
        return self._masked if number == self._masked_at else ()

    def committed(self, step: tuple[int, int, int], callbacks: int = 0) -> None:
        """Commit ``step`` (number, epoch, index), which ``callbacks`` callbacks follow."""
        self.rollback.committed()
        self.begun = False
        self._masked = ()
        self._job.progress.last = step
        self.called_back(callbacks)

    def called_back(self, left: int) -> None:
        """Record that ``left`` callbacks of the last committed step remain."""
        progress = self._job.progress
        progress.callbacks_left = left  # saved with the state, which lacks their changes
        self._take()
        if self.tag is not None:
            self.tag = Tag(self.tag.generation, progress.step, callbacks=left)

    def attempt_ended(self) -> None:
        """The training function has returned: a fault after it does not repeat its end."""
        if not self._is_fresh:
            self._take()

    def _take(self) -> None:
        self.rollback.take()
        self._is_fresh, self._is_entering = True, False

    # -- after a fault ------------------------------------------------------------------------

    @property
    def is_torn(self) -> bool:
        """Whether the weights belong to no step: an update has begun but not ended, or optimizers
        have stepped in the middle of an accumulation."""
        return self._optimizer_watch.is_torn or self._has_partial_updates

    @property
    def _has_partial_updates(self) -> bool:
        accumulation, step = self._current.accumulation, self._current.step
        if accumulation.since is None:
            return False
        is_partial = step is not None and step.stepped and self._optimizer_watch.accumulating(step)
        return accumulation.has_updates or bool(is_partial)

    def interrupt(self) -> None:
        """Undo the changes of the current step, and set :attr:`tag` to the step to which the
        weights then belong."""
        step, watch = self._current.step, self._optimizer_watch
        rates = rates_of(watch.tracked)
        self._interrupted(
            number=step.number if step is not None else None,
            stepped=tuple(step.stepped) if step is not None else (),
            is_torn=self.is_torn,
        )
        if step is not None:
            committed = rates_of(watch.tracked)
            self._rates.interrupted(step.number, step.stepped, rates, committed)
        watch.reset()
        self._current.drop_uncommitted()
        for optimizer in watch.tracked.values():
            optimizer.zero_grad(set_to_none=True)
        for module in self._job.modules.values():
            module.module.zero_grad(set_to_none=True)
            module.reduction.forget_gradients()
            module.reduction.begin(1.0)

    def roll_back(self) -> bool:
        """Roll back to the last commit. Returns False if the weights may contain later updates.

        A loop left by `break` looks like one left by an exception, and its step counts if an
        optimizer stepped. But after an exception, the script's code after the update (a scheduler
        step) has not run.
        """
        step, last_left = self._current.step, self._current.last_left
        if last_left is not None and last_left.optimizer_stepped:
            return False
        done = self.rollback.restore(is_torn=self.is_torn)
        if done.is_torn or (done.has_updates and step is not None and step.optimizer_stepped):
            return False
        self._current.drop_uncommitted()
        return True

    def _interrupted(self, *, number: int | None, stepped: tuple[str, ...], is_torn: bool) -> None:
        """Restore the non-parameter state of the last commit, and set :attr:`tag`.

        Args:
            number: the step that had begun; None between two steps.
            stepped: the optimizers whose updates in that step are in the weights.
            is_torn: whether an update had begun but not ended.
        """
        if self.tag is None:
            return
        self._is_fresh = False
        self.begun = number is not None
        if number is None or (self._masked and number < self._masked_at):
            stepped, number = self._masked, self._masked_at
        is_updated = bool(stepped) and stepped != self._masked
        done = self.rollback.restore(is_torn=is_torn, is_updated=is_updated)
        if done.is_torn:
            self.tag, self._is_torn = None, True
            return
        if not done.has_updates:
            stepped, number = self._masked, self._masked_at  # they were in the weights before
        progress = self._job.progress
        step, left = progress.step, progress.callbacks_left
        iteration = number - step if stepped else 0
        self.tag = Tag(self.tag.generation, step, stepped, iteration, left)

    # -- in a new world -----------------------------------------------------------------------

    def rank_state(self, nonce: str) -> RankState:
        """This rank's contribution to the agreement of the world ``nonce``."""
        returned = self.retries if self.begun else self._returned
        return RankState(nonce, self.tag, self.begun, self._is_torn, self.retries, returned)

    def agreed_on_calls(self, agreement: Agreement) -> None:
        """Record how many calls of run.retry other ranks have completed or left."""
        self.retries_of_others, self._returned = agreement.retries, agreement.returned

    def begin_fresh(self) -> None:
        """Record that the state comes from a checkpoint, or is the initial one."""
        self._take()
        self.rollback.forget()

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
        self._masked, self._masked_at = tag.stepped, tag.step + tag.iteration
        self._is_fresh, self._is_entering, self._is_torn = False, True, False

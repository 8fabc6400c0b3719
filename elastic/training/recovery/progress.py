"""Tracks the step that a rank's weights belong to, and undoes an interrupted step."""

from __future__ import annotations

import dataclasses

from elastic.errors import TrainingError
from elastic.training.current_step import CurrentStep
from elastic.training.recovery.agreement import RankState, Tag
from elastic.training.recovery.redone_rates import RedoneRates, rates_of
from elastic.training.state.job_state import JobState
from elastic.training.state.optimizers import OptimizerWatch
from elastic.training.state.rollback import Rollback


class RankProgress:
    """The step of this rank's weights, and the rollback to a commit. One per process."""

    def __init__(self, job: JobState, watch: OptimizerWatch, current: CurrentStep) -> None:
        self._job = job
        self._optimizer_watch = watch
        self._current = current
        self.has_committed = False  # a step was committed in this process
        self._rollback: Rollback | None = None
        self._replaced: Rollback | None = None  # for objects that the script has replaced
        self._is_fresh = False  # the script has not run since the last snapshot
        self._is_entering = False  # no step has begun in the present world
        self._is_torn = False  # the weights are neither the initial ones nor of a step
        self.retries = 0  # calls of run.retry that this rank has completed
        self.retries_of_others = 0  # the maximum over this world's ranks at its beginning
        self.tag: Tag | None = None  # of this rank's weights
        self.begun = False  # a step was begun
        self._masked: tuple[str, ...] = ()  # optimizers to mask in a repeated step
        self._masked_at = 0  # its number
        self.callback_step = (0, 0, 0)  # number, epoch, index of the last committed step
        self._rates = RedoneRates()
        watch.on_update = self._rates.stepping

    @property
    def rollback(self) -> Rollback:
        """The rollback, created at first use, when the job's objects are registered."""
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
        """Whether other ranks have completed this rank's current call of run.retry: it has
        nothing to train in it, and no peers to save or synchronize with."""
        return self.retries < self.retries_of_others

    # -- while training -----------------------------------------------------------------------

    def before_step(self, number: int) -> None:
        """Before a step, outside of an accumulation: the state is that of a commit.

        Raises TrainingError if the script has overwritten the state that the world began with.
        """
        if self._is_fresh:
            return
        if self._is_entering and number > 0 and self.rollback.weights_have_changed:
            raise TrainingError(
                f"weights were changed after they were restored for step {number}: "
                "run.retry calls its function again in each new world",
                hint="initialize weights, or load pretrained ones, before run.retry(train), not "
                "in train",
            )
        self.rollback.script_has_run()
        self._take()

    def expect_weights(self) -> None:
        """Begin a world with the current weights, which only training may change."""
        self._is_entering = True
        self.rollback.expect_weights()

    def register_again(self) -> None:
        """Prepare for the replacement of the job's objects by new ones of the same kind."""
        self._replaced = self._rollback
        self._rollback = self._optimizer_watch.rollback = None
        self._is_fresh = False

    def lose_state(self) -> None:
        """Drop this rank's state: a part of a state is useless in another world."""
        self.tag = None
        self._rollback = self._optimizer_watch.rollback = None
        self._is_fresh = self.begun = False

    def script_has_run(self) -> None:
        """Note that the script has run and may have changed any object."""
        self._is_fresh = False

    def masked(self, number: int) -> tuple[str, ...]:
        """The optimizers whose update in step ``number`` is already in the weights."""
        return self._masked if number == self._masked_at else ()

    def committed(self, step: tuple[int, int, int], callbacks: int = 0) -> None:
        """Commit a step (number, epoch, index) that is followed by ``callbacks`` callbacks."""
        self.rollback.committed()
        self.begun = False
        self._masked = ()
        self.callback_step = step
        self.called_back(callbacks)

    def called_back(self, left: int) -> None:
        """Record that a callback of the last committed step is done; ``left`` remain."""
        self._take()
        if self.tag is not None:
            step = self._job.progress.step
            self.tag = Tag(self.tag.generation, step, callbacks=left)

    def _take(self) -> None:
        self.rollback.take()
        self._is_fresh, self._is_entering = True, False

    # -- after a fault ------------------------------------------------------------------------

    @property
    def is_torn(self) -> bool:
        """Whether the weights currently belong to no step: an update has begun and not ended, or
        optimizers have stepped in the middle of an accumulation."""
        return self._optimizer_watch.is_torn or self._has_partial_updates

    @property
    def _has_partial_updates(self) -> bool:
        accumulation, step = self._current.accumulation, self._current.step
        if accumulation.since is None:
            return False
        is_partial = step is not None and step.stepped and self._optimizer_watch.accumulating(step)
        return accumulation.has_updates or bool(is_partial)

    def interrupt(self) -> None:
        """Undo the changes of the current step; :attr:`tag` then names the step that the weights
        belong to."""
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

    def put_back(self) -> bool:
        """Roll back to the last commit; False if the weights may contain later updates.

        A loop left with `break` looks the same as one ended by an exception, and
        its step counts if an optimizer stepped. If it was an exception, the code after an update
        in the script (a scheduler step) has not run.
        """
        step, last_left = self._current.step, self._current.last_left
        if last_left is not None and last_left.optimizer_stepped:
            return False
        done = self.rollback.put_back(is_torn=self.is_torn)
        if done.is_torn or (done.has_updates and step is not None and step.optimizer_stepped):
            return False
        self._current.drop_uncommitted()
        return True

    def _interrupted(self, *, number: int | None, stepped: tuple[str, ...], is_torn: bool) -> None:
        """Restore the non-parameter state of the last commit, and set :attr:`tag`.

        Args:
            number: the step that was begun; None between two steps.
            stepped: the optimizers whose updates in it are in the weights.
            is_torn: whether an update was begun and not ended.
        """
        if self.tag is None:
            return
        self._is_fresh = False
        self.begun = number is not None
        if number is None or (self._masked and number < self._masked_at):
            stepped, number = self._masked, self._masked_at
        is_updated = bool(stepped) and stepped != self._masked
        done = self.rollback.put_back(is_torn=is_torn, is_updated=is_updated)
        if done.is_torn:
            self.tag, self._is_torn = None, True
            return
        if not done.has_updates:
            stepped, number = self._masked, self._masked_at  # those were in the weights before
        step = self._job.progress.step
        iteration = number - step if stepped else 0
        left = self.tag.callbacks
        self.tag = Tag(self.tag.generation, step, stepped, iteration, left)

    # -- in a new world -----------------------------------------------------------------------

    def rank_state(self, nonce: str) -> RankState:
        """This rank's contribution to the agreement of the world with that nonce."""
        return RankState(nonce, self.tag, self.begun, self._is_torn, self.retries)

    def begin_fresh(self) -> None:
        """Note that the state was restored from a checkpoint, or is the initial one."""
        self._take()
        self.rollback.forget()

    def can_spare_weights(self, other: Tag) -> bool:
        """Whether nobody can need this rank's weights while it receives the state ``other``: they
        are neither of a step nor the initial ones that a job without a step may begin with."""
        return self.tag is None and other.step > 0

    def begin_taking_over(self) -> None:
        """Before a peer's weights are received in place or applied: if that fails half way, the
        weights belong to no step."""
        self.tag, self._is_torn = None, True

    def took_over(self, tag: Tag) -> None:
        """Note that a peer's weights are completely applied."""
        self.tag, self._is_torn = tag, False

    def agreed(self, tag: Tag, *, generation: int) -> None:
        """Note that all ranks of a world have the state of ``tag``."""
        self.tag = dataclasses.replace(tag, generation=generation)
        self._masked, self._masked_at = tag.stepped, tag.step + tag.iteration
        self._is_fresh, self._is_entering, self._is_torn = False, True, False

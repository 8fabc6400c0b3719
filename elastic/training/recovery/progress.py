"""Which step a rank's weights belong to, and how an interrupted step is undone."""

from __future__ import annotations

import dataclasses

from elastic.errors import TrainingError
from elastic.training.current_step import CurrentStep
from elastic.training.recovery.agreement import RankState, Tag
from elastic.training.recovery.redone_rates import RedoneRates, rates_of
from elastic.training.state.job_state import JobState
from elastic.training.state.optimizers import OptimizerGuard
from elastic.training.state.rollback import Rollback


class RankProgress:
    """One per process: which step this rank's weights belong to, and the way back to a commit."""

    def __init__(self, job: JobState, guard: OptimizerGuard, current: CurrentStep) -> None:
        self._job = job
        self._guard = guard
        self._current = current
        self.has_committed = False  # any step, in this process
        self._rollback: Rollback | None = None
        self._replaced: Rollback | None = None  # of objects that the script has replaced
        self._is_fresh = False  # nothing of the script has run since the last snapshot
        self._is_entering = False  # no step has begun in the present world
        self._is_torn = False  # weights that are not the initial ones, and of no step
        self.retries = 0  # calls of run.retry that this rank has completed
        self.retries_of_others = 0  # the most that a rank of this world had when it began
        self.tag: Tag | None = None  # of this rank's weights
        self.begun = False  # a step was begun
        self._masked: tuple[str, ...] = ()  # optimizers to mask in a step that is done again
        self._masked_at = 0  # its number
        self.callback_step = (0, 0, 0)  # number, epoch, index of the last committed step
        self._rates = RedoneRates()
        guard.on_update = self._rates.stepping

    @property
    def rollback(self) -> Rollback:
        """Created at its first use: the objects of the job are registered by then."""
        if self._rollback is None:
            self._rollback = self._guard.rollback = Rollback(self._job, self._guard.tracked)
            if (replaced := self._replaced) is not None:
                self._rollback.adopt(replaced.habits, replaced.snapshot)
                self._rollback.final_buffers = replaced.final_buffers
                self._replaced = None
        return self._rollback

    @property
    def is_catching_up(self) -> bool:
        """Whether other ranks have completed the call of run.retry that this one is in: it has
        nothing to train in it, and no rank to save or wait with."""
        return self.retries < self.retries_of_others

    # -- while training -----------------------------------------------------------------------

    def before_step(self, number: int) -> None:
        """Outside of an accumulation: the state is that of a commit, and a step comes next.

        Raises TrainingError if the script has overwritten the state that the world began with.
        """
        if self._is_fresh:
            return
        if self._is_entering and number > 0 and self.rollback.weights_have_changed:
            raise TrainingError(
                f"weights were changed after they had been restored for step {number}: "
                "run.retry calls its function again in each new world",
                hint="initialize weights, or load pretrained ones, before run.retry(train), not "
                "in train",
            )
        self.rollback.script_has_run()
        self._take()

    def expect_weights(self) -> None:
        """A world begins with the present weights: nothing but training may change them."""
        self._is_entering = True
        self.rollback.expect_weights()

    def register_again(self) -> None:
        """The objects of the job are about to be replaced by others of the same kind."""
        self._replaced = self._rollback
        self._rollback = self._guard.rollback = None
        self._is_fresh = False

    def lose_state(self) -> None:
        """What this rank holds is of no use in another world: it is a part of a state only."""
        self.tag = None
        self._rollback = self._guard.rollback = None
        self._is_fresh = self.begun = False

    def script_has_run(self) -> None:
        """It may have changed what it likes."""
        self._is_fresh = False

    def masked(self, number: int) -> tuple[str, ...]:
        """The optimizers whose update in step ``number`` is in the weights already."""
        return self._masked if number == self._masked_at else ()

    def committed(self, step: tuple[int, int, int], callbacks: int = 0) -> None:
        """A step (number, epoch, index) has taken effect; so many callbacks of it come next."""
        self.rollback.committed()
        self.begun = False
        self._masked = ()
        self.callback_step = step
        self.called_back(callbacks)

    def called_back(self, left: int) -> None:
        """One more callback of the last committed step is done; so many are left."""
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
        """Whether the weights belong to no step just now: an update has begun and not ended, or
        optimizers have stepped in the middle of an accumulation."""
        return self._guard.is_torn or self._has_partial_updates

    @property
    def _has_partial_updates(self) -> bool:
        accumulation, step = self._current.accumulation, self._current.step
        if accumulation.since is None:
            return False
        is_partial = step is not None and step.stepped and self._guard.accumulating(step)
        return accumulation.has_updates or bool(is_partial)

    def interrupt(self) -> None:
        """Undo what the current step has changed; :attr:`tag` says which step the weights belong
        to afterwards."""
        step, guard = self._current.step, self._guard
        rates = rates_of(guard.tracked)
        self._interrupted(
            number=step.number if step is not None else None,
            stepped=tuple(step.stepped) if step is not None else (),
            is_torn=self.is_torn,
        )
        if step is not None:
            committed = rates_of(guard.tracked)
            self._rates.interrupted(step.number, step.stepped, rates, committed)
        guard.reset()
        self._current.drop_uncommitted()
        for optimizer in guard.tracked.values():
            optimizer.zero_grad(set_to_none=True)
        for module in self._job.modules.values():
            module.module.zero_grad(set_to_none=True)
            module.reduction.forget_gradients()
            module.reduction.begin(1.0)

    def put_back(self) -> bool:
        """Make the state that of the last commit; False if the weights may hold more.

        A loop that was left with `break` looks the same as one that an exception has ended, and
        its step counts if an optimizer stepped. If that was an exception, what follows an update
        in the script (a scheduler) was not done.
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
        """Put the non-parameter state back to the last commit, and set :attr:`tag`.

        Args:
            number: of the step that was begun; None between two steps.
            stepped: the optimizers whose updates of it are in the weights.
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
        """What this rank brings to the agreement of the world with that nonce."""
        return RankState(nonce, self.tag, self.begun, self._is_torn, self.retries)

    def begin_fresh(self) -> None:
        """The state was restored from a checkpoint, or is the initial one."""
        self._take()
        self.rollback.forget()

    def begin_taking_over(self) -> None:
        """A peer's weights are about to be applied: if that fails half way, they belong to no
        step."""
        self.tag, self._is_torn = None, True

    def took_over(self, tag: Tag) -> None:
        """All of a peer's weights are applied."""
        self.tag, self._is_torn = tag, False

    def agreed(self, tag: Tag, *, generation: int) -> None:
        """All ranks of a world hold the state of ``tag``."""
        self.tag = dataclasses.replace(tag, generation=generation)
        self._masked, self._masked_at = tag.stepped, tag.step + tag.iteration
        self._is_fresh, self._is_entering, self._is_torn = False, True, False

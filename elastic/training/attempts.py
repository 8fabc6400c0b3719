"""Calls of the training function: ``run.retry``, ``run.attempts`` and ``run.begin``."""

from __future__ import annotations

from types import TracebackType

from elastic.errors import TrainingError
from elastic.process_group import refuse_stale_group
from elastic.telemetry.log import get_logger
from elastic.training.lifecycle import Lifecycle
from elastic.training.listeners import Listeners
from elastic.training.loop.callbacks import StepCallbacks
from elastic.training.loop.scope import CallEnded, Scope
from elastic.training.loop.step_loop import StepLoop
from elastic.training.loop.training_modes import TrainingModes
from elastic.training.misuse.source.counted_epochs import refuse_range
from elastic.training.recovery.bootstrap import Bootstrap
from elastic.training.recovery.selection import Strategies
from elastic.training.recovery.training_state import TrainingState
from elastic.training.state.job_state import JobState
from elastic.training.state.random_state import RandomState
from elastic.training.step import OwnBatch, Step
from elastic.world.failure import FailureHook


class Attempts:
    """Begins and ends attempts, and tracks the objects that each registers. One per process."""

    def __init__(
        self,
        *,
        state: TrainingState,
        scope: Scope,
        lifecycle: Lifecycle,
        strategies: Strategies,
        bootstrap: Bootstrap,
        loop: StepLoop,
        callbacks: StepCallbacks,
        listeners: Listeners,
        failure: FailureHook,
    ) -> None:
        self.failure = failure
        self._registry = state.registry
        self._job = state.job
        self._progress = state.progress
        self._scope = scope
        self._lifecycle = lifecycle
        self._strategies = strategies
        self._bootstrap = bootstrap
        self._loop = loop
        self._callbacks = callbacks
        self._listeners = listeners
        self._own_steps = 0  # begun by run.begin: the first two
        self._modes = TrainingModes(state.job)
        self._random = RandomState()
        self._has_registered = False  # the function that retry calls registered an object
        self._has_outer_data = False  # a loader was registered before that function was called
        self._outside: JobState | None = None  # objects registered before that function was called
        self._has_met_outside = False  # ranks met in that function, outside of its loops

    # -- registration -------------------------------------------------------------------------

    def check_registration(self, call: str) -> None:
        """Called before a registration. Raises TrainingError if the state is already restored."""
        if self._lifecycle.is_restored:
            raise TrainingError(
                f"run.{call}() is called too late: the first loop, or run.begin(), has already "
                "restored the job's state",
                hint=f"call run.{call}() before `for … in run.epochs(…)`, the loader, run.retry "
                "and run.begin(); for several models, as in cross-validation, before the first "
                "loop, or in one job each",
            )
        self._has_registered |= self._scope.in_retry

    def restore_if_complete(self) -> None:
        """Within retry, restore the state once model, optimizer and loader are registered, so that
        the function can read it before its first loop."""
        self.enter_if_complete()
        if self._scope.in_retry and self._registry.is_complete:
            self._bootstrap.enter_loop()

    def enter_if_complete(self) -> None:
        """Within retry, if a loader was registered before it: enter the world and restore the
        state, unless the function calls run.build."""
        if self._scope.in_retry and self._has_outer_data and not self._job.is_rebuilt:
            self._bootstrap.enter_loop()

    def meets(self) -> None:
        """Called before ranks exchange values at the script's request. Raises TrainingError if the
        others have completed this call of run.retry."""
        self._loop.early_leave.settle()
        if self._progress.is_catching_up:
            raise TrainingError(
                "run.mean() was called on a joining node, in a call of run.retry that the other "
                "ranks have completed, so they do not call it",
                hint=_ONE_FUNCTION,
            )
        is_outside = not self._scope.owns_epochs and self._loop.current.step is None
        self._has_met_outside |= self._scope.in_retry and is_outside

    # -- attempts -----------------------------------------------------------------------------

    def begin(self, *, is_again: bool = False) -> None:
        """Called before the training function."""
        self.failure.begin_training()
        self._callbacks.begin_attempt(is_again=is_again)
        self._listeners.begin_attempt(is_again=is_again)
        self._modes.begin_attempt(is_again=is_again)
        self._scope.passes = 0
        if not is_again:
            self._random.take()
            self._warn_of_meetings()
            self._outside = self._job.registered()
            if self._registry.has_data:
                self._scope.generators.note()
        else:
            self._random.restore()
            for loader in self._job.loaders.values():
                loader.resume()
            if self._has_registered:
                self._register_again()
        if not self._lifecycle.is_restored:
            self._strategies.begin_retry()
        self._has_outer_data = self._registry.has_data and not self._job.is_rebuilt
        if self._registry.has_model:
            self._bootstrap.enter_loop()  # the function may read the job's progress from run.state
        elif not self._strategies.active.waits_for_registration:
            self._bootstrap.enter_world()

    def _warn_of_meetings(self) -> None:
        if self._has_met_outside:
            self._has_met_outside = False
            get_logger().warning(
                "an earlier run.retry has called run.mean() outside of its loops: a node that joins"
                " from now on calls it, too, without the other ranks, and fails. %s",
                _ONE_FUNCTION,
            )

    def _register_again(self) -> None:
        """For a function that creates model, optimizer and loader in each call: new objects inherit
        the state of the objects from its previous call."""
        assert self._outside is not None
        if not self._job.is_rebuilt:
            self._bootstrap.inherit_later(self._job.tree())
            self._progress.register_again()
            self._lifecycle.register_again()
        self._registry.restore_registrations(self._outside)
        self._has_registered = False

    def end(self) -> None:
        """Called after the training function."""
        # Before any meeting, which may fail: a complete step is not repeated.
        self._loop.settle_last()
        self._strategies.active.training_returned()
        self._loop.finish()
        self._strategies.active.end_attempt()
        if self._lifecycle.is_restored and self._strategies.active.can_roll_back:
            self._progress.attempt_ended()

    def begin_own_step(self) -> Step:
        """Begin a step of the script's own loop, in which each rank has the same share."""
        if not self._scope.in_retry:
            self._scope.in_retry = True
            self.begin()
        self._bootstrap.enter_loop()
        progress = self._job.progress
        if self._own_steps < 2:
            self._own_steps += 1
            refuse_range(
                self._own_steps, is_over_loader=False, has_own_state=self._job.has_own_state
            )
        info = OwnBatch(progress.epoch, progress.step, self._lifecycle.world.data_size)
        self._loop.reach_own_step()
        step = self._loop.begin(None, (info, None), iter(()))
        step.only_micro_batch()
        return step

    def attempt(self, *, is_again: bool) -> Attempt:
        """Create one call of the training function. ``is_again``: not the first one."""
        return Attempt(self, self._scope, self._strategies, is_again=is_again)


class Attempt:
    """One call of the training function: ``with attempt: …``. Created by ``run.attempts()``."""

    def __init__(
        self, attempts: Attempts, scope: Scope, strategies: Strategies, *, is_again: bool
    ) -> None:
        self._attempts = attempts
        self._scope = scope
        self._strategies = strategies
        self._is_again = is_again
        self._is_inner = scope.in_retry
        self.is_over = False
        self.succeeded = False

    def __enter__(self) -> None:
        if not self._is_inner:
            self._scope.in_retry = True
            self._attempts.begin(is_again=self._is_again)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        self.is_over = True
        if self._is_inner:
            self.succeeded = error is None
            return False
        try:
            is_handled = self._end(error)
        except BaseException as failure:
            self._attempts.failure.end_training(failure)
            raise
        if error is not None and not is_handled:
            self._attempts.failure.end_training(error)
        return is_handled

    def _end(self, error: BaseException | None) -> bool:
        """Whether the exception is handled: the function has returned, or is called again."""
        strategy = self._strategies.active
        try:
            if error is None or isinstance(error, CallEnded):
                self._attempts.end()
                self.succeeded = True
                return True
        except Exception as failure:
            refuse_stale_group(failure)
            if not strategy.is_fault(failure):
                raise
            error = failure
        finally:
            self._scope.in_retry = False
        refuse_stale_group(error)
        if not strategy.is_fault(error):
            if isinstance(error, StopIteration) and self._scope.resumed_at:
                raise _at_the_end(self._scope.resumed_at) from error
            return False
        self._scope.in_retry = True
        strategy.recover(error)
        self._scope.in_retry = False
        return True


_ONE_FUNCTION = (
    "Call a function with all trainings (folds, phases) once: def main(): …; run.retry(main)"
)


def _at_the_end(resumed_at: int) -> TrainingError:
    return TrainingError(
        f"next() was called at the end of an epoch that was resumed at step {resumed_at}: "
        "`for i in range(len(loader))` counts from 0 and requests more batches than remain",
        hint="for i in range(loader.index, len(loader)):\n    batch = next(iterator)",
    )

"""Commits steps at their end, or once their gradients are used, and calls the callbacks.

See docs/decisions/0020.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from elastic.errors import TrainingError
from elastic.hangs.phases import phases
from elastic.telemetry.log import get_logger
from elastic.training.checkpointing.manager import CheckpointManager
from elastic.training.data.loader import ElasticLoader
from elastic.training.gradients.fingerprints import HeldParts
from elastic.training.lifecycle import Lifecycle
from elastic.training.loop.callbacks import StepCallbacks
from elastic.training.misuse.optimizer_states import (
    refuse_states_of_shards,
    refuse_subclasses,
)
from elastic.training.observers.step_observers import Recorders
from elastic.training.recovery.selection import Strategies
from elastic.training.recovery.training_state import TrainingState
from elastic.training.state.job_state import JobState
from elastic.training.state.replicas import (
    compare,
    differing_names,
    is_compared_after,
    warn_of_copies,
    warn_of_differing,
)
from elastic.training.step import Step
from elastic.world.world import World


class Commits:
    """Decides when steps are committed. One per process."""

    def __init__(
        self,
        state: TrainingState,
        lifecycle: Lifecycle,
        strategies: Strategies,
        checkpoints: CheckpointManager,
        callbacks: StepCallbacks,
        recorders: Recorders,
    ) -> None:
        self._job = state.job
        self._optimizer_watch = state.optimizer_watch
        self._current = state.current
        self._progress = state.progress
        self._lifecycle = lifecycle
        self._strategies = strategies
        self._checkpoints = checkpoints
        self._callbacks = callbacks
        self._ledger = recorders.ledger
        self._observers = recorders.observers
        self._compared_in: World | None = None  # the last world in which replicas were compared
        self._has_warned_of_accumulation = False
        self._has_warned_of_state = self._has_warned_of_copies = False
        # Digests of untracked copies of the model by name, of which the loop knows.
        self.copies: Callable[[], Mapping[str, str]] = dict

    def commit(self, step: Step, loader: ElasticLoader | None) -> None:
        """End an iteration: its data is used. Commit it, unless its gradients are still unused."""
        waiting = self._waiting(step)
        if waiting and loader is None:
            self._warn_of_accumulation(waiting)
            waiting = []
        self._current.is_committing = True
        try:
            self._end(step, loader, is_waiting=bool(waiting))
        finally:
            self._current.is_committing = False

    def _end(self, step: Step, loader: ElasticLoader | None, *, is_waiting: bool) -> None:
        self._current.drop()
        self._job.progress.step += 1
        phases.committed(self._job.progress.step)
        self._checkpoints.step_ended()
        if loader is not None:
            loader.advance()
            for other in self._job.loaders.values():
                other.following.commit(step)
        self._observers.committed(self._job.progress.step)
        if is_waiting:
            self._current.accumulation.add(step)
        else:
            is_last = loader is not None and loader.position.step == len(loader)
            lengths = None if is_last else self._current.accumulation.shorter_length(step)
            self._commit(step)
            if lengths is not None:
                self._checkpoints.stop()  # do not save these weights
                raise _counter_shifted(step, *lengths)

    def finish(self) -> None:
        """End training: commit an open accumulation."""
        self.call_back_again()
        self._current.is_committing = True
        try:
            if (last := self._current.accumulation.take_last()) is not None:
                self._commit(last)  # unused gradients are dropped, as in any loop
        finally:
            self._current.is_committing = False

    def _waiting(self, step: Step) -> list[str]:
        """The optimizers that keep gradients of this step for later ones."""
        if self._job.built is not None:
            return self._job.built.accumulating(step.stepped)
        waiting = self._optimizer_watch.accumulating(step)
        if not waiting or self._optimizer_watch.has_stepped:
            return waiting
        # The script may use gradients without an optimizer.
        return [] if self._progress.rollback.changes_by_script else waiting

    def _commit(self, last: Step) -> None:
        """Commit the iterations up to ``last``: optimizers have used all gradients."""
        self._progress.has_committed = True
        if unwrapped := self._optimizer_watch.unwrapped_and_tracked:
            self._progress.rollback.copy_also(unwrapped)
        for module in self._job.modules.values():
            module.reduction.forget_gradients()
        for step in self._current.accumulation.end(last):
            self._note_in_ledger(step)
        if self._strategies.active.can_roll_back:
            place = (last.number, last.epoch, last.index)
            self._progress.committed(place, len(self._callbacks))
        self._current.is_committing = False
        self._job.check_user()
        self._compare_replicas(last)  # after the commit, because a peer may fail now
        self._call_back(last, len(self._callbacks))
        self._strategies.active.committed()

    def _note_in_ledger(self, step: Step) -> None:
        if self._ledger.is_on:
            self._ledger.step(
                generation=self._lifecycle.world.generation,
                step=step.number,
                epoch=step.epoch,
                rank=self._lifecycle.world.rank,
                samples=step.indices,
            )

    def _call_back(self, step: Step, left: int) -> None:
        """Call the last ``left`` callbacks, each once even if the world changes meanwhile."""
        callbacks = self._callbacks.last(left)
        left = len(callbacks)  # fewer if another version of the script resumes from a checkpoint
        for callback in callbacks:
            callback(step)
            self._lifecycle.settle()  # it may have used an invalid result
            left -= 1
            if self._strategies.active.can_roll_back:
                self._progress.called_back(left)

    def call_back_again(self) -> None:
        """Call the last step's callbacks that were not called because of a fault.

        Their changes are missing in the current state, whether a peer or a checkpoint had it.
        """
        progress = self._job.progress
        if progress.callbacks_left:
            step = Step.past(*progress.last, self._lifecycle.world.data_size)
            self._call_back(step, progress.callbacks_left)

    def _warn_of_accumulation(self, waiting: list[str]) -> None:
        if not self._has_warned_of_accumulation and not self._job.has_scaler:
            self._has_warned_of_accumulation = True
            get_logger().warning(
                "run.commit() was called while %s has unapplied gradients, which a change of the "
                "world would discard. Call run.begin() before the first micro-batch of an "
                "optimizer step, and run.commit() after optimizer.step().",
                ", ".join(waiting),
            )

    def _compare_replicas(self, step: Step) -> None:
        """Compare replicas periodically, and after the first update of each world, in which a
        joining process that lacks some of the script's state differs."""
        world = self._lifecycle.world
        if not step.optimizer_stepped:
            return
        if is_compared_after(step.number):
            self._check_optimizer_states(step, refuse_subclasses)
        if world.size == 1:
            return
        weights: dict[str, Sequence[torch.Tensor]] = {}
        is_first = self._compared_in is not world
        if is_first:
            self._compared_in = world
        if is_first or is_compared_after(step.number):
            # On all ranks, because it is a collective, and even after a warning: new ranks have
            # not warned yet.
            with self._lifecycle.replica.whole():
                tracked = self._job.tracked if world.mesh.stages == 1 else {}
                differing = differing_names(self._job.user, tracked, self.copies())
            if (differing.state or differing.tracked) and not self._has_warned_of_state:
                self._has_warned_of_state = True
                warn_of_differing(differing)
            if differing.copies and not self._has_warned_of_copies:
                self._has_warned_of_copies = True
                warn_of_copies(differing.copies)
            if self._has_states_of_shards and self._checkpoints.is_on:
                with self._lifecycle.replica.whole():
                    self._check_optimizer_states(step, refuse_states_of_shards)
            weights |= {name: m.local_parameters for name, m in self._job.modules.items()}
        if is_first:
            weights |= self._optimizer_watch.unwrapped
        if not weights:
            return
        try:
            with self._lifecycle.replica.whole():
                optimizers = self._optimizer_watch.tracked
                is_same = compare(weights, optimizers, world, step.number, parts=self._parts)
        except TrainingError:
            self._checkpoints.stop()  # do not save these weights
            raise
        if is_same:
            for module in self._job.modules.values():
                module.gradients_compared()

    @property
    def _has_states_of_shards(self) -> bool:
        return self._job.is_sharded or self._job.built is not None

    def _check_optimizer_states(
        self, step: Step, refuse: Callable[[JobState, World, int], None]
    ) -> None:
        try:
            refuse(self._job, self._lifecycle.world, step.number)
        except TrainingError:
            self._checkpoints.stop()  # do not save this state
            raise

    @property
    def _parts(self) -> dict[str, HeldParts]:
        return {name: module.held_parts() for name, module in self._job.modules.items()}


def _counter_shifted(step: Step, length: int, usual: int) -> TrainingError:
    return TrainingError(
        f"step {step.number} used the gradients of {length} batches, but earlier steps used "
        f"{usual}: the script's batch counter was not reset when a fault repeated the accumulation "
        "from its first batch",
        hint="count with enumerate(loader, start=loader.index), or create the counter in the "
        "function that run.retry calls",
    )

"""Commits steps at their end, or once their gradients are used, and calls the callbacks.

See docs/decisions/0020.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence

import torch

from elastic.errors import TrainingError
from elastic.hangs.phases import phases
from elastic.telemetry.log import get_logger
from elastic.training.checkpointing.manager import CheckpointManager
from elastic.training.data.loader import ElasticLoader
from elastic.training.gradients.fingerprints import HeldParts
from elastic.training.gradients.same_parts import compare_same_parts
from elastic.training.gradients.weight_digest import WeightDigest
from elastic.training.gradients.wrap import Wrapped
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
    Weights,
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
        self._digests: WeightDigest | None = None  # of that world's weights, if it has replicas
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

    def digest(self, number: int) -> torch.Tensor | None:
        """The digest of some weights at the beginning of step ``number``; None if ranks compare
        none: they have not compared all weights in this world yet."""
        if self._digests is None or self._compared_in is not self._lifecycle.world:
            return None
        return self._digests.bits(number)

    def _compare_replicas(self, step: Step) -> None:
        """Compare replicas after the first update of each world, in which a joining process that
        lacks some of the script's state differs; then if digests of their weights differ, and
        periodically what no digest covers."""
        world, flags = self._lifecycle.world, self._checkpoints.flags
        is_different, flags.has_different_weights = flags.has_different_weights, False
        is_due = step.optimizer_stepped and is_compared_after(step.number)
        if is_due:
            self._check_optimizer_states(step, refuse_subclasses)
        if world.size == 1:
            return
        has_updated = step.optimizer_stepped or not self._optimizer_watch.tracked
        is_first = has_updated and self._compared_in is not world
        if is_first or is_due:
            self._compare_state(step)
        if not (is_first or is_due or is_different):
            return
        try:
            with self._lifecycle.replica.whole():
                self._compare_weights(
                    step, is_periodic=is_first or is_due, of_all=is_first or is_different
                )
        except TrainingError:
            self._checkpoints.stop()  # do not save these weights
            raise

    def _compare_state(self, step: Step) -> None:
        """Warn about other state that differs between ranks, and refuse optimizers of shards.

        On all ranks, because it is a collective, and even after a warning: new ranks have not
        warned yet.
        """
        with self._lifecycle.replica.whole():
            tracked = self._job.tracked if self._lifecycle.world.mesh.stages == 1 else {}
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

    def _compare_weights(self, step: Step, *, is_periodic: bool, of_all: bool) -> None:
        """Compare what no digest covers if ``is_periodic``, and all weights if ``of_all``."""
        world, modules, parts = self._lifecycle.world, self._job.modules, self._parts
        wrapped: Weights = {name: module.local_parameters for name, module in modules.items()}
        has_same_parts = is_periodic and bool(world.mesh.same_part_dims)
        if has_same_parts and compare_same_parts(wrapped, parts, world, step.number):
            for module in modules.values():
                module.gradients_compared()
        unwrapped = dict(sorted(self._optimizer_watch.unwrapped.items())) if of_all else {}
        digests = self._digests if of_all and self._compared_in is world else None
        is_exact = compare(
            {**wrapped, **unwrapped} if of_all else {},
            self._optimizer_watch.tracked,
            world,
            step.number,
            parts=parts,
            changed_in=None if digests is None else digests.changed_in(step.number),
        )
        if not of_all:
            return
        # Processors may round differently, and a script may change weights at the beginning of each
        # step and back: comparing all of them in every step would slow training down.
        is_sent = is_exact and digests is None
        first = step.number + 1 if is_sent else 2 * step.number + 1
        self._compared_in, self._digests = world, None
        if world.size > world.mesh.size:  # several replicas
            own = {name: functools.partial(_parameters, module) for name, module in modules.items()}
            own |= {name: functools.partial(_same, each) for name, each in unwrapped.items()}
            same_after = step.number if is_exact else None
            self._digests = WeightDigest(own, same_after=same_after, first=first)

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


def _parameters(module: Wrapped) -> Sequence[torch.Tensor]:
    return module.all_parameters


def _same(tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    return tensors


def _counter_shifted(step: Step, length: int, usual: int) -> TrainingError:
    return TrainingError(
        f"step {step.number} used the gradients of {length} batches, but earlier steps used "
        f"{usual}: the script's batch counter was not reset when a fault repeated the accumulation "
        "from its first batch",
        hint="count with enumerate(loader, start=loader.index), or create the counter in the "
        "function that run.retry calls",
    )

"""What the end of a step means: committed, or open until its gradients are used; then callbacks.

See docs/decisions/0024.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from elastic.errors import TrainingError
from elastic.process_group.pending import pending
from elastic.telemetry.log import get_logger
from elastic.training.callbacks import StepCallbacks
from elastic.training.data.loader import ElasticLoader
from elastic.training.gradients.accumulation import Accumulation
from elastic.training.gradients.replicas import (
    compare,
    differing_names,
    is_compared_after,
    warn_of_differing,
)
from elastic.training.state.rollback import PARTIAL
from elastic.training.step import Step

if TYPE_CHECKING:
    from elastic.training.session import Session


class Commits:
    """Owned by the session."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self.callbacks = StepCallbacks()
        self.has_committed = False  # any step, in this process
        self._accumulation = Accumulation()
        self._has_compared_replicas = False  # in this world
        self._has_warned_of_accumulation = False
        self._has_warned_of_state = False

    def enter_world(self) -> None:
        """A world begins."""
        self._has_compared_replicas = False

    def commit(self, step: Step, loader: ElasticLoader | None) -> None:
        """An iteration has ended: its data is used, and its gradients may be."""
        session = self._session
        waiting = self._waiting(step)
        if waiting and loader is None:
            self._warn_of_accumulation(waiting)
            waiting = []
        session.drop_step()
        session.job.progress.step += 1
        session.between.has_stepped = True
        if loader is not None:
            loader.advance()
            for other in session.job.loaders.values():
                other.following.commit(step)
        if waiting:
            self._accumulation.add(step)
        else:
            self._commit(step)

    def finish(self) -> None:
        """Training is complete: nothing is open any more."""
        self.call_back_again()
        if (last := self._accumulation.take_last()) is not None:
            self._commit(last)  # gradients are left over: as in any loop, nobody uses them

    def drop(self) -> None:
        """Open iterations are to be done again."""
        self._accumulation.drop()

    def _waiting(self, step: Step) -> list[str]:
        """The optimizers that hold gradients of this step for later ones."""
        session = self._session
        if not session.can_roll_back:
            return []
        waiting = session.guard.accumulating(step)
        if not waiting or session.guard.has_stepped:
            return waiting
        # The script may use gradients without an optimizer.
        return [] if session.recovery.rollback.script_changes_weights else waiting

    def _commit(self, last: Step) -> None:
        """Optimizers have used all gradients: the iterations up to ``last`` have taken effect."""
        self.has_committed = True
        if self._accumulation.has_updates:
            self._session.recovery.rollback.copy_weights(PARTIAL)
        if unwrapped := self._session.guard.unwrapped_and_tracked:
            self._session.recovery.rollback.watch_also(unwrapped)
        for module in self._session.job.modules.values():
            module.reduction.forget_gradients()
        for step in self._accumulation.end(last):
            self._note_in_ledger(step)
        if self._session.can_roll_back:
            place = (last.number, last.epoch, last.index)
            self._session.recovery.committed(place, len(self.callbacks))
        self._compare_replicas(last)  # not before: the step counts, whatever becomes of its peers
        self._call_back(last, len(self.callbacks))
        if self._session.is_in_process:
            self._session.changes.committed()

    def _note_in_ledger(self, step: Step) -> None:
        if self._session.ledger.is_on:
            self._session.ledger.step(
                generation=self._session.world.generation,
                step=step.number,
                epoch=step.epoch,
                rank=self._session.world.rank,
                samples=step.indices,
            )

    def _call_back(self, step: Step, left: int) -> None:
        """Call the last ``left`` callbacks: once each, whatever becomes of the world meanwhile."""
        for callback in self.callbacks.last(left):
            callback(step)
            pending.settle()  # it may have used what an abort has left of a collective
            left -= 1
            if self._session.can_roll_back:
                self._session.recovery.called_back(left)

    def call_back_again(self) -> None:
        """Callbacks of the last step that a fault has interrupted are called in this world."""
        tag = self._session.recovery.tag
        if tag is not None and tag.callbacks:
            step = Step.past(*self._session.recovery.callback_step, self._session.world.size)
            self._call_back(step, tag.callbacks)

    @property
    def accumulated_since(self) -> int | None:
        """The first step whose gradients no optimizer has used; None: there is none."""
        return self._accumulation.since

    @property
    def has_partial_updates(self) -> bool:
        """Whether weights hold updates from the middle of an accumulation."""
        if self._accumulation.since is None:
            return False
        step = self._session.step
        is_partial = step is not None and step.stepped and self._session.guard.accumulating(step)
        return self._accumulation.has_updates or bool(is_partial)

    def _warn_of_accumulation(self, waiting: list[str]) -> None:
        if not self._has_warned_of_accumulation and not self._session.job.has_scaler:
            self._has_warned_of_accumulation = True
            get_logger().warning(
                "run.commit() while %s holds gradients that it has not used: a change of the world "
                "would lose them. Call run.begin() before the first micro-batch of an "
                "optimizer step, and run.commit() after optimizer.step().",
                ", ".join(waiting),
            )

    def _compare_replicas(self, step: Step) -> None:
        """Now and then, and in the first step of each world where something is not wrapped."""
        if not step.optimizer_stepped or self._session.world.size == 1:
            return
        weights: dict[str, Sequence[torch.Tensor]] = {}
        if is_compared_after(step.number):
            # Always, since new ranks have not warned yet, and all ranks have to call it.
            differing = differing_names(self._session.job.user)
            if differing and not self._has_warned_of_state:
                self._has_warned_of_state = True
                warn_of_differing(differing)
            weights |= {name: m.all_parameters for name, m in self._session.job.modules.items()}
        if (unwrapped := self._session.guard.unwrapped) and not self._has_compared_replicas:
            self._has_compared_replicas = True
            weights |= unwrapped
        if not weights:
            return
        try:
            compare(weights, self._session.world.rank, step.number)
        except TrainingError:
            self._session.saver.due = None  # nothing of these weights is to be saved
            raise

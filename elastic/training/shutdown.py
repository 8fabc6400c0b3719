"""Ends the process: after training, or with an exception of the script."""

from __future__ import annotations

import logging

from elastic.events import CheckpointSkipped, RunClosed
from elastic.process_group import ProcessGroup
from elastic.training.checkpointing.manager import CheckpointManager, leaving_s
from elastic.training.halt import Halt
from elastic.training.lifecycle import Lifecycle
from elastic.training.loop.step_loop import StepLoop
from elastic.training.observers.step_observers import Recorders
from elastic.training.recovery.selection import Strategies
from elastic.training.recovery.training_state import TrainingState
from elastic.tuning.worker_intervals import LAST_SAVE_S, SHARE_S
from elastic.worker.worlds import Worlds
from elastic.world.failure import FailureHook


class Shutdown:
    """Saves and reports at the end of the process. One per process."""

    def __init__(
        self,
        *,
        state: TrainingState,
        lifecycle: Lifecycle,
        strategies: Strategies,
        checkpoints: CheckpointManager,
        loop: StepLoop,
        halt: Halt,
        group: ProcessGroup,
        worlds: Worlds | None,
        recorders: Recorders,
        failure: FailureHook,
    ) -> None:
        self._failure = failure
        self._job = state.job
        self._optimizer_watch = state.optimizer_watch
        self._current = state.current
        self._progress = state.progress
        self._lifecycle = lifecycle
        self._strategies = strategies
        self._checkpoints = checkpoints
        self._loop = loop
        self._halt = halt
        self._group = group
        self._worlds = worlds
        self._ledger = recorders.ledger
        self._observers = recorders.observers
        self._journal = recorders.journal

    def close(self, *, clean: bool, error: str = "", is_of_the_world: bool = False) -> None:
        """End the job for this process. ``error`` is reported to the agent as the reason."""
        if clean and not error:
            # Of a script that handled an exception of its training function itself, and exits.
            clean, error = not self._failure.failed, self._failure.text
        strategy = self._strategies.active
        self._optimizer_watch.close()
        if clean and not error and not self._halt.has_left:
            self._close_in_order()
        else:
            self._observers.end_world("close" if clean else "fault")
            must_save = strategy.must_save_after_error(is_of_the_world=is_of_the_world)
            self._end_with(error if must_save else "")
            if clean:
                # The exit code after a handled exception is not known yet. If it is that of a
                # failure, the agent learns of it when the process ends: peers must not break
                # earlier, or the next world would include this rank.
                self._group.keep_connections()
            else:
                strategy.release_peers()
        self._observers.close()
        # After an error, change nothing else: a step may have begun, and peers may have ended.
        self._loop.early_leave.close()
        self._loop.structures.close()
        if self._worlds is not None:
            self._worlds.close(clean=clean, error=error)
        self._lifecycle.close()
        self._journal.emit(RunClosed(clean=clean, error=error), level=logging.DEBUG)

    def _close_in_order(self) -> None:
        """Save the last state after training has completed."""
        self._loop.finish(is_last=True)
        self._observers.end_world("close")
        if self._lifecycle.is_restored and self._ledger.is_on:
            self._ledger.end(
                generation=self._lifecycle.world.generation,
                step=self._job.progress.step,
                rank=self._lifecycle.world.rank,
                sha256=self._job.weights_sha256(),
                position=self._lifecycle.world.rank_in_replica,
            )
        if self._lifecycle.is_restored and self._current.step is None:
            self._checkpoints.flush(self._job, LAST_SAVE_S)
        self._checkpoints.release()
        self._checkpoints.close(0.0)
        for module in self._job.modules.values():
            module.leave_world()
        self._group.destroy()

    def _end_with(self, error: str) -> None:
        """Save the last commit, if possible, before the script's exception ends the process."""
        if error and self._lifecycle.is_restored and self._checkpoints.is_open:
            with self._halt.own_save():
                self._save_after(error)
        self._checkpoints.close(SHARE_S)

    def _save_after(self, error: str) -> None:
        if not self._progress.roll_back():
            step = self._job.progress.step
            reason = f"the script failed in the middle of an update: {error}"
            self._journal.emit(CheckpointSkipped(name=f"step {step}", reason=reason))
        elif self._checkpoints.world_size == 1:
            self._checkpoints.flush(self._job, leaving_s())
        else:
            self._strategies.active.flush_after_error()

"""Handles SIGTERM in a worker: its state is saved before the process ends, unless peers have it.

There are two cases. If the process will not be restarted, all ranks save together at the next
boundary, which the control flags of the step before it announce; or, if the main thread waits for a
world that will not form, this rank saves there. If torchrun ends the process to restart all workers
of the node, because one of them has died or the world has changed, ranks of this world have ended,
and one of the remaining ranks writes the complete state.
"""

from __future__ import annotations

import os
import threading

from elastic.clock import SYSTEM_CLOCK
from elastic.events import CheckpointSkipped
from elastic.process_group import ProcessGroup
from elastic.training.checkpointing.manager import CheckpointManager, Peers, leaving_s
from elastic.training.halt import Halt, Place
from elastic.training.lifecycle import Lifecycle
from elastic.training.observers.step_observers import Recorders
from elastic.training.recovery.selection import Strategies
from elastic.training.recovery.training_state import TrainingState
from elastic.tuning.worker_intervals import (
    BOUNDARY_S,
    PREEMPTION_ASK_AGAIN_S,
    PREEMPTION_LIMIT_S,
    PREEMPTION_SLICE_S,
    STOPPED_BY_TORCHRUN_S,
)
from elastic.worker.sigterm import (
    ENDING_FILE,
    EXIT_CODE,
    ask_agent_on_sigterm,
    end_on_sigterm,
    ends_for_good,
)
from elastic.worker.worlds import Worlds
from elastic.world.world import is_launched


class Preemption:
    """The SIGTERM handler. One per process, installed when the run is created."""

    def __init__(
        self,
        *,
        state: TrainingState,
        lifecycle: Lifecycle,
        strategies: Strategies,
        checkpoints: CheckpointManager,
        halt: Halt,
        group: ProcessGroup,
        worlds: Worlds | None,
        recorders: Recorders,
    ) -> None:
        self._job = state.job
        self._current = state.current
        self._progress = state.progress
        self._lifecycle = lifecycle
        self._strategies = strategies
        self._checkpoints = checkpoints
        self._halt = halt
        self._group = group
        self._worlds = worlds
        self._observers = recorders.observers
        self._journal = recorders.journal
        self._handling = threading.Lock()

    def install(self) -> None:
        """Install the handler for SIGTERM.

        Only this library's agent reports what the signal means. Without a launcher it is final.
        Other launchers send it both to end a job and to restart all workers.
        """
        is_own = self._halt.on_signal
        if self._worlds is not None:
            ask_agent_on_sigterm(self._worlds, self._save_at_exit, is_own)
        elif os.environ.get(ENDING_FILE):
            end_on_sigterm(self._save_at_exit, ends_for_good, is_own)
        elif self._checkpoints.is_on:
            end_on_sigterm(self._save_at_exit, lambda: not is_launched(), is_own)

    def _save_at_exit(self, is_final: bool) -> None:
        """Handle the signal on its own thread. The process ends on return, or earlier at a
        boundary."""
        if not self._checkpoints.is_open or not self._lifecycle.is_restored:
            return
        if self._worlds is not None and self._worlds.has_left:
            return  # a graceful end: the state is already saved
        if is_final:
            self._save_finally()
        elif not self._strategies.active.is_state_held_elsewhere:
            with self._handling:  # serializes signals: the first one's thread ends the process
                self._save_before_restart()
                self._observers.end_world("fault")  # writes the values logged for the saved steps
                os._exit(EXIT_CODE)

    # -- the process will not be restarted ----------------------------------------------------

    def _save_finally(self) -> None:
        self._halt.is_preempted = True
        now_s = SYSTEM_CLOCK.monotonic()
        until_s, abort_s = now_s + leaving_s(), now_s + min(BOUNDARY_S, leaving_s() / 2)
        while (now_s := SYSTEM_CLOCK.monotonic()) < until_s:
            if self._is_waiting_for_world:
                self._roll_back_and_save(leaving_s(), is_stopped=False)
                return
            if now_s >= abort_s and self._lifecycle.is_changing:
                # A member of the next world is dead, and no other world will form: the abort stops
                # the main thread from building it, and it waits for a world.
                self._group.abort()
                abort_s = now_s + BOUNDARY_S
            SYSTEM_CLOCK.sleep(PREEMPTION_SLICE_S)

    def _roll_back_and_save(self, budget_s: float, *, is_stopped: bool) -> None:
        if self._strategies.active.roll_back(is_stopped=is_stopped):
            self._checkpoints.flush(self._job, budget_s, Peers.ARE_GONE)
            self._checkpoints.close(0.0)
        else:
            self._report_skipped("this rank was in the middle of an update")

    # -- torchrun restarts the process --------------------------------------------------------

    def _save_before_restart(self) -> None:
        began_s = SYSTEM_CLOCK.monotonic()
        budget_s = min(leaving_s(), STOPPED_BY_TORCHRUN_S)
        until_s = began_s + budget_s
        limit = threading.Timer(budget_s + PREEMPTION_LIMIT_S, os._exit, (EXIT_CODE,))
        limit.name, limit.daemon = "elastic-sigterm-limit", True
        limit.start()
        self._halt.request()
        self._group.abort()  # releases the main thread from a collective, in-process
        if not self._halt.wait_for_own_save(budget_s) or not self._checkpoints.is_open:
            return  # an exception ended the script, and the main thread has saved what it could
        if not self._wait_for_stop(began_s + min(BOUNDARY_S, budget_s / 2), until_s):
            self._report_skipped("no step boundary was reached in time")
            return
        left_s = max(0.0, until_s - SYSTEM_CLOCK.monotonic())
        if self._halt.place is Place.BOUNDARY:
            self._checkpoints.flush(self._job, left_s, Peers.ARE_GONE)
        else:
            self._roll_back_and_save(left_s, is_stopped=self._halt.place is not None)

    @property
    def _is_waiting_for_world(self) -> bool:
        return self._worlds is not None and self._worlds.is_waiting

    def _wait_for_stop(self, interrupt_s: float, until_s: float) -> bool:
        """Wait until the main thread has stopped; interrupt it from ``interrupt_s`` on."""
        next_interrupt_s = interrupt_s
        while (now_s := SYSTEM_CLOCK.monotonic()) < until_s:
            if self._is_waiting_for_world or self._halt.place is not None:
                return True
            if now_s >= next_interrupt_s:
                self._halt.interrupt(self.may_stop_here)
                next_interrupt_s = now_s + PREEMPTION_ASK_AGAIN_S
            SYSTEM_CLOCK.sleep(PREEMPTION_SLICE_S)
        return False

    def may_stop_here(self) -> bool:
        """Whether the state can be restored to the last commit. Called on the main thread, in the
        middle of the script."""
        if self._lifecycle.is_changing or self._current.is_committing:
            return False
        if self._current.step is None and not self._strategies.active.has_snapshot_between_steps:
            return False
        return self._progress.can_restore

    def _report_skipped(self, why: str) -> None:
        step = self._job.progress.step
        self._journal.emit(CheckpointSkipped(name=f"step {step}", reason=why))

"""Saves the last commit before a process ends, wherever its main thread is, unless peers have it.

There are three cases. If a signal ends the process for good, all ranks save together at the next
boundary, which the control flags of the step before it announce. If torchrun ends the process to
restart all workers of the node, because one of them has died or the world has changed, ranks of
this world have ended, and one of the remaining ranks writes the complete state. If the agent
announces over its link that all nodes leave, they leave at the next boundary, and save there.

A boundary may be minutes away: the script evaluates, compiles, reads data, or waits for a rank that
does. So in all cases another thread has a deadline. When it expires, the main thread is stopped
where it is, and this thread saves the last commit, provided that it can be restored exactly. Else
the lost steps are reported.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable

import torch

from elastic.errors import SYSTEM_CLOCK
from elastic.groups.world import is_launched
from elastic.telemetry.events import CheckpointSkipped
from elastic.train.checkpointing import Peers, leaving_s
from elastic.train.current import Place
from elastic.train.session import Session
from elastic.tuning.intervals import (
    BOUNDARY_S,
    LEAVE_SLICE_S,
)
from elastic.worker.sigterm import (
    ENDING_FILE,
    EXIT_CODE,
    ask_agent_on_sigterm,
    end_on_sigterm,
    ends_for_good,
    is_handled,
)

# A worker that torchrun has sent SIGTERM gets SIGKILL after 30 s (PContext.close, torch 2.11 to
# 2.15): this leaves 6 s for the interpreter to exit.
STOPPED_BY_TORCHRUN_S = 24.0
# A main thread that has not executed the handler of an interrupt for this long runs native code. If
# it only waits for a core, nothing is lost: the handler is the next Python that it executes.
NATIVE_CODE_S = 1.0
# Beyond the budget of a last save: the interrupted main thread may never release a lock.
PREEMPTION_LIMIT_S = 2.0
# How often it is checked whether the main thread has reached a boundary.
PREEMPTION_SLICE_S = 0.02
# A worker asks its agent this often whether the SIGTERM is final.
PREEMPTION_ASK_AGAIN_S = 0.1


class Preemption:
    """The last save of a process. One per process, installed when the run is created."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._job = session.job
        self._current = session.current
        self._progress = session.progress
        self._lifecycle = session.lifecycle
        self._checkpoints = session.checkpoints
        self._halt = session.halt
        self._group = session.group
        self._worlds = session.worlds
        self._hooks = session.hooks
        self._journal = session.journal
        self._handling = threading.Lock()

    def install(self) -> None:
        """Handle the signals that end this process, and the agent's notice that all nodes leave.

        Only this library's agent reports what a signal means. Without a launcher it is final.
        Other launchers send it both to end a job and to restart all workers.
        """
        is_own = self._halt.on_signal
        if self._worlds is not None:
            self._worlds.on_job_left = self._begin_leaving
            ask_agent_on_sigterm(self._worlds, self._save_at_exit, is_own)
        elif os.environ.get(ENDING_FILE):
            end_on_sigterm(self._save_at_exit, ends_for_good, is_own)
        elif self._checkpoints.is_on:
            end_on_sigterm(self._save_at_exit, lambda: not is_launched(), is_own)

    # -- a signal ---------------------------------------------------------------------------

    def _save_at_exit(self, is_final: bool) -> None:
        """Handle the signal on its own thread. The process ends on return, or earlier at a
        boundary."""
        if not self._checkpoints.is_open:
            return
        if not is_final and self._session.strategy.is_state_held_elsewhere:
            return
        with self._handling:  # serializes signals: the first one's thread ends the process
            if self._worlds is not None and self._worlds.has_left:
                return  # a graceful end: the state is already saved
            if not self._has_state():
                return
            budget_s = leaving_s() if is_final else min(leaving_s(), STOPPED_BY_TORCHRUN_S)
            deadlines = _Deadlines(budget_s)
            if is_final:
                self._halt.is_preempted = True  # the main thread saves and ends at a boundary
                self._wait(deadlines.interrupt_s, lambda: self._is_waiting_for_world)
            self._save_last_commit(deadlines)
            os._exit(EXIT_CODE)

    # -- the agent's notice -----------------------------------------------------------------

    def _begin_leaving(self) -> None:
        """All nodes leave, so no rank keeps the state. Called on the link's thread."""
        if self._checkpoints.is_open:
            threading.Thread(target=self._leave, name="elastic-leaving", daemon=True).start()

    def _leave(self) -> None:
        with self._handling:
            deadlines = _Deadlines(leaving_s())
            self._wait(deadlines.interrupt_s, lambda: not self._is_main_thread_late)
            if not self._is_main_thread_late or not self._has_state():
                return
            if not self._save_last_commit(deadlines):
                return  # the main thread may still reach a boundary
            assert self._worlds is not None
            self._worlds.left(self._job.progress.step)
        while not ends_for_good():  # as the main thread does after it has left at a boundary
            SYSTEM_CLOCK.sleep(LEAVE_SLICE_S)
        os._exit(EXIT_CODE)

    @property
    def _is_main_thread_late(self) -> bool:
        """Whether the main thread has not reached a boundary since the agent's notice."""
        assert self._worlds is not None
        return self._worlds.has_newer and not self._worlds.has_left

    # -- the last save ------------------------------------------------------------------------

    def _save_last_commit(self, deadlines: _Deadlines) -> bool:
        """Stop the main thread, and save the last commit or report why that is impossible. Returns
        whether the main thread is stopped for good."""
        if self._needs_all_ranks:
            # This rank has only shards, which all ranks save at a boundary.
            if self._lifecycle.is_changing:
                # A member of the next world is dead, and no other world will form: the abort stops
                # the main thread from building it, and it waits for a world.
                self._group.abort()
            self._wait(deadlines.until_s, lambda: self._is_settled)
            if not self._is_settled:
                self._report_lost("all ranks of a sharded model save at a step boundary")
            return False
        limit = threading.Timer(deadlines.left_s + PREEMPTION_LIMIT_S, self._give_up)
        limit.name, limit.daemon = "elastic-last-save-limit", True
        limit.start()
        self._halt.request()
        self._group.abort()  # releases the main thread from a collective, in-process
        if not self._halt.wait_for_own_save(deadlines.left_s) or not self._checkpoints.is_open:
            return (
                True  # an exception ended the script, and the main thread has saved what it could
            )
        is_stopped = self._wait_for_stop(deadlines)
        if self._is_settled:
            limit.cancel()
            if not self._leaves_in_process:  # the main thread ends the process
                self._wait(deadlines.until_s, lambda: False)
            return False
        if not is_stopped:
            self._report_lost(self._why_not_stopped())
            limit.cancel()
            return False
        self._save_stopped(deadlines)
        self._hooks.leave_world("fault")  # writes the values logged for the saved steps
        limit.cancel()
        return True

    def _save_stopped(self, deadlines: _Deadlines) -> None:
        place = self._halt.place
        active = self._session.strategy
        if place is not Place.BOUNDARY and not active.roll_back(is_stopped=place is not None):
            self._report_lost("this rank was in the middle of an update")
        elif not self._checkpoints.flush(self._job, deadlines.left_s, Peers.ARE_GONE):
            self._report_lost("the last save did not end in time")
        self._checkpoints.close(0.0)

    def _has_state(self) -> bool:
        """Whether this process holds the state. If it did before, reports that it is lost."""
        if self._lifecycle.is_restored:
            return True
        if self._job.progress.step > self._checkpoints.committed_step:
            self._report_lost("the script registers its objects again")
        return False

    @property
    def _needs_all_ranks(self) -> bool:
        has_shards = self._job.is_sharded or self._job.is_rebuilt
        return has_shards and self._checkpoints.writers.world_size > 1

    @property
    def _is_settled(self) -> bool:
        """Whether the main thread saves, or has saved, by itself at a boundary."""
        if self._halt.has_left:
            return True
        return self._leaves_in_process and not self._is_main_thread_late

    @property
    def _leaves_in_process(self) -> bool:
        return self._worlds is not None and self._worlds.is_job_left

    @property
    def _is_waiting_for_world(self) -> bool:
        return self._worlds is not None and self._worlds.is_waiting and not self._worlds.has_newer

    def _wait_for_stop(self, deadlines: _Deadlines) -> bool:
        """Wait until the main thread has stopped; interrupt it once a boundary is overdue."""
        next_interrupt_s = deadlines.interrupt_s
        while (now_s := SYSTEM_CLOCK.monotonic()) < deadlines.until_s:
            if self._is_waiting_for_world or self._halt.place is not None:
                return True
            if self._is_settled:
                return False
            if now_s >= next_interrupt_s and is_handled():
                self._halt.interrupt(self.may_stop_here)
                next_interrupt_s = now_s + PREEMPTION_ASK_AGAIN_S
            if self._halt.unanswered_s >= NATIVE_CODE_S and self.may_stop_here():
                # The main thread runs a function that is not Python (a kernel, a library), and
                # executes the pending signal handler before any other instruction.
                self._halt.freeze()
            SYSTEM_CLOCK.sleep(PREEMPTION_SLICE_S)
        return False

    def may_stop_here(self) -> bool:
        """Whether the state can be restored to the last commit. Called on the main thread, in the
        middle of the script."""
        if self._lifecycle.is_changing or self._current.is_committing:
            return False
        # An evaluation of averaged weights may have exchanged them in a way that torch does not
        # count; training does not.
        return self._progress.rollback.can_restore_surely(by_content=self._may_be_evaluating)

    @property
    def _may_be_evaluating(self) -> bool:
        modules = self._job.modules.values()
        return not torch.is_grad_enabled() or any(not m.module.training for m in modules)

    def _why_not_stopped(self) -> str:
        if self._current.is_committing:
            return "this rank was in the middle of a commit"
        if not self._progress.rollback.can_restore:
            return "this rank did not reach a step boundary, and its weights have changed since"
        return "this rank did not reach a step boundary, and its weights may have changed since"

    def _give_up(self) -> None:
        """The saving thread hangs, for example in a lock that the main thread held when it was
        stopped."""
        with contextlib.suppress(OSError):  # a pipe that nobody reads must not keep the process
            os.write(2, f"elastic: {self._lost('the last save hangs')}\n".encode())
        os._exit(EXIT_CODE)

    def _lost(self, why: str) -> str:
        step, saved = self._job.progress.step, self._checkpoints.committed_step
        if step <= saved:
            return why
        unless = (
            ", unless another rank saves them" if self._checkpoints.writers.world_size > 1 else ""
        )
        return f"{why}: {step - saved} steps since the checkpoint of step {saved} are lost{unless}"

    def _report_lost(self, why: str) -> None:
        step = self._job.progress.step
        self._journal.emit(
            CheckpointSkipped(name=f"step {step}", reason=self._lost(why)), level=logging.WARNING
        )

    def _wait(self, until_s: float, is_over: Callable[[], bool]) -> None:
        while SYSTEM_CLOCK.monotonic() < until_s and not is_over():
            SYSTEM_CLOCK.sleep(PREEMPTION_SLICE_S)


class _Deadlines:
    """When the main thread is interrupted, and when the last save must have ended."""

    def __init__(self, budget_s: float) -> None:
        began_s = SYSTEM_CLOCK.monotonic()
        # To reach a step boundary, or to detect that peers are gone. Without the dead rank the
        # current step cannot be completed in any case.
        self.interrupt_s = began_s + min(BOUNDARY_S, budget_s / 2)
        self.until_s = began_s + budget_s

    @property
    def left_s(self) -> float:
        return max(0.0, self.until_s - SYSTEM_CLOCK.monotonic())

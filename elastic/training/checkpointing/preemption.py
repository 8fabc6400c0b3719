"""SIGTERM to a worker: its state is saved before the process goes, unless somebody else holds it.

Two cases. Nobody will start the process again: all ranks save together at the next boundary, which
they hear of with the gradients of the step in between; or where the main thread waits for a world
that will not come. Or torchrun ends it to start all workers of the node anew, since one of them
has died or the world has changed: then ranks of this world are gone, and one of those that are
left writes everything.
"""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING

from elastic.clock import SYSTEM_CLOCK
from elastic.events import CheckpointSkipped
from elastic.training.between_steps import LEAVING_S
from elastic.training.checkpointing.halt import Place
from elastic.training.checkpointing.last_save import LastSave
from elastic.worker.sigterm import (
    ENDING_FILE,
    EXIT_CODE,
    ask_agent_on_sigterm,
    end_on_sigterm,
    ends_for_good,
)
from elastic.world.world import is_launched

if TYPE_CHECKING:
    from elastic.training.session import Session

# torchrun kills what has not ended 30 s after its SIGTERM (PContext.close, torch 2.11 to 2.15).
BEFORE_RESTART_S = min(LEAVING_S, 24.0)
# So long the main thread may take to a boundary, or to notice that peers are gone; then it is
# interrupted. Without the dead rank the current step cannot be completed anyway.
BOUNDARY_S = 4.0
_LIMIT_S = 2.0  # beyond the budget: the interrupted main thread may never release a lock
_SLICE_S = 0.02
_ASK_AGAIN_S = 0.1


class Preemption:
    """Owned by the session. The handler is installed once, when the run is made."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._halt = session.between.halt
        self._is_told = threading.Lock()

    def install(self) -> None:
        """Take SIGTERM over.

        Only an agent of ours says what it means. Without any launcher it is for good. Any other
        one sends it alike to end a job, and to start all its workers anew.
        """
        worlds, is_own = self._session.worlds, self._halt.on_signal
        if worlds is not None:
            ask_agent_on_sigterm(worlds, self._last_words, is_own)
        elif os.environ.get(ENDING_FILE):
            end_on_sigterm(self._last_words, ends_for_good, is_own)
        elif self._session.saver.is_on:
            end_on_sigterm(self._last_words, lambda: not is_launched(), is_own)

    def _last_words(self, is_for_good: bool) -> None:
        """On the signal's thread; the process ends when it returns, or before at a boundary."""
        session = self._session
        if session.saver.due is None or not session.is_restored:
            return
        if session.worlds is not None and session.worlds.has_left:
            return  # in order: what there was to save was saved before
        if is_for_good:
            self._save_for_good()
        elif not self._is_held_elsewhere():
            with self._is_told:  # a second signal waits: the first one's thread ends the process
                self._save_before_restart()
                os._exit(EXIT_CODE)

    # -- nobody starts it again ---------------------------------------------------------------

    def _save_for_good(self) -> None:
        session = self._session
        session.between.is_preempted = True
        until_s = SYSTEM_CLOCK.monotonic() + LEAVING_S
        while SYSTEM_CLOCK.monotonic() < until_s:
            if session.worlds is not None and session.worlds.is_waiting:
                self._save_where_it_waits(LEAVING_S)
                return
            SYSTEM_CLOCK.sleep(_SLICE_S)

    def _save_where_it_waits(self, budget_s: float) -> None:
        """The main thread waits for the next world, which is none of this process."""
        session = self._session
        tag = session.recovery.tag
        if tag is None or tag.stepped:
            self._say_skipped("this rank was in the middle of an update")
            return
        LastSave(session.saver, session.job, budget_s).alone()
        session.saver.close(0.0)

    # -- torchrun starts it again -------------------------------------------------------------

    def _is_held_elsewhere(self) -> bool:
        """Whether nodes of the newest world go on with the state, without a restart."""
        session = self._session
        return session.is_in_process and session.worlds is not None and session.worlds.nodes > 1

    def _save_before_restart(self) -> None:
        session, began_s = self._session, SYSTEM_CLOCK.monotonic()
        until_s = began_s + BEFORE_RESTART_S
        limit = threading.Timer(BEFORE_RESTART_S + _LIMIT_S, os._exit, (EXIT_CODE,))
        limit.name, limit.daemon = "elastic-sigterm-limit", True
        limit.start()
        self._halt.request()
        session.group.abort()  # releases the main thread from a collective, in-process
        if not self._halt.wait_for_own_save(BEFORE_RESTART_S) or session.saver.due is None:
            return  # an exception ends the process, and it has saved what could be saved
        if not self._wait_for_rest(began_s + min(BOUNDARY_S, BEFORE_RESTART_S / 2), until_s):
            self._say_skipped("no boundary of a step was reached in time")
            return
        left_s = max(0.0, until_s - SYSTEM_CLOCK.monotonic())
        if self._halt.place is Place.BOUNDARY:
            LastSave(session.saver, session.job, left_s).alone()
        elif session.is_in_process:
            if self._halt.place is not None:
                session.changes.interrupt()
            self._save_where_it_waits(left_s)
        elif session.between.put_back():
            LastSave(session.saver, session.job, left_s).alone()
        else:
            self._say_skipped("this rank was in the middle of an update")

    def _wait_for_rest(self, interrupt_s: float, until_s: float) -> bool:
        """Until the main thread stands still; from ``interrupt_s`` on it is interrupted."""
        session, ask_s = self._session, interrupt_s
        while (now_s := SYSTEM_CLOCK.monotonic()) < until_s:
            is_waiting = session.worlds is not None and session.worlds.is_waiting
            if is_waiting or self._halt.place is not None:
                return True
            if now_s >= ask_s:
                self._halt.interrupt(self._may_stop_here)
                ask_s = now_s + _ASK_AGAIN_S
            SYSTEM_CLOCK.sleep(_SLICE_S)
        return False

    def _may_stop_here(self) -> bool:
        """On the main thread, in the middle of the script: whether the state can be that of the
        last commit again."""
        session = self._session
        step = session.step
        if (
            session.changes.is_recovering
            or session.guard.is_torn
            or session.commits.has_partial_updates
        ):
            return False
        if step is None:  # between two steps; restart mode has no snapshot of the last commit
            return session.is_in_process
        return not step.optimizer_stepped

    def _say_skipped(self, why: str) -> None:
        step = self._session.job.progress.step
        self._session.journal.emit(CheckpointSkipped(name=f"step {step}", reason=why))

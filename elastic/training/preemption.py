"""SIGTERM to a process that nobody will start again: its state is saved before it goes.

At the next boundary, together with all ranks, which hear of it with the gradients of the step in
between; or where the main thread waits for a world that will not come.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from elastic.clock import SYSTEM_CLOCK
from elastic.training.between_steps import LEAVING_S
from elastic.training.last_save import LastSave
from elastic.worker.sigterm import (
    ENDING_FILE,
    ask_agent_on_sigterm,
    end_on_sigterm,
    ends_for_good,
)
from elastic.worker.world import is_launched

if TYPE_CHECKING:
    from elastic.training.session import Session

_SLICE_S = 0.02


class Preemption:
    """Owned by the session. The handler is installed once, when the run is made."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def install(self) -> None:
        """Take SIGTERM over where this process can know what it means.

        That is so under an agent of ours, and without any launcher. Other launchers send it for
        every restart, in which nothing may be waited for.
        """
        worlds = self._session.worlds
        if worlds is not None:
            ask_agent_on_sigterm(worlds, self._last_words)
        elif os.environ.get(ENDING_FILE):
            end_on_sigterm(self._last_words, ends_for_good)
        elif not is_launched() and self._session.saver.is_on:
            end_on_sigterm(self._last_words, lambda: True)

    def _last_words(self) -> None:
        """On the signal's thread; the process ends when it returns, or before at a boundary."""
        session = self._session
        if session.saver.due is None or not session.is_restored:
            return
        if session.worlds is not None and session.worlds.has_left:
            return  # in order: what there was to save was saved before
        session.between.is_preempted = True
        until_s = SYSTEM_CLOCK.monotonic() + LEAVING_S
        while SYSTEM_CLOCK.monotonic() < until_s:
            if session.worlds is not None and session.worlds.is_waiting:
                self._save_where_it_waits()
                return
            SYSTEM_CLOCK.sleep(_SLICE_S)

    def _save_where_it_waits(self) -> None:
        """The main thread waits for the next world, and the job is over: there is none."""
        session = self._session
        tag = session.recovery.tag
        if tag is not None and not tag.stepped:
            LastSave(session.saver, session.job, LEAVING_S).alone()
            session.saver.close(0.0)

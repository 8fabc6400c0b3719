"""Selects the active recovery strategy."""

from __future__ import annotations

from elastic.process_group import ProcessGroup
from elastic.training.recovery.in_process import InProcess
from elastic.training.recovery.restart import Restart
from elastic.training.recovery.strategy import RecoveryStrategy


class Strategies:
    """Holds the active strategy. Without ``in_process`` it is always ``restart``."""

    def __init__(self, restart: Restart, in_process: InProcess | None, group: ProcessGroup) -> None:
        self._restart = restart
        self._in_process = in_process
        self._group = group
        self.active: RecoveryStrategy = restart

    def begin_retry(self) -> None:
        """Recover in process from now on, if possible. Called by run.retry, before the state is
        restored."""
        if self._in_process is None:
            return
        if self._group.is_foreign:
            self._restart.warn_of_foreign_group()
        else:
            self.active = self._in_process

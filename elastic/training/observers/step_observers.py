"""Notifies passive observers of steps and worlds: accounting, metrics, progress, traces."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Protocol

from elastic.clock import SYSTEM_CLOCK, Clock
from elastic.telemetry.journal import EventSink
from elastic.telemetry.ledger import Ledger
from elastic.training.step_account import StepAccount
from elastic.tuning.worker_intervals import STEP_SUMS_S
from elastic.world.world import World


class StepObserver(Protocol):
    """The interface of observers. Called by the main thread; must not fail or take long."""

    SEES_EACH_STEP: ClassVar[bool]
    """Whether :meth:`committed` is called after each step, or only after a world's first and last
    step and every STEP_SUMS_S in between."""

    def begin_world(self, world: World, step: int) -> None:
        """Begin or continue training in a world, after ``step`` steps."""

    def committed(self, step: int) -> None:
        """Record that ``step`` steps are committed."""

    def end_world(self, ended: str) -> None:
        """End the world, or the process. ``ended``: "fault", "change" or "close"."""

    def pause(self) -> None:
        """Begin a paused world, in which nothing is trained."""

    def close(self) -> None:
        """End the process, after :meth:`end_world`."""


class StepObservers:
    """All observers of a process. The time account is notified first."""

    def __init__(
        self, account: StepAccount, *others: StepObserver, clock: Clock = SYSTEM_CLOCK
    ) -> None:
        self._account = account
        self._others = others
        self._rare = tuple(other for other in others if not other.SEES_EACH_STEP)
        self._each = tuple(other for other in others if other.SEES_EACH_STEP)
        self._now_s = clock.monotonic
        self._step = self._notified_step = 0
        self._due_s = float(
            "-inf"
        )  # when the observers that do not see each step are notified next

    def begin_world(self, world: World, step: int) -> None:
        """See :class:`StepObserver`; the same applies to the other methods."""
        self._step = self._notified_step = step
        self._due_s = float("-inf")
        self._account.begin_world(world.generation, step)
        for other in self._others:
            other.begin_world(world, step)

    def committed(self, step: int) -> None:
        self._step = step
        now_s = self._now_s()
        if now_s >= self._due_s:
            self._due_s = now_s + STEP_SUMS_S
            self._notify()
        for other in self._each:
            other.committed(step)

    def _notify(self) -> None:
        self._notified_step = self._step
        self._account.committed(self._step)
        for other in self._rare:
            other.committed(self._step)

    def _catch_up(self) -> None:
        if self._notified_step != self._step:
            self._notify()

    def end_world(self, ended: str) -> None:
        self._catch_up()
        self._account.end_world(ended)
        for other in self._others:
            other.end_world(ended)

    def pause(self) -> None:
        self._catch_up()
        self._account.pause()
        for other in self._others:
            other.pause()

    def close(self) -> None:
        for other in self._others:
            other.close()


@dataclass(frozen=True, slots=True)
class Recorders:
    """The components that record what a process does."""

    ledger: Ledger  # the samples of each step
    journal: EventSink  # events
    observers: StepObservers  # of steps and worlds

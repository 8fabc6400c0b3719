"""SIGTERM to an agent: its node leaves the job, in order wherever there is an order to keep.

Torch's own handler would raise in whatever the main thread is doing, and torchrun would exit
with 1 even if the workers end well. What is right depends on what the main thread does; it says
so in :attr:`Leaving.phase`, and the handler acts on it.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from enum import Enum
from types import FrameType
from typing import NoReturn, Protocol

from elastic.clock import SYSTEM_CLOCK, Clock
from elastic.errors import Preempted
from elastic.telemetry.log import get_logger


def told_to_leave() -> BaseException:
    """What torchrun ends with: its exit code says that nothing has failed."""
    return SystemExit(Preempted.exit_code)


def leave_at_once_on_sigterm(end: Callable[[], BaseException] = told_to_leave) -> None:
    """For an agent that has nothing yet: no node, no workers."""

    def leave_at_once(signum: int, frame: FrameType | None) -> NoReturn:
        raise end()

    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, leave_at_once)


class LauncherPhase(Enum):
    """What torchrun's main thread does."""

    WAITING = "waiting"  # for a world: no workers run
    STARTING = "starting"  # torch starts workers; who interrupts that leaves some nobody knows of
    RUNNING = "running"  # workers run
    FINISHING = "finishing"  # they have ended well, other nodes' have not
    CLOSING = "closing"  # the agent ends anyway
    PARKED = "parked"  # the job is over, the agent stays


class LeavingNode(Protocol):
    """What is asked of the node's service."""

    @property
    def can_leave_in_order(self) -> bool: ...

    @property
    def has_left(self) -> bool: ...

    def leave(self, reason: str) -> None: ...

    def expect_end_of_workers(self) -> None: ...


class Leaving:
    """The agent's handler of SIGTERM. Made once; the first signal counts, later ones do not.

    ``end`` makes what it raises: torchrun's SystemExit, or what a program expects.
    """

    def __init__(
        self,
        node: LeavingNode,
        grace_s: float,
        kill_workers: Callable[[], object],
        clock: Clock = SYSTEM_CLOCK,
        *,
        claim_signal: Callable[[str], object],
        tell_workers: Callable[[], object] = lambda: None,
        end: Callable[[], BaseException] = told_to_leave,
    ) -> None:
        self.phase = LauncherPhase.WAITING
        self.told = False
        self._end = end
        self._has_raised = False
        self._node = node
        self._grace_s = grace_s
        self._kill_workers = kill_workers
        self._claim_signal = claim_signal  # torchrun installs no handler of its own for it
        self._tell_workers = tell_workers  # that torchrun's SIGTERM is for good
        self._clock = clock
        self._has_left_job = False
        self._in_order = False
        self._by_s = 0.0

    def install(self) -> None:
        """Keep SIGTERM ours. Called with every poll, for torch versions that install their own
        handler with each start of workers. (Signals belong to the main thread.)"""
        if threading.current_thread() is not threading.main_thread():
            return
        self._claim_signal("SIGTERM")
        if signal.getsignal(signal.SIGTERM) != self:
            signal.signal(signal.SIGTERM, self)

    def __call__(self, signum: int, frame: FrameType | None) -> None:
        """SIGTERM. Raises :meth:`end` where the main thread can simply stop."""
        if self.told:
            return
        self.told = True
        if self.phase in (LauncherPhase.CLOSING, LauncherPhase.PARKED):
            return
        if (
            self.phase is LauncherPhase.FINISHING
        ):  # nothing is taken back: the others count it as finished
            raise self.end()
        if self.phase is not LauncherPhase.STARTING:  # else the next poll leaves
            self._leave()

    def _leave(self) -> None:
        self._has_left_job = True
        self._in_order = self.phase is LauncherPhase.RUNNING and self._node.can_leave_in_order
        self._node.leave("SIGTERM")
        if not self._in_order:
            self._stop()
        # The workers leave at a step's boundary; torchrun's next poll sees that they have.
        self._by_s = self._clock.monotonic() + self._grace_s

    def end(self) -> BaseException:
        """What this launch ends with, now that its node was asked to leave."""
        self._has_raised = True
        return self._end()

    @property
    def was_kept_from_launcher(self) -> bool:
        """Told, and the launch ends as if it had not been: it was over, or its workers failed."""
        return self.told and not self._has_raised

    def end_if_left(self) -> None:
        """Raise :meth:`end` once the workers have left, or their time is up."""
        if not self._has_left_job:  # the signal came while torch started the workers
            self._leave()
        if self._in_order and not self._node.has_left:
            if self._clock.monotonic() <= self._by_s:
                return
            get_logger().warning(
                "the workers have not reached a step's boundary within leave_grace_s=%g: they "
                "are killed. If steps take that long, raise it (a pod's follows from its "
                "terminationGracePeriodSeconds)",
                self._grace_s,
            )
            # Now: torchrun would wait for stuck ones as long again, and the kubelet will not.
            self._node.expect_end_of_workers()
            self._kill_workers()
        self._stop()

    def _stop(self) -> NoReturn:
        # First: workers that torchrun's SIGTERM reaches ask whether to leave at a boundary.
        self._node.expect_end_of_workers()
        self._tell_workers()
        raise self.end()

"""SIGTERM to an agent: its node leaves the job, gracefully where possible.

Torch's own handler would raise an exception anywhere in the main thread, and torchrun would exit
with 1 even if the workers succeed. The right action depends on what the main thread is doing, which
it records in :attr:`Leaving.phase` for the handler.
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


def preemption_exit() -> BaseException:
    """The exception that ends torchrun with an exit code that does not indicate a failure."""
    return SystemExit(Preempted.exit_code)


def leave_at_once_on_sigterm(end: Callable[[], BaseException] = preemption_exit) -> None:
    """Install a handler for an agent that has neither a node nor workers yet."""

    def leave_at_once(signum: int, frame: FrameType | None) -> NoReturn:
        raise end()

    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, leave_at_once)


class LauncherPhase(Enum):
    """What torchrun's main thread is doing."""

    WAITING = "waiting"  # waits for a world: no workers run
    STARTING = "starting"  # torch starts workers; interrupted, it would leave some unsupervised
    RUNNING = "running"  # workers run
    FINISHING = "finishing"  # they have succeeded, those of other nodes have not yet
    CLOSING = "closing"  # the agent ends in any case
    PARKED = "parked"  # the job has ended, the agent keeps running


class LeavingNode(Protocol):
    """The operations on the node's service."""

    @property
    def can_leave_gracefully(self) -> bool: ...

    @property
    def has_left(self) -> bool: ...

    def leave(self, reason: str) -> None: ...

    def expect_end_of_workers(self) -> None: ...


class Leaving:
    """The agent's handler of SIGTERM. Created once; only the first signal has an effect.

    ``end`` creates the exception to raise: torchrun's SystemExit, or one that a program expects.
    """

    def __init__(
        self,
        node: LeavingNode,
        grace_s: float,
        kill_workers: Callable[[], object],
        clock: Clock = SYSTEM_CLOCK,
        *,
        claim_signal: Callable[[str], object],
        notify_workers: Callable[[], object] = lambda: None,
        end: Callable[[], BaseException] = preemption_exit,
    ) -> None:
        self.phase = LauncherPhase.WAITING
        self.is_requested = False
        self._end = end
        self._has_raised = False
        self._node = node
        self._grace_s = grace_s
        self._kill_workers = kill_workers
        self._claim_signal = claim_signal  # torchrun installs no handler for it
        self._notify_workers = notify_workers  # that torchrun's SIGTERM is final
        self._clock = clock
        self._has_left_job = False
        self._in_order = False
        self._by_s = 0.0

    def install(self) -> None:
        """Keep our handler of SIGTERM installed. Called with every poll, for torch versions that
        install their own with each start of workers. (Signals belong to the main thread.)"""
        if threading.current_thread() is not threading.main_thread():
            return
        self._claim_signal("SIGTERM")
        if signal.getsignal(signal.SIGTERM) != self:
            signal.signal(signal.SIGTERM, self)

    def __call__(self, signum: int, frame: FrameType | None) -> None:
        """Handle SIGTERM. Raises :meth:`end` if the main thread can simply stop."""
        if self.is_requested:
            return
        self.is_requested = True
        if self.phase in (LauncherPhase.CLOSING, LauncherPhase.PARKED):
            return
        if self.phase is LauncherPhase.FINISHING:  # no effect: the others count it as finished
            raise self.end()
        if self.phase is not LauncherPhase.STARTING:  # otherwise the next poll leaves
            self._leave()

    def _leave(self) -> None:
        self._has_left_job = True
        self._in_order = self.phase is LauncherPhase.RUNNING and self._node.can_leave_gracefully
        self._node.leave("SIGTERM")
        if not self._in_order:
            self._stop()
        # The workers leave at a step boundary; torchrun's next poll detects that they have.
        self._by_s = self._clock.monotonic() + self._grace_s

    def end(self) -> BaseException:
        """The exception that ends this launch, now that its node was asked to leave."""
        self._has_raised = True
        return self._end()

    @property
    def was_kept_from_launcher(self) -> bool:
        """Whether SIGTERM arrived but did not end the launch, whose workers had ended or failed."""
        return self.is_requested and not self._has_raised

    def end_if_left(self) -> None:
        """Raise :meth:`end` once the workers have left, or their time has expired."""
        if not self._has_left_job:  # the signal arrived while torch started the workers
            self._leave()
        if self._in_order and not self._node.has_left:
            if self._clock.monotonic() <= self._by_s:
                return
            get_logger().warning(
                "the workers have not reached a step boundary within leave_grace_s=%g, so they "
                "are killed. If steps take that long, raise it (in a pod it is derived from "
                "terminationGracePeriodSeconds)",
                self._grace_s,
            )
            # Now: torchrun would wait as long again for stuck ones, but the kubelet does not.
            self._node.expect_end_of_workers()
            self._kill_workers()
        self._stop()

    def _stop(self) -> NoReturn:
        # First: workers that receive torchrun's SIGTERM ask whether to leave at a boundary.
        self._node.expect_end_of_workers()
        self._notify_workers()
        raise self.end()

"""How an agent ends: with its job, by leaving, or by parking."""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable
from enum import Enum
from types import FrameType
from typing import NoReturn, Protocol

from elastic.agent import accounting
from elastic.agent.node import NodeContext, NodeStatus
from elastic.errors import SYSTEM_CLOCK, Clock, Preempted
from elastic.hangs.report import ReportFolder
from elastic.membership.records import Done, NodeState, WorldRecord, decode
from elastic.telemetry.events import FailureTimelineWritten, JobEnded, NodeParked
from elastic.telemetry.journal import EventSink
from elastic.telemetry.log import get_logger
from elastic.telemetry.runs import chosen_journal
from elastic.tuning.intervals import (
    ANNOUNCE_S,
    MAIN_THREAD_SLICE_S,
)

# The workers of a leaving node are asked to leave without a world if none is announced within this:
# the share of leave_grace_s before the last save. If the store is known to fail, after ANNOUNCE_S.
UNANNOUNCED_S = 4.0

# ----------------------------------------------------------------------------
# The node's actions when the job has ended: the journal, and the failure timeline.


def record_end(context: NodeContext, done: Done) -> None:
    """The job has ended with ``done``. Only the first call has an effect."""
    status = context.status
    if status.done is None and accounting.is_wanted(done):
        _write_timeline(context, done)
    if status.set_done(done):
        context.journal.emit(
            JobEnded(outcome=done.outcome.value, reason=done.reason, exit_code=done.exit_code)
        )


def read_end(context: NodeContext) -> None:
    """Read from the store whether the job has ended.

    A new leader calls this once per term. Its watch may deliver the end of the old leader's key
    before the end of the job, and a leader that has left gracefully is not lost.
    """
    entry = context.store.get(context.keys.done)
    if entry is not None:
        record_end(context, decode(Done, entry.key, entry.value))


def _write_timeline(context: NodeContext, done: Done) -> None:
    """Called before the main thread receives the end, whose error contains the page."""
    keys = context.keys
    page = accounting.render(done, keys)
    folder = chosen_journal()
    name = f"failure-timeline-{context.status.node.name}"
    path, problem = ReportFolder(folder).write_page(name, page)
    place = f"(this page is {path})" if path else f"({problem})"
    context.status.timeline = f"{page}\n{place}"
    event = FailureTimelineWritten(timeline=page, report=path, problem=problem)
    context.journal.emit(event, level=logging.WARNING if problem else logging.DEBUG)


# ----------------------------------------------------------------------------
# A signal that ends an agent: its node leaves the job, gracefully where possible.
#
# Torch's own handler would raise an exception anywhere in the main thread, and torchrun would exit
# with 1 even if the workers succeed. The right action depends on what the main thread is doing,
# which it records in :attr:`Leaving.phase` for the handler. It is the same for every signal on
# which torch closes (``--signals-to-handle``): SIGTERM, Ctrl-C, the end of a terminal.

INTERRUPTED_EXIT_CODE = 128 + signal.SIGINT

SignalHandler = Callable[[int, FrameType | None], object]


def preemption_exit(signum: int) -> BaseException:
    """The exception that ends torchrun with an exit code that does not indicate a failure."""
    interrupted = signum == signal.SIGINT
    return SystemExit(INTERRUPTED_EXIT_CODE if interrupted else Preempted.exit_code)


def leave_at_once(end: Callable[[int], BaseException] = preemption_exit) -> SignalHandler:
    """The handler of an agent that has neither a node nor workers yet."""

    def raise_end(signum: int, frame: FrameType | None) -> NoReturn:
        raise end(signum)

    return raise_end


class UnannouncedLeave:
    """Asks the workers of a leaving node to leave if no world without it is announced to them, as
    the leader cannot write one to an etcd that is unreachable or full. Called on every iteration
    of the node's thread."""

    def __init__(
        self,
        context: NodeContext,
        announced: Callable[[], WorldRecord | None],
        ask_to_leave: Callable[[str], object],
        store_fails: Callable[[], bool],
    ) -> None:
        self._context = context
        self._announced = announced
        self._ask_to_leave = ask_to_leave
        self._store_fails = store_fails
        self._since_s: float | None = None

    def check(self) -> None:
        node, now_s = self._context.status.node, self._context.clock.monotonic()
        if node.state is not NodeState.LEAVING or not node.in_process or node.running is None:
            self._since_s = None
            return
        self._since_s = now_s if self._since_s is None else self._since_s
        world = self._announced()
        if world is None or node.node_id not in world.node_ids:
            return
        wait_s = ANNOUNCE_S if self._store_fails() else UNANNOUNCED_S
        if now_s - self._since_s >= min(wait_s, self._context.options.leave_grace_s / 2):
            self._ask_to_leave("this node leaves, and no world without it was announced")


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
    """The agent's handler of the signals that end it. Created once; only the first signal has an
    effect.

    ``end`` creates the exception to raise: torchrun's SystemExit, or one that a program expects.
    """

    def __init__(
        self,
        node: LeavingNode,
        grace_s: float,
        kill_workers: Callable[[], object],
        clock: Clock = SYSTEM_CLOCK,
        *,
        handle_signals: Callable[[SignalHandler], object],
        notify_workers: Callable[[], object] = lambda: None,
        end: Callable[[int], BaseException] = preemption_exit,
    ) -> None:
        self.phase = LauncherPhase.WAITING
        self.signum: int | None = None  # of the first signal
        self._end = end
        self._has_raised = False
        self._node = node
        self._grace_s = grace_s
        self._kill_workers = kill_workers
        self._handle_signals = handle_signals
        self._notify_workers = notify_workers  # that torchrun's SIGTERM is final
        self._clock = clock
        self._has_left_job = False
        self._in_order = False
        self._by_s = 0.0

    @property
    def is_requested(self) -> bool:
        """Whether a signal has arrived."""
        return self.signum is not None

    def request(self) -> None:
        """Leave as for SIGTERM, with the main thread's next poll: `elastic stop`."""
        self.signum = self.signum or signal.SIGTERM

    def install(self) -> None:
        """Keep this handler installed. Called with every poll, for a library in a program that
        installs its own."""
        self._handle_signals(self)

    def __call__(self, signum: int, frame: FrameType | None) -> None:
        """Handle a signal. Raises :meth:`end` if the main thread can simply stop."""
        if self.signum is not None:
            return
        self.signum = signum
        if self.phase in (LauncherPhase.CLOSING, LauncherPhase.PARKED):
            return
        if self.phase is LauncherPhase.FINISHING:  # no effect: the others count it as finished
            raise self.end()
        if self.phase is not LauncherPhase.STARTING:  # otherwise the next poll leaves
            self._leave()

    def _leave(self) -> None:
        self._has_left_job = True
        self._in_order = self.phase is LauncherPhase.RUNNING and self._node.can_leave_gracefully
        assert self.signum is not None
        self._node.leave(signal.Signals(self.signum).name)
        if not self._in_order:
            self._stop()
        # The workers leave at a step boundary; torchrun's next poll detects that they have.
        self._by_s = self._clock.monotonic() + self._grace_s

    def end(self) -> BaseException:
        """The exception that ends this launch, now that its node was asked to leave."""
        assert self.signum is not None
        self._has_raised = True
        return self._end(self.signum)

    @property
    def was_kept_from_launcher(self) -> bool:
        """Whether a signal did not end the launch, because its workers had ended or failed."""
        return self.is_requested and not self._has_raised

    def end_if_left(self) -> None:
        """Raise :meth:`end` once the workers have left, or their time has expired."""
        if not self._has_left_job:  # the signal arrived while torch started the workers
            self._leave()
        # (In WAITING, torch's agent has found that they have ended by themselves.)
        is_running = self.phase is not LauncherPhase.WAITING
        if self._in_order and is_running and not self._node.has_left:
            if self._clock.monotonic() <= self._by_s:
                return
            get_logger().warning(
                "the workers have not left within %g s of the signal, so they are killed. If steps "
                "or saves take that long, raise termination_grace_s (in a pod, "
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


# ----------------------------------------------------------------------------
# Parking: an agent whose job has ended keeps running, without workers, until SIGTERM.
#
# If the launcher restarts every process that ends, as a StatefulSet does regardless of the exit
# code, a finished agent must not end: it would be restarted endlessly. It releases everything but
# its process, reports the job's outcome (log, ``/readyz``) and waits until it is scaled down
# (docs/decisions/0012).


def park(
    status: NodeStatus,
    done: Done,
    leaving: Leaving,
    journal: EventSink,
    clock: Clock = SYSTEM_CLOCK,
) -> None:
    """Block until SIGTERM. On torchrun's main thread, with the node's service closed."""
    leaving.phase = LauncherPhase.PARKED
    status.parked = True
    journal.emit(
        NodeParked(outcome=done.outcome.value, exit_code=done.exit_code, reason=done.reason)
    )
    while not leaving.is_requested:
        status.watchdog.heartbeat()
        clock.sleep(MAIN_THREAD_SLICE_S)

"""Parking: an agent whose job has ended keeps running, without workers, until SIGTERM.

If the launcher restarts every process that ends, as a StatefulSet does regardless of the exit code,
a finished agent must not end: it would be restarted endlessly. It releases everything but its
process, reports the job's outcome (log, ``/readyz``) and waits until it is scaled down
(docs/decisions/0012).
"""

from __future__ import annotations

from elastic.agent.ending.leaving import LauncherPhase, Leaving
from elastic.clock import SYSTEM_CLOCK, Clock
from elastic.events import NodeParked
from elastic.membership.records import Done
from elastic.node.status import NodeStatus
from elastic.telemetry.journal import EventSink
from elastic.tuning.agent_intervals import MAIN_THREAD_SLICE_S


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

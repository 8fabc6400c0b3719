"""Parking: an agent whose job is over stays, without workers, until SIGTERM.

Where the launcher starts every process that ends anew, as a StatefulSet does whatever its exit
code, a finished agent must not end: it would be started again forever. It gives everything
back but its process, says what became of the job (log, ``/readyz``) and waits to be scaled away
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
    while not leaving.told:
        status.watchdog.heartbeat()
        clock.sleep(MAIN_THREAD_SLICE_S)
